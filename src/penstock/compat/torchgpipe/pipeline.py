"""The order in which GPipe's forwards run, clock by clock."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["clock_cycles"]


def clock_cycles(m: int, n: int) -> Iterator[list[tuple[int, int]]]:
    """For each clock, the (micro-batch, partition) pairs that may run at once: those that add up to it.

    m=3, n=3::

        0  (0,0)
        1  (1,0) (0,1)
        2  (2,0) (1,1) (0,2)
        3        (2,1) (1,2)
        4              (2,2)
    """
    for clock in range(m + n - 1):
        yield [(clock - j, j) for j in range(n) if 0 <= clock - j < m]
