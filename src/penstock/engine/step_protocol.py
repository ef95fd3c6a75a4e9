"""What all ranks must know of a mini-batch before it comes: announced once per step, inferred once per kind.

The first rank says, in one row of numbers to each other rank, which kind of mini-batch comes next. If the kind
is new (other sizes, shapes, dtypes or modes), the row is followed by its description, and the ranks work out
together what will cross every edge: forward down the stages, gradients back up. In a dynamic pipeline they do not:
there every message describes itself, and a kind is no more than the micro-batches' sizes.

A rank that has what another one needs, and was not given, sends it. Who brings the targets of a kind of mini-batch is
agreed on when it comes for the first time. Inputs that the first rank was not given are asked for in each step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from penstock.engine.channel.control import ControlChannel
from penstock.engine.context import CallerContext
from penstock.engine.message import Message, MessageMeta, flatten, meta_of, unflatten
from penstock.engine.microbatch import Broadcast
from penstock.engine.shapes import FakeStage, Propagation
from penstock.engine.stage import StageEngine
from penstock.errors import PlanError
from penstock.schedule.schedule import Edge
from penstock.split.plan import Plan

__all__ = ["MAX_KINDS", "LRUCache", "StepHeader", "StepProtocol", "StepRejected"]


# The last few of many: what is kept of kinds of mini-batch that may, or may not, come again.

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """Up to ``most`` values: for a new one, that which nobody has used for longest is forgotten.

    Ranks that use the same keys in the same order forget the same ones.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, key: K) -> V:
        self._values.move_to_end(key)
        return self._values[key]

    def __setitem__(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self.most:
            self._values.popitem(last=False)

    def values(self) -> Iterable[V]:
        return self._values.values()

    def clear(self) -> None:
        self._values.clear()


REJECTED, KNOWN, NEW, EMPTY, QUERY_INPUTS, SEND_INPUTS = range(6)

MAX_KINDS = (
    256  # of mini-batch that are remembered, on every rank the same: batches of ever new shapes must not pile up
)


class StepRejected(Exception):
    """The first rank could not make micro-batches of its input: nothing has begun."""


@dataclass
class StepHeader:
    """One kind of mini-batch: its micro-batches' sizes and kinds, and what crosses each edge for each kind."""

    number: int
    training: bool
    state: CallerContext
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]  # the kind of each micro-batch: those of one kind have the same shapes
    apart: bool = False  # the loss is made outside of the pipeline: backwards come when all forwards are over
    targets_rank: int | None = None  # the rank that brings the targets; None: nobody was given any
    crossing: dict[Edge, list[MessageMeta]] = field(default_factory=dict)  # per kind
    gradients: dict[Edge, list[list[bool]]] = field(default_factory=dict)  # which of it gets a gradient, per kind

    def metas(self, edge: Edge) -> list[MessageMeta]:
        """What crosses an edge, for each micro-batch."""
        return [self.crossing[edge][kind] for kind in self.kinds]

    def present(self, edge: Edge) -> list[list[bool]]:
        """For which of that a gradient comes back, for each micro-batch."""
        return [self.gradients[edge][kind] for kind in self.kinds] if self.training else []


class StepProtocol:
    """The kinds of mini-batch that this rank has heard of."""

    def __init__(
        self,
        control: ControlChannel,
        rank: int,
        placement: Sequence[int],
        stages: Mapping[int, StageEngine],
        plan: Plan,
        dynamic: bool = False,
    ) -> None:
        self.control = control
        self.rank = rank
        self.placement = placement
        self.stages = stages
        self.plan = plan
        self.dynamic = dynamic
        model = plan.require_chain().model
        # What is frozen and what is in training mode, in the whole model: a script does the same on every rank.
        self.parameters = list(model.parameters())
        self.modules = list(model.modules())
        self.count = 0  # of kinds so far, those forgotten included
        self.heard: LRUCache[int, StepHeader] = LRUCache(MAX_KINDS)
        self.numbers: LRUCache[Hashable, int] = LRUCache(MAX_KINDS)

    # ── the first rank ───────────────────────────────────────────────────────────────────────────────────────

    def announce(
        self,
        training: bool,
        state: CallerContext,
        sizes: tuple[int, ...],
        messages: Sequence[Message],
        targets: bool,
        apart: bool = False,
    ) -> StepHeader:
        """Tell the others what comes; ``targets``: whether this rank was given any."""
        if not sizes:
            self._tell([EMPTY, 0])
            return StepHeader(-1, training, state, (), ())
        metas = [] if self.dynamic else [meta_of(m if training else m._replace(wants=())) for m in messages]
        key = (training, apart, state, sizes, tuple(metas), () if self.dynamic else self._modes(), targets)
        if key in self.numbers:
            number = self.numbers[key]
            self._tell([KNOWN, number])
            return self.heard[number]
        distinct: list[MessageMeta] = []
        kinds = []
        for meta in metas:
            if meta not in distinct:
                distinct.append(meta)
            kinds.append(distinct.index(meta))
        announced = StepHeader(self.count, training, state, sizes, tuple(kinds), apart)
        self.count += 1
        self._tell([NEW, announced.number])
        for rank in self._others():
            self.control.send(rank, announced)
        self._learn(announced, distinct, targets)
        self.numbers[key] = announced.number
        return announced

    def fetch(self) -> Any:
        """The inputs, from a rank that was given them; None where nobody was."""
        self._tell([QUERY_INPUTS, 0])
        there = [rank for rank in self._others() if self.control.recv_row(rank, 1)[0]]
        if not there:
            return None
        self._tell([SEND_INPUTS, there[0]])
        return self.control.recv(there[0])

    def refuse(self, message: str) -> None:
        """Tell the others that nothing comes, and why."""
        self._tell([REJECTED, 0])
        for rank in self._others():
            self.control.send(rank, message)
        self.control.wait_sends()

    # ── the other ranks ──────────────────────────────────────────────────────────────────────────────────────

    def hear(self, training: bool, state: CallerContext, inputs: Any, targets: bool, apart: bool = False) -> StepHeader:
        """Wait for the first rank's word. It is given what this rank has of the inputs, if it asks for them."""
        first = self.placement[0]
        code, number = (int(x) for x in self.control.recv_row(first, 2))
        while code in (QUERY_INPUTS, SEND_INPUTS):
            if code == QUERY_INPUTS:
                self.control.send_row(first, [float(inputs is not None)])
            elif number == self.rank:
                self.control.send(first, on_host(inputs))
            code, number = (int(x) for x in self.control.recv_row(first, 2))
        if code == REJECTED:
            raise StepRejected(self.control.recv(first))
        if code == EMPTY:
            return StepHeader(-1, training, state, (), ())
        announced = self.control.recv(first) if code == NEW else self.heard[number]
        if (announced.training, announced.apart) != (training, apart):
            there, here = (
                "a forward" if outside else "a step" if trains else "a call"
                for trains, outside in ((announced.training, announced.apart), (training, apart))
            )
            raise PlanError(f"the first rank runs {there} of the pipeline, but this rank runs {here}")
        if announced.state != state:
            raise PlanError(f"the first rank runs under {announced.state}, but this rank under {state}")
        if code == NEW:
            self._learn(announced, None, targets)
        return announced

    # ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────

    def bring_targets(self, announced: StepHeader, targets: Any) -> Any:
        """The targets, on the rank of the last stage: its own, or those of the rank that brings them."""
        last, source = self.placement[-1], announced.targets_rank
        if source is not None and source != last:
            if self.rank == source:
                self.control.send(last, on_host(targets))
            elif self.rank == last:
                brought = self.control.recv(source)
                return brought if targets is None else targets
        return targets

    def anyone(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        return any(self.control.gather(here))

    def _learn(self, announced: StepHeader, inputs: list[MessageMeta] | None, given: bool) -> None:
        """Work out with the others what a new kind of mini-batch needs; ``given``: whether this rank has targets."""
        everyone, last = self.control.gather(given), self.placement[-1]
        having = [rank for rank, has in enumerate(everyone) if has]
        announced.targets_rank = last if last in having else next(iter(having), None)
        if not self.dynamic:
            self._infer(announced, inputs)
        self.heard[announced.number] = announced

    def _infer(self, announced: StepHeader, inputs: list[MessageMeta] | None) -> None:
        """Follow each kind of micro-batch through the stages, this rank's own on fake tensors."""
        count = max(announced.kinds) + 1
        runs: dict[int, list[Propagation]] = {}
        crossing, gradients, plan = announced.crossing, announced.gradients, self.plan
        post = _EdgeExchange(self.control, self.placement, self.rank)
        for s, stage in sorted(self.stages.items()):
            kept = None if stage.parallel is None else stage.parallel.fake
            fake = FakeStage(s, stage.module, stage.device) if kept is None else kept.now()
            runs[s] = [Propagation(fake, announced.state, announced.training) for _ in range(count)]
            coming = [post.take((src, s), crossing) for src in plan.sources(s)] or [inputs]
            targets = plan.targets(s)
            leaving = [run.forward(metas, len(targets)) for run, *metas in zip(runs[s], *coming, strict=True)]
            for i, dst in enumerate(targets):
                post.send((s, dst), crossing, [row[i] for row in leaving])
        if announced.training:
            for s, kinds in reversed(runs.items()):
                back = [post.take((s, dst), gradients, upward=True) for dst in plan.targets(s)]
                rows = [run.backward([row[kind] for row in back] if back else None) for kind, run in enumerate(kinds)]
                for i, src in enumerate(plan.sources(s)):
                    post.send((src, s), gradients, [row[i] for row in rows], upward=True)

    def _others(self) -> list[int]:
        return [rank for rank in range(max(self.placement) + 1) if rank != self.rank]

    def _tell(self, row: Sequence[float]) -> None:
        for rank in self._others():
            self.control.send_row(rank, row)

    def _modes(self) -> tuple[Hashable, ...]:
        modes = (*(p.requires_grad for p in self.parameters), *(module.training for module in self.modules))
        return (*modes, torch.get_default_dtype())


def on_host(value: Any) -> Any:
    """A value whose tensors can be sent as they are."""

    def there(leaf: Any) -> Any:
        if isinstance(leaf, Broadcast):
            return Broadcast(there(leaf.tensor))
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf

    leaves, spec = flatten(value)
    return unflatten([there(leaf) for leaf in leaves], spec)


class _EdgeExchange:
    """What ranks tell each other of the edges between them. Letters come in the sender's order, and may be early."""

    def __init__(self, control: ControlChannel, placement: Sequence[int], rank: int) -> None:
        self.control = control
        self.placement = placement
        self.rank = rank

    def send(self, edge: Edge, known: dict[Edge, Any], letter: Any, *, upward: bool = False) -> None:
        """Write it down here, and tell the edge's other end: its destination, or, ``upward``, its source."""
        known[edge] = letter
        there = self.placement[edge[0 if upward else 1]]
        if there != self.rank:
            self.control.send(there, (edge, letter))

    def take(self, edge: Edge, known: dict[Edge, Any], *, upward: bool = False) -> Any:
        """What is known of an edge, if need be after waiting for its source, or, ``upward``, its destination."""
        there = self.placement[edge[1 if upward else 0]]
        while edge not in known:
            found, letter = self.control.recv(there)
            known[found] = letter
        return known[edge]
