"""The norm of all gradients of the model, over all ranks, and clipping to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

__all__ = ["clip_grad_norm"]


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    counted_here: Callable[[nn.Parameter], bool] = lambda parameter: True,
    reduce: Callable[[Tensor, bool], Tensor] = lambda total, largest: total,
    device_of: Callable[[nn.Parameter], torch.device | None] = lambda parameter: None,
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; the norm before, the same on every rank.

    ``counted_here`` says which of this rank's parameters it counts (a tie counts once); ``reduce(x, largest)`` gives
    the sum, or the largest, of ``x`` over the ranks. Ranks without gradients take part. Where ``device_of`` names a
    device, the norm of a gradient is computed there: sums on the host would be rounded otherwise.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm_type = float(norm_type)
    places = [(p.grad, device_of(p) or p.grad.device, counted_here(p)) for p in parameters if p.grad is not None]
    home = places[0][1] if places else torch.device("cpu")
    infinite = math.isinf(norm_type)
    partial = _norms([(grad, device) for grad, device, counts in places if counts], norm_type, home)
    if infinite:
        total = reduce(partial.max() if len(partial) else torch.zeros((), device=home), True)
    else:
        total = reduce(partial.pow(norm_type).sum(), False).pow(1 / norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped. Pass "
            "error_if_nonfinite=False to scale them by it anyway"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
    return total


def _norms(grads: Sequence[tuple[Tensor, torch.device]], norm_type: float, home: torch.device) -> Tensor:
    """The norm of each gradient, computed on a device, in single precision at least."""
    wide = {True: torch.float32, False: None}
    norms = [
        torch.linalg.vector_norm(g.to(device), norm_type, dtype=wide[g.dtype.itemsize < 4]).to(home)
        for g, device in grads
    ]
    return torch.stack(norms) if norms else torch.zeros(0, device=home)
