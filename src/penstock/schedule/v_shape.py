"""V-shaped schedules: each rank has a stage of the first half of the model and one of the second half.

The path of one micro-batch determines both time and memory. All micro-batches have the same path, six slots apart (F, I
and W of two stages). So a rank holds one activation for every six slots between F and W on this path. On a V, a
micro-batch that starts early on a rank also ends late there, and the hops (slots per rank) can be chosen so that all
ranks hold the same memory. With hops of one slot, on 4 ranks (V-Min)::

    rank 0: F . . . . . . F I . . . . . . I      F down and up the V, then I down and up: on every rank, the
    rank 1: . F . . . . F . . I . . . . I .      residence times of the two stages add up to about 4p slots,
    rank 2: . . F . . F . . . . I . . I . .      which is 4p/6 activations of a stage, or p/3 of a rank
    rank 3: . . . F F . . . . . . I I . . .

These paths define the preferred slot of each action. List scheduling by preferred slots gives the schedule. DualPipeV
pairs forwards of one half of the model with backwards of the other half, in eight phases.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from penstock.schedule.registry import register
from penstock.schedule.schedule import Action, Schedule, vee


@register("zbv", "split backward on a V; no idle time after the first action, 1F1B's memory", v=2, memory="p")
def zbv(p: int, m: int) -> Schedule:
    """ZB-V: no rank is idle between its first and its last action (m >= 2p), with 1F1B's memory, p activations.

    p=2, m=4; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0F3 0W0 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 ...
        rank 1: .   1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 ...
    """
    return v_schedule("zbv", p, m, hops=(4, 2, 4, 2), cap=2 * p)


@register("v_half", "split backward on a V; about half of 1F1B's memory", v=2, memory="p // 2 + 1")
def v_half(p: int, m: int) -> Schedule:
    """V-Half: about half of 1F1B's bubble and half of its memory, p // 2 + 1 activations.

    p=3, m=3; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 0F2 .   .   5F0 5I0 5W0 .   .   5F1 5I1 0I0 5W1 0W0 5F2 5I2 0I1 5W2 0W1 .   0I2 0W2
        rank 1: .   1F0 1F1 1F2 4F0 .   .   4I0 4W0 4F1 1I0 1W0 4I1 4W1 4F2 .   1I1 4I2 1W1 4W2 1I2 1W2
        rank 2: .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2F2 2W0 3F2 3I1 2I1 3W1 2W1 3I2 2I2 3W2 2W2
    """
    return v_schedule("v_half", p, m, hops=(2, 1, 2, 1), cap=(p + 2) // 2 * 2)


@register("v_min", "split backward on a V; about a third of 1F1B's memory", v=2, memory="(p + 4) // 3")
def v_min(p: int, m: int) -> Schedule:
    """V-Min: the least memory, (p + 4) // 3 activations, with less bubble than 1F1B.

    p=4, m=2; the digit before the letter is the stage, every action takes one column::

        rank 0: 0F0 0F1 .   .   .   .   .   7F0 7I0 7F1 7I1 7W0 7W1 .   .   0I0 0W0 0I1 0W1
        rank 1: .   1F0 1F1 .   .   .   6F0 .   6F1 6I0 6W0 6I1 6W1 .   1I0 1W0 1I1 1W1
        rank 2: .   .   2F0 2F1 .   5F0 .   5F1 .   .   5I0 5W0 5I1 2I0 5W1 2I1 2W0 2W1
        rank 3: .   .   .   3F0 4F0 3F1 4F1 .   .   .   .   4I0 3I0 4I1 3I1 4W0 3W0 4W1 3W1
    """
    return v_schedule("v_min", p, m, hops=(1, 1, 1, 1), cap=(p + 4) // 3 * 2)


def v_schedule(name: str, p: int, m: int, hops: tuple[int, int, int, int], cap: int) -> Schedule:
    """List-schedule a V for ``hops`` (slots per rank of F down, F up, I down, I up).

    No rank holds more than ``cap`` activations of a stage. All ranks are scheduled in lockstep, one action per slot, as
    early as possible. A rank runs the action with the earliest preferred slot. If its input or memory is missing, the
    rank runs a W. If no W is pending, it runs the next action that is ready; it starts another micro-batch early only
    while it holds fewer than ``ahead`` of its first stage.
    """
    f_down, f_up, i_down, i_up = hops
    # The two residence times on a rank are sum(hops) * (p - 1) + 12 slots, W included. If the cap allows more, the
    # spare slots are on rank 0, between the last F and the first I, and extend both residence times.
    spare = (6 * cap - sum(hops) * (p - 1) - 12) // 2
    f_end = (f_down + f_up) * (p - 1) + 1
    i_start = f_end + 1 + spare
    i_end = i_start + (i_down + i_up) * (p - 1) + 1
    slots, ahead = [], []  # by rank; the slots of micro-batch 0 with stage and kind, those of k are 6k slots later
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        f_up_time, i_down_time = f_end - f_up * r, i_start + i_down * r
        forwards = [(f_down * r, down, "F"), (f_up_time, up, "F")]
        slots.append([*forwards, (i_down_time, up, "I"), (i_end - i_up * r, down, "I")])
        # A rank that runs ahead reserves memory for its second stage, from its F to the end of its W.
        ahead.append(cap - -(-(i_down_time + 2 - f_up_time) // 6))
    last = 2 * p - 1
    done = {kind: [0] * (2 * p) for kind in "FIW"}  # micro-batches, by kind and stage
    deferred: list[deque[Action]] = [deque() for _ in range(p)]
    orders: list[list[Action]] = [[] for _ in range(p)]

    def held(s: int) -> int:
        return done["F"][s] - done["W"][s]

    def ready(action: Action) -> bool:
        s, kind, k = action
        if kind == "F":
            return (s == 0 or done["F"][s - 1] > k) and held(s) + held(last - s) < cap
        return done["F"][s] > k and (s == last or done["I"][s + 1] > k)

    def choose(r: int) -> Action | None:
        due = sorted((time + 6 * done[kind][s], s, kind) for time, s, kind in slots[r] if done[kind][s] < m)
        actions = (Action(s, kind, done[kind][s]) for _, s, kind in due)
        preferred = next(actions, None)
        if preferred is not None and ready(preferred):
            return preferred
        if deferred[r]:
            return deferred[r].popleft()
        early = (a for a in actions if held(r) < ahead[r] or (a.stage, a.kind) != (r, "F"))
        return next(filter(ready, early), None)

    while any(len(order) < 6 * m for order in orders):
        chosen = [choose(r) for r in range(p)]
        assert any(chosen), f"no rank can proceed: p={p}, m={m}, cap={cap}"
        for r, action in enumerate(chosen):
            if action is not None:
                orders[r].append(action)
                done[action.kind][action.stage] += 1
                if action.kind == "I":
                    deferred[r].append(action._replace(kind="W"))
    return Schedule.of(name, vee(p), orders, m)


@register("dualpipev", "on a V; pairs forwards with backwards, in eight phases", v=2, memory="p + 0.5")
def dualpipev(p: int, m: int) -> Schedule:
    """In the main phase, each forward is paired with a backward of another micro-batch, so that the computation of one
    can overlap the communication of the other. A backward is split only where its weight gradient fills a gap.

    The phases need 2p micro-batches. For fewer, the schedule is restricted to the first m of 2p.

    p=2, m=4; the digit before the letter is the stage, a backward ``B`` takes two columns::

        rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 --- 3F2 0B0 --- 3B2 --- 3F3 .   0B1 --- 3B3 --- 0I2 ...
        rank 1: .   1F0 2F0 1F1 2F1 1F2 2B0 --- 2F2 1B0 --- 1F3 2B1 --- 2F3 1B1 --- 2B2 --- 1B2 --- 2I3 ...
    """
    if m < 2 * p:
        return dualpipev(p, 2 * p).first(m)
    return Schedule.of("dualpipev", vee(p), (_dualpipev_order(p, m, r) for r in range(p)), m)


def _dualpipev_order(p: int, m: int, r: int) -> Iterator[Action]:
    """The order of rank r. Index 0 is its stage in the first half of the model, index 1 the one in the second half."""
    stages = (r, 2 * p - 1 - r)
    next_microbatch = {(i, kind): count() for i in (0, 1) for kind in "FB"}
    deferred: deque[Action] = deque()

    def forward(i: int) -> Action:
        return Action(stages[i], "F", next(next_microbatch[i, "F"]))

    def backward(i: int) -> Action:
        return Action(stages[i], "B", next(next_microbatch[i, "B"]))

    def input_gradient(i: int) -> Action:
        _, _, k = backward(i)
        deferred.append(Action(stages[i], "W", k))
        return Action(stages[i], "I", k)

    weight_gradient = deferred.popleft

    for _ in range(2 * (p - r - 1)):  # 1. fill the first half
        yield forward(0)
    for _ in range(r + 1):  # 2. forwards of both halves
        yield forward(0)
        yield forward(1)
    for _ in range(p - r - 1):  # 3. the first gradients; W runs while the rank waits for the next forward
        yield input_gradient(1)
        yield weight_gradient()
        yield forward(1)
    for _ in range(m - 2 * p + r + 1):  # 4. main phase: a forward of one half next to a backward of the other
        yield forward(0)
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for _ in range(p - r - 1):  # 5. no forwards remain in the first half
        yield backward(1)
        yield forward(1)
        yield backward(0)
    for i in range(2 * (r + 1)):  # 6. only backwards; W is deferred in the second half of this phase
        yield (backward if i <= r else input_gradient)(1 - i % 2)
    for _ in range(p - r - 1):  # 7. W runs while the rank waits for the last gradients
        yield weight_gradient()
        yield input_gradient(0)
    while deferred:  # 8. the remaining W
        yield weight_gradient()
