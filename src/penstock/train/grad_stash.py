"""Gradients from before a step: given back if it fails, and not touched by what puts its own right."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["GradStash", "stashed_grads"]


class GradStash:
    """What ``.grad`` was before a step.

    ``apart``: gradients that are there already are taken away for its time, because a loss that counts as it goes will
    rescale what the step adds.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, apart: bool) -> None:
        self.before: dict[nn.Parameter, Tensor | None] = {}
        for parameter in parameters:
            if parameter.grad is None:
                self.before[parameter] = None
            elif apart:
                self.before[parameter] = parameter.grad
                parameter.grad = None

    def give_back(self) -> None:
        """After a step that failed."""
        for parameter, grad in self.before.items():
            parameter.grad = grad

    def add_back(self, factor: float | None) -> None:
        """After a step whose gradients ``factor`` puts right, if it is not None."""
        for parameter, before in self.before.items():
            if factor is not None and parameter.grad is not None:
                parameter.grad.mul_(factor)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


@contextmanager
def stashed_grads(parameters: Iterable[nn.Parameter], *, apart: bool) -> Iterator[None]:
    """Around a backward that adds to ``.grad``; one that fails leaves none where there were none."""
    aside = GradStash(parameters, apart=apart)
    try:
        yield
    except BaseException:
        aside.give_back()
        raise
    aside.add_back(None)
