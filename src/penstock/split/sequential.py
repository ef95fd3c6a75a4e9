"""The front end for ``nn.Sequential``, which can be cut between any two layers.

A skip from one stage to the next travels with the activation; a skip to a later stage has an edge of its own:

    stage 0 ──x──▶ stage 1 ──(x, near)──▶ stage 2
       └───────────────far────────────────▲
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PlanError
from penstock.split.flatten import FlatSequential, check_no_hooks, layers_of, paths_of
from penstock.split.lazy import build, members
from penstock.split.plan import Edge, Groups, LayerChain
from penstock.split.skip import Skip, SkipKey, SkipUseError, match_skips, use_stash

ACTIVATION = None  # its key, among the keys of skips


class SequentialChain(LayerChain):
    """The layers of an ``nn.Sequential``, or of a flattened model."""

    def __init__(self, model: nn.Module) -> None:
        check_no_hooks(model, "the nn.Sequential itself")
        self.model = model
        self.layers = tuple(layers_of(model))
        self.recipe = {"front": "sequential"}
        if not self.layers:
            raise PlanError("the nn.Sequential has no layers: there is nothing to split")
        held: set[int] = set()
        for layer, module in layers_of(model).items():
            tensors = [tensor for _, tensor in self.members(layer)]
            held.update(map(id, tensors))
            if any(map(is_lazy, tensors)):
                kind = type(module).__name__
                raise PlanError(f"layer {layer} ({kind}) does not know its size yet: run the model on a batch first")
        own = {**model._parameters, **model._buffers}
        kept = {k: t for k, t in own.items() if t is not None and k not in model._non_persistent_buffers_set}
        lost = [name for name, tensor in kept.items() if id(tensor) not in held]
        if lost:
            raise PlanError(f"{', '.join(lost)} of the nn.Sequential itself would be lost: make it part of a layer")
        self._skips = match_skips(layers_of(model))

    def members(self, layer: str) -> Iterator[tuple[str, Tensor]]:
        for path, module in paths_of(self.model, layer).items():
            yield from members(module, path)

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        edges = []
        for (src, dst), skips in sorted(self._crossing(groups).items()):
            values = [skip.label for skip in skips]
            if dst == src + 1 and skips:
                values.insert(0, groups[src][-1])  # the activation, named after the layer that makes it
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
            keys: dict[tuple[int, int], list[SkipKey | None]] = {}  # of an edge: the activation, if it is to the next
            for (src, dst), skips in sorted(crossing.items()):
                keys[src, dst] = [*([ACTIVATION] if dst == src + 1 else []), *(skip.key for skip in skips)]
            takes = [values for (_, dst), values in keys.items() if dst == index]
            gives = [values for (src, _), values in keys.items() if src == index]
            stage = SkipStage(parts, tree, takes or [[ACTIVATION]], gives or [[ACTIVATION]])
        elif isinstance(self.model, FlatSequential):
            stage = FlatSequential(parts, tree)
        else:
            stage = nn.Sequential()
            for name, module in tree.items():
                stage.add_module(name, module)
        stage.training = self.model.training  # not stage.train(mode), which would change the layers' modes
        return stage

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The single input of an ``nn.Sequential``; several arguments become one value."""
        if kwargs:
            return kwargs["input"] if set(kwargs) == {"input"} and not args else kwargs
        return args[0] if len(args) == 1 else args

    def crossing(self, cut: int) -> float:
        """The number of values: the activation and the skips across this cut."""
        number = {layer: i for i, layer in enumerate(self.layers)}
        return 1.0 + sum(number[skip.src] < cut <= number[skip.dst] for skip in self._skips)

    def _crossing(self, groups: Groups) -> dict[tuple[int, int], list[Skip]]:
        """The skips between each pair of stages, including every pair of neighbours."""
        stage_of = {layer: stage for stage, layers in enumerate(groups) for layer in layers}
        crossing: dict[tuple[int, int], list[Skip]] = {(s, s + 1): [] for s in range(len(groups) - 1)}
        for skip in self._skips:
            pair = (stage_of[skip.src], stage_of[skip.dst])
            if pair[0] != pair[1]:
                crossing.setdefault(pair, []).append(skip)
        return crossing


class SkipStage(FlatSequential):
    """A stage that skips enter or leave. ``takes`` and ``gives`` are the keys of the values on each edge."""

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
        values_by_key: dict[SkipKey | None, Any] = {}
        for keys, value in zip(self._takes, values, strict=True):
            values_by_key.update(zip(keys, (value,) if len(keys) == 1 else value, strict=True))
        x = values_by_key.pop(ACTIVATION)
        with use_stash(values_by_key):
            for layer in self:
                x = layer(x)
        values_by_key[ACTIVATION] = x
        outputs = [self._pack(keys, values_by_key) for keys in self._gives]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _pack(self, keys: Sequence[SkipKey | None], values_by_key: Mapping[SkipKey | None, Any]) -> Any:
        for key in keys:
            if key not in values_by_key:
                assert key is not None
                raise SkipUseError(f"'{key[1]}' goes to a later stage, but the layer that stashes it did not run")
        return values_by_key[keys[0]] if len(keys) == 1 else tuple(values_by_key[key] for key in keys)
