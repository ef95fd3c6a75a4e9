"""Marks in a model: cut points, blocks, and stages made of blocks.

    x = self.cuts[0](x)                 # ps.CutPoint(), or ps.cut(x): the model may be cut here

    with ps.Block("B1"):                # a scope
        x = self.layer1(x)
    @ps.BlockFunction("B2")             # a function, a method or a forward
    ps.BeginBlock(self.layer3, "B3")    # from the call of this module on

Code before any block belongs to the first block that is entered; code after the end of a block, outside all others,
still belongs to it. Of nested blocks the inner one counts. Blocks without a name are numbered "0", "1", … in the order
in which they are entered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Self, TypeVar

import torch
from torch import nn

from penstock.errors import PlanError, did_you_mean
from penstock.split.plan import LayerChain
from penstock.split.trace.state import recorder

T = TypeVar("T")


class CutPoint(nn.Module):
    """The identity, marking a place at which the model may be cut. Each object is called once in a forward.

    It may be an attribute, or in an ``nn.ModuleList`` or a plain list, tuple or dict.
    """

    def forward(self, value: T) -> T:
        return value


def cut(value: T) -> T:
    """Return ``value``; the model may be cut here. Outside ``ps.split`` this does nothing."""
    trace = recorder()
    if trace is not None:
        trace.mark(None, value)
    return value


def cut_points(model: nn.Module) -> dict[int, str]:
    """The cut points of a model: names by ``id``."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, CutPoint):
            found.setdefault(id(module), path)
        for attribute, value in vars(module).items():
            if attribute not in ("_modules", "_parameters", "_buffers"):
                for name, point in _cut_points_in(value):
                    found.setdefault(id(point), f"{prefix}{attribute}{name}")
    return found


def _cut_points_in(value: Any, depth: int = 4) -> Iterator[tuple[str, CutPoint]]:
    if isinstance(value, CutPoint):
        yield "", value
    elif depth and isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from ((f"[{i}]{name}", point) for name, point in _cut_points_in(item, depth - 1))
    elif depth and isinstance(value, Mapping):
        for key, item in value.items():
            yield from ((f"[{key!r}]{name}", point) for name, point in _cut_points_in(item, depth - 1))


F = TypeVar("F", bound=Callable[..., Any])

_ATTRIBUTE = "_penstock_block"


class Block:
    """A scope whose operations form the block ``name``. Outside ``ps.split`` it does nothing."""

    def __init__(self, name: str | None = None, device: str | torch.device | None = None) -> None:
        self.name = None if name is None else _check_name(name)
        self.device = _check_device(f"block {name!r}", device)

    def __enter__(self) -> Self:
        trace = recorder()
        if trace is not None:
            trace.enter(self)
        return self

    def __exit__(self, *error: object) -> None:
        trace = recorder()
        if trace is not None:
            trace.leave()


class BlockFunction:
    """A decorator: the operations of the function or method form the block ``name``."""

    def __init__(self, name: str | None = None, device: str | torch.device | None = None) -> None:
        self.block = Block(name, device)

    def __call__(self, function: F) -> F:
        block = self.block

        @functools.wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with block:
                return function(*args, **kwargs)

        setattr(within, _ATTRIBUTE, block)
        return within  # type: ignore[return-value]


def BeginBlock(layer: F, name: str | None = None, device: str | torch.device | None = None) -> F:
    """Begin block ``name`` at each call of ``layer``; it ends when another block is entered.

    Returns a module unchanged, with the same parameters and names, and a function wrapped.
    """
    block = Block(name, device)
    before = getattr(layer, _ATTRIBUTE, None)
    if before is not None or not callable(layer):
        kind = type(layer).__name__
        raise PlanError(f"BeginBlock takes a module or a function without a block, got a {kind} with {before!r}")
    if isinstance(layer, nn.Module):
        layer.__dict__[_ATTRIBUTE] = block
        return layer

    @functools.wraps(layer)
    def beginning(*args: Any, **kwargs: Any) -> Any:
        trace = recorder()
        if trace is not None:
            trace.begin(block)
        return layer(*args, **kwargs)

    setattr(beginning, _ATTRIBUTE, block)
    return beginning  # type: ignore[return-value]


def begin_block_of(module: nn.Module) -> Block | None:
    """The block that ``BeginBlock`` set on a module."""
    return module.__dict__.get(_ATTRIBUTE)


def remove_begin_block(module: nn.Module) -> None:
    """Undo ``BeginBlock`` on a module."""
    module.__dict__.pop(_ATTRIBUTE, None)


def forward_block_of(module: nn.Module) -> Block | None:
    """The block of ``BlockFunction`` on a module's forward."""
    return getattr(module.forward, _ATTRIBUTE, None)


class Stage:
    """The blocks of one stage and its device: ``ps.Stage("B1", "B2").on("cuda:0")``."""

    def __init__(self, *blocks: str, device: str | torch.device | None = None) -> None:
        if not blocks:
            raise PlanError("a stage needs blocks: ps.Stage('B1', 'B2')")
        self.blocks = tuple(_check_name(block) for block in blocks)
        self.device = _check_device(f"the stage of {', '.join(self.blocks)}", device)

    def on(self, device: str | torch.device) -> Stage:
        """The same stage, on ``device``."""
        return Stage(*self.blocks, device=device)

    def __repr__(self) -> str:
        return f"Stage{self.blocks!r}" + (f".on({self.device!r})" if self.device else "")


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise PlanError(f"a block's name is a string that is not empty, got {name!r}")
    return name


def _check_device(name: str, device: Any) -> str | None:
    if device is None:
        return None
    try:
        return str(torch.device(device))
    except (RuntimeError, TypeError) as error:
        raise PlanError(f"{name} names a device {device!r} that torch does not know: {error}") from error


NamedStages = Sequence["str | Stage | Sequence[str]"]


def groups_by_name(chain: LayerChain, stages: NamedStages) -> list[tuple[str, ...]]:
    """The blocks of each stage. Raises an error unless every block of the model is in exactly one stage."""
    groups: list[tuple[str, ...]] = []
    seen: dict[str, int] = {}
    for index, stage in enumerate(stages):
        given = stage.blocks if isinstance(stage, Stage) else stage
        names = tuple(given) if isinstance(given, (list, tuple)) else (given,)
        if not names:
            raise PlanError(f"stage {index} has no blocks: {stages!r}")
        for name in names:
            if name not in chain.layers:
                expected = ", ".join(map(repr, chain.layers))
                guess = did_you_mean(str(name), chain.layers, otherwise=".", cutoff=0.4)
                raise PlanError(f"stage {index} has an unknown block {name!r}{guess} The model has {expected}")
            if name in seen:
                raise PlanError(f"block {name!r} is in more than one stage, or twice in one: {seen[name]} and {index}")
            seen[name] = index
        groups.append(names)
    missing = [name for name in chain.layers if name not in seen]
    if missing:
        names_missing = ", ".join(map(repr, missing))
        raise PlanError(f"no stage has the block(s) {names_missing}: every block of the model needs a stage")
    chain.edges(groups)  # an error if a value would have to go to an earlier stage
    return groups


def devices_of_stages(stages: NamedStages) -> tuple[str, ...] | None:
    """The devices of ``ps.Stage`` objects; None if no stage has one."""
    devices = [stage.device if isinstance(stage, Stage) else None for stage in stages]
    named = [device for device in devices if device is not None]
    if named and len(named) < len(devices):
        without = [index for index, device in enumerate(devices) if device is None]
        raise PlanError(f"stages {without} name no device, but others do: say .on(device) for all of them or for none")
    return tuple(named) or None


def groups_by_device(chain: LayerChain) -> list[tuple[str, ...]]:
    """One stage per run of consecutive blocks with the same device."""
    devices = chain.devices()
    without = [layer for layer in chain.layers if layer not in devices]
    if without:
        raise PlanError(f"stages follow from devices if every block has one, but {', '.join(without)} has none")
    return [tuple(layers) for _, layers in groupby(chain.layers, key=lambda layer: devices[layer])]
