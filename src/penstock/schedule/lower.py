"""Lowering: from a schedule to one program per rank, with its sends, receives, releases and gradient reductions.

A channel carries messages in one direction between two ranks, in the order in which its sender produces them;
the receiver posts its receives in that same order. Rank 1 of a 1F1B schedule, receives posted two deep:

    1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 ... 1B0 1SEND_B0 1SENT_F0 ...
    └ posted ahead ─┘              │                         └ the gradient of 1F0's output has arrived, so its
                                   └ after 1F0: it depends     send is complete: the output is released
                                     on 1F0

A send never blocks. Its buffer is released after the first later action whose input from that peer proves that the
message was consumed. Where no action proves it, the rank waits for its oldest send once ``live_sends`` are open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from penstock.errors import ScheduleError
from penstock.schedule.schedule import BACKWARD, Action, Edge, Schedule, edges_of, neighbours, topological_runs


class Instruction(NamedTuple):
    """One step of a rank's program.

    ``kind`` is a kind of compute action, or one of ``RECV_F RECV_B`` (post a receive), ``SEND_F SEND_B``,
    ``SENT_F SENT_B`` (release the buffer of that send, which is complete) and ``REDUCE`` (the stage's gradients are
    complete). In communication, ``stage`` is the stage on this rank and ``peer`` the stage on the other rank.
    """

    kind: str
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}" + (str(self.microbatch) if self.microbatch >= 0 else "")
        return text if self.peer < 0 or abs(self.peer - self.stage) == 1 else f"{text}~{self.peer}"


@dataclass(frozen=True)
class LoweredProgram:
    """The instructions of one rank: computation and communication in one order.

    ``slots[stage, microbatch]`` is the number of the slot for the state of that micro-batch from ``F`` to the end of
    its backward. A stage has ``num_slots[stage]`` slots, its peak number of micro-batches in flight.
    """

    rank: int
    instructions: tuple[Instruction, ...]
    slots: dict[tuple[int, int], int]
    num_slots: dict[int, int]

    def __str__(self) -> str:
        return " ".join(map(str, self.instructions))


class _Transfer(NamedTuple):
    """A message from one rank to another."""

    src: int  # stage that produces it
    dst: int  # stage that consumes it
    microbatch: int
    produced: int  # position of the producing action in its rank's order
    consumed: int  # position of the consuming action in its rank's order


_ByPosition = dict[int, list[Instruction]]
"""Instructions by the position of the action in the order of its rank."""


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    *,
    depth: int = 2,
    live_sends: int = 4,
    with_headers: bool = False,
) -> tuple[LoweredProgram, ...]:
    """Lower a verified schedule to one program per rank.

    ``depth`` is the number of receives posted per channel at any time, including the one that the rank waits for. A
    sender waits for its oldest send if the number of open sends exceeds ``live_sends`` and its peak number of
    micro-batches in flight. With ``with_headers``, each message has a header that describes it, and its receive is
    posted when the message is consumed.
    """
    if depth < 1 or live_sends < 1:
        raise ScheduleError(f"depth and live_sends must be at least 1, got {depth} and {live_sends}")
    crossing = edges_of(schedule, edges)
    messages = _messages(schedule, crossing)
    clocks = _vector_clocks(schedule, crossing)
    held = {"F": 1, "B": -1, "W": -1} if schedule.trains else {}
    in_flight = [max(accumulate(held.get(action.kind, 0) for action in o), default=0) for o in schedule.orders]
    before: list[_ByPosition] = [defaultdict(list) for _ in schedule.orders]
    sends: list[_ByPosition] = [defaultdict(list) for _ in schedule.orders]
    sent: list[_ByPosition] = [defaultdict(list) for _ in schedule.orders]
    for (sender, receiver, direction), channel in messages.items():
        # A receive is posted ``depth - 1`` messages before the consuming action, and never after the receive of a later
        # message. It is not posted before the actions of the receiver that the message depends on: the message cannot
        # arrive earlier, and on a GPU a receive that waits for the receiver's own actions may delay them.
        latest = list(accumulate((message.consumed for message in reversed(channel)), min))[::-1]
        for message, ahead in zip(channel, [0] * (depth - 1) + latest, strict=False):
            position = max(ahead, clocks[direction, message.src, message.microbatch][receiver])
            post = Instruction(f"RECV_{direction}", message.dst, message.microbatch, message.src)
            before[receiver][position].append(post)
        # After its own action ``positions[i]``, the sender knows that the receiver is past action ``passed[i]``.
        positions: list[int] = []
        passed: list[int] = []
        answers = chain.from_iterable(messages.get((receiver, sender, x), ()) for x in "FB")
        for message in sorted(answers, key=lambda message: message.consumed):
            if not passed or message.produced > passed[-1]:
                positions.append(message.consumed)
                passed.append(message.produced)
        open_sends: deque[tuple[int, Instruction]] = deque()
        limit = max(live_sends, in_flight[sender])
        for message in channel:
            key = (message.src, message.microbatch, message.dst)
            release = Instruction(f"SENT_{direction}", *key)
            sends[sender][message.produced].append(Instruction(f"SEND_{direction}", *key))
            proof = bisect_right(passed, message.consumed - 1)
            if proof < len(passed):  # the first action of the sender that proves that the message was consumed
                sent[sender][max(positions[proof], message.produced)].append(release)
                continue
            open_sends.append((message.produced, release))
            if len(open_sends) > limit:
                produced, oldest = open_sends.popleft()
                (before if produced < message.produced else sent)[sender][message.produced].append(oldest)
        sent[sender][len(schedule.orders[sender])].extend(release for _, release in open_sends)
    programs = tuple(
        _assemble(rank, order, before[rank], sends[rank], sent[rank], schedule.trains)
        for rank, order in enumerate(schedule.orders)
    )
    if deadlocks(programs, with_headers=with_headers):  # the limit on open sends closed a cycle: raise it
        return lower(schedule, edges, depth=depth, live_sends=live_sends * 2, with_headers=with_headers)
    return programs


def _messages(schedule: Schedule, edges: Sequence[Edge]) -> dict[tuple[int, int, str], list[_Transfer]]:
    """The messages between ranks, per (sender, receiver, direction), in the order in which they are produced."""
    position = {
        ("F" if a.kind == "F" else "B", a.stage, a.microbatch): i
        for order in schedule.orders
        for i, a in enumerate(order)
        if a.kind == "F" or a.kind in BACKWARD
    }
    channels: dict[tuple[int, int, str], list[_Transfer]] = defaultdict(list)
    for edge in edges:
        for direction, (src, dst) in (("F", edge), ("B", edge[::-1])):
            a, b = schedule.placement[src], schedule.placement[dst]
            if a == b:
                continue
            for k in range(schedule.num_microbatches):
                if (direction, src, k) in position and (direction, dst, k) in position:
                    produced, consumed = position[direction, src, k], position[direction, dst, k]
                    channels[a, b, direction].append(_Transfer(src, dst, k, produced, consumed))
    for channel in channels.values():
        channel.sort(key=lambda message: (message.produced, message.dst))
    return dict(channels)


def _assemble(
    rank: int, order: Sequence[Action], before: _ByPosition, sends: _ByPosition, sent: _ByPosition, trains: bool
) -> LoweredProgram:
    """Assemble the program of a rank: each action with its receives, sends and releases, and its slot."""
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
    return LoweredProgram(rank, tuple(out), slots, dict(num_slots))


def _vector_clocks(schedule: Schedule, edges: Sequence[Edge]) -> dict[tuple[str, int, int], list[int]]:
    """For each message ("F" or "B", source stage, micro-batch) and rank: the number of actions of the rank that the
    message depends on.

    These are vector clocks. Each rank counts, for every rank, the actions that are known to be complete. A message has
    the counts of its sender, and the receiver takes the maximum.
    """
    sources, targets = neighbours(schedule.num_stages, edges)
    placement = schedule.placement
    known = [[0] * schedule.num_ranks for _ in range(schedule.num_ranks)]
    sent: dict[tuple[str, int, int], list[int]] = {}
    for rank, begin, end in topological_runs(schedule, edges)[0]:
        mine = known[rank]
        for i in range(begin, end):
            stage, kind, k = schedule.orders[rank][i]
            mine[rank] = i + 1
            if kind == "F":
                direction, inputs, outputs = "F", sources[stage], targets[stage]
            elif kind in BACKWARD:
                direction, inputs, outputs = "B", targets[stage], sources[stage]
            else:
                continue
            for other in inputs:
                if placement[other] != rank:
                    known[rank] = mine = list(map(max, mine, sent[direction, other, k]))
            if any(placement[other] != rank for other in outputs):
                sent[direction, stage, k] = list(mine)
    return sent


def deadlocks(programs: Sequence[LoweredProgram], *, with_headers: bool = False) -> bool:
    """Whether the programs deadlock if sends complete only with their receives.

    A send completes when its receive is posted; with headers, when the consuming action begins ("TAKE").
    """
    completion = "TAKE" if with_headers else "RECV"
    inputs: dict[tuple[str, int, int], list[tuple[str, int, int, int]]] = defaultdict(list)  # messages of an action
    for program in programs:
        for kind, stage, k, peer in program.instructions:
            if kind.startswith("RECV"):
                inputs[kind[-1], stage, k].append((kind[-1], peer, stage, k))
    events: set[tuple[str, str, int, int, int]] = set()  # "SEND", "RECV" or "TAKE", and the message
    at, before = [0] * len(programs), [-1]
    while at != before:
        before = list(at)
        for rank, program in enumerate(programs):
            for kind, stage, k, peer in program.instructions[at[rank] :]:
                direction = "F" if kind == "F" else "B" if kind in BACKWARD else ""
                messages = inputs.get((direction, stage, k), ())
                if any(("SEND", *message) not in events for message in messages):
                    break
                if kind.startswith("SENT") and (completion, kind[-1], stage, peer, k) not in events:
                    break
                if kind.startswith("SEND"):
                    events.add(("SEND", kind[-1], stage, peer, k))
                elif kind.startswith("RECV"):
                    events.add(("RECV", kind[-1], peer, stage, k))
                events.update(("TAKE", *message) for message in messages)
                at[rank] += 1
    return any(done < len(program.instructions) for done, program in zip(at, programs, strict=True))
