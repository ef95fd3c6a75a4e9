"""From a tape's numbers to the parts of steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from penstock.engine.tape import Run, Tape, Walk
from penstock.profile.steps import Done, Part, Sent, Span, Wait
from penstock.schedule.action import Action

__all__ = ["parts_of"]

Clock = Callable[[int], float]  # the seconds that a number on this process's clock stands for


def parts_of(tape: Tape, run: Run, clock: Clock, placement: Sequence[int], tracks: Mapping[int, int]) -> list[Part]:
    """What the ranks of this process did in a run; ``tracks[r]`` is the track of the pipeline's rank ``r``."""
    actions: dict[int, list[Done]] = {rank: [] for rank in tracks}
    for walk in list(run.walks):
        for done in _actions(tape, run, walk, clock):
            actions[placement[done.action.stage]].append(done)
    spans = tuple(Span(name, clock(begin), clock(end)) for name, begin, end in run.spans)
    begin, end = clock(run.begin), clock(run.end)
    return [Part(tracks[rank], begin, end, tuple(row), spans) for rank, row in actions.items()]


def _actions(tape: Tape, run: Run, walk: Walk, clock: Clock) -> list[Done]:
    """The actions of one program, as far as it got."""
    found: list[Done] = []
    waits: list[Wait] = []
    sends: dict[int, list[Sent]] = defaultdict(list)  # by their action's place in what was found
    stops = [*walk.starts[1:], walk.stop]
    freed = 0.0  # when the device was done with the action before
    for at, (instruction, what, start, stop) in enumerate(
        zip(walk.instructions, walk.whats, walk.starts, stops, strict=True)
    ):
        if not start or not stop:
            break
        if what == "wait":
            waits.append(Wait(walk.peers[at], clock(start), clock(stop)))
        elif what == "send" and found:
            sends[len(found) - 1].append(Sent(walk.peers[at], clock(start), clock(stop), walk.sizes[at]))
        elif what == "work" and walk.ends[at]:
            action = Action(instruction.stage, instruction.kind, instruction.microbatch)
            if at in walk.seconds:
                device, *since = walk.seconds[at]
                begin, end = (clock(tape.times.on_host(device, run.base, seconds)) for seconds in since)
                waits = _on_device(waits, freed, begin)
                done = Done(action, begin, end, clock(start), walk.memory[at], tuple(waits))
                freed = end
            else:
                done = Done(action, clock(start), clock(walk.ends[at]), waits=tuple(waits))
            found.append(done)
            waits = []
    return [replace(done, sends=tuple(sends[place])) if place in sends else done for place, done in enumerate(found)]


def _on_device(waits: Sequence[Wait], freed: float, begin: float) -> list[Wait]:
    """The host did not wait for messages, but the device: from its last action, if the host was ahead, to this one."""
    idle = [max(freed, wait.end) for wait in waits]
    return [Wait(wait.source, min(since, begin), begin) for wait, since in zip(waits, idle, strict=True)]
