"""The executor: runs the stages of this process by their schedule, together with the other ranks.

`ThreadExecutor` has all ranks in this process, a thread for each. `DistributedExecutor` has one rank, and reaches the
others through torch.distributed. `Pipeline`, the profiler and the compatibility layers see this interface alone.

    train(inputs, targets)        forward and backward: gradients, loss, outputs
    evaluate(inputs, targets)     forward without a graph
    stream(batches)               many evaluations, overlapped where the executor can
    call(inputs), forward(inputs) outputs in the caller's autograd graph, for a loss that the caller computes
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock.engine.forward_context import RunNames
from penstock.engine.loss import LossAndOutputs, Outputs, StepOutcome
from penstock.engine.recompute.batchnorm import deferred_statistics_of
from penstock.engine.recorder import StepRecorder
from penstock.engine.replicas.fp32_accumulate import Fp32GradAccumulator
from penstock.engine.replicas.ties import Ties
from penstock.engine.runner import Runner
from penstock.engine.stage import StageEngine
from penstock.errors import PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan

T = TypeVar("T")


class Executor(ABC):
    """The stages of this process, with the state that threads and distributed ranks both need."""

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
        self.source = source
        self.placement = source.placement
        self.stages: Mapping[int, StageEngine] = {stage.index: stage for stage in stages}
        self.edges = [(edge.src, edge.dst) for edge in plan.edges]
        self.last_stage = plan.num_stages - 1
        self.run_names = RunNames()
        self.norms = deferred_statistics_of(self.stages)
        self.weights = next((stage.weights for stage in stages if stage.weights is not None), None)
        self.recorder: StepRecorder | None = None  # set while steps are recorded
        self.lockstep = False  # see ``set_lockstep``
        self.bubble: float | None = None  # share of the last run's time spent waiting for other ranks
        self.fp32 = Fp32GradAccumulator(self.parameters()) if fp32_gradients else None
        self.loss_parameters = loss_parameters
        self._rescales: bool | None = None  # whether the loss returns counts that rescale gradients; None: unknown

    @property
    def loss(self) -> LossAndOutputs | None:
        """Loss and outputs, on the rank of the last stage."""
        stage = self.stages.get(self.last_stage)
        return None if stage is None else stage.loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages, each once."""
        seen: set[int] = set()
        for stage in self.stages.values():
            for parameter in stage.module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter

    # ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────

    def train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome:
        """Run forward and backward of one mini-batch, and add its gradients to ``.grad``.

        After a failure, parameters that had no gradient before have none.
        """
        with self.weights_in_use(), nullcontext() if self.fp32 is None else self.fp32:
            # Gradients of earlier steps are kept apart, unless the loss is known not to rescale this step's.
            apart = self._rescales is not False or self.sums_over_replicas
            stash = GradStash((*self.parameters(), *self.loss_parameters), apart=apart)
            try:
                outcome = self._train(value, targets, outputs)
            except BaseException:
                if self.weights is not None:
                    self.weights.end_run()
                stash.restore()
                raise
            self._rescales = outcome.factor is not None
            stash.add_back(outcome.factor)
        return outcome

    @abstractmethod
    def _train(self, value: Any, targets: Any, outputs: Outputs) -> StepOutcome: ...

    @abstractmethod
    def evaluate(self, value: Any, targets: Any, outputs: Outputs, *, loss: bool = True) -> StepOutcome:
        """The outputs of one mini-batch without a graph, and its loss where there are targets and ``loss`` is set."""

    def stream(self, values: Iterable[Any]) -> Iterator[Any]:
        """The outputs of many mini-batches, in order."""
        for value in values:
            with torch.no_grad(), self.weights_in_use():
                outputs = self.evaluate(value, None, "all", loss=False).outputs
            yield outputs

    @abstractmethod
    def call(self, value: Any) -> Any:
        """``pipe(x)`` with gradients: the outputs in the caller's autograd graph."""

    @abstractmethod
    def forward(self, value: Any) -> Any:
        """``pipe.forward(x)``: like ``call``; under a mesh the other ranks wait for the caller's backward."""

    def set_lockstep(self, value: bool) -> None:
        """Whether, in forward-only runs, a stage starts its next forward only when its last output is taken."""
        if value:
            raise PlanError("pipe.lockstep = True is for threads of this process that have one stage each")

    @abstractmethod
    def reschedule(self, source: ScheduleProvider) -> None:
        """Use another order from the next step on. Under a mesh all ranks do so between the same steps."""

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Around a backward that adds to ``.grad``; one that fails leaves no gradient where there was none."""
        with nullcontext() if self.fp32 is None else self.fp32:
            stash = GradStash(self.parameters(), apart=self.sums_over_replicas)
            try:
                yield
            except BaseException:
                stash.restore()
                raise
            stash.add_back(None)

    def weights_in_use(self) -> AbstractContextManager[None]:
        """Around a run: weights that live on the host are moved to their devices as stages need them."""
        return nullcontext() if self.weights is None else self.weights.run()

    # ── the other ranks ──────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def sums_over_replicas(self) -> bool:
        """Whether gradients are summed over data-parallel replicas."""

    @abstractmethod
    def broadcast(self, value: Any) -> Any:
        """The value of the last stage's rank, on every rank."""

    @abstractmethod
    def reduce(self, value: Tensor, largest: bool) -> Tensor:
        """The sum, or the maximum, of a number over the ranks of the pipeline."""

    @abstractmethod
    def max_over_ranks(self, number: float) -> float:
        """The maximum of a number over all ranks, replicas included."""

    @abstractmethod
    def gather_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state of all ranks' stages, of which ``state`` is this process's."""

    @abstractmethod
    def align_ties(self) -> None:
        """Copy tied parameters' values from the model's own to their copies on other devices."""

    # ── recording ────────────────────────────────────────────────────────────────────────────────────────────

    def recording_run(self, kind: str) -> AbstractContextManager[None]:
        """Around one mini-batch, whether it is recorded or not."""
        return nullcontext() if self.recorder is None else self.recorder.run(kind)

    def recording_span(self, name: str) -> AbstractContextManager[None]:
        """Around a phase of a run outside the program."""
        recorder = self.recorder
        return nullcontext() if recorder is None or recorder.now is None else recorder.span(name)

    def recorded(self, runner: Runner) -> Callable[[], None]:
        """Runs a program, recorded or not."""
        recorder = self.recorder
        return runner.run if recorder is None or recorder.now is None else partial(recorder.run_program, runner)

    @abstractmethod
    def begin_recording(self, recorder: StepRecorder) -> None:
        """Record runs from now on. Under a mesh all ranks call it, and align their clocks."""

    @abstractmethod
    def end_recording(
        self, recorder: StepRecorder, error: BaseException | None, part: Callable[[], T]
    ) -> tuple[list[T], str | None]:
        """After the recorder was taken off: gather the ``part`` that each process has recorded.

        ``error`` is the exception that ended the recording. The text says why parts of other processes are missing.
        """

    # ── end of life ──────────────────────────────────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @abstractmethod
    def check_idle(self) -> None:
        """Raise a ``PipelineError`` where nothing can be started."""

    @abstractmethod
    def close(self) -> None: ...

    def exit(self, error: BaseException | None) -> None:
        """Close at the end of a ``with`` block, which ``error`` may have ended: the other ranks are told."""
        self.close()


class GradStash:
    """The gradients from before a step.

    ``apart``: existing gradients are removed from ``.grad`` during the step, because a loss that returns counts
    rescales what the step adds.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, apart: bool) -> None:
        self.before: dict[nn.Parameter, Tensor | None] = {}
        for parameter in parameters:
            if parameter.grad is None:
                self.before[parameter] = None
            elif apart:
                self.before[parameter] = parameter.grad
                parameter.grad = None

    def restore(self) -> None:
        """Undo a step that failed."""
        for parameter, grad in self.before.items():
            parameter.grad = grad

    def add_back(self, factor: float | None) -> None:
        """Multiply the step's gradients by ``factor`` (None: leave them), and add those from before."""
        for parameter, before in self.before.items():
            if factor is not None and parameter.grad is not None:
                parameter.grad.mul_(factor)
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
