"""What a stage keeps of a forward that will run again: its input, and what it drew."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.engine.buffers import Seen
from penstock.engine.keep import Keeper
from penstock.engine.message import Message
from penstock.engine.moment import MicroBatch
from penstock.engine.randomness import Draws
from penstock.errors import PlanError

__all__ = ["Replay"]


class Replay:
    """One forward to be run again. Its output's graph is dropped at once; this is all that stays until then."""

    __slots__ = ("draws", "keeper", "message", "moment", "seen", "versions")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.versions: Sequence[int | None] = ()
        self.draws: Draws = []
        self.keeper = Keeper()
        self.seen: Seen = ()  # buffers that the forward changed, as it found them
        self.moment: MicroBatch | None = None

    def keep(self, message: Message, moment: MicroBatch | None) -> None:
        self.message = message._replace(leaves=list(message.leaves))
        self.versions = _versions(message)
        self.moment = moment

    def again(self, stage: int) -> Message:
        """The input as it was; an error if somebody has changed it since."""
        assert self.message is not None
        if _versions(self.message) != self.versions:
            raise PlanError(
                f"an input of stage {stage} was changed in place after its forward, which is to be recomputed from it: "
                "change a copy instead (x.clone()), or keep this stage's activations (recompute='never' for it)"
            )
        return self.message._replace(leaves=list(self.message.leaves))

    def clear(self) -> None:
        self.message = self.moment = None
        self.seen = ()
        self.draws.clear()
        self.keeper.clear()


def _versions(message: Message) -> list[int | None]:
    return [leaf._version if isinstance(leaf, Tensor) else None for leaf in message.leaves]
