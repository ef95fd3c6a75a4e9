"""Execution strategies: which blocks are a stage, on which IPU, and how the stages take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.compat.poptorch.enums import AutoStage
from penstock.compat.poptorch.errors import Error, require

__all__ = [
    "ParallelPhasedExecution",
    "Phase",
    "PhasedExecution",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "Strategy",
]


class Stage:
    """Blocks that run together: ``Stage("B1", "B2").ipu(0)``."""

    def __init__(self, *block_ids: str) -> None:
        strange = [block for block in block_ids if not isinstance(block, str)]
        require(not strange, f"Block IDs are supposed to be strings but got {strange}")
        require(block_ids, "a stage needs blocks: poptorch.Stage('B1', 'B2')")
        self._blocks = list(block_ids)
        self._ipu: int | None = None

    @property
    def blocks(self) -> list[str]:
        """The names of the blocks of this stage."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Place the stage: IPU n is device n, modulo what there is."""
        require(isinstance(ipu, int) and ipu >= 0, f"an IPU is a number from 0 on, got {ipu!r}")
        self._ipu = ipu
        return self

    def __repr__(self) -> str:
        return f"Stage({', '.join(map(repr, self._blocks))})" + ("" if self._ipu is None else f".ipu({self._ipu})")


class Strategy:
    """Stages, named or to be found, and the Penstock strategy that runs them."""

    name: str  # as Penstock has it

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        self.auto: AutoStage | None = None
        self.stages: list[Stage] = []
        if not args:
            self.auto = AutoStage.SameAsIpu
        elif isinstance(args[0], AutoStage):
            require(len(args) == 1, f"AutoStage finds all stages: it cannot stand among others, as in {args}")
            self.auto = args[0]
        else:
            self.stages = [_stage(arg) for arg in args]
        self._by_block: dict[str, Stage] = {}
        for stage in self.stages:
            for block in stage.blocks:
                require(block not in self._by_block, f"{block} associated with more than one stage")
                self._by_block[block] = stage

    def stage(self, block_id: str) -> Stage:
        """The stage that a block belongs to."""
        known = list(self._by_block)
        require(block_id in self._by_block, f"Unknown Block '{block_id}' list of expected Blocks: {known}")
        return self._by_block[block_id]

    def __repr__(self) -> str:
        args = [self.auto] if self.auto is not None else self.stages
        return f"{type(self).__name__}({', '.join(map(str, args))})"


class PipelinedExecution(Strategy):
    """Micro-batches follow each other through the stages, which work at the same time.

    Takes ``Stage`` objects, names of blocks (each a stage of its own), lists of names, or an ``AutoStage``.
    """

    name = "pipelined"


class ShardedExecution(Strategy):
    """One micro-batch at a time goes through all stages."""

    name = "sharded"


def _stage(arg: Any) -> Stage:
    if isinstance(arg, Stage):
        return arg
    return Stage(*arg) if isinstance(arg, (list, tuple)) else Stage(arg)


class _Phased:
    """Stands for what is not there yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _not_yet(type(self).__name__)


class PhasedExecution(_Phased):
    """Not there yet."""


class SerialPhasedExecution(_Phased):
    """Not there yet."""


class ParallelPhasedExecution(_Phased):
    """Not there yet."""


class Phase(_Phased):
    """Not there yet."""


def _not_yet(name: str) -> NoReturn:
    raise Error(
        f"poptorch.{name}: phased execution is not there yet, it comes later. PipelinedExecution and ShardedExecution "
        "run the same stages to the same result, with all of them in the devices' memory"
    )
