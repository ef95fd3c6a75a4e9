"""Messages between stages: a value as its leaves and structure, and the metadata that describes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, increment_version

from penstock._torch import PythonNode, pytree, storage_id, unsafe_view
from penstock.errors import PlanError
from penstock.split.sample import Broadcast

# ── values: tensors, and tuples, lists, dicts and dataclasses of tensors, None and plain Python values ────────────────


@dataclass(frozen=True)
class TupleSpec:
    """The structure of a tuple of values, each with its number of leaves."""

    specs: tuple[Spec, ...]
    sizes: tuple[int, ...]


Spec: TypeAlias = "pytree.TreeSpec | TupleSpec | None"

Grads: TypeAlias = Sequence[Tensor | None]  # gradients sent back over an edge; None for a tensor without one

LEAF: Spec = None  # the structure of a single tensor, the most common value, for which no pytree is traversed


def flatten(value: Any) -> tuple[list[Any], Spec]:
    """The leaves of a value, and its structure."""
    if isinstance(value, Tensor):
        return [value], LEAF
    leaves, spec = pytree.tree_flatten(value)
    while any(map(_register_dataclass, leaves)):
        leaves, spec = pytree.tree_flatten(value)
    return leaves, spec


def _register_dataclass(leaf: Any) -> bool:
    """Make the dataclass of a leaf a node of pytrees; False if it is none, or has attributes besides its fields."""
    kind = type(leaf)
    if not is_dataclass(leaf) or kind in pytree.SUPPORTED_NODES or isinstance(leaf, (type, Broadcast)):
        return False
    names = [field.name for field in fields(leaf)]
    if not all(hasattr(leaf, name) for name in names) or not getattr(leaf, "__dict__", {}).keys() <= set(names):
        return False

    def unflatten_fields(values: Iterable[Any], context: Any) -> Any:
        made = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    pytree.register_pytree_node(kind, lambda value: ([getattr(value, name) for name in names], None), unflatten_fields)
    return True


def unflatten(leaves: list[Any], spec: Spec) -> Any:
    """The inverse of ``flatten``; for a ``TupleSpec``, the tuple of its values."""
    if isinstance(spec, TupleSpec):
        parts = [leaves[a:b] for a, b in pairwise(accumulate(spec.sizes, initial=0))]
        return tuple(unflatten(part, own) for part, own in zip(parts, spec.specs, strict=True))
    return leaves[0] if spec is None else pytree.tree_unflatten(leaves, spec)


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Apply ``function`` to each tensor in ``value``."""
    leaves, spec = flatten(value)
    return unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def detach_tensors(value: Any) -> Any:
    return map_tensors(value, Tensor.detach)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────

PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)

_new_tuple: Callable[..., Any] = tuple.__new__


class Message(NamedTuple):
    """A value that is sent to another stage: its leaves, its structure, and ``wants``, the leaves that want a gradient.

    ``shared`` are the leaves that other stages receive too, or that share memory with other leaves: no stage may change
    them in place.
    """

    leaves: list[Any]
    spec: Spec
    wants: Sequence[int]
    shared: Sequence[int] = ()

    def detached(self) -> Message:
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return self._replace(leaves=leaves)


class BorrowedInputs:
    """The caller's messages as inputs of the stages: detached, with separate version counters.

    Micro-batches are views of one tensor and share its version counter: a stage that changes one of them in place would
    invalidate tensors that autograd saved from the others. The memory is the caller's, so every graph that saved the
    tensor must detect an in-place change. If a stage changes it, the caller's version counter is incremented at the end
    of the block. If the caller changes it before the backward, ``check_unchanged`` increments the stages' counters.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages: list[Message] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for message in messages:
            leaves = list(message.leaves)
            for i, original in enumerate(leaves):
                if isinstance(original, Tensor):
                    leaves[i] = borrowed = unsafe_view(original.detach(), original.shape)
                    if not borrowed.is_inference() and not original.is_inference():
                        self._pairs.append((borrowed, original))
            self.messages.append(message._replace(leaves=leaves))
        self._versions: list[int] = []

    def __enter__(self) -> list[Message]:
        return self.messages

    def __exit__(self, *_: object) -> None:
        for borrowed, original in self._pairs:
            if borrowed._version:
                increment_version(original)
        self._versions = [original._version for _, original in self._pairs]

    def check_unchanged(self) -> None:
        """Before the backward: make autograd fail for saved inputs that the caller has changed since the forward."""
        for (borrowed, original), version in zip(self._pairs, self._versions, strict=True):
            if original._version != version:
                increment_version(borrowed)


def version_counted(leaf: Tensor) -> Tensor:
    """A tensor on the same memory with a version counter, which inference tensors do not have."""
    with torch.inference_mode(False):
        if leaf.layout is not torch.strided or leaf.is_conj() or leaf.is_neg():
            return leaf.clone()
        whole = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return whole.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())


def merge_messages(messages: Sequence[Message]) -> tuple[Message, list[int]]:
    """Merge the messages of several edges; returns also the number of wanted gradients of each edge."""
    leaves: list[Any] = []
    wants: list[int] = []
    shared: list[int] = []
    for message in messages:
        wants.extend(len(leaves) + i for i in message.wants)
        shared.extend(len(leaves) + i for i in message.shared)
        leaves.extend(message.leaves)
    spec = TupleSpec(tuple(message.spec for message in messages), tuple(len(message.leaves) for message in messages))
    return Message(leaves, spec, wants, shared), [len(message.wants) for message in messages]


def split_grads(grads: Grads, sizes: Sequence[int]) -> list[Grads]:
    """The gradients of each edge; without ``sizes`` there is one edge."""
    return [grads] if not sizes else [grads[a:b] for a, b in pairwise(accumulate(sizes, initial=0))]


def tensor_message(tensor: Tensor, wants: Sequence[int], shared: Sequence[int] = ()) -> Message:
    """The message of a single tensor. ``Message.__new__`` would take twice as long."""
    message: Message = _new_tuple(Message, ([tensor], LEAF, wants, shared))
    return message


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """``get_gradient_edge`` without its checks."""
    node = tensor.grad_fn
    if node is None:
        return get_gradient_edge(tensor)
    if isinstance(node, PythonNode):  # kept alive by a C++ node that points to it
        return GradientEdge(node, tensor.output_nr, tensor.view_as(tensor).grad_fn)
    edge: GradientEdge = _new_tuple(GradientEdge, (node, tensor.output_nr, None))
    return edge


def input_edges(messages: Sequence[Message]) -> list[list[GradientEdge]]:
    """The gradient edges, in the caller's graph, of inputs that want a gradient.

    Call this before a stage changes an input in place: a view loses its gradient edge then.
    """
    return [[gradient_edge(message.leaves[i]) for i in message.wants] for message in messages]


def backward_inputs(edges: Sequence[Sequence[GradientEdge]], grads: Sequence[Grads], factor: float | None) -> None:
    """Continue the backward of all micro-batches in the caller's graph."""
    pairs = [
        (edge, grad if factor in (None, 1.0) else grad * factor)
        for edge_row, grad_row in zip(edges, grads, strict=True)
        for edge, grad in zip(edge_row, grad_row, strict=True)
        if grad is not None
    ]
    if pairs:
        torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])


def detach_outputs(output: Any, *, stage: int | None = None) -> tuple[Message, Sequence[GradientEdge]]:
    """An output as a message of detached tensors, and their gradient edges: the data can be freed before the graph.

    ``stage`` is the index of a stage whose output another stage receives: objects with hidden tensors are an error.
    """
    if isinstance(output, Tensor):
        if output.requires_grad:
            return tensor_message(output.detach(), (0,)), (gradient_edge(output),)
        return tensor_message(output.detach(), ()), ()
    leaves, spec = flatten(output)
    wants: list[int] = []
    roots: list[GradientEdge] = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                wants.append(i)
                roots.append(gradient_edge(leaf))
            leaves[i] = leaf.detach()
        elif stage is not None and type(leaf) not in PLAIN_TYPES:
            # The tensors in an object that is not a pytree would keep their graph, or lose their gradients.
            members = {**getattr(leaf, "__dict__", {})}
            members |= {name: getattr(leaf, name, None) for name in getattr(type(leaf), "__slots__", ())}
            hidden = [name for name, value in members.items() if isinstance(value, Tensor)]
            if hidden:
                raise PlanError(
                    f"stage {stage} returns a {type(leaf).__name__} with a tensor in it ({hidden[0]}): return tensors, "
                    "or tuples, lists and dicts of tensors, to the next stage, or cut elsewhere"
                )
    return Message(leaves, spec, wants, overlapping_leaves(leaves)), roots


def detach_outputs_per_edge(
    outputs: Any, count: int, stage: int | None = None
) -> tuple[list[Message], Sequence[GradientEdge]]:
    """One message for each of ``count`` outgoing edges (at least one message), and the gradient edges of all."""
    if count <= 1:
        message, edges = detach_outputs(outputs, stage=stage)
        return [message], edges
    if not isinstance(outputs, tuple) or len(outputs) != count:
        found = f"{len(outputs)} values" if isinstance(outputs, tuple) else f"a {type(outputs).__name__}"
        raise PlanError(f"a stage with {count} edges to later stages returned {found}, not a tuple of {count} values")
    parts = [detach_outputs(output, stage=stage) for output in outputs]
    return mark_shared([message for message, _ in parts]), [root for _, roots in parts for root in roots]


def mark_shared(messages: Sequence[Message], inputs: Sequence[Tensor] = ()) -> list[Message]:
    """Mark leaves that share memory with other leaves of the messages, or with ``inputs``."""
    shared = set(overlapping_leaves([*inputs, *(leaf for message in messages for leaf in message.leaves)]))
    starts = accumulate((len(message.leaves) for message in messages), initial=len(inputs))
    return [
        message._replace(shared=[i for i in range(len(message.leaves)) if start + i in shared])
        for message, start in zip(messages, starts, strict=False)
    ]


def overlapping_leaves(leaves: Sequence[Any]) -> Sequence[int]:
    """The leaves whose storage is also that of another leaf."""
    dense = [(i, storage_id(x)) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.layout is torch.strided]
    if len(dense) < 2:
        return ()
    uses = Counter(storage for _, storage in dense)
    return [i for i, storage in dense if uses[storage] > 1]


# ── metadata of messages: shapes, dtypes and structure, known before a message is sent ───────────────────────────


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's shape and dtype. Only dense tensors can be sent.

    ``order`` is the order of the dimensions in memory, if the tensor is not contiguous. Received tensors have the
    memory layout of the sent ones, because random numbers and speed may depend on it.
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
        """The metadata of the contiguous tensor that is sent, with the dimensions in memory order."""
        return self if self.order is None else TensorMeta(tuple(self.shape[d] for d in self.order), self.dtype)

    def from_memory(self, tensor: Tensor) -> Tensor:
        """The inverse of ``permute(order)``, which was applied before the send."""
        if self.order is None:
            return tensor
        return tensor.permute(sorted(range(len(self.order)), key=self.order.__getitem__))


@dataclass(frozen=True)
class MessageMeta:
    """The metadata of a ``Message``: its tensors are replaced by ``TensorMeta``, other leaves are kept."""

    leaves: tuple[Any, ...]
    spec: Spec
    wants: tuple[int, ...]
    shared: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # A structure is pickled as an example value: torch's pickles of a TreeSpec are deprecated.
        example = None if self.spec is None else unflatten(list(range(len(self.leaves))), self.spec)
        return unpickle_meta, (self.leaves, self.spec is None, example, self.wants, self.shared)

    def tensors(self) -> list[TensorMeta]:
        return [leaf for leaf in self.leaves if isinstance(leaf, TensorMeta)]

    def matches(self, message: Message) -> bool:
        """Whether a message has this metadata, apart from shared leaves and the memory order of dimensions."""
        leaves, spec, wants, _ = message
        if len(leaves) != len(self.leaves) or spec != self.spec or tuple(wants) != self.wants:
            return False
        for leaf, meta in zip(leaves, self.leaves, strict=True):
            if isinstance(leaf, Tensor):
                if not isinstance(meta, TensorMeta) or leaf.shape != meta.shape:
                    return False
                if leaf.dtype is not meta.dtype or leaf.layout is not meta.layout:
                    return False
            elif leaf is not meta and (type(leaf) is not type(meta) or leaf != meta):
                return False
        return True

    def to_message(self, tensors: Iterable[Tensor]) -> Message:
        """The message with these tensors, as received."""
        sent = iter(tensors)
        leaves = [leaf.from_memory(next(sent)) if isinstance(leaf, TensorMeta) else leaf for leaf in self.leaves]
        return Message(leaves, self.spec, self.wants, self.shared)

    def __str__(self) -> str:
        return "(" + ", ".join(map(str, self.leaves)) + ")"


def unpickle_meta(
    leaves: tuple[Any, ...], single: bool, example: Any, wants: tuple[int, ...], shared: tuple[int, ...]
) -> MessageMeta:
    return MessageMeta(leaves, None if single else flatten(example)[1], wants, shared)


def meta_of(message: Message) -> MessageMeta:
    leaves, spec, wants, shared = message
    metas = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.is_nested:
            metas[i] = TensorMeta((), x.dtype, torch.jagged)
        elif isinstance(x, Tensor):
            metas[i] = TensorMeta(tuple(x.shape), x.dtype, x.layout, memory_order(x))
    return MessageMeta(tuple(metas), spec, tuple(wants), tuple(shared))


def memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions from the largest stride to the smallest; None if they are in order, or strides are equal."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    strides = [step if size > 1 else None for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    wide = sorted((d for d, step in enumerate(strides) if step is not None), key=lambda d: -tensor.stride()[d])
    if wide == sorted(wide) or len({strides[d] for d in wide}) < len(wide):
        return None
    places = iter(wide)
    return tuple(d if step is None else next(places) for d, step in enumerate(strides))


def require_dense(meta: MessageMeta, stage: str) -> None:
    """Raise an error for tensors that cannot be received into a buffer of a known shape and dtype."""
    for leaf in meta.tensors():
        if leaf.layout is not torch.strided:
            raise PlanError(
                f"{stage} sends a {leaf} tensor to another process, but only dense tensors can be sent: send the dense "
                "tensors that it consists of, or cut elsewhere"
            )
