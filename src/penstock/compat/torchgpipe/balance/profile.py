"""What each layer costs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.split import chain_of
from penstock.split.measure import measure

__all__ = ["in_training", "layerwise_sandbox", "measured_on", "profile_sizes", "profile_times", "refuse_gradients"]


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Copies of the layers, on a device and in training mode."""
    for layer in module:
        yield copy.deepcopy(layer).to(device).train()


def profile_times(module: nn.Sequential, sample: Any, timeout: float, device: torch.device) -> list[int]:
    """The microseconds that forward and backward of each layer take."""
    refuse_gradients(module)
    with in_training(module):
        measured = measure(chain_of(module), (sample,), timeout=timeout, device=measured_on(device))
    return [round((layer.forward + layer.backward) * 1e6) for layer in measured.layers]


def profile_sizes(
    module: nn.Sequential, input: Any, chunks: int, param_scale: float, device: torch.device
) -> list[int]:
    """The bytes of each layer's parameters, times a scale, and of what its backward needs of one micro-batch."""
    with in_training(module):
        measured = measure(chain_of(module), (input,), timeout=0.0, device=measured_on(device))
    return [round(layer.activation_bytes / chunks + layer.parameter_bytes * param_scale) for layer in measured.layers]


def refuse_gradients(module: nn.Module) -> None:
    if any(parameter.grad is not None for parameter in module.parameters()):
        raise ValueError("some parameter already has gradient")


def measured_on(device: torch.device | int | str | None) -> torch.device | None:
    """The device that was named; else the current GPU, or where there is none, wherever the layers are."""
    if device is None:
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    return torch.device(device)


@contextmanager
def in_training(module: nn.Module) -> Iterator[None]:
    """The module in training mode, and afterwards each of its parts in its own."""
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.train()
        yield
    finally:
        for part, mode in modes:
            part.training = mode
