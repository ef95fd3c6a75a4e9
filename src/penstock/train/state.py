"""Parameters and state of a pipeline: what an optimizer, a checkpoint and a loss scaler use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.engine.executor import Executor
from penstock.engine.replicas.dtensor import distribute_like
from penstock.errors import PlanError
from penstock.split.plan import Plan
from penstock.train.clip import clip_grad_norm, grad_norm
from penstock.train.mesh import Mesh

_WRAPPER_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}  # inserted by torch.compile and checkpoint_wrapper


class FqnMap:
    """Maps the current name of a parameter or module to its fully qualified name in the model."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names``: those of the model before anything was wrapped."""
        self.names = frozenset(names)

    def __call__(self, name: str) -> str:
        if not self.names or name in self.names:
            return name
        return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def all_fqns(model: nn.Module) -> set[str]:
    """The names of all modules, parameters, buffers and extra state of a model."""
    found = {name for name, _ in model.named_modules(remove_duplicate=False)}
    found |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return found | {name for name, _ in model.named_buffers(remove_duplicate=False)} | set(model.state_dict())


def stages_state_dict(modules: Mapping[int, nn.Module], fqn: FqnMap) -> dict[str, Tensor]:
    """The parameters and buffers of some stages under the model's names; of several copies, the first stage's."""
    state: dict[str, Tensor] = {}
    for module in modules.values():
        for name, tensor in module.state_dict().items():
            state.setdefault(fqn(name), tensor)
    return state


def share_buffers(source: nn.Module, target: nn.Module) -> None:
    """Give the buffers of one module to another with submodules of the same names.

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
    mesh: Mesh | None
    _model: nn.Module
    _modules: dict[int, nn.Module]
    _fqn: FqnMap
    _executor: Executor
    _loss_scale: float

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live in this process, under the model's own names, each once."""
        seen: set[int] = set()
        for module in self._modules.values():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield self._fqn(name), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that live in this process, each once.

        A rank of a mesh without parameters yields an empty placeholder, because torch's optimizers do not accept an
        empty list, and the same lines should run on all ranks.
        """
        empty = True
        for _, parameter in self.named_parameters():
            empty = False
            yield parameter
        if empty and self.mesh is not None:
            yield self._placeholder

    @cached_property
    def _placeholder(self) -> nn.Parameter:
        return nn.Parameter(torch.empty(0))

    @property
    def stage_modules(self) -> Mapping[int, nn.Module]:
        """The stages that live in this process, by index."""
        return MappingProxyType(self._modules)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as an optimizer's ``zero_grad``."""
        for module in self._modules.values():
            module.zero_grad(set_to_none)

    def move(self, device: torch.device | str | None = None) -> None:
        """Move the parameters and buffers of the stages to ``device``; without one, back to the stages' own devices.

        They must be there for a step. The model's parameters are the stages', so it moves with them. Weights that live
        on the host (``Offload(weights=True)``) stay there.
        """
        self._executor.check_idle()
        weights = self._executor.weights
        stay = set() if weights is None else set(map(id, weights.host_tensors()))
        for stage, module in self._modules.items():
            there = torch.device(self._executor.stages[stage].device if device is None else device)
            share_buffers(self._model, module)
            module._apply(lambda tensor, there=there: tensor if id(tensor) in stay else tensor.to(there))  # type: ignore[no-untyped-call]
            share_buffers(module, self._model)

    def align_ties(self) -> None:
        """Copy tied parameters' values from the model's own to their copies on other devices.

        For an optimizer that has the model's parameters instead of the pipeline's: copies are not among those.
        """
        self._executor.align_ties()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the whole model by their norm over all ranks, and return that norm on all of them."""
        total = self.grad_norm(norm_type)
        clip_grad_norm(self.parameters(), total, max_norm, norm_type, error_if_nonfinite)
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on all ranks; a parameter of several stages counts once."""
        executor = self._executor
        executor.check_idle()
        options: dict[str, Any] = {} if executor.weights is None else {"device_of": executor.weights.device_of}
        return grad_norm(self.parameters(), norm_type, executor.ties.counts_in_norm, executor.reduce, **options)

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers under the plain model's own names.

        Under a mesh these are this rank's stages; with ``full=True`` every rank gets the whole model's, on the CPU.
        DTensors stay sharded unless ``full``.
        """
        state = stages_state_dict(self._modules, self._fqn)
        if full:
            state = self._executor.gather_state(state)
        names = dict.fromkeys((*map(self._fqn, self._model.state_dict()), *state))
        return {name: state[name] for name in names if name in state}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state dict of the plain model, or of a pipeline with any cuts; under a mesh, a rank takes its part.

        A tied parameter may be there under one of its names only. DTensors take their shard of a plain tensor.
        """
        state, fqn = dict(state), self._fqn
        for tie in self.plan.ties:
            present = [name for name in tie.names if name in state]
            state.update({name: state[present[0]] for name in tie.names if present and name not in state})
        missing = sorted(set(stages_state_dict(self._modules, fqn)) - set(state))
        unexpected = sorted(set(state) - set(map(fqn, self._model.state_dict())))
        if strict and (missing or unexpected):
            raise PlanError(
                f"the state does not fit the model: missing {missing or 'nothing'}, unexpected "
                f"{unexpected or 'nothing'}. Load with strict=False to take what fits"
            )
        for module in self._modules.values():
            fitting = {}
            for name, own in module.state_dict().items():
                if fqn(name) in state:
                    value = state[fqn(name)]
                    tensors = isinstance(value, Tensor) and isinstance(own, Tensor)  # not so for extra state
                    fitting[name] = distribute_like(value, own) if tensors else value
            module.load_state_dict(fitting, strict=False)

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
        """The factor of the gradients of ``step``, but not of its loss: a ``GradScaler`` sets it on every rank."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._loss_scale = scale
        if self._executor.loss is not None:
            self._executor.loss.scale = scale

    def max_over_ranks(self, number: float) -> float:
        """The maximum of a number over the ranks, on all of them. Every rank calls it."""
        self._executor.check_idle()
        return self._executor.max_over_ranks(number)

    def broadcast(self, value: Any) -> Any:
        """The value of the last stage's rank, on every rank: ``pipe.broadcast(pipe(x))``. Every rank calls it."""
        self._executor.check_idle()
        return self._executor.broadcast(value)
