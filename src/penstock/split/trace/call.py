"""How a model is called: which arguments are given, and which of them are not tensors. One trace per kind of call.

A key says it in one string, so that it can cross to stages that do not see the arguments:

    forward(x, labels=None)   called (x)           {"x": "*"}
                              called (x, y)        {"x": "*", "labels": "*"}       * is a tensor
                              called (x, flag=1)   {"x": "*", "flag": {"=": 1}}    a plain value is part of the key
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

PLAIN = (bool, int, float, str)
"""The types whose values a forward may branch on: they are part of the key."""


Parameters = Mapping[str, inspect.Parameter]


def key_of(parameters: Parameters, arguments: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The key of a call, and the values that it leaves open, in order. A default that is given is as if it were not."""
    names = [name for name in parameters if name in arguments]
    names += [name for name in arguments if name not in parameters]  # in the order in which ``**named`` has them
    open_values: list[Any] = []
    spec = {}
    for name in names:
        value = arguments[name]
        default = parameters[name].default if name in parameters else inspect.Parameter.empty
        if value is None or type(value) in PLAIN:
            if type(value) is type(default) and value == default:
                continue
        elif type(value) is tuple and not value and _is_star(parameters, name):
            continue
        spec[name] = _spec(value, open_values)
    return json.dumps(spec), open_values


def _is_star(parameters: Parameters, name: str) -> bool:
    return name in parameters and parameters[name].kind is inspect.Parameter.VAR_POSITIONAL


def _spec(value: Any, open_values: list[Any]) -> Any:
    if value is None or type(value) in PLAIN:
        return {"=": value}
    if type(value) in (tuple, list):
        return {type(value).__name__: [_spec(item, open_values) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _spec(item, open_values)] for key, item in value.items()]}
    open_values.append(value)
    return "*"


class Call:
    """One kind of call of a model."""

    def __init__(self, model: nn.Module, key: str) -> None:
        self.model = model
        self.key = key
        self.spec: dict[str, Any] = json.loads(key)

    def filled(self, fill: Callable[[str], Any]) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments for the model's forward, with ``fill(name)`` for each open value."""
        values = {name: _build(spec, name, fill) for name, spec in self.spec.items()}
        parameters = inspect.signature(self.model.forward).parameters
        star = next((n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
        args: list[Any] = []
        if star is not None and values.get(star):
            for name in parameters:
                if name == star:
                    break
                args.append(values.pop(name))
            args.extend(values.pop(star))
        for name, parameter in parameters.items():
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and name in values:
                args.append(values.pop(name))
        return args, values

    def __str__(self) -> str:
        parts = [name if spec == "*" else f"{name}={_text(spec)}" for name, spec in self.spec.items()]
        return f"{type(self.model).__name__}({', '.join(parts)})"


def _build(spec: Any, name: str, fill: Callable[[str], Any]) -> Any:
    if spec == "*":
        return fill(name)
    ((kind, inner),) = spec.items()
    if kind == "=":
        return inner
    if kind == "dict":
        return {key: _build(item, f"{name}.{key}", fill) for key, item in inner}
    items = [_build(item, f"{name}.{i}", fill) for i, item in enumerate(inner)]
    return tuple(items) if kind == "tuple" else items


def _text(spec: Any) -> str:
    if spec == "*":
        return "…"
    ((kind, inner),) = spec.items()
    return repr(inner) if kind == "=" else f"<{kind} of {len(inner)}>"


MOST = 8
"""How many optional arguments are tried one by one."""


def _guess(annotation: Any) -> Any:
    """What an argument probably is: a tensor, unless its annotation says that it is several."""
    text = (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")).strip().lower()
    if not isinstance(annotation, str) and annotation is not inspect.Parameter.empty and "[" not in text:
        text = str(annotation).replace("typing.", "").strip().lower()
    head, _, inner = text.partition("[")
    if head in ("list", "sequence", "iterable"):
        return {"list": ["*", "*"]}
    if head == "tuple":
        count = 2 if "..." in inner or not inner else inner.count(",") + 1
        return {"tuple": ["*"] * count}
    return "*"


def candidates(model: nn.Module, sample: str | None = None) -> list[str]:
    """The kinds of call that a model's signature suggests: ``sample``, the fullest, the barest, some between."""
    base: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    flips: dict[str, Any] = {}
    star = None
    for name, parameter in inspect.signature(model.forward).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            star = name
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        elif parameter.default is inspect.Parameter.empty:
            base[name] = _guess(parameter.annotation)
        elif parameter.default is None:
            optional[name] = "*"
        elif isinstance(parameter.default, bool):
            flips[name] = {"=": not parameter.default}
    specs = [{**base, **optional}, base]
    specs += [{**base, name: spec} for name, spec in list((optional | flips).items())[:MOST]]
    if star is not None:
        # Nothing says how many there are: a few numbers are tried.
        specs += [{**base, star: {"tuple": ["*"] * count}} for count in (1, 2, 3, 4)]
    order = list(inspect.signature(model.forward).parameters)
    keys = [json.dumps({name: spec[name] for name in order if name in spec}) for spec in specs]
    return list(dict.fromkeys([*([] if sample is None else [sample]), *keys]))
