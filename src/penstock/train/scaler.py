"""``ps.GradScaler``: a loss scale that all ranks share. Either all ranks step, or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock._torch import foreach_unscale_
from penstock.engine.replicas.dtensor import to_local
from penstock.errors import PipelineError, PlanError

_FINITE, _NOT_FINITE, _HALF = 0.0, 1.0, 2.0  # the state of a rank's gradients; ranks use the maximum over all ranks
_SMALLEST_SCALE = 2.0**-126  # whose inverse float32 can represent
_STATE_NAMES = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")  # torch's names


class ScaledPipeline(Protocol):
    """The part of a pipeline that the scaler uses: the factor of its gradients, and a reduction over its ranks."""

    loss_scale: float

    def max_over_ranks(self, number: float) -> float: ...


class GradScaler:
    """Keeps the gradients of a pipeline in the range of float16, as ``torch.amp.GradScaler`` does for a plain model.

        scaler = ps.GradScaler(pipe)
        result = pipe.step(x, y)         # gradients of scale * loss; result.loss is the loss itself
        scaler.unscale_(optimizer)       # if they are to be clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)           # on all ranks, or on none if any of them found an inf or a nan
        scaler.update()

    Every rank creates a scaler with the same arguments and makes the same calls. A rank without parameters passes None
    as its optimizer. Gradients may be accumulated over several steps, because only ``update`` changes the scale. The
    scale does not fall below ``min_scale``. Without ``min_scale``, a scale that becomes too small is an error.
    """

    def __init__(
        self,
        pipe: ScaledPipeline,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float | None = None,
        enabled: bool = True,
    ) -> None:
        self._pipe = pipe
        self._min_scale = min_scale
        self._enabled = enabled
        self._check_equal("enabled", float(enabled))
        if enabled:
            numbers = init_scale, growth_factor, backoff_factor, growth_interval, 0
            self._check_equal("min_scale", min_scale or 0.0)
            self._set_state(dict(zip(_STATE_NAMES, numbers, strict=True)))
        else:
            pipe.loss_scale = 1.0
        # Since the last update: states of local gradients, optimizers that stepped, states over all ranks.
        self._local_states: dict[Optimizer, float] = {}
        self._stepped: set[Optimizer] = set()
        self._global_states: list[float] = []

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale: for ``pipe(x)`` and ``backward()``."""
        if not self._enabled:
            return outputs
        # A tensor, not a number: a float16 loss becomes float32, which the scale does not overflow.
        return outputs * torch.full((), self._scale, device=outputs.device)

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, for example to clip them before ``step``."""
        if not self._enabled or optimizer is None:
            return
        if optimizer in self._stepped:
            raise PipelineError("unscale_() was called after step() for the same optimizer: call it before")
        if optimizer in self._local_states:
            raise PipelineError("unscale_() was called twice for the same optimizer: call update() in between")
        if self._pipe.loss_scale != self._scale:
            raise PipelineError(
                f"the pipeline's gradients are scaled by {self._pipe.loss_scale:g}, this scaler's scale is "
                f"{self._scale:g}: use one scaler for a pipeline, the one that was made last"
            )
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(parameter.grad.dtype is torch.float16 for parameter in parameters):
            self._local_states[optimizer] = _HALF  # ``step`` raises the error on all ranks
            return
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if not parameter.grad.is_sparse and parameter.grad.is_conj():
                parameter.grad = parameter.grad.resolve_conj()
            grad = to_local(parameter.grad)
            values = grad._values() if grad.is_sparse else grad
            grads[values.device, values.dtype].append(torch.view_as_real(values) if values.is_complex() else values)
        flags = []
        for (device, _), group in grads.items():
            flags.append(torch.zeros((), device=device))
            foreach_unscale_(group, flags[-1], torch.full((), 1 / self._scale, device=device))
        self._local_states[optimizer] = max(map(float, flags), default=_FINITE)

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()`` on all ranks, or on none if gradients of any rank have an inf or a nan."""
        if not self._enabled:
            return None if optimizer is None else optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or (args and args[0] is not None):
            raise PipelineError("GradScaler.step() takes no closure: pipe.step() has computed the gradients")
        if optimizer is not None:
            if optimizer in self._stepped:
                raise PipelineError("step() was called twice for the same optimizer: call update() in between")
            if optimizer not in self._local_states:
                self.unscale_(optimizer)
            self._stepped.add(optimizer)
        agreed = self._pipe.max_over_ranks(_FINITE if optimizer is None else self._local_states[optimizer])
        self._global_states.append(agreed)
        if agreed == _HALF:
            raise PlanError(
                "gradients in float16 cannot be divided by the scale without losing the small values that it protects: "
                "keep the parameters in float32 and run under torch.autocast(..., torch.float16)"
            )
        return optimizer.step(*args, **kwargs) if optimizer is not None and agreed == _FINITE else None

    def update(self, new_scale: float | Tensor | None = None) -> bool:
        """Lower the scale if gradients since the last update were not finite; raise it after enough finite steps.

        Returns whether they were not finite on any rank; False if ``new_scale`` is given.
        """
        if not self._enabled:
            return False
        found = _FINITE
        if new_scale is not None:
            self._set_state({**self.state_dict(), "scale": float(new_scale)})
        else:
            # ``step`` has exchanged its states. States of optimizers that were unscaled but not stepped are local.
            found = self._pipe.max_over_ranks(max([-1.0, *self._global_states, *self._local_states.values()]))
            if found < _FINITE:
                raise PipelineError("update() was called before step(): no gradients were checked since the last one")
            self._adjust_scale(found)
        self._local_states.clear()
        self._stepped.clear()
        self._global_states.clear()
        return found > _FINITE

    def get_scale(self) -> float:
        """The present scale; 1.0 if scaling is disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The state, with the keys of ``torch.amp.GradScaler``; empty if disabled."""
        if not self._enabled:
            return {}
        numbers = self._scale, self._growth_factor, self._backoff_factor, self._growth_interval, self._growth_tracker
        return dict(zip(_STATE_NAMES, numbers, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state on all ranks. A state of ``torch.amp.GradScaler`` works too."""
        if self._enabled:
            self._set_state(state)

    def _set_state(self, state: Mapping[str, Any]) -> None:
        """Set the state, if it is valid and the same on all ranks."""
        problem = _invalid_state(state, self._min_scale)
        if self._pipe.max_over_ranks(float(problem is not None)):
            raise PlanError(problem or "GradScaler was given an invalid state on another rank: see its error")
        for name in _STATE_NAMES:
            self._check_equal(name, float(state[name]))
        self._scale = self._pipe.loss_scale = _to_float32(state["scale"])
        self._growth_factor, self._backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self._growth_interval, self._growth_tracker = int(state["growth_interval"]), int(state["_growth_tracker"])

    def _check_equal(self, name: str, number: float) -> None:
        largest, smallest = self._pipe.max_over_ranks(number), -self._pipe.max_over_ranks(-number)
        if largest != smallest:
            raise PlanError(f"GradScaler's {name} is {smallest:g} to {largest:g} over the ranks: pass the same on all")

    def _adjust_scale(self, found: float) -> None:
        """Update the scale after an iteration, rounded to float32 as in torch."""
        if found > _FINITE:
            lower = max(_to_float32(self._scale * self._backoff_factor), _to_float32(self._min_scale or 0.0))
            if lower < _SMALLEST_SCALE:
                raise PipelineError(
                    f"gradients are not finite even at a scale of {self._scale:g}: check the model and its data"
                )
            self._scale, self._growth_tracker = lower, 0
        elif self._growth_tracker + 1 < self._growth_interval:
            self._growth_tracker += 1
        else:
            grown = _to_float32(self._scale * self._growth_factor)
            self._scale, self._growth_tracker = grown if math.isfinite(grown) else self._scale, 0
        self._pipe.loss_scale = self._scale


def _to_float32(number: Any) -> float:
    return float(torch.tensor(float(number), dtype=torch.float32))


def _invalid_state(state: Mapping[str, Any], least: float | None) -> str | None:
    missing = [name for name in _STATE_NAMES if name not in state]
    if missing:
        return (
            f"the state of a GradScaler has {', '.join(_STATE_NAMES)}, but this one lacks {', '.join(missing)}. A "
            "disabled GradScaler saves nothing"
        )
    scale, growth, backoff, interval, _ = (float(state[name]) for name in _STATE_NAMES)
    if not _SMALLEST_SCALE <= _to_float32(scale) < math.inf:
        return f"the scale must be a positive number, and float32 must hold it and its inverse, got {scale:g}"
    if least is not None and not 0 < least <= scale:
        return f"min_scale must be a positive number, and no more than the scale, {scale:g}; got {least:g}"
    if not (growth > 1 > backoff > 0 and interval >= 1):
        return (
            "growth_factor must be more than 1, backoff_factor between 0 and 1 and growth_interval 1 at least, got "
            f"{growth:g}, {backoff:g} and {interval:g}"
        )
    return None
