"""The choice of a depth and a micro-batch size: not there yet."""

from __future__ import annotations

from typing import Any

from penstock.errors import PlanError

__all__ = ["AutoConfig"]


class AutoConfig:
    """Not there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise PlanError(
            "varuna.AutoConfig is not there yet, it comes later: choose the number of stages and the chunk size "
            "yourself, and compare schedules with 'penstock schedule'"
        )
