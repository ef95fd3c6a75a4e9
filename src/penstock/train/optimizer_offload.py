"""``Offload``: what a pipeline keeps on the host, and optimizers that know of it."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from penstock._torch import storage_id
from penstock.engine.offload.copies import CopyEvent, CopyStreams, CudaCopyStreams, UpdateLease
from penstock.engine.offload.weights import HostWeights
from penstock.errors import PlanError
from penstock.format import parse_bytes

__all__ = ["Offload", "OffloadedOptimizer", "is_offloaded", "offload_optimizer", "require_offloaded"]


# Optimizers whose state lives on the host, streamed around the update; and with it weights that live there.
#
#     bucket            0    1    2    3
#     in               ▓▓   ▓▓   ▓▓   ▓▓              copied to the device while the bucket before is updated
#     update                ██   ██   ██   ██         the optimizer's own step, on the bucket's parameters alone
#     out                        ▒▒   ▒▒   ▒▒   ▒▒    copied to the host while the next one is updated
#
# An optimizer of torch that treats each parameter by itself is stepped bucket by bucket: the same numbers in the same
# order for each parameter, so the same result bit for bit. Of any other (LBFGS, one that torch does not have) nothing
# is known, so all of its state, and all weights, are there for its step.

_PER_PARAMETER = (
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.Muon),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam),
)
_PLAIN = (Tensor, nn.Parameter)
_Path = tuple[Any, ...]
_offloaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def is_offloaded(optimizer: Optimizer) -> bool:
    return optimizer in _offloaded


class OffloadedOptimizer:
    """The state of one optimizer, on the host between steps. Tensors of less than ``smallest`` bytes do not go there.

    ``copies_for`` says how a tensor on a device is copied, and None of one that stays where it is. ``weights`` has the
    parameters that are on the host between steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        bucket: int,
        copies_for: Callable[[Tensor], CopyStreams | None],
        smallest: int = 1 << 14,
        weights: HostWeights | None = None,
    ) -> None:
        if optimizer in _offloaded:
            raise PlanError("this optimizer is offloaded already: call offload_optimizer once")
        if "step" in vars(optimizer):
            raise PlanError("something has replaced the optimizer's step: offload it first, then make its LR scheduler")
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise PlanError("an optimizer with differentiable=True cannot be offloaded: its state is part of a graph")
        self.optimizer = optimizer
        self.bucket = bucket
        self.smallest = smallest
        self.copies_for = copies_for
        self.weights = weights
        self._loans: dict[Any, UpdateLease] = {}
        self._homes: dict[Any, dict[_Path, _HostTensor]] = {}
        step: Any = type(optimizer).step
        self._raw: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        known: list[Any] = [kind.step for kind in _PER_PARAMETER]
        divisible = any(inspect.unwrap(step) is inspect.unwrap(one) for one in known)

        def streamed(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._by_buckets(closure) if divisible else self._whole(closure)

        # As torch does with the steps of its own classes: hooks of the optimizer run once, around all buckets.
        optimizer.step = MethodType(Optimizer.profile_hook_step(streamed), optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(lambda _: self._take_over())
        _offloaded.add(optimizer)
        self._take_over()  # Adagrad has state from its beginning

    def _whole(self, closure: Callable[[], Any] | None) -> Any:
        with nullcontext() if self.weights is None else self.weights.resident_scope():
            try:
                self._arrive(self._fetch(list(self.optimizer.state)))
                return self._raw(self.optimizer) if closure is None else self._raw(self.optimizer, closure)
            finally:
                self._finish(self._send())

    def _by_buckets(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.weights is not None:
            self.weights.reclaim()
        buckets = list(self._buckets())
        groups = self.optimizer.param_groups
        params_of = [group["params"] for group in groups]
        leaving: list[list[_PendingCopy]] = []
        try:
            coming = self._fetch(buckets[0][1]) if buckets else []
            for number, (group, params) in enumerate(buckets):
                if len(leaving) > 1:  # its memory is what the next bucket comes into
                    self._arrive(leaving.pop(0))
                arrived, coming = coming, []
                if number + 1 < len(buckets):
                    coming = self._fetch(buckets[number + 1][1])
                self._arrive(arrived)
                self.optimizer.param_groups = [group]
                group["params"] = params
                self._raw(self.optimizer)
                leaving.append(self._send(params))
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, params_of, strict=True):
                group["params"] = params
            self._finish([*(copy for row in leaving for copy in row), *self._send()])
        return loss

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Parameters of one group that are updated together: three buckets are on the device at a time.

        Torch chooses an implementation by the parameters it sees: groups of several sorts are not divided.
        """
        for group in self.optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            sorts = {(type(p), self._device_of(p) or p.device, p.grad.layout) for p in params}
            divisible = all(kind in _PLAIN and layout is torch.strided for kind, _, layout in sorts)
            divisible = divisible and len({device for _, device, _ in sorts}) == 1
            part: list[Tensor] = []
            size = 0
            for p in params:
                # Before the first step nobody knows how much there will be: as much as Adam has.
                cost = sum(home.host.nbytes for home in self._homes.get(p, {}).values()) or 2 * p.nbytes
                if self._device_of(p) is not None:
                    cost += 2 * p.nbytes
                if part and divisible and 3 * (size + cost) > self.bucket:
                    yield group, part
                    part, size = [], 0
                part.append(p)
                size += cost
            if part:
                yield group, part

    def _fetch(self, keys: Iterable[Any]) -> list[_PendingCopy]:
        """Start the state of these parameters on its way to the device, and those of them that are on the host."""
        started = []
        for key in keys:
            loan = None if self.weights is None else self.weights.lease(key)
            if loan is not None:
                self._loans[key] = loan
                started += [_PendingCopy(loan.copies, loan.event, tensor) for tensor in loan.on_device]
            homes = self._homes.get(key, {})
            for container, at, path, tensor in _tensors(self.optimizer.state.get(key)):
                home = homes.get(path)
                if home is not None and tensor is home.host:
                    there = torch.empty_like(tensor, device=home.device)
                    home.mark = home.copies.to_device([(tensor, there)])
                    container[at] = there
                    started.append(_PendingCopy(home.copies, home.mark, there))
        return started

    def _send(self, keys: Iterable[Any] | None = None) -> list[_PendingCopy]:
        """Start the state of these parameters, or all that is on a device, on its way to the host; and what is lent."""
        started = []
        for key in list(self._loans) if keys is None else keys:
            loan = self._loans.pop(key, None)
            if loan is not None:
                unscaled = getattr(self.optimizer, "grad_scale", None) is not None  # by a fused update, without a trace
                started += [_PendingCopy(loan.copies, *leaving) for leaving in loan.end(unscaled)]
        found = [
            (key, *place)
            for key in (list(self.optimizer.state) if keys is None else keys)
            for place in _tensors(self.optimizer.state.get(key))
        ]
        # What is one memory under two names must stay so: it does not go. Nor does a parameter.
        uses = Counter(storage_id(tensor) for *_, tensor in found)
        uses.update(
            storage_id(p) for group in self.optimizer.param_groups for p in group["params"] if type(p) in _PLAIN
        )
        for key, container, at, path, tensor in found:
            homes = self._homes.setdefault(key, {})
            home = homes.get(path)
            copies = None if home is not None and tensor is home.host else self.copies_for(tensor)
            if copies is None or tensor.nbytes < max(1, self.smallest) or uses[storage_id(tensor)] > 1:
                continue
            if home is None or not home.fits(tensor):
                home = homes[path] = _HostTensor(copies, tensor.device, copies.allocate_host(tensor))
            home.mark = copies.to_host([(tensor, home.host)], home.mark)
            container[at] = home.host
            started.append(_PendingCopy(copies, home.mark, tensor))
        return started

    def _take_over(self) -> None:
        """State that was made or loaded outside of a step goes to the host.

        Torch puts it where the parameters are. Of those that are on the host now, it belongs to the device they are
        used on, as if the update had made it there: but for the count of steps, which torch keeps on the host for most.
        """
        for group in self.optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                device = self._device_of(p)
                if device is not None:
                    for container, at, path, tensor in _tensors(self.optimizer.state.get(p)):
                        if path[-1] != "step" or on_device:
                            container[at] = tensor.to(device)
                    self._finish(self._send([p]))
        self._finish(self._send())

    def _device_of(self, p: Tensor) -> torch.device | None:
        return None if self.weights is None else self.weights.device_of(p)

    @staticmethod
    def _arrive(copies: Iterable[_PendingCopy]) -> None:
        """The device goes on after these copies: what came can be used, what went can be let go."""
        for copy in copies:
            copy.by.wait(copy.mark, copy.on_device)

    @staticmethod
    def _finish(copies: Iterable[_PendingCopy]) -> None:
        """Here the host waits: whoever reads the state after a step must find it."""
        for copy in copies:
            copy.by.synchronize(copy.mark)


class _PendingCopy(NamedTuple):
    by: CopyStreams
    mark: CopyEvent
    on_device: Tensor


@dataclass
class _HostTensor:
    """Where a tensor of the state lives on the host, and the device it is used on."""

    copies: CopyStreams
    device: torch.device
    host: Tensor
    mark: CopyEvent | None = None  # of the last copy from or to the host tensor

    def fits(self, tensor: Tensor) -> bool:
        layouts = [(t.shape, t.dtype, t.stride()) for t in (self.host, tensor)]
        return layouts[0] == layouts[1] and self.device == tensor.device


def _tensors(state: Any, path: _Path = ()) -> Iterator[tuple[Any, Any, _Path, Tensor]]:
    """The plain tensors in a state of dicts and lists: where each is held, under what, and its path."""
    items = list(state.items()) if isinstance(state, dict) else list(enumerate(state)) if type(state) is list else []
    for at, value in items:
        if type(value) in _PLAIN and value.layout is torch.strided:
            yield state, at, (*path, at), value
        else:
            yield from _tensors(value, (*path, at))


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
            return None if size is None and name == "budget" else parse_bytes(size)
        except PlanError:
            raise PlanError(f'Offload({name}={size!r}) is not a size: write a number of bytes or "2GiB"') from None


def offload_optimizer(optimizer: Optimizer, offload: Offload, weights: HostWeights | None = None) -> Optimizer:
    """The same optimizer, its state on the host from now on, as ``weights`` are. It is used, saved, loaded as before.

    Torch loads a state dict to the parameters' devices; it goes to the host right after.
    """
    copies: dict[torch.device, CopyStreams] = {}

    def copies_for(tensor: Tensor) -> CopyStreams | None:
        if tensor.device.type != "cuda" or not offload.optimizer:
            return None
        if tensor.device not in copies:
            copies[tensor.device] = CudaCopyStreams(tensor.device)
        return copies[tensor.device]

    return OffloadedOptimizer(optimizer, offload.bucket_bytes, copies_for, weights=weights).optimizer


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
