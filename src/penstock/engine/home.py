"""Where a parameter lives on the host, and what it is on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.engine.accumulate import give_grad
from penstock.engine.hostcopy import Copies, Mark

__all__ = ["Home", "Loan", "Member", "alike", "home_of", "is_at", "is_plain", "place", "storage_of"]


class Member(NamedTuple):
    """A parameter, what it is on the host, and what it is on the device."""

    parameter: nn.Parameter
    host: Tensor
    there: Tensor


class Home:
    """One storage with parameters: its bytes on the host, and those on the device, whose memory comes and goes."""

    __slots__ = ("host", "members", "there")

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device, copies: Copies) -> None:
        storage = parameters[0].untyped_storage()
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
        self.host = copies.host(torch.empty_like(source, device="meta"))
        self.host.copy_(source)
        self.there = torch.empty_like(source, device=device)
        self.members = [Member(p, _piece(p, self.host), _piece(p, self.there)) for p in parameters]
        self.empty()

    def fill(self) -> None:
        self.there.untyped_storage().resize_(self.host.nbytes)

    def empty(self) -> None:
        self.there.untyped_storage().resize_(0)


class Loan:
    """A parameter at home, and its gradient, on the device for an update. They start to come when it is made."""

    def __init__(self, member: Member, device: torch.device, copies: Copies) -> None:
        self.copies = copies
        self.parameter, self.host, _ = member
        self.grad_host = self.parameter.grad
        self.came = [torch.empty_like(self.host, device=device)]
        pairs = [(self.host, self.came[0])]
        if self.grad_host is not None:
            if is_plain(self.grad_host):
                self.came.append(torch.empty_like(self.grad_host, device=device))
                pairs.append((self.grad_host, self.came[1]))
            else:
                self.came.append(self.grad_host.to(device))
        self.mark = copies.back_all(pairs)
        place(self.parameter, *self.came)

    def end(self, grad_changed: bool = False) -> list[tuple[Mark, Tensor]]:
        """The parameter is at home, and what has changed is on its way there: marks, and what must live on."""
        here, grad, host = self.parameter.data, self.parameter.grad, self.grad_host
        leaving = [(self.copies.out(here, self.host, self.mark), here)]
        if grad_changed and grad is not None and host is not None:
            leaving.append((self.copies.out(grad, host, self.mark), grad))
        place(self.parameter, self.host, host)
        return leaving


def home_of(grad: Tensor, copies: Copies) -> Tensor:
    """A gradient, on the host."""
    return copies.host(grad).copy_(grad) if is_plain(grad) else grad.cpu()


def place(parameter: nn.Parameter, data: Tensor, grad: Tensor | None = None) -> None:
    """Torch wants a gradient to be on its parameter's device when it is given, so it is taken off before."""
    parameter.grad = None
    parameter.data = data
    if grad is not None:
        give_grad(parameter, grad)


def alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def is_at(parameter: Tensor, home: Tensor) -> bool:
    same = storage_of(parameter) == storage_of(home) and parameter.storage_offset() == home.storage_offset()
    return same and alike(parameter, home)


def is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _piece(parameter: Tensor, memory: Tensor) -> Tensor:
    """What the parameter is of its memory, of other memory."""
    piece = torch.empty(0, dtype=parameter.dtype, device=memory.device)
    storage = memory.untyped_storage()
    return piece.set_(storage, int(parameter.storage_offset()), parameter.shape, parameter.stride())
