"""One kind of call of a model: its arguments with the shapes and dtypes of their tensors, and everything else that a
recording of its forward depends on. It is written as one line of JSON, a key that crosses to ranks without the inputs.

    forward(x, mask=None, scale=1)   called (x, scale=2)
    {"x": {"tensor": [[4, 6], "float32", false]}, "scale": {"=": 2}}
"""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError

PLAIN = (bool, int, float, str)

Parameters = Mapping[str, inspect.Parameter]


def describe(arguments: Mapping[str, Any], parameters: Parameters) -> dict[str, Any]:
    """The arguments of a call as JSON data, without those that are equal to their defaults."""
    names = [name for name in parameters if name in arguments]
    names += [name for name in arguments if name not in parameters]  # in the order in which ``**kwargs`` has them
    found = {}
    for name in names:
        value, parameter = arguments[name], parameters.get(name)
        if value is None or type(value) in PLAIN:
            default = parameter.default if parameter is not None else parameter
            if parameter is not None and type(value) is type(default) and value == default:
                continue
        elif value == () and parameter is not None and parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        found[name] = _describe(value, name)
    return found


def _describe(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        stride = [] if value.layout is not torch.strided or value.is_contiguous() else value.stride()
        return {"tensor": [list(value.shape), str(value.dtype).removeprefix("torch."), value.requires_grad, *stride]}
    if value is None or type(value) in PLAIN:
        return {"=": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_describe(item, f"{name}[{i}]") for i, item in enumerate(value)]}
    if type(value) is torch.Size:
        return {"tuple": [{"=": size} for size in value]}
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {"dict": [[key, _describe(item, f"{name}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if isinstance(value, enum.Enum):
        return _describe(value.value, name)
    raise PlanError(
        f"the argument {name} is a {type(value).__name__}: a model in stages takes tensors, numbers, strings and None, "
        "and tuples, lists and dicts of them"
    )


def tensors_of(described: Mapping[str, Any], arguments: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of a call, in the order of its description."""
    found: list[Tensor] = []
    for name, spec in described.items():
        rebuild(spec, arguments.get(name), lambda _, tensor: found.append(tensor))
    return found


def rebuild(spec: Any, value: Any, fill: Callable[[list[Any], Any], Any]) -> Any:
    """The argument that a description is of, with ``fill(description, tensor)`` for each tensor of ``value``."""
    ((kind, inner),) = spec.items()
    if kind == "tensor":
        return fill(inner, value)
    if kind == "dict":
        return {key: rebuild(item, None if value is None else value[key], fill) for key, item in inner}
    if kind in ("tuple", "list"):
        items = [rebuild(item, None if value is None else value[i], fill) for i, item in enumerate(inner)]
        return tuple(items) if kind == "tuple" else items
    if kind in ("dtype", "device"):
        return getattr(torch, inner) if kind == "dtype" else torch.device(inner)
    return inner


def forward_arguments(values: Mapping[str, Any], parameters: Parameters) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of the model's forward, from arguments by name."""
    kwargs, args = dict(values), list[Any]()
    star = next((n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    for name, parameter in parameters.items():
        before_star = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and bool(star and kwargs.get(star))
        if name == star:
            args.extend(kwargs.pop(name, ()))
        elif (parameter.kind is inspect.Parameter.POSITIONAL_ONLY or before_star) and name in kwargs:
            args.append(kwargs.pop(name))
    return args, kwargs


def call_text(model: nn.Module, described: Mapping[str, Any]) -> str:
    """A call for an error: ``Model(x, scale=2)``."""

    def text(name: str, spec: Any) -> str:
        ((kind, inner),) = spec.items()
        if kind == "tensor":
            return name
        return f"{name}={inner!r}" if kind == "=" else f"{name}=<{kind}>"

    return f"{type(model).__name__}({', '.join(text(name, spec) for name, spec in described.items())})"


def dump(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))
