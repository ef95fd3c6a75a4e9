"""The pipeline and the plain model, step by step: the same numbers, or an error."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.demo.runs import Step
from penstock.errors import PenstockError
from penstock.progress_ui import ProgressUI

__all__ = ["TOLERANCE", "Comparison", "compare"]

TOLERANCE = 1e-9
"""How far losses and gradient norms may lie apart, relative to the plain model's where that is above 1.

Regrouped sums of doubles leave about 1e-15. A wrong gradient shows at once in its norm, and then in the losses.
"""


@dataclass
class _Sum:
    """The steps of an epoch so far, together."""

    losses: float = 0.0
    correct: int = 0
    samples: int = 0
    seconds: float = 0.0
    watched: float = 0.0  # the seconds whose bubble is known
    idle: float = 0.0

    def add(self, step: Step) -> None:
        if step.bubble is not None:
            self.watched += step.seconds
            self.idle += step.bubble * step.seconds
        self.losses += step.loss * step.samples
        self.correct += step.correct
        self.samples += step.samples
        self.seconds += step.seconds

    @property
    def loss(self) -> float:
        return self.losses / self.samples

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def speed(self) -> float:
        return self.samples / self.seconds

    @property
    def bubble(self) -> float | None:
        return self.idle / self.watched if self.watched else None

    def __str__(self) -> str:
        text = f"loss {self.loss:.4f}  accuracy {self.accuracy:.1%}  {self.speed:,.0f} samples/s"
        return text if self.bubble is None else f"{text}  bubble {self.bubble:.0%}"


@dataclass(frozen=True)
class Comparison:
    """What came of it. ``difference`` is the largest of a step, ``losses`` the pipeline's for each epoch."""

    difference: float
    losses: tuple[float, ...]
    bubble: float | None  # measured, over all steps


def compare(
    pipeline: Iterable[Step],
    plain: Iterable[Step],
    epochs: int,
    steps_per_epoch: int,
    shown: ProgressUI,
    told_every: int | None = None,
) -> Comparison:
    """Take a step of each in turn, to the end, and show how it goes: each epoch, and every so many steps if told to.

    A difference that is more than rounding's is an error.
    """
    shown.line("epoch  loss: pipeline        plain  difference  accuracy  samples/s  bubble")
    ours, its, all_steps = _Sum(), _Sum(), _Sum()
    largest = overall = 0.0
    losses = []
    for number, (our_step, its_step) in enumerate(zip(pipeline, plain, strict=True)):
        epoch, step = number // steps_per_epoch + 1, number % steps_per_epoch + 1
        if step == 1:
            ours, its, largest = _Sum(), _Sum(), 0.0
            shown.begin(f"epoch {epoch}/{epochs}", steps_per_epoch)
        for steps in (ours, all_steps):
            steps.add(our_step)
        its.add(its_step)
        largest = max(largest, _difference(our_step, its_step, f"epoch {epoch}, step {step}"))
        shown.advance(str(ours))
        if told_every is not None and (step % told_every == 0 or step == steps_per_epoch):
            shown.line(f"epoch {epoch}, step {step}/{steps_per_epoch}: {ours}")
        if step == steps_per_epoch:
            overall = max(overall, largest)
            losses.append(ours.loss)
            bubble = "-" if ours.bubble is None else f"{ours.bubble:.1%}"
            shown.line(
                f"{epoch:5}  {ours.loss:14.9f}  {its.loss:11.9f}  {largest:10.1e}  "
                f"{ours.accuracy:8.1%}  {ours.speed:9,.0f}  {bubble:>6}"
            )
    return Comparison(overall, tuple(losses), all_steps.bubble)


def _difference(ours: Step, its: Step, where: str) -> float:
    """How far two steps lie apart. More than rounding is an error."""
    if not math.isfinite(its.loss):
        raise PenstockError(f"{where}: the plain model's loss is {its.loss}. Choose a smaller learning rate")
    largest = 0.0
    for what, a, b in (("loss", ours.loss, its.loss), ("gradient norm", ours.grad_norm, its.grad_norm)):
        difference = abs(a - b) / max(1.0, abs(b))
        if not difference <= TOLERANCE:
            raise PenstockError(
                f"{where}: the {what} is {a!r} as a pipeline, but {b!r} in the plain model. They differ by "
                f"{difference:.1e}, and rounding explains {TOLERANCE:.0e} at most"
            )
        largest = max(largest, difference)
    if ours.correct != its.correct:
        raise PenstockError(
            f"{where}: {ours.correct} of {ours.samples} digits are right as a pipeline, but {its.correct} in the plain "
            "model"
        )
    return largest
