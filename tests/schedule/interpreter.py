"""A tiny machine that runs schedules: the tests' own idea of what one means, independent of verify and simulate."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule.schedule import Action, Schedule

__all__ = ["UNIT", "Run", "bubble", "drawing", "peak_activations", "run"]

UNIT = {"F": 1, "I": 1, "W": 1, "B": 2}
"""Time of an action: a full backward is an input gradient and a weight gradient."""


@dataclass(frozen=True)
class Run:
    starts: dict[Action, float]
    makespan: float


def run(schedule: Schedule, hop: float = 0.0) -> Run:
    """Every rank does its actions in order, each as soon as its inputs are there. Anything illegal is an error."""
    done: dict[tuple[int, str, int], float] = {}  # I and B both count as "I": they make the input's gradient
    starts: dict[Action, float] = {}
    position, clock = [0] * schedule.num_ranks, [0.0] * schedule.num_ranks
    last = schedule.num_stages - 1

    def needs(action: Action) -> list[tuple[int, str, int]]:
        s, kind, k = action
        if kind == "F":
            return [(s - 1, "F", k)] if s else []
        if kind == "W":
            return [(s, "I", k)]
        return [(s, "F", k)] + ([(s + 1, "I", k)] if s < last else [])

    moved = True
    while moved:
        moved = False
        for r, order in enumerate(schedule.orders):
            while position[r] < len(order) and all(need in done for need in needs(order[position[r]])):
                action = order[position[r]]
                assert schedule.placement[action.stage] == r, f"{action} is on the wrong rank {r}"
                assert action not in starts, f"{action} comes twice"
                arrivals = (done[n] + (hop if schedule.placement[n[0]] != r else 0) for n in needs(action))
                starts[action] = max(clock[r], *arrivals, 0)
                clock[r] = starts[action] + UNIT[action.kind]
                key = (action.stage, "I" if action.kind == "B" else action.kind, action.microbatch)
                assert key not in done, f"{action} repeats work that is done"
                done[key] = clock[r]
                position[r] += 1
                moved = True
    stuck = [str(order[i]) for order, i in zip(schedule.orders, position, strict=True) if i < len(order)]
    assert not stuck, f"deadlock before {', '.join(stuck)}"
    return Run(starts, max(clock))


def bubble(schedule: Schedule, hop: float = 0.0) -> float:
    """Per cent of the ranks' time that is not work, when every rank has the same work."""
    work = sum(UNIT[action.kind] for action in schedule.orders[0])
    return round(100 * (1 - work / run(schedule, hop).makespan), 1)


def peak_activations(schedule: Schedule) -> float:
    """The most that a rank holds between F and the end of B or W, in shares of a rank."""
    peak = 0
    for order in schedule.orders:
        held = 0
        for action in order:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, held)
    return peak * schedule.num_ranks / schedule.num_stages


def drawing(schedule: Schedule) -> str:
    """The staircase, as docstrings draw it; with one stage per rank, an action's stage goes without saying."""
    single = schedule.num_stages == schedule.num_ranks
    timeline = run(schedule)
    rows = []
    for r, order in enumerate(schedule.orders):
        cells = ["."] * int(timeline.makespan)
        for action in order:
            at = int(timeline.starts[action])
            cells[at] = str(action)[len(str(action.stage)) :] if single else str(action)
            if action.kind == "B":
                cells[at + 1] = "--" if single else "---"
        width = max(len(cell) for cell in cells)
        while cells[-1] == ".":
            cells.pop()
        rows.append(f"rank {r}: " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)
