"""``Pipeline``: a plan, made to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.engine.autograd_call import ThreadCall, apply_call
from penstock.engine.distributed import DistributedExecutor
from penstock.engine.failure.rendezvous import Rendezvous, digest
from penstock.engine.loss import Outputs, StepOutcome, check_outputs
from penstock.engine.microbatch import split_inputs
from penstock.engine.pending_backward import forward_pending
from penstock.engine.replicas.fp32_accumulate import Fp32GradAccumulator
from penstock.engine.stream import stream
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PipelineError, PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.recompute import Recompute
from penstock.schedule.schedule import Schedule
from penstock.schedule.simulate import Prediction
from penstock.split.plan import Plan
from penstock.train.build import build
from penstock.train.devices import Devices
from penstock.train.grad_stash import GradStash, stashed_grads
from penstock.train.materialise import Init
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload, offload_optimizer, require_offloaded
from penstock.train.options import Options, Parallelize
from penstock.train.progress import StepTotals
from penstock.train.replan import ReplanResult, find_faster_order, predict_from_costs, predict_step
from penstock.train.result import StepResult
from penstock.train.state import PipelineState

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["Pipeline"]


class Pipeline(PipelineState):
    """Trains the model of a plan, stage by stage, micro-batch by micro-batch, to the plain model's result.

    ``loss_fn(output, target)`` gives the loss of a micro-batch, averaged or summed over its samples as it says of
    itself (``reduction`` decides where it does not), or ``(sum, count)``; ``loss_fn(output)`` finds it in the output,
    without targets. Without a ``loss_fn`` the model computes its loss.
    ``schedule`` is a name (see ``penstock schedule --list``) or a ``Schedule``; ``"auto"`` is an order made for the
    ``costs`` of the stages, by default all alike, in the memory of 1F1B (``ps.plan`` finds costs, cuts and order).
    Every rank is a thread of this process with its device, of the list ``devices`` or one for all; with ``mesh`` it is
    a process. ``microbatch_size`` cuts by size: into as many micro-batches of at most so many samples as it takes,
    where ``microbatches`` is the usual number. ``strategy="sharded"`` sends one micro-batch at a time through all
    stages, to debug.

    ``outputs`` says which of the micro-batches' outputs a step keeps: ``"all"``, ``"final"``, ``"sum"``, ``"every:N"``,
    a function of (so_far, output), or None; they are on the last stage's rank, or with ``outputs_everywhere`` on all.
    ``init(stage)`` fills the stages of a model built under ``torch.device("meta")``.

    ``recompute`` runs forwards again for their backward instead of keeping what they made: ``"always"``, for all but
    the last micro-batch (``"except_last"``), or ``"never"``; for all stages, or ``{0: "always"}`` for some. With
    ``seed``, random numbers depend on it, the step, the micro-batch and the layer, and on nothing else.
    ``batchnorm="deferred"`` commits the running statistics of the whole mini-batch, ``accumulate="fp32"`` sums half
    precision's gradients in single, ``offload`` keeps on the host what waits. ``dynamic=True`` is for stages whose
    outputs' shapes, structure or values depend on the data: between processes every message then describes itself.
    With ``lockstep`` a stage starts its next forward when its last output is taken, so that in calls and evaluations
    outputs do not pile up before a slow stage. docs/training.md tells more.

    ``parallelize(stage, mesh)`` is called with each stage of this process, on its device with the first replica's
    weights, to make a ``DistributedDataParallel``, ``fully_shard`` or tensor-parallel module of it: it returns that, or
    None where it changed the stage in place. ``mesh["data"]`` and ``mesh["tensor"]`` are what they work over.

    A rank that waits for another one in one place logs why after ``stuck_after`` seconds, and gives up after
    ``timeout``: then all ranks stop, and a process that hangs in a step ends. None is never.
    """

    def __init__(
        self,
        plan: Plan,
        loss_fn: Callable[..., Any] | None = None,
        *,
        microbatches: int = 1,
        microbatch_size: int | None = None,
        schedule: str | Schedule | None = None,
        costs: Costs | None = None,
        strategy: str = "pipelined",
        devices: Devices = None,
        mesh: Mesh | None = None,
        reduction: str | None = None,
        outputs: Outputs = "all",
        outputs_everywhere: bool = False,
        init: Init | None = None,
        recompute: Recompute = "never",
        seed: int | None = None,
        accumulate: str | None = None,
        batchnorm: str = "microbatch",
        offload: Offload | None = None,
        dynamic: bool = False,
        parallelize: Parallelize | None = None,
        stuck_after: float | None = 60.0,
        timeout: float | None = 1800.0,
        lockstep: bool = False,
    ) -> None:
        options = Options(
            loss_fn=loss_fn,
            microbatches=microbatches,
            microbatch_size=microbatch_size,
            schedule=schedule,
            costs=costs,
            strategy=strategy,
            devices=devices,
            reduction=reduction,
            outputs=outputs,
            outputs_everywhere=outputs_everywhere,
            init=init,
            recompute=recompute,
            seed=seed,
            accumulate=accumulate,
            batchnorm=batchnorm,
            offload=offload,
            dynamic=dynamic,
            parallelize=parallelize,
            stuck_after=stuck_after,
            timeout=timeout,
            lockstep=lockstep,
        )
        rendezvous = Rendezvous(mesh.world_ranks, mesh.rank) if isinstance(mesh, Mesh) else None
        try:
            built = build(plan, options, mesh, rendezvous)
        except BaseException as error:
            if rendezvous is not None:
                rendezvous.cancel(error)
            raise
        self.plan = built.plan
        self.mesh = mesh
        self._line = plan.require_chain()
        self._model = self._line.model
        self._source = built.source
        self._modules = built.modules
        self._own_name = built.own_name
        self._executor = built.crew
        self._meeting = rendezvous
        self._traced: Trace | None = None  # the last of ``trace``
        self.prediction: Prediction | None = None  # of what this pipeline was made from, such as a plan
        self._outputs = outputs
        self._everywhere = outputs_everywhere
        self._counted: bool | None = None
        self._of_loss = list(loss_fn.parameters()) if isinstance(loss_fn, nn.Module) else []
        self._replicated = mesh is not None and mesh.data > 1
        self.last: StepResult | None = None  # the last step's result, without its outputs
        self.step_totals = StepTotals()  # of all steps
        self._loss_scale = 1.0
        self._wide = Fp32GradAccumulator(self.parameters()) if accumulate == "fp32" else None
        self._offload = offload
        streams = offload is not None and (offload.optimizer or offload.weights)
        self._watch = require_offloaded(self.parameters()) if streams else None

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, inputs: Any = None, targets: Any = None) -> StepResult:
        """Forward and backward of one mini-batch. Gradients are added to ``.grad``, as by ``loss.backward()``.

        A step that fails leaves no gradients where there were none; those of earlier steps may be incomplete sums.
        """
        start = time.perf_counter()
        self._check_open()
        if torch.is_inference_mode_enabled():
            raise PlanError("step() needs gradients, but was called under torch.inference_mode()")
        # Where the loss is known not to count as it goes, nothing rescales what is there already.
        with self._at_work(), nullcontext() if self._wide is None else self._wide:
            aside = GradStash(
                (*self.parameters(), *self._of_loss), apart=self._counted is not False or self._replicated
            )
            try:
                outcome = self._executor.train(self._value(inputs), targets, self._outputs)
            except BaseException:
                if self._executor.weights is not None:
                    self._executor.weights.end_run()
                aside.give_back()
                raise
            self._counted = outcome.factor is not None
            aside.add_back(outcome.factor)
        result = self._result(outcome, start)
        self.last = replace(result, outputs=None)
        self.step_totals.add(result)
        return result

    def evaluate(self, inputs: Any = None, targets: Any = None, *, outputs: Outputs = "same") -> StepResult:
        """Forward of one mini-batch without a graph: its outputs, and its loss where there are targets.

        Nothing is switched: call ``pipe.eval()`` first for what an evaluation usually is. ``outputs`` is as for the
        pipeline, or the ``"same"``.
        """
        start = time.perf_counter()
        self._check_open()
        if outputs != "same":
            check_outputs(outputs)
        with torch.no_grad(), self._at_work():
            outcome = self._executor.evaluate(
                self._value(inputs), targets, self._outputs if outputs == "same" else outputs
            )
        return self._result(outcome, start)

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs of many mini-batches, in order, without a graph and without draining the pipeline between them.

        Each of ``batches`` is what ``step`` takes as inputs. The next ones are under way while the caller uses the
        outputs of one; nothing else can be run until all are taken, or the iterator is closed. Under a mesh all ranks
        iterate; the rank of the last stage gets the outputs, the others None. Weights that live on the host come for
        one mini-batch at a time.
        """
        self._check_open()
        if isinstance(self._executor, ThreadExecutor) and self._executor.weights is None:
            yield from stream(self._executor, (self._value(batch) for batch in batches))
            return
        for batch in batches:
            with torch.no_grad(), self._at_work():
                outputs = self._shared(self._executor.evaluate(self._value(batch), None, "all", loss=False).outputs)
            yield outputs

    def _result(self, outcome: StepOutcome, start: float) -> StepResult:
        outputs = self._shared(outcome.outputs)
        seconds = time.perf_counter() - start
        return StepResult(outcome.loss, outputs, outcome.samples, outcome.microbatches, seconds, self._executor.bubble)

    def _shared(self, outputs: Any) -> Any:
        """Outputs where they are wanted: on the last stage's rank, or everywhere."""
        if self._everywhere and isinstance(self._executor, DistributedExecutor):
            return self._executor.everywhere(outputs)
        return outputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a mini-batch of any size.

        In this process the outputs are part of autograd's graph, unless under ``no_grad``: ``loss.backward()`` runs
        the stages' backwards. Under a mesh this is for evaluation: call it under ``torch.no_grad()`` on all ranks;
        the rank of the last stage gets the outputs, the others None.
        """
        self._check_open()
        value = self._line.arguments(args, kwargs) if args or kwargs else None
        grad = torch.is_grad_enabled()
        if not grad:
            with self._at_work():
                return self._shared(self._executor.evaluate(value, None, "all", loss=False).outputs)
        if isinstance(self._executor, DistributedExecutor):
            raise PlanError(
                "under a mesh pipe(x) gives no gradients: call it under torch.no_grad(), or use step(), or forward()"
            )
        sizes, messages = split_inputs(value, self._source.count, self._executor.stages[0].device)
        trainable = [parameter for parameter in self.parameters() if parameter.requires_grad]
        wide = self._wide is not None
        flight = ThreadCall(self._executor, self._executor.source.fill_drain(len(sizes)), sizes, trainable, wide)
        if self._executor.weights is not None:
            self._executor.weights.make_resident(flight)
        return apply_call(flight, messages)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in autograd's graph, for a loss that is made outside: in one process as ``pipe(x)``.

        Under a mesh all ranks call it. The rank of the last stage gets the outputs, and must call backward on a loss
        of them before it does anything else with the pipeline; the others wait for that, and get None. Gradients are
        added to ``.grad``, and summed over replicas: their losses count as parts of one sum.
        """
        if not isinstance(self._executor, DistributedExecutor) or not torch.is_grad_enabled():
            return self(*args, **kwargs)
        self._check_open()
        if self._executor.weights is not None:
            raise PlanError("under a mesh pipe.forward(x) does without Offload(weights=True): use step()")
        value = self._line.arguments(args, kwargs) if args or kwargs else None
        return forward_pending(self._executor, value, self._adding())

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Around the backward of a loss that is made outside; replicas sum what it adds, and not what was there."""
        with (
            nullcontext() if self._wide is None else self._wide,
            stashed_grads(self.parameters(), apart=self._replicated),
        ):
            yield

    @property
    def has_first_stage(self) -> bool:
        """Whether this process has the first stage, which the inputs go to."""
        return 0 in self._modules

    @property
    def has_last_stage(self) -> bool:
        """Whether this process has the last stage, which the targets go to and the outputs come from."""
        return self.plan.num_stages - 1 in self._modules

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step of a full number of micro-batches."""
        return self._source.training(self._source.microbatches)

    def trace(self, steps: int | None = None, *, skip: int = 0, quiet: bool = False) -> AbstractContextManager[Trace]:
        """Record what every rank does in the next ``steps`` mini-batches, all within the block if None.

        The first ``skip`` are left out. When ``with pipe.trace(steps=3) as trace:`` has ended, ``trace`` tells what was
        recorded: of all ranks, on every one of them. Under a mesh all ranks begin and end the block together. At its
        end the time of a step is said beside what was predicted, unless ``quiet``.
        """
        from penstock.profile.trace.recording import TraceRecording

        self._check_open()
        recording = TraceRecording(
            self._executor, self.plan, self.schedule, self.mesh, steps, skip, self._predicted, quiet
        )
        self._traced = recording.trace
        return recording

    def replan(self, costs: Costs | None = None, *, seconds: float = 0.8) -> ReplanResult:
        """Go on in another order, if one is faster for what the stages cost, in the memory of the present one.

        ``costs`` are by default those of the last ``pipe.trace()``. Stages stay on their ranks, and nothing changes but
        the order: gradients are the same. Under a mesh all ranks call it, with the same costs, between the same steps.
        """
        self._check_open()
        if costs is None:
            if self._traced is None:
                raise PlanError("nothing was traced yet: run steps in 'with pipe.trace():' before, or give costs=")
            costs = self._traced.costs()
            if not any(costs.durations(self.schedule.num_stages)["B"]):
                raise PlanError("the last trace has no backward: run steps in 'with pipe.trace():', or give costs=")
        elif not isinstance(costs, Costs):
            raise PlanError(f"costs must be penstock.schedule.Costs(…), got {type(costs).__name__}")
        found, schedule = find_faster_order(self.schedule, costs, self._executor.edges, seconds)
        if self._meeting is not None:
            self._meeting.compare({"what replan was given": digest(repr(costs)), "its order": digest(str(schedule))})
        if found.changed:
            self._source = self._source.with_schedule(schedule)
            self._executor.reschedule(self._executor.source.with_schedule(schedule))
        self.prediction = predict_from_costs("replan", costs, self._executor)
        return found

    def _predicted(self) -> Prediction | None:
        samples = None if self.last is None else self.last.samples
        return predict_step(self.prediction, self._source, self._executor, self.mesh, samples)

    def offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Keep the optimizer's state on the host from now on, as ``Offload(optimizer=True)`` says; returns it.

        With ``Offload(weights=True)`` it brings the weights and gradients to their devices for its steps.
        """
        if self._offload is None or not (self._offload.optimizer or self._offload.weights):
            raise PlanError("offload_optimizer needs Pipeline(…, offload=Offload(optimizer=True))")
        return offload_optimizer(optimizer, self._offload, self._executor.weights)

    # ── life and death ───────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """End the threads, or leave the channels. The model keeps its parameters; the pipeline cannot run again."""
        self._executor.close()
        if self._watch is not None:
            self._watch.remove()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(self._executor, DistributedExecutor):
            self._executor.leave(error)
        self.close()

    def __repr__(self) -> str:
        return (
            f"Pipeline({self.plan.num_stages} stages on {self._source.ranks} ranks, "
            f"schedule {self._source.name!r}, {self._source.microbatches} micro-batches)"
        )

    def __getstate__(self) -> Any:
        raise PlanError(
            "a pipeline is not copied or pickled: save pipe.state_dict(), or split a copy of the model, and build "
            "another pipeline"
        )

    def _at_work(self) -> AbstractContextManager[None]:
        """Around a run: weights that live on the host are their devices'."""
        return nullcontext() if self._executor.weights is None else self._executor.weights.run()

    def _value(self, inputs: Any) -> Any:
        """What enters the first stage: of a tuple of positional arguments, a dict of keywords, or one value."""
        if inputs is None:
            return None
        if isinstance(inputs, Mapping):
            return self._line.arguments((), dict(inputs))
        return self._line.arguments(inputs if isinstance(inputs, tuple) else (inputs,), {})

    def _check_open(self) -> None:
        if self._executor.closed:
            raise PipelineError("this pipeline was closed: build a new one from its plan")
        if isinstance(self._executor, ThreadExecutor) and self._executor.streaming:
            raise PipelineError("pipe.stream(…) is still under way: take all of its outputs, or close it")
