"""Whether lowered programs run to their end when a send is only over once its receive is posted, or it is taken."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import BACKWARD
from penstock.schedule.program import Instruction, Program

__all__ = ["gets_stuck"]

Event = tuple[str, int, int, int]  # what, from stage, to stage, micro-batch


def gets_stuck(programs: Sequence[Program], *, described: bool = False) -> bool:
    """Run the programs without tensors or time: every rank goes on until it must wait for another one.

    A send is over once its receive is posted; if messages are ``described``, once the action that needs it begins.
    """
    events: set[Event] = set()
    waits = [_waits(program, described) for program in programs]
    sleeping: dict[Event, int] = {}
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


def _events(instruction: Instruction, waited: Sequence[Event]) -> list[Event]:
    """What others may wait for: a send, a receive, or, once an action has what it waited for, that this is taken."""
    kind, stage, k, peer = instruction
    if kind.startswith("SEND"):
        return [(kind, stage, peer, k)]
    if kind.startswith("RECV"):
        return [(kind, peer, stage, k)]
    return [(f"TAKE_{what[-1]}", src, dst, k) for what, src, dst, k in waited if what.startswith("SEND")]


def _waits(program: Program, described: bool) -> list[list[Event]]:
    """What must have happened elsewhere before each instruction: sends before compute, posts or takes before SENT."""
    over = "TAKE" if described else "RECV"
    arrivals: dict[tuple[str, int, int], list[Event]] = {}
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("RECV"):
            lane = kind[-1]
            arrivals.setdefault((lane, stage, k), []).append((f"SEND_{lane}", peer, stage, k))
    waits: list[list[Event]] = []
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("SENT"):
            waits.append([(f"{over}_{kind[-1]}", stage, peer, k)])
        elif kind == "F" or kind in BACKWARD:
            waits.append(arrivals.get(("F" if kind == "F" else "B", stage, k), []))
        else:
            waits.append([])
    return waits
