"""What the benchmarks share: a quiet machine, ranks with a deadline, variants in turn, medians, tables, results."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import platform
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

import penstock

__all__ = [
    "check", "interleave", "medians", "say_quiet", "spawn", "table", "together", "verdict_lines", "write",
]  # fmt: skip

T = TypeVar("T")
LEAD = 0.01  # seconds between the agreement on a common start and that start


# ── the machine ──────────────────────────────────────────────────────────────────────────────────────────────────


def say_quiet(patience: float = 60.0, busy: float = 0.15) -> dict[str, Any]:
    """Wait until other jobs use less than ``busy`` of a core, warn if they do not stop; what was found.

    The load average also remembers the benchmark before this one, so the CPUs' idle time now decides.
    """
    deadline = time.monotonic() + patience
    while (used := _cores_in_use()) > busy and time.monotonic() < deadline:
        time.sleep(1.0)
    load = os.getloadavg()
    if used > busy:
        print(
            f"warning: the machine is not quiet: other jobs use {used:.2f} of {os.cpu_count()} cores "
            f"(load average {load[0]:.2f}). The numbers below are not to be relied on.",
            flush=True,
        )
    return {"quiet": used <= busy, "cores_in_use": round(used, 3), "load_average": load}


def _cores_in_use(seconds: float = 1.0) -> float:
    """How many cores' worth of time is spent, by anybody, while this process sleeps."""
    try:
        before = _busy_ticks()
        time.sleep(seconds)
        return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds
    except (OSError, ValueError):  # no /proc here
        return os.getloadavg()[0]


def _busy_ticks() -> int:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq


def machine() -> dict[str, Any]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return {"cpu": model, "cores": os.cpu_count(), "system": platform.platform()}


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────────


def spawn(work: Callable[..., T], ranks: int, *args: Any, deadline: float, gloo: bool = True) -> list[T]:
    """``work(*args)`` on every rank of a gloo world of new processes with one thread each; their results.

    Without ``gloo`` the world is left to ``work``. Whatever happens, no process is left behind, and after
    ``deadline`` seconds there is an error.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    workers = [
        context.Process(target=_rank_main, args=(work, args, rank, ranks, port, gloo, deadline, sender), daemon=True)
        for rank, (_, sender) in enumerate(pipes)
    ]
    results: dict[int, T] = {}
    end = time.monotonic() + deadline
    try:
        for worker, (_, sender) in zip(workers, pipes, strict=True):
            worker.start()
            sender.close()
        waiting: dict[Any, int] = {receiver: rank for rank, (receiver, _) in enumerate(pipes)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{work.__module__}: ranks {sorted(waiting.values())} not done in {deadline:.0f} s")
            for receiver in ready:
                rank = waiting.pop(receiver)
                try:
                    error, results[rank] = receiver.recv()  # type: ignore[attr-defined]
                except EOFError:
                    error = f"its process ended with code {workers[rank].exitcode} and no result"
                if error:
                    raise RuntimeError(f"{work.__module__}, rank {rank}: {error}")
        return [results[rank] for rank in range(ranks)]
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.join(timeout=5.0 if len(results) == ranks else 0.1)
                if worker.is_alive():
                    worker.kill()
                    worker.join()


def _rank_main(
    work: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    ranks: int,
    port: int,
    gloo: bool,
    deadline: float,
    out: Connection,
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        if gloo:
            dist.init_process_group("gloo", timeout=timedelta(seconds=deadline))
        result = work(*args)
        if gloo:
            dist.barrier()
        out.send((None, result))
    except BaseException:
        out.send((traceback.format_exc(), None))
    out.close()
    os._exit(0)  # gloo's threads are not worth waiting for


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ── measuring ────────────────────────────────────────────────────────────────────────────────────────────────────


def interleave(
    variants: Mapping[str, Callable[[], T]], rounds: int, *, warmup: int = 1, between: Callable[[], object] = gc.collect
) -> dict[str, list[T]]:
    """Each variant once per round, beginning with another one every round, garbage collected in between only."""
    names = list(variants)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        if number == 0:
            gc.collect()
            gc.freeze()  # what lives by now is not looked at again: collecting between steps is cheap
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            between()
            gc.disable()
            try:
                value = variants[name]()
            finally:
                gc.enable()
            if number >= 0:
                found[name].append(value)
    gc.unfreeze()
    return found


def together(work: Callable[[], object]) -> float:
    """Seconds from a moment common to all ranks until the last one is done with ``work``; the same on every rank."""
    start = _largest(time.monotonic() + LEAD)  # one clock for all processes of a machine
    time.sleep(max(0.0, start - time.monotonic()))
    work()
    return _largest(time.monotonic()) - start


def _largest(value: float) -> float:
    number = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in found.items()}


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def check(what: str, value: float, *, most: float | None = None, least: float | None = None) -> dict[str, Any]:
    """A target and whether it is met."""
    met = (most is None or value <= most) and (least is None or value >= least)
    target = f"≤ {most:.4g}" if most is not None else f"≥ {least:.4g}"
    return {"what": what, "value": value, "target": target, "met": met}


def verdict_lines(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per missed target, and how many are met."""
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
    """Nested dicts become columns ``outer inner``; lists (raw repeats) are left to the JSON."""
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
    """The result as JSON, with when and where it was found."""
    versions = {"torch": torch.__version__, "python": platform.python_version(), "penstock": penstock.__version__}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    head = {"benchmark": name, "date": date, "quick": quick, "machine": machine(), "versions": versions, "load": quiet}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**head, **result, **head}, indent=1, default=str) + "\n")
    return path
