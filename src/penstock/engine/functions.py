"""A pipeline of functions: every rank brings its own forward and backward, and nobody knows the whole model.

    rank 0   F0 F1 F2 · · B0 …       forward(k, value, own)    value is what the rank before gave for micro-batch k,
    rank 1   ·  F0 F1 · B0 F2 …                                own are this rank's own inputs for it
    rank 2   ·  ·  F0 B0 F1 B1 …     backward(output, grad)    grad is None where output is the loss: on the last rank

It runs by a schedule, over channels whose messages describe themselves, as any pipeline of one process per rank does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._torch import unsafe_view
from penstock.engine.channel.base import WaitTimer
from penstock.engine.channel.control import ControlChannel
from penstock.engine.channel.groups import uses_nccl
from penstock.engine.connections import Connections, MeshCoordinates, ProgramCache
from penstock.engine.distributed import FailureGuard
from penstock.engine.failure.rendezvous import Rendezvous, versions
from penstock.engine.failure.status import NEXT_BATCH, REDUCE_GRADS
from penstock.engine.forward_context import caller_context
from penstock.engine.loss import LossAndOutputs, loss_rule
from penstock.engine.message import Message, detach_tensors, flatten, unflatten
from penstock.engine.microbatch import batch_size, microbatch_sizes, scatter
from penstock.engine.stage import Slot, StageEngine
from penstock.engine.step_protocol import StepHeader, StepRejected
from penstock.errors import PlanError
from penstock.schedule.provider import ScheduleProvider

__all__ = ["FunctionCrew"]

Forward = Callable[[int, Any, Sequence[Any]], Any]
Backward = Callable[[Any, Any], Any]


class FunctionCrew(FailureGuard):
    """This rank's functions, and its channels to the ranks before and after it. All ranks make it, and run it."""

    def __init__(
        self,
        place: MeshCoordinates,
        schedule: str = "1f1b",
        *,
        stuck_after: float | None = 60.0,
        timeout: float | None = 1800.0,
    ) -> None:
        self.rank, self.ranks = place.pipe_rank, place.ranks("pipe")
        stages = len(self.ranks)
        edges = [(s, s + 1) for s in range(stages - 1)]
        source = ScheduleProvider(schedule, stages, edges, 1, ranks=stages)
        rendezvous = Rendezvous(self.ranks, place.rank)
        self.watch = rendezvous.watch
        weakref.finalize(self, self.watch.stop).atexit = False  # it must not outlive a crew that nobody closed
        try:
            self.watch.status.stage_ranks = self.ranks
            rendezvous.compare({**versions(), "schedule": source.name, "device": place.device.type})
            self.watch.limit(stuck_after, timeout)
            self._connect(place, source, edges)
        except BaseException as error:
            rendezvous.cancel(error)
            raise

    def _connect(self, place: MeshCoordinates, source: ScheduleProvider, edges: list[tuple[int, int]]) -> None:
        host, device, status = torch.device("cpu"), place.device, self.watch.status
        self.connections = Connections(place, self.watch, WaitTimer())
        self.control = ControlChannel(
            self.connections.group("control", range(len(self.ranks)), host), self.ranks, status
        )
        quiet = endpoints = self.connections.endpoints(edges, source.placement, "", device)
        if uses_nccl(device):
            quiet = self.connections.endpoints(edges, source.placement, "quiet ", host)
        self.stage = _FunctionStage(self.rank, device, last=self.rank == len(self.ranks) - 1)
        stages = {self.rank: self.stage}
        self.jobs = ProgramCache(
            edges, source.placement, self.rank, device, stages, source, endpoints, quiet, dynamic=True
        )
        status.phase = NEXT_BATCH

    def run(
        self, forward: Forward, backward: Backward | None, own: Sequence[Any], microbatches: int, *, training: bool
    ) -> Any:
        """Run one mini-batch: the last micro-batch's output of this rank's forward.

        ``own`` are this rank's own inputs, each of which is cut along dimension 0. Without a ``backward``, that of
        autograd is run: of what the last rank's forward gives, which is the loss then.
        """
        return self.guarded(partial(self._run, forward, backward, own, microbatches, training))

    def _run(
        self, forward: Forward, backward: Backward | None, own: Sequence[Any], microbatches: int, training: bool
    ) -> Any:
        status, stage = self.watch.status, self.stage
        status.phase = NEXT_BATCH
        share, rows = _cut(own, microbatches, training)
        count = _agree(self.ranks, self.control.gather(share))
        job = self.jobs.get(StepHeader(-1, training, caller_context(), (1,) * count, ()))
        leaves, spec = flatten(())
        job.io.inputs = [Message([*leaves], spec, ()) for _ in range(count)]
        stage.begin(forward, backward, rows[:count] or [[]] * count)
        status.runner, status.phase = job.runner, REDUCE_GRADS
        try:
            with torch.set_grad_enabled(training):
                job.runner.run()
            return stage.last
        finally:
            stage.end()

    def close(self) -> None:
        """Leave the channels. Ranks that still wait for this one learn of it at once."""
        if self.connections.closed:
            return
        self.watch.stop()
        self.jobs.close()
        self.stage.end()
        self.control.close()
        self.connections.close()


class _FunctionStage(StageEngine):
    """One rank's functions as a stage."""

    def __init__(self, index: int, device: torch.device, *, last: bool) -> None:
        super().__init__(index, nn.Module(), device, _Turn(loss_rule(None, None)) if last else None)
        self.end()

    def begin(self, forward: Forward, backward: Backward | None, own: Sequence[Sequence[Any]]) -> None:
        """Get ready for one mini-batch, of which ``own`` has this rank's inputs, per micro-batch."""
        self.functions: tuple[Forward | None, Backward | None] = forward, backward
        self.own = own
        self.mode = object()

    def end(self) -> None:
        """Let go of everything of a mini-batch."""
        self.functions, self.own = (None, None), ()
        self.kept: dict[Slot, Any] = {}  # outputs that a backward will ask for
        self.last: Any = None

    def _call(self, microbatch: int, value: Any, slot: Slot) -> Any:
        forward, backward = self.functions
        assert forward is not None
        output = forward(microbatch, value, self.own[microbatch])
        if torch.is_grad_enabled() and (backward is not None or self.loss is not None):
            self.kept[slot] = output
        if microbatch == len(self.own) - 1:
            self.last = detach_tensors(output)
        return output

    def _learn_input_mutation(self, leaves: Sequence[Tensor], wants: Sequence[int], inputs: Sequence[Tensor]) -> None:
        super()._learn_input_mutation(leaves, wants, inputs)
        self.mode = object()  # a function may do another thing each time

    def backward(self, grads: Sequence[Tensor | None], slot: Slot) -> None:
        output, (_, backward) = self.kept.pop(slot, None), self.functions
        if self.loss is not None:
            self._turn(output, backward)
        elif backward is None:
            super().backward(grads, slot)
            return
        elif any(grad is not None for grad in grads):  # else this would look like the last rank's
            backward(output, _like(output, grads))
        slot.roots = ()
        super().backward((), slot)

    def _turn(self, loss: Any, backward: Backward | None) -> None:
        if backward is not None:
            backward(loss, None)
            return
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise PlanError(
                f"the last rank's forward gave {found}: without a backward function it must give the loss, one number "
                "in a tensor"
            )
        if not loss.requires_grad:
            raise PlanError("the loss does not depend on any parameter that requires a gradient: nothing to train")
        loss.backward()  # type: ignore[no-untyped-call]


class _Turn(LossAndOutputs):
    """Where backwards begin: by the functions, with no gradient from outside."""

    def seed(self, microbatch: int) -> list[Tensor]:
        return []


class _Share(NamedTuple):
    """What a rank brings to a mini-batch, told to all."""

    training: bool
    microbatches: int  # as asked for
    sizes: list[tuple[int, ...]]  # of each of its own inputs
    problem: str | None = None


def _cut(own: Sequence[Any], microbatches: int, training: bool) -> tuple[_Share, list[list[Any]]]:
    """This rank's own inputs, per micro-batch. What is wrong with them is told, so that nobody waits for this rank."""
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        problem = f"the number of micro-batches must be a whole number from 1, got {microbatches!r}"
        return _Share(training, 0, [], problem), []
    if training and torch.is_inference_mode_enabled():
        return _Share(training, microbatches, [], "a backward needs gradients, but inference mode is on"), []
    sizes: list[tuple[int, ...]] = []
    try:
        for number, value in enumerate(own):
            batch = batch_size(value, f"input {number}")
            if batch == 0:
                raise PlanError(f"input {number} is empty: its tensors have no entries along dimension 0")
            if batch is not None:
                sizes.append(microbatch_sizes(batch, microbatches))
    except PlanError as error:
        return _Share(training, microbatches, [], str(error)), []
    count = len(sizes[0]) if sizes else microbatches
    columns: list[Any] = []
    cuts = iter(sizes)
    for value in own:
        plain = batch_size(value, "inputs") is None
        columns.append([value] * count if plain else map(_alone, scatter(value, next(cuts))))
    return _Share(training, microbatches, sizes), [list(row) for row in zip(*columns, strict=False)]


def _agree(ranks: Sequence[int], shares: Sequence[_Share]) -> int:
    """How many micro-batches there are, by what all ranks bring; the same words on all of them if that cannot be."""
    for rank, share in zip(ranks, shares, strict=True):
        if share.problem is not None:
            raise StepRejected(f"rank {rank}: {share.problem}")
    for name in ("training", "microbatches"):
        found = {rank: getattr(share, name) for rank, share in zip(ranks, shares, strict=True)}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{value} on rank {rank}" for rank, value in found.items())
            raise StepRejected(f"the ranks were called differently: {name} is {told}")
    rows = {row for share in shares for row in share.sizes}
    even = all(len(set(row)) == 1 for row in rows)
    if len({len(row) for row in rows}) > 1 or (len(rows) > 1 and not even):
        told = "; ".join(
            f"rank {rank} has {', '.join(str(sum(row)) for row in share.sizes)} samples"
            for rank, share in zip(ranks, shares, strict=True)
            if share.sizes
        )
        raise StepRejected(
            f"the inputs cannot be cut into {shares[0].microbatches} micro-batches alike: {told}. Give all ranks the "
            "same number of samples, or multiples of the number of micro-batches"
        )
    return len(next(iter(rows))) if rows else shares[0].microbatches


def _alone(value: Any) -> Any:
    """A part of an input apart from its other parts: one that is changed in place must not spoil what others saved."""
    leaves, spec = flatten(value)
    apart = [
        unsafe_view(leaf, leaf.shape) if isinstance(leaf, Tensor) and not leaf.requires_grad else leaf
        for leaf in leaves
    ]
    return unflatten(apart, spec)


def _like(output: Any, grads: Sequence[Tensor | None]) -> Any:
    """Gradients in the place of what they belong to, None elsewhere."""
    leaves, spec = flatten(output)
    coming = iter(grads)
    found = [next(coming) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]
    return unflatten(found, spec)
