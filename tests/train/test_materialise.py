"""A model that was only described, under ``torch.device("meta")``, gets its memory stage by stage."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from tests.support.models import batch
from tests.support.ranks import Ranks


def network() -> nn.Sequential:
    first, last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    last.weight = first.weight
    return nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), last)


def described() -> nn.Sequential:
    with torch.device("meta"):
        return network()


def fill(stage: nn.Module) -> None:
    """Ones, but for what a BatchNorm begins with."""
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        tensor.fill_(0 if "running_mean" in name or "tracked" in name else 0.5)


def expected() -> nn.Sequential:
    model = network()
    with torch.no_grad():
        fill(model)
    return model


def test_stages_of_a_described_model_are_filled_by_init() -> None:
    seen: list[list[str]] = []

    def init(stage: nn.Module) -> None:
        seen.append([name for name, _ in stage.named_parameters()])
        assert not any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))
        fill(stage)

    model, plain, x = described(), expected(), batch(8)
    with ps.Pipeline(ps.split(model, balance=[2, 2, 1]), F.mse_loss, microbatches=1, devices="cpu", init=init) as pipe:
        assert [len(names) for names in seen] == [4, 2, 1]
        loss = F.mse_loss(plain(x), x)
        loss.backward()
        torch.testing.assert_close(pipe.step(x, x).loss, loss.detach())
        gradients = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name].grad)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        assert parameters["0.weight"] is parameters["4.weight"], "a tie survives"
        torch.testing.assert_close(pipe.state_dict(), plain.state_dict())


def test_without_init_the_error_names_a_parameter_and_nothing_is_changed() -> None:
    model = described()
    with pytest.raises(ps.PlanError, match=r"stage 0 has 7 tensors on the meta device.*0\.weight.*init="):
        ps.Pipeline(ps.split(model, balance=[2, 3]), F.mse_loss, devices="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())


def own_part_only(rank: int) -> list[float]:
    model = described()
    with ps.Pipeline(ps.split(model, balance=[2, 3]), F.mse_loss, microbatches=2, mesh=ps.Mesh(), init=fill) as pipe:
        mine = {name for name, _ in pipe.named_parameters()}
        theirs = [p for name, p in model.named_parameters(remove_duplicate=False) if name not in mine]
        assert theirs
        assert all(parameter.is_meta for parameter in theirs), "only this rank's stages have memory"
        x = batch(8)
        return [float(pipe.step(x, x).loss)]


def test_a_rank_makes_its_own_stages_only(two: Ranks) -> None:
    first, second = two.run(own_part_only)
    assert first == second
