"""How a failure on one rank becomes the same error on every rank.

    rank 2 fails    publishes the cause in the store, closes its channels, raises
    rank 1, 3       their channels with rank 2 break: look the cause up, close, raise the same
    everybody       the watch of each rank sees the cause, and cuts what its rank waits for

A process that was killed publishes nothing: the watch of the rank before it, whose line to it breaks, does so for it.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.engine.channel.base import ChannelError
from penstock.errors import PipelineError, text_of

__all__ = [
    "PROCESS_DIED",
    "RANK_CLOSED",
    "Cause",
    "FailureStore",
    "is_connection_error",
    "launcher_owns_store",
    "store_unreachable",
]

CAUSE_WAIT = 4.0  # seconds to wait for the cause when a channel broke
PROCESS_DIED = "its process is gone without a word (killed, or out of memory?)"
RANK_CLOSED = "it has closed its pipeline, or ended, while others still use it"


@dataclass(frozen=True)
class Cause:
    """The first failure of a pipeline."""

    rank: int
    kind: str
    message: str
    traceback: str = ""
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    def error(self) -> PipelineError:
        where = f"rank {self.rank}"
        if self.stage is not None:
            where += f", stage {self.stage}"
        if self.action is not None:
            where += f", micro-batch {self.microbatch}, action {self.action}"
        text = f"{where}: {self.kind}: {self.message}" if self.kind else f"{where}: {self.message}"
        if self.traceback:
            text += f"\n\nOn rank {self.rank}:\n{self.traceback}"
        return PipelineError(text, rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action)


class FailureStore:
    """The board in the store where the first cause is written."""

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        """``rank`` is this one's among ``ranks``, those of the mesh in the world."""
        self.store = PrefixStore("failure", store)
        self.ranks = ranks
        self.rank = rank
        self.knew: float | None = None  # since when this rank has known a cause

    def failed(
        self,
        error: BaseException,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        *,
        where: str = "",
    ) -> Cause:
        """Publish that this rank's own work failed."""
        text = "".join(traceback.format_exception(error))
        kind = f"{where}{type(error).__name__}"
        return self.publish(Cause(self.rank, kind, text_of(error), text, stage, microbatch, action))

    def lost(self, error: ChannelError) -> Cause:
        """Find out why a channel broke."""
        found = self.ask(error.peer)
        if found is None:
            peer = self.rank if error.peer is None else error.peer
            where = "" if peer == self.rank else f"seen by rank {self.rank}: "
            found = self.publish(Cause(peer, "", f"{where}{error}"))
        return found

    def ask(self, peer: int | None = None) -> Cause | None:
        """Wait for a moment until somebody says why a channel broke: one to ``peer``, if that is known."""
        peers = [rank for rank in self.ranks if rank != self.rank] if peer is None else [peer]
        end = time.monotonic() + CAUSE_WAIT
        try:
            while time.monotonic() < end:
                left = [rank for rank in peers if self.left(rank)]
                found = self.read()  # after the look who left: who fails says so before leaving
                if found is not None:
                    return found
                if left:
                    return self.publish(Cause(left[0], "", RANK_CLOSED))
                time.sleep(0.02)
        except RuntimeError:
            return store_unreachable()
        return None

    def leave(self) -> None:
        """Say that this rank has left the pipeline of its own will, or after a failure."""
        try:
            self.store.set(f"left/{self.rank}", "1")
        except RuntimeError:
            return  # the store is gone, and so is everyone who would read it

    def left(self, rank: int) -> bool:
        there: bool = self.store.check([f"left/{rank}"])
        return there

    def all_left(self) -> bool:
        """Whether everybody has."""
        there: bool = self.store.check([f"left/{rank}" for rank in self.ranks])
        return there

    def read(self) -> Cause | None:
        """The cause, if there is one."""
        if not self.store.check(["cause"]):
            return None
        self.knew = self.knew or time.monotonic()
        data: dict[str, Any] = json.loads(self.store.get("cause"))
        return Cause(**data)

    def publish(self, cause: Cause) -> Cause:
        """Write a cause down, unless there is one; the first one."""
        self.knew = self.knew or time.monotonic()
        try:
            self.store.compare_set("cause", "", json.dumps(asdict(cause)))
            return self.read() or cause
        except RuntimeError:
            return cause


def is_connection_error(error: BaseException) -> bool:
    """Whether this is how torch says, in a collective that a stage has of its own, that another process is gone."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def launcher_owns_store() -> bool:
    """Whether the store is known to live on when a rank ends: torchrun keeps it in its own process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_unreachable() -> Cause:
    """What it means that the store is."""
    whose = "the launcher's process" if launcher_owns_store() else "its process, or the launcher's,"
    return Cause(0, "", f"{whose} is gone, and the store with it (killed, or out of memory?)")
