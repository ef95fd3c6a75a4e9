"""A real model on hardware that is not here: what its layers would take, from operations and bytes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.profile.analytic import get_hardware
from penstock.profile.measure import measure_costs
from penstock.profile.timing import LAUNCH

H100 = get_hardware("h100")


def test_products_take_their_time_in_each_of_f_i_and_w() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)).to(torch.bfloat16)
    x = torch.randn(1024, 1024, dtype=torch.bfloat16)
    (costs,) = measure_costs(model, x, hardware="h100", sizes=[1024]).sizes
    product = H100.compute(2 * 1024 * 1024 * 2048)
    first, second = costs.layers
    assert first.forward == pytest.approx(product, rel=1e-3)
    assert first.input_gradient == 0  # nothing comes before it
    assert second.forward == pytest.approx(product, rel=1e-3)
    assert second.input_gradient == pytest.approx(product, rel=1e-3)
    assert product < second.weight_gradient < 1.5 * product + 5 * LAUNCH  # and the sum of gradients, and the bias
    assert second.recompute == pytest.approx(product, rel=1e-3)
    assert costs.device == "h100"


def test_what_has_no_products_takes_as_long_as_its_bytes() -> None:
    x = torch.randn(1024, 8192)
    (costs,) = measure_costs(nn.Sequential(nn.Tanh(), nn.Flatten()), x, hardware=H100, sizes=[1024]).sizes
    assert costs.layers[0].forward == pytest.approx(H100.move(2 * x.numel() * 4), rel=1e-3)
    assert costs.layers[1].forward == 0  # a view


def test_attention_is_counted_on_a_cpu_too() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(1, 512, 3, 8, 64).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*heads).flatten(1)

    model = nn.Sequential(nn.Linear(64, 3 * 8 * 64), nn.Flatten(), Attention())
    (costs,) = measure_costs(model, torch.randn(1, 512, 64), hardware="v100").sizes
    forward = get_hardware("v100").compute(4 * 8 * 512 * 512 * 64)
    assert costs.layers[2].forward >= forward


def test_the_model_is_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    measure_costs(model, torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), hardware="h100")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_plan_for_it_has_its_memory_and_its_links_and_runs_here() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    planned = ps.plan(model, x, devices=3, batch=8, hardware="h100", seconds=0.2)
    assert planned.devices is None
    assert planned.best.costs is not None
    pipe = planned.pipeline(F.mse_loss)
    torch.testing.assert_close(pipe.step(x, y).loss, F.mse_loss(model(x), y).detach())
    with pytest.raises(ps.PlanError, match=r"nothing fits the memory of 1.00 KiB"):
        ps.plan(model, x, devices=3, batch=8, hardware="h100", memory="1KiB", seconds=0.2)
