"""Which layers of a Sequential stash and pop what, and whether it matches: every stash popped once, and later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from penstock.errors import PlanError
from penstock.split.flatten import is_plain, layers_of
from penstock.split.lazy import Lazy
from penstock.split.skip import Key, Namespace, Skippable

__all__ = ["Skip", "SkipError", "SkipFault", "match_skips", "skip_faults", "verify_skippables"]

Kind = Literal[
    "not popped", "not stashed", "popped before stashed", "stashed twice", "popped twice", "both in one layer"
]
Order = tuple[int, ...]


@dataclass(frozen=True)
class SkipFault:
    """A name whose stash and pop do not match, with the modules that declare it, by their names in the model."""

    kind: Kind
    name: str
    namespace: Namespace | None
    modules: tuple[str, ...]
    """The stashing module first, where there is one; or the first and the second that do the same."""

    def __str__(self) -> str:
        name, first, last = f"'{self.name}'", self.modules[0], self.modules[-1]
        return {
            "not popped": f"{name} is stashed by {first}, but no layer pops it",
            "not stashed": f"{name} is popped by {first}, but no layer stashes it",
            "popped before stashed": f"{name} is popped by {last} before {first} stashes it",
            "stashed twice": f"{name} is stashed by {first} and again by {last}: isolate one of them in a namespace",
            "popped twice": f"{name} is popped by {first} and again by {last}: stash it under two names",
            "both in one layer": f"{name} is both stashed and popped by {first}, which needs no skip for that",
        }[self.kind]


class SkipError(PlanError, TypeError):
    """Stashes and pops of a model's layers do not match; ``faults`` has all that is wrong."""

    def __init__(self, faults: Sequence[SkipFault]) -> None:
        super().__init__("stash and pop do not match:\n" + "\n".join(f"  - {fault}" for fault in faults))
        self.faults = tuple(faults)

    def __reduce__(self) -> tuple[type[SkipError], tuple[tuple[SkipFault, ...]]]:
        return SkipError, (self.faults,)


@dataclass(frozen=True)
class Skip:
    """A value that goes from one layer to a later one, past those between; ``label`` names it in the model."""

    key: Key
    label: str
    src: str
    dst: str


@dataclass(frozen=True)
class _Use:
    """A module's stash or pop. ``order`` is its place, as far as Sequentials say what runs first."""

    key: Key
    layer: str
    module: str
    order: Order


def verify_skippables(model: nn.Module) -> None:
    """Raise one error with every stash and pop of ``model``, an ``nn.Sequential``, that have no match."""
    if not is_plain(model):
        raise PlanError(f"the skips of an nn.Sequential can be verified, but this is a {type(model).__name__}")
    match_skips(layers_of(model))


def match_skips(layers: Mapping[str, nn.Module]) -> list[Skip]:
    """The skips between layers that run in this order, by where they begin; an error if stash and pop do not match."""
    faults = skip_faults(layers)
    if faults:
        raise SkipError(faults)
    stashes, pops = _declared(layers)
    spaces = list(dict.fromkeys(key[0] for key in stashes if key[0] is not None))
    skips = []
    for key, (stash,) in stashes.items():
        space, name = key
        label = name if space is None else f"{name}@{spaces.index(space) + 1}"
        skips.append(Skip(key, label, stash.layer, pops[key][0].layer))
    return skips


def skip_faults(layers: Mapping[str, nn.Module]) -> list[SkipFault]:
    """Everything that is wrong with the skips between layers that run in this order."""
    stashes, pops = _declared(layers)
    faults = []

    def fault(kind: Kind, key: Key, *uses: _Use) -> None:
        faults.append(SkipFault(kind, key[1], key[0], tuple(use.module for use in uses)))

    for key in dict.fromkeys((*stashes, *pops)):
        stashed, popped = stashes.get(key, []), pops.get(key, [])
        for use in stashed[1:]:
            fault("stashed twice", key, stashed[0], use)
        for use in popped[1:]:
            fault("popped twice", key, popped[0], use)
        if not popped:
            fault("not popped", key, stashed[0])
        elif not stashed:
            fault("not stashed", key, popped[0])
        elif stashed[0].module == popped[0].module:
            fault("both in one layer", key, stashed[0])
        elif popped[0].order < stashed[0].order:
            fault("popped before stashed", key, stashed[0], popped[0])
    return faults


def _declared(layers: Mapping[str, nn.Module]) -> tuple[dict[Key, list[_Use]], dict[Key, list[_Use]]]:
    stashes: dict[Key, list[_Use]] = {}
    pops: dict[Key, list[_Use]] = {}
    for number, (layer, module) in enumerate(layers.items()):
        for name, part, order in _skippables(layer, module, (number,)):
            where = f"{name} ({type(part).__name__})"
            for key in part.stashes():
                stashes.setdefault(key, []).append(_Use(key, layer, where, order))
            for key in part.pops():
                pops.setdefault(key, []).append(_Use(key, layer, where, order))
    return stashes, pops


def _skippables(name: str, module: nn.Module, order: Order) -> Iterator[tuple[str, Skippable, Order]]:
    """The skippable modules in a layer. What runs first is known inside plain Sequentials, and not elsewhere."""
    if isinstance(module, Lazy):
        outline = module.outline()
        if outline is None:
            return
        module = outline
    if isinstance(module, Skippable):
        yield name, module, order
    plain = is_plain(module)
    for number, (child, part) in enumerate(layers_of(module).items()):
        yield from _skippables(f"{name}.{child}", part, (*order, number) if plain else order)
