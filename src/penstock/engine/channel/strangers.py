"""Connections between the ranks that no pipeline has made: those of torch's own process groups.

A stage may have collectives of its own, over tensor parallel processes or replicas. If one of them fails outside of a
collective, the others wait for it there: it lives, but does not come. What they wait for is known by both its ends:

    rank 0, waiting    10.0.0.1:4711 ──▶ 10.0.0.2:5001
    rank 1, gone on    10.0.0.2:5001 ◀── 10.0.0.1:4711      shows its ends when it learns of a failure

So a rank that waits can find, and cut, what leads to ranks that have shown theirs. Groups of NCCL are aborted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from penstock.engine.channel.sever import Ends, abort, cut_between, stranger_ends

__all__ = ["cut", "show"]


def show(store: Any, rank: int) -> None:
    """Let the others know those of this process; ``store`` is the pipeline's corner of the store."""
    store.set(f"ends/{rank}", json.dumps(stranger_ends(store)))


def cut(store: Any, ranks: Iterable[int]) -> None:
    """Cut those to ranks that have shown theirs."""
    there = [rank for rank in ranks if store.check([f"ends/{rank}"])]
    theirs: set[Ends] = set()
    for rank in there:
        theirs |= {(tuple(far), tuple(near)) for near, far in json.loads(store.get(f"ends/{rank}"))}
    cut_between(theirs)
    groups = _nccl_groups(there)
    _aborted.update(groups)
    abort(groups)


_aborted: WeakSet[Any] = WeakSet()


def _nccl_groups(ranks: Collection[int]) -> list[Any]:
    """Torch's own groups of NCCL that have one of these ranks, and are not aborted yet."""
    found = []
    for group, (backend, _) in list(dist.distributed_c10d._world.pg_map.items()):
        if "nccl" in backend and not set(ranks).isdisjoint(dist.get_process_group_ranks(group)):
            own = group._get_backend(torch.device("cuda"))
            if own not in _aborted:
                found.append(own)
    return found
