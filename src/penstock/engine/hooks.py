"""Hooks on parameters, while a backward of the caller's runs the stages' own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["silent_hooks", "spare_hooks"]


@contextmanager
def silent_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hooks on parameters run once, on the whole gradient, in the caller's graph: not on each micro-batch's part."""
    hooked = [hooks for p in parameters if (hooks := p._backward_hooks)]
    kept = [list(hooks.items()) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()  # autograd holds on to the dictionary itself
    try:
        yield
    finally:
        for hooks, items in zip(hooked, kept, strict=True):
            hooks.update(items)


class _Spared:
    """A hook on a parameter, called where there is a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


def spare_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Autograd calls the hooks of an input that gets no gradient, with None; those of the plain model's are not."""
    if not parameters:
        return
    every: list[dict[int, Any]] = [p._backward_hooks for p in parameters]  # type: ignore[misc]
    for hooks in every:
        hooks.update({key: _Spared(hook) for key, hook in hooks.items() if not isinstance(hook, _Spared)})

    def restore() -> None:
        for hooks in every:
            hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _Spared)})

    torch.autograd.Variable._execution_engine.queue_callback(restore)
