"""``penstock schedule``: draw a schedule with its bubble and memory, write it, or verify one from a file."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand

from penstock.cli import UsageError, complete_schedule, option, usage_errors
from penstock.errors import ScheduleError
from penstock.schedule.costs import Costs
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import loop, vee
from penstock.schedule.search import auto
from penstock.schedule.simulate import simulate
from penstock.schedule.text import from_csv, from_text, to_csv
from penstock.schedule.verify import verify
from penstock.viz import describe_schedule, memory_table, print_schedule

_EXAMPLES = """\
Examples:
  penstock schedule zbv -p 4 -m 8                    draw it
  penstock schedule 1f1b -p 4 -m 8 --costs comm=0.1  with communication
  penstock schedule interleaved -v 3 --csv order.csv write it, also for torch
  penstock schedule auto --memory 3 --costs comm=0.1 search an order
  penstock schedule auto --memory 2 --recompute      search, with recompute
  penstock schedule --verify order.csv               check a file
  penstock schedule --list                           list all schedules
"""

_MAX_CELLS = 1_000_000  # limit of micro-batches times stages; building larger schedules takes minutes
_COST_NAMES = {
    "f": "forward",
    "i": "input gradient",
    "w": "weight gradient",
    "b": "full backward (i + w)",
    "r": "recompute (f)",
    "comm": "latency between ranks",
}
_COSTS_HELP = "Times per micro-batch of all stages of a rank: " + ", ".join(f"{k} {v}" for k, v in _COST_NAMES.items())
_MEMORY_HELP = "With auto: memory of a rank, in activations of one micro-batch (default: p, as 1f1b)."


def _costs(text: str) -> dict[str, float]:
    """Parse costs such as ``f=1,comm=0.1``."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = map(str.strip, part.partition("="))
        try:
            if name not in _COST_NAMES or name in costs or not 0 <= float(number) < math.inf:
                raise ValueError
        except ValueError:
            raise typer.BadParameter(
                f"{part.strip()!r} is not a cost: expected NAME=NUMBER, a number from 0, with each NAME once and one "
                f"of {', '.join(_COST_NAMES)}, as in f=1,comm=0.1"
            ) from None
        costs[name] = float(number)
    return costs


class _OptionalFile(TyperCommand):
    """The value of ``--csv`` and ``--text`` is optional; without a file it is ``-``, standard output."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words: list[str] = []
        for word in [*args, "--"]:
            if words and words[-1] in ("--csv", "--text") and word.startswith("-") and word != "-":
                words.append("-")
            words.append(word)
        return super().parse_args(ctx, words[:-1])


app = typer.Typer(add_completion=False)


@app.command(cls=_OptionalFile, epilog=_EXAMPLES)
def schedule(
    name: Annotated[
        str | None, typer.Argument(metavar="SCHEDULE", help="A name of --list.", autocompletion=complete_schedule)
    ] = None,
    p: Annotated[int, option("Number of ranks.", "-p", metavar="RANKS", min=1)] = 4,
    m: Annotated[int, option("Number of micro-batches.", "-m", metavar="MICROBATCHES", min=1)] = 8,
    v: Annotated[int | None, option("Stages per rank, unless fixed.", "-v", metavar="STAGES", min=1)] = None,
    costs: Annotated[Any, option(_COSTS_HELP, metavar="f=1,i=1,w=1,comm=0", parser=_costs)] = None,
    memory: Annotated[float | None, option(_MEMORY_HELP, metavar="SHARES", min=0.0)] = None,
    recompute: Annotated[bool, option("With auto: recompute forwards where that saves time.", "--recompute")] = False,
    shape: Annotated[
        Literal["loop", "v"] | None, option("With auto: placement of stages, round-robin or in a V (default loop).")
    ] = None,
    csv_file: Annotated[str | None, option("Write CSV, one row per rank.", "--csv", metavar="[FILE]")] = None,
    text_file: Annotated[str | None, option("Write the text form.", "--text", metavar="[FILE]")] = None,
    verify_file: Annotated[
        str | None, option("Verify the schedule in a text or CSV file (- is stdin).", "--verify", metavar="FILE")
    ] = None,
    list_all: Annotated[bool, option("List all schedules.", "--list")] = False,
) -> None:
    """Draw a schedule with its bubble and memory, write it, or verify one from a file."""
    given = {"--csv": csv_file, "--text": text_file, "--verify": verify_file, "--list": list_all or None}
    actions = [option for option, value in given.items() if value is not None]
    if len(actions) > 1:
        raise UsageError(f"{actions[0]} and {actions[1]} exclude each other: give one")
    if list_all:
        for each, kind in SCHEDULES.items():
            print(f"{each:<12}  {kind.description}")
        print(f"{'auto':<12}  searched for given costs, memory and placement")
        return
    if verify_file is not None:
        if name is not None:
            raise UsageError(f"--verify checks a file: leave out {name!r}")
        _verify(verify_file)
        return
    if name is None:
        raise UsageError("no schedule: give a name or --verify FILE; --list lists all names")
    if p * m * (v or 1) > _MAX_CELLS:
        raise UsageError(f"-p {p} -m {m} is too large: at most {_MAX_CELLS:,} micro-batches times stages")
    costs, note = costs or {}, ""
    try:
        if name.strip().lower() == "auto":
            v = v or (2 if shape == "v" else 1)
            if shape == "v" and v != 2:
                raise UsageError(f"--shape v has 2 stages on each rank, not {v}: leave -v out")
            placement = vee(p) if shape == "v" else loop(p, v)
            recomputed = None if recompute else False
            result = auto(Costs.per_rank(v=v, **costs), placement, m, cap=memory, recompute=recomputed)
            order, note = result.schedule, str(result)
        elif memory is not None or shape is not None or recompute:
            raise UsageError(f"--memory, --shape and --recompute are for the schedule 'auto', not for {name!r}")
        else:
            order = build(name, p, m, v)
        text = to_csv(order) if csv_file else str(order)
    except ScheduleError as error:
        raise UsageError(str(error)) from None
    target = csv_file or text_file
    if target is None:
        print_schedule(simulate(order, Costs.per_rank(v=order.num_stages // order.num_ranks, **costs)))
        print(note, end="\n" if note else "")
    elif target == "-":
        print(text, end="")
    else:
        with usage_errors(f"cannot write {target!r}", OSError, ValueError):
            Path(target).write_text(text, encoding="utf-8")


def _verify(source: str) -> None:
    """Verify a schedule in either format. Rows of a CSV have commas; text has commas in comments only."""
    with usage_errors(f"cannot read {source!r}", OSError, ValueError):
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    try:
        text = data.decode("utf-8-sig")
        rows = [line.partition("#")[0] for line in text.splitlines()]
        if any(re.search(r"[1-9][0-9]{6}", row) for row in rows):
            raise ScheduleError(f"{source!r} has too many stages or micro-batches: the limit is {_MAX_CELLS:,}")
        name = "custom" if source == "-" else Path(source).stem
        schedule = from_csv(text, name) if any("," in row for row in rows) else from_text(text)
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{source!r} is not a schedule as text or CSV: {error}") from None
    report = verify(schedule)
    print(f"{describe_schedule(schedule)}: complete, in order, free of deadlock\n")
    Console(highlight=False).print(memory_table(schedule, report))
