"""Sums of a stage's gradients over its replicas, started as soon as the gradients of the step are complete.

    rank 1   … 3W7  REDUCE 3 ─▶ 1B6  1B7  REDUCE 1 ─▶ end of the step: waits for all sums
                    └ overlaps with the work of the rank's other stages

Small gradients share buckets; a large one is summed in place. Gradients of offloaded weights are summed on the host at
the end of the run. A parameter without a gradient in all replicas has none afterwards, as in the plain model: replicas
also sum the number of gradients of each parameter. For a DTensor, the local parts are summed, which cover the same part
of the tensor in all replicas. ``fully_shard`` itself reduces the parameters that it has sharded over the replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.replicas import PendingSum, ReplicaGroup
from penstock.engine.replicas.ddp import DdpSettings, HookBucket
from penstock.engine.replicas.dtensor import is_dtensor, set_local_grad, to_local
from penstock.engine.replicas.fp32_accumulate import fp32_sums, set_grad
from penstock.engine.stage import ParallelizedStage

BUCKET = 25 << 20  # bytes


# An all-reduce in progress, of a flat bucket of gradients or of one gradient in place: its work, the parameters, the
# bucket if there is one, and the DDP settings if their communication hook reduces it.
_PendingReduction = tuple[Any, list[nn.Parameter], Tensor | None, DdpSettings | None]


class GradReducer:
    """Sums the gradients of this rank's stages over the replicas. Without replicas it only aligns their layouts.

    Sums start in descending order of stages for any schedule: replicas may run different numbers of micro-batches, and
    must start the same collectives in the same order. ``parallel`` has the stages that ``parallelize`` changed.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        replicas: ReplicaGroup | None,
        parallel: Mapping[int, ParallelizedStage],
    ) -> None:
        self.replicas = replicas
        self.sharded = {s: made.sharded for s, made in parallel.items() if made.sharded is not None}
        self.ddp = {key: settings for made in parallel.values() for key, settings in made.wrapped.items()}
        self.bucket = BUCKET
        self.stages: dict[int, list[nn.Parameter]] = {}
        seen: set[int] = set()
        # A parameter of several stages of this rank is reduced with the first of them, whose backward is the last.
        for stage in sorted(modules):
            own = [p for p in modules[stage].parameters() if id(p) not in seen]
            seen.update(map(id, own))
            self.stages[stage] = own
        self.sparse = {
            id(part.weight)
            for module in modules.values()
            for part in module.modules()
            if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        }
        self._ready: set[int] = set()
        self._unstarted: list[int] = []
        self._reductions: list[_PendingReduction] = []
        self._grad_counts: list[tuple[list[nn.Parameter], PendingSum]] = []

    def begin(self) -> None:
        """Before a step: drop the state that a failed step may have left."""
        self._ready.clear()
        self._reductions.clear()
        self._grad_counts.clear()
        self._unstarted = sorted(self.stages)

    def ready(self, stage: int) -> None:
        """Report that this stage's gradients of the step are complete; start the sums that are next in order."""
        self._ready.add(stage)
        while self._unstarted and self._unstarted[-1] in self._ready:
            self._start(self._unstarted.pop())

    def finish(self) -> None:
        """Wait for all sums. Afterwards every gradient is the sum over the replicas."""
        for stage in reversed(self._unstarted.copy()):  # a replica without samples ran no program
            self.ready(stage)
        with torch.no_grad():
            got_grad = {
                id(p)
                for parameters, pending in self._grad_counts
                for p, count in zip(parameters, pending(), strict=True)
                if count
            }
            for reduction in self._reductions:
                self._finish_reduction(reduction, got_grad)
            for stage, sharded in sorted(self.sharded.items(), reverse=True):
                if not self._overlaps(stage):
                    sharded.reduce_grads()
                sharded.finish_reduction()
                for parameter in self.stages[stage]:
                    if id(parameter) in sharded.parameters and id(parameter) not in got_grad:
                        parameter.grad = None
            # Sparse gradients of embeddings stay sparse: replicas gather their rows.
            for parameter in (p for stage in sorted(self.stages) for p in self.stages[stage]):
                if self.replicas is not None and id(parameter) in self.sparse and id(parameter) in got_grad:
                    grad = None if parameter.grad is None else parameter.grad.detach().cpu()
                    grads = [g for g in self.replicas.control.gather(grad) if g is not None]
                    total = sum(grads[1:], grads[0])
                    set_grad(parameter, total.to(parameter.device).coalesce() if total.is_sparse else total)
        self.begin()

    @torch.no_grad()
    def _start(self, stage: int) -> None:
        parameters = [p for p in self.stages[stage] if p.requires_grad]
        sharded = self.sharded.get(stage)
        if parameters:
            got = {id(p) for p in parameters if p.grad is not None} | (sharded.params_with_grad() if sharded else set())
            counts = [float(id(p) in got) for p in parameters]
            pending = (lambda: counts) if self.replicas is None else self.replicas.start_sum(counts)
            self._grad_counts.append((parameters, pending))
        if sharded is not None:
            parameters = [p for p in parameters if id(p) not in sharded.parameters]
            if self._overlaps(stage):
                sharded.reduce_grads()
        for parameter in parameters:
            grad: Any = parameter.grad
            if is_dtensor(parameter) and is_dtensor(grad) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)  # such as a partial sum
        if self.replicas is not None:
            self._start_sums([p for p in parameters if id(p) not in self.sparse], self.replicas)

    def _overlaps(self, stage: int) -> bool:
        """Whether FSDP reduces a stage while others compute. On the CPU the process would wait for the reduction."""
        return self.sharded[stage].device.type != "cpu"

    def _start_sums(self, parameters: Iterable[nn.Parameter], replicas: ReplicaGroup) -> None:
        kinds: dict[tuple[torch.dtype, torch.device, DdpSettings | None], list[nn.Parameter]] = {}
        for parameter in parameters:
            # Not the gradient's dtype, because a replica may have no gradient.
            dtype = torch.float32 if id(parameter) in fp32_sums else parameter.dtype
            ddp = self.ddp.get(id(parameter))
            capacity, hooked = (self.bucket, False) if ddp is None else (ddp.bucket_bytes, bool(ddp.hooks))
            if not hooked and to_local(parameter).numel() * dtype.itemsize >= capacity:
                grad = _local_grad(parameter, dtype).contiguous()
                if parameter.grad is None or to_local(parameter.grad) is not grad:
                    set_local_grad(parameter, grad)
                self._reductions.append((replicas.start_allreduce(grad), [parameter], None, None))
            else:
                kinds.setdefault((dtype, parameter.device, ddp), []).append(parameter)
        for (dtype, _, ddp), group in kinds.items():
            capacity = self.bucket if ddp is None else ddp.bucket_bytes
            buckets = _buckets(group, capacity // dtype.itemsize)
            for number, bucket in enumerate(buckets):
                flat = torch.cat([_local_grad(p, dtype).reshape(-1) for p in bucket])
                if ddp is not None and ddp.hooks:
                    hook, state = ddp.hooks[-1]
                    work = hook(state, HookBucket(number, flat, bucket, number == len(buckets) - 1))
                    self._reductions.append((work, bucket, flat, ddp))
                else:
                    self._reductions.append((replicas.start_allreduce(flat), bucket, flat, None))

    def _finish_reduction(self, reduction: _PendingReduction, got_grad: set[int]) -> None:
        work, parameters, flat, ddp = reduction
        assert self.replicas is not None
        result = self.replicas.wait(work)
        if ddp is not None:  # a hook returns the mean over the replicas
            flat = (result if isinstance(result, Tensor) else result[0]) * self.replicas.count
        if flat is None:
            if id(parameters[0]) not in got_grad:
                parameters[0].grad = None
            return
        parts = torch.split(flat, [to_local(p).numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            if id(parameter) not in got_grad:
                continue
            part = part.view(to_local(parameter).shape)
            if parameter.grad is None or parameter.grad.is_sparse or parameter.grad.dtype is not part.dtype:
                set_local_grad(parameter, part.clone())
            else:
                to_local(parameter.grad).copy_(part)


def _local_grad(parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(to_local(parameter), dtype=dtype, requires_grad=False)
    grad = to_local(parameter.grad)
    return (grad.to_dense() if grad.is_sparse else grad).to(dtype)


def _buckets(parameters: Iterable[nn.Parameter], capacity: int) -> list[list[nn.Parameter]]:
    """Groups of consecutive parameters with up to ``capacity`` elements in total."""
    buckets: list[list[nn.Parameter]] = []
    free = 0
    for parameter in parameters:
        size = to_local(parameter).numel()
        if size > free or not buckets:
            buckets.append([])
            free = capacity
        buckets[-1].append(parameter)
        free -= size
    return buckets
