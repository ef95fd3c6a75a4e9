"""Why ranks are idle in a step: every second in which one works on no action has one cause.

rank 0  ▕0F0▏▕0F1▏·······fill·······▕0B0▏··imbalance··▕0B1▏     waits that even stages would have, too, are the
rank 1  fill ▕1F0▏▕1F1▏ h ▕1B0▏                                 pipeline's own; the rest is imbalance
                        └ host: no message is awaited
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.profile.trace.measure import crossings
from penstock.profile.trace.steps import Done, Step
from penstock.schedule.action import BACKWARD, Action
from penstock.schedule.costs import Costs
from penstock.schedule.simulate import simulate

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["CAUSES", "Idle", "idle_times"]

CAUSES = ("fill", "drain", "imbalance", "communication", "host")


@dataclass(frozen=True)
class Idle:
    """What a rank does between the first action of its pipeline in a step and the last, in seconds.

    ``busy`` is the time in actions. The rest of ``total`` is idle, and is the sum of these:

    - ``fill``: before its first action; and waits for a peer that computes, up to the rank's own first backward, as far
      as they would be there if all stages took the same time: the pipeline fills.
    - ``drain``: after its last action; and such waits after its first backward: the pipeline runs empty.
    - ``imbalance``: what waits for a peer that computes last longer than they would with even stages.
    - ``communication``: the peer is done, and its message is not there yet; or a message that was sent is not over.
    - ``host``: between two actions no message is awaited: the program's own work, such as launching and sending.

    Where a trace has not all ranks, it is not known what even stages would do, and all such waits are imbalance.
    """

    track: int
    total: float
    busy: float
    fill: float
    drain: float
    imbalance: float
    communication: float
    host: float

    @property
    def idle(self) -> float:
        return self.total - self.busy

    @property
    def causes(self) -> dict[str, float]:
        return {cause: getattr(self, cause) for cause in CAUSES}


def idle_times(trace: Trace, step: Step) -> list[Idle]:
    """For each rank that has done anything in ``step``."""
    made = {id(crossing.wait): crossing.maker.end for crossing in crossings(trace, step) if crossing.wait is not None}
    even = _even_gaps(trace, step)
    found = []
    for replica in trace.replicas:
        parts = step.of(trace.replica(replica))
        if parts:
            first = min(part.actions[0].start for part in parts)
            last = max(done.end for part in parts for done in part.actions)
            found += [_idle(part.track, part.actions, first, last, made, even) for part in parts]
    return found


def _idle(
    track: int,
    actions: Iterable[Done],
    first: float,
    last: float,
    made: Mapping[int, float],
    even: Mapping[Action, float],
) -> Idle:
    fill = drain = imbalance = communication = host = 0.0
    now, begun, backwards = first, False, False
    for done in actions:
        gap = max(0.0, done.start - now)
        if not begun:
            fill += gap
        elif gap:
            computing, waiting = _waits(done, now, made)
            own = min(computing, even.get(done.action, 0.0))
            if backwards:
                drain += own
            else:
                fill += own
            imbalance += computing - own
            communication += waiting - computing
            host += gap - waiting
        begun, backwards = True, backwards or done.action.kind in BACKWARD
        now = max(now, done.end)
    drain += last - now
    idle = fill + drain + imbalance + communication + host
    return Idle(track, last - first, last - first - idle, fill, drain, imbalance, communication, host)


def _waits(done: Done, now: float, made: Mapping[int, float]) -> tuple[float, float]:
    """Of the time from ``now`` to an action: in which a peer still computes, and all in which any wait goes on."""
    clipped = [(wait, max(wait.start, now), min(wait.end, done.start)) for wait in done.waits]
    waiting = _covered((start, end) for _, start, end in clipped)
    computing = _covered(
        (start, min(end, made.get(id(wait), end))) for wait, start, end in clipped if wait.what == "message"
    )
    return min(computing, waiting), waiting


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """How long their union is."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _even_gaps(trace: Trace, step: Step) -> dict[Action, float]:
    """How long a rank would be idle before each action if stages took the same time, and messages none."""
    places = [track.place for track in trace.tracks]
    schedule = trace.schedule
    try:
        costs = trace.costs()
        times = {
            name: sum(numbers) / len(numbers)
            for name in ("f", "i", "w", "b")
            for numbers in [costs.of_stages(name, schedule.num_stages)]
        }
        again = costs.durations(schedule.num_stages)["R"]
        replica = trace.tracks[step.of(range(len(trace.tracks)))[0].track].replica
        order = step.schedule(schedule.name, schedule.placement, places, trace.replica(replica))
        even = simulate(order, Costs(**times, r=sum(again) / len(again)), trace.edges)
    except PenstockError:  # one rank's part only, or half of a call
        return {}
    gaps = {}
    for actions, starts, ends in zip(even.schedule.orders, even.starts, even.ends, strict=True):
        for action, start, before in zip(actions, starts, (0.0, *ends), strict=False):
            gaps[action] = start - before
    return gaps
