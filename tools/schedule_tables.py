"""Generate the tables of schedules in README.md and docs/ from the registry.

    python tools/schedule_tables.py          tests/schedule/test_registry.py checks that they are current

A generated block stands between ``<!-- schedules: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from penstock.schedule import SCHEDULES, Costs, build, simulate

ROOT = Path(__file__).parents[1]
FILES = ("README.md", "docs/choosing.md", "docs/reference/schedule.md")
BLOCK = re.compile(r"(<!-- schedules: (\w+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def comparison(p: int = 4, m: int = 8) -> str:
    """Bubbles and memory of all training schedules for 4 ranks and 8 micro-batches."""
    lines = ["| schedule | stages per rank | bubble | between steps too | memory | |", "|---|---|---|---|---|---|"]
    for name, kind in SCHEDULES.items():
        schedule = build(name, p, m)
        if schedule.trains:
            simulation = simulate(schedule, Costs.per_rank(v=kind.default_v))
            bubbles = f"{simulation.bubble:.1%} | {simulation.span_bubble:.1%}"
            memory = f"{max(simulation.peak_memory):.4g}"
            lines.append(f"| `{name}` | {kind.default_v} | {bubbles} | {memory} | {kind.description} |")
    return "\n".join(lines)


def formulas() -> str:
    """Stages per rank and peak memory of all training schedules, for any number of ranks and micro-batches."""
    lines = ["| schedule | stages per rank | peak activations of a rank |", "|---|---|---|"]
    for name, kind in SCHEDULES.items():
        if build(name, 1, 1).trains:
            lines.append(f"| `{name}` | {kind.stages_per_rank or 'any v'} | {kind.memory.replace('*', '·')} |")
    return "\n".join(lines)


def reference() -> str:
    """The directives of mkdocstrings for the functions that build the schedules."""
    made = [f"{kind.make.__module__}.{kind.make.__qualname__}" for kind in SCHEDULES.values()]
    return "\n\n".join(f"::: {name}\n    options:\n      heading_level: 3" for name in made)


BLOCKS: dict[str, Callable[[], str]] = {"comparison": comparison, "formulas": formulas, "reference": reference}


def updated(text: str) -> str:
    """The text of a document with its blocks generated again."""
    return BLOCK.sub(lambda match: f"{match[1]}{BLOCKS[match[2]]()}\n", text)


if __name__ == "__main__":
    for file in FILES:
        path = ROOT / file
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
