"""Parse JSON and check its types against a schema. Errors name the location of the problem in the data.

A schema is

    str, int, float, bool    a value of this type; an int is at least 0, a float is any finite number
    math.inf                 a number of at least 0, or infinity
    object                   any value
    Maybe(schema)            null, or a value of this schema
    [schema]                 a list of values of this schema
    (schema, schema)         a list with exactly these values
    {"key": schema}          an object with these keys, and possibly others; a key with Maybe may be missing
    {str: schema}            an object with any keys, and values of this schema
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from penstock.errors import PlanError

_MAX_INT = 2**63
_MAX_DEPTH = 100  # levels of nesting: far more than in valid files, and far below Python's recursion limit
_NAMES = {str: "a text", bool: "true or false", int: "a whole number, from 0 up", float: "a number"}


@dataclass(frozen=True)
class Maybe:
    """A value that may be null, or missing in an object."""

    schema: Any


def parse_json(text: str | bytes, problem: str) -> Any:
    """Parse JSON text. If it is invalid, the error begins with ``problem``."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError also for integers with thousands of digits
        raise PlanError(f"{problem}: {error}") from error
    level, depth = [data], 0
    while level := [inner for value in level for inner in _children(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise PlanError(f"{problem}: it is nested more than {_MAX_DEPTH} levels deep")
    return data


def _children(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def check_schema(data: Any, schema: Any, where: str) -> None:
    """Raise an error that names the first mismatch with the schema in ``data``, whose name in errors is ``where``."""
    if isinstance(schema, Maybe):
        if data is not None:
            check_schema(data, schema.schema, where)
    elif isinstance(schema, dict):
        _require(isinstance(data, dict), data, where, "an object {…}")
        if str in schema:
            for key, value in data.items():
                check_schema(value, schema[str], f"{where}[{key!r}]")
            return
        for key, inner in schema.items():
            if key not in data and not isinstance(inner, Maybe):
                raise PlanError(f"{where} has no {key!r}")
            check_schema(data.get(key), inner, f"{where}[{key!r}]")
    elif isinstance(schema, (list, tuple)):
        _require(isinstance(data, (list, tuple)), data, where, "a list […]")
        if isinstance(schema, tuple):
            _require(len(data) == len(schema), data, where, f"a list of {len(schema)}")
        for i, value in enumerate(data):
            check_schema(value, schema[i if isinstance(schema, tuple) else 0], f"{where}[{i}]")
    elif schema is int:
        _require(type(data) is int and 0 <= data < _MAX_INT, data, where, _NAMES[int])
    elif schema is float:
        number = (type(data) is float and math.isfinite(data)) or (type(data) is int and abs(data) < _MAX_INT)
        _require(number, data, where, _NAMES[float])
    elif schema == math.inf:
        _require(data == math.inf or (type(data) in (int, float) and 0 <= data < _MAX_INT), data, where, _NAMES[float])
    elif schema is not object:
        _require(type(data) is schema, data, where, _NAMES[schema])


def _require(valid: bool, data: Any, where: str, expected: str) -> None:
    if not valid:
        text = str(data) if type(data) is not int or abs(data) < _MAX_INT else "too large"  # str() fails
        raise PlanError(f"{where} must be {expected}, but is {text if len(text) <= 40 else f'{text[:40]}…'}")
