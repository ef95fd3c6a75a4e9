"""Channels between two processes whose messages have known shapes.

Both ends know the metadata of a message in advance, so only the data of its tensors is sent. Most messages are one
tensor. These take a fast path (``InFlight``) without lists and without Python calls between the program and torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelError, ChannelOps, Endpoint, bind_ops, to_contiguous
from penstock.engine.message import Grads, Message, MessageMeta, TensorMeta, meta_of, require_dense, tensor_message
from penstock.errors import PlanError


class InFlight:
    """The single tensor of one micro-batch: kept until its send is complete, or until the stage reads it."""

    def __init__(self, endpoint: Endpoint, meta: TensorMeta) -> None:
        self.endpoint, self.wait_timer = endpoint, endpoint.wait_timer
        (self.new_buffer,) = endpoint.buffer_factories([meta])
        self.dtype, self.shape = meta.dtype, torch.Size(meta.shape)
        self.is_complex = meta.dtype.is_complex
        self.on_gpu = endpoint.device.type == "cuda"
        self.work: Any = None
        self.tensor: Any = None

    def post_recv(self) -> None:
        endpoint, buffer = self.endpoint, self.new_buffer()
        try:
            self.work = endpoint.group.recv([buffer], endpoint.peer_in_group, 0)
        except RuntimeError as error:
            raise ChannelError(endpoint.peer, str(error)) from None
        self.tensor = buffer

    def wait(self) -> None:
        try:
            self.wait_timer.wait(self.work)
        except RuntimeError as error:
            raise ChannelError(self.endpoint.peer, str(error)) from None
        finally:
            self.work = None

    def wait_send(self) -> None:
        self.wait()
        self.tensor = None

    def send_tensor(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous() or tensor.is_neg() or (self.is_complex and tensor.is_conj()):
            tensor = to_contiguous(tensor)
        endpoint = self.endpoint
        if self.on_gpu and not tensor.is_cuda:  # a small tensor that the stage created on the host
            tensor = tensor.to(endpoint.device)
        try:
            self.work = endpoint.group.send([tensor], endpoint.peer_in_group, 0)
        except RuntimeError as error:
            raise ChannelError(endpoint.peer, str(error)) from None
        self.tensor = tensor


class InFlightOutput(InFlight):
    """A stage output that is one bare tensor."""

    def __init__(self, endpoint: Endpoint, meta: MessageMeta, name: str) -> None:
        super().__init__(endpoint, meta.leaves[0])
        self.meta, self.name, self.wants, self.shared = meta, name, meta.wants, meta.shared

    def send(self, payload: Message) -> None:
        leaves, spec, wants, _ = payload
        tensor = leaves[0]
        same_structure = spec is None and len(wants) == len(self.wants)
        if not same_structure or tensor.dtype is not self.dtype or tensor.shape != self.shape:
            _raise_mismatch(payload, self.meta, self.name)
        self.send_tensor(tensor)

    def get(self) -> Message:
        tensor, self.tensor = self.tensor, None
        return tensor_message(tensor, self.wants, self.shared)


class InFlightGradient(InFlight):
    """The gradient of a stage's only input."""

    def send(self, payload: Grads) -> None:
        (tensor,) = payload
        if tensor is None:  # expected, but the loss did not depend on it in this micro-batch
            tensor = torch.zeros(self.shape, dtype=self.dtype, device=self.endpoint.device)
        self.send_tensor(tensor)

    def get(self) -> Sequence[Tensor]:
        tensor, self.tensor = self.tensor, None
        return (tensor,)


class ProcessChannel:
    """One edge in one direction. ``tensors`` has the metadata of the tensors of each micro-batch."""

    def __init__(self, endpoint: Endpoint, tensors: Sequence[Sequence[TensorMeta]]) -> None:
        self.endpoint = endpoint
        self.tensors = tensors
        self.buffers = [endpoint.buffer_factories(row) for row in tensors]
        self.pending: dict[int, list[Any]] = {}  # works with their tensors
        self.received: dict[int, list[Tensor]] = {}
        # Micro-batches with one tensor. A subclass adds those whose message is only this tensor to ``in_flight``.
        single = [k for k, row in enumerate(tensors) if len(row) == 1 and 0 not in row[0].shape]
        self.single = [] if endpoint.staged else single
        self.in_flight: dict[int, InFlightOutput | InFlightGradient] = {}

    def ops(self, microbatch: int) -> ChannelOps:
        one = self.in_flight.get(microbatch)
        if one is None:
            return bind_ops(self, microbatch)
        return ChannelOps(one.send, one.wait, one.get, one.post_recv, one.wait_send)

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
            message.work = message.tensor = None


class ForwardChannel(ProcessChannel):
    """Outputs to a later stage; ``metas`` describe the message of each micro-batch."""

    def __init__(self, endpoint: Endpoint, name: str, metas: Sequence[MessageMeta]) -> None:
        for meta in metas:
            require_dense(meta, name)
        super().__init__(endpoint, [[tensor.in_memory() for tensor in meta.tensors()] for meta in metas])
        self.name, self.metas = name, metas
        self.permuted = [any(tensor.order is not None for tensor in meta.tensors()) for meta in metas]
        for k in self.single:
            if metas[k].spec is None and not self.permuted[k]:
                self.in_flight[k] = InFlightOutput(endpoint, metas[k], name)

    def send(self, microbatch: int, payload: Message) -> None:
        meta = self.metas[microbatch]
        if not meta.matches(payload):
            _raise_mismatch(payload, meta, self.name)
        tensors = [leaf for leaf in payload.leaves if isinstance(leaf, Tensor)]
        if self.permuted[microbatch]:
            orders = [tensor.order for tensor in meta.tensors()]
            tensors = [x if order is None else x.permute(order) for x, order in zip(tensors, orders, strict=True)]
        self.pending[microbatch] = self.endpoint.send(tensors)

    def get(self, microbatch: int) -> Message:
        return self.metas[microbatch].to_message(self.received.pop(microbatch))


class BackwardChannel(ProcessChannel):
    """Gradients to an earlier stage. ``present`` marks the wanted gradients that exist, per micro-batch."""

    def __init__(self, endpoint: Endpoint, metas: Sequence[MessageMeta], present: Sequence[Sequence[bool]]) -> None:
        tensors: list[list[TensorMeta]] = [
            [meta.leaves[i] for i, exists in zip(meta.wants, row, strict=True) if exists]
            for meta, row in zip(metas, present, strict=True)
        ]
        super().__init__(endpoint, tensors)
        self.present = present
        for k in self.single:
            if len(present[k]) == 1:
                self.in_flight[k] = InFlightGradient(endpoint, *tensors[k])

    def send(self, microbatch: int, grads: Grads) -> None:
        metas = self.tensors[microbatch]
        if len(metas) != len(grads):
            grads = [grad for grad, exists in zip(grads, self.present[microbatch], strict=True) if exists]
        tensors: list[Tensor] = []
        for grad, meta in zip(grads, metas, strict=True):
            if grad is None:  # expected, but the loss did not depend on it in this micro-batch
                grad = torch.zeros(meta.shape, dtype=meta.dtype, device=self.endpoint.device)
            tensors.append(grad)
        self.pending[microbatch] = self.endpoint.send(tensors)

    def get(self, microbatch: int) -> Grads:
        tensors = iter(self.received.pop(microbatch))
        return [next(tensors) if exists else None for exists in self.present[microbatch]]


def _raise_mismatch(message: Message, meta: MessageMeta, name: str) -> NoReturn:
    """Raise an error for a message that differs from the metadata that the other end expects."""
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
