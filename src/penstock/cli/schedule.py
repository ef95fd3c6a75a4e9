"""``penstock schedule``: draw a schedule with its bubble and memory, write it, or verify one from a file."""

from __future__ import annotations

import argparse
import csv
import math
import re
import shutil
import sys
from pathlib import Path

from penstock.cli.arguments import positive
from penstock.errors import ScheduleError
from penstock.schedule.registry import SCHEDULES, build
from penstock.schedule.schedule import Schedule, loop, vee
from penstock.schedule.search import SearchResult, auto
from penstock.schedule.simulate import Costs, simulate
from penstock.schedule.text import from_csv, from_text, to_csv, to_text
from penstock.schedule.verify import verify
from penstock.viz import align_columns, describe_schedule, memory_rows, print_schedule, print_text

__all__ = ["configure", "run"]

_EXAMPLES = """\
examples:
  penstock schedule zbv -p 4 -m 8                    draw it: who works on what, when
  penstock schedule 1f1b -p 4 -m 8 --costs comm=0.1  the same, with hops that take time
  penstock schedule interleaved -p 4 -m 8 -v 3 --csv order.csv
                                                     write it, for torch.distributed.pipelining too
  penstock schedule auto -p 4 -m 8 -v 2 --memory 3 --costs comm=0.1
                                                     search an order for these costs and memory
  penstock schedule auto -p 4 -m 8 -v 2 --memory 2 --recompute
                                                     the same, with forwards that run again where that helps
  penstock schedule --verify order.csv               check a file: complete, in order, no deadlock
  penstock schedule --list                           all schedules
"""

_MOST = 1_000_000
"""Micro-batches times stages: beyond it, a second or two of thinking become minutes."""

_AUTO = "auto"
"""Not one of the fixed schedules: its order is a matter of costs and memory, too."""

_COST_NAMES = {
    "f": "forward",
    "i": "input gradient",
    "w": "weight gradient",
    "b": "full backward (i + w)",
    "r": "recompute (f)",
    "comm": "a hop between ranks",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("name", nargs="?", metavar="SCHEDULE", help="its name: see --list")
    parser.add_argument("-p", type=positive, default=4, metavar="RANKS", help="ranks (default 4)")
    parser.add_argument("-m", type=positive, default=8, metavar="MICROBATCHES", help="micro-batches (default 8)")
    parser.add_argument("-v", type=positive, metavar="STAGES", help="stages per rank, where one can choose")
    parser.add_argument(
        "--costs",
        type=_costs,
        default={},
        metavar="f=1,i=1,w=1,comm=0",
        help="times of a rank's share of a micro-batch: "
        + ", ".join(f"{name} {meaning}" for name, meaning in _COST_NAMES.items()),
    )
    parser.add_argument(
        "--memory",
        type=_memory,
        metavar="SHARES",
        help="with auto: what a rank may keep, in its shares of a micro-batch (default: as much as 1f1b, p)",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="with auto: forwards may drop what they made, and run again, where that saves time in this memory",
    )
    parser.add_argument(
        "--shape", choices=("loop", "v"), help="with auto: stages go round the ranks, or there and back (default loop)"
    )
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--csv", nargs="?", const="-", metavar="FILE", help="write it as CSV, one row per rank")
    instead.add_argument("--text", nargs="?", const="-", metavar="FILE", help="write it as text")
    instead.add_argument("--verify", metavar="FILE", help="check a schedule in a file, text or CSV (- is stdin)")
    instead.add_argument("--list", action="store_true", help="list all schedules")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    if args.list:
        return _list()
    if args.verify is not None:
        return _verify(args)
    if args.name is None:
        args.usage_error("which schedule? Give its name before the options; --list lists all")
    if args.p * args.m * (args.v or 1) > _MOST:
        args.usage_error(f"-p {args.p} -m {args.m} is too much: at most {_MOST:,} micro-batches times stages")
    note = ""
    try:
        if args.name.strip().lower() == _AUTO:
            found = _search(args)
            schedule, note = found.schedule, str(found)
        elif args.memory is not None or args.shape is not None or args.recompute:
            args.usage_error(
                f"--memory, --shape and --recompute are for the schedule {_AUTO!r}: {args.name!r} has its own"
            )
        else:
            schedule = build(args.name, args.p, args.m, args.v)
    except ScheduleError as error:
        args.usage_error(str(error))
    for target, write in ((args.csv, to_csv), (args.text, to_text)):
        if target is not None:
            return _write(args, target, write(schedule))
    print_schedule(simulate(schedule, Costs.per_rank(v=schedule.num_stages // schedule.num_ranks, **args.costs)))
    if note:
        print(note)
    return 0


def _search(args: argparse.Namespace) -> SearchResult:
    v = args.v or (2 if args.shape == "v" else 1)
    if args.shape == "v" and v != 2:
        raise ScheduleError(f"--shape v has 2 stages on each rank, not {v}: leave -v out")
    placement = vee(args.p) if args.shape == "v" else loop(args.p, v)
    recompute = None if args.recompute else False
    return auto(Costs.per_rank(v=v, **args.costs), placement, args.m, cap=args.memory, recompute=recompute)


def _list() -> int:
    width = max(map(len, SCHEDULES))
    for name, kind in SCHEDULES.items():
        print(f"{name.ljust(width)}  {kind.description}")
    print(f"{_AUTO.ljust(width)}  searched: for your costs, memory and placement")
    return 0


def _write(args: argparse.Namespace, target: str, text: str) -> int:
    if not text.endswith("\n"):
        text += "\n"
    if target == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(target).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        args.usage_error(f"cannot write {target!r}: {_reason(error)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    if args.name is not None:
        args.usage_error(f"--verify checks a file: leave out {args.name!r}")
    try:
        data = sys.stdin.buffer.read() if args.verify == "-" else Path(args.verify).read_bytes()
    except (OSError, ValueError) as error:
        args.usage_error(f"cannot read {args.verify!r}: {_reason(error)}")
    schedule = _parse(args.verify, data)
    report = verify(schedule)
    lines = align_columns(memory_rows(schedule, report), shutil.get_terminal_size((80, 24)).columns)
    print_text(
        "\n".join([f"{describe_schedule(schedule)}: complete, in order, free of deadlock", "", *lines]), sys.stdout
    )
    return 0


def _parse(source: str, data: bytes) -> Schedule:
    """A schedule in either form: rows of a CSV have commas, text has none (but in comments)."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise ScheduleError(f"{source!r} is not a text file: expected a schedule as text or CSV")
    if not text.strip():
        raise ScheduleError(f"{source!r} is empty: expected a schedule as text or CSV")
    rows = [line.partition("#")[0] for line in text.splitlines()]
    if any(re.search(r"[1-9][0-9]{6}", row) for row in rows):
        raise ScheduleError(f"{source!r} has a stage or a micro-batch from {_MOST:,} on: that is too many")
    if not any("," in row for row in rows):
        return from_text(text)
    try:
        return from_csv(text, "custom" if source == "-" else Path(source).stem)
    except csv.Error as error:
        raise ScheduleError(f"{source!r} is not a CSV file: {error}") from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _memory(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def _costs(text: str) -> dict[str, float]:
    """``f=1,comm=0.1`` as a dictionary."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _COST_NAMES:
            raise argparse.ArgumentTypeError(
                f"{part.strip()!r} is not a cost: expected NAME=NUMBER with NAME one of {', '.join(_COST_NAMES)}, "
                "as in f=1,comm=0.1"
            )
        if name in costs:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        try:
            costs[name] = float(value)
        except ValueError:
            costs[name] = math.nan
        if not 0 <= costs[name] < math.inf:
            raise argparse.ArgumentTypeError(f"{part.strip()!r}: {value!r} is not a number from 0")
    return costs
