"""Layers that are made where they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["InputDevice", "LazyModule", "TensorOrTensors", "Tensors"]

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors
InputDevice: TypeAlias = int | str | torch.device | None


class LazyModule:
    """A function that makes a layer, in the place of the layer; ``AsyncPipe`` calls it on the rank that has it."""

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self.function = function

    def __call__(self) -> nn.Module:
        return self.function()
