"""What a program knows of lanes: one edge in one direction, and each micro-batch's passage along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.engine.channel.groups import Group
from penstock.engine.message import TensorMeta

__all__ = ["Channel", "ChannelError", "ChannelOps", "Endpoint", "WaitTimer", "bind_ops", "to_contiguous"]


class ChannelOps(NamedTuple):
    """The calls that carry one micro-batch's message along a lane, made once and called in every step.

    What another rank sends lands first, and is taken then: so a rank that waits is seen to wait, and not to compute.
    """

    send: Callable[[Any], None]
    land: Callable[[], None]
    take: Callable[[], Any]
    post: Callable[[], None] | None = None  # between processes: a receive is posted ahead,
    sent: Callable[[], None] | None = None  # and a send is over some time later
    taken: Callable[[], None] | None = None  # there where a sender waits until what it sent, or enough, is taken


class Channel(Protocol):
    """One edge in one direction: what a stage sends along it, another one takes."""

    def at(self, microbatch: int) -> ChannelOps: ...


class PostedChannel(Protocol):
    """A lane between processes, whose methods are told of which micro-batch."""

    def send(self, microbatch: int, payload: Any) -> None: ...

    def land(self, microbatch: int) -> None: ...

    def take(self, microbatch: int) -> Any: ...

    def post(self, microbatch: int) -> None: ...

    def sent(self, microbatch: int) -> None: ...


def bind_ops(lane: PostedChannel, microbatch: int) -> ChannelOps:
    """The passage of a lane between processes, by its methods."""
    return ChannelOps(*(partial(call, microbatch) for call in (lane.send, lane.land, lane.take, lane.post, lane.sent)))


# How long a rank waits for others: the bubble that a step really had.
#
# The clock is read where a rank may wait, before and after, and nowhere else. On a GPU the host runs ahead and waits
# for nothing, so that nothing can be said in this way.


class WaitTimer:
    """The seconds that one rank has waited for others, and how long it has worked."""

    __slots__ = ("busy", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.busy = 0.0

    def run(self, work: Callable[[], None]) -> None:
        """Do a rank's work; what it takes, less the waiting in it, is what the rank is busy."""
        self.seconds = 0.0
        start = perf_counter()
        work()
        self.busy = perf_counter() - start - self.seconds


# One end of a channel between two processes, over a process group of two for each direction.


class ChannelError(Exception):
    """A peer's end of a channel is gone; ``peer`` is None where several talk, and one of them is."""

    def __init__(self, peer: int | None, cause: str) -> None:
        super().__init__(f"the channel with {'other replicas' if peer is None else f'rank {peer}'} broke: {cause}")
        self.peer = peer


class Endpoint:
    """One end of a channel: tensors go out or come in, in order."""

    def __init__(self, group: Group, peer: int, device: torch.device, waited: WaitTimer | None = None) -> None:
        self.group = group
        self.waited = waited or WaitTimer()  # told how long this end's rank has to wait
        self.peer = peer  # its rank in the world
        self.there = 1 - group.rank()
        self.device = device
        # gloo moves host memory only
        self.staged = device.type == "cuda" and group.name() == "gloo"
        self.buffers = torch.device("cpu") if self.staged else device

    def connect(self, sender: bool) -> None:
        """Meet the other end. NCCL would else do so at the first message, and hold up whoever posts a receive."""
        if self.group.name() == "nccl":
            token = torch.zeros(1, device=self.device)
            work = (self.group.send if sender else self.group.recv)([token], self.there, 0)
            work.wait()
            torch.cuda.synchronize(self.device)

    def send(self, tensors: Sequence[Tensor], tag: int = 0) -> list[Any]:
        """Start sending; what is returned must be kept until ``wait`` for it is over.

        What is sent under different tags comes in any order; that is gloo's, NCCL knows of none.
        """
        send, there = self.group.send, self.there
        out: list[Any] = []
        try:
            for tensor in tensors:
                if self.staged:
                    tensor = tensor.cpu()
                elif tensor.device.type != self.device.type:  # a few numbers that the stage had on the host
                    tensor = tensor.to(self.device)
                tensor = to_contiguous(tensor)
                if tensor.numel():
                    out.append((send([tensor], there, tag), tensor))
        except RuntimeError as error:
            # An error keeps this frame alive, and a connection is closed with the last reference to it.
            out, send = [], None
            raise ChannelError(self.peer, str(error)) from None
        return out

    def receive(self, makers: Sequence[Callable[[], Tensor]], tag: int = 0) -> list[Any]:
        """Post receives into fresh buffers."""
        receive, there = self.group.recv, self.there
        out: list[Any] = []
        try:
            for make in makers:
                buffer = make()
                out.append((receive([buffer], there, tag) if buffer.numel() else None, buffer))
        except RuntimeError as error:
            out, receive = [], None
            raise ChannelError(self.peer, str(error)) from None
        return out

    def wait(self, works: list[Any]) -> None:
        """Wait until sends or receives that were started are over."""
        start = perf_counter()
        try:
            for work, _ in works:
                if work is not None:
                    work.wait()
            self.waited.seconds += perf_counter() - start
        except RuntimeError as error:
            works.clear()
            work = None
            raise ChannelError(self.peer, str(error)) from None

    def finish(self, works: list[Any]) -> list[Tensor]:
        """The tensors of receives that were started, once they have come."""
        self.wait(works)
        if self.staged:
            return [tensor.to(self.device) for _, tensor in works]
        return [tensor for _, tensor in works]

    def makers(self, metas: Sequence[TensorMeta]) -> list[Callable[[], Tensor]]:
        """What makes the buffers for a message of these tensors."""
        new = partial(torch.empty_strided, device=self.buffers)  # half the cost of torch.empty
        return [partial(new, meta.shape, _contiguous_strides(meta.shape), dtype=meta.dtype) for meta in metas]

    def close(self) -> None:
        self.group = None


def _contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def to_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, its memory as its values say: not strided, and not waiting to be conjugated or negated."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
