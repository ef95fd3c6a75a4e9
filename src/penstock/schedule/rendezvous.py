"""Whether lowered programs run to their end when a send is only over once its receive is posted."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schedule.action import BACKWARD
from penstock.schedule.program import Program

__all__ = ["gets_stuck"]

Event = tuple[str, int, int, int]  # what, from stage, to stage, micro-batch


def gets_stuck(programs: Sequence[Program]) -> bool:
    """Run the programs without tensors or time: every rank goes on until it must wait for another one."""
    events: set[Event] = set()
    waits = [_waits(program) for program in programs]
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
            kind, stage, k, peer = program[at[rank]]
            at[rank] += 1
            if kind[:4] in ("RECV", "SEND"):
                ends = (peer, stage) if kind.startswith("RECV") else (stage, peer)
                event = (kind, *ends, k)
                events.add(event)
                if event in sleeping:
                    ready.append(sleeping.pop(event))
    return any(pc < len(program.instructions) for pc, program in zip(at, programs, strict=True))


def _waits(program: Program) -> list[list[Event]]:
    """What must have happened elsewhere before each instruction: sends before compute, posts before SENT."""
    arrivals: dict[tuple[str, int, int], list[Event]] = {}
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("RECV"):
            lane = kind[-1]
            arrivals.setdefault((lane, stage, k), []).append((f"SEND_{lane}", peer, stage, k))
    waits: list[list[Event]] = []
    for kind, stage, k, peer in program.instructions:
        if kind.startswith("SENT"):
            waits.append([(f"RECV_{kind[-1]}", stage, peer, k)])
        elif kind == "F" or kind in BACKWARD:
            waits.append(arrivals.get(("F" if kind == "F" else "B", stage, k), []))
        else:
            waits.append([])
    return waits
