"""Split a mini-batch into micro-batches along dimension 0, and join their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.engine.message import PLAIN_TYPES, Message, flatten, meta_of, overlapping_leaves, unflatten
from penstock.errors import PlanError
from penstock.split.sample import Broadcast as Broadcast

NUM_SAMPLED = 64  # elements of each tensor that ranks compare: images and padded text have many equal elements
GOLDEN_RATIO = 0.6180339887498949


def leaf_to_device(leaf: Any, device: torch.device) -> Any:
    """A leaf of the inputs or targets on a device, if it is a tensor."""
    if isinstance(leaf, Broadcast):
        return Broadcast(leaf.tensor.to(device, non_blocking=True))
    return leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf


def batch_size(value: Any, what: str) -> int | None:
    """The size of dimension 0, which must be equal for all tensors of ``value``; None without such tensors."""
    leaves = flatten(value)[0]
    sizes: list[int] = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    if not sizes and any(hasattr(leaf, "__array_interface__") and leaf.ndim for leaf in leaves):
        raise PlanError(f"the {what} are NumPy arrays, which are not split into micro-batches: pass tensors")
    if len(set(sizes)) > 1:
        raise PlanError(
            f"the tensors of the {what} disagree on the batch size: their first dimensions are {sizes}. Give each "
            "sample one entry along dimension 0 of every tensor, and wrap a tensor that all samples share, such as "
            "position_ids of shape (1, T), in ps.Broadcast(tensor)"
        )
    return sizes[0] if sizes else None


def sample_values(value: Any, what: str) -> dict[str, str]:
    """Shapes, dtypes and some elements of inputs or targets, as text by name, to detect different samples.

    Leaves that are None are left out. The elements have irregular distances, because elements at regular distances may
    all be padding. They are copied from the device in one copy of a few bytes.
    """
    leaves = [leaf.tensor if isinstance(leaf, Broadcast) else leaf for leaf in flatten(value)[0]]
    metas = meta_of(Message(leaves, None, ())).leaves
    given = [i for i, leaf in enumerate(leaves) if leaf is not None]
    texts = {f"the number of values in the {what}": str(len(leaves))} if given else {}
    for i in given:
        leaf, name = leaves[i], f"value {i} of the {what}"
        texts[name] = str(metas[i]) if isinstance(leaf, (Tensor, *PLAIN_TYPES)) else type(leaf).__name__
        if not isinstance(leaf, Tensor) or type(leaf).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            continue  # such as a DTensor, of which this process has only a part
        dense = leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_meta and not leaf.is_quantized
        if dense and leaf.numel():
            last = leaf.numel() - 1
            places = sorted({0, last, *(round(k * GOLDEN_RATIO % 1 * last) for k in range(NUM_SAMPLED))})
            index = torch.unravel_index(torch.tensor(places, device="cpu"), leaf.shape)  # no copy of a strided tensor
            elements = leaf.detach().as_subclass(Tensor)[index].flatten().tolist()
            texts |= {f"element {at} of {name}": str(element) for at, element in zip(places, elements, strict=True)}
    return texts


def microbatch_sizes(batch: int, microbatches: int) -> tuple[int, ...]:
    """The sizes of the micro-batches: as equal as possible, larger ones first, none empty."""
    count = max(1, min(batch, microbatches))
    small, larger = divmod(batch, count)
    return (small + 1,) * larger + (small,) * (count - larger)


def scatter(value: Any, sizes: Sequence[int]) -> list[Any]:
    """One value per micro-batch. Each gets the plain values, ``Broadcast`` tensors and 0-dimensional tensors."""
    leaves, spec = flatten(value)
    if not leaves or (len(sizes) == 1 and not any(isinstance(leaf, Broadcast) for leaf in leaves)):
        return [value] * len(sizes)
    columns: list[Sequence[Any]] = [
        torch.split(leaf, list(sizes))
        if isinstance(leaf, Tensor) and leaf.dim()
        else [leaf.tensor if isinstance(leaf, Broadcast) else leaf] * len(sizes)
        for leaf in leaves
    ]
    return [unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def can_join(value: Any) -> bool:
    """Whether ``join`` accepts values like this one."""
    return all(isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in flatten(value)[0])


def join(values: Sequence[Any]) -> Any:
    """Join the values of the micro-batches: tensors are concatenated, 0-dimensional tensors are stacked."""
    if len(values) == 1:
        return values[0]
    flat = [flatten(value) for value in values]
    others = [leaf for leaves, _ in flat for leaf in leaves if not isinstance(leaf, (Tensor, *PLAIN_TYPES))]
    if others:
        kinds = " and a ".join(sorted({type(leaf).__name__ for leaf in others}))
        raise PlanError(
            f"outputs with a {kinds} in them cannot be joined over micro-batches: return tensors, or tuples, lists and "
            "dicts of tensors"
        )
    specs = [spec for _, spec in flat]
    if any(spec != specs[0] for spec in specs):
        raise PlanError("the outputs of the micro-batches have different structures and cannot be joined")
    joined: list[Any] = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if all(isinstance(leaf, Tensor) for leaf in column):
            joined.append(torch.cat(column) if column[0].dim() else torch.stack(column))
        else:
            joined.append(column[0] if all(leaf == column[0] for leaf in column) else list(column))
    return unflatten(joined, specs[0])


class SplitInputs(NamedTuple):
    """The micro-batches of a mini-batch: their sizes, their messages and their kinds of call."""

    sizes: tuple[int, ...]
    messages: list[Message]
    variants: tuple[str | None, ...]


def split_inputs(
    value: Any,
    count: Callable[[int], int],
    device: torch.device,
    variant: Callable[[Any], str | None],
    *,
    grad: bool,
    empty: bool = False,
) -> SplitInputs:
    """The micro-batches of ``value`` on ``device``; tensors stay in the caller's graph.

    ``count(samples)`` returns the number of micro-batches, and ``variant(value)`` the kind of call of one of them.
    ``grad`` is the grad mode of the forwards. ``empty`` allows a mini-batch without samples and micro-batches.
    """
    if value is None:
        raise PlanError("there are no inputs: pass the arguments of the model")
    size = batch_size(value, "inputs")
    if size == 0 and empty:
        return SplitInputs((), [], ())
    if size == 0:
        raise PlanError("the mini-batch is empty: its tensors have no entries along dimension 0")
    sizes = microbatch_sizes(size or 1, count(size or 1))
    messages, variants = list[Message](), list[str | None]()
    for part in scatter(value, sizes):
        leaves, spec = flatten(part)
        leaves = [leaf_to_device(leaf, device) for leaf in leaves]
        wants = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        messages.append(Message(leaves, spec, wants, overlapping_leaves(leaves)))
        with torch.set_grad_enabled(grad):
            variants.append(variant(unflatten(leaves, spec)))
    return SplitInputs(sizes, messages, tuple(variants))


def split_targets(targets: Any, sizes: Sequence[int], device: torch.device) -> list[Any]:
    """The targets of each micro-batch, on the last stage's device."""
    size = batch_size(targets, "targets")
    if size is not None and size != sum(sizes):
        raise PlanError(f"the inputs have {sum(sizes)} samples, but the targets have {size}")
    if not sizes:
        return []
    leaves, spec = flatten(targets)
    return scatter(unflatten([leaf_to_device(leaf, device) for leaf in leaves], spec), sizes)
