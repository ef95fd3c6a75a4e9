"""Verification of schedules: completeness, order, freedom from deadlock, and the peak memory of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from penstock.errors import ScheduleError
from penstock.schedule.schedule import BACKWARD, COMPUTE, Action, Edge, Schedule, edges_of, topological_runs


@dataclass(frozen=True)
class MemoryReport:
    """Peak counts, one entry per rank.

    ``peak_in_flight`` counts (stage, micro-batch) pairs between the forward and the end of their last
    backward action (``B`` or ``W``). It is 0 for a schedule without backwards.
    ``peak_activations`` is ``peak_in_flight`` divided by the number of stages on the rank.
    ``peak_deferred`` counts pairs whose ``I`` is done and whose ``W`` is not.
    """

    peak_in_flight: tuple[int, ...]
    peak_activations: tuple[float, ...]
    peak_deferred: tuple[int, ...]


# The states of one stage and one micro-batch:
#
#     NOTHING --F--> FORWARD --R--> RECOMPUTED     FORWARD, RECOMPUTED --B--> DONE
#                                                  FORWARD, RECOMPUTED --I--> INPUT --W--> DONE
_NOTHING, _FORWARD, _RECOMPUTED, _INPUT, _DONE = range(5)
_TRANSITIONS: tuple[dict[str, int], ...] = (
    {"F": _FORWARD},
    {"R": _RECOMPUTED, "B": _DONE, "I": _INPUT},
    {"B": _DONE, "I": _INPUT},
    {"W": _DONE},
    {},
)
_IN_FLIGHT = {"F": 1, "R": 0, "B": -1, "I": 0, "W": -1}
_DEFERRED = {"F": 0, "R": 0, "B": 0, "I": 1, "W": -1}


def verify(schedule: Schedule, edges: Iterable[Edge] | None = None) -> MemoryReport:
    """Check that ``schedule`` can run, and count the micro-batches in flight on each rank.

    ``edges`` are pairs (source stage, destination stage); by default each stage has an edge to the next one. Channels
    are FIFO, receives are posted in the sender's order and sends do not block. So a schedule deadlocks if and only if
    the orders of its ranks and the data dependencies together have a cycle. Raises ``ScheduleError`` with the action,
    the rank and, for a deadlock, the cycle.
    """
    num_ranks, num_stages, m = schedule.num_ranks, schedule.num_stages, schedule.num_microbatches
    for what, number in (("ranks", num_ranks), ("stages", num_stages), ("micro-batches", m)):
        if number < 1:
            _fail(schedule, f"there are {number} {what}, at least 1 is needed")
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < num_ranks:
            ranks = f"there are {num_ranks} ranks (0..{num_ranks - 1})"
            _fail(schedule, f"stage {stage} is placed on rank {rank}, but {ranks}")
    for rank in sorted(set(range(num_ranks)) - set(schedule.placement)):
        _fail(schedule, f"rank {rank} holds no stage: use fewer ranks, or place a stage there", {rank: (0, "")})
    edges = edges_of(schedule, edges)
    report = _check_orders(schedule)
    _, blocked = topological_runs(schedule, edges)
    if blocked:
        _fail_deadlock(schedule, blocked)
    return report


def _check_orders(schedule: Schedule) -> MemoryReport:
    """Check that each stage runs its actions once, in a valid order, on its own rank; count micro-batches in flight."""
    m, num_stages, placement = schedule.num_microbatches, schedule.num_stages, schedule.placement
    if num_stages * m > sum(map(len, schedule.orders)):  # too few actions: do not allocate for a huge m
        present = {(a.stage, a.microbatch) for order in schedule.orders for a in order}
        pairs = ((stage, microbatch) for stage in range(num_stages) for microbatch in range(m))
        _fail_incomplete(schedule, *next(pair for pair in pairs if pair not in present), _NOTHING)
    state = bytearray(num_stages * m)
    flights, deferreds = [], []
    for rank, order in enumerate(schedule.orders):
        flight = peak_flight = deferred = peak_deferred = 0
        for position, (stage, kind, microbatch) in enumerate(order):
            if not (0 <= stage < num_stages and 0 <= microbatch < m and placement[stage] == rank):
                _fail_illegal(schedule, rank, position)
            state_after = _TRANSITIONS[state[stage * m + microbatch]].get(kind)
            if state_after is None:
                _fail_illegal(schedule, rank, position)
            state[stage * m + microbatch] = state_after
            flight += _IN_FLIGHT[kind]
            deferred += _DEFERRED[kind]
            peak_flight, peak_deferred = max(peak_flight, flight), max(peak_deferred, deferred)
        flights.append(peak_flight)
        deferreds.append(peak_deferred)

    wanted = _DONE if schedule.trains else _FORWARD
    if state.count(wanted) < len(state):
        index = next(i for i, s in enumerate(state) if s != wanted)
        _fail_incomplete(schedule, *divmod(index, m), state[index])
    if not schedule.trains:
        flights = [0] * schedule.num_ranks
    counts = [placement.count(rank) for rank in range(schedule.num_ranks)]
    shares = tuple(flight / count for flight, count in zip(flights, counts, strict=True))
    return MemoryReport(tuple(flights), shares, tuple(deferreds))


def _fail_illegal(schedule: Schedule, rank: int, position: int) -> NoReturn:
    """Raise the error for an action of a stage or micro-batch that does not exist, of a stage on another rank, of
    unknown kind, repeated, too early or too late, or for a B together with I and W.
    """
    order = schedule.orders[rank]
    stage, kind, microbatch = order[position]
    where = f"{order[position]} of rank {rank} (position {position})"
    stages, m = schedule.num_stages, schedule.num_microbatches

    def at(other: str, within: range) -> int | None:
        return next((i for i in within if order[i] == (stage, other, microbatch)), None)

    past, future = range(position), range(position + 1, len(order))
    if not 0 <= stage < stages:
        why = f"{where} is not possible: there is no stage {stage}: there are {stages} (0..{stages - 1})"
    elif not 0 <= microbatch < m:
        why = f"{where} is not possible: there is no micro-batch {microbatch}: there are {m} (0..{m - 1})"
    elif schedule.placement[stage] != rank:
        why = f"{where} is not possible: stage {stage} is on rank {schedule.placement[stage]}"
    elif kind not in COMPUTE:
        why = f"{where} is of an unknown kind: expected one of {', '.join(COMPUTE)}"
    elif (before := at(kind, past)) is not None:
        why = f"{where} occurs a second time: the first is at position {before}"
    elif kind in "BIW" and any(at(other, past) is not None for other in ("B" if kind in "IW" else "IW")):
        why = f"{where} repeats backward work: a stage runs B, or I and W, on a micro-batch, never both"
    elif kind == "R" and any(at(other, past) is not None for other in BACKWARD):
        why = f"{where} is too late: the backward is before it"
    else:
        need = Action(stage, "I" if kind == "W" else "F", microbatch)
        after = at(need.kind, future)
        why = f"{where} needs {need} before it, which " + (
            f"is at position {after}" if after is not None else "is missing"
        )
    _fail(schedule, why, {rank: (position, "")})


def _fail_incomplete(schedule: Schedule, stage: int, microbatch: int, state: int) -> NoReturn:
    """Raise the error for a stage that does not finish a micro-batch."""
    rank = schedule.placement[stage]
    order = schedule.orders[rank]
    if state == _NOTHING:
        missing, rest = f"{stage}F{microbatch}", f"stage {stage} has no action on micro-batch {microbatch}"
    elif state == _INPUT:
        missing, rest = f"{stage}W{microbatch}", f"{stage}I{microbatch} is present, but not its weight gradient"
    else:
        missing = f"{stage}B{microbatch}"
        rest = f"{stage}F{microbatch} is present, but not its backward (B, or I and W)"
    positions = [i for i, a in enumerate(order) if (a.stage, a.microbatch) == (stage, microbatch)]
    mark = (positions[-1], f"{missing} does not follow") if positions else (len(order), f"{missing} is missing")
    _fail(schedule, f"{missing} of rank {rank} is missing: {rest}", {rank: mark})


def _fail_deadlock(schedule: Schedule, blocked: dict[int, tuple[int, int]]) -> NoReturn:
    """Raise the error for a deadlock: follow the waits from rank to rank until a rank repeats, which closes a cycle."""
    trail: list[int] = []
    rank = min(blocked)
    while rank not in trail:
        trail.append(rank)
        rank = schedule.placement[blocked[rank][1]]
    cycle = trail[trail.index(rank) :]

    waits, marks = [], {}
    for rank in cycle:
        position, stage = blocked[rank]
        action = schedule.orders[rank][position]
        owner = schedule.placement[stage]
        kinds = ("F",) if action.kind == "F" else BACKWARD
        needs = [Action(stage, kind, action.microbatch) for kind in kinds]
        need = next(other for other in schedule.orders[owner] if other in needs)
        who = f"rank {owner}" if owner != rank else f"rank {rank} itself, later in its order"
        waits.append(f"at {action} for {need} of {who}")
        marks[rank] = (position, f"waits for {need}")
    why = f"deadlock: rank {cycle[0]} waits " + ", which waits ".join(waits)
    _fail(schedule, why, marks)


_BEFORE, _AFTER = 5, 3
"""Columns shown to the left and to the right of the marked one. The cause of an error is usually before it."""


def _fail(schedule: Schedule, why: str, marks: Mapping[int, tuple[int, str]] | None = None) -> NoReturn:
    """Raise the error with the orders around ``marks``, rank -> (position in its order, remark beside the arrow)::

                  5    6     7    8
        rank 0:  0F5  0B0   0F6  0B1
        rank 1:  1B0  1F3  [1F3] 1B1  <-- here

    The marked cells of several ranks are aligned in one column, with each position beside its row.
    """
    marks = marks or {}
    centres = {position for position, _ in marks.values()}
    common = min(centres, default=0)  # the column that ranks without a mark are shown around
    aligned = len(centres) <= 1
    rows: list[list[str]] = []
    for rank, order in enumerate(schedule.orders):
        position, _ = marks.get(rank, (common, ""))
        cells = []
        for column in range(position - _BEFORE, position + _AFTER + 1):
            text = str(order[column]) if 0 <= column < len(order) else ""
            marked = rank in marks and column == position
            cells.append(f"[{text or '-'}]" if marked else f" {text} ")
        rows.append(cells)
    header = [f" {c} " if c >= 0 else "" for c in range(common - _BEFORE, common + _AFTER + 1)]
    shown = [i for i in range(_BEFORE + _AFTER + 1) if any(row[i].strip() for row in rows)]
    widths = {i: max(len(row[i]) for row in [*rows, header]) for i in shown}
    label = max(len(f"rank {rank}: ") for rank in range(max(1, schedule.num_ranks)))

    lines = [f"schedule {schedule.name!r}: {why}", ""]
    if aligned:
        lines.append(" " * label + "".join(header[i].center(widths[i]) for i in shown).rstrip())
    for rank, cells in enumerate(rows):
        line = f"rank {rank}: ".ljust(label) + "".join(cells[i].center(widths[i]) for i in shown)
        if rank in marks:
            position, remark = marks[rank]
            place = "" if aligned else f" (position {position})"
            line = f"{line} <-- here{place}{': ' if remark else ''}{remark}"
        lines.append(line.rstrip())
    raise ScheduleError("\n".join(lines))
