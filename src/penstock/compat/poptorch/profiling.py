"""``options.enableProfiling``: a trace of a model's first call, in the format of trace viewers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock._torch import profile_all_threads

__all__ = ["profiled"]


@contextmanager
def profiled(directory: str | None, name: str) -> Iterator[None]:
    """Write what runs to ``<directory>/<name>.json``; without a directory, just run it."""
    if directory is None:
        yield
        return
    Path(directory).mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(experimental_config=profile_all_threads()) as profile:
        yield
    profile.export_chrome_trace(str(Path(directory) / f"{name}.json"))
