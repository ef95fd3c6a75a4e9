"""Stages alone: the short way of a forward that needs nothing around it is the long way, with less done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.forward_context import caller_context, current_microbatch
from penstock.engine.loss import LossAndOutputs, loss_rule
from penstock.engine.message import Message
from penstock.engine.stage import Slot, StageEngine, begin_run

CPU = torch.device("cpu")


class Told(nn.Module):
    """A linear layer that does, and says, what a test wants to know."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.first: Callable[[Tensor], Tensor] = lambda x: x
        self.seen: list[object] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(current_microbatch())
        self.is_leaf = x.is_leaf
        output: Tensor = self.linear(self.first(x))
        return output


def stage_of(module: nn.Module, microbatches: int = 4) -> StageEngine:
    engine = StageEngine(0, module, CPU)
    begin_run([engine], caller_context(), [None] * microbatches, "step 1")
    return engine


def message_of(x: Tensor, wants: tuple[int, ...] = (0,)) -> Message:
    return Message([x.clone()], None, wants)


def pair(engine: StageEngine, slot: Slot, x: Tensor, k: int = 0) -> tuple[Tensor, Tensor | None]:
    """An output, and the gradient of its sum."""
    engine.forward(k, message_of(x), slot)
    assert slot.messages[0] is not None
    (output,) = slot.messages[0].leaves
    (engine.backward if slot.queue is None else engine.input_gradient)([torch.ones_like(output)], slot)
    if slot.queue is not None:
        assert len(slot.queue) == 1
        engine.weight_gradient(slot)
    return output, slot.grads[0][0]


@pytest.mark.parametrize("split", [False, True], ids=["B", "I and W"])
def test_the_fast_path_is_taken_from_the_second_forward_on_and_gives_the_same(split: bool) -> None:
    module, x = Told(), torch.randn(2, 3)
    engine = stage_of(module)
    slot = Slot(engine.new_queue() if split else None)
    found = []
    for k in range(3):
        module.zero_grad()
        output, gradient = pair(engine, slot, x, k)
        found.append([output, gradient, module.linear.weight.grad, module.linear.bias.grad])
        assert module.is_leaf == (k > 0)
    for tensors in found[1:]:
        for a, b in zip(tensors, found[0], strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(a, b)
    assert module.seen == list(engine.microbatches)[:3]
    assert current_microbatch() is None


def slow_forwards(engine: StageEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The micro-batches whose forwards do not take the fast path."""
    slow, general = [], engine._forward

    def forward(microbatch: int, message: Message, slot: Slot) -> None:
        slow.append(microbatch)
        general(microbatch, message, slot)

    monkeypatch.setattr(engine, "_forward", forward)
    return slow


def test_a_first_stage_takes_the_fast_path_and_may_change_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs need no gradient, so a change in place is allowed: nothing has to be learnt."""
    module, x = Told(), torch.randn(2, 3)
    engine = stage_of(module)
    slow = slow_forwards(engine, monkeypatch)
    for k in range(4):
        module.first = (lambda value: value.mul_(2)) if k == 2 else (lambda value: value)
        slot = Slot()
        engine.forward(k, message_of(x, wants=()), slot)
        assert slot.messages[0] is not None
        torch.testing.assert_close(slot.messages[0].leaves[0], module.linear(2 * x if k == 2 else x).detach())
        assert slot.inputs == ()
    assert slow == [0]
    engine.forward(0, message_of(x), Slot())
    assert slow == [0, 0], "whether inputs that need a gradient are changed is not known yet"


def test_a_last_stage_takes_the_fast_path_with_its_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, y = Told(), torch.randn(2, 3), torch.randn(2, 3)
    loss = LossAndOutputs(loss_rule(F.mse_loss))
    engine = StageEngine(0, module, CPU, loss)
    begin_run([engine], caller_context(), [None] * 3, "step 1")
    slow = slow_forwards(engine, monkeypatch)
    loss.begin((2, 2, 2), [y, y, y], "all", training=True)
    for k in range(3):
        slot = Slot()
        engine.forward(k, message_of(x), slot)
        engine.backward(loss.seed(k), slot)
        leaf = x.clone().requires_grad_()
        (expected,) = torch.autograd.grad(F.mse_loss(module.linear(leaf), y) / 3, leaf)
        assert slot.grads[0][0] is not None
        torch.testing.assert_close(slot.grads[0][0], expected)
    assert slow == [0]
    total, _ = loss.finish()
    assert total is not None
    torch.testing.assert_close(total, F.mse_loss(module.linear(x), y).detach())
    torch.testing.assert_close(loss.take_outputs(), module.linear(x).detach().repeat(3, 1))


def test_a_module_that_begins_to_change_its_input_is_told_of_and_runs_again() -> None:
    module, x = Told(), torch.randn(2, 3)
    engine, slot = stage_of(module), Slot()
    for _ in range(2):
        pair(engine, slot, x)
    module.first = lambda value: value.mul_(2)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as caught:
        engine.forward(0, message_of(x), slot)
    note = "the stage changed its input in place, but not in earlier forwards: run the step again"
    assert caught.value.__notes__ == [note]
    assert current_microbatch() is None
    for _ in range(2):
        output, gradient = pair(engine, slot, x)
        torch.testing.assert_close(output, module.linear(2 * x))
        torch.testing.assert_close(gradient, 2 * module.linear.weight.sum(0).expand(2, 3))


@pytest.mark.parametrize("change", ["autocast", "eval"])
def test_another_mode_is_looked_at_anew(change: str) -> None:
    module, x = Told(), torch.randn(2, 3)
    engine, slot = stage_of(module), Slot()
    for _ in range(2):
        pair(engine, slot, x)
    assert module.is_leaf
    if change == "eval":
        module.eval()
        begin_run([engine], caller_context(), [None] * 4, "step 2")
    else:
        with torch.autocast("cpu", torch.bfloat16):
            begin_run([engine], caller_context(), [None] * 4, "step 2")
    for k in range(2):
        output, _ = pair(engine, slot, x)
        assert output.dtype is (torch.float32 if change == "eval" else torch.bfloat16)
        assert module.is_leaf == (k > 0)


def test_an_input_that_wants_no_gradient_gets_none() -> None:
    module, x = Told(), torch.randn(2, 3)
    engine, slot = stage_of(module), Slot()
    pair(engine, slot, x)
    engine.forward(1, message_of(x, ()), slot)
    assert not slot.inputs
    engine.backward([torch.ones(2, 3)], slot)
    assert not slot.grads[0]
