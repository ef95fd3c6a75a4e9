"""Optimizers under PopTorch's names: torch's own, with the settings that PopTorch adds.

``loss_scaling`` multiplies the loss, and divides the gradients before the update. ``max_grad_norm`` clips the
gradients of the whole model. ``accum_type=torch.float32`` accumulates half-precision gradients in single precision.
``velocity_scaling`` and ``use_combined_accum`` are accepted and have no effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from penstock.compat.poptorch.base import Error, require

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_MOMENT_TYPES = ("accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type")


class Optimizer:
    """The base of PopTorch's optimizers: ``_own`` are the arguments of torch's class, ``_added`` those of PopTorch.

    Both are positional in this order, as in PopTorch. Arguments that are None have torch's defaults.
    """

    _own: ClassVar[tuple[str, ...]] = ()
    _added: ClassVar[tuple[str, ...]] = ()
    variable_attrs: VariableAttributes

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        names = (*self._own, *self._added)
        given = dict(zip(names, args, strict=False)) | kwargs
        unknown = [name for name in given if name not in names]
        if len(args) > len(names) or unknown:
            raise TypeError(f"{type(self).__name__} takes {', '.join(names)}, got {', '.join(unknown) or args}")
        own = {name: given[name] for name in self._own if given.get(name) is not None}
        super().__init__(params, **own)  # type: ignore[call-arg]
        self._extras: dict[str, Any] = {name: given.get(name) for name in self._added}
        scaling, norm = self._extras["loss_scaling"], self._extras["max_grad_norm"]
        require(scaling is None or scaling > 0, f"loss_scaling must be above 0, got {scaling!r}")
        require(norm is None or norm > 0, f"max_grad_norm must be above 0, got {norm!r}")
        groups: list[dict[str, Any]] = self.param_groups  # type: ignore[attr-defined]
        half = any(parameter.dtype.itemsize < 4 for group in groups for parameter in group["params"])
        for name, value in self._extras.items():
            if name.endswith("accum_type"):
                valid = value in (None, torch.float16, torch.float32)
                require(valid, f"{name} must be torch.float32 or torch.float16, got {value!r}")
                if name != "accum_type" and value is torch.float32 and half:
                    raise Error(f"{name}=torch.float32 is not supported for half-precision parameters: use float32")
        self.variable_attrs = VariableAttributes(self)

    @property
    def loss_scaling(self) -> float:
        """The factor of the loss in the backward pass."""
        return float(self._extras["loss_scaling"] or 1.0)

    @loss_scaling.setter
    def loss_scaling(self, value: float) -> None:
        require(value > 0, f"loss_scaling must be above 0, got {value!r}")
        self._extras["loss_scaling"] = value

    @property
    def max_grad_norm(self) -> float | None:
        """The norm that all gradients together are clipped to; None: no clipping."""
        norm: float | None = self._extras["max_grad_norm"]
        return norm

    @property
    def accum_type(self) -> torch.dtype | None:
        """The dtype in which gradients are accumulated."""
        dtype: torch.dtype | None = self._extras["accum_type"]
        return dtype

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[assignment]
        return {**state, "_extras": self._extras, "variable_attrs": self.variable_attrs}


class SGD(Optimizer, torch.optim.SGD):
    """``torch.optim.SGD`` with PopTorch's settings."""

    _own = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach", "differentiable")
    _added = (
        *("loss_scaling", "velocity_scaling", "use_combined_accum"),
        *("accum_type", "velocity_accum_type", "max_grad_norm"),
    )


class Adam(Optimizer, torch.optim.Adam):
    """``torch.optim.Adam`` with PopTorch's settings."""

    _own = (
        *("lr", "betas", "eps", "weight_decay", "amsgrad"),
        *("foreach", "maximize", "capturable", "differentiable", "fused"),
    )
    _added = ("loss_scaling", *_MOMENT_TYPES, "max_grad_norm")


class RMSprop(Optimizer, torch.optim.RMSprop):
    """``torch.optim.RMSprop`` with PopTorch's settings."""

    _own = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
    _added = ("loss_scaling", *_MOMENT_TYPES, "use_tf_variant", "max_grad_norm")

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        if self._extras["use_tf_variant"]:
            raise Error("RMSprop(use_tf_variant=True) is not supported: torch adds eps outside the square root")


class AdamW(Optimizer, torch.optim.AdamW):
    """``torch.optim.AdamW`` with PopTorch's settings. ``bias_correction=False`` leaves the moments uncorrected."""

    _own = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    _added = ("loss_scaling", "bias_correction", *_MOMENT_TYPES, "max_grad_norm")

    def __new__(cls, *args: Any, bias_correction: bool = True, **kwargs: Any) -> AdamW:
        return super().__new__(cls if bias_correction or cls is not AdamW else _UncorrectedAdamW)

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(params, *args, **kwargs)
        groups: list[dict[str, Any]] = self.param_groups
        uncorrected = isinstance(self, _UncorrectedAdamW)
        if self._extras["bias_correction"] is False and (groups[0]["amsgrad"] or not uncorrected):
            raise Error("pass AdamW(…, bias_correction=False) by name, and without amsgrad")


class _UncorrectedAdamW(AdamW):
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    direction = _adam_direction(self.state[parameter], parameter, group, corrected=False)
                    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
        return loss


class _LambBase(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class LAMB(Optimizer, _LambBase):
    """Layer-wise adaptive moments (You et al., "Large Batch Optimization for Deep Learning", 2019).

    Adam's direction, scaled for each parameter to the parameter's norm, clamped to ``max_weight_norm``.
    """

    _own = ("lr", "betas", "eps", "weight_decay")
    _added = ("bias_correction", "loss_scaling", "max_weight_norm", *_MOMENT_TYPES, "max_grad_norm")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        corrected, max_norm = self._extras["bias_correction"] is not False, self._extras["max_weight_norm"]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = _adam_direction(self.state[parameter], parameter, group, corrected)
                direction.add_(parameter, alpha=group["weight_decay"])
                norm = parameter.norm() if max_norm is None else parameter.norm().clamp(max=max_norm)
                length = direction.norm()
                trust = torch.where((norm > 0) & (length > 0), norm / length, 1.0)
                parameter.sub_(direction.mul_(trust * group["lr"]))
        return loss


def _adam_direction(state: dict[str, Any], parameter: Tensor, group: dict[str, Any], corrected: bool) -> Tensor:
    """Update Adam's moments of one parameter and return its direction."""
    grad = parameter.grad
    assert grad is not None
    if not state:
        state |= {"step": 0, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
    state["step"] += 1
    beta1, beta2 = group["betas"]
    mean, square = state["exp_avg"].lerp_(grad, 1 - beta1), state["exp_avg_sq"]
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if corrected:
        mean, square = mean / (1 - beta1 ** state["step"]), square / (1 - beta2 ** state["step"])
    direction: Tensor = mean / (square.sqrt() + group["eps"])
    return direction


class VariableAttributes:
    """``optimizer.variable_attrs``: settings marked as constant may not change in ``setOptimizer``."""

    def __init__(self, optimizer: Any) -> None:
        self._names = set(optimizer.param_groups[0]) - {"params"} | set(optimizer._extras)
        self._constant: set[str] = set()

    def isConstant(self, attr: str) -> bool:
        return self._check(attr) in self._constant

    def markAsConstant(self, attr: str) -> None:
        self._constant.add(self._check(attr))

    def markAsVariable(self, attr: str) -> None:
        self._constant.discard(self._check(attr))

    def constants(self, optimizer: Any) -> dict[str, Any]:
        """The values of an optimizer's constant settings."""
        extras = optimizer._extras
        return {
            name: extras[name] if name in extras else [group.get(name) for group in optimizer.param_groups]
            for name in sorted(self._constant)
        }

    def _check(self, attr: str) -> str:
        if attr not in self._names:
            raise Error(f"the optimizer has no attribute {attr!r}: it has {', '.join(sorted(self._names))}")
        return attr
