"""How much an optimizer keeps for the parameters that it trains."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.near import did_you_mean

__all__ = ["OptimizerLike", "states_per_byte"]

OptimizerLike = str | float | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, how many times the parameters' bytes, an optimizer, or what makes one from parameters, such as its class."""

STATES = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0, "adagrad": 1.0, "rmsprop": 1.0, "lion": 1.0}
"""Values of an optimizer's state for each value of a parameter, of the same type."""


def states_per_byte(optimizer: OptimizerLike, dtype: torch.dtype) -> float:
    """The bytes of state for each byte of a parameter of this type.

    An optimizer is asked by a step with a small parameter. What does not grow with the parameter (a count of steps, a
    row and a column of it) is left out.
    """
    if optimizer is None:
        return 0.0
    if isinstance(optimizer, str):
        if optimizer.lower() not in STATES:
            hint = did_you_mean(optimizer.lower(), STATES, otherwise=f": known are {', '.join(STATES)}")
            raise PlanError(f"optimizer {optimizer!r} is not known by name{hint}. Its class would do as well")
        return STATES[optimizer.lower()]
    if isinstance(optimizer, bool) or (isinstance(optimizer, int | float) and not 0 <= optimizer < float("inf")):
        raise PlanError(f"optimizer={optimizer!r} must be how many times the bytes of parameters its states take")
    if isinstance(optimizer, int | float):
        return float(optimizer)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
            trial = _trial(optimizer, parameter)
            parameter.grad = torch.ones_like(parameter)
            trial.step()
            state: dict[str, Any] = trial.state[parameter]
    except Exception as error:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise PlanError(
            f"{name} cannot be asked what it keeps ({type(error).__name__}: {error}): say optimizer=2.0, how many "
            "times the bytes of the parameters its states take"
        ) from error
    grown = [value for value in state.values() if isinstance(value, Tensor) and value.numel() == parameter.numel()]
    return sum(value.numel() * value.element_size() for value in grown) / (parameter.numel() * dtype.itemsize)


def _trial(optimizer: Any, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer like this one, for another parameter."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        made: torch.optim.Optimizer = optimizer([parameter])
        return made
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    return other
