"""From a tape's numbers to the parts of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.engine.script import Walk
from penstock.engine.tape import Run, Tape
from penstock.profile.trace.steps import Done, Part, Sent, Span, Wait
from penstock.schedule.action import Action

__all__ = ["parts_of"]

Clock = Callable[[int], float]  # the seconds that a number on this process's clock stands for


def parts_of(tape: Tape, run: Run, clock: Clock, placement: Sequence[int], tracks: Mapping[int, int]) -> list[Part]:
    """What the ranks of this process did in a run; ``tracks[r]`` is the track of the pipeline's rank ``r``."""
    actions: dict[int, list[Done]] = {rank: [] for rank in tracks}
    common = [Span(name, clock(begin), clock(end)) for name, begin, end in run.spans]
    spans = {rank: list(common) for rank in tracks}
    for walk in run.walks:
        found, left = _actions(tape, run, walk, clock)
        for done in found:
            actions[placement[done.action.stage]].append(done)
        if left and found:
            spans[placement[found[-1].action.stage]].append(Span("sends", left[0].start, left[-1].end))
    begin, end = clock(run.begin), clock(run.end)
    return [
        Part(number, begin, end, tuple(actions[rank]), tuple(sorted(spans[rank], key=lambda span: span.start)))
        for rank, number in tracks.items()
    ]


def _actions(tape: Tape, run: Run, walk: Walk, clock: Clock) -> tuple[list[Done], list[Wait]]:
    """The actions of one program, as far as it got, and the waits after the last of them, until sends are over."""
    found: list[Done] = []
    waits: list[Wait] = []
    sends: dict[int, list[Sent]] = defaultdict(list)  # by their action's place in what was found
    freed: dict[object, float] = {}  # when a device was done with its action before
    for at, (instruction, what, peer) in enumerate(walk.lines):
        start, stop = walk.stamps[at], walk.end(at)
        if not stop:  # it failed here
            break
        if what in ("wait", "sent"):
            waits.append(Wait(peer, clock(start), clock(stop), "message" if what == "wait" else "sent"))
        elif what == "send" and found:
            sends[len(found) - 1].append(Sent(peer, clock(start), clock(stop), walk.sizes[at]))
        elif what == "work":
            action = Action(instruction.stage, instruction.kind, instruction.microbatch)
            if at in walk.seconds:
                device, *since = walk.seconds[at]
                begin, end = (clock(tape.times.on_host(device, run.base, seconds)) for seconds in since)
                waits = _on_device(waits, freed.get(device, 0.0), begin)
                done = Done(action, begin, end, clock(start), walk.memory[at], tuple(waits))
                freed[device] = end
            else:
                done = Done(action, clock(start), clock(stop), waits=tuple(waits))
            found.append(done)
            waits = []
    return [replace(done, sends=tuple(sends[place])) for place, done in enumerate(found)], waits


def _on_device(waits: Sequence[Wait], freed: float, begin: float) -> list[Wait]:
    """The host did not wait for messages, but the device: from its last action, if the host was ahead, to this one."""
    messages = [wait for wait in waits if wait.what == "message"]
    return [Wait(wait.peer, min(max(freed, wait.end), begin), begin) for wait in messages]
