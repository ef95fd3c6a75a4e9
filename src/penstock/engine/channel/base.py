"""The channel interface that compiled programs use, and the endpoint that channels between processes share.

A channel carries the messages of one edge of the stage graph in one direction: outputs along the edge, or gradients
against it. A program binds the operations of each (channel, micro-batch) pair once, as ``ChannelOps``.

Process groups are created directly from torch's backends. ``torch.distributed.new_group`` is collective over the world,
or names a group after its members: a second pipeline over the same ranks would read the first one's keys in the store.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import gloo_options
from penstock.engine.failure.sockets import PipelineSockets
from penstock.engine.message import TensorMeta

# Read by new NCCL groups: they leave failures to the watch, which makes all ranks raise the cause. By default, a group
# whose peer is gone waits a minute for a dump, and then ends its process.
_NCCL_ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}

Group = Any  # a backend: ProcessGroupGloo or ProcessGroupNCCL


class ChannelOps(NamedTuple):
    """The operations of a channel for one micro-batch, bound once and called in every step.

    ``wait_recv`` is separate from ``get``, so that the failure watch distinguishes waiting from computing.
    """

    send: Callable[[Any], None]
    wait_recv: Callable[[], None]
    get: Callable[[], Any]
    post_recv: Callable[[], None] | None = None  # between processes: post the receive ahead
    wait_send: Callable[[], None] | None = None  # between processes: wait until the send is complete
    wait_taken: Callable[[], None] | None = None  # lockstep channels: wait until the receiver is ready again


class Channel(Protocol):
    """One edge in one direction."""

    def ops(self, microbatch: int) -> ChannelOps: ...

    def close(self) -> None:
        """Drop the messages in flight."""


def bind_ops(channel: Any, microbatch: int) -> ChannelOps:
    """Bind the methods of a channel between processes to one micro-batch."""
    methods = (channel.send, channel.wait_recv, channel.get, channel.post_recv, channel.wait_send)
    return ChannelOps(*(partial(method, microbatch) for method in methods))


@dataclass(slots=True)
class WaitTimer:
    """Seconds that one rank has waited for others, to measure the bubble of a step.

    The clock is read only around blocking waits. On a GPU the host runs ahead and does not block, so the time is
    meaningless there.
    """

    seconds: float = 0.0
    busy: float = 0.0  # duration of the rank's last program without its waits
    work: Any = None  # the send or receive that the rank is waiting for

    def wait(self, work: Any) -> None:
        """Wait for a send or receive. Raises ``RuntimeError`` if its connection breaks, or the watch aborts it."""
        self.work = work
        del work  # an error keeps this frame alive, and a connection closes with the last reference to it
        start = perf_counter()
        try:
            if self.work.wait() is False:
                raise RuntimeError("the wait was aborted, because the pipeline has stopped")
        finally:
            self.work = None
        self.seconds += perf_counter() - start


class ChannelError(Exception):
    """A connection to ``peer`` broke. None stands for an unknown member of a larger group."""

    def __init__(self, peer: int | None, cause: str) -> None:
        super().__init__(f"the channel with {'other replicas' if peer is None else f'rank {peer}'} broke: {cause}")
        self.peer = peer


class Endpoint:
    """This rank's end of a process group of two ranks, which carries tensors in one direction and in order.

    The channels of all edges between the same two ranks share it.
    """

    def __init__(self, group: Group, peer: int, device: torch.device, wait_timer: WaitTimer | None = None) -> None:
        self.group = group
        self.wait_timer = wait_timer or WaitTimer()
        self.peer = peer  # rank in the world
        self.peer_in_group = 1 - group.rank()
        self.device = device
        # gloo sends and receives host memory only
        self.staged = device.type == "cuda" and group.name() == "gloo"
        self.buffer_device = torch.device("cpu") if self.staged else device

    def connect(self, sender: bool) -> None:
        """Connect to the peer. NCCL would otherwise connect at the first message, and block a rank that receives."""
        if self.group.name() == "nccl":
            token = torch.zeros(1, device=self.device)
            work = (self.group.send if sender else self.group.recv)([token], self.peer_in_group, 0)
            work.wait()
            torch.cuda.synchronize(self.device)

    def send(self, tensors: Sequence[Tensor], tag: int = 0) -> list[Any]:
        """Start sending. Keep the returned works, which include their tensors, until ``wait`` has returned.

        Messages with different tags may be received in any order. NCCL has no tags.
        """
        send, peer = self.group.send, self.peer_in_group
        works: list[Any] = []
        try:
            for tensor in tensors:
                if self.staged:
                    tensor = tensor.cpu()
                elif tensor.device.type != self.device.type:  # a small tensor that the stage created on the host
                    tensor = tensor.to(self.device)
                tensor = to_contiguous(tensor)
                if tensor.numel():
                    works.append((send([tensor], peer, tag), tensor))
        except RuntimeError as error:
            # The error keeps this frame alive, and a connection closes with the last reference to it.
            works, send = [], None
            raise ChannelError(self.peer, str(error)) from None
        return works

    def recv(self, buffers: Sequence[Callable[[], Tensor]], tag: int = 0) -> list[Any]:
        recv, peer = self.group.recv, self.peer_in_group
        works: list[Any] = []
        try:
            for new_buffer in buffers:
                buffer = new_buffer()
                works.append((recv([buffer], peer, tag) if buffer.numel() else None, buffer))
        except RuntimeError as error:
            works, recv = [], None
            raise ChannelError(self.peer, str(error)) from None
        return works

    def wait(self, works: list[Any]) -> None:
        try:
            for work, _ in works:
                if work is not None:
                    self.wait_timer.wait(work)
        except RuntimeError as error:
            works.clear()
            work = None
            raise ChannelError(self.peer, str(error)) from None

    def wait_tensors(self, works: list[Any]) -> list[Tensor]:
        """Wait until the given receives are complete, and return their tensors on this rank's device."""
        self.wait(works)
        if self.staged:
            return [tensor.to(self.device) for _, tensor in works]
        return [tensor for _, tensor in works]

    def buffer_factories(self, metas: Sequence[TensorMeta]) -> list[Callable[[], Tensor]]:
        """Functions that allocate the receive buffers for these tensors."""
        made: list[Callable[[], Tensor]] = []
        for meta in metas:
            strides = tuple(math.prod(meta.shape[i + 1 :]) for i in range(len(meta.shape)))
            # In half the time of torch.empty.
            made.append(partial(torch.empty_strided, meta.shape, strides, dtype=meta.dtype, device=self.buffer_device))
        return made

    def close(self) -> None:
        self.group = None


def to_contiguous(tensor: Tensor) -> Tensor:
    """The tensor in contiguous memory, with conjugate and negative bits resolved."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


# ── process groups ───────────────────────────────────────────────────────────────────────────────────────────────


def uses_nccl(device: torch.device) -> bool:
    """Whether ranks on this device communicate by NCCL: on GPUs, if the default group has an NCCL backend."""
    return device.type == "cuda" and dist.is_nccl_available() and "nccl" in dist.get_backend()


def open_group(sockets: PipelineSockets, name: str, ranks: Sequence[int], rank: int, device: torch.device) -> Group:
    """Create a group of ``ranks``, in which this process is ``rank``: of NCCL if ``device`` uses it, else of gloo.

    All gloo groups share the gloo device of ``sockets`` and its thread. By default each group has its own.
    """
    store = PrefixStore(name, sockets.store)
    index = list(ranks).index(rank)
    if uses_nccl(device):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = sockets.timeout
        before = {name: os.environ.get(name) for name in _NCCL_ENVIRONMENT}
        os.environ.update(_NCCL_ENVIRONMENT)
        try:
            group = dist.ProcessGroupNCCL(store, index, len(ranks), options)
        finally:
            for variable, value in before.items():
                if value is None:
                    del os.environ[variable]
                else:
                    os.environ[variable] = value
        sockets.nccl.append(group)
        return group
    options = gloo_options()
    options._devices = [sockets.device]
    options._timeout = sockets.timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, index, len(ranks), options)
