"""Lanes between two processes, over a process group of two for each direction.

Both ends know what a message looks like before it is sent, so nothing but the tensors' data travels.
"""

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
from penstock.engine.message import Message
from penstock.engine.meta import MessageMeta, TensorMeta, meta_of, require_dense
from penstock.errors import PlanError

__all__ = ["BackwardLane", "ChannelError", "ForwardLane", "Wire"]


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
                tensor = _in_order(tensor)
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


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor, its memory as its values say: not strided, and not waiting to be conjugated or negated."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


class _ProcessLane:
    """One edge in one direction: what each micro-batch's message consists of, and what is under way."""

    def __init__(self, wire: Wire, name: str, tensors: Sequence[Sequence[TensorMeta]]) -> None:
        self.wire = wire
        self.waited = wire.waited
        self.name = name
        self.tensors = tensors
        self.makers = [wire.makers(row) for row in tensors]
        self.one = [len(row) == 1 and math.prod(row[0].shape) > 0 and not wire.staged for row in tensors]
        self.under_way: dict[int, Any] = {}  # works with their tensors: a list of pairs, or one pair
        self.landed: dict[int, list[Tensor]] = {}

    def post(self, microbatch: int) -> None:
        if not self.one[microbatch]:
            self.under_way[microbatch] = self.wire.receive(self.makers[microbatch])
            return
        buffer, wire = self.makers[microbatch][0](), self.wire
        try:
            self.under_way[microbatch] = (wire.group.recv([buffer], wire.there, 0), buffer)
        except RuntimeError as error:
            raise ChannelError(wire.peer, str(error)) from None

    def land(self, microbatch: int) -> None:
        """Wait until the message is there to be taken."""
        if self.one[microbatch]:
            self.landed[microbatch] = [self.take_one(microbatch)]
        else:
            self.landed[microbatch] = self.wire.finish(self.under_way.pop(microbatch))

    def sent(self, microbatch: int) -> None:
        if self.one[microbatch]:
            self.take_one(microbatch)
        else:
            self.wire.wait(self.under_way.pop(microbatch))

    # Most messages are one tensor. The ways of these are short: no lists, and no calls but torch's.

    def send_one(self, microbatch: int, tensor: Tensor) -> None:
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = _in_order(tensor)
        wire = self.wire
        try:
            self.under_way[microbatch] = (wire.group.send([tensor], wire.there, 0), tensor)
        except RuntimeError as error:
            raise ChannelError(wire.peer, str(error)) from None

    def take_one(self, microbatch: int) -> Tensor:
        """The tensor of a send or receive that is under way, once it is over."""
        work: Any
        tensor: Tensor
        work, tensor = self.under_way.pop(microbatch)
        start = perf_counter()
        try:
            work.wait()
            self.waited.seconds += perf_counter() - start
        except RuntimeError as error:
            work = None  # an error keeps this frame alive, and a connection is closed with the last reference to it
            raise ChannelError(self.wire.peer, str(error)) from None
        return tensor

    def close(self) -> None:
        self.under_way.clear()
        self.landed.clear()


class ForwardLane(_ProcessLane):
    """Outputs to the next stage, of which ``metas`` says what each micro-batch's looks like."""

    def __init__(self, wire: Wire, name: str, metas: Sequence[MessageMeta]) -> None:
        for meta in metas:
            require_dense(meta, name)
        super().__init__(wire, name, [[tensor.in_memory() for tensor in meta.tensors()] for meta in metas])
        self.metas = metas
        self.turned = [any(tensor.order is not None for tensor in meta.tensors()) for meta in metas]

    def send(self, microbatch: int, message: Message) -> None:
        tensors = _checked(message, self.metas[microbatch], self.name)
        if self.turned[microbatch]:
            pairs = zip(self.metas[microbatch].tensors(), tensors, strict=True)
            tensors = [meta.to_memory(tensor) for meta, tensor in pairs]
        if self.one[microbatch]:
            self.send_one(microbatch, tensors[0])
        else:
            self.under_way[microbatch] = self.wire.send(tensors)

    def take(self, microbatch: int) -> Message:
        meta = self.metas[microbatch]
        tensors: list[Any] = self.landed.pop(microbatch)
        if self.turned[microbatch]:
            tensors = [own.from_memory(tensor) for own, tensor in zip(meta.tensors(), tensors, strict=True)]
        if len(tensors) != len(meta.leaves):
            coming = iter(tensors)
            tensors = [next(coming) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
        return Message(tensors, meta.spec, meta.wants, meta.shared)


class BackwardLane(_ProcessLane):
    """Gradients back to the stage before, for those of its outputs that ``present`` says get one."""

    def __init__(
        self, wire: Wire, name: str, metas: Sequence[MessageMeta], present: Sequence[Sequence[bool]]
    ) -> None:
        tensors: list[list[TensorMeta]] = [
            [meta.leaves[i] for i, there in zip(meta.wants, row, strict=True) if there]
            for meta, row in zip(metas, present, strict=True)
        ]
        super().__init__(wire, name, tensors)
        self.present = present

    def send(self, microbatch: int, grads: Sequence[Tensor | None]) -> None:
        if self.one[microbatch] and len(grads) == 1 and (only := grads[0]) is not None:
            self.send_one(microbatch, only)
            return
        metas = self.tensors[microbatch]
        if len(metas) != len(grads):
            grads = [grad for grad, there in zip(grads, self.present[microbatch], strict=True) if there]
        tensors: list[Tensor] = []
        for grad, meta in zip(grads, metas, strict=True):
            if grad is None:  # expected, but the loss did not depend on it this time
                grad = torch.zeros(meta.shape, dtype=meta.dtype, device=self.wire.device)
            tensors.append(grad)
        if self.one[microbatch]:
            self.send_one(microbatch, tensors[0])
        else:
            self.under_way[microbatch] = self.wire.send(tensors)

    def take(self, microbatch: int) -> Sequence[Tensor | None]:
        present = self.present[microbatch]
        tensors = self.landed.pop(microbatch)
        if len(tensors) == len(present):
            return tensors
        coming = iter(tensors)
        return [next(coming) if there else None for there in present]


def _checked(message: Message, meta: MessageMeta, name: str) -> list[Tensor]:
    """The tensors of a message, if it is what the other side expects."""
    leaves, spec, wants, _ = message
    if spec is None and meta.spec is None and len(wants) == len(meta.wants):
        expected, found = meta.leaves[0], leaves[0]
        if found.dtype is expected.dtype and found.shape == expected.shape:
            return leaves
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
