"""Gradients of a stage, summed over its replicas as soon as its last one is there.

    rank 1   … 3W7  REDUCE 3 ─▶ 1B6  1B7  REDUCE 1 ─▶ end of the step: all sums are waited for
                    └ on its way while the rank's other stages work

Small gradients go together in buckets. A large one is summed where it is. Those of weights that live on the host are
summed there, when the run is over. Which parameters got a gradient is summed as well: one that got none in any replica
has none afterwards, as in the plain model. Of a parameter in parts (DTensor), replicas have the same part: it is what
is summed. What ``fully_shard`` has parted over the replicas it reduces itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.replicas import PendingSum, ReplicaGroup
from penstock.engine.replicas.ddp import DdpSettings, HookBucket
from penstock.engine.replicas.dtensor import align_grad_layout, set_local_grad, to_local
from penstock.engine.replicas.fp32_accumulate import fp32_sums, set_grad
from penstock.engine.stage import ParallelizedStage

__all__ = ["GradReducer"]

BUCKET = 25 << 20  # bytes that travel together


class _PendingReduction(NamedTuple):
    """Some gradients on their way: views of one flat tensor, or, where it is None, one gradient as it is."""

    work: Any
    parameters: list[nn.Parameter]
    flat: Tensor | None
    wrapping: DdpSettings | None = None  # whose hook is at work, if one is


class GradReducer:
    """Sums the gradients of this rank's stages over the replicas; without any, it makes them what the optimizer takes.

    Sums start in the order of falling stages whatever the schedule does: replicas may run different numbers of
    micro-batches, and must not meet in different orders. ``parallel`` are the stages that the user has parallelized.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        replicas: ReplicaGroup | None,
        parallel: Mapping[int, ParallelizedStage],
        bucket: int | None = None,
    ) -> None:
        self.replicas = replicas
        self.sharded = {s: made.sharded for s, made in parallel.items() if made.sharded is not None}
        self.wrapped = {key: wrapping for made in parallel.values() for key, wrapping in made.wrapped.items()}
        self.bucket = BUCKET if bucket is None else bucket
        self.stages: dict[int, list[nn.Parameter]] = {}
        seen: set[int] = set()
        # A parameter of several stages of this rank is complete with the first of them, whose backward is the last.
        for stage in sorted(modules):
            mine = [p for p in modules[stage].parameters() if id(p) not in seen]
            seen.update(map(id, mine))
            self.stages[stage] = mine
        self.sparse = {id(p) for module in modules.values() for p in _sparse(module)}
        self._ready: set[int] = set()
        self._waiting: list[int] = []
        self._flights: list[_PendingReduction] = []
        self._present: list[tuple[list[nn.Parameter], PendingSum]] = []

    def begin(self) -> None:
        """Before a step; what a failed one may have left is forgotten."""
        self._ready.clear()
        self._flights.clear()
        self._present.clear()
        self._waiting = sorted(self.stages)

    def ready(self, stage: int) -> None:
        """The step adds nothing more to this stage's gradients."""
        self._ready.add(stage)
        while self._waiting and self._waiting[-1] in self._ready:
            self._start(self._waiting.pop())

    def finish(self) -> None:
        """Every gradient of the step is the sum over the replicas from here on."""
        for stage in reversed(self._waiting.copy()):  # a replica without samples ran no program
            self.ready(stage)
        with torch.no_grad():
            there = {id(p) for parameters, pending in self._present for p in _with_gradient(parameters, pending())}
            for flight in self._flights:
                self._land(flight, there)
            for stage, sharded in sorted(self.sharded.items(), reverse=True):
                if not self._early(stage):
                    sharded.reduce()
                sharded.finish()
                for parameter in self.stages[stage]:
                    if id(parameter) in sharded.parameters and id(parameter) not in there:
                        parameter.grad = None
            self._sum_sparse(there)
        self.begin()

    @torch.no_grad()
    def _start(self, stage: int) -> None:
        parameters = [p for p in self.stages[stage] if p.requires_grad]
        sharded = self.sharded.get(stage)
        if parameters:
            got = {id(p) for p in parameters if p.grad is not None} | (sharded.got_gradient() if sharded else set())
            self._present.append((parameters, self._count([float(id(p) in got) for p in parameters])))
        if sharded is not None:
            parameters = [p for p in parameters if id(p) not in sharded.parameters]
            if self._early(stage):
                sharded.reduce()
        for parameter in parameters:
            align_grad_layout(parameter)
        if self.replicas is not None:
            self._start_sums([p for p in parameters if id(p) not in self.sparse], self.replicas)

    def _early(self, stage: int) -> bool:
        """Whether a sharded stage is reduced while others work: where the process would not wait for it."""
        return self.sharded[stage].device.type != "cpu"

    def _count(self, row: list[float]) -> PendingSum:
        return (lambda: row) if self.replicas is None else self.replicas.start(row)

    def _start_sums(self, parameters: Iterable[nn.Parameter], replicas: ReplicaGroup) -> None:
        kinds: dict[tuple[torch.dtype, torch.device, DdpSettings | None], list[nn.Parameter]] = {}
        for parameter in parameters:
            dtype, wrapping = _dtype(parameter), self.wrapped.get(id(parameter))
            hooked = wrapping is not None and bool(wrapping.hooks)
            if not hooked and to_local(parameter).numel() * dtype.itemsize >= self._most(wrapping):
                self._start_alone(parameter, replicas)
            else:
                kinds.setdefault((dtype, parameter.device, wrapping), []).append(parameter)
        for (dtype, _, wrapping), group in kinds.items():
            buckets = _buckets(group, self._most(wrapping) // dtype.itemsize)
            for number, bucket in enumerate(buckets):
                flat = torch.cat([_gradient(p, dtype).reshape(-1) for p in bucket])
                if wrapping is not None and wrapping.hooks:
                    work = wrapping.start(HookBucket(number, flat, bucket, number == len(buckets) - 1))
                    self._flights.append(_PendingReduction(work, bucket, flat, wrapping))
                else:
                    self._flights.append(_PendingReduction(replicas.start_sum(flat), bucket, flat))

    def _most(self, wrapping: DdpSettings | None) -> int:
        return self.bucket if wrapping is None else wrapping.bucket

    def _start_alone(self, parameter: nn.Parameter, replicas: ReplicaGroup) -> None:
        grad = _gradient(parameter, _dtype(parameter)).contiguous()
        if parameter.grad is None or to_local(parameter.grad) is not grad:
            set_local_grad(parameter, grad)
        self._flights.append(_PendingReduction(replicas.start_sum(grad), [parameter], None))

    def _land(self, flight: _PendingReduction, there: set[int]) -> None:
        """Wait for some gradients, and hand them out."""
        work, parameters, flat, wrapping = flight
        assert self.replicas is not None
        result = self.replicas.wait(work)
        if wrapping is not None:  # a hook gives the mean over the replicas
            flat = (result if isinstance(result, Tensor) else result[0]) * self.replicas.count
        if flat is not None:
            _unflatten_grads(parameters, flat, there)
        elif id(parameters[0]) not in there:
            parameters[0].grad = None

    def _sum_sparse(self, there: set[int]) -> None:
        """Gradients of embeddings that ask for sparse ones stay sparse. Their rows are few: they go as they are."""
        if self.replicas is None:
            return
        for parameter in (p for stage in sorted(self.stages) for p in self.stages[stage]):
            if id(parameter) in self.sparse and id(parameter) in there:
                grads = [g for g in self.replicas.gather(_to_host(parameter.grad)) if g is not None]
                total = sum(grads[1:], grads[0])
                set_grad(parameter, total.to(parameter.device).coalesce() if total.is_sparse else total)


def _dtype(parameter: nn.Parameter) -> torch.dtype:
    """In which a parameter's gradients are summed: not asked of the gradient, which may be missing in one replica."""
    return torch.float32 if id(parameter) in fp32_sums else parameter.dtype


def _gradient(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """This process's part of it."""
    if parameter.grad is None:
        return torch.zeros_like(to_local(parameter), dtype=dtype, requires_grad=False)
    grad = to_local(parameter.grad)
    return (grad.to_dense() if grad.is_sparse else grad).to(dtype)


def _buckets(parameters: Iterable[nn.Parameter], most: int) -> list[list[nn.Parameter]]:
    """Neighbours together, up to ``most`` numbers."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = to_local(parameter).numel()
        if size > room or not buckets:
            buckets.append([])
            room = most
        buckets[-1].append(parameter)
        room -= size
    return buckets


def _unflatten_grads(parameters: list[nn.Parameter], flat: Tensor, there: set[int]) -> None:
    parts = torch.split(flat, [to_local(p).numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        if id(parameter) not in there:
            continue
        part = part.view(to_local(parameter).shape)
        if parameter.grad is None or parameter.grad.is_sparse or parameter.grad.dtype is not part.dtype:
            set_local_grad(parameter, part.clone())
        else:
            to_local(parameter.grad).copy_(part)


def _with_gradient(parameters: list[nn.Parameter], counts: list[float]) -> list[nn.Parameter]:
    return [p for p, count in zip(parameters, counts, strict=True) if count]


def _sparse(module: nn.Module) -> list[Tensor]:
    tables = [part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse]
    return [table.weight for table in tables]


def _to_host(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().cpu()
