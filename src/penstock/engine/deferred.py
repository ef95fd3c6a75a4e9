"""Gradients of wrapped modules, reduced over replicas once, when all micro-batches of a mini-batch are through.

``DistributedDataParallel`` reduces in the first backward after its last forward. In a pipeline several forwards come
before that, and what later backwards add would stay unreduced. Where a stage is a function of the user's, nobody knows
which wrappers it calls: so calls of modules are looked at while it runs.

    F0 F1 F2 B0 F3 B1 B2 B3 ─▶ reduce       every wrapper that was called, in the order of their first calls
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from penstock._torch import ddp_comm_hooks
from penstock.engine.replicas.ddp import DdpSettings, HookBucket
from penstock.errors import PlanError

__all__ = ["deferring", "reduce_gradients"]

BUCKET = 25 << 20  # bytes that travel together

After = Callable[[Any], None]


@contextmanager
def deferring(kinds: Mapping[type[nn.Module], After] | None = None) -> Iterator[None]:
    """Let wrappers that are called in here reduce at the end, if all goes well.

    ``kinds`` are further kinds of wrappers, with what is then to be done with each. Like DDP they reduce in a backward
    unless their ``require_backward_grad_sync`` is False.
    """
    known: dict[type[nn.Module], After] = {DistributedDataParallel: _after_ddp, **(kinds or {})}
    found: dict[Any, After] = {}
    hook = register_module_forward_pre_hook(partial(_look, known, found))
    try:
        yield
    finally:
        hook.remove()
        for wrapper in found:
            wrapper.require_backward_grad_sync = True
    for wrapper, after in found.items():
        after(wrapper)


def _look(known: Mapping[type[nn.Module], After], found: dict[Any, After], module: Any, args: Any) -> None:
    after = next((after for kind, after in known.items() if isinstance(module, kind)), None)
    if after is None or module in found or not torch.is_grad_enabled():
        return
    if not module.require_backward_grad_sync:  # the user is within ``no_sync``
        return
    if isinstance(module, DistributedDataParallel) and module.static_graph:
        raise PlanError("a pipeline does not support static_graph=True of DistributedDataParallel: leave it out")
    found[module] = after
    module.require_backward_grad_sync = False


def _after_ddp(wrapper: DistributedDataParallel) -> None:
    wrapper.require_forward_param_sync = True  # buffers are made equal in the next forward, as after any reduction
    named = wrapper.module.named_parameters()
    parameters = [p for name, p in named if name not in wrapper.parameters_to_ignore]
    hook = DdpSettings(ddp_comm_hooks(wrapper), wrapper.bucket_bytes_cap) if ddp_comm_hooks(wrapper) else None
    reduce_gradients(parameters, wrapper.process_group, wrapping=hook)


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup,
    *,
    mean: bool = True,
    wrapping: DdpSettings | None = None,
) -> None:
    """Make gradients their mean, or sum, over a group. One that no replica has there is none afterwards.

    ``wrapping`` has the hook of a ``DistributedDataParallel``, which makes the mean.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters or group.size() == 1:
        return
    there = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(there, dist.ReduceOp.MAX, group)
    grads = [_gradient(p) for p, anyone in zip(parameters, there.tolist(), strict=True) if anyone]
    buckets = _buckets(grads, BUCKET if wrapping is None else wrapping.bucket)
    flights = []
    for number, bucket in enumerate(buckets):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        if wrapping is None:
            work: Any = dist.all_reduce(flat, group=group, async_op=True)
        else:
            work = wrapping.start(HookBucket(number, flat, bucket, number == len(buckets) - 1))
        flights.append((work, flat, bucket))
    for work, flat, bucket in flights:
        came = work.wait()
        if wrapping is not None:
            flat = came[0] if isinstance(came, (list, tuple)) else came
        elif mean:
            flat /= group.size()
        for grad, part in zip(bucket, torch.split(flat, [grad.numel() for grad in bucket]), strict=True):
            grad.copy_(part.view_as(grad))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient, to be changed in place."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad


def _buckets(grads: Iterable[Tensor], most: int) -> list[list[Tensor]]:
    """Gradients of one kind that travel together."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    buckets: list[list[Tensor]] = []
    for group in alike.values():
        room = 0
        for grad in group:
            size = grad.numel() * grad.element_size()
            if size > room:
                buckets.append([])
                room = most
            buckets[-1].append(grad)
            room -= size
    return buckets
