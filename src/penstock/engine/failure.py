"""How a failure on one rank becomes the same error on every rank.

    rank 2 fails   publishes the cause in the store, closes its channels, raises
    rank 1, 3      their channels with rank 2 break: look the cause up, close, raise the same
    rank 0         its channel with rank 1 breaks: likewise

A process that was killed publishes nothing. Whoever loses the channel to a rank that stays silent says so for it.
"""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.engine.channel.process import ChannelError
from penstock.errors import PipelineError

__all__ = ["Bulletin", "Cause"]

SILENCE = 2.0  # seconds after which a rank that says nothing is taken for dead
PATIENCE = 8.0  # seconds to wait for the cause when the peer is alive


@dataclass(frozen=True)
class Cause:
    """The first failure of a step."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    def error(self) -> PipelineError:
        where = f"rank {self.rank}"
        if self.action is not None:
            where += f", stage {self.stage}, micro-batch {self.microbatch}, action {self.action}"
        text = f"{where}: {self.kind}: {self.message}" if self.kind else f"{where}: {self.message}"
        if self.traceback:
            text += f"\n\nOn rank {self.rank}:\n{self.traceback}"
        return PipelineError(
            text, rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action
        )


class Bulletin:
    """The board in the store where the first cause is written."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store = PrefixStore("failure", store)
        self.rank = rank

    def failed(self, error: BaseException, stage: int | None, microbatch: int | None, action: str | None) -> Cause:
        """Publish that this rank's own work failed."""
        text = "".join(traceback.format_exception(error))
        return self._publish(Cause(self.rank, type(error).__name__, str(error), text, stage, microbatch, action))

    def lost(self, error: ChannelError) -> Cause:
        """Find out why a channel broke."""
        peer = self.rank if error.peer is None else error.peer
        try:
            self.store.set(f"alive/{self.rank}", "1")
            start = time.monotonic()
            while (waited := time.monotonic() - start) < PATIENCE:
                if self.store.check(["cause"]):
                    return self._read()
                if waited > SILENCE and self.store.check([f"closed/{peer}"]):
                    return self._publish(Cause(peer, "", "it has closed its pipeline, while others still use it"))
                if waited > SILENCE and not self.store.check([f"alive/{peer}"]):
                    dead = "its process is gone without a word (killed, or out of memory?)"
                    return self._publish(Cause(peer, "", dead))
                time.sleep(0.02)
            where = "" if peer == self.rank else f"seen by rank {self.rank}: "
            return self._publish(Cause(peer, "", f"{where}{error}"))
        except RuntimeError:  # the store is gone: rank 0 keeps it, unless a launcher does
            return Cause(0, "", "its process, or the launcher's, is gone, and the store with it (killed, or no memory)")

    def closed(self) -> None:
        """Say that this rank has left the pipeline of its own will, or after a failure."""
        try:
            self.store.set(f"closed/{self.rank}", "1")
        except RuntimeError:
            return  # the store is gone, and so is everyone who would read it

    def _publish(self, cause: Cause) -> Cause:
        try:
            self.store.compare_set("cause", "", json.dumps(asdict(cause)))
            return self._read()
        except RuntimeError:
            return cause

    def _read(self) -> Cause:
        data: dict[str, Any] = json.loads(self.store.get("cause"))
        return Cause(**data)
