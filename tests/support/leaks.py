"""Detect resources that a pipeline leaks: threads, sockets, child processes, shared memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessResources"]


@dataclass(frozen=True)
class ProcessResources:
    """Resources of this process: ``before = ProcessResources.now()``, later ``before.assert_no_leaks()``."""

    python_threads: frozenset[str]
    threads: int
    sockets: int
    children: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> ProcessResources:
        gc.collect()
        return cls(
            frozenset(thread.name for thread in threading.enumerate()),
            len(os.listdir("/proc/self/task")),
            sum(1 for name in os.listdir("/proc/self/fd") if _is_socket(name)),
            frozenset(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()),
            frozenset(name for name in os.listdir("/dev/shm") if _is_ours(name)),
        )

    def assert_no_leaks(self, seconds: float = 10.0) -> None:
        """Poll, because threads take some time to end."""
        end = time.monotonic() + seconds
        while (left := self._new()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"left behind: {left}"

    def _new(self) -> dict[str, object]:
        now = ProcessResources.now()
        found: dict[str, object] = {}
        for name in ("python_threads", "children", "shared_memory"):
            if new := getattr(now, name) - getattr(self, name):
                found[name] = sorted(new)
        for name in ("threads", "sockets"):
            if getattr(now, name) > getattr(self, name):
                found[name] = f"{getattr(now, name)} instead of {getattr(self, name)}"
        return found


def _is_socket(name: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    except OSError:
        return False


def _is_ours(name: str) -> bool:
    try:
        return (Path("/dev/shm") / name).stat().st_uid == os.getuid() and f"_{os.getpid()}_" in name
    except OSError:
        return False
