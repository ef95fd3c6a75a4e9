"""What the calls of a compiled program do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.engine.message import merge
from penstock.engine.stage import Slot, StageEngine

if TYPE_CHECKING:
    from penstock.engine.runner import Ends, Lane

__all__ = [
    "backward",
    "enter",
    "forward",
    "leave_backward",
    "leave_forward",
    "meet",
    "meet_back",
    "one_of",
    "prefetch",
    "send_away",
    "send_grads",
    "send_output",
    "send_part",
    "send_row",
    "turn",
]


def prefetch(engine: StageEngine, k: int) -> None:
    assert engine.offload is not None
    engine.offload.prefetch(k)


def send_away(slot: Slot) -> None:
    slot.away, slot.bare = True, False


def enter(engine: StageEngine, k: int, slot: Slot, ends: Ends) -> None:
    engine.forward(k, ends.inputs[k], slot)


def forward(engine: StageEngine, k: int, slot: Slot, lane: Lane) -> None:
    engine.forward(k, lane.take(k), slot)


def meet(engine: StageEngine, k: int, slot: Slot, lanes: Sequence[Lane]) -> None:
    message, slot.shares = merge([lane.take(k) for lane in lanes])
    engine.forward(k, message, slot)


def turn(work: Callable[..., None], k: int, slot: Slot, ends: Ends) -> None:
    assert ends.seed is not None
    work(ends.seed(k), slot)


def backward(work: Callable[..., None], k: int, slot: Slot, lane: Lane) -> None:
    work(lane.take(k), slot)


def meet_back(work: Callable[..., None], k: int, slot: Slot, lanes: Sequence[Lane]) -> None:
    work([grad for lane in lanes for grad in lane.take(k)], slot)


def send_output(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.message)
    slot.message = None


def send_grads(lane: Lane, k: int, slot: Slot) -> None:
    lane.send(k, slot.grads)
    slot.grads = ()


def send_part(lane: Lane, k: int, slot: Slot, part: int) -> None:
    lane.send(k, slot.messages[part])
    slot.messages[part] = None


def send_row(lane: Lane, k: int, slot: Slot, part: int) -> None:
    lane.send(k, slot.rows[part])
    slot.rows[part] = slot.grads = ()


def leave_forward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.outputs is not None:
        ends.outputs[k] = slot.message
    slot.message = None


def leave_backward(ends: Ends, k: int, slot: Slot) -> None:
    if ends.grads is not None:
        ends.grads[k] = slot.grads
    slot.grads = ()


def one_of(slot: Slot, what: str, part: int) -> Any:
    """What goes along one of several edges: of the slot's messages, or of its rows of gradients."""
    return getattr(slot, what)[part]
