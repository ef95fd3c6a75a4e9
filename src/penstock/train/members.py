"""What an optimizer, a checkpoint and a loss scaler touch of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.engine.channel.control import STATE
from penstock.engine.local import LocalCrew
from penstock.engine.process import ProcessCrew
from penstock.engine.shards import whole
from penstock.errors import PlanError
from penstock.split.plan import Plan
from penstock.train.clip import clip_grad_norm, grad_norm
from penstock.train.names import OwnNames
from penstock.train.state import load_state, share_buffers, state_of

__all__ = ["Members"]


class Members:
    """The parameters and buffers of a pipeline's stages: those of this process, and of the whole model."""

    plan: Plan
    _model: nn.Module
    _modules: dict[int, nn.Module]
    _own_name: OwnNames
    _crew: LocalCrew | ProcessCrew
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
        if alone and isinstance(self._crew, ProcessCrew):
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
        stay = set() if self._crew.weights is None else set(map(id, self._crew.weights.at_home()))
        for stage, module in self._modules.items():
            there = torch.device(self._crew.stages[stage].device if device is None else device)
            share_buffers(self._model, module)
            module._apply(lambda tensor, there=there: tensor if id(tensor) in stay else tensor.to(there))  # type: ignore[no-untyped-call]
            share_buffers(module, self._model)

    def align_ties(self) -> None:
        """Give the copies of tied parameters on other devices the value of the model's own.

        For an optimizer that has the model's parameters and not the pipeline's: such copies are not among those.
        """
        if isinstance(self._crew, ProcessCrew):
            raise PlanError("under a mesh each rank's optimizer has that rank's own parameters: use pipe.parameters()")
        self._crew.ties.align()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip the gradients of the whole model by their norm over all ranks, and return that norm on all of them."""
        total = self.grad_norm(norm_type)
        clip_grad_norm(self.parameters(), total, max_norm, norm_type, error_if_nonfinite)
        return total

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients of the whole model, on all ranks; a parameter of several stages counts once."""
        self._check_open()
        counts, weights = self._crew.ties.counts, self._crew.weights
        how: dict[str, Any] = {} if weights is None else {"device_of": weights.device_of}
        if isinstance(self._crew, ProcessCrew):
            how["reduce"] = self._crew.reduce
        return grad_norm(self.parameters(), norm_type, counts, **how)

    def state_dict(self, *, full: bool = False) -> dict[str, Tensor]:
        """Parameters and buffers under the plain model's own names.

        Under a mesh these are this rank's stages; with ``full=True`` every rank gets the whole model's, on the CPU.
        Parameters that are in parts (DTensor) stay so where it is not full.
        """
        own, names = state_of(self._modules, self._own_name), list(map(self._own_name, self._model.state_dict()))
        if not full or not isinstance(self._crew, ProcessCrew):
            return {name: own[name] for name in dict.fromkeys((*names, *own)) if name in own}
        parts = self._crew.gather({name: whole(tensor).cpu() for name, tensor in own.items()}, STATE)
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
        for stage in self._crew.stages.values():
            if stage.head is not None:
                stage.head.scale = scale

    def agree(self, number: float) -> float:
        """The largest of the ranks' numbers, on all of them. Every rank calls it."""
        self._check_open()
        if not isinstance(self._crew, ProcessCrew):
            return number
        return self._crew.agree(number)

    def _check_open(self) -> None:
        raise NotImplementedError
