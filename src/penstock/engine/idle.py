"""How long a rank waits for others: the bubble that a step really had.

The clock is read where a rank may wait, before and after, and nowhere else. On a GPU the host runs ahead and waits for
nothing, so that nothing can be said in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

__all__ = ["Waited"]


class Waited:
    """The seconds that one rank has waited for others, and how long it has worked."""

    __slots__ = ("busy", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy = 0.0

    def run(self, work: Callable[[], None]) -> None:
        """Do a rank's work; what it takes, less the waiting in it, is what the rank is busy."""
        self.seconds = 0.0
        start = perf_counter()
        work()
        self.busy = perf_counter() - start - self.seconds
