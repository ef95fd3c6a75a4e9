"""Lanes between two processes, over a process group of two for each direction.

Both ends know what a message looks like before it is sent, so nothing but the tensors' data travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.engine.channel.lane import Passage, passage
from penstock.engine.channel.single import Berth, GradientBerth, Line, OutputBerth
from penstock.engine.channel.wire import Wire
from penstock.engine.message import Message
from penstock.engine.meta import MessageMeta, TensorMeta, meta_of, require_dense
from penstock.errors import PlanError

__all__ = ["BackwardLane", "ForwardLane", "ProcessLane"]


class ProcessLane:
    """One edge in one direction: what each micro-batch's message consists of, and what is under way."""

    def __init__(self, wire: Wire, name: str, tensors: Sequence[Sequence[TensorMeta]]) -> None:
        self.wire = wire
        self.name = name
        self.tensors = tensors
        self.makers = [wire.makers(row) for row in tensors]
        self.under_way: dict[int, list[Any]] = {}  # works with their tensors
        self.landed: dict[int, list[Tensor]] = {}
        self.lines: dict[MessageMeta | TensorMeta, Line] = {}
        self.berths: dict[int, Berth] = {}  # of messages of one tensor

    def at(self, microbatch: int) -> Passage:
        metas = self.tensors[microbatch]
        if len(metas) != 1 or not math.prod(metas[0].shape) or self.wire.staged or not self.alone(microbatch):
            return passage(self, microbatch)
        if microbatch not in self.berths:
            self.berths[microbatch] = self.berth(microbatch)
        return self.berths[microbatch].passage

    def alone(self, microbatch: int) -> bool:
        """Whether there is nothing to a message but its tensors."""
        raise NotImplementedError

    def berth(self, microbatch: int) -> Berth:
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
        for berth in self.berths.values():
            berth.clear()


class ForwardLane(ProcessLane):
    """Outputs to the next stage, of which ``metas`` says what each micro-batch's looks like."""

    def __init__(self, wire: Wire, name: str, metas: Sequence[MessageMeta]) -> None:
        for meta in metas:
            require_dense(meta, name)
        super().__init__(wire, name, [[tensor.in_memory() for tensor in meta.tensors()] for meta in metas])
        self.metas = metas
        self.turned = [any(tensor.order is not None for tensor in meta.tensors()) for meta in metas]

    def alone(self, microbatch: int) -> bool:
        return self.metas[microbatch].spec is None and not self.turned[microbatch]

    def berth(self, microbatch: int) -> Berth:
        meta = self.metas[microbatch]
        if meta not in self.lines:
            refuse = partial(_refuse, meta=meta, name=self.name)
            self.lines[meta] = Line(self.wire, meta.leaves[0], meta.wants, meta.shared, refuse)
        return OutputBerth(self.lines[meta])

    def send(self, microbatch: int, payload: Message) -> None:
        meta = self.metas[microbatch]
        tensors = _checked(payload, meta, self.name)
        if self.turned[microbatch]:
            tensors = [own.to_memory(tensor) for own, tensor in zip(meta.tensors(), tensors, strict=True)]
        self.under_way[microbatch] = self.wire.send(tensors)

    def take(self, microbatch: int) -> Message:
        meta, coming = self.metas[microbatch], iter(self.landed.pop(microbatch))
        leaves = [leaf.from_memory(next(coming)) if isinstance(leaf, TensorMeta) else leaf for leaf in meta.leaves]
        return Message(leaves, meta.spec, meta.wants, meta.shared)


class BackwardLane(ProcessLane):
    """Gradients back to the stage before, for those of its outputs that ``present`` says get one."""

    def __init__(self, wire: Wire, name: str, metas: Sequence[MessageMeta], present: Sequence[Sequence[bool]]) -> None:
        tensors: list[list[TensorMeta]] = [
            [meta.leaves[i] for i, there in zip(meta.wants, row, strict=True) if there]
            for meta, row in zip(metas, present, strict=True)
        ]
        super().__init__(wire, name, tensors)
        self.present = present

    def alone(self, microbatch: int) -> bool:
        return len(self.present[microbatch]) == 1

    def berth(self, microbatch: int) -> Berth:
        (meta,) = self.tensors[microbatch]
        if meta not in self.lines:
            self.lines[meta] = Line(self.wire, meta)
        return GradientBerth(self.lines[meta])

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


def _checked(message: Message, meta: MessageMeta, name: str) -> list[Tensor]:
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
    _refuse(message, meta, name)


def _refuse(message: Message, meta: MessageMeta, name: str) -> NoReturn:
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
