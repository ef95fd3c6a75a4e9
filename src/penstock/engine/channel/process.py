"""Messages of one tensor between two processes, as most are. Their way is short: no lists, and no calls but torch's.

What the messages of one shape have in common is in a line; each micro-batch has a berth, which holds what is under way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelError, ChannelOps, Endpoint, bind_ops, to_contiguous
from penstock.engine.message import Message, MessageMeta, TensorMeta, meta_of, require_dense, tensor_message
from penstock.errors import PlanError

__all__ = [
    "BackwardChannel",
    "ForwardChannel",
    "InFlight",
    "InFlightGradient",
    "InFlightOutput",
    "ProcessChannel",
    "TensorFormat",
]


class TensorFormat:
    """What tensors of one shape go along, and what is known of them.

    As outputs they come with ``wants`` and ``shared``, as in a message; ``refuse`` says what is wrong with another one.
    """

    def __init__(
        self,
        wire: Endpoint,
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


class InFlight:
    """One micro-batch's tensor on its way: there until a send is over, or what was received is taken."""

    __slots__ = ("line", "tensor", "work")

    def __init__(self, line: TensorFormat) -> None:
        self.line = line
        self.work: Any = None
        self.tensor: Any = None

    @property
    def passage(self) -> ChannelOps:
        return ChannelOps(self.send, self.land, self.take, self.post, self.sent)

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

    def send_tensor(self, tensor: Tensor, line: TensorFormat) -> None:
        if not tensor.is_contiguous() or tensor.is_neg() or (line.conjugates and tensor.is_conj()):
            tensor = to_contiguous(tensor)
        wire = line.wire
        if line.on_gpu and not tensor.is_cuda:  # a few numbers that the stage had on the host
            tensor = tensor.to(wire.device)
        try:
            self.work = wire.group.send([tensor], wire.there, 0)
        except RuntimeError as error:
            raise ChannelError(wire.peer, str(error)) from None
        self.tensor = tensor


class InFlightOutput(InFlight):
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


class InFlightGradient(InFlight):
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


# Lanes between two processes, over a process group of two for each direction.
#
# Both ends know what a message looks like before it is sent, so nothing but the tensors' data travels.


class ProcessChannel:
    """One edge in one direction: what each micro-batch's message consists of, and what is under way."""

    def __init__(self, wire: Endpoint, name: str, tensors: Sequence[Sequence[TensorMeta]]) -> None:
        self.wire = wire
        self.name = name
        self.tensors = tensors
        self.makers = [wire.makers(row) for row in tensors]
        self.under_way: dict[int, list[Any]] = {}  # works with their tensors
        self.landed: dict[int, list[Tensor]] = {}
        self.lines: dict[MessageMeta | TensorMeta, TensorFormat] = {}
        self.in_flight: dict[int, InFlight] = {}  # of messages of one tensor

    def at(self, microbatch: int) -> ChannelOps:
        metas = self.tensors[microbatch]
        if len(metas) != 1 or not math.prod(metas[0].shape) or self.wire.staged or not self.alone(microbatch):
            return bind_ops(self, microbatch)
        if microbatch not in self.in_flight:
            self.in_flight[microbatch] = self.berth(microbatch)
        return self.in_flight[microbatch].passage

    def alone(self, microbatch: int) -> bool:
        """Whether there is nothing to a message but its tensors."""
        raise NotImplementedError

    def berth(self, microbatch: int) -> InFlight:
        raise NotImplementedError

    def send(self, microbatch: int, payload: Any) -> None:
        raise NotImplementedError

    def take(self, microbatch: int) -> Any:
        raise NotImplementedError

    def post(self, microbatch: int) -> None:
        self.under_way[microbatch] = self.wire.receive(self.makers[microbatch])

    def land(self, microbatch: int) -> None:
        """Wait until the message is there to be taken."""
        self.landed[microbatch] = self.wire.finish(self.under_way.pop(microbatch))

    def sent(self, microbatch: int) -> None:
        self.wire.wait(self.under_way.pop(microbatch))

    def close(self) -> None:
        self.under_way.clear()
        self.landed.clear()
        for berth in self.in_flight.values():
            berth.clear()


class ForwardChannel(ProcessChannel):
    """Outputs to the next stage, of which ``metas`` says what each micro-batch's looks like."""

    def __init__(self, wire: Endpoint, name: str, metas: Sequence[MessageMeta]) -> None:
        for meta in metas:
            require_dense(meta, name)
        super().__init__(wire, name, [[tensor.in_memory() for tensor in meta.tensors()] for meta in metas])
        self.metas = metas
        self.turned = [any(tensor.order is not None for tensor in meta.tensors()) for meta in metas]

    def alone(self, microbatch: int) -> bool:
        return self.metas[microbatch].spec is None and not self.turned[microbatch]

    def berth(self, microbatch: int) -> InFlight:
        meta = self.metas[microbatch]
        if meta not in self.lines:
            refuse = partial(_raise_mismatch, meta=meta, name=self.name)
            self.lines[meta] = TensorFormat(self.wire, meta.leaves[0], meta.wants, meta.shared, refuse)
        return InFlightOutput(self.lines[meta])

    def send(self, microbatch: int, payload: Message) -> None:
        meta = self.metas[microbatch]
        tensors = _check_message(payload, meta, self.name)
        if self.turned[microbatch]:
            tensors = [own.to_memory(tensor) for own, tensor in zip(meta.tensors(), tensors, strict=True)]
        self.under_way[microbatch] = self.wire.send(tensors)

    def take(self, microbatch: int) -> Message:
        meta, coming = self.metas[microbatch], iter(self.landed.pop(microbatch))
        leaves = [leaf.from_memory(next(coming)) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
        return Message(leaves, meta.spec, meta.wants, meta.shared)


class BackwardChannel(ProcessChannel):
    """Gradients back to the stage before, for those of its outputs that ``present`` says get one."""

    def __init__(
        self, wire: Endpoint, name: str, metas: Sequence[MessageMeta], present: Sequence[Sequence[bool]]
    ) -> None:
        tensors: list[list[TensorMeta]] = [
            [meta.leaves[i] for i, there in zip(meta.wants, row, strict=True) if there]
            for meta, row in zip(metas, present, strict=True)
        ]
        super().__init__(wire, name, tensors)
        self.present = present

    def alone(self, microbatch: int) -> bool:
        return len(self.present[microbatch]) == 1

    def berth(self, microbatch: int) -> InFlight:
        (meta,) = self.tensors[microbatch]
        if meta not in self.lines:
            self.lines[meta] = TensorFormat(self.wire, meta)
        return InFlightGradient(self.lines[meta])

    def send(self, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        metas = self.tensors[microbatch]
        if len(metas) != len(grads):
            grads = [grad for grad, there in zip(grads, self.present[microbatch], strict=True) if there]
        tensors: list[Tensor] = []
        for grad, meta in zip(grads, metas, strict=True):
            if grad is None:  # expected, but the loss did not depend on it this time
                grad = torch.zeros(meta.shape, dtype=meta.dtype, device=self.wire.device)
            tensors.append(grad)
        self.under_way[microbatch] = self.wire.send(tensors)

    def take(self, microbatch: int) -> Sequence[Tensor | None]:
        coming = iter(self.landed.pop(microbatch))
        return [next(coming) if there else None for there in self.present[microbatch]]


def _check_message(message: Message, meta: MessageMeta, name: str) -> list[Tensor]:
    """The tensors of a message, if it is what the other side expects."""
    leaves, spec, wants, _ = message
    tensors = []
    if len(leaves) == len(meta.leaves) and spec == meta.spec and tuple(wants) == meta.wants:
        for leaf, expected in zip(leaves, meta.leaves, strict=True):
            if isinstance(leaf, Tensor):
                if not isinstance(expected, TensorMeta) or leaf.dtype is not expected.dtype:
                    break
                if leaf.shape != expected.shape:
                    break
                tensors.append(leaf)
            elif leaf is not expected and (type(leaf) is not type(expected) or leaf != expected):
                break
        else:
            return tensors
    _raise_mismatch(message, meta, name)


def _raise_mismatch(message: Message, meta: MessageMeta, name: str) -> NoReturn:
    """Say how a message differs from what the other side expects."""
    found = meta_of(message)
    if found.wants != meta.wants and str(found) == str(meta):
        raise PlanError(
            f"{name} gave {found} with gradients wanted for leaves {list(found.wants)}, but {list(meta.wants)} was "
            "inferred: freeze and thaw parameters of the whole model, on every rank, or say Pipeline(…, dynamic=True)"
        )
    raise PlanError(
        f"{name} gave {found}, but {meta} was inferred from its input and is what the next stage expects: an output's "
        "shapes, dtypes and plain values must follow from the input's shapes alone, or say Pipeline(…, dynamic=True)"
    )
