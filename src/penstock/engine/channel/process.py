"""Channels between two processes whose messages have known shapes.

Both ends know the format of a message before it is sent, so only the tensors' data is sent. Most messages are one
tensor. These take a short path (``InFlight``) without lists and without Python calls between the program and torch.
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


class TensorFormat:
    """Format of single-tensor messages, shared by the micro-batches that have it.

    ``wants`` and ``shared`` are those of a ``Message``. ``mismatch`` raises the error for a message of another format.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        meta: TensorMeta,
        wants: Sequence[int] = (),
        shared: Sequence[int] = (),
        mismatch: Callable[[Message], NoReturn] | None = None,
    ) -> None:
        self.endpoint, self.wait_timer = endpoint, endpoint.wait_timer
        (self.new_buffer,) = endpoint.buffer_factories([meta])
        self.dtype, self.shape = meta.dtype, torch.Size(meta.shape)
        self.is_complex = meta.dtype.is_complex
        self.on_gpu = endpoint.device.type == "cuda"
        self.wants, self.shared, self.mismatch = wants, shared, mismatch


class InFlight:
    """The single tensor of one micro-batch: held until its send is complete, or until it is received and taken."""

    __slots__ = ("format", "tensor", "work")

    def __init__(self, format: TensorFormat) -> None:
        self.format = format
        self.work: Any = None
        self.tensor: Any = None

    def ops(self) -> ChannelOps:
        return ChannelOps(self.send, self.wait, self.get, self.post_recv, self.wait_send)

    def send(self, payload: Any) -> None:
        raise NotImplementedError

    def get(self) -> Any:
        raise NotImplementedError

    def post_recv(self) -> None:
        format = self.format
        endpoint, buffer = format.endpoint, format.new_buffer()
        try:
            self.work = endpoint.group.recv([buffer], endpoint.peer_in_group, 0)
        except RuntimeError as error:
            raise ChannelError(endpoint.peer, str(error)) from None
        self.tensor = buffer

    def wait(self) -> None:
        """Wait until the send or the receive is complete."""
        work, self.work = self.work, None
        start = perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            work = None  # the error keeps this frame alive, and a connection is closed with the last reference to it
            raise ChannelError(self.format.endpoint.peer, str(error)) from None
        self.format.wait_timer.seconds += perf_counter() - start

    def wait_send(self) -> None:
        self.wait()
        self.tensor = None

    def clear(self) -> None:
        self.work = self.tensor = None

    def send_tensor(self, tensor: Tensor, format: TensorFormat) -> None:
        if not tensor.is_contiguous() or tensor.is_neg() or (format.is_complex and tensor.is_conj()):
            tensor = to_contiguous(tensor)
        endpoint = format.endpoint
        if format.on_gpu and not tensor.is_cuda:  # a small tensor that the stage had on the host
            tensor = tensor.to(endpoint.device)
        try:
            self.work = endpoint.group.send([tensor], endpoint.peer_in_group, 0)
        except RuntimeError as error:
            raise ChannelError(endpoint.peer, str(error)) from None
        self.tensor = tensor


class InFlightOutput(InFlight):
    """A stage output that is one bare tensor."""

    __slots__ = ()

    def send(self, payload: Message) -> None:
        format, (leaves, spec, wants, _) = self.format, payload
        tensor = leaves[0]
        same_structure = spec is None and len(wants) == len(format.wants)
        if not same_structure or tensor.dtype is not format.dtype or tensor.shape != format.shape:
            assert format.mismatch is not None
            format.mismatch(payload)
        self.send_tensor(tensor, format)

    def get(self) -> Message:
        tensor, self.tensor = self.tensor, None
        return tensor_message(tensor, self.format.wants, self.format.shared)


class InFlightGradient(InFlight):
    """The gradient of a stage's only input."""

    __slots__ = ()

    def send(self, payload: Sequence[Tensor | None]) -> None:
        format, (tensor,) = self.format, payload
        if tensor is None:  # expected, but the loss did not depend on it this time
            tensor = torch.zeros(format.shape, dtype=format.dtype, device=format.endpoint.device)
        self.send_tensor(tensor, format)

    def get(self) -> Sequence[Tensor]:
        tensor, self.tensor = self.tensor, None
        return (tensor,)


class ProcessChannel:
    """One edge in one direction. ``tensors`` are the formats of each micro-batch's tensors."""

    def __init__(self, endpoint: Endpoint, name: str, tensors: Sequence[Sequence[TensorMeta]]) -> None:
        self.endpoint = endpoint
        self.name = name
        self.tensors = tensors
        self.buffers = [endpoint.buffer_factories(row) for row in tensors]
        self.pending: dict[int, list[Any]] = {}  # works with their tensors
        self.received: dict[int, list[Tensor]] = {}
        self.formats: dict[MessageMeta | TensorMeta, TensorFormat] = {}
        self.in_flight: dict[int, InFlight] = {}  # single-tensor messages

    def ops(self, microbatch: int) -> ChannelOps:
        metas = self.tensors[microbatch]
        if len(metas) != 1 or not math.prod(metas[0].shape) or self.endpoint.staged or not self.is_bare(microbatch):
            return bind_ops(self, microbatch)
        if microbatch not in self.in_flight:
            self.in_flight[microbatch] = self.new_in_flight(microbatch)
        return self.in_flight[microbatch].ops()

    def is_bare(self, microbatch: int) -> bool:
        """Whether the message is its tensors and nothing else."""
        raise NotImplementedError

    def new_in_flight(self, microbatch: int) -> InFlight:
        raise NotImplementedError

    def send(self, microbatch: int, payload: Any) -> None:
        raise NotImplementedError

    def get(self, microbatch: int) -> Any:
        raise NotImplementedError

    def post_recv(self, microbatch: int) -> None:
        self.pending[microbatch] = self.endpoint.recv(self.buffers[microbatch])

    def wait_recv(self, microbatch: int) -> None:
        self.received[microbatch] = self.endpoint.wait_tensors(self.pending.pop(microbatch))

    def wait_send(self, microbatch: int) -> None:
        self.endpoint.wait(self.pending.pop(microbatch))

    def close(self) -> None:
        self.pending.clear()
        self.received.clear()
        for message in self.in_flight.values():
            message.clear()


class ForwardChannel(ProcessChannel):
    """Outputs to a later stage; ``metas`` describe the message of each micro-batch."""

    def __init__(self, endpoint: Endpoint, name: str, metas: Sequence[MessageMeta]) -> None:
        for meta in metas:
            require_dense(meta, name)
        super().__init__(endpoint, name, [[tensor.in_memory() for tensor in meta.tensors()] for meta in metas])
        self.metas = metas
        self.permuted = [any(tensor.order is not None for tensor in meta.tensors()) for meta in metas]

    def is_bare(self, microbatch: int) -> bool:
        return self.metas[microbatch].spec is None and not self.permuted[microbatch]

    def new_in_flight(self, microbatch: int) -> InFlight:
        meta = self.metas[microbatch]
        if meta not in self.formats:
            mismatch = partial(_raise_mismatch, meta=meta, name=self.name)
            self.formats[meta] = TensorFormat(self.endpoint, meta.leaves[0], meta.wants, meta.shared, mismatch)
        return InFlightOutput(self.formats[meta])

    def send(self, microbatch: int, payload: Message) -> None:
        meta = self.metas[microbatch]
        tensors = _check_message(payload, meta, self.name)
        if self.permuted[microbatch]:
            tensors = [own.to_memory(tensor) for own, tensor in zip(meta.tensors(), tensors, strict=True)]
        self.pending[microbatch] = self.endpoint.send(tensors)

    def get(self, microbatch: int) -> Message:
        meta, tensors = self.metas[microbatch], iter(self.received.pop(microbatch))
        leaves = [leaf.from_memory(next(tensors)) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
        return Message(leaves, meta.spec, meta.wants, meta.shared)


class BackwardChannel(ProcessChannel):
    """Gradients to an earlier stage; ``present`` says which of the wanted gradients exist, per micro-batch."""

    def __init__(
        self, endpoint: Endpoint, name: str, metas: Sequence[MessageMeta], present: Sequence[Sequence[bool]]
    ) -> None:
        tensors: list[list[TensorMeta]] = [
            [meta.leaves[i] for i, exists in zip(meta.wants, row, strict=True) if exists]
            for meta, row in zip(metas, present, strict=True)
        ]
        super().__init__(endpoint, name, tensors)
        self.present = present

    def is_bare(self, microbatch: int) -> bool:
        return len(self.present[microbatch]) == 1

    def new_in_flight(self, microbatch: int) -> InFlight:
        (meta,) = self.tensors[microbatch]
        if meta not in self.formats:
            self.formats[meta] = TensorFormat(self.endpoint, meta)
        return InFlightGradient(self.formats[meta])

    def send(self, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        metas = self.tensors[microbatch]
        if len(metas) != len(grads):
            grads = [grad for grad, exists in zip(grads, self.present[microbatch], strict=True) if exists]
        tensors: list[Tensor] = []
        for grad, meta in zip(grads, metas, strict=True):
            if grad is None:  # expected, but the loss did not depend on it this time
                grad = torch.zeros(meta.shape, dtype=meta.dtype, device=self.endpoint.device)
            tensors.append(grad)
        self.pending[microbatch] = self.endpoint.send(tensors)

    def get(self, microbatch: int) -> Sequence[Tensor | None]:
        tensors = iter(self.received.pop(microbatch))
        return [next(tensors) if exists else None for exists in self.present[microbatch]]


def _check_message(message: Message, meta: MessageMeta, name: str) -> list[Tensor]:
    """The tensors of a message; an error if it is not what the other end expects."""
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
    """Raise the error that says how a message differs from what the other end expects."""
    found = meta_of(message)
    if found.wants != meta.wants and str(found) == str(meta):
        raise PlanError(
            f"{name} gave {found} with gradients wanted for leaves {list(found.wants)}, but {list(meta.wants)} was "
            "inferred: freeze and unfreeze parameters of the whole model, on every rank, or pass "
            "Pipeline(…, dynamic=True)"
        )
    raise PlanError(
        f"{name} gave {found}, but {meta} was inferred from its input and is what the next stage expects: an output's "
        "shapes, dtypes and plain values must follow from the input's shapes alone, or pass Pipeline(…, dynamic=True)"
    )
