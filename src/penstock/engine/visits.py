"""When weights come to a device and go, as plain data.

A visit is what a rank does for one stage in a row. While it lasts, the weights of the next visit come:

    program          0F0 0F1 │ 1F0 1F1 │ 2F0 2F1 │ 2B0 …
    stage 0          ███████ │         │         │            █ in use
    stage 1          ▒▒▒▒▒▒▒ │ ███████ │         │            ▒ on its way
    stage 2                  │ ▒▒▒▒▒▒▒ │ ███████ │ ███

So those of two stages are there at a time, and what the next visit needs as well does not go. Gradients are there for
B, I and W alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from penstock.schedule.action import COMPUTE
from penstock.schedule.program import Instruction

__all__ = ["Key", "Part", "Stop", "stops"]

Key = tuple[int, ...]
"""The stages that use a cargo: parameters that come and go together."""


class Part(NamedTuple):
    """The weights of a cargo, or their gradients."""

    cargo: Key
    grads: bool = False


class Stop(NamedTuple):
    """Before instruction ``at``: what goes, then what starts to come; and what is in use from then on."""

    at: int
    go: tuple[Part, ...]
    come: tuple[Part, ...]
    use: tuple[Part, ...]


def stops(instructions: Iterable[Instruction], cargo_of: Mapping[int, Sequence[Key]]) -> list[Stop]:
    """The stops of a rank's program, of which the last is at its end. ``cargo_of`` has the stages that need any."""
    visits: list[tuple[int, dict[Part, None]]] = []  # where each begins, and what it needs; a dict has an order
    stage, end = -1, 0
    for at, instruction in enumerate(instructions):
        end = at + 1
        if instruction.kind not in COMPUTE or not cargo_of.get(instruction.stage):
            continue
        if instruction.stage != stage:
            stage = instruction.stage
            visits.append((at, dict.fromkeys(Part(cargo) for cargo in cargo_of[stage])))
        if instruction.kind in "BIW":
            visits[-1][1].update(dict.fromkeys(Part(cargo, True) for cargo in cargo_of[stage]))
    found: list[Stop] = []
    here: dict[Part, None] = {}
    for number, (at, use) in enumerate(visits):
        soon = visits[number + 1][1] if number + 1 < len(visits) else {}
        wanted = {**use, **soon}
        go = tuple(part for part in here if part not in wanted)
        found.append(Stop(at, go, tuple(part for part in wanted if part not in here), tuple(use)))
        here = wanted
    return [*found, Stop(end, tuple(here), (), ())] if found else []
