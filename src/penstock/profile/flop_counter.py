"""What operations take on hardware that is not here: they run on this machine, and are counted.

    F of a layer   addmm ▣ · gelu · addmm ▣     ▣ at the rate of products, if that is longer than to move its bytes
                                                · the bytes that are read and written

An operation takes as long as its products at the rate that the hardware reaches, or as the bytes that it reads and
writes, whichever is longer, and never less than it takes to start it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from penstock._torch import TorchDispatchMode, pytree
from penstock.profile.analytic import Hardware
from penstock.profile.timing import Clock, Span
from penstock.split.measure import tensor_bytes

__all__ = ["analytic_clock"]

LAUNCH = 2e-6  # seconds: an assumption
LOOKED_UP = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")  # read what they give, not all
UNTOUCHED = (  # views that are not called so, and what makes room alone
    "aten::detach", "aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided",
    "aten::new_empty_strided",
)  # fmt: skip


def analytic_clock(hardware: Hardware) -> Clock:
    """A clock that tells what work would take there."""

    def clock(work: Callable[[], object], devices: set[torch.device]) -> Span:
        with _CostCounter(hardware) as counting:
            work()
        return lambda: counting.seconds

    return clock


class _CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what operations take, while they run."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware, self.seconds = hardware, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        moved = _moved(func, (args, kwargs), result)
        if moved:
            products = self.hardware.compute(_operations(func, args, kwargs, result))
            self.seconds += max(products, self.hardware.move(moved), LAUNCH)
        return result


def _operations(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """Of matrix products, convolutions and attention; all else has next to none."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    name = func._schema.name
    if not name.startswith("aten::_scaled_dot_product"):  # here those for a CPU, which torch does not count
        return 0.0
    query, key = args[1:3] if name.endswith("backward") else args[:2]
    forward: float = 4.0 * query.numel() * key.shape[-2]
    return 2.5 * forward if name.endswith("backward") else forward


def _moved(func: Any, given: Any, result: Any) -> float:
    """The bytes that are read and written: none by a view, nor by what makes room alone."""
    made, schema = _tensors(result), func._schema
    if schema.name in UNTOUCHED or (func.is_view and not schema.is_mutable):
        return 0.0
    if schema.name in LOOKED_UP:
        return 2 * _bytes(made)
    return _bytes(_tensors(given)) + _bytes(made)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> float:
    return float(sum(map(tensor_bytes, tensors)))
