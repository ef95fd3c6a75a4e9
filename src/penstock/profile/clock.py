"""How long some work takes on a device: by the host's clock, or by a GPU's own."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

__all__ = ["Clock", "Span", "alone", "span"]

Span = Callable[[], float]
"""The seconds of some work; a GPU is waited for when they are asked for."""

Clock = Callable[[Callable[[], object], set[torch.device]], Span]
"""Does some work, on some devices, and has the seconds that it takes."""


def span(work: Callable[[], object], devices: set[torch.device]) -> Span:
    """Do some work, and take the time that it takes: on the device, if all of it is on one GPU."""
    if (device := alone(devices)) is not None:
        with torch.cuda.device(device):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()

        def on_device() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1000

        return on_device
    for device in devices:
        torch.accelerator.synchronize(device)
    start = perf_counter()
    work()
    for device in devices:
        torch.accelerator.synchronize(device)
    took = perf_counter() - start
    return lambda: took


def alone(devices: set[torch.device]) -> torch.device | None:
    """The GPU that does all the work."""
    return next((device for device in devices if len(devices) == 1 and device.type == "cuda"), None)
