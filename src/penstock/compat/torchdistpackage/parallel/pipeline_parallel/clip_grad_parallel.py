"""Clipping by the norm of the whole model's gradients, and a loss scale that all ranks share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.compat.torchdistpackage.dist.process_topo import tpc
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.train.clip import clip_grad_norm, grad_norm
from penstock.train.scaler import GradScaler

__all__ = ["NativeScalerPP", "clip_grad_norm_"]


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all model ranks is at most ``max_norm``; the norm before.

    All model ranks call it, those without gradients, too. A parameter whose gradient is the same on all tensor ranks
    counts once; of others, each tensor rank has a part.
    """
    own: list[Any] = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    alike = _alike(own) if _parted("tensor") else set()
    first = not _parted("tensor") or tpc.is_first_in_tensor_group()
    total = grad_norm(
        own,
        norm_type,
        counted_here=lambda parameter: first or id(parameter) not in alike,
        reduce=partial(_over, "pipe"),
        reduce_plain=partial(_over, "tensor"),
    )
    clip_grad_norm(own, total, float(max_norm), norm_type, error_if_nonfinite)
    return total


def _parted(mode: str) -> bool:
    return tpc.is_mode_inited(mode) and tpc.get_group_size(mode) > 1


def _over(mode: str, total: Tensor, largest: bool) -> Tensor:
    """The sum, or the largest, over this process's group of a mode."""
    if not _parted(mode):
        return total
    there = total.detach().to(tpc.device, torch.float64, copy=True)
    dist.all_reduce(there, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, tpc.get_group(mode))
    return there.to(total.device, total.dtype)


def _alike(parameters: list[nn.Parameter]) -> set[int]:
    """Those whose gradients are the same on all tensor ranks but for rounding, by identity.

    They are told by two numbers each, the norm and a sum with weights that do not repeat: parts of one parameter may
    have the first in common, but hardly the second.
    """
    plain = [p for p in parameters if not is_dtensor(p)]
    told = [_fingerprint(p.grad) for p in plain]
    everyone: list[Any] = [None] * tpc.get_tp_size()
    dist.all_gather_object(everyone, told, tpc.get_group("tensor"))
    if any(len(theirs) != len(told) for theirs in everyone):
        return set()
    rows = zip(*everyone, strict=True)
    return {id(p) for p, row in zip(plain, rows, strict=True) if all(_close(row[0], other) for other in row)}


def _fingerprint(grad: Tensor | None) -> tuple[tuple[int, ...], float, float]:
    if grad is None:
        return (), 0.0, 0.0
    flat = (grad.to_dense() if grad.is_sparse else grad).detach().flatten().to(torch.float64)
    waves = torch.cos(torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device))
    return tuple(grad.shape), float(flat.norm()), float(flat @ waves)


def _close(one: tuple[tuple[int, ...], float, float], other: tuple[tuple[int, ...], float, float]) -> bool:
    most = 1e-4 * one[1]
    return one[0] == other[0] and abs(one[1] - other[1]) <= most and abs(one[2] - other[2]) <= most


class NativeScalerPP:
    """A loss scale for float16 in a pipeline: all ranks step or none, and all have the same scale.

    scaler = NativeScalerPP()
    loss = forward_backward(optimizer, fwd_fn, scaler.bwd_fn, inputs, …)
    scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    """

    state_dict_key = "amp_scaler"

    def __init__(self, **numbers: Any) -> None:
        """``numbers`` are those of ``GradScaler``: ``init_scale`` and others. All ranks of the world make one."""
        self._scaler = GradScaler(_World(), **numbers)

    def bwd_fn(self, output: Any, grad: Any) -> None:
        """The backward of ``forward_backward``, of the scaled loss."""
        if grad is None:
            self._scaler.scale(output).backward()
            return
        pairs = [(output, grad)] if isinstance(output, Tensor) else zip(output, grad, strict=True)
        there = [(tensor, its) for tensor, its in pairs if its is not None]
        torch.autograd.backward([tensor for tensor, _ in there], [its for _, its in there])

    def __call__(
        self,
        loss: Any,
        optimizer: Optimizer | None,
        clip_grad: float | None = None,
        parameters: Iterable[Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> Tensor | None:
        """Step and change the scale; the norm of the gradients if they are clipped.

        A loss that has a graph is scaled and gets its backward first; that of ``forward_backward`` has had it.
        Without ``need_update`` there is nothing else: gradients are to be added up.
        """
        if isinstance(loss, Tensor) and loss.requires_grad:
            self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return None
        norm = None
        if clip_grad is not None:
            assert parameters is not None, "clip_grad needs the parameters"
            self._scaler.unscale_(optimizer)
            norm = clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def scale(self, loss: Tensor) -> Tensor:
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)


class _World:
    """What the scaler asks of a pipeline, of all processes of the world."""

    loss_scale = 1.0

    def agree(self, number: float) -> float:
        largest = torch.tensor(number, dtype=torch.float64, device=tpc.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return float(largest)
