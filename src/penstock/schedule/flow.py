"""How work flows between ranks: who waits for whom, and an order in which everything can be done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import BACKWARD
from penstock.schedule.schedule import Schedule

__all__ = ["Edge", "Flow", "edges_of", "flow", "neighbours"]

Edge = tuple[int, int]
"""A value that crosses from one stage to a later one: (source stage, destination stage)."""


def edges_of(schedule: Schedule, edges: Iterable[Edge] | None = None) -> tuple[Edge, ...]:
    """The given edges, checked, or the chain: every stage feeds the next."""
    num_stages = schedule.num_stages
    if edges is None:
        return tuple((s, s + 1) for s in range(num_stages - 1))
    unique = tuple(dict.fromkeys(edges))
    for src, dst in unique:
        if not 0 <= src < dst < num_stages:
            raise ScheduleError(
                f"edge {src}->{dst} is not possible: an edge goes from a stage to a later one, "
                f"and there are {num_stages} stages (0..{num_stages - 1})"
            )
    return unique


def neighbours(num_stages: int, edges: Iterable[Edge]) -> tuple[list[list[int]], list[list[int]]]:
    """For each stage, the stages that feed it, and the stages it feeds."""
    sources: list[list[int]] = [[] for _ in range(num_stages)]
    targets: list[list[int]] = [[] for _ in range(num_stages)]
    for src, dst in edges:
        sources[dst].append(src)
        targets[src].append(dst)
    return sources, targets


@dataclass(frozen=True)
class Flow:
    """The outcome of letting every rank run as far as it can.

    ``runs`` holds (rank, begin, end): the rank did ``orders[rank][begin:end]`` without waiting. Taken one
    after the other, they respect every dependency. ``stuck`` maps each rank that could not finish to the
    position where it waits and the stage whose work, on the same micro-batch, it waits for.
    """

    runs: tuple[tuple[int, int, int], ...]
    stuck: dict[int, tuple[int, int]]


def flow(schedule: Schedule, edges: Iterable[Edge]) -> Flow:
    """Let every rank run as far as it can, in time linear in the number of actions.

    A forward waits for the forwards of the stages that feed it, a backward for the backwards of the stages
    it feeds. Sends do not block and receives are posted in the sender's order, so nothing else can wait.
    What a stage needs of itself is taken as given: it is a matter of one rank's order (see ``verify``).
    """
    m, size = schedule.num_microbatches, schedule.num_stages * schedule.num_microbatches
    sources, targets = neighbours(schedule.num_stages, edges)
    done = bytearray(2 * size)  # forward of stage s on micro-batch k at s*m + k, backward at size + s*m + k
    position = [0] * schedule.num_ranks
    waiting: dict[int, list[int]] = {}  # index in done -> ranks that wait for it
    stuck: dict[int, tuple[int, int]] = {}
    runs = []
    ready = list(reversed(range(schedule.num_ranks)))
    while ready:
        rank = ready.pop()
        order = schedule.orders[rank]
        begin = at = position[rank]
        while at < len(order):
            stage, kind, microbatch = order[at]
            if kind == "F":
                needed, half = sources[stage], 0
            elif kind in BACKWARD:
                needed, half = targets[stage], size
            else:
                at += 1
                continue
            for other in needed:
                if not done[half + other * m + microbatch]:
                    waiting.setdefault(half + other * m + microbatch, []).append(rank)
                    stuck[rank] = (at, other)
                    break
            else:
                key = half + stage * m + microbatch
                done[key] = 1
                if key in waiting:
                    for other in waiting.pop(key):
                        del stuck[other]
                        ready.append(other)
                at += 1
                continue
            break
        position[rank] = at
        if at > begin:
            runs.append((rank, begin, at))
    return Flow(tuple(runs), stuck)
