"""The norm of all gradients of the model, over all ranks, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engine.replicas.dtensor import is_dtensor, shard_groups, to_local

__all__ = ["clip_grad_norm", "grad_norm"]

DeviceOf = Callable[[nn.Parameter], torch.device | None]


def grad_norm(
    parameters: Iterable[nn.Parameter],
    norm_type: float,
    counted_here: Callable[[nn.Parameter], bool] = lambda parameter: True,
    reduce: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
    device_of: DeviceOf = lambda parameter: None,
    reduce_plain: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
) -> Tensor:
    """The norm of the gradients, the same on every rank.

    ``counted_here`` says which of this rank's parameters it counts (a tie counts once); ``reduce(x, largest)`` gives
    the sum, or the largest, of ``x`` over the ranks. Ranks without gradients take part. Of parameters in parts, all
    processes that have parts of them take part, too: their norms are those of the whole. Where ``device_of`` names a
    device, the norm of a gradient is computed there: sums on the host would be rounded otherwise. ``reduce_plain`` is
    for processes that have parts of parameters which do not say so, and goes before: parameters that do are whole then.
    """
    everyone = list(parameters)
    parameters = [p for p in everyone if p.grad is not None]
    norm_type = float(norm_type)
    first = next(iter(parameters), None)
    home = torch.device("cpu") if first is None or first.grad is None else device_of(first) or first.grad.device
    largest = math.isinf(norm_type)
    counted = [p for p in everyone if counted_here(p)]
    plain = _partial([p for p in counted if not is_dtensor(p)], norm_type, home, device_of)
    plain = reduce_plain(plain, largest)
    both = torch.stack([plain, *_over_shards([p for p in counted if is_dtensor(p)], norm_type, home)])
    total = reduce(both.max() if largest else both.sum(), largest)
    if not largest:
        total = total.pow(1 / norm_type)
    return total


def clip_grad_norm(
    parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> None:
    """Scale gradients, whose norm is ``total``, so that it is at most ``max_norm``."""
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
    parameters: Sequence[nn.Parameter], norm_type: float, home: torch.device, device_of: DeviceOf = lambda _: None
) -> Tensor:
    """What these gradients, or this process's parts of them, add to the norm: powers to be summed, or the largest."""
    parts = [(to_local(p.grad), device_of(p) or p.grad.device) for p in parameters if p.grad is not None]
    norms = _norms([(part, device) for part, device in parts if part.numel()], norm_type, home)
    if not math.isinf(norm_type):
        return norms.pow(norm_type).sum()
    return norms.max() if len(norms) else torch.zeros((), device=home)


def _over_shards(parameters: Sequence[nn.Parameter], norm_type: float, home: torch.device) -> list[Tensor]:
    """The same of parameters in parts, with the parts that other processes have: each part once."""
    alike: dict[tuple[str, ...], list[nn.Parameter]] = {}
    for parameter in parameters:  # with a gradient or without: all processes make the same calls
        key = tuple(group.group_name for group in shard_groups(parameter))
        alike.setdefault(key, []).append(parameter)
    found = []
    for group in alike.values():
        first: Any = group[0]
        total = _partial(group, norm_type, torch.device(first.device_mesh.device_type))
        for processes in shard_groups(first):
            dist.all_reduce(total, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, processes)
        found.append(total.to(home))
    return found


def _norms(grads: Sequence[tuple[Tensor, torch.device]], norm_type: float, home: torch.device) -> Tensor:
    """The norm of each gradient, computed on a device, in single precision at least."""
    wide = {True: torch.float32, False: None}
    norms = [
        torch.linalg.vector_norm(g.to(device), norm_type, dtype=wide[g.dtype.itemsize < 4]).to(home)
        for g, device in grads
    ]
    return torch.stack(norms) if norms else torch.zeros(0, device=home)
