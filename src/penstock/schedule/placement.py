"""Where stages live: which rank holds which stage.

loop, 2 ranks x 2        V, 2 ranks x 2

rank 0: stages 0 2       rank 0: stages 0 3
rank 1: stages 1 3       rank 1: stages 1 2
"""

from __future__ import annotations

__all__ = ["loop", "vee"]


def loop(p: int, v: int = 1) -> tuple[int, ...]:
    """``v`` stages on each of ``p`` ranks, going round: stage ``s`` is on rank ``s mod p``."""
    return tuple(s % p for s in range(p * v))


def vee(p: int) -> tuple[int, ...]:
    """Two stages on each of ``p`` ranks, there and back: the first rank holds the first and the last."""
    return (*range(p), *reversed(range(p)))
