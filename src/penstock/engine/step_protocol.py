"""The per-step protocol: ranks agree on the kind of a mini-batch, and infer shapes once per kind.

The first rank sends one row of numbers to each other rank, which names the kind of the next mini-batch. If the kind is
new (other sizes, shapes, dtypes or modes), its `StepHeader` follows, and the ranks infer together what will cross every
edge: forward down the stages, gradients back up. In a dynamic pipeline they do not: there every message describes
itself, and a kind is the micro-batches' sizes alone.

Ranks of a pipeline that are given different mini-batches would train on the inputs of one with the targets of another.
For each new kind, and in some of the other steps, they compare a sample of what they were given.

A rank that was given inputs or targets that another rank needs sends them there. Which rank sends the targets of a kind
of mini-batch is agreed on when it comes for the first time. Inputs are asked for in each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.engine.channel.control import ControlChannel
from penstock.engine.forward_context import CallerContext, caller_context, variant_in_flight
from penstock.engine.message import Message, MessageMeta, flatten, meta_of, unflatten
from penstock.engine.microbatch import Broadcast, sample_values
from penstock.engine.runner import LRUCache
from penstock.engine.shapes import FakeStage, Propagation
from penstock.engine.stage import StageEngine
from penstock.errors import PlanError
from penstock.schedule.schedule import Edge
from penstock.split.plan import Plan

Given = tuple[Any, Any]  # the inputs and the targets that this rank was given; None: it was given none

REJECTED, KNOWN, COMPARED, NEW, EMPTY, QUERY_INPUTS, SEND_INPUTS = range(7)  # COMPARED: known, and to be compared

MAX_KINDS = 256  # kinds of mini-batch that each rank remembers: batches of ever new shapes must not pile up

COMPARE_EVERY = 64  # mini-batches; before that, each whose number is a power of two: most mistakes show at once


class StepRejected(Exception):
    """The mini-batch cannot be run, which all ranks of the pipeline know: nothing has begun."""


@dataclass
class StepHeader:
    """One kind of mini-batch: sizes and kinds of its micro-batches, and what crosses each edge for each kind."""

    number: int
    training: bool
    context: CallerContext
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]  # of each micro-batch; those of one kind have the same shapes
    variants: tuple[str | None, ...] = ()  # kinds of call of the micro-batches, for models whose forward is recorded
    caller_loss: bool = False  # the caller computes the loss: backwards come when all forwards are over
    targets_rank: int | None = None  # the rank that was given the targets; None: no rank was
    crossing: dict[Edge, list[MessageMeta]] = field(default_factory=dict)  # per kind
    gradients: dict[Edge, list[list[bool]]] = field(default_factory=dict)  # which tensors receive one, per kind


@dataclass
class StepProtocol:
    """Announces mini-batches, and remembers the kinds that this rank has seen."""

    control: ControlChannel
    rank: int
    placement: Sequence[int]
    stages: Mapping[int, StageEngine]
    plan: Plan
    dynamic: bool = False

    def __post_init__(self) -> None:
        self.count = 0  # of kinds so far, evicted ones included
        self.num_announced = [0, 0]  # evaluations, and mini-batches with gradients
        self.headers: LRUCache[int, StepHeader] = LRUCache(MAX_KINDS)
        self.numbers: LRUCache[Hashable, int] = LRUCache(MAX_KINDS)
        self.others = [rank for rank in range(max(self.placement) + 1) if rank != self.rank]
        # Frozen parameters and training flags of the whole model: a script sets the same on every rank.
        model = self.plan.require_chain().model
        self.parameters, self.modules = list(model.parameters()), list(model.modules())

    # ── the first rank ───────────────────────────────────────────────────────────────────────────────────────

    def announce(
        self,
        training: bool,
        sizes: tuple[int, ...],
        messages: Sequence[Message],
        variants: tuple[str | None, ...],
        given: Given,
        caller_loss: bool,
    ) -> StepHeader:
        """Announce a mini-batch to the other ranks."""
        context = caller_context()
        if not sizes:
            self.send_all([EMPTY, 0])
            return StepHeader(-1, training, context, (), ())
        metas = [] if self.dynamic else [meta_of(m if training else m._replace(wants=())) for m in messages]
        key: tuple[Hashable, ...] = (training, caller_loss, context, sizes, variants, given[1] is not None)
        if not self.dynamic:
            requires_grad = (parameter.requires_grad for parameter in self.parameters)
            modes = (module.training for module in self.modules)
            key += (*metas, *requires_grad, *modes, torch.get_default_dtype())
        self.num_announced[training] = announced = self.num_announced[training] + 1
        if key in self.numbers:
            number = self.numbers[key]
            compared = announced % COMPARE_EVERY == 0 or (announced < COMPARE_EVERY and announced.bit_count() == 1)
            self.send_all([COMPARED if compared else KNOWN, number])
            if compared:
                self._compare(given)
            return self.headers[number]
        distinct = list(dict.fromkeys(zip(metas, variants, strict=True))) if metas else []
        kinds = tuple(map(distinct.index, zip(metas, variants, strict=True))) if metas else ()
        header = StepHeader(self.count, training, context, sizes, kinds, variants, caller_loss)
        self.count += 1
        self.send_all([NEW, header.number])
        for rank in self.others:
            self.control.send(rank, header)
        self._complete(header, [meta for meta, _ in distinct], given)
        self.numbers[key] = header.number
        return header

    def fetch_inputs(self) -> Any:
        """The inputs, from a rank that was given them; None where no rank was."""
        self.send_all([QUERY_INPUTS, 0])
        having = [rank for rank in self.others if self.control.recv_row(rank, 1)[0]]
        if not having:
            return None
        self.send_all([SEND_INPUTS, having[0]])
        return self.control.recv(having[0])

    def reject(self, message: str) -> None:
        """Tell the other ranks that there is no step, and why."""
        self.send_all([REJECTED, 0])
        for rank in self.others:
            self.control.send(rank, message)
        self.control.wait_sends()

    # ── the other ranks ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, training: bool, given: Given, caller_loss: bool) -> StepHeader:
        """Wait for the first rank's announcement, and send it this rank's inputs if it asks for them."""
        first, context, inputs = self.placement[0], caller_context(), given[0]
        code, number = (int(x) for x in self.control.recv_row(first, 2))
        while code in (QUERY_INPUTS, SEND_INPUTS):
            if code == QUERY_INPUTS:
                self.control.send_row(first, [float(inputs is not None)])
            elif number == self.rank:
                self.control.send(first, _to_host(inputs))
            code, number = (int(x) for x in self.control.recv_row(first, 2))
        if code == REJECTED:
            raise StepRejected(self.control.recv(first))
        if code == EMPTY:
            return StepHeader(-1, training, context, (), ())
        header = self.control.recv(first) if code == NEW else self.headers[number]
        if (header.training, header.caller_loss) != (training, caller_loss):
            there, here = (
                "a forward" if outside else "a step" if trains else "a call"
                for trains, outside in ((header.training, header.caller_loss), (training, caller_loss))
            )
            raise PlanError(f"the first rank runs {there} of the pipeline, but this rank runs {here}")
        if header.context != context:
            raise PlanError(f"the first rank runs under {header.context}, but this rank under {context}")
        if code == NEW:
            self._complete(header, None, given)
        elif code == COMPARED:
            self._compare(given)
        return header

    # ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────

    def exchange_targets(self, header: StepHeader, targets: Any) -> Any:
        """The targets, on the rank of the last stage: its own, or those of the rank that was given them."""
        last, source = self.placement[-1], header.targets_rank
        if source is not None and source != last:
            if self.rank == source:
                self.control.send(last, _to_host(targets))
            elif self.rank == last:
                received = self.control.recv(source)
                return received if targets is None else targets
        return targets

    def _compare(self, given: Given) -> list[bool]:
        """Reject the mini-batch on all ranks if they were given different ones; returns which ranks have targets."""
        sample = sample_values(given[0], "inputs") | sample_values(given[1], "targets")
        everyone = self.control.gather((given[1] is not None, sample))
        known: dict[str, tuple[int, str]] = {}
        for rank, (_, texts) in zip(self.control.ranks, everyone, strict=True):
            for name, text in texts.items():
                other, expected = known.setdefault(name, (rank, text))
                if text != expected:
                    raise StepRejected(
                        f"ranks {other} and {rank} of one pipeline were given different mini-batches: {name} is "
                        f"{expected} on rank {other}, but {text} on rank {rank}. All ranks of a pipeline need the same "
                        "mini-batch, or None for what their stages do not use. A DistributedSampler over all processes "
                        "and transformers.Trainer give each process samples of its own, and so does a dataset that "
                        "draws random numbers in each process: use ps.DataLoader(…, pipe=pipe), with num_workers=1 if "
                        "it draws; or DistributedSampler(…, num_replicas=mesh.data, rank=mesh.data_rank)"
                    )
        return [has for has, _ in everyone]

    def _complete(self, header: StepHeader, inputs: list[MessageMeta] | None, given: Given) -> None:
        """Fill in the header of a new kind, together with the other ranks."""
        last = self.placement[-1]
        having = [rank for rank, has in enumerate(self._compare(given)) if has]
        header.targets_rank = last if last in having else next(iter(having), None)
        for variant in dict.fromkeys(header.variants):
            self.plan.require_chain().prepare(self.plan.groups, variant)
        if not self.dynamic:
            self._infer(header, inputs)
        self.headers[header.number] = header

    def _infer(self, header: StepHeader, inputs: list[MessageMeta] | None) -> None:
        """Propagate each kind of micro-batch through the stages, this rank's own on fake tensors."""
        count = max(header.kinds) + 1
        runs: dict[int, list[Propagation]] = {}
        crossing, gradients, plan = header.crossing, header.gradients, self.plan
        for s, stage in sorted(self.stages.items()):
            kept = None if stage.parallel is None else stage.parallel.fake
            fake = FakeStage(s, stage.module, stage.device) if kept is None else kept.synced()
            runs[s] = [Propagation(fake, header.context, header.training) for _ in range(count)]
            incoming = [self._receive_meta((src, s), crossing, src) for src in plan.sources(s)] or [inputs]
            targets = plan.targets(s)
            outgoing = []
            for kind, (run, *metas) in enumerate(zip(runs[s], *incoming, strict=True)):
                with variant_in_flight(header.variants[header.kinds.index(kind)]):
                    outgoing.append(run.forward(metas, len(targets)))
            for i, dst in enumerate(targets):
                self._send_meta((s, dst), crossing, dst, [row[i] for row in outgoing])
        if header.training:
            for s, kinds in reversed(runs.items()):
                back = [self._receive_meta((s, dst), gradients, dst) for dst in plan.targets(s)]
                rows = [run.backward([row[kind] for row in back] if back else None) for kind, run in enumerate(kinds)]
                for i, src in enumerate(plan.sources(s)):
                    self._send_meta((src, s), gradients, src, [row[i] for row in rows])

    def _send_meta(self, edge: Edge, known: dict[Edge, Any], stage: int, value: Any) -> None:
        """Store what is known of an edge, and send it to the rank of the stage at its other end."""
        known[edge] = value
        rank = self.placement[stage]
        if rank != self.rank:
            self.control.send(rank, (edge, value))

    def _receive_meta(self, edge: Edge, known: dict[Edge, Any], stage: int) -> Any:
        """The metadata of an edge, received if it is not known yet. Messages arrive in the sender's order."""
        while edge not in known:
            found, value = self.control.recv(self.placement[stage])
            known[found] = value
        return known[edge]

    def send_all(self, row: Sequence[float]) -> None:
        for rank in self.others:
            self.control.send_row(rank, row)


def _to_host(value: Any) -> Any:
    """A value with its tensors detached and on the CPU."""
    leaves, spec = flatten(value)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            leaves[i] = leaf.detach().cpu()
        elif isinstance(leaf, Broadcast):
            leaves[i] = Broadcast(leaf.tensor.detach().cpu())
    return unflatten(leaves, spec)
