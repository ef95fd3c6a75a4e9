"""Functions of higher layers that a lower layer needs. The package's ``__init__`` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Makes the context manager of ``Pipeline.trace`` of (executor, plan, mesh, steps, skip, prediction, quiet).
trace_recording: Callable[..., Any]
viz: Callable[[], Any]  # imports ``penstock.viz``, which draws the objects of all layers
