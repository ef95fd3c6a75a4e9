"""From a model's blocks and an execution strategy to a plan, and to the devices of its stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.compat.poptorch.annotations import Block, ipu_of
from penstock.compat.poptorch.enums import AutoStage
from penstock.compat.poptorch.errors import require
from penstock.compat.poptorch.strategies import Strategy
from penstock.errors import PlanError
from penstock.split.block import begun
from penstock.split.named_stages import groups_by_device, groups_by_name
from penstock.split.plan import Plan
from penstock.split.planning import plan_of
from penstock.split.trace.errors import mentions_marks
from penstock.split.trace.line import TraceLine, marked_line
from penstock.split.whole import WholeLine

__all__ = ["device_of_ipu", "staged"]

LEAD = Block("before the first block", 0)


Call = tuple[tuple[Any, ...], dict[str, Any]]


def staged(model: nn.Module, strategy: Strategy, call: Call) -> tuple[Plan, list[int]]:
    """The plan of a model that is called with these arguments, and the IPU of each stage. Without blocks: one stage."""
    line = _line(model, call)
    if line is None:
        return plan_of(WholeLine(model), [("model",)]), [0]
    if strategy.auto is None:
        return _by_name(line, strategy)
    if strategy.auto == AutoStage.AutoIncrement:
        return _placed(line, [(block,) for block in line.layers])
    line = _with_lead(line, call)
    without = [block for block in line.layers if block not in line.devices()]
    require(
        not without,
        f"poptorch.AutoStage.SameAsIpu was selected but no IPU was specified for block(s) {', '.join(without)}: give "
        "them an ipu_id, or name the stages: poptorch.PipelinedExecution(poptorch.Stage(…).ipu(0), …)",
    )
    return _placed(line, groups_by_device(line))


def device_of_ipu(ipu: int) -> torch.device:
    """IPU n is device n, modulo what there is."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", ipu % count) if count else torch.device("cpu")


def _line(model: nn.Module, sample: Call) -> TraceLine | None:
    """The model's blocks; None where it has none, also where that cannot be known because it cannot be traced."""
    try:
        return marked_line(model, sample=sample)
    except PlanError:
        if mentions_marks(model) or begun(model) is not None:
            raise
        return None


def _with_lead(line: TraceLine, sample: Call) -> TraceLine:
    """Layers before the first block are on IPU 0: a stage of their own, unless the first block is there as well."""
    first = line.devices().get(line.layers[0])
    leading = any(node.op == "call_module" and node.meta["layer"] is None for node in line.how.main.graph.nodes)
    if first is None or ipu_of(first) == 0 or not leading:
        return line
    led = marked_line(line.model, sample=sample, lead=LEAD)
    assert led is not None
    return led


def _by_name(line: TraceLine, strategy: Strategy) -> tuple[Plan, list[int]]:
    """Stages as they were named. A block that this model does not have, such as a loss, is another model's."""
    for block in line.layers:
        strategy.stage(block)
    used = [(number, [b for b in stage.blocks if b in line.layers]) for number, stage in enumerate(strategy.stages)]
    used = [(number, blocks) for number, blocks in used if blocks]
    plan, ipus = _placed(line, groups_by_name(line, [blocks for _, blocks in used]))
    marked = line.devices()
    for place, (number, blocks) in enumerate(used):
        ipu = strategy.stages[number]._ipu
        if ipu is not None or not any(block in marked for block in blocks):
            ipus[place] = number if ipu is None else ipu
    return plan, ipus


def _placed(line: TraceLine, groups: list[tuple[str, ...]]) -> tuple[Plan, list[int]]:
    """The plan, with each stage on the IPU that its blocks are marked for, or else on that of its own number."""
    marked = line.devices()
    ipus = [
        next((ipu_of(marked[block]) for block in blocks if block in marked), number)
        for number, blocks in enumerate(groups)
    ]
    return plan_of(line, groups), ipus
