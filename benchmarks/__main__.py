"""``python -m benchmarks [NAME …] [--quick] [--out DIR]``: run benchmarks, print tables, write results as JSON.

``python -m benchmarks zoo`` compares pipelines of third-party models with the plain models; see ``zoo.py``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.report import MachineLoad, check, verdict_lines, write

BENCHMARKS = {
    "host_cost": "(a) host cost per action on a fake process group",
    "transformer": "(b) a transformer on two ranks against one process",
    "timed_stages": "(c) stages that sleep: measured over simulated time, 8 ranks",
    "split_backward": "(d) the cost of splitting the backward into I and W",
    "one_gpu": "several ranks on one GPU, against the plain model",
    "offload": "(h) offloading on one GPU: memory, time and the host link",
    "memory": "(e) what is alive during a step, as the number of micro-batches grows",
    "auto_schedule": "(i) the automatic schedule: regret, gain, speed",
    "gpu_plans": "(k) plans on one GPU: predicted and measured",
    "planner": "(j) plans: their gain over torch, predicted and measured",
    "checkpoints": "(l) checkpoints: save, load, stall and memory, against torch.save of a gathered state",
    "recompute": "(f) memory and time of each recompute mode, against the plain model",
}


def targets_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets of a benchmark; ``split_backward`` has them in its rows."""
    if "targets" in result:
        return result["targets"]
    return [
        check(f"{row['kind']}, {row['layers']} layers, I + W over B", row["ours_backward_ratio"], most=row["target"])
        for row in result["rows"]
    ]


def main() -> int:
    if sys.argv[1:2] == ["zoo"]:  # it has options of its own, and needs libraries that are not dependencies
        from benchmarks import zoo

        return zoo.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    listed = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which to run: {listed} (default: all)")
    parser.add_argument("--quick", action="store_true", help="short runs to see that everything works; rough numbers")
    parser.add_argument("--out", type=Path, help="folder for the JSON files (default: benchmarks/results; quick: /tmp)")
    options = parser.parse_args()
    quick_out = Path(tempfile.gettempdir()) / "penstock-benchmarks"  # quick results must not replace full ones
    out = options.out or (quick_out if options.quick else Path(__file__).parent / "results")
    unknown = [name for name in options.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}: there are {listed}")
    failed = []
    for name in options.names or BENCHMARKS:
        print(f"\n── {name}: {BENCHMARKS[name]} " + "─" * 20, flush=True)
        quiet = MachineLoad(max_wait=2.0 if options.quick else 120.0)
        begin = time.monotonic()
        try:
            module = importlib.import_module(f"benchmarks.{name}")
            result = module.run(quick=options.quick)
        except Exception:  # run the others nevertheless
            traceback.print_exc()
            failed.append(name)
            continue
        module.show(result)
        print(*verdict_lines(targets_of(result)), sep="\n")
        path = write(out, name, {**result, "seconds": time.monotonic() - begin}, options.quick, quiet.finish())
        print(f"{time.monotonic() - begin:.0f} s, written to {path}")
    if failed:
        print(f"\nFAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
