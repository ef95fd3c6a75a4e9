"""What an optimizer, a checkpoint and a loss scaler touch of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.engine.channel.control import STATE
from penstock.engine.distributed import DistributedExecutor
from penstock.engine.replicas.dtensor import distribute_like, to_full
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PlanError
from penstock.split.plan import Plan, Tie
from penstock.train.clip import clip_grad_norm, grad_norm

__all__ = ["FqnMap", "PipelineState", "all_fqns", "load_state", "share_buffers", "stages_state_dict"]


# The model's own names, whatever was wrapped around parts of it.

_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}  # what torch.compile and checkpoint_wrapper put into names


class FqnMap:
    """Called with the name that something has now, gives the one that it had in the model."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: those of the model before anything was wrapped."""
        self.names = frozenset(names)

    def __call__(self, name: str) -> str:
        if not self.names or name in self.names:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def all_fqns(model: nn.Module) -> set[str]:
    """The names of all that a model has names for."""
    found = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return found | {name for name, _ in model.named_buffers(remove_duplicate=False)} | set(model.state_dict())


# State under the model's own names, whole or in parts.


def stages_state_dict(modules: Mapping[int, nn.Module], own: FqnMap) -> dict[str, Tensor]:
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
    own: FqnMap,
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
    missing = sorted(set(stages_state_dict(modules, own)) - set(state))
    known = set(map(own, model.state_dict()))
    unexpected = sorted(set(state) - known)
    if strict and (missing or unexpected):
        raise PlanError(
            f"the state does not fit the model: missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}. "
            "Load with strict=False to take what fits"
        )
    for module in modules.values():
        present = module.state_dict()
        fitting = {
            name: _with_layout_of(state[own(name)], there) for name, there in present.items() if own(name) in state
        }
        module.load_state_dict(fitting, strict=False)


def _with_layout_of(value: Any, there: Any) -> Any:
    return distribute_like(value, there) if isinstance(value, Tensor) and isinstance(there, Tensor) else value


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


class PipelineState:
    """The parameters and buffers of a pipeline's stages: those of this process, and of the whole model."""

    plan: Plan
    _model: nn.Module
    _modules: dict[int, nn.Module]
    _own_name: FqnMap
    _executor: ThreadExecutor | DistributedExecutor
    _loss_scale: float

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live in this process, under the model's own names, each once."""
        seen: set[int] = set()
        for module in self._modules.values():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._own_name(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live in this process, each once.

        Where there are none on a rank of a mesh, an empty one stands in: torch's optimizers do not take an empty list,
        and the same lines are to run on all ranks.
        """
        alone = True
        for _, parameter in self.named_parameters():
            alone = False
            yield parameter
        if alone and isinstance(self._executor, DistributedExecutor):
            yield self._stand_in

    @cached_property
    def _stand_in(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0))

    @property
    def stage_modules(self) -> Mapping[int, nn.Module]:
        """The stages that live in this process, by number."""
        return MappingProxyType(self._modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as an optimizer's ``zero_grad``."""
        for module in self._modules.values():
            module.zero_grad(set_to_none)

    def move(self, device: torch.device | str | None = None) -> None:
        """Move the parameters and buffers of the stages to ``device``; without one, back to the stages' own devices.

        They must be there for a step. The model's parameters are the stages', so it moves with them. Weights that live
        on the host (``Offload(weights=True)``) stay there.
        """
        self._check_open()
        stay = set() if self._executor.weights is None else set(map(id, self._executor.weights.at_home()))
        for stage, module in self._modules.items():
            there = torch.device(self._executor.stages[stage].device if device is None else device)
            share_buffers(self._model, module)
            module._apply(lambda tensor, there=there: tensor if id(tensor) in stay else tensor.to(there))  # type: ignore[no-untyped-call]
            share_buffers(module, self._model)

    def align_ties(self) -> None:
        """Give the copies of tied parameters on other devices the value of the model's own.

        For an optimizer that has the model's parameters and not the pipeline's: such copies are not among those.
        """
        if isinstance(self._executor, DistributedExecutor):
            raise PlanError("under a mesh each rank's optimizer has that rank's own parameters: use pipe.parameters()")
        self._executor.ties.align()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the whole model by their norm over all ranks, and return that norm on all of them."""
        total = self.grad_norm(norm_type)
        clip_grad_norm(self.parameters(), total, max_norm, norm_type, error_if_nonfinite)
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on all ranks; a parameter of several stages counts once."""
        self._check_open()
        counts, weights = self._executor.ties.counts_in_norm, self._executor.weights
        how: dict[str, Any] = {} if weights is None else {"device_of": weights.device_of}
        if isinstance(self._executor, DistributedExecutor):
            how["reduce"] = self._executor.reduce
        return grad_norm(self.parameters(), norm_type, counts, **how)

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers under the plain model's own names.

        Under a mesh these are this rank's stages; with ``full=True`` every rank gets the whole model's, on the CPU.
        Parameters that are in parts (DTensor) stay so where it is not full.
        """
        own, names = (
            stages_state_dict(self._modules, self._own_name),
            list(map(self._own_name, self._model.state_dict())),
        )
        if not full or not isinstance(self._executor, DistributedExecutor):
            return {name: own[name] for name in dict.fromkeys((*names, *own)) if name in own}
        parts = self._executor.gather({name: to_full(tensor).cpu() for name, tensor in own.items()}, STATE)
        first = {name: tensor for part in reversed(parts) for name, tensor in part.items()}  # the first rank's counts
        return {name: first[name] for name in names}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the plain model, or of a pipeline cut anyhow; under a mesh, a rank takes its part."""
        load_state(self._model, self._modules, state, strict, self.plan.ties, self._own_name)

    def train(self, mode: bool = True) -> Self:
        """Put the stages of this process into training mode, as ``nn.Module.train``."""
        self._model.train(mode)
        for module in self._modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the stages of this process into evaluation mode."""
        return self.train(False)

    @property
    def training(self) -> bool:
        return self._model.training

    @property
    def loss_scale(self) -> float:
        """What ``step`` multiplies the gradients by, and not the loss: a ``GradScaler`` sets it, on every rank."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        for stage in self._executor.stages.values():
            if stage.head is not None:
                stage.head.scale = scale

    def max_over_ranks(self, number: float) -> float:
        """The largest of the ranks' numbers, on all of them. Every rank calls it."""
        self._check_open()
        if not isinstance(self._executor, DistributedExecutor):
            return number
        return self._executor.max_over_ranks(number)

    def _check_open(self) -> None:
        raise NotImplementedError
