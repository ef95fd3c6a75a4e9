"""A clock for hardware that is not present: operations run on this machine, and their FLOPs and bytes are counted.

An operation takes the longest of its FLOPs at the rate that the hardware reaches, of the bytes that it reads and writes
at the rate of its memory, and of the launch latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from penstock._torch import TorchDispatchMode, pytree
from penstock.profile.analytic import Hardware
from penstock.profile.timing import Clock, Elapsed
from penstock.split.measure import tensor_bytes

LAUNCH = 2e-6  # seconds to launch an operation: an assumption
_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")  # they read as much as they return
_NO_TRAFFIC = (  # views that are not marked as such, and allocations
    "aten::detach", "aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided",
    "aten::new_empty_strided",
)  # fmt: skip


def analytic_clock(hardware: Hardware) -> Clock:
    """A clock that returns the time that the operations would take on ``hardware``."""

    def clock(work: Callable[[], object], devices: set[torch.device]) -> Elapsed:
        with _CostCounter(hardware) as counter:
            work()
        return lambda: counter.seconds

    return clock


class _CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of all operations inside the block."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware, self.seconds = hardware, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        moved = _bytes_moved(func, (args, kwargs), result)
        if moved:
            products = self.hardware.compute(_flops(func, args, kwargs, result))
            self.seconds += max(products, self.hardware.move(moved), LAUNCH)
        return result


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """FLOPs of matrix products, convolutions and attention; 0 for all other operations."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    name = func._schema.name
    if not name.startswith("aten::_scaled_dot_product"):  # torch does not count the CPU's kernels
        return 0.0
    query, key = args[1:3] if name.endswith("backward") else args[:2]
    forward: float = 4.0 * query.numel() * key.shape[-2]
    return 2.5 * forward if name.endswith("backward") else forward


def _bytes_moved(func: Any, arguments: Any, result: Any) -> float:
    """Bytes read and written: none by views and allocations."""
    schema = func._schema
    if schema.name in _NO_TRAFFIC or (func.is_view and not schema.is_mutable):
        return 0.0
    if schema.name in _LOOKUPS:
        return 2 * _tensor_bytes(result)
    return _tensor_bytes(arguments) + _tensor_bytes(result)


def _tensor_bytes(value: Any) -> float:
    return float(sum(tensor_bytes(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)))
