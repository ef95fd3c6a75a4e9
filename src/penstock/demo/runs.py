"""Two ways to train the same network on the same batches: plain, and as a pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.data.mnist import Digits
from penstock.demo.network import network
from penstock.schedule.provider import ScheduleProvider
from penstock.split import split
from penstock.split.plan import Plan
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload
from penstock.train.pipeline import Pipeline
from penstock.train.result import StepResult

__all__ = [
    "PERFETTO", "STAGES", "TRACE", "PipelineRun", "PlainRun", "Settings", "Step", "device_of", "plan_of",
    "schedules_of",
]  # fmt: skip

# Layers of each stage, for each number of stages. The second layer computes more than all others together.
_BALANCES = {1: [4], 2: [1, 3], 3: [1, 1, 2], 4: [1, 1, 1, 1]}
STAGES = tuple(_BALANCES)

_RECORDED = 10  # steps of a trace
TRACE, PERFETTO = "trace.json", "perfetto.json"
"""The files of a trace: all of it, and what https://ui.perfetto.dev shows."""


@dataclass(frozen=True)
class Settings:
    """What both runs are given. ``data`` is the directory of the digits; None is the extract.

    A call makes ``device_iterations`` steps before their results are looked at. ``profile`` is the directory for a
    trace of some steps; None: they are not recorded.
    """

    epochs: int
    batch_size: int
    test_batch_size: int
    learning_rate: float
    schedule: str
    microbatches: int
    seed: int
    data: str | None = None
    stages: int = 4
    device_iterations: int = 1
    device: str = "cpu"
    offload: bool = False
    profile: str | None = None

    def batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        """All mini-batches of all epochs, in the order in which both runs see them."""
        return chain.from_iterable(self.calls(digits))

    def calls(self, digits: Digits) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """The same, as many together as a call takes: fewer at the end of an epoch."""
        for epoch in range(self.epochs):
            batches = _doubles(digits.batches(self.batch_size, shuffle=self.seed + epoch))
            while call := list(islice(batches, self.device_iterations)):
                yield call

    def test_batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        return _doubles(digits.batches(self.test_batch_size))


@dataclass(frozen=True)
class Step:
    """What one training step gave; ``bubble`` is measured, where that is known."""

    loss: float
    grad_norm: float
    correct: int
    samples: int
    seconds: float
    bubble: float | None = None


def plan_of(model: nn.Sequential, stages: int = 4) -> Plan:
    """The network's four layers as stages."""
    return split(model, balance=_BALANCES[stages])


def schedules_of(settings: Settings) -> ScheduleProvider:
    """The schedules of the pipeline: how many ranks it has, and which stages are where."""
    plan = plan_of(network(), settings.stages)
    edges = [(edge.src, edge.dst) for edge in plan.edges]
    return ScheduleProvider(settings.schedule, plan.num_stages, edges, settings.microbatches)


class PlainRun:
    """The model as it is."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = network(settings.seed).to(settings.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)

    def steps(self, train: Digits) -> Iterator[Step]:
        for x, y in self.settings.batches(train):
            start = time.perf_counter()
            x, y = x.to(self.settings.device), y.to(self.settings.device)
            outputs = self.model(x)
            loss = F.cross_entropy(outputs, y)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield Step(loss.item(), norm.item(), _correct(outputs, y), len(y), time.perf_counter() - start)

    def accuracy(self, test: Digits) -> float:
        return _accuracy(lambda x: self.model(x.to(self.settings.device)), self.settings.test_batches(test))


class PipelineRun:
    """The model as a pipeline: of threads, or, with a mesh, this process's part of one of processes."""

    def __init__(self, settings: Settings, mesh: Mesh | None = None) -> None:
        self.settings = settings
        self.rank = 0 if mesh is None else mesh.pipe_rank
        ranks = range(schedules_of(settings).ranks)
        self.pipe = Pipeline(
            plan_of(network(settings.seed), settings.stages),
            loss_fn=F.cross_entropy,
            microbatches=settings.microbatches,
            schedule=settings.schedule,
            devices=[device_of(settings, rank) for rank in ranks] if mesh is None else None,
            mesh=mesh,
            offload=Offload(activations=False) if settings.offload else None,
        )
        self.optimizer: Optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=settings.learning_rate)
        if settings.offload:
            self.optimizer = self.pipe.offload_optimizer(self.optimizer)

    def steps(self, train: Digits) -> Iterator[Step]:
        """Of one call after the other: the results of its steps arrive together."""
        with self._recorded(once=len(train) <= self.settings.batch_size and self.settings.epochs == 1):
            for batches in self.settings.calls(train):
                start = time.perf_counter()
                results = [self._step(x, y) for x, y in batches]
                seconds = (time.perf_counter() - start) / len(batches)
                for (_, y), (result, norm) in zip(batches, results, strict=True):
                    correct = _correct(result.outputs, y)
                    yield Step(result.loss.item(), norm.item(), correct, len(y), seconds, result.bubble)

    @contextmanager
    def _recorded(self, once: bool) -> Iterator[None]:
        """Record some steps, if that is wanted. The first is slower than others: it counts if there is only that."""
        if self.settings.profile is None:
            yield
            return
        with self.pipe.trace(steps=_RECORDED, skip=0 if once else 1, quiet=True) as trace:
            yield
        if self.rank == 0:
            for name, write in ((TRACE, trace.save), (PERFETTO, trace.chrome)):
                write(Path(self.settings.profile, name))

    def _step(self, x: Tensor, y: Tensor) -> tuple[StepResult, Tensor]:
        result = self.pipe.step(x, y)
        norm = self.pipe.clip_grad_norm_(math.inf)  # over all stages; nothing is clipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        return result, norm

    def accuracy(self, test: Digits) -> float:
        return _accuracy(self.pipe, self.settings.test_batches(test))

    def close(self) -> None:
        self.pipe.close()


def device_of(settings: Settings, rank: int) -> str:
    """Where a rank works: GPUs go round."""
    return f"cuda:{rank % torch.cuda.device_count()}" if settings.device == "cuda" else settings.device


def _accuracy(model: Callable[[Tensor], Any], batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    correct = samples = 0
    with torch.no_grad():
        for x, y in batches:
            correct += _correct(model(x), y)
            samples += len(y)
    return correct / samples


def _correct(outputs: Tensor | None, labels: Tensor) -> int:
    """How many are right. A rank without the last stage has no outputs, and counts none."""
    return 0 if outputs is None else int((outputs.argmax(1) == labels.to(outputs.device)).sum())


def _doubles(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x.double(), y) for x, y in batches)
