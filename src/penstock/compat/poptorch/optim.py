"""Optimizers under PopTorch's names: torch's own, with the settings that PopTorch adds, by name.

``loss_scaling`` multiplies the loss, and divides the gradients before the update. ``max_grad_norm`` clips the
gradients of the whole model. ``accum_type=torch.float32`` accumulates half-precision gradients in single precision;
``torch.float16``, ``velocity_scaling`` and ``use_combined_accum`` are accepted and have no effect.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from penstock.compat.poptorch.enums import Error, require

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_MOMENT_TYPES = " first_order_momentum_accum_type second_order_momentum_accum_type"


class Optimizer:
    """The base of PopTorch's optimizers. ``_added`` are PopTorch's settings. A setting of None has no effect."""

    _added = ""
    _extras: list[str]
    bias_correction: bool | None

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        names = ["loss_scaling", "accum_type", "max_grad_norm", *self._added.split()]
        extras = {name: kwargs.pop(name, None) for name in names}
        own = {name: value for name, value in kwargs.items() if value is not None}
        super().__init__(params, *args, **own)  # type: ignore[call-arg]
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        half = any(parameter.dtype.itemsize < 4 for group in groups for parameter in group["params"])
        for name, value in extras.items():
            if name in ("loss_scaling", "max_grad_norm"):
                require(value is None or value > 0, f"{name} must be above 0, got {value!r}")
            if name.endswith("accum_type"):
                valid = value in (None, torch.float16, torch.float32)
                require(valid, f"{name} must be torch.float32 or torch.float16, got {value!r}")
                if name != "accum_type" and value is torch.float32 and half:
                    raise Error(f"{name}=torch.float32 is not supported for half-precision parameters: use float32")
        if isinstance(self, LAMB) and (len(args) > 4 or own.keys() & {"amsgrad", "maximize"}):
            raise Error("LAMB takes lr, betas, eps and weight_decay by position or name, other settings by name only")
        if extras.get("use_tf_variant"):
            raise Error("RMSprop(use_tf_variant=True) is not supported: torch adds eps outside the square root")
        extras["loss_scaling"] = extras["loss_scaling"] or 1.0
        if extras.get("bias_correction") is False and own.get("amsgrad"):
            raise Error("AdamW(amsgrad=True, bias_correction=False) is not supported: leave out one of them")
        self.__setstate__({**extras, "_extras": names, "variable_attrs": VariableAttributes()})  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, **{name: getattr(self, name) for name in (*self._extras, "_extras", "variable_attrs")}}


class VariableAttributes(set[str]):
    """``optimizer.variable_attrs``: stores the marks. ``setOptimizer`` may change all settings."""

    isConstant, markAsConstant, markAsVariable = set.__contains__, set.add, set.discard


class SGD(Optimizer, torch.optim.SGD):
    _added = "velocity_scaling use_combined_accum velocity_accum_type"


class Adam(Optimizer, torch.optim.Adam):
    _added = _MOMENT_TYPES


class AdamW(Optimizer, torch.optim.AdamW):
    """With ``bias_correction=False`` the moments are not corrected."""

    _added = "bias_correction" + _MOMENT_TYPES

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.bias_correction is False:
            self.state = _UncorrectedState(None, self.state)


class _UncorrectedState(defaultdict[Any, Any]):
    """Adam's state without bias correction: the correction ``1 - beta ** step`` is 1 after infinitely many steps."""

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return self.setdefault(parameter, {"step": torch.tensor(math.inf), **moments})  # type: ignore[no-any-return]


class RMSprop(Optimizer, torch.optim.RMSprop):
    _added = "use_tf_variant" + _MOMENT_TYPES


class LAMB(Optimizer, torch.optim.Adam):
    """Layer-wise adaptive moments (You et al., "Large Batch Optimization for Deep Learning", 2019).

    Adam's direction, scaled for each parameter to the parameter's norm, clamped to ``max_weight_norm``.
    """

    _added = "bias_correction max_weight_norm" + _MOMENT_TYPES
    max_weight_norm: float | None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            (beta1, beta2), eps, decay = group["betas"], group["eps"], group["weight_decay"]
            for parameter in group["params"]:
                grad, state = parameter.grad, self.state[parameter]
                if grad is None:
                    continue
                if not state:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")} | {"step": 0}
                state["step"] += 1
                mean = state["exp_avg"].lerp_(grad, 1 - beta1)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                if self.bias_correction is not False:
                    mean, square = mean / (1 - beta1 ** state["step"]), square / (1 - beta2 ** state["step"])
                direction = (mean / (square.sqrt() + eps)).add_(parameter, alpha=decay)
                norm, length = parameter.norm().clamp(0.0, self.max_weight_norm), direction.norm()
                trust = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                parameter.sub_(direction.mul_(trust * group["lr"]))
        return loss
