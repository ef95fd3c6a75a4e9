"""``AsyncPipe``: one process per stage.

rank 0   pipe(x): F0 F1 F2 F3 · · · · · · · · · · · · · B0 B1 B2 B3 ─▶ a list of batches
rank 1   pipe(x): ·  F0 F1 F2 F3 ─▶ output, loss.backward(): B0 B1 B2 B3
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.compat.fairscale.nn.model_parallel import initialize
from penstock.compat.own_errors import own_errors
from penstock.compat.torchgpipe import microbatch
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from penstock.compat.torchgpipe.microbatch import Batch, TensorOrTensors
from penstock.split import split
from penstock.split.lazy import Lazy, build
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline

__all__ = ["AsyncPipe"]

Layer = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Partition:
    """The layers of this rank."""

    module: nn.Sequential

    def __len__(self) -> int:
        return len(self.module)


class AsyncPipe(nn.Module):
    """Trains a Sequential, or a list of layers and ``LazyModule``s, on as many ranks of ``group`` as it has partitions.

    Every rank has its own partition, as its submodule ``0``, and calls the pipe with a mini-batch, of which that of
    the first rank counts. The last rank gets the output, and calls ``backward`` on a loss of it; the others wait for
    that in their call, in training mode. Layers stay where they are, and run there: move them before the first call.
    """

    chunks: int = 1
    checkpoint: str = "except_last"

    def __init__(
        self,
        module: nn.Sequential | list[Layer],
        balance: Iterable[int],
        *,
        group: dist.ProcessGroup | None = None,
        worker_map: Mapping[int, str] | None = None,
        input_device: torch.device | int | str | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        self.balance = list(balance)
        _verify(module, self.balance)
        self.chunks, self.checkpoint = chunks, checkpoint
        self.lock = threading.Lock()
        self.worker_map, self.input_device = worker_map, input_device
        self.group: dist.ProcessGroup = initialize.get_pipeline_parallel_group() if group is None else group
        if self.group.size() < len(self.balance):
            raise IndexError(
                f"too few ranks to hold given partitions (ranks: {self.group.size()}, partitions: {len(self.balance)})"
            )
        rank = self.group.rank()
        self.final_stage = rank == len(self.balance) - 1
        self.partitions: list[Partition] = []
        self.partition: nn.Sequential | None = None
        self.pipeline: Pipeline | None = None  # made by the first call: all ranks meet in it
        self._built: Any = None
        if rank >= len(self.balance):
            warnings.warn("More ranks than partitions, some ranks unused", stacklevel=2)
            return
        whole = _partitioned(module, self.balance, chunks if deferred_batch_norm else None)
        self._deferred = deferred_batch_norm
        self._whole = [whole]  # in a list: what other ranks have is no part of this module
        mine = build(whole[rank])
        assert isinstance(mine, nn.Sequential)
        self.partitions = [Partition(mine)]
        self.add_module("0", mine)
        self.partition = mine  # a second name, which fairscale's checkpoints have as well

    def forward(self, input: TensorOrTensors) -> TensorOrTensors | list[Batch]:
        """The output for a mini-batch on the last rank, a list of batches, of no use, on the others."""
        microbatch.check(input)
        if self.partition is None:
            return input
        with self.lock, own_errors():
            pipeline = self._pipeline()
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
                output: TensorOrTensors = pipeline.forward(input)
        if not self.final_stage:
            return microbatch.scatter(input, self.chunks)
        microbatch.check(output)
        return output

    def back_helper(self, output: list[Batch]) -> None:
        """Nothing is left to do on a rank that is not the last."""
        if self.final_stage:
            raise ValueError("back_helper should only be called on non-final stages")

    def _pipeline(self) -> Pipeline:
        assert self.partition is not None
        tensors = chain(self.partition.parameters(), self.partition.buffers())
        device = next((tensor.device for tensor in tensors), torch.device(self.input_device or "cpu"))
        how = (device, self.chunks, self.checkpoint)
        if self.pipeline is None or self._built != how:
            if self.pipeline is not None:
                self.pipeline.close()
            (whole,) = self._whole
            ranks = dist.get_process_group_ranks(self.group)[: len(self.balance)]
            self.pipeline = Pipeline(
                split(whole, balance=[1] * len(whole)),
                microbatches=self.chunks,
                mesh=Mesh(data=1, pipe=len(ranks), tensor=1, group=ranks, device=device),
                recompute=self.checkpoint,
                batchnorm="deferred" if self._deferred else "microbatch",
                dynamic=True,  # any layers may be here, and other ranks know nothing of them
            )
            self._built = how
        return self.pipeline

    def __len__(self) -> int:
        """The number of layers of this rank."""
        return 0 if self.partition is None else len(self.partition)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.partition or ())

    def __getitem__(self, index: int) -> nn.Module:
        """One of this rank's layers."""
        return list(self)[index]


def _verify(module: nn.Sequential | list[Layer], balance: list[int]) -> None:
    if len(set(map(id, module))) != len(module):
        raise ValueError("module with duplicate children is not supported")
    if len(module) != sum(balance):
        raise ValueError(
            f"module and sum of balance have different length (module: {len(module)}, sum of balance: {sum(balance)})"
        )
    if any(count <= 0 for count in balance):
        raise ValueError(f"all balance numbers must be positive integer (balance: {balance})")


def _partitioned(module: nn.Sequential | list[Layer], balance: list[int], deferred: int | None) -> nn.Sequential:
    """The partitions of the whole model, with layers that are still to be made; ``deferred``: for so many chunks."""
    named = module.named_children() if isinstance(module, nn.Sequential) else enumerate(module)
    layers = ((str(name), _layer(layer, deferred)) for name, layer in named)
    return nn.Sequential(*(nn.Sequential(OrderedDict(islice(layers, count))) for count in balance))


def _layer(layer: Any, deferred: int | None) -> nn.Module:
    if isinstance(layer, nn.Module):
        return layer if deferred is None else DeferredBatchNorm.convert_deferred_batch_norm(layer, deferred)
    if callable(layer):
        return Lazy(layer if deferred is None else lambda: _layer(layer(), deferred))
    raise TypeError(f"layer must be nn.Module or callable, is {type(layer)}")
