"""What a message looks like without its data: shapes, dtypes, structure. Known before anything is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.message import Message
from penstock.engine.tree import Spec, flatten, unflatten

__all__ = ["MessageMeta", "TensorMeta", "meta_of"]


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


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
    metas = tuple(TensorMeta(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in leaves)
    return MessageMeta(metas, spec, tuple(wants), tuple(shared))
