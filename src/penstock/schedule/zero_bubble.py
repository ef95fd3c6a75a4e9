"""Zero bubble H1 and H2: 1F1B with a split backward; weight gradients fill the waits of 1F1B."""

from __future__ import annotations

from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, loop


@register("zb_h1", "split backward; a third of 1F1B's bubble in its memory", memory="p")
def zb_h1(p: int, m: int) -> Schedule:
    """A third of 1F1B's bubble in 1F1B's memory: rank r holds p - r micro-batches in flight and r deferred.

    p=3, m=4; every action takes one column::

        rank 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    return Schedule.of("zb_h1", loop(p), (_deferring(r, m, p - r, r) for r in range(p)), m)


@register("zb_h2", "split backward; no pause once begun, twice 1F1B's memory", memory="2 * p - 1")
def zb_h2(p: int, m: int) -> Schedule:
    """Twice the memory of 1F1B, and no bubble after the start: a rank works without a pause from its first action.

    p=3, m=5; every action takes one column::

        rank 0: F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
        rank 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
        rank 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    return Schedule.of("zb_h2", loop(p), (_deferring(r, m, 2 * (p - r) - 1, 2 * r) for r in range(p)), m)


def _deferring(r: int, m: int, warmup: int, lag: int) -> list[Action]:
    """Rank r: ``warmup`` forwards; then I, the W of ``lag`` micro-batches ago and F in turn; then the remaining W.

    Once no forward is left to fill the time between two I, a W does, whatever its lag.
    """
    order = [Action(r, "F", k) for k in range(min(warmup, m))]
    weights = iter([Action(r, "W", k) for k in range(m)])
    for k in range(m):
        order.append(Action(r, "I", k))
        if k >= lag or k + warmup >= m:
            order.append(next(weights))
        if k + warmup < m:
            order.append(Action(r, "F", k + warmup))
    return [*order, *weights]
