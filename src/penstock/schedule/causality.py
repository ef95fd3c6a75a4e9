"""What must have happened before a message is made: how far each rank is in its order by then, at least."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import BACKWARD
from penstock.schedule.flow import Edge, flow, neighbours
from penstock.schedule.schedule import Schedule

__all__ = ["history"]


def history(schedule: Schedule, edges: Sequence[Edge]) -> dict[tuple[str, int, int], dict[int, int]]:
    """For what ("F" or "B", stage, micro-batch) sends to other ranks: how many of their actions it stands on.

    Every rank carries a count for each rank, of the actions it knows to be over; a message brings its sender's
    counts along, and the receiver keeps the larger ones.
    """
    sources, targets = neighbours(schedule.num_stages, edges)
    placement = schedule.placement
    known = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]
    sent: dict[tuple[str, int, int], list[int]] = {}
    found: dict[tuple[str, int, int], dict[int, int]] = {}
    for rank, begin, end in flow(schedule, edges).runs:
        mine = known[rank]
        for i in range(begin, end):
            stage, kind, k = schedule.orders[rank][i]
            mine[rank] = i + 1
            if kind == "F":
                lane, coming, going = "F", sources[stage], targets[stage]
            elif kind in BACKWARD:
                lane, coming, going = "B", targets[stage], sources[stage]
            else:
                continue
            for other in coming:
                if placement[other] != rank:
                    known[rank] = mine = list(map(max, mine, sent[lane, other, k]))
            there = {placement[other] for other in going} - {rank}
            if there:
                sent[lane, stage, k] = list(mine)
                found[lane, stage, k] = {other: mine[other] for other in there}
    return found
