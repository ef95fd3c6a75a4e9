"""Lanes between two processes whose messages describe themselves, for shapes that nobody can infer.

    header    ▪ ▪ ▪ ▪      rows of one size: their receives are posted ahead, as the program says
    rest          ▪        of a header that is longer than a row
    tensors     ━ ━━ ━     received into buffers that are made when their header has come

Each of the three goes under a tag of its own, and each tag in the sender's order. Headers go over gloo, where tensors
may go over NCCL. A rank looks for headers that have come whenever it sends or posts, so that tensors arrive while it
computes; at the latest it waits for them when a message is to land. Only then is the sender sure that its send is over:
``lower`` counts with that.
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

__all__ = ["DynamicBackwardChannel", "DynamicEndpoint", "DynamicEndpoints", "DynamicForwardChannel"]

HEADER, REST = 1, 2  # tags; tensors have 0

ROW = 512  # bytes: enough for a score of tensors
FRONT = struct.Struct("<Bq")  # what comes, and how long it is in bytes
ROOM = ROW - FRONT.size

NEW, SAME = 1, 2  # no zero: that is a row that has not come


def _row(code: int, length: int = 0, data: bytes = b"") -> Tensor:
    return torch.frombuffer(bytearray((FRONT.pack(code, length) + data).ljust(ROW)), dtype=torch.uint8)


_SAME_ROW = _row(SAME)


class _PendingHeader(NamedTuple):
    """A message whose header has not been read."""

    lane: DynamicForwardChannel
    microbatch: int
    row: bytearray
    works: list[Any]


class DynamicEndpoint:
    """One end of a channel. The messages of several edges share it, in the sender's order, and so do their headers."""

    def __init__(self, wire: Endpoint, headers: Endpoint) -> None:
        self.wire = wire
        self.headers = headers
        self.coming: deque[_PendingHeader] = deque()

    def post(self, lane: DynamicForwardChannel, microbatch: int) -> None:
        row = bytearray(ROW)
        works = self.headers.receive([partial(torch.frombuffer, row, dtype=torch.uint8)], HEADER)
        self.coming.append(_PendingHeader(lane, microbatch, row, works))

    def read(self) -> None:
        """Wait for the next header, and post the receives of its tensors."""
        lane, microbatch, row, works = self.coming.popleft()
        self.headers.wait(works)
        code, length = FRONT.unpack_from(row)
        if code == NEW:
            data = row[FRONT.size : FRONT.size + length] if length <= ROOM else self._rest(length)
            lane.expect(pickle.loads(data))
        lane.under_way[microbatch] = (lane.meta, self.wire.receive(lane.makers))

    def _rest(self, length: int) -> bytearray:
        data = bytearray(length)
        self.headers.wait(self.headers.receive([partial(torch.frombuffer, data, dtype=torch.uint8)], REST))
        return data

    def send(self, tensors: Sequence[Tensor], header: bytes | None) -> list[Any]:
        """Start sending a message, with its header, or with the word that it is the edge's last one again.

        The tensors go first: a receive that NCCL has begun must not wait for anything this rank has yet to do.
        """
        works = self.wire.send(tensors)
        if header is None:
            works += self.headers.send([_SAME_ROW], HEADER)
        elif len(header) <= ROOM:
            works += self.headers.send([_row(NEW, len(header), header)], HEADER)
        else:
            works += self.headers.send([_row(NEW, len(header))], HEADER)
            works += self.headers.send([torch.frombuffer(bytearray(header), dtype=torch.uint8)], REST)
        return works


class DynamicEndpoints:
    """The ends of channels that one program uses."""

    def __init__(self, wires: Mapping[Any, Endpoint], headers: Mapping[Any, Endpoint]) -> None:
        self.all = {key: DynamicEndpoint(wire, headers[key]) for key, wire in wires.items()}
        self._ends = tuple(self.all.values())

    def look(self) -> None:
        """Read the headers that have come. Their first byte tells; to be sure, reading waits for what may be left."""
        for channel in self._ends:
            while channel.coming and channel.coming[0].row[0]:
                channel.read()


class DynamicForwardChannel:
    """One edge in one direction: outputs to a later stage."""

    def __init__(self, channels: DynamicEndpoints, key: Any, name: str) -> None:
        self.channels = channels
        self.channel = channels.all[key]
        self.name = name
        self.meta: MessageMeta | None = None  # of the last message
        self.header = b""  # that of the last message, if another one like it need not be described again
        self.makers: Sequence[Callable[[], Tensor]] = ()
        self.under_way: dict[int, Any] = {}  # works with their tensors; of what comes, the meta too
        self.landed: dict[int, tuple[MessageMeta, list[Tensor]]] = {}

    def at(self, microbatch: int) -> ChannelOps:
        return bind_ops(self, microbatch)

    def post(self, microbatch: int) -> None:
        self.channel.post(self, microbatch)
        self.channels.look()

    def expect(self, meta: MessageMeta) -> None:
        self.meta = meta
        self.makers = self.channel.wire.makers([tensor.in_memory() for tensor in meta.tensors()])

    def land(self, microbatch: int) -> None:
        """Wait until the message is there to be taken."""
        while microbatch not in self.under_way:
            self.channel.read()
        meta, works = self.under_way.pop(microbatch)
        self.landed[microbatch] = (meta, self.channel.wire.finish(works))

    def take(self, microbatch: int) -> Any:
        meta, tensors = self.landed.pop(microbatch)
        coming = iter(tensors)
        leaves = [leaf.from_memory(next(coming)) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
        return Message(leaves, meta.spec, meta.wants, meta.shared)

    def send(self, microbatch: int, message: Any) -> None:
        header = self._header(message)
        tensors = [_memory_order(leaf) for leaf in message.leaves if isinstance(leaf, Tensor)]
        self.under_way[microbatch] = self.channel.send(tensors, header)
        self.channels.look()

    def sent(self, microbatch: int) -> None:
        self.channel.wire.wait(self.under_way.pop(microbatch))

    def close(self) -> None:
        self.under_way.clear()
        self.landed.clear()
        self.channel.coming.clear()

    def _header(self, message: Message) -> bytes | None:
        """What describes the message; None if the last one's header does."""
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
        # An object that somebody may change is sent each time.
        lasting = all(type(leaf) in (TensorMeta, *PLAIN_TYPES) for leaf in meta.leaves)
        self.meta, self.header = (meta, header) if lasting else (None, b"")
        return header


class DynamicBackwardChannel(DynamicForwardChannel):
    """The same for gradients back to an earlier stage, None for those that there are not."""

    def send(self, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        super().send(microbatch, Message(list(grads), None, ()))

    def take(self, microbatch: int) -> Sequence[Tensor | None]:
        message: Message = super().take(microbatch)
        return message.leaves


def _matches_meta(message: Message, meta: MessageMeta) -> bool:
    """Whether a message that has no structure, as most have none, looks like this; for others it does not know."""
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


def _memory_order(tensor: Tensor) -> Tensor:
    order = memory_order(tensor)
    return tensor if order is None else tensor.permute(order)
