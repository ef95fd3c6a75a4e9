"""DualPipeV: forwards of one way through the V beside backwards of the other, in eight phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from penstock.schedule.schedule import Action, Schedule, vee

__all__ = ["dualpipev"]


def dualpipev(p: int, m: int) -> Schedule:
    """In the main phase a forward stands beside a backward of another micro-batch: their work can hide each
    other's communication. p + 1/2 activations; a backward is split only where the weight gradient fills a gap.

    The phases need 2p micro-batches to unfold; fewer than that are the first of 2p.

    p=2, m=4; the digit before the letter is the stage, a backward ``B`` takes two columns::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 ...
        rank 1: .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 ...
    """
    if m < 2 * p:
        return dualpipev(p, 2 * p).first(m)
    return Schedule.of("dualpipev", vee(p), (_phases(p, m, r) for r in range(p)), m)


def _phases(p: int, m: int, r: int) -> Iterator[Action]:
    """What rank r does with stage 0, its one on the way out, and stage 1, its one on the way back."""
    stages = (r, 2 * p - 1 - r)
    coming = {(i, kind): count() for i in (0, 1) for kind in "FB"}
    deferred: deque[Action] = deque()

    def forward(i: int) -> Action:
        return Action(stages[i], "F", next(coming[i, "F"]))

    def backward(i: int) -> Action:
        return Action(stages[i], "B", next(coming[i, "B"]))

    def input_gradient(i: int) -> Action:
        _, _, k = backward(i)
        deferred.append(Action(stages[i], "W", k))
        return Action(stages[i], "I", k)

    weight_gradient = deferred.popleft

    for _ in range(2 * (p - r - 1)):  # 1. fill the way out
        yield forward(0)
    for _ in range(r + 1):  # 2. both ways forward
        yield forward(0)
        yield forward(1)
    for _ in range(p - r - 1):  # 3. the first gradients; weights fill the wait for the next forward
        yield input_gradient(1)
        yield weight_gradient()
        yield forward(1)
    for _ in range(m - 2 * p + r + 1):  # 4. the main phase: forward beside backward, crosswise
        yield forward(0)
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for _ in range(p - r - 1):  # 5. the way out has no more forwards
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for half in range(2 * (r + 1)):  # 6. nor has the way back; in the second half, weights are left for later
        yield (backward if half <= r else input_gradient)(1 - half % 2)
    for _ in range(p - r - 1):  # 7. weights fill the wait for the last gradients
        yield weight_gradient()
        yield input_gradient(0)
    while deferred:  # 8. the rest of the weights
        yield weight_gradient()
