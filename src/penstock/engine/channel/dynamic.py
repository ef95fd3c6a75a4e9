"""Channels between two processes whose messages describe themselves, for shapes that cannot be inferred.

    header    ▪ ▪ ▪ ▪      rows of fixed size, whose receives are posted ahead as the program says
    rest          ▪        the remainder of a header that is longer than a row
    tensors     ━ ━━ ━     received into buffers that are allocated when the header has been read

Each of the three has its own tag, and the messages of a tag keep the sender's order. Headers are sent over gloo even
where tensors are sent over NCCL. A rank reads the headers that have arrived whenever it sends or posts a receive, so
that tensors are received while it computes. It waits for headers at the latest in ``wait_recv``. Only then is the
sender's send sure to complete, which ``lower`` takes into account.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelOps, Endpoint, bind_ops
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


class DynamicEndpoint:
    """One end of a connection. The channels of several edges share it and its headers, in the sender's order."""

    def __init__(self, tensors: Endpoint, headers: Endpoint) -> None:
        self.tensors = tensors
        self.headers = headers
        self.pending: deque[_PendingHeader] = deque()

    def post_header(self, channel: DynamicForwardChannel, microbatch: int) -> None:
        row = bytearray(ROW_BYTES)
        works = self.headers.recv([partial(torch.frombuffer, row, dtype=torch.uint8)], HEADER)
        self.pending.append(_PendingHeader(channel, microbatch, row, works))

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
            channel.expect(pickle.loads(data))
        channel.pending[microbatch] = (channel.meta, self.tensors.recv(channel.buffers))

    def send(self, tensors: Sequence[Tensor], header: bytes | None) -> list[Any]:
        """Start sending a message; None as its header repeats the last header of the edge.

        The tensors go first: a receive that NCCL has started must not depend on anything this rank has yet to do.
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


class DynamicEndpoints:
    """The endpoints that one program uses."""

    def __init__(self, tensors: Mapping[Any, Endpoint], headers: Mapping[Any, Endpoint]) -> None:
        self.by_key = {key: DynamicEndpoint(endpoint, headers[key]) for key, endpoint in tensors.items()}
        self._all = tuple(self.by_key.values())

    def read_arrived_headers(self) -> None:
        """Read the headers whose first byte has arrived; the read waits for the rest of the row."""
        for endpoint in self._all:
            while endpoint.pending and endpoint.pending[0].row[0]:
                endpoint.read_header()


class DynamicForwardChannel:
    """One edge in one direction: outputs to a later stage."""

    def __init__(self, endpoints: DynamicEndpoints, key: Any, name: str) -> None:
        self.endpoints = endpoints
        self.endpoint = endpoints.by_key[key]
        self.name = name
        self.meta: MessageMeta | None = None  # of the last message
        self.header = b""  # of the last message, if it may be repeated
        self.buffers: Sequence[Callable[[], Tensor]] = ()
        self.pending: dict[int, Any] = {}  # works with their tensors; for receives, with the meta
        self.received: dict[int, tuple[MessageMeta, list[Tensor]]] = {}

    def ops(self, microbatch: int) -> ChannelOps:
        return bind_ops(self, microbatch)

    def post_recv(self, microbatch: int) -> None:
        self.endpoint.post_header(self, microbatch)
        self.endpoints.read_arrived_headers()

    def expect(self, meta: MessageMeta) -> None:
        """Set the format of the messages that follow."""
        self.meta = meta
        self.buffers = self.endpoint.tensors.buffer_factories([tensor.in_memory() for tensor in meta.tensors()])

    def wait_recv(self, microbatch: int) -> None:
        while microbatch not in self.pending:
            self.endpoint.read_header()
        meta, works = self.pending.pop(microbatch)
        self.received[microbatch] = (meta, self.endpoint.tensors.wait_tensors(works))

    def get(self, microbatch: int) -> Any:
        meta, tensors = self.received.pop(microbatch)
        return meta.to_message(tensors)

    def send(self, microbatch: int, message: Any) -> None:
        header = self._header(message)
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]
        orders = [memory_order(tensor) for tensor in tensors]
        tensors = [x if order is None else x.permute(order) for x, order in zip(tensors, orders, strict=True)]
        self.pending[microbatch] = self.endpoint.send(tensors, header)
        self.endpoints.read_arrived_headers()

    def wait_send(self, microbatch: int) -> None:
        self.endpoint.tensors.wait(self.pending.pop(microbatch))

    def close(self) -> None:
        self.pending.clear()
        self.received.clear()
        self.endpoint.pending.clear()

    def _header(self, message: Message) -> bytes | None:
        """The header of a message; None if it is that of the last message."""
        if self.meta is not None and _matches_meta(message, self.meta):
            return None
        meta = meta_of(message)
        require_dense(meta, self.name)
        try:
            header = pickle.dumps(meta)
        except Exception as error:
            raise PlanError(f"{self.name} gave {meta}, which cannot be sent to another process: {error}") from error
        if header == self.header:
            return None
        # A mutable object is sent every time.
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


def _matches_meta(message: Message, meta: MessageMeta) -> bool:
    """Whether a message without structure has this format; False for any message with structure."""
    leaves, spec, wants, shared = message
    if spec is not None or meta.spec is not None or len(leaves) != len(meta.leaves):
        return False
    if len(wants) != len(meta.wants) or len(shared) != len(meta.shared):
        return False
    for leaf, expected in zip(leaves, meta.leaves, strict=True):
        if leaf is None or expected is None:
            if leaf is not expected:
                return False
            continue
        if leaf.dtype is not expected.dtype or leaf.shape != expected.shape or leaf.layout is not torch.strided:
            return False
        if memory_order(leaf) != expected.order:
            return False
    return True
