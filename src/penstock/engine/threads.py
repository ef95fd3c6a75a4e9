"""All ranks in one process: a thread for each, channels in memory."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._torch import graph_task_keeps_graph
from penstock.engine.channel.base import WaitTimer
from penstock.engine.channel.local import Cancelled, LocalChannel, LockstepChannel
from penstock.engine.executor import Executor, PipelineCall, apply_call, suspended_grad_hooks, with_training_modes
from penstock.engine.failure.status import HangDetector, HangLimits, check_threads, thread_status
from penstock.engine.forward_context import CallerContext, caller_context
from penstock.engine.loss import LossAndOutputs, Outputs, StepOutcome, check_joinable
from penstock.engine.loss_terms import LossWeights
from penstock.engine.message import BorrowedInputs, Grads, Message, backward_inputs, input_edges, split_grads, unflatten
from penstock.engine.microbatch import SplitInputs, join, split_inputs, split_targets
from penstock.engine.recompute.batchnorm import commit_statistics, deferred_statistics_of
from penstock.engine.replicas.ties import LocalTies
from penstock.engine.runner import Bindings, LRUCache, PipelineIO, Runner, compile_program
from penstock.engine.stage import Slot, StageEngine, begin_run, make_slots
from penstock.errors import PipelineError, PlanError
from penstock.schedule.lower import Instruction, lower
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge, Schedule
from penstock.split.plan import Plan

Task = Callable[[], None]
TaskQueue: TypeAlias = "SimpleQueue[tuple[Task, RunReport] | None]"
StageBackward = Callable[[StageEngine, Grads, Slot], None]

STREAM_AHEAD = 2  # mini-batches of a stream in flight, besides the one whose outputs are consumed
POLL_SECONDS = 0.2  # between two checks for a hang

_threads_lock = threading.Lock()


@dataclass(frozen=True)
class ThreadProgram:
    """One compiled program per rank, the channels between them, and their inputs and outputs."""

    runners: tuple[Runner, ...]
    channels: tuple[LocalChannel, ...]
    io: PipelineIO
    microbatches: int
    timers: tuple[WaitTimer, ...]  # of each rank

    def cancel(self) -> None:
        for channel in self.channels:
            channel.cancel()


class ThreadExecutor(Executor):
    """All stages of a pipeline, and a thread for each rank."""

    ties: LocalTies
    loss: LossAndOutputs

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        source: ScheduleProvider,
        copies: Sequence[Sequence[nn.Parameter]] = (),
        limits: HangLimits | None = None,
        **gradients: Any,
    ) -> None:
        super().__init__(plan, stages, source, **gradients)
        self.limits = limits or HangLimits()
        self.ties = LocalTies(copies)
        self.first_device, self.last_device = self.stages[0].device, self.stages[self.last_stage].device
        self.streaming = False
        self.on_gpu = any(stage.device.type == "cuda" for stage in stages)
        uses = Counter(parameter for stage in stages for parameter in stage.module.parameters())
        for stage in stages:
            stage.shared_parameters = [parameter for parameter, count in uses.items() if count > 1]
        placement = self.placement
        devices = [self.stages[placement.index(rank)].device for rank in range(max(placement) + 1)]
        on_cpu = sum(device.type == "cpu" for device in devices)
        cpu_threads = max(1, torch.get_num_threads() // max(1, on_cpu))  # of an operator in each worker
        self.task_queues: list[TaskQueue] = [SimpleQueue() for _ in devices]
        self.threads = [
            threading.Thread(
                target=_worker_loop, args=(task_queue, device, cpu_threads), name=f"penstock rank {rank}", daemon=True
            )
            for rank, (task_queue, device) in enumerate(zip(self.task_queues, devices, strict=True))
        ]
        for thread in self.threads:
            thread.start()
        self._end_threads = weakref.finalize(self, _end_threads, self.task_queues)
        self.lock = threading.RLock()  # one run at a time, also if user threads share the pipeline
        self._programs: LRUCache[tuple[bool, int], ThreadProgram] = LRUCache(8)

    # ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────

    def _run_minibatch(self, value: Any, targets: Any, outputs: Outputs, *, training: bool, loss: bool) -> StepOutcome:
        with self._running("step" if training else "evaluate"):
            collector = self.loss
            sizes, messages, variants = self.split(value, grad=training)
            if not training:
                messages = [message._replace(wants=()) for message in messages]
            missing = targets is None and collector.rule.wants_targets
            if training and missing:
                raise PlanError("there are no targets: pass them to step(inputs, targets), or leave out loss_fn")
            parts = split_targets(targets, sizes, self.last_device) if loss and not missing else None
            program = self.program(training, len(sizes))
            io = program.io
            collector.begin(sizes, parts, outputs, training=training)
            io.seed = collector.seed
            grads: list[Grads] = [()] * len(sizes)
            io.grads = grads
            edges = input_edges(messages)
            with BorrowedInputs(messages) as io.inputs:
                self.run(program, variants, grad=training, run_name=self.next_run_name(training=training))
            io.inputs, io.grads = [], None
            total, factor = collector.finish()
            if self.ties.copies and training:
                self.ties.sum_grads()
            backward_inputs(edges, grads, factor)
            return StepOutcome(total, factor if training else None, collector.take_outputs(), sum(sizes), len(sizes))

    def split(self, value: Any, *, grad: bool) -> SplitInputs:
        return split_inputs(value, self.source.count, self.first_device, self.variant, grad=grad)

    @contextmanager
    def _running(self, kind: str) -> Iterator[None]:
        with self.lock, self.recording_run(kind), commit_statistics(self.norms) if self.norms else nullcontext():
            yield

    def set_lockstep(self, value: bool) -> None:
        if len(set(self.placement)) < len(self.stages):
            super().set_lockstep(value)
        with self.lock:
            self.lockstep = value
            self._programs.clear()

    def reschedule(self, source: ScheduleProvider) -> None:
        with self.lock:
            self.source = source
            self._programs.clear()

    def program(self, training: bool, microbatches: int) -> ThreadProgram:
        key = (training, microbatches)
        if key not in self._programs:
            make = self.source.training if training else self.source.forward_only
            orders, slots = self.lower(make(microbatches), graphs=self.graphs is not None)
            lockstep = self.lockstep and not training
            self._programs[key] = self.compile(orders, microbatches, slots, PipelineIO(), lockstep=lockstep)
        return self._programs[key]

    def lower(
        self, schedule: Schedule, *, graphs: bool = False
    ) -> tuple[list[Sequence[Instruction]], dict[tuple[int, int], Slot]]:
        """The instructions of each rank, and the slot of each (stage, micro-batch)."""
        programs = lower(schedule, self.edges)
        made = [make_slots(program, self.stages, graphs=graphs) for program in programs]
        slots = {key: slot for part in made for key, slot in part.items()}
        return [program.instructions for program in programs], slots

    def compile(
        self,
        orders: Sequence[Sequence[Instruction]],
        microbatches: int,
        slots: dict[tuple[int, int], Slot],
        io: PipelineIO,
        backward: StageBackward | None = None,
        lockstep: bool = False,
    ) -> ThreadProgram:
        """Compile one order per rank, or a single order for the stages of all ranks."""
        device = {index: stage.device for index, stage in self.stages.items()}
        timers = tuple(WaitTimer() for _ in orders)
        rank_of = {s: 0 if len(orders) == 1 else self.placement[s] for s in self.stages}
        timer = {s: timers[rank] for s, rank in rank_of.items()}
        forwards: dict[Edge, LocalChannel] = {}
        for a, b in self.edges:
            ends = (microbatches, device[a], device[b], timer[b])
            # A skip connection over several stages holds as many messages as the activations on its way.
            new_lockstep = partial(LockstepChannel, sender_wait_timer=timer[a], room=b - a - 1)
            forwards[a, b] = new_lockstep(*ends) if lockstep else LocalChannel(*ends)
        backwards = {(b, a): LocalChannel(microbatches, device[b], device[a], timer[a]) for a, b in self.edges}
        runners = []
        for rank, order in enumerate(orders):
            own = {s: stage for s, stage in self.stages.items() if rank_of[s] == rank}
            runners.append(compile_program(order, Bindings(own, slots, forwards, backwards, io, backward_fn=backward)))
        return ThreadProgram(tuple(runners), (*forwards.values(), *backwards.values()), io, microbatches, timers)

    def run(
        self,
        program: ThreadProgram,
        variants: Sequence[str | None] = (),
        *,
        grad: bool,
        run_name: str,
        context: CallerContext | None = None,
    ) -> bool:
        """Run all programs to their end, or raise the first failure and drop the state of the failed run.

        Forwards run in ``context``, by default the caller's. A recompute uses the variant of its original forward.
        Returns whether a layer has called ``current_microbatch``.
        """
        variants = variants or [None] * program.microbatches
        with self.prepared_stages(context or caller_context(), variants, run_name) as microbatches:
            start = perf_counter()
            self.wait(program, self.start(self.tasks(program, grad=grad)))
        seconds, timers = perf_counter() - start, program.timers
        self.bubble = None if self.on_gpu else 1 - sum(timer.busy for timer in timers) / (seconds * len(timers))
        return any(microbatch.known for microbatch in microbatches)

    def tasks(self, program: ThreadProgram, *, grad: bool) -> list[Callable[[], None]]:
        """One task per worker, which runs its program on the caller's CUDA streams and in the caller's grad mode."""
        devices = {stage.device for stage in self.stages.values() if stage.device.type == "cuda"}
        streams = [torch.cuda.current_stream(device) for device in devices]
        inference = torch.is_inference_mode_enabled()

        def task(runner: Runner, timer: WaitTimer) -> None:
            with ExitStack() as stack:
                # All ranks on one GPU use the caller's stream, so their work needs no events for its order.
                for stream in streams:
                    stack.enter_context(torch.cuda.stream(stream))
                stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(grad))
                try:
                    timer.seconds, start = 0.0, perf_counter()
                    self.recorded(runner)()
                    timer.busy = perf_counter() - start - timer.seconds
                except BaseException as error:
                    at = runner.current
                    if at is not None:
                        error.add_note(f"in stage {at.stage}, micro-batch {at.microbatch}, action {at}")
                    raise

        return [partial(task, runner, timer) for runner, timer in zip(program.runners, program.timers, strict=True)]

    def start(self, tasks: Sequence[Task]) -> RunReport:
        """Queue ``tasks[r]`` on the thread of rank ``r``."""
        super().check_idle()
        report = RunReport(SimpleQueue())
        for task_queue, task in zip(self.task_queues, tasks, strict=True):
            task_queue.put((partial(copy_context().run, task), report))  # with the caller's ContextVars
        return report

    def wait(self, program: ThreadProgram, report: RunReport) -> None:
        """Wait until all ranks have run a program. The first failure cancels the others and is raised here.

        After a failure, slots and channels of all programs are dropped. If a rank hangs, the threads are asked to end,
        and a thread whose task does not return is abandoned.
        """
        detectors: list[HangDetector] = []  # most runs end before the first check
        failure: BaseException | None = None
        try:
            while len(report.outcomes) < len(self.threads):
                try:
                    try:
                        report.wakeups.get(timeout=POLL_SECONDS)
                    except Empty:
                        if not detectors:
                            pairs = zip(program.runners, self.threads, strict=True)
                            ranks = [thread_status(runner, thread, self.placement) for runner, thread in pairs]
                            detectors = [HangDetector(status, self.limits) for status in ranks]
                        check_threads(detectors)
                    errors = [error for error in report.outcomes if error is not None]
                except KeyboardInterrupt as interrupt:  # it may replace a received wake-up, so outcomes are counted
                    errors = [interrupt]
                if errors and failure is None:
                    failure = errors[0]
                    program.cancel()
            failure = failure or next((error for error in report.outcomes if error is not None), None)
            if failure is not None:
                raise failure
        except BaseException as error:
            if isinstance(error, PipelineError) and error is not failure:  # a hang
                program.cancel()
                self._end_threads()
            self._programs.clear()
            self.loss.clear()
            raise

    # ── calls and streams ────────────────────────────────────────────────────────────────────────────────────

    def call(self, value: Any) -> Any:
        sizes, messages, variants = self.split(value, grad=True)
        call = _ThreadCall(self, self.source.fill_drain(len(sizes)), sizes, variants)
        if self.weights is not None:
            self.weights.make_resident(call)
        return apply_call(call, messages)

    def stream(self, values: Iterable[Any]) -> Iterator[Any]:
        """The outputs of many mini-batches, in order, without draining the pipeline between them.

        rank 0   a0 a1 a2 b0 b1 b2 c0 c1 …        a worker starts the next mini-batch when it has finished its part
        rank 1      a0 a1 a2 b0 b1 b2 c0 …        of the one before; the caller gets the outputs in order
        rank 2         a0 a1 a2 b0 b1 b2 …
        """
        if self.weights is not None:  # offloaded weights are on the device for one mini-batch at a time
            yield from super().stream(values)
            return
        in_flight: deque[_StreamedBatch] = deque()
        self.streaming = True
        try:
            for value in values:
                in_flight.append(_StreamedBatch(self, value))
                if len(in_flight) > STREAM_AHEAD:
                    yield in_flight.popleft().outputs()
            while in_flight:
                yield in_flight.popleft().outputs()
        finally:
            for batch in in_flight:
                batch.program.cancel()
            for batch in in_flight:
                while not self.closed and len(batch.report.outcomes) < len(batch.program.runners):
                    batch.report.wakeups.get()
            for stage in self.stages.values():
                stage.microbatches = ()
            self.streaming = False

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def closed(self) -> bool:
        return not self._end_threads.alive

    def check_idle(self) -> None:
        super().check_idle()
        if self.streaming:
            raise PipelineError("pipe.stream(…) is still under way: take all of its outputs, or close it")

    def close(self) -> None:
        """End the threads, and wait a few seconds for them. A second call has no effect."""
        self._programs.clear()
        self._end_threads()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(5)
        for stage in self.stages.values():
            stage.close()


class _StreamedBatch:
    """One mini-batch of a stream. The constructor starts it."""

    def __init__(self, executor: ThreadExecutor, value: Any) -> None:
        self.executor = executor
        self.loss_weights = LossWeights(())
        sizes, messages, variants = executor.split(value, grad=False)
        orders, slots = executor.lower(executor.source.forward_only(len(sizes)))
        inputs = [message.detached()._replace(wants=()) for message in messages]
        io = PipelineIO(inputs, outputs=[None] * len(sizes))
        self.program = executor.compile(orders, len(sizes), slots, io)
        context, run_name = caller_context(), executor.next_run_name(training=False)

        def part(rank: int, task: Callable[[], None]) -> None:
            """A worker prepares only its own stages: others may still run the previous mini-batch."""
            own = [stage for s, stage in executor.stages.items() if executor.placement[s] == rank]
            begin_run(own, context, variants, run_name)
            if executor.placement[-1] == rank:
                executor.loss.begin(sizes, None, None)
                self.loss_weights = executor.loss.weights
            with commit_statistics(deferred_statistics_of({stage.index: stage for stage in own})):
                task()

        tasks = [partial(part, rank, task) for rank, task in enumerate(executor.tasks(self.program, grad=False))]
        self.report = executor.start(tasks)

    def outputs(self) -> Any:
        self.executor.wait(self.program, self.report)
        messages = [message for message in self.program.io.outputs or () if message is not None]
        return self.loss_weights.merge(join([unflatten(message.leaves, message.spec) for message in messages]))


class _ThreadCall(PipelineCall):
    """One ``pipe(x)``. Its slots exist until the end of its backward, or until its graph is freed."""

    def __init__(
        self, executor: ThreadExecutor, schedule: Schedule, sizes: Sequence[int], variants: Sequence[str | None]
    ) -> None:
        super().__init__(executor, sizes, [p for p in executor.parameters() if p.requires_grad])
        self.executor, self.variants = executor, variants
        orders, self.slots = executor.lower(schedule)
        self.halves = [
            [[i for i in order if i.kind in kinds] for order in orders]
            for kinds in (("F", "SEND_F"), ("R", "B", "SEND_B"))
        ]
        self.stage_parameters = {
            index: [p for p in stage.module.parameters() if p.requires_grad] for index, stage in executor.stages.items()
        }
        self.over = False
        self.crosses_stages = False  # layers may have stored values for other stages under ``current_microbatch``
        self.borrowed = BorrowedInputs(())

    def forward(self, inputs: list[Message]) -> list[Message]:
        executor = self.executor
        self.borrowed = BorrowedInputs(inputs)
        with executor._running("call"), self.borrowed as messages:
            io = PipelineIO(messages, outputs=[None] * self.count)
            self.recorder = executor.current_recorder
            executor.loss.begin(self.sizes, None, None)
            program = executor.compile(self.halves[0], self.count, self.slots, io, lockstep=executor.lockstep)
            self.crosses_stages = executor.run(program, self.variants, grad=True, run_name=self.run_name)
            self.loss_weights = executor.loss.weights
        outputs = [message for message in io.outputs or () if message is not None]
        check_joinable([message.leaves for message in outputs], self.sizes)
        return outputs

    def backward(self, seeds: Sequence[Grads]) -> tuple[list[Grads], dict[int, Tensor]]:
        if self.over:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: call backward with retain_graph=True the "
                "first time, or call the pipeline again"
            )
        self.borrowed.check_unchanged()
        retain_graph = graph_task_keeps_graph()
        executor = self.executor
        sums: dict[int, dict[int, Tensor]] = {stage: {} for stage in self.stage_parameters}
        crossed: dict[int, Tensor] = {}  # gradients of inputs from backwards of later stages, by identity of the input

        def backward(stage: StageEngine, grads: Grads, slot: Slot) -> None:
            stage_sum = sums[stage.index]
            wanted = self.parameters if self.crosses_stages else self.stage_parameters[stage.index]
            earlier: list[Tensor] = []
            if self.crosses_stages:
                # The graph of this stage may continue in the graphs of earlier stages, through values that layers
                # stored under ``current_microbatch``. The backwards of earlier stages run later.
                k = next(k for (_, k), other in self.slots.items() if other is slot)
                before = [other for (s, j), other in self.slots.items() if j == k and s < stage.index]
                earlier = [leaf for other in before for leaf in other.inputs]
            found = stage.gradients(grads, slot, (*wanted, *earlier), retain_graph or self.crosses_stages)
            if self.crosses_stages:
                own = [grad for row in slot.grads for grad in row]
                for leaf, grad in zip((*earlier, *slot.inputs), (*found[len(wanted) :], *own), strict=True):
                    if grad is not None:
                        crossed[id(leaf)] = grad if id(leaf) not in crossed else crossed[id(leaf)] + grad
                own = [crossed.pop(id(leaf), None) for leaf in slot.inputs]
                slot.grads = split_grads(own, slot.inputs_per_edge)
                found = found[: len(wanted)]
            for parameter, grad in zip(wanted, found, strict=True):
                if grad is not None:
                    if executor.fp32 is not None and grad.dtype.itemsize < 4:
                        grad = grad.float()
                    key = id(parameter)
                    stage_sum[key] = grad if key not in stage_sum else stage_sum[key] + grad

        grads: list[Grads] = [()] * self.count
        io = PipelineIO(seed=seeds.__getitem__, grads=grads)
        with ExitStack() as stack:
            stack.enter_context(executor.lock)
            if self.recorder is executor.recorder:
                stack.enter_context(executor.recording_run("backward"))
            stack.enter_context(suspended_grad_hooks(self.parameters))
            stack.enter_context(with_training_modes(self.modes))
            if executor.on_gpu:
                # This is autograd's thread for the device, and a backward in another thread would wait for it. Kernel
                # launches are fast, so one thread keeps all devices busy. It runs the micro-batches one by one, each
                # from the last stage to the first.
                actions = [i for half in self.halves[1] for i in half if i.kind in "RB"]
                actions.sort(key=lambda i: (i.microbatch, -i.stage, i.kind == "B"))
                begin_run(executor.stages.values(), self.context, [None] * self.count, self.run_name)
                program = executor.compile([actions], self.count, self.slots, io, backward)
                executor.recorded(program.runners[0])()
            else:
                program = executor.compile(self.halves[1], self.count, self.slots, io, backward)
                executor.run(program, grad=False, run_name=self.run_name, context=self.context)
        if not retain_graph:
            self.over = True
            self.slots.clear()
            self.borrowed = BorrowedInputs(())
        totals: dict[int, Tensor] = {}
        for stage_sum in sums.values():
            for key, grad in stage_sum.items():
                totals[key] = grad if key not in totals else totals[key] + grad.to(totals[key].device)
        for copies in executor.ties.copies:
            total = LocalTies.total([totals.get(id(parameter)) for parameter in copies])
            if total is not None:
                totals.update({id(parameter): total.to(parameter.device) for parameter in copies})
        return grads, totals


# ── worker threads ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RunReport:
    """The outcomes of the tasks of one run, in the order in which they ended. ``wakeups`` wakes the waiting thread."""

    wakeups: SimpleQueue[None]
    outcomes: list[BaseException | None] = field(default_factory=list)


def _end_threads(task_queues: Sequence[TaskQueue]) -> None:
    for task_queue in task_queues:
        task_queue.put(None)


def _worker_loop(task_queue: TaskQueue, device: torch.device, cpu_threads: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # creates the CUDA context of this thread, without which cuBLAS warns
    else:
        # The number is that of this thread, but the call also changes the default of threads started later.
        with _threads_lock:
            before = torch.get_num_threads()
            torch.set_num_threads(cpu_threads)
            if before != cpu_threads:
                restore = threading.Thread(target=torch.set_num_threads, args=(before,))
                restore.start()
                restore.join()
    while (item := task_queue.get()) is not None:
        task, report = item
        error: BaseException | None = None
        try:
            task()
        except Cancelled:
            pass  # the rank that failed reports its error
        except BaseException as raised:
            error = raised
        # This frame must not keep objects of the step alive until the next step.
        del item, task
        report.outcomes.append(error)
        report.wakeups.put(None)
        del report, error
