"""Lowering: the sends, receives and releases of every rank, for every schedule.

The properties are checked on the programs themselves, by an interpreter that shares no code with the library:
a rank runs until it must wait, a value arrives once it was sent, and a send completes once its receive is posted; or,
where messages have headers, once the message is consumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.fill_drain import fill_drain
from penstock.schedule.lower import Instruction, LoweredProgram, lower
from penstock.schedule.registry import build
from penstock.schedule.schedule import Schedule
from penstock.schedule.verify import verify
from tests.schedule.samples import schedules, staircase

pytestmark = pytest.mark.slow

SIZES = list(product((1, 2, 3, 4), (1, 2, 3, 5, 8)))
Edges = Sequence[tuple[int, int]]
lowered = cache(lower)
Message = tuple[str, int, int, int]  # direction, from stage, to stage, micro-batch


def chain(num_stages: int) -> Edges:
    """Every stage feeds the next."""
    return [(s, s + 1) for s in range(num_stages - 1)]


def message(i: Instruction) -> Message:
    """The message that a RECV, SEND or SENT is about."""
    ends = (i.peer, i.stage) if i.kind.startswith("RECV") else (i.stage, i.peer)
    return i.kind[-1], *ends, i.microbatch


def expected_messages(schedule: Schedule, edges: Edges) -> set[Message]:
    """All messages between ranks: outputs forward and, in training, gradients backward."""
    directions = [("F", a, b) for a, b in edges] + ([("B", b, a) for a, b in edges] if schedule.trains else [])
    apart = [(direction, a, b) for direction, a, b in directions if schedule.placement[a] != schedule.placement[b]]
    return {(direction, a, b, k) for direction, a, b in apart for k in range(schedule.num_microbatches)}


def of_kind(program: LoweredProgram, kind: str) -> list[Message]:
    return [message(i) for i in program.instructions if i.kind.startswith(kind)]


def direction_of(i: Instruction) -> str:
    return "F" if i.kind == "F" else "B"


def needs(i: Instruction, edges: Edges, schedule: Schedule) -> list[Message]:
    """The messages from other ranks without which an action cannot begin."""
    if i.kind not in ("F", "B", "I"):
        return []
    direction = direction_of(i)
    sources = [a for a, b in edges if b == i.stage] if direction == "F" else [b for a, b in edges if a == i.stage]
    here = schedule.placement[i.stage]
    return [(direction, a, i.stage, i.microbatch) for a in sources if schedule.placement[a] != here]


def describe(schedule: Schedule) -> str:
    return f"{schedule.name} p={schedule.num_ranks} stages={schedule.num_stages} m={schedule.num_microbatches}"


# ── one example ────────────────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_of_1f1b() -> None:
    schedule = staircase(
        "F0 F1 .  B0 .  B1",
        ".  F0 B0 F1 B1 . ",
    )
    assert [str(program) for program in lowered(schedule)] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0SENT_F0 0B1 0SENT_F1 0REDUCE",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1SENT_B0 1SENT_B1",
    ]


def test_one_rank_sends_nothing() -> None:
    (program,) = lower(build("interleaved", 1, 3, 2))
    assert {i.kind for i in program.instructions} == {"F", "B", "REDUCE"}


@pytest.mark.parametrize("bad", [{"depth": 0}, {"live_sends": 0}, {"depth": -1}])
def test_bounds_are_at_least_one(bad: dict[str, int]) -> None:
    with pytest.raises(ScheduleError, match="at least 1"):
        lower(build("1f1b", 2, 2), **bad)


# ── every schedule ───────────────────────────────────────────────────────────────────────────────────────────────


def test_compute_keeps_its_order() -> None:
    for schedule in schedules(SIZES):
        for order, program in zip(schedule.orders, lowered(schedule), strict=True):
            done = [(i.stage, i.kind, i.microbatch) for i in program.instructions if i.kind in "FRBIW"]
            assert done == [tuple(action) for action in order], describe(schedule)


def test_every_message_is_sent_once_received_once_and_released_once() -> None:
    for schedule in schedules(SIZES):
        expected = Counter(expected_messages(schedule, chain(schedule.num_stages)))
        programs = lowered(schedule)
        for kind in ("SEND", "RECV", "SENT"):
            assert Counter(x for program in programs for x in of_kind(program, kind)) == expected, describe(schedule)


def test_a_message_is_sent_when_made_posted_before_needed_and_released_after_sending() -> None:
    for schedule in schedules(SIZES):
        edges = chain(schedule.num_stages)
        for program in lowered(schedule):
            posted: set[Message] = set()
            sent: set[Message] = set()
            made: set[tuple[str, int, int]] = set()
            for i in program.instructions:
                assert set(needs(i, edges, schedule)) <= posted, f"{i} of {describe(schedule)}"
                if i.kind in ("F", "B", "I"):
                    made.add((direction_of(i), i.stage, i.microbatch))
                elif i.kind.startswith("RECV"):
                    posted.add(message(i))
                elif i.kind.startswith("SEND"):
                    assert (i.kind[-1], i.stage, i.microbatch) in made
                    sent.add(message(i))
                elif i.kind.startswith("SENT"):
                    assert message(i) in sent


def test_receives_are_posted_in_the_order_of_the_sends() -> None:
    """Both ends of a channel (sender, receiver, direction) must agree, or a message lands in another one's buffer."""
    for schedule in schedules(SIZES):
        programs = lowered(schedule)
        sends = _by_channel(schedule, programs, "SEND")
        assert _by_channel(schedule, programs, "RECV") == sends, describe(schedule)


def test_no_receive_is_posted_before_the_actions_of_its_own_rank_that_it_depends_on() -> None:
    """A pending NCCL receive on the GPU may block the loading of a kernel, which would deadlock."""
    for schedule in schedules([(2, 3), (3, 4), (4, 2)]):
        causes = _causes(schedule, chain(schedule.num_stages))
        for program in lowered(schedule):
            to_do = [i for i in program.instructions if i.kind in ("F", "B", "I")]
            for i in program.instructions:
                if i.kind in ("F", "B", "I"):
                    to_do.remove(i)
                elif i.kind.startswith("RECV"):
                    made = (i.kind[-1], i.peer, i.microbatch)
                    held = {(direction_of(x), x.stage, x.microbatch) for x in to_do} & causes[made]
                    assert not held, f"{i} of {describe(schedule)} waits for {held}"


def _causes(schedule: Schedule, edges: Edges) -> dict[tuple[str, int, int], set[tuple[str, int, int]]]:
    """All transitive dependencies of each (direction, stage, micro-batch), computed naively."""
    direct: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for order in schedule.orders:
        before = None
        for stage, kind, k in order:
            if kind == "W":
                continue
            here = ("F" if kind == "F" else "B", stage, k)
            direct[here] = set() if before is None else {before}
            direct[here] |= {("F", src, k) for src, dst in edges if dst == stage and here[0] == "F"}
            direct[here] |= {("B", dst, k) for src, dst in edges if src == stage and here[0] == "B"}
            before = here
    found: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}

    def all_of(here: tuple[str, int, int]) -> set[tuple[str, int, int]]:
        if here not in found:
            found[here] = set()
            for other in direct.get(here, ()):
                if other in direct:
                    found[here] |= {other} | all_of(other)
        return found[here]

    return {here: all_of(here) for here in direct}


def _by_channel(
    schedule: Schedule, programs: Sequence[LoweredProgram], kind: str
) -> dict[tuple[int, int, str], list[Message]]:
    channels: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    for program in programs:
        for found in of_kind(program, kind):
            direction, src, dst, _ = found
            channels[schedule.placement[src], schedule.placement[dst], direction].append(found)
    return channels


def test_at_most_depth_receives_wait_in_a_channel() -> None:
    """A receiver that consumes messages in another order than they are sent must post up to the one it consumes."""
    for schedule, depth in product(schedules(SIZES), (1, 2, 3)):
        edges = chain(schedule.num_stages)
        for program in lower(schedule, depth=depth):
            taken_in_order = _taken(program, edges, schedule)
            waiting: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
            for i in program.instructions:
                for found in needs(i, edges, schedule):
                    waiting[_channel(schedule, found)].remove(found)
                if i.kind.startswith("RECV"):
                    channel = _channel(schedule, message(i))
                    waiting[channel].append(message(i))
                    if taken_in_order[channel]:
                        assert len(waiting[channel]) <= depth, f"{i} of {describe(schedule)}"


def _channel(schedule: Schedule, found: Message) -> tuple[int, int, str]:
    direction, src, dst, _ = found
    return schedule.placement[src], schedule.placement[dst], direction


def _taken(program: LoweredProgram, edges: Edges, schedule: Schedule) -> dict[tuple[int, int, str], bool]:
    """For each channel into this rank, whether messages are consumed in the order in which they are sent."""
    posted: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    taken: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    for i in program.instructions:
        for found in needs(i, edges, schedule):
            taken[_channel(schedule, found)].append(found)
        if i.kind.startswith("RECV"):
            posted[_channel(schedule, message(i))].append(message(i))
    return {channel: posted[channel] == taken[channel] for channel in posted}


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run(schedule: Schedule, programs: Sequence[LoweredProgram], edges: Edges, *, with_headers: bool = False) -> int:
    """Run the programs to their end, or raise; return the largest number of open sends of a rank.

    A channel is a FIFO: its k-th send meets its k-th receive. An action waits for the sends of what it needs, SENT
    waits for its receive to be posted, or its message to be taken, and SEND and RECV never wait.
    """
    at = [0] * len(programs)
    sent: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    posted: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    done: set[tuple[str, int, int]] = set()
    taken: set[Message] = set()
    open_sends = [0] * len(programs)
    most = 0
    progress = True
    while progress:
        progress = False
        for rank in range(len(programs)):
            program = programs[rank].instructions
            while at[rank] < len(program):
                i = program[at[rank]]
                if i.kind in ("F", "B", "I"):
                    if not all(_arrived(found, sent, posted, schedule) for found in needs(i, edges, schedule)):
                        break
                    if not _local_inputs_done(i, edges, schedule, done):
                        break
                    done.add((direction_of(i), i.stage, i.microbatch))
                    taken.update(needs(i, edges, schedule))
                elif i.kind.startswith("SENT"):
                    found = message(i)
                    channel = _channel(schedule, found)
                    if len(posted[channel]) <= sent[channel].index(found) or (with_headers and found not in taken):
                        break
                    open_sends[rank] -= 1
                elif i.kind.startswith("SEND"):
                    sent[_channel(schedule, message(i))].append(message(i))
                    open_sends[rank] += 1
                    most = max(most, open_sends[rank])
                elif i.kind.startswith("RECV"):
                    posted[_channel(schedule, message(i))].append(message(i))
                at[rank] += 1
                progress = True
    stuck = {r: str(p.instructions[at[r]]) for r, p in enumerate(programs) if at[r] < len(p.instructions)}
    assert not stuck, f"{describe(schedule)} is stuck: {stuck}"
    assert open_sends == [0] * len(programs)
    return most


def _arrived(
    found: Message,
    sent: dict[tuple[int, int, str], list[Message]],
    posted: dict[tuple[int, int, str], list[Message]],
    schedule: Schedule,
) -> bool:
    """Whether the message for this receive has been sent; it must be the expected one."""
    channel = _channel(schedule, found)
    place = posted[channel].index(found)
    if len(sent[channel]) <= place:
        return False
    assert sent[channel][place] == found
    return True


def _local_inputs_done(i: Instruction, edges: Edges, schedule: Schedule, done: set[tuple[str, int, int]]) -> bool:
    direction = direction_of(i)
    sources = [a for a, b in edges if b == i.stage] if direction == "F" else [b for a, b in edges if a == i.stage]
    here = schedule.placement[i.stage]
    own = {(direction, a, i.microbatch) for a in sources if schedule.placement[a] == here}
    return own <= done


@pytest.mark.slow
def test_every_program_runs_to_its_end() -> None:
    for schedule in schedules(SIZES):
        edges = chain(schedule.num_stages)
        for live_sends, depth, with_headers in ((1, 1, False), (1, 2, True), (4, 1, True), (4, 2, False)):  # all pairs
            programs = lower(schedule, depth=depth, live_sends=live_sends, with_headers=with_headers)
            run(schedule, programs, edges, with_headers=with_headers)


def test_values_that_skip_stages() -> None:
    """Every stage feeds the next, and the first one feeds all: two messages of one action may go to one rank."""
    for schedule in schedules([(2, 3), (3, 5), (4, 4)]):
        edges = [*chain(schedule.num_stages), *((0, s) for s in range(2, schedule.num_stages))]
        verify(schedule, edges)
        expected = Counter(expected_messages(schedule, edges))
        for live_sends, with_headers in product((1, 2, 4), (False, True)):
            programs = lower(schedule, edges, live_sends=live_sends, with_headers=with_headers)
            for program in programs:
                sent: set[Message] = set()
                for i in program.instructions:
                    if i.kind.startswith("SENT"):
                        assert message(i) in sent, f"{i} before its send in {describe(schedule)}"
                    elif i.kind.startswith("SEND"):
                        sent.add(message(i))
            for kind in ("SEND", "RECV", "SENT"):
                assert Counter(x for program in programs for x in of_kind(program, kind)) == expected
            run(schedule, programs, edges, with_headers=with_headers)


def test_a_program_for_messages_without_headers_may_deadlock_with_headers() -> None:
    """A rank waits for a message to be consumed by a rank that waits for its next message."""
    schedule = build("forward_only", 2, 5, 2)
    edges = [*chain(4), (0, 2), (0, 3)]
    verify(schedule, edges)
    with pytest.raises(AssertionError, match="stuck"):
        run(schedule, lower(schedule, edges, live_sends=1), edges, with_headers=True)


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("with_headers", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "zbv"])
@pytest.mark.parametrize("p", [2, 4])
def test_open_sends_do_not_grow_with_the_number_of_micro_batches(name: str, p: int, with_headers: bool) -> None:
    most = []
    for m in (16, 64):
        schedule = build(name, p, m)
        programs = lower(schedule, with_headers=with_headers)
        most.append(run(schedule, programs, chain(schedule.num_stages), with_headers=with_headers))
    assert most[0] == most[1] <= 4 * p


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_open_sends_of_evaluation_are_bounded(p: int, v: int) -> None:
    """No gradient proves a send complete, so a rank waits for its oldest send when four are open."""
    most = []
    for m in (8, 64):
        schedule = build("forward_only", p, m, v)
        most.append(run(schedule, lower(schedule, live_sends=4), chain(schedule.num_stages)))
    assert most[0] == most[1] <= 2 * 5


def test_filling_and_draining_on_any_placement() -> None:
    """The schedule of ``pipe(x)``, with the placement of training."""
    for placement in [(0,), (0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)]:
        for m, backward in product((1, 2, 5), (True, False)):
            schedule = fill_drain(placement, m, backward=backward)
            run(schedule, lowered(schedule), chain(len(placement)))


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_two_micro_batches_in_flight_share_a_slot_and_none_is_wasted() -> None:
    for schedule in schedules(SIZES):
        for rank, program in enumerate(lowered(schedule)):
            flying: dict[int, dict[int, int]] = defaultdict(dict)  # stage -> slot -> micro-batch
            peak: Counter[int] = Counter()
            total = peak_total = 0
            for stage, kind, k in schedule.orders[rank]:
                slot = program.slots[stage, k]
                if kind == "F":
                    assert slot not in flying[stage], describe(schedule)
                    flying[stage][slot] = k
                    peak[stage] = max(peak[stage], len(flying[stage]))
                    total += 1
                assert flying[stage][slot] == k
                if kind in ("B", "W") or not schedule.trains:
                    del flying[stage][slot]
                    total -= 1
                peak_total = max(peak_total, total)
            assert not any(flying.values())
            assert program.num_slots == dict(peak), describe(schedule)
            assert set(program.slots) == {
                (s, k) for s in schedule.stages_of(rank) for k in range(schedule.num_microbatches)
            }
            if schedule.trains:
                assert peak_total == verify(schedule).peak_in_flight[rank]


def test_slots_of_1f1b() -> None:
    for m in (8, 64):
        assert [program.num_slots for program in lower(build("1f1b", 4, m))] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]


def test_a_stages_gradients_are_reduced_once_after_its_last_backward() -> None:
    for schedule in schedules(SIZES):
        for rank, program in enumerate(lowered(schedule)):
            places = {i.stage: n for n, i in enumerate(program.instructions) if i.kind == "REDUCE"}
            kinds = [i.kind for i in program.instructions]
            if not schedule.trains:
                assert "REDUCE" not in kinds
                continue
            assert kinds.count("REDUCE") == len(places) == len(schedule.stages_of(rank))
            for n, i in enumerate(program.instructions):
                if i.kind in "FRBIW":
                    assert n < places[i.stage]
