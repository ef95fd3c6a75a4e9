"""Functions of higher layers that lower layers call. ``penstock/__init__.py`` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Creates the context manager of ``Pipeline.trace`` from (executor, plan, mesh, steps, skip, prediction, quiet).
trace_recording: Callable[..., Any]
viz: Callable[[], Any]  # imports ``penstock.viz``, which draws objects of all layers
