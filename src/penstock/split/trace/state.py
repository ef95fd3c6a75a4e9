"""The recorder that is active in this thread, and the line of the user's code that is running."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

_here = threading.local()


def recorder() -> Any:
    """The ``Recorder`` that this thread's forward is recorded by; None outside of a recording."""
    return getattr(_here, "recorder", None)


@contextmanager
def recording_in_thread(active: Any) -> Iterator[None]:
    """Marks and values that this thread meets go to ``active``."""
    before = recorder()
    _here.recorder = active
    try:
        yield
    finally:
        _here.recorder = before


LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep + "compat" + os.sep,
    os.path.dirname(os.__file__) + os.sep + "contextlib",
    os.path.dirname(os.__file__) + os.sep + "functools",
    os.path.dirname(os.__file__) + os.sep + "copy",
    os.path.dirname(os.__file__) + os.sep + "dataclasses",
    "<",
)
"""Where code that is not the user's is."""


def is_users_code(file: str) -> bool:
    """Whether a file is neither of Python, nor of an installed library, nor of Penstock."""
    return not file.startswith((*LIBRARY, os.path.dirname(os.__file__))) and "site-packages" not in file


def user_line() -> str:
    """``file:line`` of the user's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


def place_of(error: BaseException) -> str | None:
    """``file:line`` of the user's code that raised ``error``; None where none of it is in the traceback."""
    found, own = None, None
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(LIBRARY):
            found = f"{name}:{trace.tb_lineno}"
            if is_users_code(name):
                own = found  # rather than a library that it calls
        trace = trace.tb_next
    return own or found


def source_line(place: str) -> str:
    """The text of a line of code, or nothing."""
    name, _, number = place.rpartition(":")
    return linecache.getline(name, int(number)).strip() if number.isdigit() else ""
