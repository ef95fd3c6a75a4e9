"""Fake meshes and pipelines, and datasets that record their reads, for tests of data loaders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

import penstock as ps
from tests.support.models import mlp

__all__ = [
    "FakeMesh",
    "FakePipeline",
    "IterableNumbers",
    "RecordingDataset",
    "batches_per_replica",
    "global_batches",
    "sample_numbers",
]


class FakeMesh(ps.Mesh):
    """A mesh without processes: only this rank's coordinates."""

    def __init__(self, data: int = 1, data_rank: int = 0, pipe: int = 1, pipe_rank: int = 0, tensor: int = 1) -> None:
        self.sizes = {"data": data, "pipe": pipe, "tensor": tensor}
        self.data, self.pipe, self.tensor = data, pipe, tensor
        self.data_rank, self.pipe_rank, self.tensor_rank = data_rank, pipe_rank, 0
        self.rank = data_rank * pipe + pipe_rank
        self.world_ranks = tuple(range(data * pipe * tensor))
        self.device = torch.device("cpu")


class FakePipeline(ps.Pipeline):
    """A pipeline without an executor: only its plan and the stages of this rank."""

    def __init__(self, mesh: ps.Mesh | None, *stages: int, devices: Sequence[str] = ("cpu",) * 4) -> None:
        self.mesh = mesh
        self.plan = ps.split(mlp(4), stages=4).placed([0, 1, 2, 3], devices)
        self._modules = dict.fromkeys(stages)  # type: ignore[assignment]


class RecordingDataset(torch_data.Dataset[tuple[Tensor, int]]):
    """Sample ``i`` holds the number ``i``; ``read`` records the indices."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        return torch.full((2,), float(index)), index


class IterableNumbers(torch_data.IterableDataset[Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.epochs: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.arange(self.count)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def batches_per_replica(dataset: Any, batch_size: int | None, data: int, **options: Any) -> list[list[Any]]:
    """The batches that each of ``data`` replicas gets."""
    return [list(ps.DataLoader(dataset, batch_size, mesh=FakeMesh(data, rank), **options)) for rank in range(data)]


def global_batches(parts: Sequence[list[Any]]) -> list[Any]:
    """The global mini-batches: the replicas' shards, concatenated. All replicas must have equally many steps."""
    assert len({len(part) for part in parts}) == 1
    return [torch.cat(row) for row in zip(*parts, strict=True)]


def sample_numbers(loader: ps.DataLoader[Any]) -> list[list[int]]:
    return [y.tolist() for _, y in loader]
