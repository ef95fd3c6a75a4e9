"""Messages of one tensor between two processes, as most are. Their way is short: no lists, and no calls but torch's.

What the messages of one shape have in common is in a line; each micro-batch has a berth, which holds what is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.channel.lane import Passage
from penstock.engine.channel.wire import ChannelError, Wire, in_order
from penstock.engine.message import Message, tensor_message
from penstock.engine.meta import TensorMeta

__all__ = ["Berth", "GradientBerth", "Line", "OutputBerth"]


class Line:
    """What tensors of one shape go along, and what is known of them.

    As outputs they come with ``wants`` and ``shared``, as in a message; ``refuse`` says what is wrong with another one.
    """

    def __init__(
        self,
        wire: Wire,
        meta: TensorMeta,
        wants: Sequence[int] = (),
        shared: Sequence[int] = (),
        refuse: Callable[[Message], NoReturn] | None = None,
    ) -> None:
        self.wire, self.waited = wire, wire.waited
        (self.make,) = wire.makers([meta])
        self.dtype, self.shape = meta.dtype, torch.Size(meta.shape)
        self.conjugates = meta.dtype.is_complex
        self.on_gpu = wire.device.type == "cuda"
        self.wants, self.shared, self.refuse = wants, shared, refuse


class Berth:
    """One micro-batch's tensor on its way: there until a send is over, or what was received is taken."""

    __slots__ = ("line", "tensor", "work")

    def __init__(self, line: Line) -> None:
        self.line = line
        self.work: Any = None
        self.tensor: Any = None

    @property
    def passage(self) -> Passage:
        return Passage(self.send, self.land, self.take, self.post, self.sent)

    def send(self, payload: Any) -> None:
        raise NotImplementedError

    def take(self) -> Any:
        raise NotImplementedError

    def post(self) -> None:
        line = self.line
        wire, buffer = line.wire, line.make()
        try:
            self.work = wire.group.recv([buffer], wire.there, 0)
        except RuntimeError as error:
            raise ChannelError(wire.peer, str(error)) from None
        self.tensor = buffer

    def land(self) -> None:
        """Wait until what was sent or posted is over."""
        work, self.work = self.work, None
        start = perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            work = None  # an error keeps this frame alive, and a connection is closed with the last reference to it
            raise ChannelError(self.line.wire.peer, str(error)) from None
        self.line.waited.seconds += perf_counter() - start

    def sent(self) -> None:
        self.land()
        self.tensor = None

    def clear(self) -> None:
        self.work = self.tensor = None

    def send_tensor(self, tensor: Tensor, line: Line) -> None:
        if not tensor.is_contiguous() or tensor.is_neg() or (line.conjugates and tensor.is_conj()):
            tensor = in_order(tensor)
        wire = line.wire
        if line.on_gpu and not tensor.is_cuda:  # a few numbers that the stage had on the host
            tensor = tensor.to(wire.device)
        try:
            self.work = wire.group.send([tensor], wire.there, 0)
        except RuntimeError as error:
            raise ChannelError(wire.peer, str(error)) from None
        self.tensor = tensor


class OutputBerth(Berth):
    """An output that is a tensor, with nothing around it."""

    __slots__ = ()

    def send(self, payload: Message) -> None:
        line, (leaves, spec, wants, _) = self.line, payload
        tensor = leaves[0]
        alike = spec is None and len(wants) == len(line.wants)
        if not alike or tensor.dtype is not line.dtype or tensor.shape != line.shape:
            assert line.refuse is not None
            line.refuse(payload)
        self.send_tensor(tensor, line)

    def take(self) -> Message:
        tensor, self.tensor = self.tensor, None
        return tensor_message(tensor, self.line.wants, self.line.shared)


class GradientBerth(Berth):
    """The gradient of an input that has no others beside it."""

    __slots__ = ()

    def send(self, payload: Sequence[Tensor | None]) -> None:
        line, (tensor,) = self.line, payload
        if tensor is None:  # expected, but the loss did not depend on it this time
            tensor = torch.zeros(line.shape, dtype=line.dtype, device=line.wire.device)
        self.send_tensor(tensor, line)

    def take(self) -> Sequence[Tensor]:
        tensor, self.tensor = self.tensor, None
        return (tensor,)
