"""The first failure of a pipeline, which all ranks raise as the same error.

    rank 2 fails    publishes the cause in the store, closes its channels, raises
    ranks 1, 3      their channels with rank 2 break: they read the cause, close their channels, raise the same error
    all ranks       the watch of each rank reads the cause, and shuts down the connections that its rank waits for

A killed process publishes no cause. The watch of the previous rank does it when its connection to the process breaks.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from penstock.engine.failure.sockets import (
    disconnect_store,
    limit_store_silence,
    read_record,
    read_value,
    store_address,
)
from penstock.errors import PipelineError, text_of

CAUSE_WAIT = 4.0  # seconds to wait for a published cause after a channel broke
PUBLISH_SECONDS = 10.0  # timeout of the store for the error of a rank that fails
RANK_CLOSED = "it has closed its pipeline, or ended without an exception,"


@dataclass(frozen=True)
class Cause:
    rank: int | None  # None: the launcher
    kind: str
    message: str
    traceback: str = ""
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    def error(self) -> PipelineError:
        where = "the launcher" if self.rank is None else f"rank {self.rank}"
        if self.stage is not None:
            where += f", stage {self.stage}"
        if self.action is not None:
            where += f", micro-batch {self.microbatch}, action {self.action}"
        text = f"{where}: {self.kind}: {self.message}" if self.kind else f"{where}: {self.message}"
        if self.traceback:
            text += f"\n\nOn rank {self.rank}:\n{self.traceback}"
        return PipelineError(text, rank=self.rank, stage=self.stage, microbatch=self.microbatch, action=self.action)


class FailureStore:
    """The keys of the store for the first cause, and for the ranks that have closed the pipeline."""

    def __init__(self, store: Store, ranks: Sequence[int], rank: int) -> None:
        """``ranks`` are the world ranks of the mesh, and ``rank`` is the world rank of this process."""
        self.store, self.ranks, self.rank = PrefixStore("failure", store), ranks, rank
        self.known_since: float | None = None  # when this rank first knew a cause

    def report(self, error: BaseException, *place: Any, prefix: str = "") -> Cause:
        """Publish an error of this rank. ``place`` are its stage, micro-batch and action, if known.

        A store that does not answer delays the error by at most ``PUBLISH_SECONDS``.
        """
        limit_store_silence(self.store, PUBLISH_SECONDS)
        text = "".join(traceback.format_exception(error))
        return self.publish(Cause(self.rank, f"{prefix}{type(error).__name__}", text_of(error), text, *place))

    def wait_for_cause(self, peer: int | None = None) -> Cause | None:
        """Wait up to ``CAUSE_WAIT`` seconds for the cause of a broken channel. ``peer`` is its other rank, if known."""
        peers = [rank for rank in self.ranks if rank != self.rank] if peer is None else [peer]
        end = time.monotonic() + CAUSE_WAIT
        try:
            while time.monotonic() < end:
                closed = [rank for rank in peers if self.all_closed(rank)]
                found = self.read()  # read after ``closed``: a rank that fails publishes its cause before it closes
                if found is not None:
                    return found
                if closed:
                    return self.publish(self.left_early(closed[0]))
                time.sleep(0.02)
        except RuntimeError as error:
            return store_unreachable(self.store, error)
        return None

    def all_closed(self, *ranks: int) -> bool:
        closed: bool = self.store.check([f"closed/{rank}" for rank in ranks])
        return closed

    def publish_closed(self, calls: int) -> None:
        """Publish that this rank has closed the pipeline, or that its program has ended, after ``calls`` calls."""
        self.store.set(f"closed/{self.rank}", str(calls))

    def left_early(self, rank: int) -> Cause:
        """The cause to report if other ranks need ``rank``, which has closed the pipeline."""
        calls = read_value(self.store, f"closed/{rank}", int)
        return Cause(rank, "", f"{RANK_CLOSED} after {calls} calls of it, while others still use it")

    def read(self) -> Cause | None:
        found = read_record(self.store, "cause", Cause)
        if found is None or found.rank not in (None, *self.ranks):
            return None
        self.known_since = self.known_since or time.monotonic()
        return found

    def publish(self, cause: Cause) -> Cause:
        """Publish a cause unless one is published already; return the published cause."""
        self.known_since = self.known_since or time.monotonic()
        try:
            text = json.dumps(asdict(cause))
            self.store.compare_set("cause", "", text)
            found = self.read()
            if found is None:  # the store has a value that is not from a rank
                self.store.set("cause", text)
            return found or cause
        except RuntimeError as error:
            store_unreachable(self.store, error)
            return cause


def launcher_owns_store() -> bool:
    """Whether the store outlives every rank: torchrun keeps it in its own process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_unreachable(store: Store, error: BaseException | None = None) -> Cause:
    """The cause to report when a request to the TCPStore has failed, or its connection is broken."""
    owner = "the launcher's process" if launcher_owns_store() else "its process, or the launcher's,"
    rank = None if launcher_owns_store() else 0
    address = store_address(store)
    if error is not None and "Socket Timeout" in str(error):
        _silent_stores.add(address)  # the other threads find their connections broken
        disconnect_store(store)
    if address in _silent_stores:
        return Cause(rank, "", f"the store on {address} does not answer (is its process stopped, or the network cut?)")
    return Cause(rank, "", f"{owner} is gone, and the store with it (killed, or out of memory?)")


_silent_stores: set[str] = set()  # the addresses of stores that have not answered this process
