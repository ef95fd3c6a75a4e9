"""(e) Live receive buffers, sent outputs and input gradients during a step, by the number of micro-batches.

Four gloo ranks train small linear stages with 4 to 64 micro-batches. A weak reference tracks the storage of every
tensor that a rank passes to a process group: for Penstock at the groups of ``DistributedExecutor``, for torch at the
batches of P2P operations of its schedules. Live storages are counted at every send and receive of the third step and
after it: the table has the maximum and the last count of the rank with most.

    receive buffers   storages of receives
    sent outputs      storages sent to the next rank
    input gradients   storages sent to the rank before
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as torch_schedules
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as ps
import penstock.engine.connections as our_connections
from benchmarks.common import spawn
from benchmarks.report import check, table

__all__ = ["run", "show"]

RANKS, WIDTH = 4, 32
NUMBERS = (4, 8, 16, 32, 64)
OURS = ("1f1b", "zb_h1")
THEIRS: tuple[Any, ...] = (Schedule1F1B, ScheduleInterleavedZeroBubble)
KINDS = ("receive buffers", "sent outputs", "input gradients")


class AliveCounts:
    """The observed storages by kind, and the maximum number alive at a time."""

    def __init__(self) -> None:
        self.seen: dict[str, dict[int, StorageWeakRef]] = {kind: {} for kind in KINDS}
        self.most = dict.fromkeys(KINDS, 0)

    def note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            reference = StorageWeakRef(tensor.untyped_storage())
            self.seen[kind][reference.cdata] = reference
        self.count()

    def count(self) -> dict[str, int]:
        for kind, references in self.seen.items():
            for key in [key for key, reference in references.items() if reference.expired()]:
                del references[key]
            self.most[kind] = max(self.most[kind], len(references))
        return {kind: len(references) for kind, references in self.seen.items()}


alive_counts = AliveCounts()


class CountingGroup:
    """A process group that records the tensors of its sends and receives."""

    def __init__(self, group: Any, forward: bool) -> None:
        self.group = group
        self.sent = "sent outputs" if forward else "input gradients"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, tensors: list[Tensor], *where: int) -> Any:
        alive_counts.note(self.sent, tensors)
        return self.group.send(tensors, *where)

    def recv(self, tensors: list[Tensor], *where: int) -> Any:
        alive_counts.note("receive buffers", tensors)
        return self.group.recv(tensors, *where)


def watch() -> None:
    """Record tensors at the sends and receives of Penstock and torch."""
    open_group, batch_p2p = our_connections.open_group, torch_schedules._batch_p2p

    def counting_group(store: Any, name: str, *rest: Any) -> Any:
        group = open_group(store, name, *rest)
        return CountingGroup(group, name.endswith("F")) if ">" in name else group

    def counting_batch(operations: list[Any], desc: str | None = None) -> Any:
        for operation in operations:
            forward = operation.peer > dist.get_rank()
            sent = "sent outputs" if forward else "input gradients"
            alive_counts.note(sent if operation.op is dist.isend else "receive buffers", [operation.tensor])
        return batch_p2p(operations, desc)

    our_connections.open_group = counting_group
    torch_schedules._batch_p2p = counting_batch


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(RANKS)))  # a relu would save its output


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def our_step(name: str, number: int, data: Tensor, mesh: ps.Mesh) -> Callable[[], object]:
    plan = ps.split(layers(), balance=[1] * RANKS)
    pipe = ps.Pipeline(plan, loss_fn, microbatches=number, schedule=name, mesh=mesh, outputs=None)
    return lambda: pipe.step(data, data)


def torch_step(kind: Any, number: int, data: Tensor) -> Callable[[], object]:
    rank = dist.get_rank()
    stage = PipelineStage(layers()[rank], rank, RANKS, torch.device("cpu"))
    schedule = kind(stage if kind is Schedule1F1B else [stage], number, loss_fn=loss_fn)
    inputs = (data,) if rank == 0 else ()
    target = data if rank == RANKS - 1 else None
    return lambda: schedule.step(*inputs, target=target, return_outputs=False)


def variants(number: int, mesh: ps.Mesh) -> dict[str, Callable[[], Callable[[], object]]]:
    """Factories of the variants' steps; one variant exists at a time, so that only its tensors are counted."""
    data = torch.randn(2 * number, WIDTH)
    ours = {f"ours {name}": partial(our_step, name, number, data, mesh) for name in OURS}
    theirs = {
        f"torch {kind.__name__.removeprefix('Schedule')}": partial(torch_step, kind, number, data) for kind in THEIRS
    }
    return {**ours, **theirs}


def measure(numbers: tuple[int, ...]) -> dict[str, dict[str, dict[str, int]]]:
    """On each rank, for every variant and number of micro-batches: maximum alive in a step, and alive after it."""
    global alive_counts
    watch()
    mesh = ps.Mesh(pipe=RANKS)
    found = {}
    for number in numbers:
        for name, make in variants(number, mesh).items():
            alive_counts = AliveCounts()
            step = make()
            step()
            step()
            alive_counts.most = dict.fromkeys(KINDS, 0)
            step()
            after = alive_counts.count()
            found[f"{name}/{number}"] = {"most": dict(alive_counts.most), "after": after}
            dist.barrier()
    return found


def run(quick: bool = False) -> dict[str, Any]:
    numbers = NUMBERS[:3] if quick else NUMBERS
    ranks = spawn(measure, RANKS, numbers, deadline=300)
    rows, targets = [], []
    names = list(dict.fromkeys(key.split("/")[0] for key in ranks[0]))
    for name in names:
        for kind in KINDS:
            row: dict[str, Any] = {"variant": name, "alive": kind}
            for when in ("most", "after"):
                for number in numbers:
                    count = max(rank[f"{name}/{number}"][when][kind] for rank in ranks)
                    row[f"m={number}" if when == "most" else f"after m={number}"] = count
            rows.append(row)
            if name.startswith("ours"):
                # with m = p the pipeline is just filled, so counts must be constant from the next number on
                growth = row[f"m={numbers[-1]}"] - row[f"m={numbers[1]}"]
                targets.append(check(f"{name}, {kind}, growth from m={numbers[1]} to {numbers[-1]}", growth, most=0))
                left = row[f"after m={numbers[-1]}"]
                targets.append(check(f"{name}, {kind}, alive after a step of m={numbers[-1]}", left, most=0))
    return {"settings": {"ranks": RANKS, "width": WIDTH}, "rows": rows, "targets": targets, "by rank": ranks}


def show(result: dict[str, Any]) -> None:
    table(f"(e) tensors alive, most at a time and after a step, {RANKS} gloo ranks, the rank with most", result["rows"])
