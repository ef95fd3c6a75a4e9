"""A program: one rank's schedule after lowering, compute and communication in one order."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.schedule import BACKWARD, Action, Edge, Schedule, edges_of, neighbours, topological_runs

__all__ = ["Instruction", "Program", "deadlocks", "lower", "vector_clocks"]


class Instruction(NamedTuple):
    """One step of a rank's program.

    ``kind`` is a kind of compute action, or one of ``RECV_F RECV_B`` (post a receive), ``SEND_F SEND_B``,
    ``SENT_F SENT_B`` (that send is over: let go of what was sent) and ``REDUCE`` (the stage's gradients are
    complete). Communication names the edge by its two ends: ``stage`` is this rank's, ``peer`` the other one.
    """

    kind: str
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")
        return text if self.peer < 0 or abs(self.peer - self.stage) == 1 else f"{text}~{self.peer}"


@dataclass(frozen=True)
class Program:
    """What one rank does, communication included.

    ``slots[stage, microbatch]`` numbers the place where the stage keeps what it needs from ``F`` to the end
    of its backward; a stage has ``num_slots[stage]`` of them, as many as its peak in-flight count.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: dict[tuple[int, int], int]
    num_slots: dict[int, int]

    def __str__(self) -> str:
        return " ".join(map(str, self.instructions))


# What must have happened before a message is made: how far each rank is in its order by then, at least.


def vector_clocks(schedule: Schedule, edges: Sequence[Edge]) -> dict[tuple[str, int, int], dict[int, int]]:
    """For what ("F" or "B", stage, micro-batch) sends to other ranks: how many of their actions it stands on.

    Every rank carries a count for each rank, of the actions it knows to be over; a message brings its sender's
    counts along, and the receiver keeps the larger ones.
    """
    sources, targets = neighbours(schedule.num_stages, edges)
    placement = schedule.placement
    known = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]
    sent: dict[tuple[str, int, int], list[int]] = {}
    found: dict[tuple[str, int, int], dict[int, int]] = {}
    for rank, begin, end in topological_runs(schedule, edges).runs:
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


# Whether lowered programs run to their end when a send is only over once its receive is posted, or it is taken.

_Event = tuple[str, int, int, int]  # what, from stage, to stage, micro-batch


def deadlocks(programs: Sequence[Program], *, described: bool = False) -> bool:
    """Run the programs without tensors or time: every rank goes on until it must wait for another one.

    A send is over once its receive is posted; if messages are ``described``, once the action that needs it begins.
    """
    events: set[_Event] = set()
    waits = [_waits(program, described) for program in programs]
    sleeping: dict[_Event, int] = {}
    ready = list(range(len(programs)))
    at = [0] * len(programs)
    while ready:
        rank = ready.pop()
        program = programs[rank].instructions
        while at[rank] < len(program):
            missing = next((e for e in waits[rank][at[rank]] if e not in events), None)
            if missing is not None:
                sleeping[missing] = rank
                break
            for event in _events(program[at[rank]], waits[rank][at[rank]]):
                events.add(event)
                if event in sleeping:
                    ready.append(sleeping.pop(event))
            at[rank] += 1
    return any(pc < len(program.instructions) for pc, program in zip(at, programs, strict=True))


def _events(instruction: Instruction, waited: Sequence[_Event]) -> list[_Event]:
    """What others may wait for: a send, a receive, or, once an action has what it waited for, that this is taken."""
    kind, stage, k, peer = instruction
    if kind.startswith("SEND"):
        return [(kind, stage, peer, k)]
    if kind.startswith("RECV"):
        return [(kind, peer, stage, k)]
    return [(f"TAKE_{what[-1]}", src, dst, k) for what, src, dst, k in waited if what.startswith("SEND")]


def _waits(program: Program, described: bool) -> list[list[_Event]]:
    """What must have happened elsewhere before each instruction: sends before compute, posts or takes before SENT."""
    over = "TAKE" if described else "RECV"
    arrivals: dict[tuple[str, int, int], list[_Event]] = {}
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("RECV"):
            lane = kind[-1]
            arrivals.setdefault((lane, stage, k), []).append((f"SEND_{lane}", peer, stage, k))
    waits: list[list[_Event]] = []
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("SENT"):
            waits.append([(f"{over}_{kind[-1]}", stage, peer, k)])
        elif kind == "F" or kind in BACKWARD:
            waits.append(arrivals.get(("F" if kind == "F" else "B", stage, k), []))
        else:
            waits.append([])
    return waits


# From a schedule to one program per rank: what to send, receive, release and reduce, and when.
#
# A channel carries messages in one direction between two ranks, in the order in which its sender makes them;
# the receiver posts its receives in that same order. Rank 1 of a 1F1B schedule, receives posted two deep:
#
#     1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 ... 1B0 1SEND_B0 1SENT_F0 ...
#     └ posted ahead ─┘              │                         └ the gradient of 1F0's output has come, so its
#                                    └ after 1F0: it cannot      send is over: the output is released
#                                      come earlier
#
# A send never blocks: it is released after the first later action whose input from that peer proves that the
# message was consumed. Where no such action comes, the oldest is waited for once ``live_sends`` are open.


class _Message(NamedTuple):
    """A value that crosses from one rank to another: made by one action, needed by another."""

    src: int  # stage that makes it
    dst: int  # stage that needs it
    microbatch: int
    made: int  # position of the making action in its rank's order
    needed: int  # position of the needing action in its rank's order


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    depth: int = 2,
    live_sends: int = 4,
    described: bool = False,
) -> tuple[Program, ...]:
    """One program per rank, for a schedule that has been verified.

    ``depth`` receives are posted per channel at any time, the one waited for included. ``live_sends`` may be open
    before the oldest is waited for, or as many as the sender has micro-batches in flight, if these are more.
    A message that is ``described`` by a header of its own is received when it is taken, and not when it is posted.
    """
    if depth < 1 or live_sends < 1:
        raise ScheduleError(f"depth and live_sends must be at least 1, got {depth} and {live_sends}")
    crossing = edges_of(schedule, edges)
    messages = _messages(schedule, crossing)
    before_made = vector_clocks(schedule, crossing)
    in_flight = [_peak_in_flight(order) if schedule.trains else 0 for order in schedule.orders]
    ranks = range(schedule.num_ranks)
    before: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in ranks]
    sends: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in ranks]
    sent: list[dict[int, list[Instruction]]] = [defaultdict(list) for _ in ranks]
    for (sender, receiver, lane), channel in messages.items():
        stands_on = [before_made[lane, message.src, message.microbatch][receiver] for message in channel]
        for message, position in zip(channel, _posts(channel, depth, stands_on), strict=True):
            post = Instruction(f"RECV_{lane}", message.dst, message.microbatch, message.src)
            before[receiver][position].append(post)
        answers = _knowledge(chain.from_iterable(messages.get((receiver, sender, x), ()) for x in "FB"))
        open_sends: deque[tuple[int, Instruction]] = deque()
        most = max(live_sends, in_flight[sender])
        for message in channel:
            there = (message.src, message.microbatch, message.dst)
            over = Instruction(f"SENT_{lane}", *there)
            sends[sender][message.made].append(Instruction(f"SEND_{lane}", *there))
            proof = _first_proof(answers, message)
            if proof is not None:
                sent[sender][proof].append(over)
                continue
            open_sends.append((message.made, over))
            if len(open_sends) > most:
                made, oldest = open_sends.popleft()
                (before if made < message.made else sent)[sender][message.made].append(oldest)
        sent[sender][len(schedule.orders[sender])].extend(over for _, over in open_sends)
    programs = tuple(
        _assemble(rank, order, before[rank], sends[rank], sent[rank], schedule.trains)
        for rank, order in enumerate(schedule.orders)
    )
    if deadlocks(programs, described=described):  # a bounded wait closed a circle: let sends pile up instead
        return lower(schedule, edges, depth=depth, live_sends=live_sends * 2, described=described)
    return programs


def _messages(schedule: Schedule, edges: Sequence[Edge]) -> dict[tuple[int, int, str], list[_Message]]:
    """What crosses between ranks, per (sender, receiver, lane), in the order in which it is made."""
    position = {
        ("F" if a.kind == "F" else "B", a.stage, a.microbatch): i
        for order in schedule.orders
        for i, a in enumerate(order)
        if a.kind == "F" or a.kind in BACKWARD
    }
    channels: dict[tuple[int, int, str], list[_Message]] = defaultdict(list)
    for edge in edges:
        for lane, (src, dst) in (("F", edge), ("B", edge[::-1])):
            a, b = schedule.placement[src], schedule.placement[dst]
            if a == b:
                continue
            for k in range(schedule.num_microbatches):
                if (lane, src, k) in position and (lane, dst, k) in position:
                    made, needed = position[lane, src, k], position[lane, dst, k]
                    channels[a, b, lane].append(_Message(src, dst, k, made, needed))
    for channel in channels.values():
        channel.sort(key=lambda message: (message.made, message.dst))
    return dict(channels)


def _posts(channel: Sequence[_Message], depth: int, stands_on: Sequence[int]) -> list[int]:
    """Before which action of the receiver each receive is posted.

    Not later than the action that needs it, nor than the post of a later message (order!); and ``depth - 1``
    messages ahead of that. But not before the receiver's own actions that the message ``stands_on``: it cannot come
    earlier, and on a GPU a receive that waits for the receiver's own work may hold that work up.
    """
    latest = [message.needed for message in channel]
    for i in reversed(range(len(latest) - 1)):
        latest[i] = min(latest[i], latest[i + 1])
    return [max(latest[i - depth + 1] if i >= depth - 1 else 0, own) for i, own in enumerate(stands_on)]


def _knowledge(messages: Iterable[_Message]) -> tuple[list[int], list[int]]:
    """What a rank learns of its peer: after action ``positions[i]``, the peer is past its ``passed[i]``."""
    positions: list[int] = []
    passed: list[int] = []
    for message in sorted(messages, key=lambda message: message.needed):
        if not passed or message.made > passed[-1]:
            positions.append(message.needed)
            passed.append(message.made)
    return positions, passed


def _first_proof(knowledge: tuple[list[int], list[int]], message: _Message) -> int | None:
    """The sender's first action after which the message must have been consumed, if there is one."""
    positions, passed = knowledge
    i = bisect_right(passed, message.needed - 1)
    if i == len(passed):
        return None
    return max(positions[i], message.made)


def _peak_in_flight(order: Sequence[Action]) -> int:
    return max(accumulate({"F": 1, "B": -1, "W": -1}.get(action.kind, 0) for action in order), default=0)


def _assemble(
    rank: int,
    order: Sequence[Action],
    before: dict[int, list[Instruction]],
    sends: dict[int, list[Instruction]],
    sent: dict[int, list[Instruction]],
    trains: bool,
) -> Program:
    last = {action.stage: i for i, action in enumerate(order)}
    out: list[Instruction] = []
    slots: dict[tuple[int, int], int] = {}
    free: dict[int, list[int]] = defaultdict(list)
    num_slots: dict[int, int] = defaultdict(int)
    for i, (stage, kind, k) in enumerate(order):
        out.extend(before[i])
        if kind == "F":
            if not free[stage]:
                free[stage].append(num_slots[stage])
                num_slots[stage] += 1
            slots[stage, k] = free[stage].pop()
        out.append(Instruction(kind, stage, k))
        out.extend(sends[i])
        out.extend(sent[i])
        if kind in "BW" or not trains:
            free[stage].append(slots[stage, k])
        if trains and last[stage] == i:
            out.append(Instruction("REDUCE", stage))
    out.extend(sent[len(order)])
    return Program(rank, tuple(out), slots, dict(num_slots))
