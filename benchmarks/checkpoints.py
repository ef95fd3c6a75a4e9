"""(l) Checkpoints: time to save and load, stall of an asynchronous save, and memory, against ``torch.save``.

Ranks of gloo train an equal share each of a model of linear layers with AdamW. The alternative is the usual code
without Penstock: the whole model's state and the optimizers' states are gathered, the first rank writes one file with
``torch.save``, and every rank reads the file with ``torch.load`` and takes its share. Times are medians of interleaved
rounds, from a common start until the last rank is done.

    save           ps.save, until the checkpoint is complete on the disk
    stall          ps.save(asynchronous=True), until it returns
    copy           a copy of all tensors of a rank in host memory: on a GPU, the copy from the device
    gathered save  torch.save of the gathered state, synced to the disk
    memory         largest growth of a rank's resident memory during the call, over the size of its own share
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from time import sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from benchmarks.common import interleave, medians, spawn, time_on_all_ranks
from benchmarks.report import check, table

__all__ = ["run", "show"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


class PeakMemory:
    """The largest resident memory of this process within the context, above that at its begin, in bytes."""

    growth = 0

    def __enter__(self) -> PeakMemory:
        gc.collect()
        self._done = threading.Event()
        self._begin = _resident()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.growth = max(self.growth, _resident() - self._begin)


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE


class Run:
    """A pipeline with its optimizer, and the ways to save and load it."""

    def __init__(self, folder: Path, width: int, layers_per_rank: int) -> None:
        mesh = ps.Mesh(pipe=dist.get_world_size())
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(mesh.pipe * layers_per_rank)))
        plan = ps.split(model, balance=[layers_per_rank] * mesh.pipe)
        self.pipe = ps.Pipeline(plan, nn.MSELoss(), microbatches=2, mesh=mesh)
        del model, plan
        self.optimizer = torch.optim.AdamW(self.pipe.parameters())
        self.pipe.step(torch.randn(4, width), torch.randn(4, width))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.folder, self.file = folder / "penstock", folder / "gathered.pt"
        self.pending: Any = None

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        return [*self.pipe.state_dict().values(), *(t for state in states for t in state.values())]

    def share(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def save(self) -> None:
        ps.save(self.folder, self.pipe, self.optimizer)

    def begin_save(self) -> None:
        self.pending = ps.save(self.folder, self.pipe, self.optimizer, asynchronous=True)

    def copy(self) -> None:
        self.copied = [tensor.clone() for tensor in self.tensors()]

    def load(self) -> None:
        ps.load(self.folder, self.pipe, self.optimizer)

    def gathered_save(self) -> None:
        first = dist.get_rank() == 0
        states: list[Any] | None = [None] * dist.get_world_size() if first else None
        dist.gather_object(self.optimizer.state_dict(), states)
        state = self.pipe.state_dict(full=True)
        if first:
            with open(self.file, "wb") as file:
                torch.save({"model": state, "optimizers": states}, file)
                file.flush()
                os.fsync(file.fileno())
        dist.barrier()

    def gathered_load(self) -> None:
        state = torch.load(self.file, weights_only=True)
        self.pipe.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizers"][dist.get_rank()])

    def between(self) -> None:
        """Outside of the times: end an asynchronous save, and free what a variant has left."""
        if self.pending is not None:
            self.pending.wait()
        self.pending = self.copied = None
        gc.collect()
        dist.barrier()


def measure(folder: str, width: int, layers: int, rounds: int) -> dict[str, Any]:
    run = Run(Path(folder), width, layers)
    calls: dict[str, Callable[[], None]] = {
        "save": run.save,
        "stall": run.begin_save,
        "copy": run.copy,
        "gathered save": run.gathered_save,
        "load": run.load,
        "gathered load": run.gathered_load,
    }
    run.save()
    run.gathered_save()
    seconds: dict[str, list[float]] = {}
    memory = {}
    if rounds:
        timed = {name: lambda call=call: time_on_all_ranks(call) for name, call in calls.items()}  # type: ignore[misc]
        seconds = interleave(timed, rounds, between=run.between)
    share = run.share()
    for name, call in calls.items():
        run.between()
        with PeakMemory() as peak:
            call()
            if run.pending is not None:
                run.pending.wait()
            sleep(0.01)
        memory[name] = peak.growth / share
    run.between()
    return {"seconds": seconds, "memory": memory, "share": share}


def run(quick: bool = False) -> dict[str, Any]:
    width, layers = (256, 2) if quick else (2048, 6)
    rows, targets, raw = [], [], {}
    folder = tempfile.mkdtemp(prefix="penstock_benchmark_")
    try:
        for ranks, rounds in ((2, 3 if quick else 7), (4, 3 if quick else 7), (8, 0)):
            size = width if rounds else width // 2  # eight ranks that each read a gathered file need much memory
            found = spawn(measure, ranks, folder, size, layers, rounds, deadline=900)
            raw[ranks] = found
            time = medians(found[0]["seconds"])
            memory = {name: max(rank["memory"][name] for rank in found) for name in found[0]["memory"]}
            row: dict[str, Any] = {"ranks": ranks, "MiB per rank": found[0]["share"] / 2**20, "time": time}
            row |= {"ratios": {}, "memory": memory}
            for ours, other in (("save", "gathered save"), ("load", "gathered load"), ("stall", "copy")):
                if time:
                    row["ratios"][f"{ours} over {other}"] = time[ours] / time[other]
            if time:
                targets.append(check(f"{ranks} ranks, stall over copy", row["ratios"]["stall over copy"], most=1.2))
            for name in ("save", "load"):
                targets.append(check(f"{ranks} ranks, memory of {name} in shares", memory[name], most=1.0))
            rows.append(row)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {"width": width, "layers per rank": layers, "optimizer": "AdamW", "disk": "temporary folder"}
    return {"settings": settings, "rows": rows, "targets": targets, "by rank": raw}


def show(result: dict[str, Any]) -> None:
    for title in ("time", "ratios", "memory"):
        rows = [{"ranks": row["ranks"], "MiB per rank": row["MiB per rank"], **row[title]} for row in result["rows"]]
        table(f"(l) checkpoints: {title}", rows)
