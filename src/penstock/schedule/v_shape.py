"""V-shaped schedules: each rank holds a stage of the way out and one of the way back, in p, p/2 or p/3 memory.

How one micro-batch travels decides both time and memory. All travel alike, six places apart (F, I and W of two
stages), so a rank holds as many activations as a micro-batch stays there, in places, divided by six. On a V, the
ranks where it starts early are those where it ends late, and the hops can be chosen so that every rank holds the
same. With hops of one place, on 4 ranks (V-Min)::

    rank 0: F . . . . . . F I . . . . . . I      out by F, back by F, then out and back by I:
    rank 1: . F . . . . F . . I . . . . I .      two stays that add up to about 4p places on every rank,
    rank 2: . . F . . F . . . . I . . I . .      which is 4p/6 activations of a stage, a third of p of a rank
    rank 3: . . . F F . . . . . . I I . . .

Such travels are what ranks wish; squeezing them makes the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from penstock.schedule.schedule import Action, Schedule, vee

__all__ = ["v_half", "v_min", "v_schedule", "zbv"]


def zbv(p: int, m: int) -> Schedule:
    """ZB-V: zero bubble in 1F1B's memory, p activations. Once begun, a rank works without a pause (m >= 2p).

    p=2, m=4; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0F3 0W0 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 ...
        rank 1: .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 ...
    """
    return v_schedule("zbv", p, m, hops=(4, 2, 4, 2), room=2 * p)


def v_half(p: int, m: int) -> Schedule:
    """V-Half: about half of 1F1B's bubble in half of its memory, p // 2 + 1 activations.

    p=3, m=3; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1: .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 1I0 1W0 4I1 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2
        rank 2: .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    return v_schedule("v_half", p, m, hops=(2, 1, 2, 1), room=(p + 2) // 2 * 2)


def v_min(p: int, m: int) -> Schedule:
    """V-Min: the least memory, (p + 4) // 3 activations, and still less bubble than 1F1B.

    p=4, m=2; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 .   .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 .   .   0I0 0W0 0I1 0W1
        rank 1: .   1F0 1F1 .   .   .   6F0 .   6F1 6I0 6W0 6I1 6W1 .   1I0 1W0 1I1 1W1
        rank 2: .   .   2F0 2F1 .   5F0 .   5F1 .   .   5I0 5W0 5I1 2I0 5W1 2I1 2W0 2W1
        rank 3: .   .   .   3F0 4F0 3F1 4F1 .   .   .   .   4I0 3I0 4I1 3I1 4W0 3W0 4W1 3W1
    """
    return v_schedule("v_min", p, m, hops=(1, 1, 1, 1), room=(p + 4) // 3 * 2)


class _Slot(NamedTuple):
    """When a rank would like to do its work of one kind and stage on micro-batch 0; on k, six places times k later."""

    time: int
    stage: int
    kind: str


def v_schedule(name: str, p: int, m: int, hops: tuple[int, int, int, int], room: int) -> Schedule:
    """Micro-batches that hop as told, squeezed; no rank ever holds more than ``room`` activations of a stage."""
    f_out, f_back, i_out, i_back = hops
    # Its two stays on a rank take sum(hops) * (p - 1) + 12 places, W included. What the room allows beyond
    # that is best spent on rank 0, between the last F and the first I, where both stays get longer by it.
    spare = (6 * room - sum(hops) * (p - 1) - 12) // 2
    f_end = (f_out + f_back) * (p - 1) + 1
    i_start = f_end + 1 + spare
    i_end = i_start + (i_out + i_back) * (p - 1) + 1
    wishes, ahead = [], []
    for r in range(p):
        out, back = r, 2 * p - 1 - r
        f_back_time, i_out_time = f_end - f_back * r, i_start + i_out * r
        wishes.append(
            (
                _Slot(f_out * r, out, "F"),
                _Slot(f_back_time, back, "F"),
                _Slot(i_out_time, back, "I"),
                _Slot(i_end - i_back * r, out, "I"),
            )
        )
        # Running ahead, a rank leaves room for the stays on the way back: from their F to the end of their W.
        ahead.append(room - -(-(i_out_time + 2 - f_back_time) // 6))
    return Schedule.of(name, vee(p), _compact(p, m, wishes, room, ahead), m)


def _compact(p: int, m: int, wishes: Sequence[Sequence[_Slot]], room: int, ahead: Sequence[int]) -> list[list[Action]]:
    """Let the ranks work in lockstep, one action per place, as early as they can.

    A rank does what it wishes next. While that waits, for its input or for room, the rank does a W; having none,
    what is ready though not yet due, except that it starts micro-batches early only while it holds fewer than
    ``ahead`` of its stage on the way out.
    """
    last = 2 * p - 1
    done = {kind: [0] * (2 * p) for kind in "FIW"}  # micro-batches, by kind and stage
    deferred: list[deque[Action]] = [deque() for _ in range(p)]
    orders: list[list[Action]] = [[] for _ in range(p)]

    def held(s: int) -> int:
        return done["F"][s] - done["W"][s]

    def ready(action: Action) -> bool:
        s, kind, k = action
        if kind == "F":
            return (s == 0 or done["F"][s - 1] > k) and held(s) + held(last - s) < room
        return done["F"][s] > k and (s == last or done["I"][s + 1] > k)

    def choose(r: int) -> Action | None:
        due = sorted((time + 6 * done[kind][s], s, kind) for time, s, kind in wishes[r] if done[kind][s] < m)
        actions = (Action(s, kind, done[kind][s]) for _, s, kind in due)
        wished = next(actions, None)
        if wished is not None and ready(wished):
            return wished
        if deferred[r]:
            return deferred[r].popleft()
        early = (a for a in actions if held(r) < ahead[r] or (a.stage, a.kind) != (r, "F"))
        return next(filter(ready, early), None)

    while any(len(order) < 6 * m for order in orders):
        chosen = [choose(r) for r in range(p)]
        assert any(chosen), f"no rank can go on: p={p}, m={m}, room={room}"
        for r, action in enumerate(chosen):
            if action is not None:
                orders[r].append(action)
                done[action.kind][action.stage] += 1
                if action.kind == "I":
                    deferred[r].append(action._replace(kind="W"))
    return orders
