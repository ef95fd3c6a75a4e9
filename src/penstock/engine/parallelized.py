"""What ``Pipeline(…, parallelize=…)`` made of a stage, as far as the engine must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.replicas.ddp import DdpSettings
from penstock.engine.shapes import FakeStage

if TYPE_CHECKING:  # FSDP is imported where it is used: that takes seconds
    from penstock.engine.replicas.fsdp import FsdpStage

__all__ = ["ParallelizedStage"]


@dataclass(frozen=True)
class ParallelizedStage:
    """A stage that the user's function has wrapped or changed."""

    fake: FakeStage | None  # the stage before that, whose edges carry the same; None where it can be copied as it is
    wrapped: Mapping[int, DdpSettings]  # what DDP was told of some parameters, by their identity
    sharded: FsdpStage | None  # what FSDP manages, if anything
