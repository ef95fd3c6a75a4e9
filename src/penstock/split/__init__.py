"""From a model to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.split.balance import divide
from penstock.split.fronts import line_of
from penstock.split.plan import Edge as Edge
from penstock.split.plan import Plan as Plan
from penstock.split.plan import StageSpec as StageSpec
from penstock.split.plan import Tie as Tie
from penstock.split.planning import plan_of

__all__ = ["Edge", "Plan", "StageSpec", "Tie", "split"]


def split(model: nn.Module, *, balance: Sequence[int] | None = None, stages: int | None = None) -> Plan:
    """Cut ``model`` into stages.

    ``balance=[2, 2]`` gives the number of layers of each stage; ``stages=2`` cuts where the number of
    parameters balances best. The model itself is not changed: stages hold its own layers.
    """
    line = line_of(model)
    return plan_of(line, divide(line, balance=balance, stages=stages))
