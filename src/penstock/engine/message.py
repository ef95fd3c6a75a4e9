"""What travels between stages: a value taken apart, joined where edges meet, parted where they leave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version
from torch.utils._python_dispatch import _disable_current_modes

from penstock.engine.tree import LEAF, Row, Spec, flatten
from penstock.errors import PlanError

__all__ = [
    "Lent",
    "Message",
    "counting",
    "depart",
    "depart_apart",
    "edge_of",
    "merge",
    "overlapping",
    "passed_on",
    "share_out",
    "tensor_message",
]

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


class Lent:
    """The caller's messages, each alone, for stages to run on. Their tensors' memory is the caller's.

    So whoever has saved a tensor must learn that it was changed in place: the caller's graph, when a stage did it, as
    the block ends; the stages' graphs, when the caller did it before their backward, by ``returned``.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = [message.alone() for message in messages]
        self._pairs = [
            (ours, theirs)
            for message, own in zip(self.messages, messages, strict=True)
            for ours, theirs in zip(message.leaves, own.leaves, strict=True)
            if isinstance(ours, Tensor) and not ours.is_inference() and not theirs.is_inference()
        ]
        self._versions: list[int] = []

    def __enter__(self) -> list[Message]:
        return self.messages

    def __exit__(self, *_: object) -> None:
        for ours, theirs in self._pairs:
            if ours._version:
                increment_version(theirs)
        self._versions = [theirs._version for _, theirs in self._pairs]

    def returned(self) -> None:
        """The caller has had them in between."""
        for (ours, theirs), version in zip(self._pairs, self._versions, strict=True):
            if theirs._version != version:
                increment_version(ours)


def counting(leaf: Tensor) -> Tensor:
    """The same memory in a tensor that counts its changes, which one of inference mode does not."""
    with torch.inference_mode(False):
        if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return leaf.clone()
        whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return whole.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())


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


def edge_of(tensor: Tensor) -> GradientEdge:
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
            return tensor_message(output.detach(), _FIRST), (edge_of(output),)
        return tensor_message(output.detach(), ()), ()
    leaves, spec = flatten(output)
    wants: list[int] = []
    roots: list[GradientEdge] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                wants.append(i)
                roots.append(edge_of(leaf))
            leaves[i] = leaf.detach()
        elif stage is not None and type(leaf) not in PLAIN:
            _refuse_hidden_tensors(leaf, stage)
    return Message(leaves, spec, wants, overlapping(leaves)), roots


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


def passed_on(messages: Iterable[Message | None], shared: Iterable[Tensor]) -> list[Message | None]:
    """The messages of a stage's output, in which what it passes on of its inputs that are ``shared`` is so, too."""
    memory = {_storage(x) for x in shared}
    if not memory:
        return list(messages)
    marked: list[Message | None] = []
    for message in messages:
        if message is not None:
            on = [i for i, x in enumerate(message.leaves) if isinstance(x, Tensor) and _storage(x) in memory]
            message = message._replace(shared=sorted({*on, *message.shared})) if on else message
        marked.append(message)
    return marked


def overlapping(leaves: Sequence[Any]) -> Sequence[int]:
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
    """What tells memory apart; a sparse tensor's is its own."""
    return id(tensor) if tensor.layout is not torch.strided else int(tensor.untyped_storage()._cdata)
