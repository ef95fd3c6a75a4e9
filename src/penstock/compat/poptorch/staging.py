"""From a model's blocks and an execution strategy to a plan, and to the devices of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.compat.poptorch.annotations import Block, ipu_of
from penstock.compat.poptorch.enums import AutoStage
from penstock.compat.poptorch.errors import require
from penstock.compat.poptorch.strategies import Strategy
from penstock.errors import PlanError
from penstock.split import marks as native
from penstock.split.chain import LayerChain, WholeModelChain, build_plan
from penstock.split.marks import begin_block_of
from penstock.split.plan import Plan
from penstock.split.trace.errors import mentions_marks
from penstock.split.trace.line import TraceChain, marked_chain
from penstock.split.trunk.line import trunk_chain

__all__ = ["device_of_ipu", "staged"]

LEAD = Block("before the first block", 0)

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Blocks(NamedTuple):
    """The blocks of a model in order: the layers of each in the model's line, and the IPUs of those that name one."""

    line: LayerChain
    layers: Mapping[str, Sequence[str]]
    ipus: Mapping[str, int]

    def plan(self, stages: Sequence[Sequence[str]]) -> Plan:
        """The plan whose stages have these blocks."""
        return build_plan(self.line, [[layer for block in blocks for layer in self.layers[block]] for blocks in stages])


def staged(model: nn.Module, strategy: Strategy, call: Call) -> tuple[Plan, list[int]]:
    """The plan of a model that is called with these arguments, and the IPU of each stage. Without blocks: one stage."""
    blocks = _blocks(model, strategy, call)
    if blocks is None:
        return build_plan(WholeModelChain(model), [("model",)]), [0]
    if strategy.auto is None:
        return _by_name(blocks, strategy)
    stages = [[block] for block in blocks.layers]
    if strategy.auto == AutoStage.SameAsIpu:
        without = [block for block in blocks.layers if block not in blocks.ipus]
        require(
            not without,
            f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block(s) {', '.join(without)}: "
            "give them an ipu_id, or name the stages: poptorch.PipelinedExecution(poptorch.Stage(…).ipu(0), …)",
        )
        stages = [list(group) for _, group in groupby(blocks.layers, key=blocks.ipus.__getitem__)]
    return blocks.plan(stages), [_ipu(blocks, names, number) for number, names in enumerate(stages)]


def device_of_ipu(ipu: int) -> torch.device:
    """IPU n is device n, modulo what there is."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", ipu % count) if count else torch.device("cpu")


def _by_name(blocks: Blocks, strategy: Strategy) -> tuple[Plan, list[int]]:
    """Stages as they were named. A block that this model does not have, such as a loss, is another model's."""
    for block in blocks.layers:
        strategy.stage(block)
    stages, ipus = [], []
    for number, stage in enumerate(strategy.stages):
        names = [block for block in stage.blocks if block in blocks.layers]
        if names:
            stages.append(names)
            ipus.append(_ipu(blocks, names, number) if stage._ipu is None else stage._ipu)
    return blocks.plan(stages), ipus


def _ipu(blocks: Blocks, names: Sequence[str], number: int) -> int:
    """The IPU that a stage's blocks are marked for, or else that of the stage's own number."""
    return next((blocks.ipus[block] for block in names if block in blocks.ipus), number)


# ── finding the blocks ───────────────────────────────────────────────────────────────────────────────────────────


def _blocks(model: nn.Module, strategy: Strategy, call: Call) -> Blocks | None:
    """The blocks of a model; None where it has none, also where that cannot be seen because it cannot be traced."""
    try:
        line = marked_chain(model, sample=call)
    except PlanError as error:
        if not getattr(error, "marked", False) and not mentions_marks(model) and begin_block_of(model) is None:
            return None
        blocks = _blocks_of_trunk(model)
        if blocks is None:
            raise
        return blocks
    if line is None:
        return None
    if strategy.auto == AutoStage.SameAsIpu:
        line = _with_lead(line, call)
    ipus = {block: ipu_of(device) for block, device in line.devices().items()}
    return Blocks(line, {block: (block,) for block in line.layers}, ipus)


def _with_lead(line: TraceChain, call: Call) -> TraceChain:
    """Layers before the first block are on IPU 0: a stage of their own, unless the first block is there as well."""
    first = line.devices().get(line.layers[0])
    leading = any(node.op == "call_module" and node.meta["layer"] is None for node in line.how.main.graph.nodes)
    if first is None or ipu_of(first) == 0 or not leading:
        return line
    led = marked_chain(line.model, sample=call, lead=LEAD)
    assert led is not None
    return led


def _blocks_of_trunk(model: nn.Module) -> Blocks | None:
    """Blocks that begin with layers of one list, in a model that cannot be traced, as Hugging Face's cannot.

    What runs before the list is part of its first block, what runs after it of its last one, whatever begins there.
    """
    marks = {
        path: mark for path, mark in ((path, begin_block_of(module)) for path, module in model.named_modules()) if mark
    }
    kinds = (nn.ModuleList, nn.Sequential)
    lists = [path for path, module in model.named_modules() if isinstance(module, kinds)]
    found = [path for path in lists if any(mark.rpartition(".")[0] == path for mark in marks)]
    if len(found) != 1:
        return None
    line = trunk_chain(model, found[0])
    layers: dict[str, list[str]] = {}
    ipus: dict[str, int] = {}
    numbers: dict[native.Block, str] = {}
    before = [mark for path, mark in marks.items() if path.rpartition(".")[0] != found[0]]
    current = marks.get(line.layers[0]) or next(iter(before), LEAD)
    for layer in line.layers:
        current = marks.get(layer, current)
        name = current.name or numbers.setdefault(current, str(len(numbers)))
        layers.setdefault(name, []).append(layer)
        if current.device is not None:
            ipus.setdefault(name, ipu_of(current.device))
    return Blocks(line, layers, ipus)
