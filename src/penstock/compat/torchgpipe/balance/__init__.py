"""How many layers each partition takes, so that partitions are even in time or in memory.

Both orders of arguments are understood: ``balance_by_time(2, model, sample)`` as in torchgpipe 0.0.7, and
``balance_by_time(model, sample, partitions=2)`` as in 0.0.2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.compat.torchgpipe.balance import blockpartition
from penstock.compat.torchgpipe.balance.profile import in_training, measured_on, refuse_gradients
from penstock.split import balance as core

__all__ = ["balance_by_size", "balance_by_time", "balance_cost"]

Device = torch.device | int | str


def balance_by_time(*args: Any, timeout: float = 1.0, device: Device | None = None, **kwargs: Any) -> list[int]:
    """``(partitions, module, sample)``: even in the time of forward and backward, measured for about ``timeout`` s.

    Layers are measured on ``device``: by default a GPU, if there is one. The module is left as it was.
    """
    partitions, module, sample = _arguments("balance_by_time", "sample", args, kwargs)
    refuse_gradients(module)
    with in_training(module):
        return core.balance_by_time(module, (sample,), partitions, timeout=timeout, device=measured_on(device))


def balance_by_size(
    *args: Any, chunks: int = 1, param_scale: float = 2.0, device: Device | None = None, **kwargs: Any
) -> list[int]:
    """``(partitions, module, input)``: even in memory, of parameters times ``param_scale`` and of activations.

    ``input`` is a mini-batch, of which ``chunks`` micro-batches are made. A scale of 2 is for parameters and gradients
    alone; SGD with momentum takes 3, Adam 4.
    """
    partitions, module, input = _arguments("balance_by_size", "input", args, kwargs)
    with in_training(module):
        return core.balance_by_size(
            module, (input,), partitions, chunks=chunks, param_scale=param_scale, device=measured_on(device)
        )


def balance_cost(cost: Sequence[float], partitions: int) -> list[int]:
    """How many of the costs each of the partitions takes."""
    return [len(part) for part in blockpartition.solve(cost, partitions)]


def _arguments(
    function: str, value: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, nn.Sequential, Any]:
    """The number of partitions, the module and the sample, of either order; 0.0.2 always calls the last ``sample``."""
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
        found = f"missing are {', '.join(missing)}" if missing else f"there are {len(args)} positional arguments"
        raise TypeError(
            f"{function}() takes (partitions, module, {value}), or (module, {value}, partitions=n): {found}"
        )
    blockpartition.check(len(given["module"]), given["partitions"])
    return given["partitions"], given["module"], given[value]
