"""What all ranks must know of a mini-batch before it comes: announced once per step, inferred once per kind.

The first rank says, in one row of numbers to each other rank, which kind of mini-batch comes next. If the kind
is new (other sizes, shapes, dtypes or modes), the row is followed by its description, and the ranks work out
together what will cross every edge: forward down the stages, gradients back up.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from penstock.engine.channel.control import Control
from penstock.engine.context import Ambient
from penstock.engine.infer import FakeStage, Propagation
from penstock.engine.meta import MessageMeta, meta_of
from penstock.engine.stage import Message, StageEngine
from penstock.errors import PlanError

__all__ = ["Agreement", "Announcement", "Refused"]

REFUSED, KNOWN, NEW = 0, 1, 2


class Refused(Exception):
    """The first rank could not make micro-batches of its input: nothing has begun."""


@dataclass
class Announcement:
    """One kind of mini-batch: its micro-batches' sizes and kinds, and what crosses each edge for each kind."""

    number: int
    training: bool
    state: Ambient
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]  # the kind of each micro-batch: those of one kind have the same shapes
    outputs: dict[int, list[MessageMeta]] = field(default_factory=dict)  # by stage, per kind
    gradients: dict[int, list[list[bool]]] = field(default_factory=dict)  # which of them come back

    def metas(self, stage: int) -> list[MessageMeta]:
        """What a stage's output looks like, for each micro-batch."""
        return [self.outputs[stage][kind] for kind in self.kinds]

    def present(self, stage: int) -> list[list[bool]]:
        """Which of a stage's outputs get a gradient, for each micro-batch."""
        return [self.gradients[stage][kind] for kind in self.kinds] if self.training else []


class Agreement:
    """The kinds of mini-batch that this rank has heard of."""

    def __init__(
        self,
        control: Control,
        rank: int,
        placement: Sequence[int],
        stages: Mapping[int, StageEngine],
        model: nn.Module,
    ) -> None:
        self.control = control
        self.rank = rank
        self.placement = placement
        self.stages = stages
        # What is frozen and what is in training mode, in the whole model: a script does the same on every rank.
        self.parameters = list(model.parameters())
        self.modules = list(model.modules())
        self.heard: list[Announcement] = []
        self.numbers: dict[Hashable, int] = {}

    # ── the first rank ───────────────────────────────────────────────────────────────────────────────────────

    def announce(
        self, training: bool, state: Ambient, sizes: tuple[int, ...], messages: Sequence[Message]
    ) -> Announcement:
        """Tell the others what comes."""
        metas = [meta_of(m.leaves, m.spec, m.wants if training else ()) for m in messages]
        key = (training, state, sizes, tuple(metas), self._modes())
        if key in self.numbers:
            self._tell([KNOWN, self.numbers[key]])
            return self.heard[self.numbers[key]]
        distinct: list[MessageMeta] = []
        kinds = []
        for meta in metas:
            if meta not in distinct:
                distinct.append(meta)
            kinds.append(distinct.index(meta))
        announced = Announcement(len(self.heard), training, state, sizes, tuple(kinds))
        self._tell([NEW, announced.number])
        for rank in self._others():
            self.control.send(rank, announced)
        self._infer(announced, distinct)
        self.numbers[key] = announced.number
        return announced

    def refuse(self, message: str) -> None:
        """Tell the others that nothing comes, and why."""
        self._tell([REFUSED, 0])
        for rank in self._others():
            self.control.send(rank, message)
        self.control.settle()

    # ── the other ranks ──────────────────────────────────────────────────────────────────────────────────────

    def hear(self, training: bool, state: Ambient) -> Announcement:
        """Wait for the first rank's word."""
        first = self.placement[0]
        code, number = (int(x) for x in self.control.take_row(first, 2))
        if code == REFUSED:
            raise Refused(self.control.take(first))
        announced = self.control.take(first) if code == NEW else self.heard[number]
        if announced.training != training:
            there, here = ("a step", "a call") if announced.training else ("a call", "a step")
            raise PlanError(f"the first rank runs {there} of the pipeline, but this rank runs {here}")
        if announced.state != state:
            raise PlanError(f"the first rank runs under {announced.state}, but this rank under {state}")
        if code == NEW:
            self._infer(announced, None)
        return announced

    # ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────

    def _infer(self, announced: Announcement, inputs: list[MessageMeta] | None) -> None:
        """Follow each kind of micro-batch through the stages, this rank's own on fake tensors."""
        count = max(announced.kinds) + 1
        runs: dict[int, list[Propagation]] = {}
        for s, stage in sorted(self.stages.items()):
            fake = FakeStage(s, stage.module, stage.device)
            runs[s] = [Propagation(fake, announced.state, announced.training) for _ in range(count)]
        last = len(self.placement) - 1
        for s, kinds in runs.items():
            if s > 0:
                there = self.placement[s - 1]
                inputs = announced.outputs[s - 1] if there == self.rank else self.control.take(there)
                announced.outputs[s - 1] = inputs
            assert inputs is not None
            announced.outputs[s] = [run.forward(meta) for run, meta in zip(kinds, inputs, strict=True)]
            if s < last and self.placement[s + 1] != self.rank:
                self.control.send(self.placement[s + 1], announced.outputs[s])
        if announced.training:
            for s, kinds in reversed(runs.items()):
                if s < last:
                    there = self.placement[s + 1]
                    if there != self.rank:
                        announced.gradients[s] = self.control.take(there)
                present = announced.gradients[s] if s < last else [None] * count
                if s > 0:
                    back = [run.backward(p) for run, p in zip(kinds, present, strict=True)]
                    announced.gradients[s - 1] = back
                    if self.placement[s - 1] != self.rank:
                        self.control.send(self.placement[s - 1], back)
        self.heard.append(announced)

    def _others(self) -> list[int]:
        return [rank for rank in range(max(self.placement) + 1) if rank != self.rank]

    def _tell(self, row: Sequence[float]) -> None:
        for rank in self._others():
            self.control.send_row(rank, row)

    def _modes(self) -> tuple[bool, ...]:
        return (*(p.requires_grad for p in self.parameters), *(module.training for module in self.modules))
