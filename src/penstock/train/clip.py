"""The norm of the model's gradients over all ranks, and clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.replicas.dtensor import is_dtensor, shard_groups, to_local

DeviceOf = Callable[[nn.Parameter], torch.device | None]


def grad_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float,
    counted_here: Callable[[nn.Parameter], bool] = lambda parameter: True,
    reduce: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
    device_of: DeviceOf = lambda parameter: None,
    reduce_plain: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
) -> Tensor:
    """The norm of the gradients, the same on every rank. Ranks without gradients take part.

    ``counted_here`` selects the parameters that this rank counts (a tied parameter counts once). ``reduce(x, largest)``
    returns the sum, or the maximum, of ``x`` over the ranks. Norms of sharded parameters are reduced over all processes
    that hold shards. If ``device_of`` returns a device, the norm of a gradient is computed there, since sums on the
    host round differently. ``reduce_plain`` runs first, on parameters that are not DTensors: it reduces over processes
    that hold shards which torch does not know to be such.
    """
    all_parameters = list(parameters)
    parameters = [p for p in all_parameters if p.grad is not None]
    norm_type = float(norm_type)
    first = next(iter(parameters), None)
    total_device = torch.device("cpu") if first is None or first.grad is None else device_of(first) or first.grad.device
    largest = math.isinf(norm_type)
    counted = [p for p in all_parameters if counted_here(p)]
    plain = _partial([p for p in counted if not is_dtensor(p)], norm_type, total_device, device_of)
    plain = reduce_plain(plain, largest)
    both = torch.stack([plain, *_over_shards([p for p in counted if is_dtensor(p)], norm_type, total_device)])
    total = reduce(both.max() if largest else both.sum(), largest)
    if not largest:
        total = total.pow(1 / norm_type)
    return total


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> None:
    """Scale gradients with the norm ``total`` to at most ``max_norm``."""
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale them by it anyway"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            to_local(parameter.grad).mul_(scale.to(parameter.grad.device, parameter.grad.dtype))


def _partial(
    parameters: Sequence[nn.Parameter],
    norm_type: float,
    total_device: torch.device,
    device_of: DeviceOf = lambda _: None,
) -> Tensor:
    """The contribution of local gradients to the norm: a sum of powers, or the maximum."""
    total = torch.zeros(1, device=total_device)
    parts = [(to_local(p.grad), device_of(p) or p.grad.device) for p in parameters if p.grad is not None]
    norms = [
        # On the gradient's device, in at least single precision.
        torch.linalg.vector_norm(g.to(device), norm_type, dtype=torch.float32 if g.dtype.itemsize < 4 else None)
        for g, device in parts
        if g.numel()
    ]
    if norms:
        total = torch.stack([norm.to(total_device) for norm in norms])
    return total.max() if math.isinf(norm_type) else total.pow(norm_type).sum()


def _over_shards(parameters: Sequence[nn.Parameter], norm_type: float, total_device: torch.device) -> list[Tensor]:
    """The contributions of sharded parameters, reduced over the processes that hold shards; each shard counts once."""
    by_groups: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in parameters:  # also without a gradient: all processes make the same collective calls
        key = tuple(group.group_name for group in shard_groups(parameter))
        by_groups.setdefault(key, []).append(parameter)
    totals = []
    for group in by_groups.values():
        first: Any = group[0]
        total = _partial(group, norm_type, torch.device(first.device_mesh.device_type))
        for processes in shard_groups(first):
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, processes)
        totals.append(total.to(total_device))
    return totals
