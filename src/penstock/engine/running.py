"""Running statistics of BatchNorm layers, the same in all replicas.

Every replica updates its own, micro-batch by micro-batch. After a step, each gets what one process would have that had
run the micro-batches of all of them, the first replica's first: n updates with momentum μ turn r into (1 - μ)ⁿ r + c,
and what each replica's c is, follows from what it had before and has now.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.engine.batchnorm import Gather

__all__ = ["RunningStatistics"]


class _Seen(NamedTuple):
    """How many updates, and the statistics after them."""

    updates: int
    mean: Tensor
    var: Tensor


class RunningStatistics:
    """The statistics of a rank's layers, brought together after each step."""

    def __init__(self, modules: Iterable[nn.Module], gather: Gather) -> None:
        layers = {id(part): part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)}
        self.layers = [layer for layer in layers.values() if layer.num_batches_tracked is not None]
        self.gather = gather
        self._before: list[tuple[_BatchNorm, _Seen]] = []

    def begin(self) -> None:
        """Before the forwards of a step."""
        self._before = [(layer, _look(layer)) for layer in self.layers if layer.training]

    @torch.no_grad()
    def commit(self) -> None:
        """After them."""
        before, self._before = self._before, []
        if not before:
            return
        everyone = self.gather([_on_host(_look(layer)) for layer, _ in before])
        for (layer, old), *new in zip(before, *everyone, strict=True):
            mean, var = (_combined(layer.momentum, old, new, which) for which in ("mean", "var"))
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
            layer.num_batches_tracked.fill_(old.updates + sum(seen.updates - old.updates for seen in new))


def _look(layer: _BatchNorm) -> _Seen:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return _Seen(int(layer.num_batches_tracked), layer.running_mean.clone(), layer.running_var.clone())


def _on_host(seen: _Seen) -> _Seen:
    return _Seen(seen.updates, seen.mean.cpu(), seen.var.cpu())


def _combined(momentum: float | None, old: _Seen, new: list[_Seen], which: str) -> Tensor:
    start: Tensor = getattr(old, which)
    total, count = start.double(), old.updates
    for seen in new:
        updates = seen.updates - old.updates
        if updates:
            # With momentum None, statistics are the mean of all updates so far: what is kept of them is their share.
            share = old.updates / seen.updates if momentum is None else (1 - momentum) ** updates
            keep = count / (count + updates) if momentum is None else share
            there: Tensor = getattr(seen, which).to(start.device)
            added = there.double() - share * start.double()
            if momentum is None:
                added *= seen.updates / (count + updates)
            total = keep * total + added
            count += updates
    return total.to(start.dtype)
