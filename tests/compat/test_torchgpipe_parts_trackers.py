"""The trackers that layers stash into and pop from, with portals and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe.checkpoint import enable_checkpointing, enable_recomputing
from penstock.compat.torchgpipe.microbatch import Batch
from penstock.compat.torchgpipe.skip import Namespace, pop, skippable, stash
from penstock.compat.torchgpipe.skip.layout import SkipLayout
from penstock.compat.torchgpipe.skip.portal import Portal, PortalBlue
from penstock.compat.torchgpipe.skip.tracker import (
    SkipTracker,
    SkipTrackerThroughPotals,
    current_skip_tracker,
    use_skip_tracker,
)
from penstock.compat.torchgpipe.stream import CPUStream
from penstock.split.skip import use_stash

KEY = (None, "skip")


def tracker(**routes: tuple[int, int]) -> SkipTrackerThroughPotals:
    return SkipTrackerThroughPotals(SkipLayout(2, {(None, name): route for name, route in routes.items()}))


def test_only_what_goes_to_another_partition_goes_through_a_portal() -> None:
    through = tracker(far=(0, 1), near=(0, 0))
    batch = Batch(torch.rand(1, requires_grad=True))
    for name in ("far", "near"):
        through.save(batch, None, name, torch.rand(1, requires_grad=True))
    assert list(through.portals) == [(None, "far")]
    assert list(through.tensors) == [(None, "near")]
    assert through.load(batch, None, "near").requires_grad
    through.copy(batch, CPUStream, CPUStream, None, "far")
    with pytest.raises(AssertionError, match="'near' does not go to another partition"):
        through.copy(batch, CPUStream, CPUStream, None, "near")
    for name in ("near", "other"):
        with pytest.raises(KeyError):
            through.load(batch, None, name)
    with pytest.raises(TypeError, match="copy is not supported for non-portal skip tensors"):
        SkipTracker().copy(batch, CPUStream, CPUStream, None, "near")


def test_lives_without_checkpointing() -> None:
    through, batch = tracker(skip=(0, 1)), Batch(torch.rand(1))
    through.save(batch, *KEY, torch.rand(1))
    portal = through.portals[KEY]
    assert portal.tensor_life == 1
    assert through.load(batch, *KEY) is not None
    assert (portal.tensor_life, portal.tensor) == (0, None)


def test_lives_with_checkpointing() -> None:
    through, batch = tracker(skip=(0, 1)), Batch(torch.rand(1))
    with enable_checkpointing():
        through.save(batch, *KEY, torch.rand(1))
        portal = through.portals[KEY]
        assert portal.tensor_life == 2
        through.load(batch, *KEY)
        assert portal.tensor_life == 1
    with enable_recomputing():
        through.load(batch, *KEY)
        assert (portal.tensor_life, portal.tensor) == (0, None)
        through.save(batch, *KEY, torch.rand(1))
        assert through.portals[KEY] is portal
        assert (portal.tensor_life, portal.tensor) == (0, None)


@pytest.mark.parametrize("first", [torch.arange(2), torch.rand(2)], ids=["integers", "no gradient"])
def test_a_batch_is_tied_to_portals_by_a_tensor_with_a_gradient(first: Tensor) -> None:
    line, skip = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    through, batch = tracker(skip=(0, 1)), Batch((first, line))
    through.save(batch, *KEY, skip)
    through.copy(batch, CPUStream, CPUStream, *KEY)
    taken = through.load(batch, *KEY)
    (batch[1] + taken * 3).sum().backward()
    assert batch[0] is first
    assert (skip.grad.tolist(), line.grad.tolist()) == ([3, 3], [1, 1])  # type: ignore[union-attr]


# ── trackers in use ──────────────────────────────────────────────────────────────────────────────────────────────


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


def test_the_tracker_in_use_is_the_current_one() -> None:
    outer, inner = SkipTracker(), tracker(skip=(0, 1))
    with use_skip_tracker(outer):
        assert current_skip_tracker() is outer
        with use_skip_tracker(inner):
            assert current_skip_tracker() is inner
        assert current_skip_tracker() is outer
    assert type(current_skip_tracker()) is SkipTracker
    assert current_skip_tracker() is not outer


def test_in_a_stage_of_a_pipeline_the_tracker_is_not_in_use() -> None:
    outside = SkipTracker()
    values: dict[Any, Any] = {}
    with use_skip_tracker(outside), use_stash(values):  # as the core does for a stage
        assert current_skip_tracker().tensors is values
        Stash()(torch.ones(1))
    assert list(values) == [KEY]
    assert not outside.tensors


def test_layers_go_to_the_tracker_before_their_hooks_run() -> None:
    through, lives = tracker(skip=(0, 1)), []
    first, last = Stash(), Pop()
    for layer in (first, last):
        layer.register_forward_hook(lambda *_: lives.append(through.portals[KEY].tensor_life))
    x = torch.rand(2, requires_grad=True)
    with use_skip_tracker(through):
        y = last(first(x))
    assert lives == [1, 0]
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
    names: set[str] = set()
    nodes = [y.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None:
            names.add(type(node).__name__)
            nodes += [other for other, _ in node.next_functions]
    assert {"PortalOrangeBackward", "PortalBlueBackward"} <= names
    assert PortalBlue._backward_cls.__name__ in names


def test_a_program_may_have_trackers_of_its_own() -> None:
    calls = []

    class Told(SkipTracker):
        def save(self, batch: Any, ns: Any, name: str, tensor: Any) -> None:
            calls.append(("save", batch.tensor.tolist(), ns, name))
            super().save(batch, ns, name, tensor)

        def load(self, batch: Any, ns: Any, name: str) -> Any:
            calls.append(("load", batch.tensor.tolist(), ns, name))
            return super().load(batch, ns, name)

    ns = Namespace()
    with use_skip_tracker(Told()):
        out = Pop().isolate(ns)(Stash().isolate(ns)(torch.ones(1)))
    assert out.tolist() == [3]
    assert calls == [("save", [2], ns, "skip"), ("load", [2], ns, "skip")]


def test_layers_in_a_layer_go_to_the_tracker_as_well() -> None:
    @skippable(stash=["other"])
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stash()

        def forward(self, x: Tensor) -> Any:
            yield stash("other", x + 10)
            return self.inner(x)

    used = SkipTracker()
    with use_skip_tracker(used):
        Outer()(torch.ones(1))
    assert {name: tensor.item() for (_, name), tensor in used.tensors.items()} == {"skip": 1, "other": 11}


def test_what_was_not_stashed_is_told_and_other_values_stay() -> None:
    used = SkipTracker()
    used.tensors[None, "other"] = torch.ones(1)
    with use_skip_tracker(used), pytest.raises(RuntimeError, match="'skip' has not been stashed"):
        Pop()(torch.ones(1))
    assert list(used.tensors) == [(None, "other")]


def test_without_a_pipeline_there_are_no_portals(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a portal")

    monkeypatch.setattr(Portal, "__init__", refuse)
    x = torch.rand(2, requires_grad=True)
    nn.Sequential(Stash(), Pop())(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3, 3]
