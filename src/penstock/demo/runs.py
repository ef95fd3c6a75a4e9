"""Two ways to train the same network on the same batches: plain, and as a pipeline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.data.mnist import Digits
from penstock.demo.network import network
from penstock.schedule.source import ScheduleSource
from penstock.split import split
from penstock.split.plan import Plan
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline

__all__ = ["PipelineRun", "PlainRun", "Settings", "Step", "plan_of", "schedules_of"]


@dataclass(frozen=True)
class Settings:
    """What both runs are given. ``data`` is the directory of the digits; None is the extract."""

    epochs: int
    batch_size: int
    test_batch_size: int
    learning_rate: float
    schedule: str
    microbatches: int
    seed: int
    data: str | None = None

    def batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        """All mini-batches of all epochs, in the order in which both runs see them."""
        for epoch in range(self.epochs):
            yield from _doubles(digits.batches(self.batch_size, shuffle=self.seed + epoch))

    def test_batches(self, digits: Digits) -> Iterator[tuple[Tensor, Tensor]]:
        return _doubles(digits.batches(self.test_batch_size))


@dataclass(frozen=True)
class Step:
    """What one training step gave."""

    loss: float
    grad_norm: float
    correct: int
    samples: int
    seconds: float


def plan_of(model: nn.Sequential) -> Plan:
    """Each of the network's four layers is a stage."""
    return split(model, balance=[1] * len(model))


def schedules_of(settings: Settings) -> ScheduleSource:
    """The schedules of the pipeline: how many ranks it has, and which stages are where."""
    plan = plan_of(network())
    edges = [(edge.src, edge.dst) for edge in plan.edges]
    return ScheduleSource(settings.schedule, plan.num_stages, edges, settings.microbatches)


class PlainRun:
    """The model as it is."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.model = network(settings.seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.learning_rate)

    def steps(self, train: Digits) -> Iterator[Step]:
        for x, y in self.settings.batches(train):
            start = time.perf_counter()
            outputs = self.model(x)
            loss = F.cross_entropy(outputs, y)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), math.inf)
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield Step(loss.item(), norm.item(), _correct(outputs, y), len(y), time.perf_counter() - start)

    def accuracy(self, test: Digits) -> float:
        return _accuracy(self.model, self.settings.test_batches(test))


class PipelineRun:
    """The model as a pipeline: of threads, or, with a mesh, this process's part of one of processes."""

    def __init__(self, settings: Settings, mesh: Mesh | None = None) -> None:
        self.settings = settings
        plan = plan_of(network(settings.seed))
        self.pipe = Pipeline(
            plan,
            loss_fn=F.cross_entropy,
            microbatches=settings.microbatches,
            schedule=settings.schedule,
            devices=["cpu"] * schedules_of(settings).ranks if mesh is None else None,
            mesh=mesh,
        )
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=settings.learning_rate)

    def steps(self, train: Digits) -> Iterator[Step]:
        for x, y in self.settings.batches(train):
            start = time.perf_counter()
            result = self.pipe.step(x, y)
            norm = self.pipe.clip_grad_norm_(math.inf)  # over all stages; nothing is clipped
            self.optimizer.step()
            self.optimizer.zero_grad()
            correct = _correct(result.outputs, y)
            yield Step(result.loss.item(), norm.item(), correct, len(y), time.perf_counter() - start)

    def accuracy(self, test: Digits) -> float:
        return _accuracy(self.pipe, self.settings.test_batches(test))

    def close(self) -> None:
        self.pipe.close()


def _accuracy(model: Callable[[Tensor], Any], batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    correct = samples = 0
    with torch.no_grad():
        for x, y in batches:
            correct += _correct(model(x), y)
            samples += len(y)
    return correct / samples


def _correct(outputs: Tensor | None, labels: Tensor) -> int:
    """How many are right. A rank without the last stage has no outputs, and counts none."""
    return 0 if outputs is None else int((outputs.argmax(1) == labels).sum())


def _doubles(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((x.double(), y) for x, y in batches)
