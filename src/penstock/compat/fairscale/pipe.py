"""``Pipe``, a pipeline in one process, and ``AsyncPipe``, one process per stage.

rank 0   pipe(x): F0 F1 F2 F3 · · · · · · · · · · · · · B0 B1 B2 B3 ─▶ a list of batches
rank 1   pipe(x): ·  F0 F1 F2 F3 ─▶ output, loss.backward(): B0 B1 B2 B3
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from penstock.compat import unwrap_local_errors
from penstock.compat.torchgpipe import gpipe

__all__ = ["AsyncPipe", "InputDevice", "LazyModule", "Pipe"]

InputDevice: TypeAlias = int | str | torch.device | None


class Pipe(gpipe.GPipe):
    """``torchgpipe.GPipe``, except that parameters may be shared by partitions on one device."""

    _name = "Pipe"
    _balance_hint = "\n\nMeasure it, see fairscale.nn.pipe.balance and its balance_by_time"
    _allows_duplicate_parameters = True


class LazyModule(NamedTuple):
    """A function that builds a layer. ``AsyncPipe`` calls it on the rank that owns the layer."""

    function: Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return self.function()


class AsyncPipe(nn.Module):
    """Trains a Sequential, or a list of layers and ``LazyModule``s, with one partition per rank of ``group``.

    Each rank holds its partition as submodule ``0`` and calls the pipe with a mini-batch; only the first rank's is
    used. The last rank receives the output and calls ``backward`` on a loss; in training mode the other ranks run their
    backward inside the call. Layers are not moved: move them before the first call.
    """

    def __init__(
        self,
        module: nn.Sequential | list[nn.Module | Callable[[], nn.Module]],
        balance: Iterable[int],
        *,
        group: dist.ProcessGroup | None = None,
        worker_map: Mapping[int, str] | None = None,
        input_device: InputDevice = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        gpipe.check_options(chunks, checkpoint)
        self.balance = list(balance)
        if len(set(map(id, module))) != len(module):
            raise ValueError("module with duplicate children is not supported")
        gpipe.check_balance(len(module), self.balance)
        self.chunks, self.checkpoint = chunks, checkpoint
        self.lock = threading.Lock()
        self.worker_map, self.input_device = worker_map, input_device
        self.group: dist.ProcessGroup = parallel_group("pipeline") if group is None else group
        ranks, rank = self.group.size(), self.group.rank()
        if ranks < len(self.balance):
            counts = f"ranks: {ranks}, partitions: {len(self.balance)}"
            raise IndexError(f"too few ranks to hold given partitions ({counts})")
        self.final_stage = rank == len(self.balance) - 1
        self.partitions: list[SimpleNamespace] = []
        self.partition: nn.Sequential | None = None
        self.pipeline: ps.Pipeline | None = None  # built by the first call, on all ranks
        self._pipeline_config: Any = None
        if rank >= len(self.balance):
            warnings.warn("More ranks than partitions, some ranks unused", stacklevel=2)
            return
        self._deferred = deferred_batch_norm
        named = module.named_children() if isinstance(module, nn.Sequential) else enumerate(module)
        layers = ((str(name), _layer(layer, chunks if deferred_batch_norm else None)) for name, layer in named)
        whole = nn.Sequential(*(nn.Sequential(OrderedDict(islice(layers, count))) for count in self.balance))
        self._whole = [whole]  # in a list, so that other ranks' layers are not submodules
        mine = whole[rank]
        while lazy := [part for part in mine.modules() if isinstance(part, ps.Lazy)]:
            for part in lazy:
                part.build()
        assert isinstance(mine, nn.Sequential)
        self.partitions = [SimpleNamespace(module=mine)]
        self.add_module("0", mine)
        self.partition = mine  # fairscale's checkpoints have this second name as well

    def forward(self, input: gpipe.TensorOrTensors) -> gpipe.TensorOrTensors | list[gpipe.TensorOrTensors]:
        """The output for a mini-batch on the last rank; on others a list for ``back_helper``."""
        gpipe.check(input)
        if self.partition is None:
            return input
        tensors: Iterator[Tensor] = chain(self.partition.parameters(), self.partition.buffers())
        device = next((tensor.device for tensor in tensors), torch.device(self.input_device or "cpu"))
        config = (device, self.chunks, self.checkpoint)
        with self.lock, unwrap_local_errors():
            if self.pipeline is None or self._pipeline_config != config:
                if self.pipeline is not None:
                    self.pipeline.close()
                self._pipeline_config = config
                (whole,) = self._whole
                ranks = dist.get_process_group_ranks(self.group)[: len(self.balance)]
                self.pipeline = ps.Pipeline(
                    ps.split(whole, balance=[1] * len(whole)),
                    microbatches=self.chunks,
                    reduction="mean",  # the loss is the caller's
                    mesh=ps.Mesh(data=1, pipe=len(ranks), tensor=1, group=ranks, device=device),
                    recompute=self.checkpoint,
                    batchnorm="deferred" if self._deferred else "microbatch",
                    dynamic=True,  # a rank has only its own layers
                )
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.training):
                output: gpipe.TensorOrTensors = self.pipeline.forward(input)
        if not self.final_stage:
            return [input]
        gpipe.check(output)
        return output

    def back_helper(self, output: list[gpipe.TensorOrTensors]) -> None:
        """No effect on ranks other than the last: their backward ran inside the call."""
        if self.final_stage:
            raise ValueError("back_helper should only be called on non-final stages")

    def __len__(self) -> int:
        """The number of layers of this rank."""
        return 0 if self.partition is None else len(self.partition)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.partition or ())

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]


def _layer(layer: Any, deferred: int | None) -> nn.Module:
    """Wrap a lazy layer; with ``deferred``, convert BatchNorm layers for that number of chunks."""
    if isinstance(layer, nn.Module):
        return layer if deferred is None else gpipe.DeferredBatchNorm.convert_deferred_batch_norm(layer, deferred)
    if callable(layer):
        return ps.Lazy(layer if deferred is None else lambda: _layer(layer(), deferred))
    raise TypeError(f"layer must be nn.Module or callable, is {type(layer)}")


# ── process groups of a grid of data, pipeline and model ranks; model ranks are adjacent ─────────────────────────────

_groups: dict[str, dist.ProcessGroup] = {}  # this process's group of each kind


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Create the model, pipeline and data groups, whose operations have a ``timeout``. Every process calls it."""
    if context_parallel_size != 1:
        raise ps.PlanError(f"context_parallel_size must be 1, got {context_parallel_size}: there are no such groups")
    assert dist.is_initialized(), "torch.distributed is not initialized"
    assert not _groups, "model parallel groups are already initialized"
    world = dist.get_world_size()
    size = min(model_parallel_size_, world)
    assert world % (size * pipeline_length) == 0, f"{world} is not divisible by {size * pipeline_length}"
    grid = torch.arange(world).view(-1, pipeline_length, size)
    kinds = [("data", ddp_backend), ("pipeline", pipeline_backend), ("model", model_parallel_backend)]
    for axis, (kind, backend) in enumerate(kinds):
        ranks = grid.movedim(axis, -1).flatten(0, 1).tolist()
        _groups[kind], _ = dist.new_subgroups_by_enumeration(ranks, timeout, backend)  # type: ignore[no-untyped-call]


def parallel_group(kind: str) -> dist.ProcessGroup:
    assert kind in _groups, f"{kind} parallel group is not initialized"
    return _groups[kind]


def _ranks(kind: str) -> list[int]:
    return dist.get_process_group_ranks(parallel_group(kind))


MODEL_PARALLEL: dict[str, Callable[..., Any]] = {
    "initialize_model_parallel": initialize_model_parallel,
    "model_parallel_is_initialized": lambda: bool(_groups),
    "destroy_model_parallel": _groups.clear,
    "get_pipeline_parallel_group": partial(parallel_group, "pipeline"),
    "get_pipeline_parallel_ranks": partial(_ranks, "pipeline"),
    "get_data_parallel_group": partial(parallel_group, "data"),
    "get_data_parallel_rank": lambda: parallel_group("data").rank(),
    "get_data_parallel_world_size": lambda: parallel_group("data").size(),
    "get_model_parallel_group": partial(parallel_group, "model"),
    "get_model_parallel_rank": lambda: parallel_group("model").rank(),
    "get_model_parallel_world_size": lambda: parallel_group("model").size(),
    "get_model_parallel_src_rank": lambda: _ranks("model")[0],
}
"""The functions of ``fairscale.nn.model_parallel``; the source rank is the first one of this process's model group."""
