"""Weights that live on the host, and are on the device while a stage that uses them works.

    between calls   a parameter is a tensor of the host, in pinned memory, and so is its gradient
    during a run    it is a tensor of the device, whose storage has memory during its stages' visits (``visits.py``)
    for an update   an offloaded optimizer brings it there with its gradient and its state, bucket by bucket

So whoever reads, saves, loads or changes a parameter between calls finds a tensor as any other; the device holds two
stages' weights at a time; and forwards, backwards and updates are done by the kernels that do them without it. For the
length of a run the parameter is the device's, with memory or without it,
because a parameter that changes its device loses the node that adds to its gradient, and the hooks on it. Inside a
stage, parameters of other stages are not to be looked at: they may have no memory.

``pipe(x)`` with gradients brings all weights to the device: its graph needs them, and nobody knows for how long. They
go home with the first run for which no such graph is alive.

What stays on the device: buffers, parameters that are no plain tensors (DTensor) or share their memory, and all of a
stage with a DistributedDataParallel, which holds on to the nodes that add to gradients.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock.engine.cargo import Cargo
from penstock.engine.home import Loan, storage_of
from penstock.engine.hostcopy import Copies, CudaCopies
from penstock.engine.visits import Key, Stop, stops
from penstock.schedule.program import Instruction

__all__ = ["HostWeights", "host_weights"]


class Flight(Protocol):
    """A call whose backward may still come."""

    over: bool


def host_weights(modules: Mapping[int, nn.Module], devices: Sequence[torch.device]) -> HostWeights | None:
    """For stages on GPUs; None where there are none: on the CPU weights are on the host already."""

    def copies_for(device: torch.device) -> Copies | None:
        return CudaCopies(device) if device.type == "cuda" else None

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
        copies_for: Callable[[torch.device], Copies | None],
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
        self._cargo: dict[Key, Cargo] = {}
        self._of: dict[nn.Parameter, Cargo] = {}
        users: dict[int, list[int]] = defaultdict(list)
        for stage, module in self.modules.items():
            for parameter in module.parameters():
                users[id(parameter)].append(stage)
        # By name, because a parameter that is only described yet will be another one.
        self._keys: dict[tuple[int, str], Key] = {
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
        memory: dict[int, list[tuple[nn.Parameter, Key]]] = defaultdict(list)
        for name, parameter in module.named_parameters():
            key = self._keys[stage, name]
            if parameter in self._of:  # an earlier stage's, too: it was at home, and has been moved with this one
                self._of[parameter].go_home()
            elif key[0] == stage and type(parameter) is nn.Parameter and _is_on(parameter, device):
                memory[storage_of(parameter)].append((parameter, key))
        taken = {storage_of(buffer) for buffer in module.buffers() if _is_on(buffer, device)}
        going: dict[Key, list[nn.Parameter]] = defaultdict(list)
        for storage, pairs in memory.items():
            parameters, keys = [parameter for parameter, _ in pairs], {key for _, key in pairs}
            if storage not in taken and len(keys) == 1 and not _overlap(parameters):
                going[keys.pop()] += parameters
        with torch.inference_mode(False), torch.no_grad():
            for key, parameters in going.items():
                self._cargo[key] = Cargo(parameters, device, self.copies[device])
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
                self._go_home()
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
        return {stop.at: partial(self._stop, own, stop) for stop in stops(instructions, cargo_of)}

    def _stop(self, own: Sequence[Cargo], stop: Stop) -> None:
        if self.resident:
            return
        for cargo in own:
            cargo.release()
        for key, grads in stop.go:
            if grads:
                self._cargo[key].grads_go()
            else:
                self._cargo[key].go((torch.is_grad_enabled(), *(self.modules[stage].training for stage in key)))
        for key, grads in stop.come:
            if grads:
                self._cargo[key].grads_come()
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

    def stay(self, flight: Flight | None = None) -> None:
        """Bring all weights and gradients to their devices, to stay there while the flight is not over."""
        with self._turns:
            if flight is not None:
                self._flights.add(flight)
            if not self.resident:
                self._go_home()
                self.resident = True
                for cargo in self._cargo.values():
                    cargo.come_to_stay()

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
                self._go_home()

    def lend(self, parameter: Tensor) -> Loan | None:
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
            self._go_home()

    def _at_home(self, parameter: Tensor) -> Cargo | None:
        return None if self.resident or self._boarded else self._of.get(parameter)  # type: ignore[call-overload]

    def _stays(self) -> bool:
        return self.resident and (self._held > 0 or any(not flight.over for flight in self._flights))

    def _go_home(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for cargo in self._cargo.values():
                cargo.go_home()
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
