"""Inference of message shapes on fake tensors: correct, and without changes of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.forward_context import CallerContext
from penstock.engine.message import Message, MessageMeta, flatten, meta_of
from penstock.engine.shapes import FakeStage, Propagation
from penstock.errors import PlanError
from tests.support.models import assert_same, snapshot

CPU = torch.device("cpu")
PLAIN = CallerContext((), None)
BF16 = CallerContext((("cpu", torch.bfloat16, True),), None)


def meta(value: Any) -> MessageMeta:
    leaves, spec = flatten(value)
    wants = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    return meta_of(Message(leaves, spec, wants))


def propagation(module: nn.Module, state: CallerContext = PLAIN, grad: bool = True) -> Propagation:
    return Propagation(FakeStage(3, module, CPU), state, grad)


def both(module: nn.Module, value: Any, state: CallerContext = PLAIN) -> tuple[str, str]:
    """The inferred meta data of a value, and the module's real output."""
    (inferred,) = propagation(module, state).forward([meta(value)], 1)
    with state.entered():
        real = meta(module(value))
    return f"{inferred} {inferred.wants}", f"{real} {real.wants}"


MODULES: dict[str, tuple[nn.Module, Any]] = {
    "linear": (nn.Linear(4, 3), torch.ones(2, 4)),
    "convolution": (nn.Conv2d(1, 2, 3, stride=2), torch.ones(2, 1, 9, 9)),
    "embedding": (nn.Embedding(5, 3), torch.zeros(2, 4, dtype=torch.long)),
    "frozen": (nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4)),
    "input wants": (nn.Linear(4, 3).requires_grad_(False), torch.ones(2, 4, requires_grad=True)),
    "argmax": (nn.Softmax(1), torch.ones(2, 4)),
    "attention": (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), torch.ones(2, 3, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_shapes_dtypes_and_wants_are_those_of_the_real_output(name: str) -> None:
    inferred, real = both(*MODULES[name])
    assert inferred == real


def test_under_autocast_the_output_is_half() -> None:
    inferred, real = both(nn.Linear(4, 3), torch.ones(2, 4), BF16)
    assert inferred == real
    assert "bfloat16" in inferred


def test_nothing_of_the_module_is_touched() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before, numbers = snapshot(module), torch.get_rng_state()
    run = propagation(module)
    run.forward([meta(torch.ones(2, 4, requires_grad=True))], 1)
    run.backward(None)
    assert_same(snapshot(module), before)
    assert torch.equal(torch.get_rng_state(), numbers)


class Pick(nn.Module):
    """Of two inputs, one takes part."""

    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] * parts[1].detach()


def test_backward_tells_which_inputs_get_a_gradient() -> None:
    run = propagation(Pick())
    run.forward([meta((torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)))], 1)
    assert run.backward(None) == [[True, False]]


def test_no_gradient_comes_back_for_outputs_that_get_none() -> None:
    run = propagation(nn.Linear(4, 4))
    run.forward([meta(torch.ones(2, 4, requires_grad=True))], 1)
    assert run.backward([[False]]) == [[False]]


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def test_a_shape_that_depends_on_the_data_is_refused_with_the_stage_and_its_input() -> None:
    with pytest.raises(PlanError, match=r"stage 3.*fake tensors.*float32\[2, 4\].*dynamic=True"):
        propagation(Positive()).forward([meta(torch.ones(2, 4))], 1)


def test_an_input_that_does_not_fit_is_refused_with_its_shape() -> None:
    with pytest.raises(PlanError, match=r"stage 3.*float32\[2, 5\]"):
        propagation(nn.Linear(4, 4)).forward([meta(torch.ones(2, 5))], 1)
