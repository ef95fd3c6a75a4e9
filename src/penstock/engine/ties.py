"""Parameters that live on several ranks: copies that start out equal and get the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from penstock.engine.channel.group import Group
from penstock.engine.stage import StageEngine
from penstock.split.plan import Plan, Tie

__all__ = ["Ties"]


class Ties:
    """The ties that this rank has a part in, each with the group of its ranks."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        placement: Sequence[int],
        rank: int,
        new_group: Callable[[str, Sequence[int]], Group],
    ) -> None:
        self.joined: list[tuple[nn.Parameter, Group]] = []
        for tie in plan.ties:
            ranks = sorted({placement[stage] for stage in tie.stages})
            if len(ranks) > 1 and rank in ranks:
                parameter, group = _find(tie, stages), new_group(f"tie {tie.names[0]}", ranks)
                group.broadcast(parameter.data, 0).wait()
                self.joined.append((parameter, group))

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Around a step: every copy gets the sum of the gradients that the step gave to the copies.

        What earlier steps left in ``.grad`` has been summed already, and is kept apart meanwhile.
        """
        before = [parameter.grad for parameter, _ in self.joined]
        try:
            for parameter, _ in self.joined:
                parameter.grad = None
            yield
            for parameter, group in self.joined:
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    group.allreduce(parameter.grad).wait()
        finally:
            for (parameter, _), old in zip(self.joined, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts the parameter in sums over all ranks: the first of a tie's ranks does."""
        return all(parameter is not tied or group.rank() == 0 for tied, group in self.joined)

    def close(self) -> None:
        self.joined.clear()


def _find(tie: Tie, stages: Sequence[StageEngine]) -> nn.Parameter:
    for stage in stages:
        for name, parameter in stage.module.named_parameters(remove_duplicate=False):
            if name in tie.names:
                return parameter
    raise AssertionError(f"no stage of this rank has any of {tie.names}")
