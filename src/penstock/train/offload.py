"""``Offload``: what a pipeline keeps on the host, and optimizers that know of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from penstock.engine.hostcopy import Copies, CudaCopies
from penstock.engine.hostweights import HostWeights
from penstock.errors import PlanError
from penstock.split.weights import bytes_of
from penstock.train.hoststate import HostState, is_offloaded

__all__ = ["Offload", "offload_optimizer", "require_offloaded"]


@dataclass(frozen=True)
class Offload:
    """What is kept on the host while a GPU has no use for it. On the CPU it is accepted, and moves nothing.

    ``optimizer``: the state of optimizers that ``pipe.offload_optimizer(…)`` was called with, of which at most about
    ``bucket`` bytes are on the device at a time. ``activations``: what waiting micro-batches saved for their backward,
    up to ``budget`` bytes of host memory in each process; beyond it they stay on the device. ``weights``: parameters
    and their gradients; a device has those of the stage at work and of the one that comes next, and stages on one
    device take turns. Between calls they are tensors of the host. Sizes are bytes or "2GiB".
    """

    optimizer: bool = True
    activations: bool = True
    weights: bool = False
    budget: int | str | None = None
    bucket: int | str = "384MiB"

    def __post_init__(self) -> None:
        for name in ("optimizer", "activations", "weights"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"Offload({name}={getattr(self, name)!r}): say True or False")
        if not self.optimizer and not self.activations and not self.weights:
            raise PlanError("Offload(optimizer=False, activations=False) keeps nothing on the host: leave offload out")
        if self.budget is not None and not self.activations:
            raise PlanError(f"Offload(budget={self.budget!r}) is for activations, and activations=False")
        self._bytes("budget")
        self._bytes("bucket")

    @property
    def budget_bytes(self) -> int | None:
        return self._bytes("budget")

    @property
    def bucket_bytes(self) -> int:
        return self._bytes("bucket") or 0

    def _bytes(self, name: str) -> int | None:
        size = getattr(self, name)
        try:
            return None if size is None and name == "budget" else bytes_of(size)
        except PlanError:
            raise PlanError(f'Offload({name}={size!r}) is not a size: write a number of bytes or "2GiB"') from None


def offload_optimizer(optimizer: Optimizer, offload: Offload, weights: HostWeights | None = None) -> Optimizer:
    """The same optimizer, its state on the host from now on, as ``weights`` are. It is used, saved, loaded as before.

    Torch loads a state dict to the parameters' devices; it goes to the host right after.
    """
    copies: dict[torch.device, Copies] = {}

    def copies_for(tensor: Tensor) -> Copies | None:
        if tensor.device.type != "cuda" or not offload.optimizer:
            return None
        if tensor.device not in copies:
            copies[tensor.device] = CudaCopies(tensor.device)
        return copies[tensor.device]

    return HostState(optimizer, offload.bucket_bytes, copies_for, weights=weights).optimizer


def require_offloaded(parameters: Iterable[nn.Parameter]) -> RemovableHandle:
    """Refuse the step of an optimizer of these parameters that was not offloaded: nobody would see that it is not."""
    ours = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_offloaded(optimizer):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in ours and ours[id(parameter)]() is parameter:
                    raise PlanError(
                        "the pipeline has Offload(optimizer=True) or Offload(weights=True), and this optimizer is not "
                        f"offloaded: use pipe.offload_optimizer({type(optimizer).__name__}(pipe.parameters(), …))"
                    )

    return register_optimizer_step_pre_hook(look)
