"""The per-step protocol: the first rank announces the kind of a mini-batch, and ranks infer shapes once per kind.

The first rank sends the number of the kind of the next mini-batch to each other rank. If the kind is new (other sizes,
shapes, dtypes or modes), it also sends a `StepHeader`, and the ranks together infer the messages on every edge: outputs
from the first stage to the last, then gradients from the last to the first. In a dynamic pipeline nothing is inferred:
every message has a header, and a kind is determined by the sizes of the micro-batches.

If the ranks of a pipeline were given different mini-batches, they would train on the inputs of one with the targets of
another. For each new kind, and in some of the other steps, they compare a sample of their mini-batches.

A rank that was given inputs or targets that another rank needs sends them there. The rank that sends the targets is
determined once per kind of mini-batch; the rank that sends the inputs, in each step.
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

Given = tuple[Any, Any]  # the inputs and the targets that this rank was given; None if it was given none

REJECTED, KNOWN, COMPARED, NEW, EMPTY, QUERY_INPUTS, SEND_INPUTS = range(7)  # COMPARED: known, ranks compare samples

MAX_KINDS = 256  # kinds of mini-batch that each rank keeps, if every mini-batch has new shapes

COMPARE_EVERY = 64  # mini-batches; before that at powers of two, because most mistakes show in the first steps


class StepRejected(Exception):
    """The mini-batch cannot be run. All ranks of the pipeline raise this before the step begins."""


@dataclass
class StepHeader:
    """One kind of mini-batch: sizes and kinds of its micro-batches, and the messages on each edge for each kind."""

    number: int
    training: bool
    context: CallerContext
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]  # of each micro-batch; those of one kind have the same shapes
    variants: tuple[str | None, ...] = ()  # kinds of call of the micro-batches, for models whose forward is recorded
    caller_loss: bool = False  # the caller computes the loss: all forwards run before the backwards
    targets_rank: int | None = None  # the rank that was given the targets, if any
    crossing: dict[Edge, list[MessageMeta]] = field(default_factory=dict)  # messages, per kind
    gradients: dict[Edge, list[list[bool]]] = field(default_factory=dict)  # whether each tensor gets one, per kind


@dataclass
class StepProtocol:
    """Announces mini-batches, and keeps the headers of their kinds."""

    control: ControlChannel
    rank: int
    placement: Sequence[int]
    stages: Mapping[int, StageEngine]
    plan: Plan
    dynamic: bool = False

    def __post_init__(self) -> None:
        self.count = 0  # of kinds so far, including evicted ones
        self.num_announced = [0, 0]  # evaluations, and mini-batches with gradients
        self.headers: LRUCache[int, StepHeader] = LRUCache(MAX_KINDS)
        self.numbers: LRUCache[Hashable, int] = LRUCache(MAX_KINDS)
        self.others = [rank for rank in range(max(self.placement) + 1) if rank != self.rank]
        # Frozen parameters and training flags of the whole model, which are the same on every rank.
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
        """Receive the inputs from a rank that was given them; None if no rank was."""
        self.send_all([QUERY_INPUTS, 0])
        holders = [rank for rank in self.others if self.control.recv_row(rank, 1)[0]]
        if not holders:
            return None
        self.send_all([SEND_INPUTS, holders[0]])
        return self.control.recv(holders[0])

    def reject(self, message: str) -> None:
        """Send the reason why the mini-batch cannot be run to the other ranks."""
        self.send_all([REJECTED, 0])
        for rank in self.others:
            self.control.send(rank, message)
        self.control.wait_sends()

    # ── the other ranks ──────────────────────────────────────────────────────────────────────────────────────

    def receive(self, training: bool, given: Given, caller_loss: bool) -> StepHeader:
        """Wait for the first rank's announcement. Send this rank's inputs to it if it requests them."""
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
            first_call, own_call = (
                "a forward" if outside else "a step" if trains else "a call"
                for trains, outside in ((header.training, header.caller_loss), (training, caller_loss))
            )
            raise PlanError(f"the first rank runs {first_call} of the pipeline, but this rank runs {own_call}")
        if header.context != context:
            raise PlanError(f"the first rank runs under {header.context}, but this rank under {context}")
        if code == NEW:
            self._complete(header, None, given)
        elif code == COMPARED:
            self._compare(given)
        return header

    # ── all ranks ────────────────────────────────────────────────────────────────────────────────────────────

    def exchange_targets(self, header: StepHeader, targets: Any) -> Any:
        """The targets, on the rank of the last stage: received from another rank if this rank was given none."""
        last, source = self.placement[-1], header.targets_rank
        if source is not None and source != last:
            if self.rank == source:
                self.control.send(last, _to_host(targets))
            elif self.rank == last:
                received = self.control.recv(source)
                return received if targets is None else targets
        return targets

    def _compare(self, given: Given) -> list[bool]:
        """Raise on all ranks if they were given different mini-batches; return whether each rank has targets."""
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
        """Complete the header of a new kind, together with the other ranks."""
        last = self.placement[-1]
        holders = [rank for rank, has in enumerate(self._compare(given)) if has]
        header.targets_rank = last if last in holders else next(iter(holders), None)
        for variant in dict.fromkeys(header.variants):
            self.plan.require_chain().prepare(self.plan.groups, variant)
        if not self.dynamic:
            self._infer(header, inputs)
        self.headers[header.number] = header

    def _infer(self, header: StepHeader, inputs: list[MessageMeta] | None) -> None:
        """Infer the messages of each kind of micro-batch: each rank runs its own stages on fake tensors."""
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
        """Store the metadata of an edge, and send it to the rank of the stage at its other end."""
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
