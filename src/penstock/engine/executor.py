"""The executor: runs the stages of this process in the order of their schedule, together with the other ranks.

`ThreadExecutor` runs all ranks in this process, one thread each. `DistributedExecutor` runs one rank and communicates
with the others through torch.distributed. `Pipeline`, the profiler and the compatibility layers use this interface.

    train(inputs, targets)        forward and backward: gradients, loss, outputs
    evaluate(inputs, targets)     forward without a graph
    stream(batches)               many evaluations, overlapped where the executor can
    call(inputs), forward(inputs) outputs in the caller's autograd graph, for a loss that the caller computes

For ``call`` and ``forward``, the pipeline is one node of that graph: its forward runs the forward half of a fill-drain
program, and its backward runs the other half. A `PipelineCall` runs the halves.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.engine.forward_context import CallerContext, MicroBatch, caller_context, variant_in_flight
from penstock.engine.loss import LossAndOutputs, Outputs, StepOutcome
from penstock.engine.loss_terms import LossWeights
from penstock.engine.message import Grads, Message, Spec, flatten, unflatten
from penstock.engine.microbatch import join
from penstock.engine.recompute.batchnorm import deferred_statistics_of
from penstock.engine.recorder import StepRecorder
from penstock.engine.replicas import ReplicaGroup
from penstock.engine.replicas.fp32_accumulate import Fp32GradAccumulator
from penstock.engine.replicas.ties import Ties
from penstock.engine.runner import Runner
from penstock.engine.stage import StageEngine, begin_run
from penstock.errors import PipelineError, PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.check import compare_outputs
from penstock.split.lazy import Lazy
from penstock.split.plan import Plan, run_stages
from penstock.split.sample import only_device
from penstock.split.trace.recorder import user_hooks

T = TypeVar("T")

MAX_VERIFIED = 16  # kinds of call whose stages are compared with the whole model


class StepGraphs(Protocol):
    """The part of ``cuda_graphs.CudaGraphs`` that executors use."""

    def running(self) -> AbstractContextManager[Any]: ...
    def stash(self, parameters: Iterable[nn.Parameter], *, stash_all: bool, ties: Ties) -> GradStash: ...


class Executor(ABC):
    """The stages of this process, and the state that both executors need."""

    ties: Ties

    def __init__(
        self,
        plan: Plan,
        stages: Sequence[StageEngine],
        source: ScheduleProvider,
        *,
        fp32_gradients: bool = False,
        loss_parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        self._pid = os.getpid()
        self.source = source
        self.placement = source.placement
        self.stages: Mapping[int, StageEngine] = {stage.index: stage for stage in stages}
        self.plan = plan
        self.edges = [(edge.src, edge.dst) for edge in plan.edges]
        self.last_stage = plan.num_stages - 1
        last = self.stages.get(self.last_stage)
        self.loss: LossAndOutputs | None = None if last is None else last.loss  # on the rank of the last stage
        self.num_runs = {"step": 0, "call": 0}
        self.norms = deferred_statistics_of(self.stages)
        self.weights = next((stage.weights for stage in stages if stage.weights is not None), None)
        self.recorder: StepRecorder | None = None  # set while steps are recorded
        self.replicas: ReplicaGroup | None = None  # of this process's stages, which sum their gradients
        self.lockstep = False  # see ``set_lockstep``
        self.bubble: float | None = None  # fraction of the last run's time spent waiting for other ranks
        self.fp32 = Fp32GradAccumulator(self.parameters()) if fp32_gradients else None
        self.loss_parameters = loss_parameters
        self.graphs: StepGraphs | None = None  # set if actions run as CUDA graphs
        self._verified: dict[str | None, Any] = {}  # variants whose stages were compared with the whole model
        self._rescales: bool | None = None  # whether the loss returns counts that rescale gradients; None: unknown

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters of this process's stages, each once."""
        return {id(p): p for stage in self.stages.values() for p in stage.module.parameters()}.values()

    def next_run_name(self, *, training: bool) -> str:
        """The name of the next run, from which seeds derive. Evaluations do not change the names of later steps."""
        kind = "step" if training else "call"
        self.num_runs[kind] += 1
        return f"{kind} {self.num_runs[kind]}"

    # ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────

    def variant(self, value: Any) -> str | None:
        """The kind of call of a micro-batch. The stages of a recorded model are compared with it for each new kind."""
        chain = self.plan.require_chain()
        variant = chain.variant(value)
        if chain.verify and variant not in self._verified and len(self._verified) < MAX_VERIFIED:
            kinds = ((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in flatten(value)[0])
            kind = (chain.model.training, *map(str, kinds))
            if kind not in self._verified.values():
                self._verify(chain, variant, value)
            self._verified[variant] = kind
        return variant

    def _verify(self, chain: Any, variant: str | None, value: Any) -> None:
        """Compare the outputs of the stages and of the whole model, where this process has it on one device."""
        model = chain.model
        lazy = len(self.stages) < self.plan.num_stages and any(isinstance(part, Lazy) for part in model.modules())
        parallel = any(stage.parallel is not None for stage in self.stages.values())  # it may wait for other ranks
        hooked = any(user_hooks(part, None, model) for part in model.modules())  # hooks run once for each forward
        if only_device(model) is None or lazy or parallel or hooked:
            return

        def staged(*args: Any, **kwargs: Any) -> Any:
            with variant_in_flight(variant):
                return run_stages(self.plan, args, kwargs)

        difference = compare_outputs(model, model, staged, *chain.calls.forward_arguments(value))
        if difference is not None:
            raise PlanError(
                f"the {self.plan.num_stages} stages do not compute what the whole model computes, on the first "
                f"micro-batch: {difference}. Cut the model another way: at other modules (cuts=…), between its blocks "
                "(blocks=…), or at marks; ps.split(…, verify=False) disables this comparison"
            )

    def train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        """Run forward and backward of one mini-batch, and add its gradients to ``.grad``.

        After a failure, parameters that had no gradient before have none.
        """
        # Gradients of earlier steps are stashed, unless the loss is known not to rescale this step's gradients.
        stash_all = self._rescales is not False or self.replicas is not None
        parameters = (*self.parameters(), *self.loss_parameters)
        new_stash = GradStash if self.graphs is None else self.graphs.stash
        stash = new_stash(parameters, stash_all=stash_all, ties=self.ties)
        with self.graph_streams(), self.weights_in_use(), self.fp32 or nullcontext(), stash:
            try:
                outcome = self._run_minibatch(value, targets, outputs, training=True, loss=True)
            except BaseException:
                if self.weights is not None:
                    self.weights.end_run()
                raise
            stash.factor = outcome.factor
            self._rescales = outcome.factor is not None
            if outcome.factor not in (None, 1.0) and not stash_all and len(stash.before) < len(parameters):
                raise PlanError(
                    "the losses of this step's micro-batches average over different numbers of elements per sample, "
                    "unlike those of earlier steps, whose gradients are in .grad and cannot be separated: set all "
                    "gradients to None and start the accumulation again"
                )
        return outcome

    def evaluate(self, value: Any, targets: Any, outputs: Outputs, *, loss: bool = True) -> StepOutcome:
        """The outputs of one mini-batch without a graph, and its loss if there are targets and ``loss`` is set.

        Under a mesh, the rank of the last stage has the outputs, and every rank has the loss. Replicas take part if
        ``loss`` is set.
        """
        with self.graph_streams():
            return self._run_minibatch(value, targets, outputs, training=False, loss=loss)

    def graph_streams(self) -> AbstractContextManager[Any]:
        """A context for a mini-batch: its work is on the streams of the CUDA graphs."""
        return nullcontext() if self.graphs is None else self.graphs.running()

    @abstractmethod
    def _run_minibatch(
        self, value: Any, targets: Any, outputs: Outputs, *, training: bool, loss: bool
    ) -> StepOutcome: ...

    def stream(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            with torch.no_grad(), self.weights_in_use():
                outputs = self.evaluate(value, None, "all", loss=False).outputs
            yield outputs

    @abstractmethod
    def call(self, value: Any) -> Any:
        """``pipe(x)`` with gradients: the outputs in the caller's autograd graph."""

    def forward(self, value: Any) -> Any:
        """``pipe.forward(x)``: like ``call``. Under a mesh the other ranks wait for the caller's backward."""
        return self.call(value)

    def set_lockstep(self, value: bool) -> None:
        """Whether, in forward-only runs, a stage starts its next forward only after its last output was received."""
        if value:
            raise PlanError(
                "pipe.lockstep = True is for threads of this process that have one stage each: with Offload(weights="
                "True), one thread has all stages of a GPU, and under a mesh each rank is a process"
            )

    @abstractmethod
    def reschedule(self, source: ScheduleProvider) -> None:
        """Use another order from the next step on. Under a mesh all ranks call it between the same steps."""

    @contextmanager
    def prepared_stages(
        self, context: CallerContext, variants: Sequence[str | None], run_name: str
    ) -> Iterator[Sequence[MicroBatch]]:
        """Prepare the stages for the programs of a run, and reset them afterwards."""
        stages = self.stages.values()
        try:
            yield begin_run(stages, context, variants, run_name)
        finally:
            if self.weights is not None:
                self.weights.end_run()
            for stage in stages:
                stage.microbatches = ()

    def weights_in_use(self) -> AbstractContextManager[None]:
        """A context for a run: offloaded weights are copied to their devices when stages need them."""
        return nullcontext() if self.weights is None else self.weights.run()

    # ── collectives over the ranks; by default all ranks are in this process ─────────────────────────────────────

    def broadcast(self, value: Any) -> Any:
        """The value of the last stage's rank, on every rank."""
        return value

    def reduce(self, value: Tensor, largest: bool) -> Tensor:
        """The sum, or the maximum, of a number over the ranks of the pipeline."""
        return value

    def max_over_ranks(self, number: float) -> float:
        """The maximum of a number over all ranks, replicas included."""
        return number

    def gather_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of the stages of all ranks; ``state`` is that of this process."""
        return state

    # ── recording ────────────────────────────────────────────────────────────────────────────────────────────

    def recording_run(self, kind: str) -> AbstractContextManager[None]:
        """A context for one mini-batch, which records it if a recorder is set."""
        return nullcontext() if self.recorder is None else self.recorder.run(kind)

    @property
    def current_recorder(self) -> StepRecorder | None:
        """The recorder of the current run, if the run is recorded."""
        return None if self.recorder is None or self.recorder.now is None else self.recorder

    def recording_span(self, name: str) -> AbstractContextManager[None]:
        """A context for a phase of a run outside its program."""
        recorder = self.current_recorder
        return nullcontext() if recorder is None else recorder.span(name)

    def recorded(self, runner: Runner) -> Callable[[], None]:
        recorder = self.current_recorder
        return runner.run if recorder is None else partial(recorder.run_program, runner)

    def begin_recording(self, recorder: StepRecorder) -> None:
        """Record runs from now on. Under a mesh all ranks call it, and align their clocks."""
        self.recorder = recorder

    def end_recording(
        self, recorder: StepRecorder, error: BaseException | None, part: Callable[[], T]
    ) -> tuple[list[T], str | None]:
        """After the recorder was removed: gather the ``part`` that each process has recorded.

        ``error`` is the exception that ended the recording. The returned text explains why other parts are missing.
        """
        return [part()], None

    # ── closing ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    def check_idle(self) -> None:
        """Raise a ``PipelineError`` if no run can be started."""
        if os.getpid() != self._pid:  # threads and connections do not survive a fork: a step would hang
            raise PipelineError(
                f"this pipeline was built in process {self._pid}, and process {os.getpid()} is a fork of it: build the "
                "pipeline in the process that runs it, and do not call it in workers of a DataLoader"
            )
        if self.closed:
            raise PipelineError("this pipeline was closed: build a new one from its plan")

    @abstractmethod
    def close(self) -> None: ...

    def exit(self, error: BaseException | None) -> None:
        """Close at the end of a ``with`` block; ``error`` is the exception that ended it, for the other ranks."""
        self.close()


class GradStash:
    """A context for a step. Adds the gradients of earlier steps to those of the step, or restores them if it fails.

    ``stash_all``: ``.grad`` holds only gradients of the step, because a loss that returns counts rescales them. This is
    always so for tied parameters, because the gradients of the step are summed over the copies.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, stash_all: bool, ties: Ties) -> None:
        self.parameters, self.stash_all = parameters, stash_all
        self.tied = {parameter for copies in ties.copies for parameter in copies}
        self.before: dict[nn.Parameter, Tensor | None] = {}
        self.factor: float | None = None  # multiplies the gradients of the step; None: 1

    def __enter__(self) -> GradStash:
        for parameter in self.parameters:
            self.stash(parameter)
        return self

    def stash(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            self.before[parameter] = None
        elif self.stash_all or parameter in self.tied:
            self.before[parameter] = parameter.grad
            parameter.grad = None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for parameter, before in self.before.items():
            if error is not None:
                parameter.grad = before
                continue
            if self.factor not in (None, 1.0) and parameter.grad is not None:
                parameter.grad.mul_(self.factor)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)


# ── the pipeline as a node of the caller's autograd graph ────────────────────────────────────────────────────────


class PipelineCall(ABC):
    """One mini-batch, whose backward autograd runs later than its forward."""

    def __init__(self, executor: Executor, sizes: Sequence[int], parameters: list[nn.Parameter]) -> None:
        """``sizes`` are the sizes of the micro-batches. Autograd accumulates the gradients of ``parameters``."""
        self.sizes, self.count, self.parameters = sizes, len(sizes), parameters
        self.run_name = executor.next_run_name(training=True)
        # A backward may recompute forwards, in the context and with the training flags of the original forwards.
        self.context = caller_context()
        self.modes = [(part, part.training) for stage in executor.stages.values() for part in stage.module.modules()]
        self.recorder: StepRecorder | None = None  # the recorder of the forward
        self.loss_weights = LossWeights(())
        self.template: tuple[list[Any], Spec] = ([], None)  # leaves and structure of the joined output

    @abstractmethod
    def forward(self, inputs: list[Message]) -> list[Message]:
        """The output of each micro-batch."""

    @abstractmethod
    def backward(self, seeds: Sequence[Grads]) -> tuple[list[Grads], dict[int, Tensor]]:
        """The gradients of the inputs per micro-batch, and the gradients of the parameters by identity."""


def apply_call(call: PipelineCall, inputs: list[Message]) -> Any:
    """Run the call's forward and return the joined output, in the caller's autograd graph."""
    wanted = inputs[0].wants
    tensors = [message.leaves[i] for message in inputs for i in wanted]
    result: tuple[Tensor, ...] = _PipelineFunction.apply(call, inputs, *tensors, *call.parameters)  # type: ignore[no-untyped-call]
    leaves, spec = call.template
    tensors_out = iter(result)
    joined = unflatten([next(tensors_out) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return call.loss_weights.merge(joined)


class _PipelineFunction(torch.autograd.Function):
    """Maps the micro-batches' tensors that require a gradient, and the parameters, to the joined output tensors."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, inputs: list[Message], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward([message.detached() for message in inputs])
        leaves, spec, _, _ = outputs[0]
        if any(message.spec != spec for message in outputs):
            raise PlanError("the outputs of the micro-batches have different structures and cannot be joined")
        columns = list(zip(*(message.leaves for message in outputs), strict=True))
        for column in columns:  # tensors in a list of plain values would lose their graph
            if len({isinstance(leaf, Tensor) for leaf in column}) > 1:
                kinds = " or a ".join(sorted({type(leaf).__name__ for leaf in column}))
                raise PlanError(
                    f"an output of the model is a {kinds}, depending on the micro-batch, and cannot be joined with "
                    "gradients: return the same kinds for all of them, or use step()"
                )
        joined: list[Any] = [join(column) for column in columns]
        call.template = ([leaf if isinstance(leaf, Tensor) else joined[i] for i, leaf in enumerate(leaves)], spec)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        ctx.call = call
        ctx.wants = [message.wants for message in outputs]  # may differ between micro-batches
        wants = sorted({i for message in outputs for i in message.wants})
        ctx.want = [(i, places.index(i)) for i in wants]
        ctx.shapes = [[message.leaves[i].shape for message in outputs] for i in wants]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(joined[i] for i in places if i not in wants))
        return tuple(joined[i] for i in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: PipelineCall = ctx.call
        columns: dict[int, Grads] = {}
        for (i, at), shapes in zip(ctx.want, ctx.shapes, strict=True):  # the inverse of joining the outputs
            grad = grads[at]
            if grad is None or len(shapes) == 1:
                columns[i] = [grad] * len(shapes)
            else:
                columns[i] = torch.split(grad, [shape[0] for shape in shapes]) if shapes[0] else grad.unbind()
        seeds = [[columns[i][k] for i in wants] for k, wants in enumerate(ctx.wants)]
        input_grads, parameter_grads = call.backward(seeds)
        flat = [grad for row in input_grads for grad in row]
        return None, None, *flat, *(parameter_grads.get(id(p)) for p in call.parameters)


@contextmanager
def with_training_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the ``training`` flags of modules, and restore them afterwards."""
    now = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, _ in now:
        module.training = not module.training
    try:
        yield
    finally:
        for module, mode in now:
            module.training = mode


@contextmanager
def suspended_grad_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Suspend hooks on parameters. They run once, on the total gradient, in the caller's graph."""
    hooked = [hooks for p in parameters if (hooks := p._backward_hooks)]
    kept = [list(hooks.items()) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()  # autograd refers to the dictionary itself
    try:
        yield
    finally:
        for hooks, items in zip(hooked, kept, strict=True):
            hooks.update(items)
