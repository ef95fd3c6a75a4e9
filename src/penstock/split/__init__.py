"""From a model to a plan."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from penstock.split.plan import Edge as Edge
from penstock.split.plan import Plan as Plan
from penstock.split.plan import Stage as Stage
from penstock.split.plan import Tie as Tie
from penstock.split.sequential import split_sequential

__all__ = ["Edge", "Plan", "Stage", "Tie", "split"]


def split(model: nn.Module, *, balance: Sequence[int] | None = None, stages: int | None = None) -> Plan:
    """Cut ``model`` into stages.

    ``balance=[2, 2]`` gives the number of layers of each stage; ``stages=2`` cuts where the number of
    parameters balances best. The model itself is not changed: stages hold its own layers.
    """
    return split_sequential(model, balance=balance, stages=stages)
