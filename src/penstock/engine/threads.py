"""All ranks in one process: a thread for each, channels in memory."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.channel.base import WaitTimer
from penstock.engine.channel.local import LocalChannel, LockstepChannel
from penstock.engine.context import CallerContext, RunNames, begin_run, caller_context
from penstock.engine.failure.status import HangLimits, ThreadHangDetector
from penstock.engine.loss import LossAndOutputs, Outputs, StepOutcome, backward_inputs, input_edges
from penstock.engine.message import BorrowedInputs
from penstock.engine.microbatch import split_inputs, split_targets
from penstock.engine.recompute.batchnorm import commit_statistics, deferred_statistics_of
from penstock.engine.recorder import StepRecorder, recorded_program, recorded_run
from penstock.engine.replicas.ties import LocalTies
from penstock.engine.runner import Bindings, PipelineIO, Runner, compile_program
from penstock.engine.stage import Slot, StageEngine, make_slots
from penstock.engine.workers import WorkerThreads
from penstock.errors import PlanError
from penstock.schedule.lower import Instruction, lower
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge, Schedule
from penstock.split.plan import Plan

__all__ = ["StageBackward", "ThreadExecutor", "ThreadProgram"]

StageBackward = Callable[[StageEngine, Sequence[Tensor | None], Slot], None]


@dataclass(frozen=True)
class ThreadProgram:
    """One compiled program per rank, the channels between them, and the ends that a step fills and reads."""

    runners: tuple[Runner, ...]
    channels: tuple[LocalChannel, ...]
    ends: PipelineIO
    microbatches: int
    waits: tuple[WaitTimer, ...]  # of each rank

    def cancel(self) -> None:
        for channel in self.channels:
            channel.cancel()


class ThreadExecutor:
    """The stages of a pipeline with their threads."""

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        source: ScheduleProvider,
        copies: Sequence[Sequence[nn.Parameter]] = (),
        limits: HangLimits | None = None,
        lockstep: bool = False,
    ) -> None:
        placement = source.placement
        self.lockstep = lockstep
        self.source = source
        self.stages = {stage.index: stage for stage in stages}
        self.edges = [(edge.src, edge.dst) for edge in plan.edges]
        self.placement = placement
        self.limits = limits or HangLimits()
        self.ties = LocalTies(copies)
        self.norms = deferred_statistics_of(self.stages)
        self.run_names = RunNames()
        self.streaming = False  # whether a stream of mini-batches is under way
        self.on_gpu = any(stage.device.type == "cuda" for stage in stages)
        self.bubble: float | None = None  # of the last run: the share of its time that the ranks waited, on average
        self.tape: StepRecorder | None = None  # there while runs are traced
        self.weights = next((stage.weights for stage in stages if stage.weights is not None), None)
        _set_shared_parameters(stages)
        devices = [self.stages[placement.index(rank)].device for rank in range(max(placement) + 1)]
        on_cpu = sum(device.type == "cpu" for device in devices)
        self.workers = WorkerThreads(devices, max(1, torch.get_num_threads() // on_cpu) if on_cpu else None)
        self.lock = threading.RLock()  # one run at a time: threads that share the pipeline take turns
        self._jobs: OrderedDict[int, tuple[Schedule, ThreadProgram]] = OrderedDict()  # by identity: hashing is a walk

    @property
    def head(self) -> LossAndOutputs:
        head = self.stages[len(self.stages) - 1].head
        assert head is not None
        return head

    def train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        """Forward and backward of one mini-batch; gradients are added to the parameters' ``.grad``."""
        with self.lock, recorded_run(self.tape, "step"), commit_statistics(self.norms):
            return self._train(value, targets, outputs)

    def _train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        sizes, messages = split_inputs(value, self.source.count, self.stages[0].device)
        if targets is None and self.head.rule.wants_targets:
            raise PlanError("there are no targets: pass them to step(inputs, targets), or leave out loss_fn")
        parts = split_targets(targets, sizes, self.stages[len(self.stages) - 1].device)
        job = self.job(self.source.training(len(sizes)))
        self.head.begin(sizes, parts, outputs, training=True)
        job.ends.seed = self.head.seed
        job.ends.grads = [()] * len(sizes)
        origins = input_edges(messages)
        with self.ties.reducing(), BorrowedInputs(messages) as job.ends.inputs:
            self.run(job, grad=True, run_name=self.run_names.next(training=True))
        loss, factor = self.head.finish()
        backward_inputs(origins, job.ends.grads, factor)
        job.ends.inputs, job.ends.grads = [], None
        return StepOutcome(loss, factor, self.head.take_outputs(), sum(sizes), len(sizes))

    def evaluate(self, value: Any, targets: Any, outputs: Outputs, *, loss: bool = True) -> StepOutcome:
        """The outputs of one mini-batch, and its loss where there are targets and it is wanted, without a graph."""
        with self.lock, recorded_run(self.tape, "evaluate"), commit_statistics(self.norms):
            return self._evaluate(value, targets, outputs, loss)

    def _evaluate(self, value: Any, targets: Any, outputs: Outputs, wants_loss: bool) -> StepOutcome:
        sizes, messages = split_inputs(value, self.source.count, self.stages[0].device)
        device = self.stages[len(self.stages) - 1].device
        parts = self.head.targets_of(targets, sizes, device) if wants_loss else None
        job = self.job(self.source.forward_only(len(sizes)))
        self.head.begin(sizes, parts, outputs)
        job.ends.inputs = [message.detached()._replace(wants=()) for message in messages]
        self.run(job, grad=False, run_name=self.run_names.next(training=False))
        job.ends.inputs = []
        loss, _ = self.head.finish()
        return StepOutcome(loss, None, self.head.take_outputs(), sum(sizes), len(sizes))

    def reschedule(self, source: ScheduleProvider) -> None:
        """Train in another order from the next step on."""
        with self.lock:
            self.source = source
            self._jobs.clear()

    def job(self, schedule: Schedule) -> ThreadProgram:
        """The job of a training or evaluation step, compiled once per schedule."""
        if id(schedule) not in self._jobs:
            programs = lower(schedule, self.edges)
            slots = {key: slot for program in programs for key, slot in make_slots(program, self.stages).items()}
            orders = [program.instructions for program in programs]
            job = self.compile(
                orders, schedule.num_microbatches, slots, PipelineIO(), lockstep=self.lockstep and not schedule.trains
            )
            self._jobs[id(schedule)] = (schedule, job)
            while len(self._jobs) > 8:  # batches of ever new sizes must not pile up compiled jobs
                self._jobs.popitem(last=False)
        self._jobs.move_to_end(id(schedule))
        return self._jobs[id(schedule)][1]

    def compile(
        self,
        orders: Sequence[Sequence[Instruction]],
        microbatches: int,
        slots: dict[tuple[int, int], Slot],
        ends: PipelineIO,
        work: StageBackward = StageEngine.backward,
        together: bool = False,
        lockstep: bool = False,
    ) -> ThreadProgram:
        """Bind one order per rank; or, ``together``, one order for the stages of all ranks.

        In ``lockstep`` a stage goes on when what it sent is taken.
        """
        device = {index: stage.device for index, stage in self.stages.items()}
        waits = tuple(WaitTimer() for _ in orders)
        timers = {s: waits[0 if together else self.placement[s]] for s in self.stages}
        forward: dict[Edge, LocalChannel] = {}
        for a, b in self.edges:
            if lockstep:  # a skip over several stages may wait for as long as the activations beside it take to come
                forward[a, b] = LockstepChannel(
                    microbatches, device[a], device[b], timers[b], timers[a], room=b - a - 1
                )
            else:
                forward[a, b] = LocalChannel(microbatches, device[a], device[b], timers[b])
        backward = {(b, a): LocalChannel(microbatches, device[b], device[a], timers[a]) for a, b in self.edges}
        runners = []
        for rank, order in enumerate(orders):
            own = {s: stage for s, stage in self.stages.items() if together or self.placement[s] == rank}
            runners.append(compile_program(order, Bindings(own, slots, forward, backward, ends, work=work)))
        return ThreadProgram(tuple(runners), (*forward.values(), *backward.values()), ends, microbatches, waits)

    def run(self, job: ThreadProgram, *, grad: bool, run_name: str, state: CallerContext | None = None) -> bool:
        """Run all programs to their end, or raise what failed first; after a failure nothing of the job is left.

        Forwards run in ``state``, the caller's unless it is given. Returned is whether a layer has asked which
        micro-batch it works on.
        """
        moments = begin_run(self.stages.values(), state or caller_context(), job.microbatches, run_name)
        start = perf_counter()
        try:
            self.workers.run(self.tasks(job, grad=grad), job.cancel, self.hang_detector(job).check)
        except BaseException:
            self.forget()
            raise
        finally:
            if self.weights is not None:
                self.weights.end_run()
            for stage in self.stages.values():
                stage.moments = ()
        seconds = perf_counter() - start
        self.bubble = None if self.on_gpu else 1 - sum(timer.busy for timer in job.waits) / (seconds * len(job.waits))
        return any(moment.known for moment in moments)

    def tasks(self, job: ThreadProgram, *, grad: bool) -> list[Callable[[], None]]:
        """What each worker does for a job: run its program in the caller's streams and grad mode."""
        devices = {stage.device for stage in self.stages.values() if stage.device.type == "cuda"}
        streams = [torch.cuda.current_stream(device) for device in devices]
        inference = torch.is_inference_mode_enabled()

        def task(runner: Runner, timer: WaitTimer) -> None:
            with ExitStack() as stack:
                # All ranks on one GPU use the caller's stream, so their order there needs no events.
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(grad))
                try:
                    timer.run(recorded_program(self.tape, runner))
                except BaseException as error:
                    at = runner.current
                    if at is not None:
                        error.add_note(f"in stage {at.stage}, micro-batch {at.microbatch}, action {at}")
                    raise

        return [partial(task, runner, timer) for runner, timer in zip(job.runners, job.waits, strict=True)]

    def hang_detector(self, job: ThreadProgram) -> ThreadHangDetector:
        """The hang detector that the caller polls while it waits for a job."""
        return ThreadHangDetector(job.runners, self.placement, self.workers.threads, self.limits)

    def forget(self) -> None:
        """Drop what a failed run left behind: slots and channels hold it."""
        self._jobs.clear()
        self.head.clear()

    @property
    def closed(self) -> bool:
        return self.workers.closed

    def close(self) -> None:
        self._jobs.clear()
        self.workers.close()
        for stage in self.stages.values():
            stage.close()


def _set_shared_parameters(stages: Sequence[StageEngine]) -> None:
    """Tell stages which of their parameters other stages, and so other threads, add gradients to as well."""
    uses = Counter(parameter for stage in stages for parameter in stage.module.parameters())
    for stage in stages:
        stage.shared = [parameter for parameter, count in uses.items() if count > 1]
