"""When weights come to a device and go, as plain data.

A visit is what a rank does for one stage in a row. While it lasts, the weights of the next visit come:

    program          0F0 0F1 │ 1F0 1F1 │ 2F0 2F1 │ 2B0 …
    stage 0          ███████ │         │         │            █ in use
    stage 1          ▒▒▒▒▒▒▒ │ ███████ │         │            ▒ on its way
    stage 2                  │ ▒▒▒▒▒▒▒ │ ███████ │ ███

So those of two stages are there at a time, and what the next visit needs as well does not go. Gradients are there for
B, I and W alone.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock._torch import storage_id
from penstock.engine.offload.copies import (
    CopyEvent,
    CopyStreams,
    CudaCopyStreams,
    HostedParameter,
    HostStorage,
    UpdateLease,
    grad_to_host,
    is_plain_tensor,
    is_stored_at,
    same_layout,
    set_data_and_grad,
)
from penstock.engine.replicas.fp32_accumulate import set_grad
from penstock.errors import PlanError
from penstock.schedule.lower import Instruction
from penstock.schedule.schedule import COMPUTE

__all__ = ["HostWeights", "OffloadedParams", "ParamsKey", "PrefetchStep", "Transfer", "host_weights", "prefetch_plan"]

ParamsKey = tuple[int, ...]
"""The stages that use a cargo: parameters that come and go together."""


class Transfer(NamedTuple):
    """The weights of a cargo, or their gradients."""

    cargo: ParamsKey
    grads: bool = False


class PrefetchStep(NamedTuple):
    """Before instruction ``at``: what goes, then what starts to come; and what is in use from then on."""

    at: int
    go: tuple[Transfer, ...]
    come: tuple[Transfer, ...]
    use: tuple[Transfer, ...]


def prefetch_plan(
    instructions: Iterable[Instruction], cargo_of: Mapping[int, Sequence[ParamsKey]]
) -> list[PrefetchStep]:
    """The stops of a rank's program, of which the last is at its end. ``cargo_of`` has the stages that need any."""
    visits: list[tuple[int, dict[Transfer, None]]] = []  # where each begins, and what it needs; a dict has an order
    stage, end = -1, 0
    for at, instruction in enumerate(instructions):
        end = at + 1
        if instruction.kind not in COMPUTE or not cargo_of.get(instruction.stage):
            continue
        if instruction.stage != stage:
            stage = instruction.stage
            visits.append((at, dict.fromkeys(Transfer(cargo) for cargo in cargo_of[stage])))
        if instruction.kind in "BIW":
            visits[-1][1].update(dict.fromkeys(Transfer(cargo, True) for cargo in cargo_of[stage]))
    found: list[PrefetchStep] = []
    here: dict[Transfer, None] = {}
    for number, (at, use) in enumerate(visits):
        soon = visits[number + 1][1] if number + 1 < len(visits) else {}
        wanted = {**use, **soon}
        go = tuple(part for part in here if part not in wanted)
        found.append(PrefetchStep(at, go, tuple(part for part in wanted if part not in here), tuple(use)))
        here = wanted
    return [*found, PrefetchStep(end, tuple(here), (), ())] if found else []


# Parameters that come to a device and go together: their memory there and on the host, and the copies between.
#
# Autograd saves references to a weight's storage (a linear saves a view of the weight). So it is the storage that loses
# its memory and gets other memory later; the tensors stay what they are:
#
#     parameter.data ──▶ a tensor of the device ──┐
#     saved for B    ──▶ a view of it ────────────┴──▶ storage ──▶ memory during visits, none in between
#
# Weights go without a copy, because the host has them, unless a forward has changed them (an embedding with a largest
# norm). ``.data`` leaves no trace of that, so the first visit in each mode looks for it. Gradients are copied out, and
# have memory on the device until that is done.


class OffloadedParams:
    """Parameters that the same stages use. They are at home, or the device's (``board``) for the time of a run."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, copies: CopyStreams) -> None:
        self.parameters = list(parameters)
        self.device = device
        self.copies = copies
        self.changes = False  # forwards have been seen to change them without a trace
        self._here = False
        self._looked_in: set[Hashable] = set()  # modes
        self._versions: list[int] = []
        self._coming: list[tuple[CopyEvent, object]] = []  # and what must live until then
        self._leaving: list[tuple[CopyEvent, Sequence[Tensor]]] = []  # gradients; without any, the weights
        self._last: dict[str, CopyEvent] = {}
        self._grads: dict[nn.Parameter, Tensor] = {}  # during a run: what the host has of them
        self._homes: list[HostStorage] = []
        self.members: dict[nn.Parameter, HostedParameter] = {}
        self._allocate_host()

    # ── a run ────────────────────────────────────────────────────────────────────────────────────────────────

    def board(self) -> None:
        """The parameters are the device's from now on, without memory."""
        for parameter, _, there in self.members.values():
            parameter.data = there

    def come(self) -> None:
        """Start the weights on their way to the device."""
        for home in self._homes:
            home.fill()
        self._start_back([(home.host, home.there) for home in self._homes])
        self._versions = [parameter._version for parameter in self.parameters]
        self._here = True

    def prefetch_grads(self) -> None:
        """Start the gradients that there are on their way to the device."""
        pairs = []
        for parameter in self.parameters:
            host = self._grads.pop(parameter, parameter.grad)
            parameter.grad = None
            if host is None:
                continue
            if is_plain_tensor(host):
                there = torch.empty_like(host, device=self.device)
                pairs.append((host, there))
            else:
                there = host.to(self.device)
            set_grad(parameter, there)
            self._grads[parameter] = host
        self._start_back(pairs)

    def arrive(self) -> None:
        """What the device does from now on may use what has come."""
        for mark, _ in self._coming:
            self.copies.wait(mark)
        self._coming.clear()

    def go(self, mode: Hashable = None, *, changed: bool = False) -> None:
        """Let the weights' memory go; after a copy, if forwards (in ``mode``) change them."""
        self.arrive()
        self._here = False
        if any(storage_id(parameter) != storage_id(there) for parameter, _, there in self.members.values()):
            raise PlanError(
                "a forward gave one of its parameters other memory (parameter.data = …), which Offload(weights=True) "
                "cannot follow: change it in place (parameter.data.copy_(…)), or leave the weights on the device"
            )
        changed = changed or self.changes or self._versions != [parameter._version for parameter in self.parameters]
        if mode is not None and mode not in self._looked_in:
            self._looked_in.add(mode)
            if not changed and self._differ():
                changed = self.changes = True
        if changed:
            self._start_out([(home.there, home.host) for home in self._homes], ())
        else:
            self._empty()

    def evict_grads(self) -> None:
        """Start the gradients on their way to the host."""
        pairs = []
        for parameter in self.parameters:
            grad, host = parameter.grad, self._grads.pop(parameter, None)
            if grad is None:
                continue
            if not is_plain_tensor(grad):
                host = grad.cpu()
            else:
                if host is None or (host.shape, host.dtype) != (grad.shape, grad.dtype):
                    host = self.copies.host(grad)
                pairs.append((grad, host))
            parameter.grad = None
            self._grads[parameter] = host
        if pairs:
            self._start_out(pairs, [grad for grad, _ in pairs])

    def release(self) -> None:
        """Let go of what has been copied out: the device goes on after the copies."""
        for mark, grads in self._leaving:
            self.copies.wait(mark)
            if not grads:
                self._empty()
        self._leaving.clear()

    def land(self) -> None:
        """The end of a run: the parameters are the host's, and their gradients, all copied.

        A run that failed has not let all of it go. Its gradients are no sums of anything: what the host has stays.
        """
        try:
            if self._here:
                self.go()
            self.release()
            for mark in self._last.values():  # what is on the host may be read and changed from now on
                self.copies.finish(mark)
        finally:
            for parameter, host, _ in self.members.values():
                grad = self._grads.pop(parameter, parameter.grad)
                if grad is not None and grad.device != host.device:
                    grad = grad_to_host(grad, self.copies)
                set_data_and_grad(parameter, host, grad)
            self._here = False
            self._coming, self._leaving, self._last = [], [], {}

    # ── outside of runs ──────────────────────────────────────────────────────────────────────────────────────

    def make_resident(self) -> None:
        """All of it is on the device, as if there were no host, until ``move_to_host``."""
        self.board()
        self.come()
        self.prefetch_grads()
        self.arrive()
        self._grads.clear()
        self._here = False

    def move_to_host(self) -> None:
        """Wherever parameters are, and whatever they have become: they and their gradients are on the host."""
        abroad = [
            (parameter, host) for parameter, host, _ in self.members.values() if not is_stored_at(parameter, host)
        ]
        if any(
            storage_id(parameter) == storage_id(host) or not same_layout(parameter, host) for parameter, host in abroad
        ):
            self._allocate_host()  # somebody has given them another type, shape or layout
            return
        for parameter, host in abroad:
            host.copy_(parameter.data)
            set_data_and_grad(
                parameter, host, None if parameter.grad is None else grad_to_host(parameter.grad, self.copies)
            )
        if abroad:
            self._empty()

    def lend(self, parameter: nn.Parameter) -> UpdateLease:
        """A parameter that is at home, for an update on the device."""
        return UpdateLease(self.members[parameter], self.device, self.copies)

    def _allocate_host(self) -> None:
        by_storage: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_storage[storage_id(parameter)].append(parameter)
        for storage, parameters in list(by_storage.items()):
            if parameters[0].untyped_storage().nbytes() > 2 * sum(p.nbytes for p in parameters):
                for parameter in parameters:  # small parts of something big that is not theirs
                    parameter.data = parameter.data.clone()
                    by_storage[storage_id(parameter)] = [parameter]
                del by_storage[storage]
        self._homes = [HostStorage(parameters, self.device, self.copies) for parameters in by_storage.values()]
        self.members = {member.parameter: member for home in self._homes for member in home.members}
        for parameter, host, _ in self.members.values():
            set_data_and_grad(
                parameter, host, None if parameter.grad is None else grad_to_host(parameter.grad, self.copies)
            )

    def _differ(self) -> bool:
        """Whether weights on the device are not what they were when they came."""
        for home in self._homes:
            with torch.inference_mode(False):
                before = torch.empty_like(home.there)
            self.copies.wait(self.copies.back(home.host, before), before)
            if not torch.equal(before, home.there):
                return True
        return False

    def _empty(self) -> None:
        for home in self._homes:
            home.empty()

    def _start_back(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        if pairs:
            self._last["back"] = self.copies.back_all(pairs)
            self._coming.append((self._last["back"], pairs))

    def _start_out(self, pairs: Sequence[tuple[Tensor, Tensor]], grads: Sequence[Tensor]) -> None:
        self._last["out"] = self.copies.out_all(pairs)
        self._leaving.append((self._last["out"], grads))


# Weights that live on the host, and are on the device while a stage that uses them works.
#
#     between calls   a parameter is a tensor of the host, in pinned memory, and so is its gradient
#     during a run    it is a tensor of the device, whose storage has memory during its stages' visits (``visits.py``)
#     for an update   an offloaded optimizer brings it there with its gradient and its state, bucket by bucket
#
# So whoever reads, saves, loads or changes a parameter between calls finds a tensor as any other; the device holds two
# stages' weights at a time; and forwards, backwards and updates are done by the kernels that do them without it. For
# the length of a run the parameter is the device's, with memory or without it,
# because a parameter that changes its device loses the node that adds to its gradient, and the hooks on it. Inside a
# stage, parameters of other stages are not to be looked at: they may have no memory.
#
# ``pipe(x)`` with gradients brings all weights to the device: its graph needs them, and nobody knows for how long. They
# go home with the first run for which no such graph is alive.
#
# What stays on the device: buffers, parameters that are no plain tensors (DTensor) or share their memory, and all of a
# stage with a DistributedDataParallel, which holds on to the nodes that add to gradients.


class OpenCall(Protocol):
    """A call whose backward may still come."""

    over: bool


def host_weights(modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> HostWeights | None:
    """For stages on GPUs; None where there are none: on the CPU weights are on the host already."""

    def copies_for(device: torch.device) -> CopyStreams | None:
        return CudaCopyStreams(device) if device.type == "cuda" else None

    weights = HostWeights(modules, devices, copies_for)
    return weights if weights.copies else None


class HostWeights:
    """The weights of this process's stages. ``resident``: they are all on their devices, and runs move nothing.

    All stages of a device must be run by one thread.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        devices: Sequence[torch.device],
        copies_for: Callable[[torch.device], CopyStreams | None],
    ) -> None:
        found = {device: copies_for(device) for device in dict.fromkeys(devices[stage] for stage in modules)}
        self.copies = {device: copies for device, copies in found.items() if copies is not None}
        self.modules = {stage: module for stage, module in modules.items() if devices[stage] in self.copies}
        self.devices = devices
        self.resident = False
        self._boarded = False
        self._held = 0
        self._flights: WeakSet[Any] = WeakSet()
        self._turns = threading.RLock()  # threads that share a pipeline take turns
        self._cargo: dict[ParamsKey, OffloadedParams] = {}
        self._of: dict[nn.Parameter, OffloadedParams] = {}
        users: dict[int, list[int]] = defaultdict(list)
        for stage, module in self.modules.items():
            for parameter in module.parameters():
                users[id(parameter)].append(stage)
        # By name, because a parameter that is only described yet will be another one.
        self._keys: dict[tuple[int, str], ParamsKey] = {
            (stage, name): tuple(users[id(parameter)])
            for stage, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }

    # ── building ─────────────────────────────────────────────────────────────────────────────────────────────

    def settle(self, stage: int) -> None:
        """Let a stage's parameters, which are on its device, live on the host from now on."""
        module, device = self.modules.get(stage), self.devices[stage]
        if module is None or any(isinstance(part, nn.parallel.DistributedDataParallel) for part in module.modules()):
            return
        memory: dict[int, list[tuple[nn.Parameter, ParamsKey]]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            key = self._keys[stage, name]
            if parameter in self._of:  # an earlier stage's, too: it was at home, and has been moved with this one
                self._of[parameter].move_to_host()
            elif key[0] == stage and type(parameter) is nn.Parameter and _is_on(parameter, device):
                memory[storage_id(parameter)].append((parameter, key))
        taken = {storage_id(buffer) for buffer in module.buffers() if _is_on(buffer, device)}
        going: dict[ParamsKey, list[nn.Parameter]] = defaultdict(list)
        for storage, pairs in memory.items():
            parameters, keys = [parameter for parameter, _ in pairs], {key for _, key in pairs}
            if storage not in taken and len(keys) == 1 and not _overlap(parameters):
                going[keys.pop()] += parameters
        with torch.inference_mode(False), torch.no_grad():
            for key, parameters in going.items():
                self._cargo[key] = OffloadedParams(parameters, device, self.copies[device])
                self._of.update(dict.fromkeys(parameters, self._cargo[key]))

    @contextmanager
    def filling(self, stage: int) -> Iterator[None]:
        """While a stage's parameters are given their first values, on its device."""
        cargo = [self._cargo[key] for key in self._cargo if stage in key]
        with self.at_work():
            for each in cargo:
                each.come()
                each.arrive()
            yield
            for each in cargo:
                each.go(changed=True)

    # ── runs ─────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around all that has to do with a run: the parameters are their devices' until it has ended (``land``)."""
        with self._turns:
            if not self._stays():
                self._move_to_host()
                self._boarded = True
                for cargo in self._cargo.values():
                    cargo.board()
            try:
                yield
            finally:
                self.land()

    def calls(self, instructions: Sequence[Instruction], stages: Iterable[int]) -> dict[int, Callable[[], None]]:
        """What to call before which instruction of the program of these stages, and at its end."""
        cargo_of = {stage: [key for key in self._cargo if stage in key] for stage in stages}
        own = [self._cargo[key] for key in dict.fromkeys(chain.from_iterable(cargo_of.values()))]
        return {stop.at: partial(self._stop, own, stop) for stop in prefetch_plan(instructions, cargo_of)}

    def _stop(self, own: Sequence[OffloadedParams], stop: PrefetchStep) -> None:
        if self.resident:
            return
        for cargo in own:
            cargo.release()
        for key, grads in stop.go:
            if grads:
                self._cargo[key].evict_grads()
            else:
                self._cargo[key].go((torch.is_grad_enabled(), *(self.modules[stage].training for stage in key)))
        for key, grads in stop.come:
            if grads:
                self._cargo[key].prefetch_grads()
            else:
                self._cargo[key].come()
        for key, _ in stop.use:
            self._cargo[key].arrive()

    def land(self) -> None:
        """A run has ended, well or not: the parameters and their gradients are the host's again."""
        if self._boarded:
            self._boarded = False
            with ExitStack() as stack:  # all of them, whatever happens to one
                for cargo in self._cargo.values():
                    stack.callback(cargo.land)

    # ── outside of runs ──────────────────────────────────────────────────────────────────────────────────────

    def stay(self, flight: OpenCall | None = None) -> None:
        """Bring all weights and gradients to their devices, to stay there while the flight is not over."""
        with self._turns:
            if flight is not None:
                self._flights.add(flight)
            if not self.resident:
                self._move_to_host()
                self.resident = True
                for cargo in self._cargo.values():
                    cargo.make_resident()

    @contextmanager
    def staying(self) -> Iterator[None]:
        """All weights are on their devices; at home afterwards, if no flight keeps them."""
        self.stay()
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if not self._stays():
                self._move_to_host()

    def lend(self, parameter: Tensor) -> UpdateLease | None:
        """Start a parameter that is at home, and its gradient, on their way to its device, for an update."""
        cargo = self._at_home(parameter)
        return None if cargo is None else cargo.lend(parameter)  # type: ignore[arg-type]

    def device_of(self, parameter: Tensor) -> torch.device | None:
        """Where a parameter is used, if it is at home now."""
        cargo = self._at_home(parameter)
        return None if cargo is None else cargo.device

    def at_home(self) -> list[Tensor]:
        """The parameters that are on the host now, and their gradients."""
        found = [parameter for parameter in self._of if self._at_home(parameter) is not None]
        return [*found, *(parameter.grad for parameter in found if parameter.grad is not None)]

    def gather(self) -> None:
        """Fetch parameters home that somebody has put elsewhere since the last run."""
        if not self.resident and not self._boarded:
            self._move_to_host()

    def _at_home(self, parameter: Tensor) -> OffloadedParams | None:
        return None if self.resident or self._boarded else self._of.get(parameter)  # type: ignore[call-overload]

    def _stays(self) -> bool:
        return self.resident and (self._held > 0 or any(not flight.over for flight in self._flights))

    def _move_to_host(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for cargo in self._cargo.values():
                cargo.move_to_host()
        self.resident = False


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device and tensor.layout is torch.strided and not tensor.is_inference()


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether some of these parts of one storage have bytes in common."""
    parts = []
    for tensor in tensors:
        if tensor.numel():
            begin = int(tensor.storage_offset()) * tensor.itemsize
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            parts.append((begin, begin + (last + 1) * tensor.itemsize))
    return any(end > begin for (_, end), (begin, _) in pairwise(sorted(parts)))
