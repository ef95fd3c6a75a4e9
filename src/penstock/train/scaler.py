"""``GradScaler``: a loss scale that all ranks change together, and steps that all of them take or none."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock._torch import foreach_unscale_
from penstock.engine.replicas.dtensor import to_local
from penstock.errors import PipelineError, PlanError

__all__ = ["GradScaler"]

_FINITE, _NOT_FINITE, _HALF = 0.0, 1.0, 2.0  # what a rank found in its gradients: the largest counts for all
_SMALLEST_SCALE = 2.0**-126  # of a scale: float32 has its inverse
_STATE_NAMES = (
    "scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "_growth_tracker",
)  # as torch's scaler saves


class ScaledPipeline(Protocol):
    """What the scaler needs of a pipeline."""

    loss_scale: float  # what the gradients of a step are multiplied by

    def agree(self, number: float) -> float:
        """The largest of the ranks' numbers, on all of them. Every rank calls it."""
        ...


class GradScaler:
    """Keeps the gradients of a pipeline in the range of float16, as ``torch.amp.GradScaler`` does for a plain model.

        scaler = ps.GradScaler(pipe)
        result = pipe.step(x, y)         # gradients of scale * loss; result.loss is the loss itself
        scaler.unscale_(optimizer)       # if they are to be clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)           # on all ranks, or, where any of them found an inf or a nan, on none
        scaler.update()

    Every rank makes one with the same numbers, and makes the same calls; a rank without parameters has no optimizer,
    and passes None. Gradients may be accumulated over several steps: the scale changes in ``update`` alone. It is never
    lowered below ``min_scale``; without one, a scale that has become too small to be of use is an error.
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
        self._least = min_scale
        self._enabled = enabled
        self._compare("enabled", float(enabled))
        if enabled:
            numbers = init_scale, growth_factor, backoff_factor, growth_interval, 0
            self._take(dict(zip(_STATE_NAMES, numbers, strict=True)))
            self._compare("min_scale", 0.0 if min_scale is None else min_scale)
        else:
            pipe.loss_scale = 1.0
        # Of each optimizer, since the last update: what its gradients were found to be here, and whether it stepped.
        self._found: dict[Optimizer, float] = {}
        self._stepped: set[Optimizer] = set()
        self._agreed: list[float] = []

    # ── an iteration ─────────────────────────────────────────────────────────────────────────────────────────

    def scale(self, outputs: Any) -> Any:
        """A loss, or several in a list, tuple or iterable, times the scale: for ``pipe(x)`` and ``backward()``."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            # By a tensor, not a number: a float16 loss becomes a float32 one, which the scale does not overflow.
            return outputs * torch.full((), self._scale, device=outputs.device)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise PlanError(f"scale() takes a tensor or an iterable of tensors, got a {type(outputs).__name__}")

    def unscale_(self, optimizer: Optimizer | None) -> None:
        """Divide the gradients of an optimizer's parameters by the scale, before ``step`` would do it."""
        if not self._enabled or optimizer is None:
            return
        if optimizer in self._stepped:
            raise PipelineError("unscale_() was called after step() for the same optimizer: call it before")
        if optimizer in self._found:
            raise PipelineError("unscale_() was called twice for the same optimizer: call update() in between")
        if self._pipe.loss_scale != self._scale:
            raise PipelineError(
                f"the pipeline's gradients are scaled by {self._pipe.loss_scale:g}, this scaler's scale is "
                f"{self._scale:g}: use one scaler for a pipeline, the one that was made last"
            )
        self._found[optimizer] = self._unscale(optimizer)

    def step(self, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step()`` on all ranks, unless any rank's gradients have an inf or a nan: then on none."""
        if not self._enabled:
            return None if optimizer is None else optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or (args and args[0] is not None):
            raise PipelineError("GradScaler.step() takes no closure: gradients are there once, from pipe.step()")
        if optimizer is not None:
            if optimizer in self._stepped:
                raise PipelineError("step() was called twice for the same optimizer: call update() in between")
            if optimizer not in self._found:
                self.unscale_(optimizer)
            self._stepped.add(optimizer)
        agreed = self._pipe.agree(_FINITE if optimizer is None else self._found[optimizer])
        self._agreed.append(agreed)
        if agreed == _HALF:
            raise PlanError(
                "gradients in float16 were to be divided by the scale, which would lose the small ones that the scale "
                "is there for: keep the parameters in float32 and run under torch.autocast(..., torch.float16)"
            )
        return optimizer.step(*args, **kwargs) if optimizer is not None and agreed == _FINITE else None

    def update(self, new_scale: float | Tensor | None = None) -> bool:
        """Lower the scale if gradients since the last update were not finite, raise it after enough that were.

        Whether they were not, on any rank; False where the scale is given.
        """
        if not self._enabled:
            return False
        found = _FINITE
        if new_scale is not None:
            self._take({**self.state_dict(), "scale": float(new_scale)})
        else:
            # Steps have been agreed on; an optimizer that was unscaled and not stepped has not.
            found = self._pipe.agree(max([-1.0, *self._agreed, *self._found.values()]))
            if found < _FINITE:
                raise PipelineError("update() was called before step(): no gradients were looked at since the last one")
            self._change(found)
        self._found.clear()
        self._stepped.clear()
        self._agreed.clear()
        return found > _FINITE

    # ── its state ────────────────────────────────────────────────────────────────────────────────────────────

    def get_scale(self) -> float:
        """The scale now; 1.0 where scaling is switched off."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """The scale and how it changes, under the names that ``torch.amp.GradScaler`` uses; empty if switched off."""
        if not self._enabled:
            return {}
        numbers = self._scale, self._growth_factor, self._backoff_factor, self._growth_interval, self._growth_tracker
        return dict(zip(_STATE_NAMES, numbers, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on all ranks; one of ``torch.amp.GradScaler`` will do."""
        if self._enabled:
            self._take(state)

    # ── how it is done ───────────────────────────────────────────────────────────────────────────────────────

    def _take(self, state: Mapping[str, Any]) -> None:
        """Take these numbers, if they are sound, and the same on all ranks."""
        problem = _invalid_state(state, self._least)
        if self._pipe.agree(float(problem is not None)):
            raise PlanError(problem or "GradScaler was given numbers on another rank that cannot be: see its error")
        for name in _STATE_NAMES:
            self._compare(name, float(state[name]))
        self._scale = self._pipe.loss_scale = _to_float32(state["scale"])
        self._growth_factor, self._backoff_factor = float(state["growth_factor"]), float(state["backoff_factor"])
        self._growth_interval, self._growth_tracker = int(state["growth_interval"]), int(state["_growth_tracker"])

    def _compare(self, name: str, number: float) -> None:
        largest, smallest = self._pipe.agree(number), -self._pipe.agree(-number)
        if largest != smallest:
            raise PlanError(
                f"GradScaler's {name} is {number:g} here, and between {smallest:g} and {largest:g} over the ranks: "
                "give every rank the same"
            )

    def _change(self, found: float) -> None:
        """The scale after an iteration, rounded to float32 as torch keeps it."""
        if found > _FINITE:
            lower = max(_to_float32(self._scale * self._backoff_factor), _to_float32(self._least or 0.0))
            if lower < _SMALLEST_SCALE:
                raise PipelineError(
                    f"gradients are not finite at a scale of {self._scale:g} either: not the scale makes them so, but "
                    "the model or its data. Look at result.loss, or at the gradients of a step without a scaler"
                )
            self._scale, self._growth_tracker = lower, 0
        elif self._growth_tracker + 1 < self._growth_interval:
            self._growth_tracker += 1
        else:
            grown = _to_float32(self._scale * self._growth_factor)
            self._scale, self._growth_tracker = grown if math.isfinite(grown) else self._scale, 0
        self._pipe.loss_scale = self._scale

    @torch.no_grad()
    def _unscale(self, optimizer: Optimizer) -> float:
        grads: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(parameter.grad.dtype is torch.float16 for parameter in parameters):
            return _HALF  # said to all ranks by ``step``, and nothing has been divided
        for parameter in parameters:
            values = _grad_values(parameter)
            grads[values.device, values.dtype].append(values)
        found: dict[torch.device, Tensor] = {}
        for (device, _), group in grads.items():
            if device not in found:
                found[device] = torch.zeros((), device=device)
            inverse = torch.full((), 1 / self._scale, device=device)
            foreach_unscale_(group, found[device], inverse)
        return max((float(flag) for flag in found.values()), default=_FINITE)


def _grad_values(parameter: Tensor) -> Tensor:
    """The real numbers of a gradient, to be changed in place."""
    assert parameter.grad is not None
    if not parameter.grad.is_sparse and parameter.grad.is_conj():
        parameter.grad = parameter.grad.resolve_conj()
    grad = to_local(parameter.grad)
    if grad.is_sparse:
        grad = grad._values()
    return torch.view_as_real(grad) if grad.is_complex() else grad


def _to_float32(number: Any) -> float:
    return float(torch.tensor(float(number), dtype=torch.float32))


def _invalid_state(state: Mapping[str, Any], least: float | None) -> str | None:
    """What cannot be in a scaler's numbers, if anything."""
    missing = [name for name in _STATE_NAMES if name not in state]
    if missing:
        return (
            f"a saved GradScaler has {', '.join(_STATE_NAMES)}; here {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing. One that was switched off saves nothing"
        )
    scale, growth, backoff, interval, _ = (float(state[name]) for name in _STATE_NAMES)
    if not _SMALLEST_SCALE <= _to_float32(scale) < math.inf:
        return f"the scale must be a positive number that float32 holds, as it does its inverse, got {scale:g}"
    if least is not None and not 0 < least <= scale:
        return f"min_scale must be a positive number, and no more than the scale, {scale:g}; got {least:g}"
    if not growth > 1:
        return f"growth_factor must be more than 1, got {growth:g}"
    if not 0 < backoff < 1:
        return f"backoff_factor must be more than 0 and less than 1, got {backoff:g}"
    return None if interval >= 1 else f"growth_interval must be 1 at least, got {interval:g}"
