"""How far to look into a model that has no marks: as far as its stages need to balance, and no further."""

from __future__ import annotations

from torch import nn

from penstock.errors import PlanError
from penstock.split.lazy import members
from penstock.split.trace.cut_policy import Modules
from penstock.split.trace.tracer import has_hooks


def automatic(model: nn.Module, stages: int, sample: str | None = None) -> Modules:
    """Modules are whole layers; the heaviest is traced through while it outweighs a stage's fair share, if it can."""
    how = Modules(model, (), sample)
    whole: set[str] = set()
    while True:
        path = _heaviest(model, how, stages, whole)
        if path is None:
            return how
        try:
            finer = Modules(model, how.expanded | {path}, sample)
        except PlanError:  # it cannot be traced: it stays whole
            whole.add(path)
            continue
        if len(finer.first) < len(how.first) or len(finer.main.order) <= len(how.main.order):
            whole.add(path)
        else:
            how = finer


def _heaviest(model: nn.Module, how: Modules, stages: int, whole: set[str]) -> str | None:
    """The module to look into next."""
    weights: dict[str, int] = {}
    for layer in how.main.order:
        path = layer.partition("#")[0]
        own = {id(tensor): tensor.numel() for _, tensor in members(model.get_submodule(path), path)}
        weights[path] = 1 + sum(own.values())
    ranked = sorted(weights, key=lambda path: -weights[path])
    few = len(how.main.order) < stages
    if not ranked or not (few or weights[ranked[0]] * stages > sum(weights.values())):
        return None
    able = [path for path in ranked if path not in whole and _has_parts(model.get_submodule(path))]
    return next(iter(able if few else [path for path in able if path == ranked[0]]), None)


def _has_parts(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith(("torch.nn.", "torch.ao.nn.")) or isinstance(module, nn.Sequential)
    return own and not has_hooks(module) and next(module.children(), None) is not None
