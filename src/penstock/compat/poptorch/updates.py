"""The update of a training model's parameters: loss scale, clipping, the optimizer's step, and where its state is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import foreach_div_
from penstock.compat.poptorch.errors import Error
from penstock.compat.poptorch.options import Options
from penstock.compat.poptorch.variables import check_constants
from penstock.train.optimizer_offload import is_offloaded
from penstock.train.pipeline import Pipeline
from penstock.train.scaler import GradScaler

__all__ = ["Updates"]


class Updates:
    """Applies an optimizer to a pipeline's gradients, as its settings and the options say."""

    def __init__(self, options: Options, optimizer: Any) -> None:
        self.weights_off_chip: bool = options.TensorLocations.off_chip("weight")
        self.off_chip: bool = self.weights_off_chip or options.TensorLocations.off_chip("optimizer")
        self.automatic: bool = options.Training.automatic_loss_scaling
        self.optimizer: Any = None
        self._constants: dict[str, Any] = {}
        self._pipe: Pipeline | None = None
        self._scaler: GradScaler | None = None
        self.use(optimizer)

    def use(self, optimizer: Any) -> None:
        """Go on with ``optimizer``. One of the same kind without state of its own goes on with the other's state."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise Error(f"an optimizer is a poptorch.optim or torch.optim one, got {type(optimizer).__name__}")
        attributes = getattr(optimizer, "variable_attrs", None)
        constants = {} if attributes is None else attributes.constants(optimizer)
        check_constants(self._constants, constants)
        self._constants = constants
        before = self.optimizer
        if before is optimizer:
            return
        if before is not None and type(before) is type(optimizer) and not optimizer.state:
            _hand_over(before, optimizer)
        self.optimizer = optimizer
        if self._pipe is not None:
            self.attach(self._pipe)

    def attach(self, pipe: Pipeline) -> None:
        """Work on this pipeline's gradients."""
        self._pipe = pipe
        if self._scaler is None and self.automatic:
            self._scaler = GradScaler(pipe)
        if is_offloaded(self.optimizer):
            if self.weights_off_chip:
                raise Error("this optimizer brings the weights of another model to its devices: make a new one")
            return
        _move_state(self.optimizer)
        if self.off_chip:
            _offload(pipe, self.optimizer)

    def prepare(self) -> None:
        """Before a step: the gradients will be scaled as the optimizer says."""
        assert self._pipe is not None
        if self._scaler is None and self._pipe.loss_scale != self._scale:
            self._pipe.loss_scale = self._scale

    def apply(self) -> None:
        """After a step: update the parameters, and forget the gradients."""
        pipe, norm = self._pipe, getattr(self.optimizer, "max_grad_norm", None)
        assert pipe is not None
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        elif self._scale != 1.0:
            foreach_div_([p.grad for p in pipe.parameters() if p.grad is not None], self._scale)
        if norm is not None:
            pipe.clip_grad_norm_(norm)
        if self._scaler is None:
            self.optimizer.step()
        else:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        pipe.align_ties()
        pipe.zero_grad()

    @property
    def sums_wide(self) -> bool:
        """Whether gradients of half precision are to be summed in single."""
        parameters = (p for group in self.optimizer.param_groups for p in group["params"])
        wide = getattr(self.optimizer, "accum_type", None) is torch.float32
        return wide and any(parameter.dtype.itemsize < 4 for parameter in parameters)

    @property
    def _scale(self) -> float:
        return float(getattr(self.optimizer, "loss_scaling", 1.0))


def _hand_over(before: Any, now: Any) -> None:
    """Give the state of one optimizer to another one of the same parameters."""
    ours = {id(parameter) for group in now.param_groups for parameter in group["params"]}
    for parameter, state in before.state.items():
        if id(parameter) in ours:
            now.state[parameter] = state


def _offload(pipe: Pipeline, optimizer: Any) -> None:
    """Keep the state on the host. An LR scheduler that was made before has wrapped ``step``: that is done again."""
    wrapped = vars(optimizer).pop("step", None)
    pipe.offload_optimizer(optimizer)
    if wrapped is not None and hasattr(wrapped, "_wrapped_by_lr_sched"):
        streamed = optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer._opt_called = True
            return streamed(*args, **kwargs)

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = step


def _move_state(optimizer: Any) -> None:
    """Bring state that was made or loaded elsewhere to its parameters."""
    for parameter, state in optimizer.state.items():
        if isinstance(parameter, nn.Parameter):
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.device != parameter.device:
                    state[name] = value.to(parameter.device)
