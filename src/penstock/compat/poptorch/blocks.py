"""Blocks of a model, strategies that group them into stages, and the resulting plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import nn

import penstock as ps
from penstock import hooks
from penstock.compat.poptorch.enums import AutoStage, Error, require

__all__ = [
    *("BeginBlock", "Block", "BlockFunction", "removeBlocks", "Stage", "Phase"),
    *("PipelinedExecution", "ShardedExecution", "SerialPhasedExecution", "ParallelPhasedExecution"),
]

F = TypeVar("F", bound=Callable[..., Any])


def _ipu_number(ipu: Any) -> int:
    require(isinstance(ipu, int) and ipu >= 0, f"an IPU number must be an integer from 0, got {ipu!r}")
    return int(ipu)


def _block(user_id: str | None, ipu_id: int | None) -> tuple[str | None, str | None]:
    """The name and the placeholder device of a block; ``ipu:n`` becomes a device when the pipeline is built."""
    valid = user_id is None or (isinstance(user_id, str) and user_id)
    require(valid, f"Block IDs are supposed to be strings but got {user_id!r}")
    return user_id, None if ipu_id is None else f"ipu:{_ipu_number(ipu_id)}"


class Block(ps.Block):
    """A scope whose operations form the block ``user_id`` on the IPU ``ipu_id``. No effect outside PopTorch models.

    Blocks without a name are numbered in the order of the forward: "0", "1", …
    """

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(*_block(user_id, ipu_id))

    def start(user_id: Any = None, ipu_id: int | None = None) -> None:
        """``Block.start("B1", ipu_id=0)``, or ``Block("B1", 0).start()``: begin a block that the next one ends."""
        block = user_id if isinstance(user_id, Block) else Block(user_id, ipu_id)
        trace = hooks.recorder()
        if trace is not None:
            trace.begin(block)

    @staticmethod
    def useAutoId() -> None:
        """No effect: blocks without a name are always numbered."""


class BlockFunction(ps.BlockFunction):
    """A decorator: the operations of the function or method form the block ``user_id``."""

    def __init__(self, user_id: str | None = None, ipu_id: int | None = None) -> None:
        super().__init__(*_block(user_id, ipu_id))


def BeginBlock(layer_to_call: F, user_id: str | int | None = None, ipu_id: int | None = None) -> F:
    """Begin the block ``user_id`` (1 is "1") at each call of a module or function. Returns a module itself."""
    if isinstance(layer_to_call, nn.Module) and hooks.begin_block_of(layer_to_call) is not None:
        raise Error("module has already been assigned to a block.")
    if not callable(layer_to_call):
        raise Error("module is not an instance of torch.nn.Module or function.")
    name = str(user_id) if isinstance(user_id, int) else user_id
    return ps.BeginBlock(layer_to_call, *_block(name, ipu_id))


def removeBlocks(module: nn.Module) -> None:
    """Remove the marks of ``BeginBlock`` from a module and its submodules."""
    for part in module.modules():
        hooks.remove_begin_block(part)


class Stage:
    """Blocks that run together: ``Stage("B1", "B2").ipu(0)``."""

    def __init__(self, *block_ids: str) -> None:
        invalid = [block for block in block_ids if not isinstance(block, str)]
        require(not invalid, f"Block IDs are supposed to be strings but got {invalid}")
        require(block_ids, "a stage needs blocks: poptorch.Stage('B1', 'B2')")
        self.blocks = list(block_ids)
        self._ipu: int | None = None

    def ipu(self, ipu: int) -> Stage:
        self._ipu = _ipu_number(ipu)
        return self

    def __repr__(self) -> str:
        return f"Stage({', '.join(map(repr, self.blocks))})" + ("" if self._ipu is None else f".ipu({self._ipu})")


class Strategy:
    """Stages, named or determined by ``AutoStage``, and their schedule."""

    schedule: str

    def __init__(self, *args: AutoStage | Stage | str | Sequence[str]) -> None:
        self.auto: AutoStage | None = AutoStage.SameAsIpu if not args else None
        self.stages: list[Stage] = []
        self._by_block: dict[str, Stage] = {}
        for arg in args:
            if isinstance(arg, AutoStage):
                require(len(args) == 1, f"AutoStage must be the only argument, got {args}")
                self.auto = arg
                return
            names: Any = arg if isinstance(arg, (list, tuple)) else [arg]
            stage = arg if isinstance(arg, Stage) else Stage(*names)
            self.stages.append(stage)
            for block in stage.blocks:
                require(block not in self._by_block, f"{block} associated with more than one stage")
                self._by_block[block] = stage

    def stage(self, block_id: str) -> Stage:
        known = list(self._by_block)
        require(block_id in known, f"Unknown Block '{block_id}' list of expected Blocks: {known}")
        return self._by_block[block_id]

    def __repr__(self) -> str:
        args = [self.auto] if self.auto is not None else self.stages
        return f"{type(self).__name__}({', '.join(map(str, args))})"


class PipelinedExecution(Strategy):
    """Stages run different micro-batches at the same time (1F1B).

    Takes ``Stage`` objects, names of blocks (each its own stage), lists of names, or an ``AutoStage``.
    """

    schedule = "1f1b"


class ShardedExecution(Strategy):
    """One micro-batch at a time runs through all stages."""

    schedule = "sharded"


def Phase(*stages: Stage | str | Sequence[str]) -> list[Stage | str | Sequence[str]]:
    return list(stages)


class SerialPhasedExecution(Strategy):
    """All micro-batches run through a phase, a list of stages, before the next one.

    Weights of other phases are on the host if the options set their location off chip.
    """

    schedule = "gpipe"

    def __init__(self, *phases: Sequence[Stage | str | Sequence[str]]) -> None:
        super().__init__(*(stage for phase in phases for stage in phase))


ParallelPhasedExecution = SerialPhasedExecution


# ── from blocks to a plan ────────────────────────────────────────────────────────────────────────────────────────

_LEAD = Block("before the first block", 0)

Call = tuple[tuple[Any, ...], dict[str, Any]]


def device_of_ipu(ipu: int) -> torch.device:
    """IPU n is device n, modulo the number of CUDA devices."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", ipu % count) if count else torch.device("cpu")


def plan_stages(model: nn.Module, strategy: Strategy, call: Call) -> tuple[ps.Plan, list[int]]:
    """The plan of a model for calls with these arguments, and the IPU of each stage.

    A model without blocks is one stage. A block of the strategy that the model lacks, such as a loss, is skipped.
    """
    chain = _find_blocks(model, strategy, call)
    if chain is None:
        return hooks.build_plan(hooks.WholeModelChain(model), [("model",)]), [0]
    layers, ipus = chain.layers, {block: _ipu(device) for block, device in chain.devices().items()}
    stages: list[tuple[list[str], int | None]]  # blocks and IPU
    if strategy.auto is None:
        for block in layers:
            strategy.stage(block)
        stages = [([block for block in stage.blocks if block in layers], stage._ipu) for stage in strategy.stages]
    elif strategy.auto == AutoStage.SameAsIpu:
        without = [block for block in layers if block not in ipus]
        remedy = "give them an ipu_id, or name the stages: PipelinedExecution(Stage(…).ipu(0), …)"
        missing = f"no IPU was specified for block(s) {', '.join(without)}: {remedy}"
        require(not without, f"poptorch.AutoStage.SameAsIpu was selected but {missing}")
        stages = [(list(names), ipu) for ipu, names in groupby(layers, key=ipus.__getitem__)]
    else:
        stages = [([block], None) for block in layers]
    groups, places = [], []
    for number, (names, ipu) in enumerate(stages):
        if names:
            groups.append(names)
            own = [ipus[block] for block in names if block in ipus]
            places.append(ipu if ipu is not None else own[0] if own else number)
    return hooks.build_plan(chain, groups), places


def _find_blocks(model: nn.Module, strategy: Strategy, call: Call) -> hooks.LayerChain | None:
    """A model cut at its blocks; None if it has none, or if it cannot be traced and mentions no marks."""
    try:
        chain = hooks.marked_chain(model, sample=call)
    except ps.PlanError as error:
        marked = getattr(error, "marked", False) or hooks.begin_block_of(model) is not None
        if marked or hooks.mentions_marks(model):
            raise
        return None
    if chain is None or strategy.auto != AutoStage.SameAsIpu or not chain.has_leading_modules:
        return chain
    # Layers before the first block are on IPU 0: their own stage, unless the first block is there as well.
    elsewhere = _ipu(chain.devices().get(chain.layers[0], "ipu:0")) != 0
    return hooks.marked_chain(model, sample=call, lead=_LEAD) if elsewhere else chain


def _ipu(device: str) -> int:
    return int(device.rpartition(":")[2])
