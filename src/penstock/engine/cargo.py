"""Parameters that come to a device and go together: their memory there and on the host, and the copies between.

Autograd saves references to a weight's storage (a linear saves a view of the weight). So it is the storage that loses
its memory and gets other memory later; the tensors stay what they are:

    parameter.data ──▶ a tensor of the device ──┐
    saved for B    ──▶ a view of it ────────────┴──▶ storage ──▶ memory during visits, none in between

Weights go without a copy, because the host has them, unless a forward has changed them (an embedding with a largest
norm). ``.data`` leaves no trace of that, so the first visit in each mode looks for it. Gradients are copied out, and
have memory on the device until that is done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor, nn

from penstock.engine.accumulate import give_grad
from penstock.engine.home import Home, Loan, Member, alike, home_of, is_at, is_plain, place, storage_of
from penstock.engine.hostcopy import Copies, Mark
from penstock.errors import PlanError

__all__ = ["Cargo"]


class Cargo:
    """Parameters that the same stages use. They are at home, or the device's (``board``) for the time of a run."""

    def __init__(self, parameters: Iterable[nn.Parameter], device: torch.device, copies: Copies) -> None:
        self.parameters = list(parameters)
        self.device = device
        self.copies = copies
        self.changes = False  # forwards have been seen to change them without a trace
        self._here = False
        self._looked_in: set[Hashable] = set()  # modes
        self._versions: list[int] = []
        self._coming: list[tuple[Mark, object]] = []  # and what must live until then
        self._leaving: list[tuple[Mark, Sequence[Tensor]]] = []  # gradients; without any, the weights
        self._last: dict[str, Mark] = {}
        self._grads: dict[nn.Parameter, Tensor] = {}  # during a run: what the host has of them
        self._homes: list[Home] = []
        self.members: dict[nn.Parameter, Member] = {}
        self._make_homes()

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

    def grads_come(self) -> None:
        """Start the gradients that there are on their way to the device."""
        pairs = []
        for parameter in self.parameters:
            host = self._grads.pop(parameter, parameter.grad)
            parameter.grad = None
            if host is None:
                continue
            if is_plain(host):
                there = torch.empty_like(host, device=self.device)
                pairs.append((host, there))
            else:
                there = host.to(self.device)
            give_grad(parameter, there)
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
        if any(storage_of(parameter) != storage_of(there) for parameter, _, there in self.members.values()):
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

    def grads_go(self) -> None:
        """Start the gradients on their way to the host."""
        pairs = []
        for parameter in self.parameters:
            grad, host = parameter.grad, self._grads.pop(parameter, None)
            if grad is None:
                continue
            if not is_plain(grad):
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
                    grad = home_of(grad, self.copies)
                place(parameter, host, grad)
            self._here = False
            self._coming, self._leaving, self._last = [], [], {}

    # ── outside of runs ──────────────────────────────────────────────────────────────────────────────────────

    def come_to_stay(self) -> None:
        """All of it is on the device, as if there were no host, until ``go_home``."""
        self.board()
        self.come()
        self.grads_come()
        self.arrive()
        self._grads.clear()
        self._here = False

    def go_home(self) -> None:
        """Wherever parameters are, and whatever they have become: they and their gradients are on the host."""
        abroad = [(parameter, host) for parameter, host, _ in self.members.values() if not is_at(parameter, host)]
        if any(storage_of(parameter) == storage_of(host) or not alike(parameter, host) for parameter, host in abroad):
            self._make_homes()  # somebody has given them another type, shape or layout
            return
        for parameter, host in abroad:
            host.copy_(parameter.data)
            place(parameter, host, None if parameter.grad is None else home_of(parameter.grad, self.copies))
        if abroad:
            self._empty()

    def lend(self, parameter: nn.Parameter) -> Loan:
        """A parameter that is at home, for an update on the device."""
        return Loan(self.members[parameter], self.device, self.copies)

    def _make_homes(self) -> None:
        by_storage: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            by_storage[storage_of(parameter)].append(parameter)
        for storage, parameters in list(by_storage.items()):
            if parameters[0].untyped_storage().nbytes() > 2 * sum(p.nbytes for p in parameters):
                for parameter in parameters:  # small parts of something big that is not theirs
                    parameter.data = parameter.data.clone()
                    by_storage[storage_of(parameter)] = [parameter]
                del by_storage[storage]
        self._homes = [Home(parameters, self.device, self.copies) for parameters in by_storage.values()]
        self.members = {member.parameter: member for home in self._homes for member in home.members}
        for parameter, host, _ in self.members.values():
            place(parameter, host, None if parameter.grad is None else home_of(parameter.grad, self.copies))

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
