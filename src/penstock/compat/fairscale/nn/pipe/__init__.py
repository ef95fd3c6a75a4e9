"""Pipelines in one process, and of one process per stage."""

from penstock.compat.fairscale.nn.pipe import balance as balance
from penstock.compat.fairscale.nn.pipe import skip as skip
from penstock.compat.fairscale.nn.pipe.async_pipe import AsyncPipe
from penstock.compat.fairscale.nn.pipe.checkpoint import is_checkpointing, is_recomputing
from penstock.compat.fairscale.nn.pipe.pipe import Pipe
from penstock.compat.fairscale.nn.pipe.types import LazyModule

__all__ = ["AsyncPipe", "LazyModule", "Pipe", "is_checkpointing", "is_recomputing"]
