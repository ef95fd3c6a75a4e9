"""Channels between two processes whose messages have headers, for shapes that cannot be inferred.

    header    ▪ ▪ ▪ ▪      rows of fixed size; the program posts their receives ahead
    rest          ▪        the remainder of a header that is longer than a row
    tensors     ━ ━━ ━     received into buffers that are allocated after the header was read

Each of the three has its own tag, and the messages of a tag keep the sender's order. Headers are sent over gloo even
if tensors are sent over NCCL. Whenever a rank sends or posts a receive, it reads the headers that have arrived, so that
tensors are received while it computes. ``wait_recv`` waits for the remaining headers. Before that, the sender's send
may be incomplete, which ``lower`` takes into account.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelOps, Endpoint, bind_ops
from penstock.engine.channel.control import decode, encode
from penstock.engine.message import PLAIN_TYPES, Message, MessageMeta, TensorMeta, memory_order, meta_of, require_dense
from penstock.errors import PlanError

HEADER, REST = 1, 2  # tags; tensors have 0

ROW_BYTES = 512  # enough for about twenty tensors
PREFIX = struct.Struct("<Bq")  # code and length in bytes
DATA_BYTES = ROW_BYTES - PREFIX.size

NEW, SAME = 1, 2  # codes; a row that has not arrived has 0


def _row(code: int, length: int = 0, data: bytes = b"") -> Tensor:
    return torch.frombuffer(bytearray((PREFIX.pack(code, length) + data).ljust(ROW_BYTES)), dtype=torch.uint8)


_SAME_ROW = _row(SAME)


class _PendingHeader(NamedTuple):
    """A message whose header has not been read."""

    channel: DynamicForwardChannel
    microbatch: int
    row: bytearray
    works: list[Any]


@dataclass
class DynamicEndpoint:
    """One end of a connection. The channels of several edges share it, with headers in the sender's order."""

    tensors: Endpoint
    headers: Endpoint
    pending: deque[_PendingHeader] = field(default_factory=deque)

    def read_header(self) -> None:
        """Wait for the next header, and post the receives of its tensors."""
        channel, microbatch, row, works = self.pending.popleft()
        self.headers.wait(works)
        code, length = PREFIX.unpack_from(row)
        if code == NEW:
            data = row[PREFIX.size : PREFIX.size + length]
            if length > DATA_BYTES:
                data = bytearray(length)
                self.headers.wait(self.headers.recv([partial(torch.frombuffer, data, dtype=torch.uint8)], REST))
            channel.meta = meta = decode(data)
            channel.buffers = self.tensors.buffer_factories([tensor.in_memory() for tensor in meta.tensors()])
        channel.pending[microbatch] = (channel.meta, self.tensors.recv(channel.buffers))

    def send(self, tensors: Sequence[Tensor], header: bytes | None) -> list[Any]:
        """Start sending a message. Without a ``header``, the last header of the edge is repeated.

        The tensors are sent first: a receive that NCCL has started must not depend on later work of this rank.
        """
        works = self.tensors.send(tensors)
        if header is None:
            works += self.headers.send([_SAME_ROW], HEADER)
        elif len(header) <= DATA_BYTES:
            works += self.headers.send([_row(NEW, len(header), header)], HEADER)
        else:
            works += self.headers.send([_row(NEW, len(header))], HEADER)
            works += self.headers.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], REST)
        return works


def read_arrived_headers(endpoints: Iterable[DynamicEndpoint]) -> None:
    """Read the headers whose first byte has arrived. Waits for the rest of their rows."""
    for endpoint in endpoints:
        while endpoint.pending and endpoint.pending[0].row[0]:
            endpoint.read_header()


class DynamicForwardChannel:
    """One edge in one direction: outputs to a later stage."""

    def __init__(self, endpoint: DynamicEndpoint, name: str, endpoints: Collection[DynamicEndpoint]) -> None:
        """``endpoints`` are all endpoints of the program."""
        self.endpoint, self.endpoints = endpoint, endpoints
        self.name = name
        self.meta: MessageMeta | None = None  # of the last message
        self.header = b""  # of the last message, if it may be repeated
        self.buffers: Sequence[Callable[[], Tensor]] = ()
        self.pending: dict[int, Any] = {}  # works with their tensors; for receives, with the meta
        self.received: dict[int, tuple[MessageMeta, list[Tensor]]] = {}

    def ops(self, microbatch: int) -> ChannelOps:
        return bind_ops(self, microbatch)

    def post_recv(self, microbatch: int) -> None:
        row = bytearray(ROW_BYTES)
        works = self.endpoint.headers.recv([partial(torch.frombuffer, row, dtype=torch.uint8)], HEADER)
        self.endpoint.pending.append(_PendingHeader(self, microbatch, row, works))
        read_arrived_headers(self.endpoints)

    def wait_recv(self, microbatch: int) -> None:
        while microbatch not in self.pending:
            self.endpoint.read_header()
        meta, works = self.pending.pop(microbatch)
        self.received[microbatch] = (meta, self.endpoint.tensors.wait_tensors(works))

    def get(self, microbatch: int) -> Any:
        meta, tensors = self.received.pop(microbatch)
        return meta.to_message(tensors)

    def send(self, microbatch: int, message: Any) -> None:
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        orders = [memory_order(tensor) for tensor in tensors]
        header = self._header(message, orders)
        tensors = [x if order is None else x.permute(order) for x, order in zip(tensors, orders, strict=True)]
        self.pending[microbatch] = self.endpoint.send(tensors, header)
        read_arrived_headers(self.endpoints)

    def wait_send(self, microbatch: int) -> None:
        self.endpoint.tensors.wait(self.pending.pop(microbatch))

    def close(self) -> None:
        self.pending.clear()
        self.received.clear()
        self.endpoint.pending.clear()

    def _header(self, message: Message, orders: list[tuple[int, ...] | None]) -> bytes | None:
        """The header of a message; None if it equals the header of the last message."""
        last = self.meta
        # A message without structure consists of tensors. Other values may be equal but distinct, as 0.0 and -0.0.
        if last is not None and message.spec is None and last.matches(message):
            described = (last.shared, [tensor.order for tensor in last.tensors()])
            if described == (tuple(message.shared), orders):
                return None
        meta = meta_of(message)
        require_dense(meta, self.name)
        try:
            header = encode(meta)
        except Exception as error:
            raise PlanError(f"{self.name} gave {meta}, which cannot be sent to another process: {error}") from error
        if header == self.header:
            return None
        # Mutable objects are sent with each message.
        immutable = all(type(leaf) in (TensorMeta, *PLAIN_TYPES) for leaf in meta.leaves)
        self.meta, self.header = (meta, header) if immutable else (None, b"")
        return header


class DynamicBackwardChannel(DynamicForwardChannel):
    """Gradients to an earlier stage, None for missing ones."""

    def send(self, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        super().send(microbatch, Message(list(grads), None, ()))

    def get(self, microbatch: int) -> Sequence[Tensor | None]:
        message: Message = super().get(microbatch)
        return message.leaves
