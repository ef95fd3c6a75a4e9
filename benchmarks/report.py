"""Reporting helpers of the benchmarks: load by other jobs, tables, targets, results as JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import penstock

__all__ = ["MachineLoad", "check", "table", "verdict_lines", "write"]


# ── the machine ────────────────────────────────────────────────────────────────────────────────────────────────────


class MachineLoad:
    """Detects other jobs on the machine: waits before a benchmark until it is idle, and checks again after it.

    The load average also counts this benchmark and the last one, so /proc/stat decides.
    """

    def __init__(self, max_wait: float, busy: float = 0.15) -> None:
        self.busy = busy
        deadline = time.monotonic() + max_wait
        while (used := self._others()) > busy and time.monotonic() < deadline:
            pass
        self.before = used
        self.start = _cpu_seconds()
        if used > busy:
            self._warn(f"other jobs use {used:.2f} of {os.cpu_count()} cores (load average {os.getloadavg()[0]:.2f})")

    def finish(self) -> dict[str, Any]:
        """The CPU use of other jobs before and during the benchmark."""
        clock, others = (now - then for now, then in zip(_cpu_seconds(), self.start, strict=True))
        during = others / clock
        if during > self.busy:
            self._warn(f"other jobs used {during:.2f} of {os.cpu_count()} cores during this benchmark")
        quiet = max(self.before, during) <= self.busy
        return {"quiet": quiet, "before": self.before, "during": during, "load_average": os.getloadavg()}

    def _others(self) -> float:
        clock, others = _cpu_seconds()
        time.sleep(1.0)
        later, more = _cpu_seconds()
        return (more - others) / (later - clock)

    def _warn(self, what: str) -> None:
        print(f"warning: the machine is not quiet: {what}. The numbers are not to be relied on.", flush=True)


def _cpu_seconds() -> tuple[float, float]:
    """The time, and the total CPU time without this process and its ended children."""
    now = time.monotonic()
    try:
        fields = list(map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]))
    except OSError:  # not Linux: other jobs are not detected
        return now, 0.0
    busy = sum(fields[n] for n in (0, 1, 2, 5, 6))  # user, nice, system, irq, softirq
    return now, busy / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check(what: str, value: float, *, most: float | None = None, least: float | None = None) -> dict[str, Any]:
    """A target, and whether it is met."""
    met = (most is None or value <= most) and (least is None or value >= least)
    target = f"≤ {most:.4g}" if most is not None else f"≥ {least:.4g}"
    return {"what": what, "value": value, "target": target, "met": met}


def verdict_lines(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per missed target, and the number of targets met."""
    missed = [f"TARGET MISSED  {t['what']}: {t['value']:.4g}, target {t['target']}" for t in targets if not t["met"]]
    return [*missed, f"{len(targets) - len(missed)} of {len(targets)} targets met"]


def table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a table; columns are the keys, floats have four digits."""
    flat = [{key: _cell(value) for key, value in _flat(row)} for row in rows]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    print()
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        cells = [columns, *([row.get(column, "") for column in columns] for row in flat)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        print(title, *("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells), sep="\n")
        return
    shown = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        shown.add_column(column, justify="left" if i == 0 else "right")
    for row in flat:
        shown.add_row(*(row.get(column, "") for column in columns))
    console = Console()
    console.print(shown) if console.is_terminal else Console(width=160).print(shown)


def _flat(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested dicts become columns ``outer inner``; lists (raw repeats) appear only in the JSON."""
    cells: list[tuple[str, Any]] = []
    for key, value in row.items():
        if isinstance(value, Mapping):
            cells += _flat(value, f"{prefix}{key} ")
        elif not isinstance(value, list | tuple):
            cells.append((f"{prefix}{key}", value))
    return cells


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def write(folder: Path, name: str, result: Mapping[str, Any], quick: bool, quiet: Mapping[str, Any]) -> Path:
    """Write the result as JSON, with date, machine and versions."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "penstock": penstock.__version__}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"benchmark": name, "date": date, "quick": quick, "machine": machine(), "versions": versions, "load": quiet}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**head, **result, **head}, indent=1, default=str) + "\n")
    return path
