"""One rank per process: channels over torch.distributed, a step protocol, and failures that all ranks raise."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from time import perf_counter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from penstock.engine.channel.base import ChannelError, uses_nccl
from penstock.engine.channel.control import NORM, NUMBER, STATE, STEP, TRACE, ControlChannel
from penstock.engine.connections import Connections, MeshCoordinates, ProgramCache
from penstock.engine.executor import Executor, GradStash, PipelineCall, apply_call, with_training_modes
from penstock.engine.failure.status import LOSS, NEXT_BATCH, REDUCE_GRADS
from penstock.engine.failure.watch import PipelineStopped, Rendezvous
from penstock.engine.forward_context import CallerContext, caller_context
from penstock.engine.loss import Outputs, StepOutcome, check_joinable
from penstock.engine.message import BorrowedInputs, Grads, Message, backward_inputs, input_edges, map_tensors
from penstock.engine.microbatch import split_inputs, split_targets
from penstock.engine.recompute.batchnorm import RunningStatistics, commit_statistics
from penstock.engine.recorder import AlignedClock, StepRecorder, measure_clock_offset
from penstock.engine.replicas.dtensor import to_full
from penstock.engine.replicas.reduce import GradReducer
from penstock.engine.replicas.ties import ProcessTies
from penstock.engine.runner import Runner
from penstock.engine.stage import StageEngine
from penstock.engine.step_protocol import StepHeader, StepProtocol, StepRejected
from penstock.errors import PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan

T = TypeVar("T")

_OR_ELSEWHERE = ", or on another rank of its pipeline, which sends them there: no rank was given any"
_NO_INPUT = Message([], None, ())  # on a rank without the first stage


class DistributedExecutor(Executor):
    """This rank's stages, and its channels to the other ranks.

    Collective operations are guarded: all ranks raise a failure of one rank, and start no operation afterwards.
    """

    ties: ProcessTies

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        source: ScheduleProvider,
        copies: Sequence[Sequence[nn.Parameter]],
        mesh: MeshCoordinates,
        rendezvous: Rendezvous,
        config: Mapping[str, Any],
        limits: tuple[float | None, float | None],
        dynamic: bool,
        **gradients: Any,
    ) -> None:
        super().__init__(plan, stages, source, **gradients)
        self.ended: PipelineError | None = None  # the error that has stopped the pipeline
        self.mesh = mesh
        self.rank = mesh.pipe_rank
        self.ranks = mesh.ranks("pipe")
        self.device = mesh.device
        self.first_rank, self.last_rank = self.placement[0], self.placement[-1]
        self.pending: _PendingBackward | None = None  # a mini-batch whose backward has not run yet
        self.rendezvous, self.watch, self.status = rendezvous, rendezvous.watch, rendezvous.watch.status
        self.wait_timer = self.watch.wait_timer
        self.status.stage_ranks = [self.ranks[rank] for rank in self.placement]
        weakref.finalize(self, self.watch.stop).atexit = False  # ends the watch if the executor was not closed
        rendezvous.compare(config)
        self.watch.set_limits(*limits)
        self.connections = Connections(mesh, self.watch)
        host = torch.device("cpu")
        control = self.connections.group("control", range(len(self.ranks)), host)
        self.control = ControlChannel(control, self.ranks, self.status, self.wait_timer)
        self.replicas = self.connections.replicas("data")
        self.tensor_parallel = self.connections.replicas("tensor")
        self.mesh_groups = [group for group in (self.replicas, self.tensor_parallel) if group is not None]
        endpoints = self.connections.endpoints(self.edges, self.placement, "", self.device)
        staged = endpoints
        if uses_nccl(self.device):
            staged = self.connections.endpoints(self.edges, self.placement, "quiet ", host)
        self.programs = ProgramCache(
            self.edges, self.placement, self.rank, self.device, self.stages, source, endpoints, staged, dynamic
        )
        self.protocol = StepProtocol(self.control, self.rank, self.placement, self.stages, plan, dynamic)
        new_group = self.connections.group
        self.ties = ProcessTies(plan, copies, self.placement, self.rank, new_group, self.device, self.status)
        self.reducer: GradReducer | None = None
        self.statistics: RunningStatistics | None = None
        modules = {s: stage.module for s, stage in self.stages.items()}
        parallel = {s: stage.parallel for s, stage in self.stages.items() if stage.parallel is not None}
        self.sharded = [made.sharded for made in parallel.values() if made.sharded is not None]
        if self.replicas is not None or parallel:
            self.reducer = self.programs.reducer = GradReducer(modules, self.replicas, parallel)
        if self.replicas is not None:
            if not parallel:  # ``parallelize_stages`` has done it already
                self.replicas.broadcast(t for m in modules.values() for t in (*m.parameters(), *m.buffers()))
            if not self.norms:
                self.statistics = RunningStatistics(modules.values(), self.replicas.control.gather)
            if self.loss is not None:
                self.loss.replicas = self.replicas
        # Otherwise a rank that closes the pipeline at once would make another one wait for its gloo connection.
        rendezvous.gather({}, "until this pipeline is built by", limited=False)
        self.status.phase = NEXT_BATCH

    # ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────

    def _run_minibatch(self, value: Any, targets: Any, outputs: Outputs, *, training: bool, loss: bool) -> StepOutcome:
        self.wait_timer.seconds, start = 0.0, perf_counter()
        with self.recording_run("step" if training else "evaluate"):
            outcome: StepOutcome = self.guarded(lambda: self._run_guarded(value, targets, outputs, training, loss))
        self.bubble = None if self.device.type == "cuda" else self.wait_timer.seconds / (perf_counter() - start)
        return outcome

    def _run_guarded(self, value: Any, targets: Any, outputs: Outputs, training: bool, loss: bool) -> StepOutcome:
        with self.recording_span("announce"):
            header, messages = self.announce(value, targets, training, caller_loss=False)
        sizes, collector = header.sizes, self.loss
        if not training:
            messages = [message._replace(wants=()) for message in messages]
            if loss and not sizes and any(self.control.gather(targets is not None)):
                targets = ()
        targets = self.protocol.exchange_targets(header, targets)
        if collector is not None:
            missing = targets is None and collector.rule.wants_targets
            if training and missing and sizes:
                where = f"rank {self.ranks[self.rank]}, which has the last stage"
                how = " in each step: this step has none" if header.targets_rank == self.rank else _OR_ELSEWHERE
                raise PlanError(f"the targets must be passed on {where}{how}")
            parts = split_targets(targets, sizes, self.device) if training or (loss and not missing) else None
            collector.begin(sizes, parts, outputs, training=training)
        reducer = self.reducer if training else None
        with self.committing_statistics(training=training):
            if reducer is not None:
                reducer.begin()
            self.gather_shards()
            edges = input_edges(messages)
            grads = self._run_program(header, messages, grad=training)
            if reducer is not None:
                with self.recording_span("reduce"):
                    reducer.finish()
            if training and self.ties.copies:
                self.ties.sum_grads()
            if not training:
                for sharded in self.sharded:
                    sharded.reshard()
            with self.recording_span("loss"):
                total, factor, samples = self._broadcast_loss()
            if training and grads:
                backward_inputs(edges, grads, factor)
        kept = None if collector is None else collector.take_outputs()
        return StepOutcome(total, factor if training else None, kept, samples, len(sizes))

    def announce(self, value: Any, targets: Any, training: bool, caller_loss: bool) -> tuple[StepHeader, list[Message]]:
        """Exchange the header of the next mini-batch; on the first rank, split the mini-batch into micro-batches."""
        self.status.phase = NEXT_BATCH
        if self.rank != self.first_rank:
            return self.protocol.receive(training, (value, targets), caller_loss), []
        try:
            value = self.protocol.fetch_inputs() if value is None else value
            if value is None:
                where = f"rank {self.ranks[self.rank]}, which has the first stage"
                raise PlanError(f"the inputs must be passed on {where}{_OR_ELSEWHERE}")
            empty = self.replicas is not None and not caller_loss
            sizes, messages, variants = split_inputs(
                value, self.source.count, self.device, self.variant, grad=training, empty=empty
            )
        except PlanError as error:
            self.protocol.reject(str(error))
            raise StepRejected(str(error)) from error
        return self.protocol.announce(training, sizes, messages, variants, (value, targets), caller_loss), messages

    def _run_program(self, header: StepHeader, messages: Sequence[Message], *, grad: bool) -> list[Grads] | None:
        """Run the program; return the gradients of the inputs, on the rank of the first stage."""
        run_name = self.next_run_name(training=grad)
        if not header.sizes:
            if self.weights is not None:
                self.weights.end_run()
            return None
        program = self.programs.get(header)
        io = program.io
        io.grads = [()] * len(messages) if messages else None
        with BorrowedInputs(messages) as io.inputs:
            self.run(program.runner, caller_context(), header.variants, run_name, grad=grad)
        grads, io.inputs, io.grads = io.grads, [], None
        return grads

    def run(
        self, runner: Runner, context: CallerContext, variants: Sequence[str | None], run_name: str, *, grad: bool
    ) -> None:
        with self.prepared_stages(context, variants, run_name), torch.set_grad_enabled(grad):
            self.status.runner, self.status.phase = runner, REDUCE_GRADS
            self.recorded(runner)()

    def gather_shards(self) -> None:
        """Before a run: gather the parameters of stages that FSDP shards over the replicas."""
        if self.sharded and self.replicas is not None:
            self.replicas.sum([1.0])  # detects a failed replica, for which FSDP's collectives would wait
        for sharded in self.sharded:
            sharded.unshard()

    @contextmanager
    def committing_statistics(self, *, training: bool) -> Iterator[None]:
        """Commit BatchNorm statistics unless the run fails; in a step, those of all replicas."""
        statistics = self.statistics if training else None
        combining = nullcontext() if statistics is None else statistics.combining()
        gather = self.replicas.control.gather if self.replicas is not None and training else None
        with combining, commit_statistics(self.norms, gather) if self.norms else nullcontext():
            yield

    def _broadcast_loss(self) -> tuple[Tensor | None, float | None, int]:
        """Send loss, gradient factor and number of samples from the rank of the last stage to all ranks."""
        loss = self.loss
        self.status.phase = LOSS
        if loss is None:
            present, number, factor, double, samples = self.control.recv_row(self.last_rank, 5)
            dtype = torch.float64 if double else torch.float32
            received = torch.tensor(number, dtype=dtype, device=self.device) if present else None
            return received, factor or None, int(samples)
        if self.device.type == "cuda" and uses_nccl(self.device):
            # The host has not waited for received messages yet.
            others = [rank for place, rank in enumerate(self.ranks) if place != self.last_rank]
            with self.status.waiting(others, "for its GPU, which waits for messages from"):
                torch.cuda.current_stream(self.device).synchronize()
        value, own_factor = loss.finish()
        row = [0.0, 0.0, 0.0, 0.0, loss.batch]
        if value is not None:
            row = [1.0, float(value), own_factor or 0.0, float(value.dtype == torch.float64), loss.batch]
        self.protocol.send_all(row)
        return value, own_factor, loss.batch

    def call(self, value: Any) -> Any:
        raise PlanError(
            "under a mesh pipe(x) gives no gradients: call it under torch.no_grad(), or use step(), or forward()"
        )

    def forward(self, value: Any) -> Any:
        if self.weights is not None:
            raise PlanError("under a mesh pipe.forward(x) does not support Offload(weights=True): use step()")
        header, messages = self.guarded(lambda: self.announce(value, None, training=True, caller_loss=True))
        self.pending = pending = _PendingBackward(self, header)
        if self.loss is not None:
            return apply_call(pending, messages or [_NO_INPUT])
        edges = input_edges(messages)
        pending.forward(messages)
        grads, _ = pending.backward(())
        if messages:
            backward_inputs(edges, grads, None)
        return None

    def reschedule(self, source: ScheduleProvider) -> None:
        self.source = source
        self.programs.reschedule(source)

    # ── collectives over the ranks ───────────────────────────────────────────────────────────────────────────

    def broadcast(self, value: Any) -> Any:
        return map_tensors(self._gather(value, STEP)[self.last_rank], lambda tensor: tensor.to(self.device))

    def reduce(self, value: Tensor, largest: bool) -> Tensor:
        pairs = self._gather((float(value), value.dtype == torch.float64), NORM)
        numbers = torch.tensor([number for number, _ in pairs], dtype=torch.float64)
        total = numbers.max() if largest else numbers.sum()
        return total.to(value.device, torch.float64 if any(double for _, double in pairs) else value.dtype)

    def max_over_ranks(self, number: float) -> float:
        for control in (self.control, *(group.control for group in self.mesh_groups)):
            with control.in_call(NUMBER):
                number = max(self.guarded(partial(control.gather, number)))
        return number

    def gather_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = self._gather({name: to_full(tensor).cpu() for name, tensor in state.items()}, STATE)
        return {name: tensor for part in reversed(parts) for name, tensor in part.items()}  # the first rank's is kept

    def _gather(self, value: Any, call: int) -> list[Any]:
        """Gather the values of all ranks on every rank, as a part of ``call``."""
        with self.control.in_call(call):
            found: list[Any] = self.guarded(lambda: self.control.gather(value))
        return found

    # ── recording ────────────────────────────────────────────────────────────────────────────────────────────

    def begin_recording(self, recorder: StepRecorder) -> None:
        offset = self._clock_offset(recorder)
        recorder.aligned = AlignedClock(recorder.elapsed(), offset)
        self.recorder = recorder

    def end_recording(
        self, recorder: StepRecorder, error: BaseException | None, part: Callable[[], T]
    ) -> tuple[list[T], str | None]:
        if self.closed:
            return [part()], "the pipeline was closed in the trace"
        if error is not None:  # the ranks may be in different steps: exchange nothing
            if self.ended is None:
                with suppress(RuntimeError):  # the store may be gone
                    self.rendezvous.publish({"left": True})
            return [part()], f"rank {self.mesh.rank} left the trace by {type(error).__name__}: {error}".splitlines()[0]
        end_here, how = {"left": False}, "until this trace is ended by"
        ends = self.guarded(lambda: self.rendezvous.gather(end_here, how, limited=False))
        for rank, end in zip(self.mesh.world_ranks, ends, strict=True):
            if end["left"]:
                return [part()], f"rank {rank} left the trace by an error"
        offset = self._clock_offset(recorder)
        recorder.aligned.end = (recorder.elapsed(), offset)
        with self.control.in_call(TRACE):
            parts: list[T] = self.guarded(lambda: self.control.gather(part()))
        for group in reversed(self.mesh_groups):  # the parts are sorted by replica, then by rank
            rows = self.guarded(partial(group.control.gather, parts))
            parts = [one for row in rows for one in row]
        return parts, None

    def _clock_offset(self, recorder: StepRecorder) -> Any:
        data, tensor = (None if group is None else group.control for group in (self.replicas, self.tensor_parallel))
        with self.control.in_call(TRACE):
            return self.guarded(lambda: measure_clock_offset(self.control, data, tensor, recorder.elapsed))

    # ── failures and closing ─────────────────────────────────────────────────────────────────────────────────

    def guarded(self, work: Callable[[], Any], call: _PendingBackward | None = None) -> Any:
        """Run a collective operation. ``call`` is the pending call that it belongs to, if any."""
        if self.ended is not None:
            raise PipelineError(f"this pipeline has stopped and must be built anew. It stopped because:\n{self.ended}")
        try:
            with self.watch:
                if self.pending is not call:
                    raise PlanError(
                        "the output of pipe.forward(…) has had no backward, and the other ranks wait for it: call "
                        "backward on its loss before another call, or call the pipeline under torch.no_grad()"
                    )
                result = work()
                self.control.wait_sends()
            return result
        except StepRejected as rejected:
            error = PlanError(str(rejected))
            if self.replicas is not None:  # the other replicas wait for this one
                self._stop(self.watch.explain(error), error)
            raise error from None
        except PipelineStopped as stopped:
            self._stop(stopped.cause.error(), stopped.__cause__)
        except BaseException as error:
            ended = self.watch.explain(error)
            if isinstance(error, Exception) or self.watch.interrupted:
                self._stop(ended, error)
            self.ended = ended
            self.close()
            raise

    def _stop(self, error: PipelineError, cause: BaseException | None) -> NoReturn:
        """Close, and raise an error that all ranks raise."""
        self.ended = error
        if isinstance(cause, ChannelError):  # its frames hold connections open
            traceback.clear_frames(cause.__traceback__)
        self.close()
        raise error from cause

    @property
    def closed(self) -> bool:
        return not self.connections.groups and self.ended is None

    def exit(self, error: BaseException | None) -> None:
        self.watch.on_exit(error)
        self.close()

    def close(self) -> None:
        """Close the channels. Ranks that wait for this rank fail at once."""
        if not self.connections.groups:
            return
        self.watch.stop()
        self.programs.close()
        for stage in self.stages.values():
            stage.close()
        for sharded in self.sharded:
            sharded.reset()
        self.control.close()
        self.ties.close()
        if self.reducer is not None:  # reductions may be in flight
            self.reducer.begin()
        if self.loss is not None:
            self.loss.clear()
        for group in self.mesh_groups:
            group.close()
        self.connections.close()


class _PendingBackward(PipelineCall):
    """A mini-batch whose loss the caller computes, on the rank of the last stage.

        rank 0   F0 F1 F2 F3 · · · · waits · · · · · · · · B0 B1 B2 B3     forward(x) returns None
        rank 1   ·  F0 F1 F2 F3 ─▶ outputs ─▶ loss.backward() B0 B1 B2 B3  forward(x) returns the outputs, after F3

    All ranks run the same program: all forwards, then all backwards. The last rank returns to the caller in between.
    """

    def __init__(self, executor: DistributedExecutor, header: StepHeader) -> None:
        # The backwards of the stages add to ``.grad``. Autograd needs one input that requires a gradient.
        super().__init__(executor, header.sizes, [nn.Parameter(torch.empty(()))])
        self.executor, self.variants = executor, header.variants
        self.io = (program := executor.programs.get(header)).io
        self.halves = program.runner.halves()

    def forward(self, inputs: list[Message]) -> list[Message]:
        """Run this rank's forwards; return the outputs, on the rank of the last stage."""
        with self.executor.recording_run("call"):
            self.recorder = self.executor.current_recorder
            return self.executor.guarded(lambda: self._forward(inputs), self)  # type: ignore[no-any-return]

    def backward(self, seeds: Sequence[Grads]) -> tuple[list[Grads], dict[int, Tensor]]:
        """Run this rank's backwards; return the gradients of the inputs, on the rank of the first stage."""
        executor = self.executor
        if executor.pending is not self:
            raise RuntimeError("Trying to backward through the pipeline a second time: under a mesh, call it again")
        with executor.recording_run("backward") if self.recorder is executor.recorder else nullcontext():
            return executor.guarded(lambda: self._backward(seeds), self), {}

    def _forward(self, inputs: list[Message]) -> list[Message]:
        executor, loss, io = self.executor, self.executor.loss, self.io
        if loss is not None:
            loss.begin(self.sizes, None, None)
            io.outputs = [None] * self.count
        with executor.committing_statistics(training=True), BorrowedInputs(inputs) as io.inputs:
            if executor.reducer is not None:
                executor.reducer.begin()
            executor.gather_shards()
            executor.run(self.halves[0], self.context, self.variants, self.run_name, grad=True)
        outputs = [message for message in io.outputs or () if message is not None]
        io.inputs, io.outputs = [], None
        if loss is not None:
            check_joinable([message.leaves for message in outputs], self.sizes)
            self.loss_weights = loss.weights
            if not any(message.wants for message in outputs):  # the others wait, but autograd will not call backward
                self._backward([()] * self.count)
        return outputs

    def _backward(self, seeds: Sequence[Grads]) -> list[Grads]:
        executor, io = self.executor, self.io
        io.seed = seeds.__getitem__
        io.grads = [()] * self.count
        stash = GradStash(executor.parameters(), stash_all=executor.replicas is not None, ties=executor.ties)
        with executor.fp32 or nullcontext(), stash, with_training_modes(self.modes):
            executor.run(self.halves[1], self.context, self.variants, self.run_name, grad=False)
            if executor.reducer is not None:
                executor.reducer.finish()
            executor.ties.sum_grads()
        grads, io.grads, io.seed = io.grads, None, None
        executor.pending = None
        return grads
