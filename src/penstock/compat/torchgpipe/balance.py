"""Automatic balancing of partitions by measured time or memory.

Both argument orders are accepted: ``balance_by_time(2, model, sample)`` of torchgpipe 0.0.7, and
``balance_by_time(model, sample, partitions=2)`` of 0.0.2.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import nn

import penstock as ps

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

Device = torch.device | int | str


def balance_by_time(*args: Any, timeout: float = 1.0, device: Device | None = None, **kwargs: Any) -> list[int]:
    """``(partitions, module, sample)``: balance the time of forward and backward, measured for about ``timeout`` s.

    Layers are measured in training mode on ``device``, by default the current GPU if there is one.
    """
    partitions, module, sample = _arguments("balance_by_time", "sample", args, kwargs)
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")
    with _training_mode(module):
        return ps.balance_by_time(module, (sample,), partitions, timeout=timeout, device=_device(device))


def balance_by_size(
    *args: Any, chunks: int = 1, param_scale: float = 2.0, device: Device | None = None, **kwargs: Any
) -> list[int]:
    """``(partitions, module, input)``: balance the memory of activations and of parameters times ``param_scale``.

    ``input`` is a mini-batch that will be split into ``chunks``. Typical scales: 2 for SGD (parameters and gradients),
    3 for SGD with momentum, 4 for Adam.
    """
    partitions, module, input = _arguments("balance_by_size", "input", args, kwargs)
    options: dict[str, Any] = {"chunks": chunks, "param_scale": param_scale, "device": _device(device)}
    with _training_mode(module):
        return ps.balance_by_size(module, (input,), partitions, **options)


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """The number of costs in each partition."""
    return [len(part) for part in solve(cost, partitions)]


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Split into consecutive non-empty parts whose largest sum is as small as possible."""
    _check_partitions(len(sequence), partitions)
    sums = list(accumulate(sequence, initial=0.0))
    best: list[tuple[float, list[int]]] = [(total, [end]) for end, total in enumerate(sums)]
    for k in range(2, partitions + 1):  # best[end]: the first ``end`` items in k parts
        best = [
            min(
                ((max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], end]) for cut in range(k - 1, end)),
                default=(inf, []),
            )
            for end in range(len(sums))
        ]
    return [list(sequence[a:b]) for a, b in pairwise([0, *best[-1][1]])]


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, on a device and in training mode."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def _arguments(
    function: str, value: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, nn.Sequential, Any]:
    """``(partitions, module, sample)`` from either argument order; 0.0.2 always names the last one ``sample``."""
    old = bool(args) and isinstance(args[0], nn.Module)
    names = ("module", value, "partitions") if old else ("partitions", "module", value)
    given = {"partitions": 1, **dict(zip(names, args, strict=False))}
    for name, argument in kwargs.items():
        name = value if name == "sample" else name
        if name not in names or name in names[: len(args)]:
            fault = "multiple values for" if name in names else "an unexpected keyword"
            raise TypeError(f"{function}() got {fault} argument {name!r}")
        given[name] = argument
    missing = [name for name in names if name not in given]
    if missing or len(args) > len(names):
        fault = f"missing are {', '.join(missing)}" if missing else f"there are {len(args)} positional arguments"
        raise TypeError(
            f"{function}() takes (partitions, module, {value}), or (module, {value}, partitions=n): {fault}"
        )
    _check_partitions(len(given["module"]), given["partitions"])
    return given["partitions"], given["module"], given[value]


def _check_partitions(length: int, partitions: int) -> None:
    if partitions < 1:
        raise ValueError(f"partitions must be a positive integer ({partitions} < 1)")
    if length < partitions:
        raise ValueError(f"sequence is shorter than intended partitions ({length} < {partitions})")


def _device(device: Device | None) -> torch.device | None:
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return torch.device(device)


@contextmanager
def _training_mode(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
