"""Lowering: what every rank sends, receives and lets go, for every schedule.

The properties are checked on the programs themselves, by a simulator that shares no code with the library:
a rank goes on until it must wait, a value is there once it was sent, and a send is over once its receive is posted; or,
where a header describes each message, once the message is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import product

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.fill_drain import fill_drain
from penstock.schedule.lower import Instruction, Program, lower
from penstock.schedule.registry import build
from penstock.schedule.schedule import Schedule
from penstock.schedule.verify import verify
from tests.schedule.zoo import VARIANTS, label, staircase

SIZES = list(product((1, 2, 3, 4), (1, 2, 3, 5, 8)))
Edges = Sequence[tuple[int, int]]
Message = tuple[str, int, int, int]  # lane, from stage, to stage, micro-batch


def line(num_stages: int) -> Edges:
    """Every stage feeds the next."""
    return [(s, s + 1) for s in range(num_stages - 1)]


def message(i: Instruction) -> Message:
    """The message that a RECV, SEND or SENT is about."""
    ends = (i.peer, i.stage) if i.kind.startswith("RECV") else (i.stage, i.peer)
    return i.kind[-1], *ends, i.microbatch


def expected_messages(schedule: Schedule, edges: Edges) -> set[Message]:
    """All that crosses between ranks: outputs forward and, in training, gradients backward."""
    lanes = [("F", a, b) for a, b in edges] + ([("B", b, a) for a, b in edges] if schedule.trains else [])
    apart = [(lane, a, b) for lane, a, b in lanes if schedule.placement[a] != schedule.placement[b]]
    return {(lane, a, b, k) for lane, a, b in apart for k in range(schedule.num_microbatches)}


def of_kind(program: Program, kind: str) -> list[Message]:
    return [message(i) for i in program.instructions if i.kind.startswith(kind)]


def lane_of(i: Instruction) -> str:
    return "F" if i.kind == "F" else "B"


def needs(i: Instruction, edges: Edges, schedule: Schedule) -> list[Message]:
    """The messages from other ranks without which an action cannot begin."""
    if i.kind not in ("F", "B", "I"):
        return []
    lane = lane_of(i)
    sources = [a for a, b in edges if b == i.stage] if lane == "F" else [b for a, b in edges if a == i.stage]
    here = schedule.placement[i.stage]
    return [(lane, a, i.stage, i.microbatch) for a in sources if schedule.placement[a] != here]


def describe(schedule: Schedule) -> str:
    return f"{schedule.name} p={schedule.num_ranks} stages={schedule.num_stages} m={schedule.num_microbatches}"


# ── one drawn example ────────────────────────────────────────────────────────────────────────────────────────────


def test_two_ranks_of_1f1b_as_one_writes_them() -> None:
    schedule = staircase(
        "F0 F1 .  B0 .  B1",
        ".  F0 B0 F1 B1 . ",
    )
    assert [str(program) for program in lower(schedule)] == [
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


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_compute_keeps_its_order(name: str, v: int | None) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        for order, program in zip(schedule.orders, lower(schedule), strict=True):
            done = [(i.stage, i.kind, i.microbatch) for i in program.instructions if i.kind in "FRBIW"]
            assert done == [tuple(action) for action in order], describe(schedule)


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_every_message_is_sent_once_received_once_and_let_go_once(name: str, v: int | None) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        expected = Counter(expected_messages(schedule, line(schedule.num_stages)))
        programs = lower(schedule)
        for kind in ("SEND", "RECV", "SENT"):
            assert Counter(x for program in programs for x in of_kind(program, kind)) == expected, describe(schedule)


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_a_message_is_sent_when_made_posted_before_needed_and_let_go_after_sending(name: str, v: int | None) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        edges = line(schedule.num_stages)
        for program in lower(schedule):
            posted: set[Message] = set()
            sent: set[Message] = set()
            made: set[tuple[str, int, int]] = set()
            for i in program.instructions:
                assert set(needs(i, edges, schedule)) <= posted, f"{i} of {describe(schedule)}"
                if i.kind in ("F", "B", "I"):
                    made.add((lane_of(i), i.stage, i.microbatch))
                elif i.kind.startswith("RECV"):
                    posted.add(message(i))
                elif i.kind.startswith("SEND"):
                    assert (i.kind[-1], i.stage, i.microbatch) in made
                    sent.add(message(i))
                elif i.kind.startswith("SENT"):
                    assert message(i) in sent


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_receives_are_posted_in_the_order_of_the_sends(name: str, v: int | None) -> None:
    """Both ends of a channel (sender, receiver, lane) must agree, or a message lands in another one's buffer."""
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        programs = lower(schedule)
        sends = _by_channel(schedule, programs, "SEND")
        assert _by_channel(schedule, programs, "RECV") == sends, describe(schedule)


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_no_receive_is_posted_that_waits_for_what_its_own_rank_has_yet_to_do(name: str, v: int | None) -> None:
    """A receive that NCCL runs on the GPU may hold up the loading of a kernel: then both would wait for ever."""
    for p, m in [(2, 3), (3, 4), (4, 2)]:
        schedule = build(name, p, m, v)
        causes = _causes(schedule, line(schedule.num_stages))
        for program in lower(schedule):
            to_do = [i for i in program.instructions if i.kind in ("F", "B", "I")]
            for i in program.instructions:
                if i.kind in ("F", "B", "I"):
                    to_do.remove(i)
                elif i.kind.startswith("RECV"):
                    made = (i.kind[-1], i.peer, i.microbatch)
                    held = {(lane_of(x), x.stage, x.microbatch) for x in to_do} & causes[made]
                    assert not held, f"{i} of {describe(schedule)} waits for {held}"


def _causes(schedule: Schedule, edges: Edges) -> dict[tuple[str, int, int], set[tuple[str, int, int]]]:
    """Everything that must be over before each (lane, stage, micro-batch): the long way round."""
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
    schedule: Schedule, programs: Sequence[Program], kind: str
) -> dict[tuple[int, int, str], list[Message]]:
    channels: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    for program in programs:
        for found in of_kind(program, kind):
            lane, src, dst, _ = found
            channels[schedule.placement[src], schedule.placement[dst], lane].append(found)
    return channels


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_at_most_depth_receives_wait_in_a_channel(name: str, v: int | None, depth: int) -> None:
    """Where the receiver takes messages in another order than they are sent, it must post up to the one it takes."""
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        edges = line(schedule.num_stages)
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
    lane, src, dst, _ = found
    return schedule.placement[src], schedule.placement[dst], lane


def _taken(program: Program, edges: Edges, schedule: Schedule) -> dict[tuple[int, int, str], bool]:
    """For each channel into this rank, whether messages are taken in the order in which they are sent."""
    posted: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    taken: dict[tuple[int, int, str], list[Message]] = defaultdict(list)
    for i in program.instructions:
        for found in needs(i, edges, schedule):
            taken[_channel(schedule, found)].append(found)
        if i.kind.startswith("RECV"):
            posted[_channel(schedule, message(i))].append(message(i))
    return {channel: posted[channel] == taken[channel] for channel in posted}


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def run(schedule: Schedule, programs: Sequence[Program], edges: Edges, *, described: bool = False) -> int:
    """Let the ranks go until all have ended, or raise; the most sends that were open on a rank at a time.

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
                    done.add((lane_of(i), i.stage, i.microbatch))
                    taken.update(needs(i, edges, schedule))
                elif i.kind.startswith("SENT"):
                    found = message(i)
                    channel = _channel(schedule, found)
                    if len(posted[channel]) <= sent[channel].index(found) or (described and found not in taken):
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
    """Whether the message that meets this receive has been sent; it must be the one that was asked for."""
    channel = _channel(schedule, found)
    place = posted[channel].index(found)
    if len(sent[channel]) <= place:
        return False
    assert sent[channel][place] == found
    return True


def _local_inputs_done(i: Instruction, edges: Edges, schedule: Schedule, done: set[tuple[str, int, int]]) -> bool:
    lane = lane_of(i)
    sources = [a for a, b in edges if b == i.stage] if lane == "F" else [b for a, b in edges if a == i.stage]
    here = schedule.placement[i.stage]
    own = {(lane, a, i.microbatch) for a in sources if schedule.placement[a] == here}
    return own <= done


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("live_sends", [1, 4])
@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_every_program_runs_to_its_end(name: str, v: int | None, live_sends: int, depth: int, described: bool) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        programs = lower(schedule, depth=depth, live_sends=live_sends, described=described)
        run(schedule, programs, line(schedule.num_stages), described=described)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("live_sends", [1, 2, 4])
@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_values_that_skip_stages_are_lowered_too(name: str, v: int | None, live_sends: int, described: bool) -> None:
    """Every stage feeds the next, and the first one feeds all: two messages of one action may go to one rank."""
    for p, m in [(2, 3), (3, 5), (4, 4)]:
        schedule = build(name, p, m, v)
        edges = [*line(schedule.num_stages), *((0, s) for s in range(2, schedule.num_stages))]
        verify(schedule, edges)
        programs = lower(schedule, edges, live_sends=live_sends, described=described)
        expected = Counter(expected_messages(schedule, edges))
        for program in programs:
            sent: set[Message] = set()
            for i in program.instructions:
                if i.kind.startswith("SENT"):
                    assert message(i) in sent, f"{i} before its send in {describe(schedule)}"
                elif i.kind.startswith("SEND"):
                    sent.add(message(i))
        for kind in ("SEND", "RECV", "SENT"):
            assert Counter(x for program in programs for x in of_kind(program, kind)) == expected
        run(schedule, programs, edges, described=described)


def test_a_program_for_messages_of_known_shapes_may_wait_for_ever_where_they_are_described() -> None:
    """Why lowering asks: a rank of an evaluation waits for a message to be taken, by one that waits for its next."""
    schedule = build("forward_only", 2, 5, 2)
    edges = [*line(4), (0, 2), (0, 3)]
    verify(schedule, edges)
    with pytest.raises(AssertionError, match="stuck"):
        run(schedule, lower(schedule, edges, live_sends=1), edges, described=True)


# ── bounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2", "zbv"])
@pytest.mark.parametrize("p", [2, 4])
def test_open_sends_do_not_grow_with_the_number_of_micro_batches(name: str, p: int, described: bool) -> None:
    most = []
    for m in (16, 64):
        schedule = build(name, p, m)
        programs = lower(schedule, described=described)
        most.append(run(schedule, programs, line(schedule.num_stages), described=described))
    assert most[0] == most[1] <= 4 * p


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_open_sends_of_evaluation_are_bounded(p: int, v: int) -> None:
    """Nothing comes back that would prove a send to be over: the oldest is waited for when four are open."""
    most = []
    for m in (8, 64):
        schedule = build("forward_only", p, m, v)
        most.append(run(schedule, lower(schedule, live_sends=4), line(schedule.num_stages)))
    assert most[0] == most[1] <= 2 * 5


def test_filling_and_draining_on_any_placement() -> None:
    """What ``pipe(x)`` runs, with the stages placed as in training."""
    for placement in [(0,), (0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0)]:
        for m, backward in product((1, 2, 5), (True, False)):
            schedule = fill_drain(placement, m, backward=backward)
            run(schedule, lower(schedule), line(len(placement)))


# ── slots ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_no_two_micro_batches_in_flight_share_a_slot_and_none_is_wasted(name: str, v: int | None) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        for rank, program in enumerate(lower(schedule)):
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
            assert set(program.slots) == {(s, k) for s in schedule.stages_of(rank) for k in range(m)}
            if schedule.trains:
                assert peak_total == verify(schedule).peak_in_flight[rank]


def test_1f1b_keeps_as_many_as_there_are_ranks_below() -> None:
    for m in (8, 64):
        assert [program.num_slots for program in lower(build("1f1b", 4, m))] == [{0: 4}, {1: 3}, {2: 2}, {3: 1}]


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_a_stages_gradients_are_reduced_once_after_its_last_backward(name: str, v: int | None) -> None:
    for p, m in SIZES:
        schedule = build(name, p, m, v)
        for rank, program in enumerate(lower(schedule)):
            places = {i.stage: n for n, i in enumerate(program.instructions) if i.kind == "REDUCE"}
            kinds = [i.kind for i in program.instructions]
            if not schedule.trains:
                assert "REDUCE" not in kinds
                continue
            assert kinds.count("REDUCE") == len(places) == len(schedule.stages_of(rank))
            for n, i in enumerate(program.instructions):
                if i.kind in "FRBIW":
                    assert n < places[i.stage]
