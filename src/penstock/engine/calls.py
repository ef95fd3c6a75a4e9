"""What the calls of a compiled program do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from penstock.engine.message import merge
from penstock.engine.slot import Slot
from penstock.engine.stage import StageEngine

if TYPE_CHECKING:
    from penstock.engine.runner import Ends

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

Take = Callable[[], Any]  # of a message, or of gradients, that have come
Send = Callable[[Any], None]
Work = Callable[[Sequence[Tensor | None], Slot], None]  # a backward


def prefetch(engine: StageEngine, k: int) -> None:
    assert engine.offload is not None
    engine.offload.prefetch(k)


def send_away(slot: Slot) -> None:
    slot.away, slot.bare = True, False


def enter(engine: StageEngine, k: int, slot: Slot, ends: Ends) -> None:
    engine.forward(k, ends.inputs[k], slot)


def forward(engine: StageEngine, k: int, slot: Slot, take: Take) -> None:
    engine.forward(k, take(), slot)


def meet(engine: StageEngine, k: int, slot: Slot, takes: Sequence[Take]) -> None:
    message, slot.shares = merge([take() for take in takes])
    engine.forward(k, message, slot)


def turn(work: Work, k: int, slot: Slot, ends: Ends) -> None:
    assert ends.seed is not None
    work(ends.seed(k), slot)


def backward(work: Work, slot: Slot, take: Take) -> None:
    work(take(), slot)


def meet_back(work: Work, slot: Slot, takes: Sequence[Take]) -> None:
    work([grad for take in takes for grad in take()], slot)


def send_output(send: Send, slot: Slot) -> None:
    send(slot.message)
    slot.message = None


def send_grads(send: Send, slot: Slot) -> None:
    send(slot.grads)
    slot.grads = ()


def send_part(send: Send, slot: Slot, part: int) -> None:
    send(slot.messages[part])
    slot.messages[part] = None


def send_row(send: Send, slot: Slot, part: int) -> None:
    send(slot.rows[part])
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
