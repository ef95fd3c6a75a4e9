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
) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; the norm before, the same on every rank.

    ``counted_here`` says which of this rank's parameters it counts (a tie counts once); ``reduce(x, largest)`` gives
    the sum, or the largest, of ``x`` over the ranks. Ranks without gradients take part.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm_type = float(norm_type)
    counted = [p.grad for p in parameters if p.grad is not None and counted_here(p)]
    home = parameters[0].grad.device if parameters and parameters[0].grad is not None else torch.device("cpu")
    infinite = math.isinf(norm_type)
    partial = _norms(counted, norm_type, home)
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


def _norms(grads: Sequence[Tensor], norm_type: float, home: torch.device) -> Tensor:
    """The norm of each gradient, in single precision at least."""
    norms = [
        torch.linalg.vector_norm(g, norm_type, dtype=torch.float32 if g.dtype.itemsize < 4 else None).to(home)
        for g in grads
    ]
    return torch.stack(norms) if norms else torch.zeros(0, device=home)
