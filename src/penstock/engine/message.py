"""What travels between stages: a value taken apart, joined where edges meet, parted where they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.tree import LEAF, Row, Spec, flatten
from penstock.errors import PlanError

__all__ = ["Message", "depart", "depart_apart", "merge", "share_out", "tensor_message"]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
_PythonNode = torch._C._FunctionBase
_FIRST = (0,)
_new: Callable[..., Any] = tuple.__new__


class Message(NamedTuple):
    """A value on its way to another stage: leaves, structure, and which leaves want a gradient back.

    ``shared`` are the leaves that go to other stages as well, or are other leaves too, in whole or in part: none of
    these stages may change them in place.
    """

    leaves: list[Any]
    spec: Spec
    wants: Sequence[int]
    shared: Sequence[int] = ()

    def detached(self) -> Message:
        """The same value apart from any graph."""
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)

    def alone(self) -> Message:
        """The same value apart from any graph, and from other micro-batches.

        These are parts of one tensor, and share its version counter: a stage that changes one of them in place would
        spoil what was saved of the others.
        """
        leaves = [_unsafe_view(leaf.detach(), leaf.shape) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)


def merge(messages: Sequence[Message]) -> tuple[Message, list[int]]:
    """The messages of several edges as one, and how many of the wanted gradients belong to each."""
    leaves: list[Any] = []
    wants: list[int] = []
    shared: list[int] = []
    for message in messages:
        wants.extend(len(leaves) + i for i in message.wants)
        shared.extend(len(leaves) + i for i in message.shared)
        leaves.extend(message.leaves)
    row = Row(tuple(message.spec for message in messages), tuple(len(message.leaves) for message in messages))
    return Message(leaves, row, wants, shared), [len(message.wants) for message in messages]


def share_out(grads: Sequence[Tensor | None], shares: Sequence[int]) -> list[Sequence[Tensor | None]]:
    """The gradients that go back over each edge."""
    return [grads[a:b] for a, b in pairwise(accumulate(shares, initial=0))]


def tensor_message(tensor: Tensor, wants: Sequence[int], shared: Sequence[int] = ()) -> Message:
    """The message that is a tensor, as most are; made as a plain tuple is, which takes half the time."""
    message: Message = _new(Message, ([tensor], LEAF, wants, shared))
    return message


def _edge(tensor: Tensor) -> GradientEdge:
    """``get_gradient_edge``, without its checks."""
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, _PythonNode):  # a C++ node that points to it keeps it alive
        return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn)
    edge: GradientEdge = _new(GradientEdge, (node, tensor.output_nr, None))
    return edge


def depart(output: Any, *, stage: int | None = None) -> tuple[Message, Sequence[GradientEdge]]:
    """An output as a message, its data apart from its graph: what is sent can be freed while the graph stays.

    ``stage`` is where it comes from, if it goes to another one: then no tensors may be hidden in it.
    """
    if isinstance(output, Tensor):
        if output.requires_grad:
            return tensor_message(output.detach(), _FIRST), (_edge(output),)
        return tensor_message(output.detach(), ()), ()
    leaves, spec = flatten(output)
    wants: list[int] = []
    roots: list[GradientEdge] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                wants.append(i)
                roots.append(_edge(leaf))
            leaves[i] = leaf.detach()
        elif stage is not None and type(leaf) not in PLAIN:
            _refuse_hidden_tensors(leaf, stage)
    return Message(leaves, spec, wants, _overlapping(leaves)), roots


def _refuse_hidden_tensors(leaf: Any, stage: int) -> None:
    """An object that nobody can take apart would take its tensors' graph along, or lose their gradients."""
    members = {**getattr(leaf, "__dict__", {})}
    members |= {name: getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())}
    hidden = [name for name, value in members.items() if isinstance(value, Tensor)]
    if hidden:
        raise PlanError(
            f"stage {stage} gives a {type(leaf).__name__} with a tensor in it ({hidden[0]}) to the next one: let "
            "tensors, and tuples, lists and dicts of tensors, cross between stages, or cut elsewhere"
        )


def depart_apart(outputs: Any, count: int, stage: int | None = None) -> tuple[list[Message | None], list[GradientEdge]]:
    """One message for each edge out of the stage, and the ends of the graph of all of them."""
    if not isinstance(outputs, tuple) or len(outputs) != count:
        found = f"{len(outputs)} values" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
        raise PlanError(f"a stage with {count} edges to later stages gave {found}: give a tuple with a value for each")
    parts = [depart(output, stage=stage) for output in outputs]
    tensors = [[x for x in message.leaves if isinstance(x, Tensor)] for message, _ in parts]
    uses = Counter(storage for row in tensors for storage in {_storage(x) for x in row})
    messages: list[Message | None] = []
    for message, _ in parts:
        elsewhere = [i for i, x in enumerate(message.leaves) if isinstance(x, Tensor) and uses[_storage(x)] > 1]
        shared = sorted({*elsewhere, *message.shared})
        messages.append(message._replace(shared=shared) if elsewhere else message)
    return messages, [root for _, roots in parts for root in roots]


def _overlapping(leaves: Sequence[Any]) -> Sequence[int]:
    """The leaves that have memory in common with another one."""
    dense = [(i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.layout is torch.strided]
    if len(dense) < 2 or len({_storage(x) for _, x in dense}) == len(dense):
        return ()
    pairs = [(i, j) for (i, a), (j, b) in combinations(dense, 2) if _storage(a) == _storage(b) and _overlap(a, b)]
    return sorted({i for pair in pairs for i in pair})


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors in one storage have an element in common."""
    if a.dtype != b.dtype or not a.numel() or not b.numel():
        return a.numel() > 0 and b.numel() > 0
    first = min(a.storage_offset(), b.storage_offset())
    places = [(tuple(x.shape), x.stride(), x.storage_offset() - first) for x in (a, b)]
    return places[0] == places[1] or _meet(*places)


_Place = tuple[tuple[int, ...], tuple[int, ...], int]


@lru_cache(maxsize=256)
def _meet(a: _Place, b: _Place) -> bool:
    ends = [at + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) for shape, strides, at in (a, b)]
    with _disable_current_modes(), torch.device("cpu"):
        seen = torch.zeros(max(ends) + 1, dtype=torch.bool)
        seen.as_strided(*a).fill_(True)
        return bool(seen.as_strided(*b).any())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
