"""Automatic balancing of partitions by measured time or memory.

Both argument orders are accepted: ``balance_by_time(2, model, sample)`` of torchgpipe 0.0.7, and
``balance_by_time(model, sample, partitions=2)`` of 0.0.2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock import hooks

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

Device = torch.device | int | str


def balance_by_time(*args: Any, timeout: float = 1.0, device: Device | None = None, **kwargs: Any) -> list[int]:
    """``(partitions, module, sample)``: balance the time of forward and backward, measured for about ``timeout`` s.

    Layers are measured in training mode on ``device``, by default the current GPU if there is one.
    """
    return _balance(ps.balance_by_time, "sample", args, kwargs, device, timeout=timeout)


def balance_by_size(
    *args: Any, chunks: int = 1, param_scale: float = 2.0, device: Device | None = None, **kwargs: Any
) -> list[int]:
    """``(partitions, module, input)``: balance the memory of activations and of parameters times ``param_scale``.

    ``input`` is a mini-batch that will be split into ``chunks``. Typical scales: 2 for SGD (parameters and gradients),
    3 for SGD with momentum, 4 for Adam.
    """
    return _balance(ps.balance_by_size, "input", args, kwargs, device, chunks=chunks, param_scale=param_scale)


def _balance(
    function: Callable[..., list[int]],
    value: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: Device | None,
    **options: Any,
) -> list[int]:
    """Call ``function`` with arguments in either order. In 0.0.2 the last one is always named ``sample``."""
    old = bool(args) and isinstance(args[0], nn.Module)
    names = ("module", value, "partitions") if old else ("partitions", "module", value)
    named = {value if name == "sample" else name: argument for name, argument in kwargs.items()}
    given = {"partitions": 1, **dict(zip(names, args, strict=False)), **named}
    if {*names[: len(args)]} & named.keys() or given.keys() != {*names} or len(args) > len(names):
        got = [*(type(argument).__name__ for argument in args), *(f"{name}=…" for name in kwargs)]
        raise TypeError(
            f"{function.__name__}() takes (partitions, module, {value}), or (module, {value}, partitions=n), got {got}"
        )
    module, partitions = given["module"], given["partitions"]
    _check_partitions(len(module), partitions)
    if "timeout" in options and any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    with hooks.with_training_modes([(part, True) for part in module.modules()]):
        return function(module.train(), (given[value],), partitions, device=device, **options)


def _check_partitions(length: int, partitions: int) -> None:
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if length < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({length} < {partitions})")


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """The number of costs in each partition: the largest sum is as small as possible."""
    _check_partitions(len(cost), partitions)
    return hooks.partition(cost, partitions)


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Split into consecutive non-empty parts whose largest sum is as small as possible."""
    items = iter(sequence)
    return [list(islice(items, count)) for count in balance_cost(sequence, partitions)]


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, on a device and in training mode."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()
