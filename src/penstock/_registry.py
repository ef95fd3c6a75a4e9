"""Functions of higher layers that a lower layer needs. The package's ``__init__`` registers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

trace_recording: Callable[..., Any]
"""The context manager of ``Pipeline.trace``, which belongs to the profiler.

It is made of (executor, plan, mesh, steps, skip, prediction, quiet), and has an attribute ``trace``.
"""

viz: Callable[[], Any]
"""Imports ``penstock.viz``, which draws the objects of all layers."""
