"""PopTorch's optimizers update as torch's do; LAMB as its formula says."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
import penstock.compat.poptorch as poptorch
from tests.compat.poptorch_models import plainly as plainly

STEPS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def backward(module: nn.Module, step: int) -> None:
    module.zero_grad()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    module(x).square().mean().backward()


SAME: dict[str, tuple[Any, Any]] = {
    "SGD": (lambda p: poptorch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "SGD with momentum": (
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True, velocity_scaling=2.0),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    "Adam": (
        lambda p: poptorch.optim.Adam(p, accum_type=torch.float32, first_order_momentum_accum_type=torch.float16),
        torch.optim.Adam,
    ),
    "AdamW": (
        lambda p: poptorch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    ),
    "RMSprop": (
        lambda p: poptorch.optim.RMSprop(p, lr=0.05, alpha=0.9, momentum=0.5, centered=True),
        lambda p: torch.optim.RMSprop(p, lr=0.05, alpha=0.9, momentum=0.5, centered=True),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_updates_are_torchs(name: str) -> None:
    ours, plain = model(), model()
    optimizer, expected = SAME[name][0](ours.parameters()), SAME[name][1](plain.parameters())
    assert isinstance(optimizer, type(expected))
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)


def formula(w: Tensor, grads: list[Tensor], *, corrected: bool, most: float | None = None) -> Tensor:
    """The published update, written out."""
    lr, (b1, b2), eps, decay = 0.05, (0.8, 0.9), 1e-6, 0.1
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        correct = (1 - b1**t, 1 - b2**t) if corrected else (1.0, 1.0)
        direction = (m / correct[0]) / ((v / correct[1]).sqrt() + eps) + decay * w
        phi = w.norm() if most is None else min(w.norm(), torch.tensor(most, dtype=w.dtype))
        w = w - lr * (phi / direction.norm()) * direction
    return w


@pytest.mark.parametrize("how", [{"corrected": True}, {"corrected": False}, {"corrected": True, "most": 0.5}], ids=str)
def test_lamb_by_its_formula(how: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    start = weight.detach().clone()
    settings: Any = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    settings |= {"bias_correction": how["corrected"], "max_weight_norm": how.get("most")}
    optimizer = poptorch.optim.LAMB([weight], **settings)
    grads = [torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(1, 5)]
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    torch.testing.assert_close(weight.detach(), formula(start, grads, **how))


class Uncorrected(poptorch.optim.AdamW):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, betas=(0.8, 0.9), weight_decay=0.1, eps=1e-6, bias_correction=False)


@pytest.mark.parametrize("copied", ["no", "deepcopy", "pickle", "state_dict"])
def test_adamw_without_bias_correction(copied: str) -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64))
    expected, mean, square = weight.detach().clone(), torch.zeros(3).double(), torch.zeros(3).double()
    optimizer = Uncorrected([weight], 0.05)
    for step in range(STEPS):
        if copied == "state_dict":  # also before the first step
            optimizer.load_state_dict(optimizer.state_dict())
        elif copied != "no":
            optimizer = copy.deepcopy(optimizer) if copied == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
            weight = optimizer.param_groups[0]["params"][0]
        weight.grad = torch.tensor([1.0, step, -0.5], dtype=torch.float64)
        optimizer.step()
        mean, square = 0.8 * mean + 0.2 * weight.grad, 0.9 * square + 0.1 * weight.grad**2
        expected = expected * (1 - 0.05 * 0.1) - 0.05 * mean / (square.sqrt() + 1e-6)
        torch.testing.assert_close(weight.detach(), expected)


def test_adamw_without_bias_correction_in_a_model() -> None:
    results = []
    for off_chip in (False, True):
        ours = model()
        options = poptorch.Options()
        options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(not off_chip))
        training = poptorch.trainingModel(WithLoss(ours), options, Uncorrected(ours.parameters(), 0.05))
        for step in range(STEPS):
            if step == 2:
                training.setOptimizer(Uncorrected(ours.parameters(), 0.02))
            training(torch.ones(4, 3, dtype=torch.float64))
        training.copyWeightsToHost()
        results.append(ours.state_dict())
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x).square().mean()


def test_lamb_with_a_parameter_of_zeros() -> None:
    weight = nn.Parameter(torch.zeros(3))
    optimizer = poptorch.optim.LAMB([weight], lr=0.1)
    weight.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -0.1))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_settings_are_copied(name: str) -> None:
    ours = model()
    optimizer = getattr(poptorch.optim, name)(ours.parameters(), lr=0.1, loss_scaling=8.0, max_grad_norm=2.0)
    backward(ours, 0)
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (other.loss_scaling, other.max_grad_norm, other.accum_type) == (8.0, 2.0, None)
        assert type(other) is type(optimizer)
        assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: poptorch.optim.SGD(p, 0.1, loss_scaling=0), "loss_scaling must be above 0"),
        (lambda p: poptorch.optim.Adam(p, max_grad_norm=-1.0), "max_grad_norm must be above 0"),
        (lambda p: poptorch.optim.Adam(p, accum_type=torch.int8), "accum_type must be torch.float32 or torch.float16"),
        (lambda p: poptorch.optim.RMSprop(p, 0.1, use_tf_variant=True), "use_tf_variant"),
        (lambda p: poptorch.optim.AdamW(p, amsgrad=True, bias_correction=False), "bias_correction=False. is not"),
        (lambda p: poptorch.optim.LAMB(p, 0.1, (0.9, 0.999), 1e-8, 0.0, False), "other settings by name only"),
        (lambda p: poptorch.optim.LAMB(p, maximize=True), "LAMB takes lr, betas, eps and weight_decay"),
        (
            lambda p: poptorch.optim.Adam(
                [q.half().detach().requires_grad_() for q in p], second_order_momentum_accum_type=torch.float32
            ),
            "not supported for half-precision parameters",
        ),
    ],
)
def test_refused_arguments(make: Any, message: str) -> None:
    with pytest.raises(ps.PlanError, match=message):
        make(list(model().parameters()))


def test_half_precision_is_summed_in_single() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

        def forward(self, x: Tensor) -> Any:
            return (self.weight * x).sum()

    options = poptorch.Options()
    options.Training.gradientAccumulation(512).accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    found = []
    for kind in (torch.float32, None):
        half = Half()
        optimizer = poptorch.optim.SGD(half.parameters(), lr=1.0, accum_type=kind)
        with poptorch.trainingModel(half, options, optimizer) as training:
            training(torch.ones(512, dtype=torch.bfloat16))
        found.append(half.weight.item())
    assert found[0] == -512  # bfloat16 alone stops at 256
    assert found[1] > -512
