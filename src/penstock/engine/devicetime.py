"""When GPUs did what they were told: events, on the host's clock.

    host     begin ●──────────────────────────────────────● end       read when the device had nothing left to do
    device         ●mark───e──e────●mark──e───e────●mark──● mark      a mark for each run

An event's time is known only as a number of milliseconds since another event, in single precision: exact for as long as
a step takes, but not for hours. So events count from the last mark, and marks from the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch

__all__ = ["DeviceTimes"]


class DeviceTimes:
    """The marks of all GPUs of this process; without GPUs, of none."""

    def __init__(self, devices: Iterable[torch.device], clock: Callable[[], int]) -> None:
        self.clock = clock
        self.marks: dict[torch.device, list[Any]] = {d: [] for d in devices if d.type == "cuda"}
        self._at: dict[torch.device, list[float]] = {}  # of each mark, in seconds since the first one
        self._begin = self._read()
        self._end: dict[torch.device, int] = {}

    def mark(self) -> int:
        """Begin a run; its number among the marks."""
        for device, marks in self.marks.items():
            marks.append(self.stamp(device))
        return max((len(marks) - 1 for marks in self.marks.values()), default=0)

    def stamp(self, device: torch.device) -> Any:
        """An event that happens when the device has done all that it was told so far; None for a CPU."""
        if device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    def allocated(self, device: torch.device) -> int:
        """Bytes of tensors there are on the device, as its allocator counts them; it is not waited for."""
        found: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return found

    def since(self, device: torch.device, mark: int, *events: Any) -> list[float]:
        """When events happened, in seconds since a mark."""
        return [self.marks[device][mark].elapsed_time(event) / 1e3 for event in events]

    def finish(self) -> None:
        """Wait for all devices, and find out when their marks were."""
        self._end = self._read()
        for device, marks in self.marks.items():
            at = [0.0]
            for before, after in pairwise(marks):
                at.append(at[-1] + before.elapsed_time(after) / 1e3)
            self._at[device] = at

    def on_host(self, device: torch.device, mark: int, seconds: float) -> int:
        """The host's clock, so many seconds after a mark."""
        at, begin, end = self._at[device], self._begin[device], self._end[device]
        share = (at[mark] + seconds) / at[-1] if at[-1] > 0 else 0.0
        return begin + round(share * (end - begin))

    def _read(self) -> dict[torch.device, int]:
        """The host's clock at a new mark on each device."""
        found = {}
        for device, marks in self.marks.items():
            torch.cuda.synchronize(device)
            marks.append(self.stamp(device))
            torch.cuda.synchronize(device)
            found[device] = self.clock()
        return found
