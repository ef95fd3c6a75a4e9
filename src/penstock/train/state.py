"""State under the model's own names, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from penstock.engine.shards import laid_out
from penstock.errors import PlanError
from penstock.split.plan import Tie
from penstock.train.names import OwnNames

__all__ = ["load_state", "share_buffers", "state_of"]


def state_of(modules: Mapping[int, nn.Module], own: OwnNames) -> dict[str, Tensor]:
    """The parameters and buffers of some stages, by their names in the model.

    What several stages have a copy of (a buffer that each one reads) is the first one's.
    """
    state: dict[str, Tensor] = {}
    for module in modules.values():
        for name, tensor in module.state_dict().items():
            state.setdefault(own(name), tensor)
    return state


def load_state(
    model: nn.Module,
    modules: Mapping[int, nn.Module],
    state: Mapping[str, Any],
    strict: bool,
    ties: Sequence[Tie],
    own: OwnNames,
) -> None:
    """Load what belongs to these stages from a state dict of the whole model, or of these stages.

    A tied parameter may stand there under one of its names only. What is in parts (DTensor) takes its part of a plain
    tensor.
    """
    state = dict(state)
    for tie in ties:
        there = [name for name in tie.names if name in state]
        if there:
            state.update({name: state[there[0]] for name in tie.names if name not in state})
    missing = sorted(set(state_of(modules, own)) - set(state))
    known = set(map(own, model.state_dict()))
    unexpected = sorted(set(state) - known)
    if strict and (missing or unexpected):
        raise PlanError(
            f"the state does not fit the model: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}. "
            "Load with strict=False to take what fits"
        )
    for module in modules.values():
        present = module.state_dict()
        fitting = {name: _as_there(state[own(name)], there) for name, there in present.items() if own(name) in state}
        module.load_state_dict(fitting, strict=False)


def _as_there(value: Any, there: Any) -> Any:
    return laid_out(value, there) if isinstance(value, Tensor) and isinstance(there, Tensor) else value


def share_buffers(source: nn.Module, target: nn.Module) -> None:
    """Give the buffers of one module to another one that has modules of the same names.

    A module's parameters stay the same objects when it is moved, its buffers do not.
    """
    theirs = dict(target.named_modules(remove_duplicate=False))
    for path, module in source.named_modules(remove_duplicate=False):
        other = theirs.get(path)
        for name, buffer in module._buffers.items():
            if other is not None and other is not module and name in other._buffers:
                other._buffers[name] = buffer
