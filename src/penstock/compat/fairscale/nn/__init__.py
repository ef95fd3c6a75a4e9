"""``Pipe`` and what belongs to it."""

from __future__ import annotations

from typing import NoReturn

from penstock.compat.fairscale.nn import model_parallel as model_parallel
from penstock.compat.fairscale.nn import pipe as pipe
from penstock.compat.fairscale.nn.pipe import Pipe

__all__ = ["Pipe"]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        f"penstock.compat.fairscale has fairscale's pipelines, Pipe and AsyncPipe, and nothing else of it: no nn.{name}"
    )
