"""What a message looks like without its data: shapes, dtypes, structure. Known before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.message import Message
from penstock.engine.tree import Spec, flatten, unflatten
from penstock.errors import PlanError

__all__ = ["MessageMeta", "TensorMeta", "meta_of", "order_of", "require_dense"]


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and dtype. Only dense ones travel.

    ``order`` is that of its dimensions in memory, where it is another one: tensors arrive as they were laid out, for
    what a layer draws, and how fast it is, may depend on that.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: torch.layout = torch.strided
    order: tuple[int, ...] | None = None

    def __str__(self) -> str:
        kind = "" if self.layout is torch.strided else f" {str(self.layout).removeprefix('torch.')}"
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]{kind}"

    def __reduce__(self) -> tuple[Any, ...]:
        if self.layout is torch.strided and self.order is None:
            return TensorMeta, (self.shape, self.dtype)
        return TensorMeta, (self.shape, self.dtype, self.layout, self.order)

    def in_memory(self) -> TensorMeta:
        """What is sent: the tensor with its dimensions as they are in memory."""
        return self if self.order is None else TensorMeta(tuple(self.shape[d] for d in self.order), self.dtype)

    def to_memory(self, tensor: Tensor) -> Tensor:
        return tensor if self.order is None else tensor.permute(self.order)

    def from_memory(self, tensor: Tensor) -> Tensor:
        """The tensor from what was sent of it."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True)
class MessageMeta:
    """A message without its tensors' data; other leaves are themselves. The rest is as in ``Message``."""

    leaves: tuple[Any, ...]
    spec: Spec
    wants: tuple[int, ...]
    shared: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # A structure travels as an example of itself: torch's own pickles of structures are deprecated.
        example = None if self.spec is None else unflatten(list(range(len(self.leaves))), self.spec)
        return _restored, (self.leaves, self.spec is None, example, self.wants, self.shared)

    def tensors(self) -> list[TensorMeta]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.leaves)) + ")"


def _restored(
    leaves: tuple[Any, ...], single: bool, example: Any, wants: tuple[int, ...], shared: tuple[int, ...]
) -> MessageMeta:
    return MessageMeta(leaves, None if single else flatten(example)[1], wants, shared)


def meta_of(message: Message) -> MessageMeta:
    """The meta of a message."""
    leaves, spec, wants, shared = message
    metas = tuple(_tensor_meta(x) if isinstance(x, Tensor) else x for x in leaves)
    return MessageMeta(metas, spec, tuple(wants), tuple(shared))


def _tensor_meta(tensor: Tensor) -> TensorMeta:
    if tensor.is_nested:
        return TensorMeta((), tensor.dtype, torch.jagged)
    return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.layout, order_of(tensor))


def order_of(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the widest strides to the narrowest; None where they are in order, or not told apart."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = [step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    wide = sorted((d for d, step in enumerate(strides) if step is not None), key=lambda d: -tensor.stride()[d])
    if wide == sorted(wide) or len({strides[d] for d in wide}) < len(wide):
        return None
    places = iter(wide)
    return tuple(d if step is None else next(places) for d, step in enumerate(strides))


def require_dense(meta: MessageMeta, stage: str) -> None:
    """Refuse what a buffer of some shape and dtype cannot receive."""
    for leaf in meta.tensors():
        if leaf.layout is not torch.strided:
            raise PlanError(
                f"{stage} gives a {leaf} tensor to one in another process: give it the dense tensors that this one "
                "consists of, or cut elsewhere"
            )
