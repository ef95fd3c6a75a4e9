"""``python -m benchmarks [NAME …] [--quick] [--out DIR]``: run benchmarks, print tables, write results as JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common import check, say_quiet, table, verdict_lines, write

BENCHMARKS = {
    "host_cost": "(a) host cost per action on a fake process group",
    "transformer": "(b) a transformer on two ranks against one process",
    "timed_stages": "(c) stages that sleep: measured over simulated time, 8 ranks",
    "split_backward": "(d) the cost of splitting the backward into I and W",
    "memory": "(e) what is alive during a step, as the number of micro-batches grows",
}


def targets_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A benchmark's targets; ``split_backward`` has them in its rows."""
    return result.get("targets") or [
        check(f"{row['kind']}, {row['layers']} layers, I + W over B", row["ours_backward_ratio"], most=row["target"])
        for row in result["rows"]
    ]


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows to show of ``split_backward``, which prints its own table only when it is run by itself."""
    return [
        {name: row[name] for name in ("kind", "layers", "dim", "tokens", "batch")}
        | {"full B µs": row["full_us"]["B"], "ours I µs": row["ours_us"]["I"], "ours W µs": row["ours_us"]["W"]}
        | {"ours (I+W)/B": row["ours_backward_ratio"], "torch (I+W)/B": row["peer_backward_ratio"]}
        for row in result["rows"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    listed = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs to see that everything works; rough numbers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the JSON files")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {listed}")
    failed = []
    for name in options.names or BENCHMARKS:
        print(f"\n── {name}: {BENCHMARKS[name]} " + "─" * 20, flush=True)
        quiet = say_quiet(patience=2.0 if options.quick else 120.0)
        begin = time.monotonic()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            result = module.run(quick=options.quick)
        except Exception:  # the others still run
            traceback.print_exc()
            failed.append(name)
            continue
        if hasattr(module, "show"):
            module.show(result)
        else:
            table(BENCHMARKS[name], rows_of(result))
        print(*verdict_lines(targets_of(result)), sep="\n")
        path = write(options.out, name, {**result, "seconds": time.monotonic() - begin}, options.quick, quiet)
        print(f"{time.monotonic() - begin:.0f} s, written to {path}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
