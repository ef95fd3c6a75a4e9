"""Optimizers under PopTorch's names: torch's own, with the settings that PopTorch adds.

``loss_scaling`` multiplies the loss, and divides the gradients before the update. ``max_grad_norm`` clips the
gradients of the whole model. ``accum_type=torch.float32`` sums half precision's gradients in single. State has its
parameter's type, or that of a wider one. ``velocity_scaling`` and ``use_combined_accum``, which say how PopTorch
arranges its sums, are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.variables import VariableAttributes

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop"]

Betas = tuple[float, float]
_TYPES = (None, torch.float16, torch.float32)


class Optimizer:
    """What PopTorch adds to an optimizer of torch."""

    variable_attrs: VariableAttributes

    def _extend(self, **extras: Any) -> None:
        """Take the settings that torch does not have, and check them."""
        self._extras = extras
        scaling, norm = extras["loss_scaling"], extras["max_grad_norm"]
        require(scaling is None or scaling > 0, f"loss_scaling must be above 0, got {scaling!r}")
        require(norm is None or norm > 0, f"max_grad_norm must be above 0, got {norm!r}")
        for name, value in extras.items():
            if name.endswith("accum_type"):
                require(value in _TYPES, f"{name} must be torch.float32 or torch.float16, got {value!r}")
                if name != "accum_type" and value is torch.float32:
                    self._refuse_wider(name)
        self.variable_attrs = VariableAttributes(self)

    def _refuse_wider(self, name: str) -> None:
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        if any(parameter.dtype.itemsize < 4 for group in groups for parameter in group["params"]):
            raise Error(f"{name}=torch.float32 is not there for parameters of half precision: keep those in float32")

    @property
    def loss_scaling(self) -> float:
        """What the loss is multiplied by for the backward."""
        return float(self._extras["loss_scaling"] or 1.0)

    @loss_scaling.setter
    def loss_scaling(self, value: float) -> None:
        require(value > 0, f"loss_scaling must be above 0, got {value!r}")
        self._extras["loss_scaling"] = value

    @property
    def max_grad_norm(self) -> float | None:
        """What the norm of all gradients is clipped to; None: it is not."""
        norm: float | None = self._extras["max_grad_norm"]
        return norm

    @property
    def accum_type(self) -> torch.dtype | None:
        """The type in which gradients are summed."""
        kind: torch.dtype | None = self._extras["accum_type"]
        return kind

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, "_extras": self._extras, "variable_attrs": self.variable_attrs}


def _given(**values: Any) -> dict[str, Any]:
    """Without those that are None: torch's defaults are PopTorch's."""
    return {name: value for name, value in values.items() if value is not None}


class SGD(Optimizer, torch.optim.SGD):
    """``torch.optim.SGD``, with PopTorch's settings."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool = False,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = _given(momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        own |= _given(maximize=maximize, foreach=foreach, differentiable=differentiable)
        torch.optim.SGD.__init__(self, params, lr, **own)
        self._extend(
            loss_scaling=loss_scaling,
            velocity_scaling=velocity_scaling,
            use_combined_accum=use_combined_accum,
            accum_type=accum_type,
            velocity_accum_type=velocity_accum_type,
            max_grad_norm=max_grad_norm,
        )


class Adam(Optimizer, torch.optim.Adam):
    """``torch.optim.Adam``, with PopTorch's settings."""

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: Betas | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad, foreach=foreach)
        own |= _given(maximize=maximize, capturable=capturable, differentiable=differentiable, fused=fused)
        torch.optim.Adam.__init__(self, params, **own)
        self._extend(
            loss_scaling=loss_scaling,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )


class AdamW(Optimizer, torch.optim.AdamW):
    """``torch.optim.AdamW``, with PopTorch's settings. ``bias_correction=False`` takes the moments as they are."""

    def __new__(cls, *args: Any, bias_correction: bool = True, **kwargs: Any) -> AdamW:
        return super().__new__(cls if bias_correction or cls is not AdamW else _UncorrectedAdamW)

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: Betas | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool = True,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        own = _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
        torch.optim.AdamW.__init__(self, params, **own)
        if not bias_correction and (amsgrad or not isinstance(self, _UncorrectedAdamW)):
            raise Error("AdamW(…, bias_correction=False) is written by name, and without amsgrad")
        self._extend(
            loss_scaling=loss_scaling,
            bias_correction=bias_correction,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )


class RMSprop(Optimizer, torch.optim.RMSprop):
    """``torch.optim.RMSprop``, with PopTorch's settings."""

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        if use_tf_variant:
            raise Error("RMSprop(use_tf_variant=True) is not there: torch adds eps outside the square root")
        own = _given(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum, centered=centered)
        torch.optim.RMSprop.__init__(self, params, **own)
        self._extend(
            loss_scaling=loss_scaling,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )


class LAMB(Optimizer, torch.optim.Optimizer):
    """Layer-wise adaptive moments (You et al., "Large Batch Optimization for Deep Learning", 2019).

    Adam's direction, scaled in each parameter to the parameter's own norm, of which ``max_weight_norm`` is the most
    that counts.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        betas: Betas | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool = True,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        defaults |= _given(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torch.optim.Optimizer.__init__(self, params, {**defaults, "max_weight_norm": max_weight_norm})
        self._extend(
            loss_scaling=loss_scaling,
            bias_correction=bias_correction,
            accum_type=accum_type,
            first_order_momentum_accum_type=first_order_momentum_accum_type,
            second_order_momentum_accum_type=second_order_momentum_accum_type,
            max_grad_norm=max_grad_norm,
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = _adam(self.state[parameter], parameter, group, self._extras["bias_correction"])
                direction.add_(parameter, alpha=group["weight_decay"])
                norm, most = parameter.norm(), group["max_weight_norm"]
                norm = norm if most is None else norm.clamp(max=most)
                length = direction.norm()
                trust = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                parameter.sub_(direction.mul_(trust * group["lr"]))
        return loss


class _UncorrectedAdamW(AdamW):
    """AdamW whose moments are not corrected for having begun at zero."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = _adam(self.state[parameter], parameter, group, corrected=False)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        return loss


def _adam(state: dict[str, Any], parameter: Tensor, group: dict[str, Any], corrected: bool) -> Tensor:
    """Adam's direction for one parameter, whose moments are moved on."""
    grad = parameter.grad
    assert grad is not None
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] += 1
    first, second = group["betas"]
    state["exp_avg"].lerp_(grad, 1 - first)
    state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
    mean, square = state["exp_avg"], state["exp_avg_sq"]
    if corrected:
        mean, square = mean / (1 - first ** state["step"]), square / (1 - second ** state["step"])
    direction: Tensor = mean / (square.sqrt() + group["eps"])
    return direction
