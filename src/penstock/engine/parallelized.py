"""What ``Pipeline(…, parallelize=…)`` made of a stage, as far as the engine must know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.ddp import Wrapping
from penstock.engine.infer import FakeStage

if TYPE_CHECKING:  # FSDP is imported where it is used: that takes seconds
    from penstock.engine.fullyshard import FullyShard

__all__ = ["Parallelized"]


@dataclass(frozen=True)
class Parallelized:
    """A stage that the user's function has wrapped or changed."""

    fake: FakeStage | None  # the stage before that, whose edges carry the same; None where it can be copied as it is
    wrapped: Mapping[int, Wrapping]  # what DDP was told of some parameters, by their identity
    sharded: FullyShard | None  # what FSDP manages, if anything
