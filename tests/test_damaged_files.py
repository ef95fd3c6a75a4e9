"""Damaged files of every format: they are read as something valid, or are an error of the package, never any other."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.profile import Crossing, LayerCosts, ModelCosts, Profile
from penstock.schedule import build, from_csv, from_text, to_csv, to_text

VALUES = [None, -1, 0, 1e400, float("nan"), 10**400, "x", [], {}, True, [[1]], {"a": 1}, -(10**9), "../x", 3.5]
CHARACTERS = '{}[]",:0123456789-eE.nul\\\x00é\n;'


class Branchless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


def damage_text(random: random.Random, text: str) -> str:
    """Some characters are removed, inserted or replaced, or the end is missing."""
    for _ in range(random.choice([1, 1, 2, 5])):
        at, kind = random.randrange(len(text) + 1), random.random()
        end = at
        inserted = ""
        if kind < 0.3:
            end = at + random.choice([1, 5, 50])
        elif kind < 0.5:
            inserted = random.choice(CHARACTERS)
        elif kind < 0.6:
            inserted = "9" * 5000
        elif kind < 0.7:
            inserted = random.choice(["[" * 3000, "[" * 500 + "]" * 500])
        elif kind < 0.85:
            end, inserted = at + 1, random.choice(CHARACTERS)
        else:
            end = len(text)
        text = text[:at] + inserted + text[end:]
    return text


def damage_values(random: random.Random, text: str) -> str:
    """Valid JSON, with other values in one or two places."""
    data = json.loads(text)
    for _ in range(random.choice([1, 1, 2])):
        places: list[tuple[Any, Any]] = []
        level = [data]
        while level:
            found = [(one, key) for one in level for key in (one if isinstance(one, dict) else range(len(one)))]
            places += found
            level = [one[key] for one, key in found if isinstance(one[key], (dict, list))]
        container, key = random.choice(places)
        container[key] = deepcopy(random.choice(VALUES))
    return json.dumps(data)


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


def costs() -> Profile:
    names = ("embed", "block", "head")
    layers = tuple(LayerCosts(name, 1.0, 1.0, 1.0, 1.0, 64.0, 8.0, 8.0, 16.0, deferred=32.0) for name in names)
    crossings = (Crossing(0, 1, 8.0, ((0, 8.0),)), Crossing(0, 2, 4.0), Crossing(1, 2, 8.0))
    sizes = (ModelCosts(layers, crossings, samples, kept_together=((0, 1, 2.0),)) for samples in (1, 4))
    return Profile(tuple(sizes))


def trace() -> ps.Trace:
    plan = ps.split(chain(), stages=2)
    with ps.Pipeline(plan, nn.functional.mse_loss, microbatches=2) as pipe, pipe.trace(steps=1, quiet=True) as found:
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
    return found


@cache
def example(name: str) -> str:
    if name == "plan":
        return ps.split(chain(), stages=2).to_json()
    if name == "recorded plan":
        return ps.split(Branchless(), stages=2, sample=torch.randn(2, 4)).to_json()
    if name == "trace":
        return json.dumps(trace().to_data())
    if name == "plan result":
        layers = nn.Sequential(OrderedDict((layer.name, nn.Linear(4, 4)) for layer in costs().sizes[0].layers))
        return ps.plan(layers, costs=costs(), devices=2, batch=8, seconds=0.1).to_json()
    if name == "costs":
        return costs().to_json()
    schedule = build("zb_h1", 4, 8)
    return to_text(schedule) if name == "text" else to_csv(schedule)


LOADERS: dict[str, Callable[[Path], object]] = {
    "plan": lambda path: ps.Plan.load(path, chain()),
    "recorded plan": lambda path: ps.Plan.load(path, Branchless()),
    "plan result": lambda path: ps.PlanResult.load(path),
    "trace": lambda path: ps.Trace.load(path),
    "costs": lambda path: Profile.load(path),
    "text": lambda path: from_text(path.read_text("utf-8")),
    "csv": lambda path: from_csv(path.read_text("utf-8")),
}


def load_damaged(name: str, seeds: range, path: Path) -> None:
    for seed in seeds:
        generator = random.Random(f"{name} {seed}")
        damage = damage_values if seed % 2 and name not in ("text", "csv") else damage_text
        path.write_text(damage(generator, example(name)), "utf-8")
        try:
            LOADERS[name](path)
        except ps.PenstockError:
            continue
        except Exception as error:
            raise AssertionError(f"{name}, seed {seed}: {type(error).__name__}: {error}") from error


@pytest.mark.parametrize("name", LOADERS)
def test_a_damaged_file_is_an_error_of_the_package(name: str, tmp_path: Path) -> None:
    load_damaged(name, range(100), tmp_path / "damaged")
