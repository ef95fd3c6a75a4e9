"""One rank per process: channels over torch.distributed, agreement on what comes, failures that reach everybody."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from penstock.engine.channel.base import ChannelError, WaitTimer
from penstock.engine.channel.control import NORM, NUMBER, STEP, ControlChannel
from penstock.engine.channel.groups import uses_nccl
from penstock.engine.connections import Connections, MeshCoordinates
from penstock.engine.context import RunNames, begin_run, caller_context
from penstock.engine.failure.rendezvous import Rendezvous, pipeline_config
from penstock.engine.failure.status import NEXT_BATCH, REDUCE_GRADS
from penstock.engine.failure.watch import PipelineStopped, Watch
from penstock.engine.loss import LossAndOutputs, Outputs, StepOutcome, backward_inputs, broadcast_loss, input_edges
from penstock.engine.message import BorrowedInputs, Message, flatten, unflatten
from penstock.engine.microbatch import split_inputs, split_targets
from penstock.engine.pending_backward import BACKWARD_PENDING, PendingBackward
from penstock.engine.rank_programs import ProgramCache
from penstock.engine.recompute.batchnorm import RunningStatistics, commit_statistics, deferred_statistics_of
from penstock.engine.recorder import StepRecorder, recorded_program, recorded_run, recorded_span
from penstock.engine.replicas.reduce import GradReducer
from penstock.engine.replicas.ties import ProcessTies
from penstock.engine.stage import StageEngine
from penstock.engine.step_protocol import StepHeader, StepProtocol, StepRejected
from penstock.errors import PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan

__all__ = ["DistributedExecutor", "FailureGuard"]


# What several ranks take part in, guarded: a failure on one of them reaches them all, and ends it.


class FailureGuard:
    """A rank's side of it. What has ended is not begun again."""

    watch: Watch
    control: ControlChannel
    ended: PipelineError | None = None

    def guarded(self, work: Callable[[], Any]) -> Any:
        """Do what other ranks take part in."""
        if self.ended is not None:
            raise PipelineError(f"this pipeline has stopped and must be built anew. It stopped because:\n{self.ended}")
        try:
            with self.watch:
                result = work()
                self.control.wait_sends()
            return result
        except StepRejected as refused:
            error = PlanError(str(refused))
            self.refused(error)
            raise error from None
        except PipelineStopped as stopped:
            self.stop(stopped.cause.error(), stopped.__cause__)
        except BaseException as error:
            ended = self.watch.explain(error)
            if isinstance(error, Exception) or self.watch.interrupt.sent:
                self.stop(ended, error)
            self.ended = ended
            self.close()
            raise

    def refused(self, error: PlanError) -> None:
        """Called where nothing has begun, on the ranks that take part together."""

    def stop(self, error: PipelineError, cause: BaseException | None) -> NoReturn:
        """End it by an error that all ranks know of."""
        self.ended = error
        if isinstance(cause, ChannelError):  # whose frames keep connections open that are to be closed
            traceback.clear_frames(cause.__traceback__)
        self.close()
        raise error from cause

    def close(self) -> None:
        raise NotImplementedError


_OR_ELSEWHERE = ", or on another rank of its pipeline, which sends them there: no rank was given any"


class DistributedExecutor(FailureGuard):
    """This rank's stages, and its channels to the other ranks."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        source: ScheduleProvider,
        copies: Sequence[Sequence[nn.Parameter]],
        place: MeshCoordinates,
        rendezvous: Rendezvous,
        options: Mapping[str, Any],
    ) -> None:
        self.plan = plan
        self.source = source
        self.stages = {stage.index: stage for stage in stages}
        self.rank = place.pipe_rank
        self.ranks = place.ranks("pipe")
        self.device = place.device
        self.edges = [(edge.src, edge.dst) for edge in plan.edges]
        self.placement = source.placement
        self.first_rank, self.last_rank = self.placement[0], self.placement[-1]
        self.pending: PendingBackward | None = None  # a mini-batch whose backward is still to come
        self.wait_timer = WaitTimer()
        self.tape: StepRecorder | None = None  # there while runs are traced
        self.traces = 0  # how many there have been
        self.bubble: float | None = None  # of the last step: the share of its time that this rank waited for others
        self.watch, self.status = rendezvous.watch, rendezvous.watch.status
        self.status.stage_ranks = [self.ranks[rank] for rank in self.placement]
        weakref.finalize(self, self.watch.stop).atexit = False  # it must not outlive a crew that nobody closed
        rendezvous.compare(pipeline_config(plan, source, options))
        self.watch.set_limits(options["stuck_after"], options["timeout"])
        self.connections = Connections(place, self.watch, self.wait_timer)
        host = torch.device("cpu")
        self.control = ControlChannel(
            self.connections.group("control", range(len(self.ranks)), host), self.ranks, self.status
        )
        self.control.wait_timer = self.wait_timer
        self.replicas = self.connections.twins("data")
        self.twins = self.connections.twins("tensor")
        endpoints = self.connections.endpoints(self.edges, self.placement, "", self.device)
        quiet = endpoints
        if uses_nccl(self.device):
            quiet = self.connections.endpoints(self.edges, self.placement, "quiet ", host)
        dynamic = bool(options["dynamic"])
        self.jobs = ProgramCache(
            self.edges, self.placement, self.rank, self.device, self.stages, source, endpoints, quiet, dynamic
        )
        self.agreement = StepProtocol(self.control, self.rank, self.placement, self.stages, plan, dynamic)
        new_group = self.connections.group
        self.ties = ProcessTies(plan, copies, self.placement, self.rank, new_group, self.device, self.status)
        self.weights = next((stage.weights for stage in stages if stage.weights is not None), None)
        self.run_names = RunNames()
        self.norms = deferred_statistics_of(self.stages)
        self.reducer: GradReducer | None = None
        self.statistics: RunningStatistics | None = None
        modules = {s: stage.module for s, stage in self.stages.items()}
        parallel = {s: stage.parallel for s, stage in self.stages.items() if stage.parallel is not None}
        self.sharded = [made.sharded for made in parallel.values() if made.sharded is not None]
        if self.replicas is not None or parallel:
            self.reducer = self.jobs.reducer = GradReducer(modules, self.replicas, parallel)
        if self.replicas is not None:
            if not parallel:  # these were made equal before
                self.replicas.broadcast(t for m in modules.values() for t in (*m.parameters(), *m.buffers()))
            if not self.norms:
                self.statistics = RunningStatistics(modules.values(), self.replicas.gather)
            if self.head is not None:
                self.head.replicas = self.replicas
        self.status.phase = NEXT_BATCH

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        """This rank's part of a training step; the loss is the same on every rank."""
        return self._timed("step", lambda: self._train(value, targets, outputs))

    def evaluate(self, value: Any, targets: Any, outputs: Outputs, *, loss: bool = True) -> StepOutcome:
        """The outputs of one mini-batch, on the rank of the last stage; its loss, if it has one, on every rank.

        Replicas take part together where there is a loss, and each for itself where none is wanted.
        """
        return self._timed("evaluate", lambda: self._evaluate(value, targets, outputs, loss))

    def _timed(self, kind: str, work: Callable[[], StepOutcome]) -> StepOutcome:
        self.wait_timer.seconds, start = 0.0, perf_counter()
        with recorded_run(self.tape, kind):
            outcome: StepOutcome = self.guarded(work)
        self.bubble = None if self.device.type == "cuda" else self.wait_timer.seconds / (perf_counter() - start)
        return outcome

    def reschedule(self, source: ScheduleProvider) -> None:
        """Train in another order from the next step on; all ranks do so between the same steps."""
        self.source = source
        self.jobs.reschedule(source)

    def everywhere(self, outputs: Any) -> Any:
        """The last rank's outputs, on every rank."""
        there = self.gather(outputs)[self.last_rank]
        leaves, spec = flatten(there)
        return unflatten([leaf.to(self.device) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def _train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        with recorded_span(self.tape, "announce"):
            announced, messages = self.announce(value, targets, training=True)
        sizes, head = announced.sizes, self.head
        targets = self.agreement.bring_targets(announced, targets)
        if head is not None:
            if targets is None and head.rule.wants_targets and sizes:
                where = f"rank {self.ranks[self.rank]}, which has the last stage"
                how = " in each step: this one has none" if announced.targets_rank == self.rank else _OR_ELSEWHERE
                raise PlanError(f"the targets must be passed on {where}{how}")
            head.begin(sizes, split_targets(targets, sizes, self.device), outputs, training=True)
        with self.committing(training=True):
            if self.reducer is not None:
                self.reducer.begin()
            self.gather_shards()
            origins = input_edges(messages)
            with self.ties.reducing():
                grads = self._feed(announced, messages, grad=True)
                if self.reducer is not None:
                    with recorded_span(self.tape, "reduce"):
                        self.reducer.finish()
            with recorded_span(self.tape, "loss"):
                loss, factor, samples = broadcast_loss(head, self.control, self.last_rank, self.device)
            if grads:
                backward_inputs(origins, grads, factor)
        return StepOutcome(loss, factor, head.take_outputs() if head is not None else None, samples, len(sizes))

    def _evaluate(self, value: Any, targets: Any, outputs: Outputs, wants_loss: bool) -> StepOutcome:
        with recorded_span(self.tape, "announce"):
            announced, messages = self.announce(value, targets, training=False)
        sizes, head = announced.sizes, self.head
        if not sizes and wants_loss and self.agreement.anyone(targets is not None):
            targets = ()
        targets = self.agreement.bring_targets(announced, targets)
        if head is not None:
            head.begin(sizes, head.targets_of(targets, sizes, self.device) if wants_loss else None, outputs)
        with self.committing(training=False):
            self.gather_shards()
            self._feed(announced, [message._replace(wants=()) for message in messages], grad=False)
            for sharded in self.sharded:
                sharded.reshard()
            loss, _, samples = broadcast_loss(head, self.control, self.last_rank, self.device)
        return StepOutcome(loss, None, head.take_outputs() if head is not None else None, samples, len(sizes))

    def gather_shards(self) -> None:
        """Before a run: put stages that are sharded over the replicas together."""
        if self.sharded and self.replicas is not None:
            self.replicas.sum([1.0])  # a replica that has failed is noticed here; within FSDP it would be waited for
        for sharded in self.sharded:
            sharded.unshard()

    @contextmanager
    def committing(self, *, training: bool) -> Iterator[None]:
        """Statistics of BatchNorm layers, committed if all goes well; in a step, those of all replicas."""
        statistics = self.statistics if training else None
        if statistics is not None:
            statistics.begin()
        with commit_statistics(self.norms, self.replicas.gather if self.replicas is not None and training else None):
            yield
        if statistics is not None:
            statistics.commit()

    def announce(
        self, value: Any, targets: Any, *, training: bool, apart: bool = False
    ) -> tuple[StepHeader, list[Message]]:
        """Agree with the other ranks on what comes: its kind, and on the first rank its micro-batches."""
        self.status.phase = NEXT_BATCH
        given = targets is not None
        if self.rank != self.first_rank:
            return self.agreement.hear(training, caller_context(), value, given, apart), []
        try:
            value = self.agreement.fetch() if value is None else value
            if value is None:
                where = f"rank {self.ranks[self.rank]}, which has the first stage"
                raise PlanError(f"the inputs must be passed on {where}{_OR_ELSEWHERE}")
            empty = self.replicas is not None and not apart
            sizes, messages = split_inputs(value, self.source.count, self.device, empty=empty)
        except PlanError as error:
            self.agreement.refuse(str(error))
            raise StepRejected(str(error)) from error
        return self.agreement.announce(training, caller_context(), sizes, messages, given, apart), messages

    def _feed(
        self, announced: StepHeader, messages: Sequence[Message], *, grad: bool
    ) -> list[Sequence[Tensor | None]] | None:
        """Run the program; the gradients of the inputs, where the first stage is."""
        run_name = self.run_names.next(training=grad)
        if not announced.sizes:
            if self.weights is not None:
                self.weights.land()
            return None
        job = self.jobs.of(announced)
        ends = job.ends
        ends.grads = [()] * len(messages) if messages else None
        begin_run(self.stages.values(), caller_context(), len(announced.sizes), run_name)
        self.status.runner, self.status.phase = job.runner, REDUCE_GRADS
        try:
            with torch.set_grad_enabled(grad), BorrowedInputs(messages) as ends.inputs:
                recorded_program(self.tape, job.runner)()
        finally:
            if self.weights is not None:
                self.weights.land()
        for stage in self.stages.values():
            stage.moments = ()
        grads, ends.inputs, ends.grads = ends.grads, [], None
        return grads

    @property
    def head(self) -> LossAndOutputs | None:
        return self.stages[self.plan.num_stages - 1].head if self.rank == self.last_rank else None

    # ── sums over ranks ──────────────────────────────────────────────────────────────────────────────────────

    def reduce(self, value: Tensor, largest: bool) -> Tensor:
        """The sum, or the largest, of a number over the ranks."""
        pairs = self.gather((float(value), value.dtype == torch.float64), NORM)
        numbers = torch.tensor([number for number, _ in pairs], dtype=torch.float64)
        total = numbers.max() if largest else numbers.sum()
        return total.to(value.device, torch.float64 if any(wide for _, wide in pairs) else value.dtype)

    def gather(self, value: Any, call: int = STEP) -> list[Any]:
        """Every rank's value, on every rank; ``call`` is what this is a part of."""
        with self.control.in_call(call):
            found: list[Any] = self.guarded(lambda: self.control.gather(value))
        return found

    def max_over_ranks(self, number: float) -> float:
        """The largest of all ranks' numbers, over pipelines and replicas, on all of them."""
        for control in (self.control, *(r.control for r in (self.replicas, self.twins) if r is not None)):
            with control.in_call(NUMBER):
                number = max(self.guarded(partial(control.gather, number)))
        return number

    # ── failing and ending ───────────────────────────────────────────────────────────────────────────────────

    def guarded(self, work: Callable[[], Any], part_of: PendingBackward | None = None) -> Any:
        """Do what other ranks take part in: a failure reaches them all."""
        return super().guarded(partial(self._in_turn, work, part_of))

    def _in_turn(self, work: Callable[[], Any], part_of: PendingBackward | None) -> Any:
        if self.pending is not part_of:
            raise PlanError(BACKWARD_PENDING)
        return work()

    def refused(self, error: PlanError) -> None:
        if self.replicas is not None:  # which wait for this one's part
            self.stop(self.watch.explain(error), error)

    @property
    def closed(self) -> bool:
        return self.connections.closed and self.ended is None

    def leave(self, error: BaseException | None) -> None:
        """Close because the program leaves the pipeline, by an error or without one, which the others learn of."""
        self.watch.on_exit(error)
        self.close()

    def close(self) -> None:
        """Leave the channels. Ranks that still wait for this one learn of it at once."""
        if self.connections.closed:
            return
        self.watch.stop()
        self.jobs.close()
        for stage in self.stages.values():
            stage.close()
        for sharded in self.sharded:
            sharded.reset()
        self.control.close()
        self.ties.close()
        if self.reducer is not None:  # sums may be under way
            self.reducer.begin()
        if self.head is not None:
            self.head.clear()
        for replicas in (self.replicas, self.twins):
            if replicas is not None:
                replicas.close()
        self.connections.close()
