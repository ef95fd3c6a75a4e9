"""What is known of torch's functions by their names, and of where in the user's code we are."""

from __future__ import annotations

import sys
from typing import Any

import torch.utils.checkpoint

SHAPE_ONLY = {"zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"}
"""What they give depends on the shape of their input, and not on the numbers in it."""

FIRST_ONLY = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
"""The same, of all their inputs but the first."""

DECIDES = {"__bool__", "__int__", "__float__", "__index__", "__contains__", "item", "tolist", "numpy", "__array__"}
DECIDES |= {"is_nonzero", "equal", "allclose"}
"""They give Python a number of a tensor's."""

ABOUT_GRADIENTS = {"register_hook", "retain_grad"}

_RANDOM = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "rrelu"}
_RANDOM |= {"rand_like", "randn_like", "randint_like", "bernoulli_", "normal_", "uniform_", "random_", "exponential_"}
_RANDOM |= {"geometric_", "log_normal_", "cauchy_"}

_WRITES = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_WRITES |= {"__setitem__"}


def draws(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function, called like this, draws random numbers."""
    if "dropout" in name:  # (input, p, training)
        p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
        return bool(training) and float(p) > 0
    return name in _RANDOM or bool(kwargs.get("dropout_p"))


def writes(name: str) -> bool:
    """Whether a function changes its first argument: ``add_``, ``__iadd__``, ``__setitem__``."""
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def in_reentrant_checkpoint() -> bool:
    code = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def user_line() -> str:
    """Where in the user's code we are, as part of a sentence."""
    frame: Any = sys._getframe(1)
    here = ("/penstock/split/trunk", "/torch/")
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(part in file for part in here) and not file.startswith("<"):
            return f" (at {file}:{frame.f_lineno})"
        frame = frame.f_back
    return ""
