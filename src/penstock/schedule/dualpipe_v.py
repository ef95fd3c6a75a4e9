"""DualPipeV: forwards of one direction of the V beside backwards of the other, in eight phases."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, vee


@register("dualpipev", "on a V, forwards beside backwards, in eight phases", v=2, memory="p + 0.5")
def dualpipev(p: int, m: int) -> Schedule:
    """In the main phase, a forward runs next to a backward of another micro-batch, so that each can hide the
    other's communication. A backward is split only where its weight gradient fills a gap.

    The phases need 2p micro-batches; for fewer, the schedule is that of the first m of 2p.

    p=2, m=4; the digit before the letter is the stage, a backward ``B`` takes two columns::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 ...
        rank 1: .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 ...
    """
    if m < 2 * p:
        return dualpipev(p, 2 * p).first(m)
    return Schedule.of("dualpipev", vee(p), (_phases(p, m, r) for r in range(p)), m)


def _phases(p: int, m: int, r: int) -> Iterator[Action]:
    """The order of rank r. Index 0 is its stage of the first half of the model, index 1 that of the second half."""
    stages = (r, 2 * p - 1 - r)
    next_microbatch = {(i, kind): count() for i in (0, 1) for kind in "FB"}
    deferred: deque[Action] = deque()

    def forward(i: int) -> Action:
        return Action(stages[i], "F", next(next_microbatch[i, "F"]))

    def backward(i: int) -> Action:
        return Action(stages[i], "B", next(next_microbatch[i, "B"]))

    def input_gradient(i: int) -> Action:
        _, _, k = backward(i)
        deferred.append(Action(stages[i], "W", k))
        return Action(stages[i], "I", k)

    weight_gradient = deferred.popleft

    for _ in range(2 * (p - r - 1)):  # 1. fill the first half
        yield forward(0)
    for _ in range(r + 1):  # 2. forwards of both halves
        yield forward(0)
        yield forward(1)
    for _ in range(p - r - 1):  # 3. the first gradients; W fills the wait for the next forward
        yield input_gradient(1)
        yield weight_gradient()
        yield forward(1)
    for _ in range(m - 2 * p + r + 1):  # 4. main phase: a forward of one half next to a backward of the other
        yield forward(0)
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for _ in range(p - r - 1):  # 5. no forwards left in the first half
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for i in range(2 * (r + 1)):  # 6. nor in the second; W is deferred in the second part of this phase
        yield (backward if i <= r else input_gradient)(1 - i % 2)
    for _ in range(p - r - 1):  # 7. W fills the wait for the last gradients
        yield weight_gradient()
        yield input_gradient(0)
    while deferred:  # 8. the remaining W
        yield weight_gradient()
