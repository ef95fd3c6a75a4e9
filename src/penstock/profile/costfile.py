"""Costs as JSON: what a program writes, and what somebody may write by hand.

    {"penstock_costs": 1, "samples": 8, "layers": [
      {"name": "embed", "forward": 1e-4, "input_gradient": 0, "weight_gradient": 1e-4,
       "activation": 8192, "parameters": 4000000, "output": 32768},
      …
    ]}

``output`` is what goes to the next layer; ``crossings`` are for skips. ``sizes`` instead of ``samples`` and ``layers``
has the costs of several sizes of micro-batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PlanError
from penstock.near import did_you_mean
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, Overhead, SharedParameters

__all__ = ["read", "text_of", "write"]

FORMAT = 1
T = TypeVar("T")

_LAYER = tuple(one.name for one in fields(LayerCosts))
_NEEDED = ("name", "forward", "input_gradient", "weight_gradient", "activation", "parameters")
_MODEL = tuple(one.name for one in fields(ModelCosts))


def text_of(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read as costs: {error}") from error


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read(text: str, origin: str) -> list[ModelCosts]:
    """The costs in a text, one for each size of micro-batch; errors say what is wrong, and in what."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{origin} is not JSON: {error}") from error
    try:
        return _read(data)
    except PlanError as error:
        raise PlanError(f"{origin}: {error}") from error


def _read(data: Any) -> list[ModelCosts]:
    _check_keys(data, (*_MODEL, "sizes", "penstock_costs"), "costs")
    if data.get("penstock_costs", FORMAT) != FORMAT:
        raise PlanError(f"costs of format {data['penstock_costs']!r} cannot be read here: expected {FORMAT}")
    if "sizes" not in data:
        return [_model(data)]
    for key in ("samples", "layers", "crossings"):
        if key in data:
            raise PlanError(f"costs have both sizes and {key}: {key} belongs into each of the sizes")
    common = {key: value for key, value in data.items() if key not in ("sizes", "penstock_costs")}
    return [_model({**common, **_mapping(size, "a size")}) for size in _list(data["sizes"], "sizes")]


def _model(data: Mapping[str, Any]) -> ModelCosts:
    _check_keys(data, (*_MODEL, "penstock_costs"), "costs")
    rows = _list(_needed(data, "layers", "costs"), "layers")
    layers = [_layer(row, i) for i, row in enumerate(rows)]
    numbers = {layer.name: i for i, layer in enumerate(layers)}
    crossings = [_crossing(one, numbers) for one in _list(data.get("crossings", []), "crossings")]
    given = {(crossing.src, crossing.dst) for crossing in crossings}
    for i, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        if "output" in row and (i, i + 1) in given:
            raise PlanError(
                f"layer {layer.name!r} has an output, and there is a crossing to the next layer: say it once"
            )
        if "output" in row and i < len(rows) - 1:
            crossings.append(Crossing(i, i + 1, row["output"]))
        elif "output" not in row and i < len(rows) - 1 and (i, i + 1) not in given:
            raise PlanError(
                f"layer {layer.name!r} has no output: give the bytes that go to the next layer, 0 if none do"
            )
    shared = []
    for one in _list(data.get("shared", []), "shared"):
        _check_keys(one, ("layers", "bytes"), "shared")
        members = _list(_needed(one, "layers", "shared"), "layers that share parameters")
        shared.append(
            SharedParameters(tuple(_number(who, numbers, "shared") for who in members), _needed(one, "bytes", "shared"))
        )
    kept = []
    for one in _list(data.get("kept_together", []), "kept_together"):
        if not isinstance(one, list) or len(one) != 3:
            raise PlanError(f"kept_together has {one!r}: write [layer, layer, bytes]")
        kept.append((_number(one[0], numbers, "kept_together"), _number(one[1], numbers, "kept_together"), one[2]))
    return ModelCosts(
        layers=tuple(layers),
        crossings=tuple(sorted(crossings, key=lambda crossing: (crossing.src, crossing.dst))),
        samples=data.get("samples", 1),
        shared=tuple(shared),
        kept_together=tuple(kept),
        link=_link(data.get("link", {})),
        device=_device(data.get("device", "cpu")),
        overhead=_overhead(data.get("overhead", {})),
    )


def _layer(row: Any, index: int) -> LayerCosts:
    what = f"layer number {index}"
    if isinstance(row, dict) and isinstance(row.get("name"), str):
        what = f"layer {row['name']!r}"
    _check_keys(row, (*_LAYER, "output"), what)
    values = {key: _needed(row, key, what) for key in _NEEDED}
    own = values["parameters"] if isinstance(values["parameters"], int | float) else 0.0
    values |= {"recompute": values["forward"], "gradients": own, "optimizer": 2 * own}
    values |= {key: value for key, value in row.items() if key in _LAYER}
    return LayerCosts(**values)


def _crossing(one: Any, numbers: Mapping[str, int]) -> Crossing:
    _check_keys(one, ("src", "dst", "bytes", "values"), "a crossing")
    src, dst = (_number(_needed(one, end, "a crossing"), numbers, "a crossing") for end in ("src", "dst"))
    values = _list(one.get("values", []), "values")
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in values):
        raise PlanError(f"a crossing has values {values!r}: write pairs [number, bytes]")
    return Crossing(src, dst, _needed(one, "bytes", "a crossing"), tuple((number, size) for number, size in values))


def _link(data: Any) -> Link:
    _check_keys(data, tuple(one.name for one in fields(Link)), "link")
    return Link(**data)


def _overhead(data: Any) -> Overhead:
    _check_keys(data, tuple(one.name for one in fields(Overhead)), "overhead")
    return Overhead(**data)


def _device(name: Any) -> str:
    if not isinstance(name, str):
        raise PlanError(f"device is {name!r}: write its name")
    return name


def _number(who: Any, numbers: Mapping[str, int], what: str) -> int:
    """A layer's number, from itself or from the layer's name."""
    if isinstance(who, str):
        if who not in numbers:
            raise PlanError(f"{what} names layer {who!r}, which there is none of{did_you_mean(who, numbers)}")
        return numbers[who]
    if type(who) is not int:
        raise PlanError(f"{what} names layer {who!r}: write its name, or its number from 0 on")
    return who


def _needed(data: Mapping[str, Any], key: str, what: str) -> Any:
    if data.get(key) is None:
        raise PlanError(f"{what} has no {key}")
    return data[key]


def _mapping(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PlanError(f"{what} must be an object {{…}}, got {data!r}")
    return data


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise PlanError(f"{what} must be a list […], got {data!r}")
    return data


def _check_keys(data: Any, known: Sequence[str], what: str) -> None:
    for key in _mapping(data, what):
        if key not in known:
            hint = did_you_mean(key, known, otherwise=f": it has {', '.join(known)}")
            raise PlanError(f"{what} has an unknown key {key!r}{hint}")


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def write(costs: Sequence[ModelCosts]) -> str:
    """Costs of one or several sizes, a line for each layer and crossing."""
    head = f'{{\n  "penstock_costs": {FORMAT},\n'
    if len(costs) == 1:
        return head + _written(costs[0], "  ") + "\n}\n"
    sizes = ",\n".join("    {\n" + _written(one, "      ") + "\n    }" for one in costs)
    return f'{head}  "sizes": [\n{sizes}\n  ]\n}}\n'


def _written(costs: ModelCosts, indent: str) -> str:
    outputs = {c.src: c.bytes for c in costs.crossings if c.dst == c.src + 1 and not c.values}
    rows = [{**_plain(layer), **_output(outputs, i)} for i, layer in enumerate(costs.layers)]
    crossings = [_plain(c) for c in costs.crossings if c.dst != c.src + 1 or c.values]
    lists: dict[str, Iterable[Any]] = {
        "layers": rows,
        "crossings": crossings,
        "shared": map(_plain, costs.shared),
        "kept_together": costs.kept_together,
    }
    link = {key: value for key, value in _plain(costs.link).items() if value != float("inf")}
    lines = [f'"device": {json.dumps(costs.device)}', f'"samples": {costs.samples}', f'"link": {_json(link)}']
    lines.append(f'"overhead": {_json(_plain(costs.overhead))}')
    for name, items in lists.items():
        shown = ",\n".join(f"{indent}  {_json(item)}" for item in items)
        lines.append(f'"{name}": [\n{shown}\n{indent}]' if shown else f'"{name}": []')
    return ",\n".join(indent + line for line in lines)


def _plain(data: Any) -> dict[str, Any]:
    """The fields of a data class, without those that are what they are anyway."""
    found = {}
    for one in fields(data):
        value = getattr(data, one.name)
        if one.default is MISSING or value != one.default:
            found[one.name] = value
    return found


def _output(outputs: Mapping[int, float], layer: int) -> dict[str, float]:
    return {"output": outputs[layer]} if layer in outputs else {}


def _json(value: Any) -> str:
    return json.dumps(_tidy(value), allow_nan=False)


def _tidy(value: Any) -> Any:
    """Whole numbers without a point."""
    if isinstance(value, dict):
        return {key: _tidy(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_tidy(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
