"""``ps.Offload``, and optimizers whose state is in host memory and is streamed to the device for the update.

    bucket            0    1    2    3
    to device        ▓▓   ▓▓   ▓▓   ▓▓              during the update of the previous bucket
    update                ██   ██   ██   ██         the optimizer's step, on the bucket's parameters
    to host                    ▒▒   ▒▒   ▒▒   ▒▒    during the update of the next bucket

A torch optimizer that updates each parameter independently is stepped bucket by bucket. The arithmetic per parameter is
the same, so the result is bitwise equal. Any other optimizer (LBFGS, third-party ones) is stepped with all of its state
and all weights on the device. Weights in host memory (``Offload(weights=True)``) are streamed with the state.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from penstock._torch import storage_id
from penstock.engine.offload.copies import CopyEvent, CopyStreams
from penstock.engine.offload.weights import HostWeights, UpdateLease
from penstock.errors import PlanError
from penstock.format import parse_bytes

_PER_PARAMETER = (
    *(optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.Muon),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam),
)
_PLAIN = (Tensor, nn.Parameter)
_Path = tuple[Any, ...]
_PendingCopy = tuple[CopyStreams, CopyEvent, Tensor]  # a copy in progress, with its tensor on the device
_offloaded: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def is_offloaded(optimizer: Optimizer) -> bool:
    return optimizer in _offloaded


class OffloadedOptimizer:
    """Keeps the state of one optimizer in host memory between steps, except tensors below ``smallest`` bytes.

    ``copies_for`` returns the copy streams for a tensor, or None for a tensor that is not moved. ``weights`` has the
    parameters that are in host memory between steps.
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
            raise PlanError("the optimizer's step was replaced: offload it first, then create its LR scheduler")
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise PlanError("an optimizer with differentiable=True cannot be offloaded: its state is part of a graph")
        self.optimizer = optimizer
        self.bucket = bucket
        self.smallest = smallest
        self.copies_for = copies_for
        self.weights = weights
        self._leases: dict[Any, UpdateLease] = {}
        self._host_tensors: dict[Any, dict[_Path, _HostTensor]] = {}
        step: Any = type(optimizer).step
        self._original_step: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
        known: list[Any] = [kind.step for kind in _PER_PARAMETER]
        divisible = any(inspect.unwrap(step) is inspect.unwrap(other) for other in known)

        def step_with_copies(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            return self._step_by_buckets(closure) if divisible else self._step_at_once(closure)

        # Like the steps of torch's own optimizers, it is wrapped with the hooks, which run once for all buckets.
        optimizer.step = MethodType(Optimizer.profile_hook_step(step_with_copies), optimizer)  # type: ignore[method-assign]
        optimizer.register_load_state_dict_post_hook(lambda _: self._move_state_to_host())
        _offloaded.add(optimizer)
        self._move_state_to_host()  # Adagrad creates its state in __init__

    def _step_at_once(self, closure: Callable[[], Any] | None) -> Any:
        with nullcontext() if self.weights is None else self.weights.resident_scope():
            try:
                self._wait_on_device(self._fetch(list(self.optimizer.state)))
                return self._original_step(self.optimizer, *([] if closure is None else [closure]))
            finally:
                self._wait_on_host(self._send())

    def _step_by_buckets(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.weights is not None:
            self.weights.reclaim()
        buckets = list(self._buckets())
        groups = self.optimizer.param_groups
        params_of = [group["params"] for group in groups]
        to_host: list[list[_PendingCopy]] = []
        try:
            to_device = self._fetch(buckets[0][1]) if buckets else []
            for number, (group, params) in enumerate(buckets):
                if len(to_host) > 1:  # free memory for the next bucket
                    self._wait_on_device(to_host.pop(0))
                arrived, to_device = to_device, []
                if number + 1 < len(buckets):
                    to_device = self._fetch(buckets[number + 1][1])
                self._wait_on_device(arrived)
                self.optimizer.param_groups = [group]
                group["params"] = params
                self._original_step(self.optimizer)
                to_host.append(self._send(params))
        finally:
            self.optimizer.param_groups = groups
            for group, params in zip(groups, params_of, strict=True):
                group["params"] = params
            self._wait_on_host([*(copy for row in to_host for copy in row), *self._send()])
        return loss

    def _buckets(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Parameters of one group that are updated together. Three buckets are on the device at a time.

        Torch selects an implementation by the parameters of a group, so groups of mixed types or devices are not split.
        """
        for group in self.optimizer.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            kinds = {(type(p), self._device_of(p) or p.device, p.grad.layout) for p in params}
            divisible = all(kind in _PLAIN and layout is torch.strided for kind, _, layout in kinds)
            divisible = divisible and len({device for _, device, _ in kinds}) == 1
            part: list[Tensor] = []
            size = 0
            for p in params:
                # Before the first step the size of the state is unknown: assume that of Adam.
                state = self._host_tensors.get(p, {}).values()
                cost = sum(tensor.host.nbytes for tensor in state) or 2 * p.nbytes
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
        """Start copying the state of these parameters, and parameters in host memory, to the device."""
        started: list[_PendingCopy] = []
        for key in keys:
            lease = None if self.weights is None else self.weights.lease(key)
            if lease is not None:
                self._leases[key] = lease
                started += [(lease.copies, lease.event, tensor) for tensor in lease.on_device]
            host_tensors = self._host_tensors.get(key, {})
            for container, at, path, tensor in _tensors(self.optimizer.state.get(key)):
                host_tensor = host_tensors.get(path)
                if host_tensor is not None and tensor is host_tensor.host:
                    there = torch.empty_like(tensor, device=host_tensor.device)
                    host_tensor.event = host_tensor.copies.to_device([(tensor, there)])
                    container[at] = there
                    started.append((host_tensor.copies, host_tensor.event, there))
        return started

    def _send(self, keys: Iterable[Any] | None = None) -> list[_PendingCopy]:
        """Start copying the state of these parameters (default: all) and leased parameters to the host."""
        started: list[_PendingCopy] = []
        for key in list(self._leases) if keys is None else keys:
            lease = self._leases.pop(key, None)
            if lease is not None:
                # A fused update unscales gradients in place without incrementing their version counters.
                unscaled = getattr(self.optimizer, "grad_scale", None) is not None
                started += [(lease.copies, *copy) for copy in lease.end(unscaled)]
        found = [
            (key, *place)
            for key in (list(self.optimizer.state) if keys is None else keys)
            for place in _tensors(self.optimizer.state.get(key))
        ]
        # Tensors that share storage with another tensor or a parameter are not moved, so that they keep sharing it.
        uses = Counter(storage_id(tensor) for *_, tensor in found)
        uses.update(
            storage_id(p) for group in self.optimizer.param_groups for p in group["params"] if type(p) in _PLAIN
        )
        for key, container, at, path, tensor in found:
            host_tensors = self._host_tensors.setdefault(key, {})
            host_tensor = host_tensors.get(path)
            copies = None if host_tensor is not None and tensor is host_tensor.host else self.copies_for(tensor)
            if copies is None or tensor.nbytes < max(1, self.smallest) or uses[storage_id(tensor)] > 1:
                continue
            if host_tensor is None or not host_tensor.fits(tensor):
                host_tensor = host_tensors[path] = _HostTensor(copies, tensor.device, copies.allocate_host(tensor))
            host_tensor.event = copies.to_host([(tensor, host_tensor.host)], host_tensor.event)
            container[at] = host_tensor.host
            started.append((copies, host_tensor.event, tensor))
        return started

    def _move_state_to_host(self) -> None:
        """Move state that was created or loaded outside a step to the host.

        Torch creates state on the parameters' device. State of a parameter in host memory is first moved to the device
        of its update, as if created there, except the step count, which most optimizers keep on the CPU.
        """
        for group in self.optimizer.param_groups:
            on_device = group.get("capturable") or group.get("fused")
            for p in group["params"]:
                device = self._device_of(p)
                if device is not None:
                    for container, at, path, tensor in _tensors(self.optimizer.state.get(p)):
                        if path[-1] != "step" or on_device:
                            container[at] = tensor.to(device)
                    self._wait_on_host(self._send([p]))
        self._wait_on_host(self._send())

    def _device_of(self, p: Tensor) -> torch.device | None:
        return None if self.weights is None else self.weights.device_of(p)

    @staticmethod
    def _wait_on_device(copies: Iterable[_PendingCopy]) -> None:
        """Make the device wait for copies. Their targets can be used and their sources freed afterwards."""
        for streams, event, tensor in copies:
            streams.wait(event, tensor)

    @staticmethod
    def _wait_on_host(copies: Iterable[_PendingCopy]) -> None:
        """Make the host wait for copies, so that the state can be read after the step."""
        for streams, event, _ in copies:
            streams.synchronize(event)


@dataclass
class _HostTensor:
    """The host copy of a state tensor, and the device of its update."""

    copies: CopyStreams
    device: torch.device
    host: Tensor
    event: CopyEvent | None = None  # of the last copy from or to the host tensor

    def fits(self, tensor: Tensor) -> bool:
        layouts = [(t.shape, t.dtype, t.stride()) for t in (self.host, tensor)]
        return layouts[0] == layouts[1] and self.device == tensor.device


def _tensors(state: Any, path: _Path = ()) -> Iterator[tuple[Any, Any, _Path, Tensor]]:
    """The plain tensors in nested dicts and lists: container, key, path and tensor."""
    items = list(state.items()) if isinstance(state, dict) else list(enumerate(state)) if type(state) is list else []
    for at, value in items:
        if type(value) in _PLAIN and value.layout is torch.strided:
            yield state, at, (*path, at), value
        else:
            yield from _tensors(value, (*path, at))


@dataclass(frozen=True)
class Offload:
    """The tensors that a pipeline keeps in host memory while a GPU does not use them. On the CPU it has no effect.

    ``optimizer``: the state of optimizers passed to ``pipe.offload_optimizer(…)``; about ``bucket`` bytes of it are on
    the device at a time. ``activations``: tensors that micro-batches in flight saved for backward, up to ``budget``
    bytes of host memory per process; the rest stays on the device. ``weights``: parameters and their gradients; a
    device holds those of the running and of the next stage. Between calls they are CPU tensors. Sizes are bytes or
    strings such as "2GiB".
    """

    optimizer: bool = True
    activations: bool = True
    weights: bool = False
    budget: int | str | None = None
    bucket: int | str = "384MiB"

    def __post_init__(self) -> None:
        if not self.optimizer and not self.activations and not self.weights:
            raise PlanError("Offload(optimizer=False, activations=False) keeps nothing on the host: leave offload out")
        if self.budget is not None and not self.activations:
            raise PlanError(f"Offload(budget={self.budget!r}) is for activations, and activations=False")
        _ = self.budget_bytes, self.bucket_bytes  # raises for an invalid size

    @property
    def budget_bytes(self) -> int | None:
        return None if self.budget is None else parse_bytes(self.budget, "budget")

    @property
    def bucket_bytes(self) -> int:
        return parse_bytes(self.bucket, "bucket")


def offload_optimizer(optimizer: Optimizer, offload: Offload, weights: HostWeights | None = None) -> Optimizer:
    """Keep the optimizer's state in host memory from now on. It is used, saved and loaded as before."""
    streams = cache(CopyStreams)

    def copies_for(tensor: Tensor) -> CopyStreams | None:
        return streams(tensor.device) if tensor.device.type == "cuda" and offload.optimizer else None

    return OffloadedOptimizer(optimizer, offload.bucket_bytes, copies_for, weights=weights).optimizer


def require_offloaded(parameters: Iterable[nn.Parameter]) -> RemovableHandle:
    """Raise an error for steps of optimizers with these parameters unless the optimizer is offloaded."""
    required = {id(parameter): weakref.ref(parameter) for parameter in parameters}

    def check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        if not is_offloaded(optimizer) and any(id(p) in required and required[id(p)]() is p for p in parameters):
            raise PlanError(
                "the pipeline has Offload(optimizer=True) or Offload(weights=True), and this optimizer is not "
                f"offloaded: use pipe.offload_optimizer({type(optimizer).__name__}(pipe.parameters(), …))"
            )

    return register_optimizer_step_pre_hook(check)
