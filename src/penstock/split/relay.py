"""All stages of a plan one after the other, in this thread: what a pipeline computes, without the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.split.plan import Plan

__all__ = ["relay"]


def relay(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Sequence[nn.Module] | None = None) -> Any:
    """The model's output for these arguments, from the plan's stages (``modules``, or new ones)."""
    line = plan.attached()
    modules = modules or [plan.stage_module(s) for s in range(plan.num_stages)]
    under_way: dict[tuple[int, int], Any] = {}
    output: Any = None
    for s, module in enumerate(modules):
        taken = [under_way.pop((src, s)) for src in plan.sources(s)]
        output = module(*(taken or [line.arguments(args, kwargs)]))
        targets = plan.targets(s)
        values = output if len(targets) > 1 else [output]
        under_way.update(((s, dst), value) for dst, value in zip(targets, values, strict=False))
    return output
