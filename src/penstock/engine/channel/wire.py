"""One end of a channel between two processes, over a process group of two for each direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.group import Group
from penstock.engine.idle import Waited
from penstock.engine.meta import TensorMeta

__all__ = ["ChannelError", "Wire", "in_order"]


class ChannelError(Exception):
    """A peer's end of a channel is gone; ``peer`` is None where several talk, and one of them is."""

    def __init__(self, peer: int | None, cause: str) -> None:
        super().__init__(f"the channel with {'other replicas' if peer is None else f'rank {peer}'} broke: {cause}")
        self.peer = peer


class Wire:
    """One end of a channel: tensors go out or come in, in order."""

    def __init__(self, group: Group, peer: int, device: torch.device, waited: Waited | None = None) -> None:
        self.group = group
        self.waited = waited or Waited()  # told how long this end's rank has to wait
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
                tensor = in_order(tensor)
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
        return [partial(new, meta.shape, _dense(meta.shape), dtype=meta.dtype) for meta in metas]

    def close(self) -> None:
        self.group = None


def _dense(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def in_order(tensor: Tensor) -> Tensor:
    """The tensor, its memory as its values say: not strided, and not waiting to be conjugated or negated."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()
