"""Errors as a program knows them that never had other ranks' to expect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from penstock.engine.channel.base import ChannelError
from penstock.errors import PenstockError, PipelineError

__all__ = ["own_errors"]


@contextmanager
def own_errors() -> Iterator[None]:
    """An exception of this rank's own code comes out as it is; that of another rank as a ``PipelineError``."""
    try:
        yield
    except PipelineError as error:
        first: BaseException = error
        while isinstance(first, PipelineError) and first.__cause__ is not None:
            first = first.__cause__
        if error.rank != dist.get_rank() or isinstance(first, (PenstockError, ChannelError)):
            raise
        raise first from None
