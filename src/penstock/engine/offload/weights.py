"""Offloaded weights: in host memory, and on the device only while a stage that uses them computes.

    between calls   a parameter is a host tensor in pinned memory, and so is its gradient
    during a run    it is a device tensor, whose storage has memory while its stages compute
    for an update   an offloaded optimizer leases it with its gradient and its state, bucket by bucket

Between calls, programs can read, save, load and change a parameter as an ordinary tensor. The device holds the weights
of two stages at a time. Forwards, backwards and updates run the same kernels as without offload. A parameter is a
device tensor for the whole run, with or without memory, because a parameter that changes its device loses the node that
accumulates its gradient, and the hooks on that node. A stage must not read the parameters of other stages: they may
have no memory.

``prefetch_plan`` schedules the copies. While a rank computes for one stage, it prefetches the weights of the next:

    program          0F0 0F1 │ 1F0 1F1 │ 2F0 2F1 │ 2B0 …
    stage 0          ███████ │         │         │            █ in use
    stage 1          ▒▒▒▒▒▒▒ │ ███████ │         │            ▒ copy in progress
    stage 2                  │ ▒▒▒▒▒▒▒ │ ███████ │ ███

``pipe(x)`` with gradients copies all weights to the device, because its graph needs them until its backward. The first
run without such a graph moves them back to the host.

The following stay on the device: buffers; parameters that are not plain tensors (DTensor) or that share their storage
(such as the weights of an LSTM on a GPU); and all parameters of a stage with a DistributedDataParallel, which keeps
references to the nodes that accumulate gradients.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock._torch import storage_id
from penstock.engine.offload.copies import CopyEvent, CopyStreams
from penstock.engine.replicas.fp32_accumulate import set_grad
from penstock.errors import PlanError
from penstock.schedule.lower import Instruction
from penstock.schedule.schedule import COMPUTE

ParamsKey = tuple[int, ...]
"""The stages that use a set of parameters, which are copied together."""


class ParamTransfer(NamedTuple):
    """The weights of an ``OffloadedParams``, or their gradients."""

    params: ParamsKey
    grads: bool = False


class PrefetchStep(NamedTuple):
    """Before instruction ``at``: evict, then start to prefetch, then wait for the transfers that the next span uses."""

    at: int
    evict: tuple[ParamTransfer, ...]
    prefetch: tuple[ParamTransfer, ...]
    use: tuple[ParamTransfer, ...]


def prefetch_plan(
    instructions: Iterable[Instruction], params_of: Mapping[int, Sequence[ParamsKey]]
) -> list[PrefetchStep]:
    """The steps of a rank's program, the last one at its end. ``params_of`` has the stages with offloaded ones.

    Each span of consecutive actions of one stage has a step. Gradients are on the device only for B, I and W.
    """
    spans: list[tuple[int, dict[ParamTransfer, None]]] = []  # the start of each, and its transfers in order
    stage, end = -1, 0
    for at, instruction in enumerate(instructions):
        end = at + 1
        if instruction.kind not in COMPUTE or not params_of.get(instruction.stage):
            continue
        if instruction.stage != stage:
            stage = instruction.stage
            spans.append((at, dict.fromkeys(ParamTransfer(key) for key in params_of[stage])))
        if instruction.kind in "BIW":
            spans[-1][1].update(dict.fromkeys(ParamTransfer(key, True) for key in params_of[stage]))
    steps: list[PrefetchStep] = []
    present: dict[ParamTransfer, None] = {}
    for number, (at, use) in enumerate(spans):
        following = spans[number + 1][1] if number + 1 < len(spans) else {}
        wanted = {**use, **following}
        evict = tuple(transfer for transfer in present if transfer not in wanted)
        steps.append(PrefetchStep(at, evict, tuple(t for t in wanted if t not in present), tuple(use)))
        present = wanted
    return [*steps, PrefetchStep(end, tuple(present), (), ())] if steps else []


class OffloadedParams:
    """Parameters that the same stages use, on the host between runs and on the device during a run.

    Autograd saves references to a weight's storage (a linear saves a view of the weight). So the memory of the storage
    is allocated and freed, and the tensors stay the same:

        parameter.data ──▶ a device tensor ──┐
        saved for B    ──▶ a view of it ─────┴──▶ storage ──▶ memory while its stages compute

    Weights are evicted without a copy, because the host has them, unless a forward has changed them (an embedding with
    ``max_norm``). A write through ``.data`` does not increment the version, so the first eviction in each mode compares
    the values. Gradients are copied to the host, and their device memory is freed afterwards.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, copies: CopyStreams) -> None:
        self.parameters = list(parameters)
        self.device = device
        self.copies = copies
        self.hidden_writes = False  # a forward has changed weights without incrementing their version
        self._present = False
        self._compared_in: set[Hashable] = set()  # modes
        self._versions: list[int] = []
        self._fetching: list[tuple[CopyEvent, object]] = []  # with the tensors to keep until then
        self._evicting: list[tuple[CopyEvent, Sequence[Tensor]]] = []  # gradients; empty for the weights
        self._last_copy: dict[str, CopyEvent] = {}
        self._grads: dict[nn.Parameter, Tensor] = {}  # host gradients, during a run
        # Data on the host; and on the device, where its storage may have no memory.
        self.hosted: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._allocate_host()

    # ── during a run ─────────────────────────────────────────────────────────────────────────────────────────

    def begin_run(self) -> None:
        """Make the parameters device tensors, without memory."""
        for parameter, (_, on_device) in self.hosted.items():
            parameter.data = on_device

    def prefetch(self) -> None:
        """Start to copy the weights to the device."""
        for host, on_device in self.hosted.values():
            on_device.untyped_storage().resize_(host.nbytes)
        self._start_to_device([(host, on_device) for host, on_device in self.hosted.values()])
        self._versions = [parameter._version for parameter in self.parameters]
        self._present = True

    def prefetch_grads(self) -> None:
        """Start to copy the gradients that exist to the device."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for parameter in self.parameters:
            host = self._grads.pop(parameter, parameter.grad)
            parameter.grad = None
            if host is None:
                continue
            set_grad(parameter, _device_tensor(host, self.device, pairs))
            self._grads[parameter] = host
        self._start_to_device(pairs)

    def wait_prefetch(self) -> None:
        """Make later work of the device wait for the copies to it."""
        for event, _ in self._fetching:
            self.copies.wait(event)
        self._fetching.clear()

    def evict(self, mode: Hashable = None, *, changed: bool = False) -> None:
        """Free the device memory of the weights. Copy them to the host first if a forward in ``mode`` changed them."""
        self.wait_prefetch()
        self._present = False
        if any(storage_id(parameter) != storage_id(on_device) for parameter, (_, on_device) in self.hosted.items()):
            raise PlanError(
                "a forward gave one of its parameters other memory (parameter.data = …), which Offload(weights=True) "
                "does not support: change it in place (parameter.data.copy_(…)), or leave the weights on the device"
            )
        versions = [parameter._version for parameter in self.parameters]
        changed = changed or self.hidden_writes or self._versions != versions
        if mode is not None and mode not in self._compared_in:
            self._compared_in.add(mode)
            if not changed and self._differ_from_host():
                changed = self.hidden_writes = True
        if changed:
            self._start_to_host([(on_device, host) for host, on_device in self.hosted.values()], ())
        else:
            self._free()

    def evict_grads(self) -> None:
        """Start to copy the gradients to the host."""
        pairs = []
        for parameter in self.parameters:
            grad, host = parameter.grad, self._grads.pop(parameter, None)
            if grad is None:
                continue
            if not _is_plain_tensor(grad):
                host = grad.cpu()
            else:
                if host is None or (host.shape, host.dtype) != (grad.shape, grad.dtype):
                    host = self.copies.allocate_host(grad)
                pairs.append((grad, host))
            parameter.grad = None
            self._grads[parameter] = host
        if pairs:
            self._start_to_host(pairs, [grad for grad, _ in pairs])

    def free_evicted(self) -> None:
        """Free the memory of evicted tensors; later work of the device waits for the copies."""
        for event, grads in self._evicting:
            self.copies.wait(event)
            if not grads:
                self._free()
        self._evicting.clear()

    def end_run(self) -> None:
        """Wait for all copies, and make parameters and gradients host tensors again.

        After a failed run, parameters may still be on the device. Incomplete gradients are dropped for the host's.
        """
        try:
            if self._present:
                self.evict()
            self.free_evicted()
            for event in self._last_copy.values():  # the host may read and change the tensors afterwards
                self.copies.synchronize(event)
        finally:
            for parameter, (host, _) in self.hosted.items():
                grad = self._grads.pop(parameter, parameter.grad)
                if grad is not None and grad.device != host.device:
                    grad = self._grad_to_host(grad)
                _set_data_and_grad(parameter, host, grad)
            self._present = False
            self._fetching, self._evicting, self._last_copy = [], [], {}

    # ── between runs ─────────────────────────────────────────────────────────────────────────────────────────

    def make_resident(self) -> None:
        """Keep weights and gradients on the device until ``move_to_host``."""
        self.begin_run()
        self.prefetch()
        self.prefetch_grads()
        self.wait_prefetch()
        self._grads.clear()
        self._present = False

    def move_to_host(self) -> None:
        """Move parameters and gradients to the host from any device."""
        elsewhere = [
            (parameter, host)
            for parameter, (host, _) in self.hosted.items()
            if storage_id(parameter) != storage_id(host) or not _same_layout(parameter, host)
        ]
        if any(not _same_layout(parameter, host) for parameter, host in elsewhere):
            self._allocate_host()  # their dtype, shape or layout has changed
            return
        for parameter, host in elsewhere:
            host.copy_(parameter.data)
            _set_data_and_grad(parameter, host, self._grad_to_host(parameter.grad))
        if elsewhere:
            self._free()

    def _allocate_host(self) -> None:
        for parameter in self.parameters:
            host = self.copies.allocate_host(parameter.data).copy_(parameter.data)
            on_device = torch.empty_like(host, device=self.device)
            on_device.untyped_storage().resize_(0)
            self.hosted[parameter] = host, on_device
            _set_data_and_grad(parameter, host, self._grad_to_host(parameter.grad))

    def _grad_to_host(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        return self.copies.allocate_host(grad).copy_(grad) if _is_plain_tensor(grad) else grad.cpu()

    def _differ_from_host(self) -> bool:
        for host, on_device in self.hosted.values():
            with torch.inference_mode(False):
                before = torch.empty_like(on_device)
            self.copies.wait(self.copies.to_device([(host, before)]), before)
            if not torch.equal(_bytes_of(before), _bytes_of(on_device)):
                return True
        return False

    def _free(self) -> None:
        for _, on_device in self.hosted.values():
            on_device.untyped_storage().resize_(0)

    def _start_to_device(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if pairs:
            self._last_copy["to device"] = self.copies.to_device(pairs)
            self._fetching.append((self._last_copy["to device"], pairs))

    def _start_to_host(self, pairs: Sequence[tuple[Tensor, Tensor]], grads: Sequence[Tensor]) -> None:
        self._last_copy["to host"] = self.copies.to_host(pairs)
        self._evicting.append((self._last_copy["to host"], grads))


class UpdateLease:
    """A hosted parameter and its gradient on the device, for an update. The constructor starts the copies."""

    def __init__(self, parameter: nn.Parameter, params: OffloadedParams) -> None:
        self.copies, device = params.copies, params.device
        self.parameter, self.host = parameter, params.hosted[parameter][0]
        self.host_grad = self.parameter.grad
        pairs: list[tuple[Tensor, Tensor]] = []
        self.on_device = [_device_tensor(self.host, device, pairs)]  # data, and gradient if there is one
        if self.host_grad is not None:
            self.on_device.append(_device_tensor(self.host_grad, device, pairs))
        self.event = self.copies.to_device(pairs)
        _set_data_and_grad(self.parameter, *self.on_device)

    def end(self, grad_changed: bool = False) -> list[tuple[CopyEvent, Tensor]]:
        """Start to copy the changes to the host; return events, each with the tensor to keep until then."""
        data, grad, host_grad = self.parameter.data, self.parameter.grad, self.host_grad
        copying = [(self.copies.to_host([(data, self.host)], self.event), data)]
        if grad_changed and grad is not None and host_grad is not None:
            copying.append((self.copies.to_host([(grad, host_grad)], self.event), grad))
        _set_data_and_grad(self.parameter, self.host, host_grad)
        return copying


def host_weights(modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> HostWeights | None:
    """The host weights of stages on GPUs; None without such stages."""
    copies = {device: CopyStreams(device) for device in {devices[stage] for stage in modules} if device.type == "cuda"}
    return HostWeights(modules, devices, copies) if copies else None


class HostWeights:
    """The offloaded weights of this process's stages. ``resident``: all are on their devices, and runs copy nothing.

    One thread must run all stages of a device.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        devices: Sequence[torch.device],
        copies: Mapping[torch.device, CopyStreams],
    ) -> None:
        self.copies = copies
        self.modules = {stage: module for stage, module in modules.items() if devices[stage] in self.copies}
        self.devices = devices
        self.resident = False
        self._running = False
        self._resident_scopes = 0
        self._open_calls: WeakSet[Any] = WeakSet()
        self._lock = threading.RLock()  # one thread at a time runs a shared pipeline
        self._params: dict[ParamsKey, OffloadedParams] = {}
        self._params_of: dict[nn.Parameter, OffloadedParams] = {}
        users: dict[int, list[int]] = defaultdict(list)
        for stage, module in self.modules.items():
            for parameter in module.parameters():
                users[id(parameter)].append(stage)
        # Keyed by name, because parameters on the meta device are replaced later.
        self._keys: dict[tuple[int, str], ParamsKey] = {
            (stage, name): tuple(users[id(parameter)])
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    # ── construction ─────────────────────────────────────────────────────────────────────────────────────────

    def offload_stage(self, stage: int) -> None:
        """Move a stage's parameters from its device to the host."""
        module, device = self.modules.get(stage), self.devices[stage]
        if module is None or any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
            return
        storages = Counter(storage_id(t) for t in (*module.parameters(), *module.buffers()) if _is_on(t, device))
        by_key: dict[ParamsKey, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            key = self._keys[stage, name]
            if parameter in self._params_of:  # offloaded with an earlier stage, and moved to the device with this one
                self._params_of[parameter].move_to_host()
            elif (
                key[0] == stage
                and type(parameter) is nn.Parameter
                and _is_on(parameter, device)
                and storages[storage_id(parameter)] == 1
                and parameter.untyped_storage().nbytes() == parameter.nbytes
            ):
                by_key[key].append(parameter)
        with torch.inference_mode(False), torch.no_grad():
            for key, parameters in by_key.items():
                self._params[key] = OffloadedParams(parameters, device, self.copies[device])
                self._params_of.update(dict.fromkeys(parameters, self._params[key]))

    @contextmanager
    def initializing(self, stage: int) -> Iterator[None]:
        """A context in which a stage's parameters are initialised on its device."""
        own = [self._params[key] for key in self._params if stage in key]
        with self.run():
            for params in own:
                params.prefetch()
                params.wait_prefetch()
            yield
            for params in own:
                params.evict(changed=True)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def run(self) -> Iterator[None]:
        """A context for a run: the parameters are device tensors until ``end_run``."""
        with self._lock:
            if not self._must_stay():
                self._move_to_host()
                self._running = True
                for params in self._params.values():
                    params.begin_run()
            try:
                yield
            finally:
                self.end_run()

    def transfer_calls(
        self, instructions: Sequence[Instruction], stages: Iterable[int]
    ) -> dict[int, Callable[[], None]]:
        """The functions to call before instructions of the program of these stages, and at its end, by position."""
        params_of = {stage: [key for key in self._params if stage in key] for stage in stages}
        own = [self._params[key] for key in dict.fromkeys(chain.from_iterable(params_of.values()))]
        return {step.at: partial(self._transfer, own, step) for step in prefetch_plan(instructions, params_of)}

    def _transfer(self, own: Sequence[OffloadedParams], step: PrefetchStep) -> None:
        if self.resident:
            return
        for params in own:
            params.free_evicted()
        for key, grads in step.evict:
            if grads:
                self._params[key].evict_grads()
            else:
                self._params[key].evict((torch.is_grad_enabled(), *(self.modules[stage].training for stage in key)))
        for key, grads in step.prefetch:
            if grads:
                self._params[key].prefetch_grads()
            else:
                self._params[key].prefetch()
        for key, _ in step.use:
            self._params[key].wait_prefetch()

    def end_run(self) -> None:
        """After a run, also a failed one: make the parameters and their gradients host tensors again."""
        if self._running:
            self._running = False
            with ExitStack() as stack:  # calls all of them, even if one raises
                for params in self._params.values():
                    stack.callback(params.end_run)

    # ── between runs ─────────────────────────────────────────────────────────────────────────────────────────

    def make_resident(self, call: Any = None) -> None:
        """Move all weights and gradients to their devices, until ``call.over`` is true or the call is freed."""
        with self._lock:
            if call is not None:
                self._open_calls.add(call)
            if not self.resident:
                self._move_to_host()
                self.resident = True
                for params in self._params.values():
                    params.make_resident()

    @contextmanager
    def resident_scope(self) -> Iterator[None]:
        """A context in which all weights are on their devices. Moves them back unless an open call needs them."""
        self.make_resident()
        self._resident_scopes += 1
        try:
            yield
        finally:
            self._resident_scopes -= 1
            if not self._must_stay():
                self._move_to_host()

    def lease(self, parameter: Tensor) -> UpdateLease | None:
        """Start to copy a parameter on the host, and its gradient, to its device for an update."""
        params = self._on_host(parameter)
        return None if params is None else UpdateLease(parameter, params)  # type: ignore[arg-type]

    def device_of(self, parameter: Tensor) -> torch.device | None:
        """The device that uses a parameter, if the parameter is on the host now."""
        params = self._on_host(parameter)
        return None if params is None else params.device

    def host_tensors(self) -> list[Tensor]:
        """The parameters that are on the host now, and their gradients."""
        hosted = [parameter for parameter in self._params_of if self._on_host(parameter) is not None]
        return [*hosted, *(parameter.grad for parameter in hosted if parameter.grad is not None)]

    def reclaim(self) -> None:
        """Move parameters that the user has moved since the last run back to the host."""
        if not self.resident and not self._running:
            self._move_to_host()

    def _on_host(self, parameter: Tensor) -> OffloadedParams | None:
        return None if self.resident or self._running else self._params_of.get(parameter)  # type: ignore[call-overload]

    def _must_stay(self) -> bool:
        return self.resident and (self._resident_scopes > 0 or any(not call.over for call in self._open_calls))

    def _move_to_host(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for params in self._params.values():
                params.move_to_host()
        self.resident = False


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.layout is torch.strided and not tensor.is_inference()


def _is_plain_tensor(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _device_tensor(host: Tensor, device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """A device tensor for ``host``. The copy is appended to ``pairs``; a sparse tensor is copied at once."""
    if not _is_plain_tensor(host):
        return host.to(device)
    pairs.append((host, torch.empty_like(host, device=device)))
    return pairs[-1][1]


def _same_layout(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _set_data_and_grad(parameter: nn.Parameter, data: Tensor, grad: Tensor | None = None) -> None:
    """Set ``data``, then ``grad``: torch requires that a gradient is on its parameter's device when it is assigned."""
    parameter.grad = None
    parameter.data = data
    if grad is not None:
        set_grad(parameter, grad)
