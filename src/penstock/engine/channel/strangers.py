"""Connections between the ranks that no pipeline has made: those of torch's own process groups.

A stage may have collectives of its own, over tensor parallel processes or replicas. If one of them fails outside of a
collective, the others wait for it there: it lives, but does not come. What they wait for is known by both its ends:

    rank 0, waiting    10.0.0.1:4711 ──▶ 10.0.0.2:5001
    rank 1, gone on    10.0.0.2:5001 ◀── 10.0.0.1:4711      shows its ends when it learns of a failure

So a rank that waits can find, and cut, what leads to ranks that have shown theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from penstock.engine.channel.sever import Ends, cut_between, stranger_ends

__all__ = ["cut", "show"]


def show(store: Any, rank: int) -> None:
    """Let the others know those of this process; ``store`` is the pipeline's corner of the store."""
    store.set(f"ends/{rank}", json.dumps(stranger_ends(store)))


def cut(store: Any, ranks: Iterable[int]) -> None:
    """Cut those to ranks that have shown theirs."""
    keys = [key for key in (f"ends/{rank}" for rank in ranks) if store.check([key])]
    shown = [pair for key in keys for pair in json.loads(store.get(key))]
    theirs: set[Ends] = {((there[0], there[1]), (here[0], here[1])) for here, there in shown}
    cut_between(theirs)
