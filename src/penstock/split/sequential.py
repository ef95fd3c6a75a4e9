"""Cutting an ``nn.Sequential``: between any two of its layers.

A skip from a layer of one stage to one of another travels with the activation if that goes there too, and by itself
if not:

    stage 0 ──x──▶ stage 1 ──(x, near)──▶ stage 2
       └───────────────far────────────────▲
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.chain import Groups, LayerChain
from penstock.split.flatten import FlatSequential, layers_of, paths_of, refuse_hooks
from penstock.split.lazy import build, members
from penstock.split.plan import Edge
from penstock.split.skip import Skip, SkipKey, SkipUseError, match_skips, use_stash

__all__ = ["SequentialChain", "SkipStage"]

ACTIVATION = None
"""Stands for the activation where the keys of skips stand for skips."""


class SequentialChain(LayerChain):
    """The layers of an ``nn.Sequential``, or of a flattened model."""

    def __init__(self, model: nn.Module) -> None:
        refuse_hooks(model, "the nn.Sequential itself")
        self.model = model
        self.layers = tuple(layers_of(model))
        self.recipe = {"front": "sequential"}
        if not self.layers:
            raise PlanError("the nn.Sequential has no layers: there is nothing to split")
        for layer in self.layers:
            self._refuse_unknown_sizes(layer)
        self._refuse_lost_members()
        self._skips = match_skips(layers_of(model))

    def members(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        for path, module in paths_of(self.model, layer).items():
            yield from members(module, path)

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        edges = []
        for (src, dst), skips in sorted(self._crossing(groups).items()):
            values = [skip.label for skip in skips]
            if dst == src + 1 and skips:
                values.insert(0, groups[src][-1])  # the activation, named after the layer that it comes from
            edges.append(Edge(src, dst, tuple(values)))
        return tuple(edges)

    def stage(self, groups: Groups, index: int) -> nn.Module:
        parts = {layer: paths_of(self.model, layer) for layer in groups[index]}
        for modules in parts.values():
            build(next(iter(modules.values())))
        tree = {path: module for modules in parts.values() for path, module in modules.items()}
        stage: nn.Module
        crossing = self._crossing(groups)
        if any(skips and index in pair for pair, skips in crossing.items()):
            takes = [_carried(pair, skips) for pair, skips in sorted(crossing.items()) if pair[1] == index]
            gives = [_carried(pair, skips) for pair, skips in sorted(crossing.items()) if pair[0] == index]
            stage = SkipStage(parts, tree, takes or [[ACTIVATION]], gives or [[ACTIVATION]])
        elif isinstance(self.model, FlatSequential):
            stage = FlatSequential(parts, tree)
        else:
            stage = nn.Sequential()
            for name, module in tree.items():
                stage.add_module(name, module)
        stage.training = self.model.training  # its own flag only: a layer may be in another mode on purpose
        return stage

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The one value that an ``nn.Sequential`` takes; arguments that cannot be that are themselves the value."""
        if kwargs:
            return kwargs["input"] if set(kwargs) == {"input"} and not args else kwargs
        return args[0] if len(args) == 1 else args

    def crossing(self, cut: int) -> float:
        """The activation, and the skips that go past or to this cut."""
        number = {layer: i for i, layer in enumerate(self.layers)}
        return 1.0 + sum(number[skip.src] < cut <= number[skip.dst] for skip in self._skips)

    def _crossing(self, groups: Groups) -> dict[tuple[int, int], list[Skip]]:
        """The skips between each pair of stages; a stage and the next are always such a pair."""
        stage_of = {layer: stage for stage, layers in enumerate(groups) for layer in layers}
        crossing: dict[tuple[int, int], list[Skip]] = {(s, s + 1): [] for s in range(len(groups) - 1)}
        for skip in self._skips:
            pair = (stage_of[skip.src], stage_of[skip.dst])
            if pair[0] != pair[1]:
                crossing.setdefault(pair, []).append(skip)
        return crossing

    def _refuse_unknown_sizes(self, layer: str) -> None:
        unknown = (UninitializedParameter, UninitializedBuffer)
        if any(isinstance(tensor, unknown) for _, tensor in self.members(layer)):
            kind = type(layers_of(self.model)[layer]).__name__
            raise PlanError(f"layer {layer} ({kind}) does not know its size yet: run the model on a batch first")

    def _refuse_lost_members(self) -> None:
        kept = {id(tensor) for layer in self.layers for _, tensor in self.members(layer)}
        passing = self.model._non_persistent_buffers_set
        own = {**self.model._parameters, **{k: v for k, v in self.model._buffers.items() if k not in passing}}
        lost = [name for name, tensor in own.items() if tensor is not None and id(tensor) not in kept]
        if lost:
            raise PlanError(
                f"{', '.join(lost)} of the nn.Sequential itself would be lost, for no stage has the whole of it: "
                "make it part of the layer that uses it"
            )


def _carried(pair: tuple[int, int], skips: Sequence[Skip]) -> list[SkipKey | None]:
    """What an edge carries: the activation, if it leads to the next stage, then the skips."""
    activation: list[SkipKey | None] = [ACTIVATION] if pair[1] == pair[0] + 1 else []
    return [*activation, *(skip.key for skip in skips)]


class SkipStage(FlatSequential):
    """A stage that skips enter or leave: ``takes`` and ``gives`` say what each edge carries."""

    def __init__(
        self,
        paths: Mapping[str, Iterable[str]],
        tree: Mapping[str, nn.Module],
        takes: Sequence[Sequence[SkipKey | None]],
        gives: Sequence[Sequence[SkipKey | None]],
    ) -> None:
        super().__init__(paths, tree)
        self._takes = takes
        self._gives = gives

    def forward(self, *values: Any) -> Any:
        at_hand: dict[SkipKey | None, Any] = {}
        for keys, value in zip(self._takes, values, strict=True):
            at_hand.update(zip(keys, (value,) if len(keys) == 1 else value, strict=True))
        x = at_hand.pop(ACTIVATION)
        with use_stash(at_hand):
            for layer in self:
                x = layer(x)
        at_hand[ACTIVATION] = x
        given = [self._packed(keys, at_hand) for keys in self._gives]
        return given[0] if len(given) == 1 else tuple(given)

    def _packed(self, keys: Sequence[SkipKey | None], at_hand: Mapping[SkipKey | None, Any]) -> Any:
        for key in keys:
            if key not in at_hand:
                assert key is not None
                raise SkipUseError(f"'{key[1]}' goes to a later stage, but the layer that stashes it did not run")
        return at_hand[keys[0]] if len(keys) == 1 else tuple(at_hand[key] for key in keys)
