"""From a model to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.errors import PlanError
from penstock.split.balance import check_limits, divide
from penstock.split.block import Stage
from penstock.split.fronts import line_of
from penstock.split.line import Groups, Line
from penstock.split.named_stages import devices_of_stages, groups_by_device, groups_by_name
from penstock.split.plan import Edge as Edge
from penstock.split.plan import Plan as Plan
from penstock.split.plan import StageSpec as StageSpec
from penstock.split.plan import Tie as Tie
from penstock.split.planning import plan_of
from penstock.split.ties import Shared
from penstock.split.trial import inputs_of

__all__ = ["Edge", "Plan", "StageSpec", "Tie", "split"]


def split(
    model: nn.Module,
    *,
    stages: int | Sequence[str | Stage | Sequence[str]] | None = None,
    balance: Sequence[int] | str | None = None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Any = None,
    memory: Any = None,
    shared_weights: Shared | None = None,
) -> Plan:
    """Cut ``model`` into stages. The model is not changed: stages hold its own modules, under their own names.

    Where it may be cut: an ``nn.Sequential`` between its layers; another model at its ``ps.CutPoint()``, ``ps.cut(x)``
    and ``ps.Block`` marks, before the modules ``cuts=["layer2", "layer3.1"]``, between the blocks of its trunk
    (``blocks="model.layers"``; a Hugging Face model says itself where that is), or, with nothing said, wherever its
    forward, traced, allows it.

    Where it is cut: ``stages=4`` makes that many, as even as can be; ``balance`` says what is to be even
    (``"parameters"``, ``"uniform"``, ``"time"``, ``"memory"``) or how many layers each stage has (``[2, 2]``).
    With ``sample``, what the model would be called with, layers are measured, and the time is what is even; for a model
    of one argument it may be ``(inputs, targets)``. ``memory`` limits the bytes of a stage (``"16GiB"``, or one limit
    for each). ``stages=[["B1", "B2"], ["B3"]]`` puts blocks into stages by name. With ``cuts`` alone, or where every
    block has a device, nothing else need be said.

    ``shared_weights=[("a.weight", "b.weight")]`` makes separate parameters one.
    """
    shared = shared_weights or ()
    sample = inputs_of(model, sample)
    named = isinstance(stages, (list, tuple))
    line = line_of(model, stages=None if named else stages, cuts=cuts, blocks=blocks, sample=sample)  # type: ignore[arg-type]
    if not isinstance(stages, (list, tuple)):
        return plan_of(line, _groups(line, stages, balance, cuts, sample, memory), shared)
    if balance is not None:
        raise PlanError(f"stages={list(stages)} says which blocks each stage has: balance={balance!r} cannot change it")
    groups = groups_by_name(line, stages)
    if memory is not None:
        check_limits(line, groups, memory, sample)
    plan = plan_of(line, groups, shared)
    return replace(plan, devices=devices_of_stages(stages) or plan.devices)


def _groups(
    line: Line, stages: Any, balance: Sequence[int] | str | None, cuts: Any, sample: Any, memory: Any
) -> Groups:
    if stages is None and balance is None and (cuts is not None or line.devices()):
        groups = [(layer,) for layer in line.layers] if cuts is not None else groups_by_device(line)
        if memory is not None:
            check_limits(line, groups, memory, sample)
        return groups
    return divide(line, balance=balance, stages=stages, sample=sample, memory=memory)
