"""What a stage's forward runs in, beside the caller's grad mode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.engine.slot import Slot
    from penstock.engine.stage import StageEngine

__all__ = ["surroundings"]


def surroundings(
    stage: StageEngine, microbatch: int, slot: Slot, leaves: Sequence[Any], again: bool
) -> AbstractContextManager[Any]:
    """The caller's autocast and default device, the stage's own random numbers, and those who look on.

    ``again`` says that the forward has run before. Where the recording of weight gradients is all there is, it is
    entered without a stack, which would cost more than it does.
    """
    plain = stage.around is None and stage.randomness is None and stage.norms is None
    if plain and slot.replay is None and not slot.away:
        assert slot.queue is not None
        return slot.queue.recording()
    stack = ExitStack()
    if slot.away:
        assert stage.offload is not None
        slot.away, slot.bare = False, slot.queue is None and slot.replay is None  # another micro-batch comes next
        stack.enter_context(stage.offload.saving(microbatch, leaves))
    if stage.around is not None:
        stack.enter_context(stage.around)
    if stage.randomness is not None:
        draws = None if slot.replay is None else slot.replay.draws
        stack.enter_context(stage.randomness.forward(stage.mode, microbatch, draws, again))
    if again:
        assert stage.unnoticed is not None
        assert slot.replay is not None
        stack.enter_context(stage.unnoticed.quiet if stage.norms is None else stage.norms.quiet)
        stack.enter_context(stage.unnoticed.guard.seeing(slot.replay.seen))
    elif stage.norms is not None:
        stack.enter_context(stage.norms.counting)
    if slot.queue is not None:
        stack.enter_context(slot.queue.recording())
    if slot.replay is not None and slot.replay.keeper.used:
        stack.enter_context(slot.replay.keeper.forward(again=again))
    return stack
