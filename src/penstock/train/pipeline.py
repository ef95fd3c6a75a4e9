"""``Pipeline``: runs the training steps of a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock import _registry
from penstock.engine.cuda_graphs import describe
from penstock.engine.executor import Executor
from penstock.engine.failure.watch import Rendezvous, digest
from penstock.engine.loss import Outputs, StepOutcome, check_outputs
from penstock.engine.message import flatten, unflatten
from penstock.engine.microbatch import batch_size, leaf_to_device, microbatch_sizes, scatter
from penstock.errors import PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Recompute, Schedule
from penstock.schedule.search import auto
from penstock.schedule.simulate import Prediction, simulate
from penstock.split.plan import Arguments, Plan
from penstock.train.build import Devices, Options, build
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload, offload_optimizer, require_offloaded
from penstock.train.state import PipelineState


@dataclass(frozen=True)
class StepResult:
    """The result of ``Pipeline.step``: ``loss`` on every rank, ``outputs`` on the rank of the last stage.

    ``bubble`` is the measured fraction of the step's time in which ranks waited for others: under a mesh that of this
    rank, else the average of all ranks. It is None on GPUs, where the host does not wait.
    """

    loss: Any  # a Tensor; None for an evaluation without targets
    outputs: Any
    samples: int  # of all replicas, if there is a loss
    microbatches: int  # of this replica
    seconds: float
    bubble: float | None = None


@dataclass
class StepTotals:
    """Sums over steps. ``measured`` are the seconds of steps with a known bubble, and ``idle`` the waits in them."""

    steps: int = 0
    samples: int = 0
    measured: float = 0.0
    idle: float = 0.0

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.samples += result.samples
        if result.bubble is not None:
            self.measured += result.seconds
            self.idle += result.bubble * result.seconds

    def since(self, before: StepTotals) -> StepTotals:
        return StepTotals(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))

    @property
    def bubble(self) -> float | None:
        """The fraction of time spent waiting; None if it is unknown."""
        return self.idle / self.measured if self.measured else None


MIN_SAVING = 0.01  # the fraction of a step's time that a new order must save


@dataclass(frozen=True)
class ReplanResult:
    """The result of ``pipe.replan()``: simulated times of a step, and whether the order has changed."""

    before: float
    after: float
    changed: bool

    def __str__(self) -> str:
        if not self.changed:
            return f"the order is unchanged: a step takes {self.before:.4g} s, and no order was found that saves 1 %"
        saved = 1 - self.after / self.before
        return f"a new order: a step of {self.after:.4g} s instead of {self.before:.4g} s, {saved:.1%} less"


class Pipeline(PipelineState):
    """Trains the model of a plan as a pipeline. The results are those of the plain model.

    Args:
        plan: the stages, from ``ps.split`` or ``ps.plan``.
        loss_fn: ``loss_fn(output, target)`` returns the loss of a micro-batch, averaged or summed over its samples
            according to its ``reduction``, or ``(sum, count)``. ``loss_fn(output)`` selects the loss in the output, and
            takes no targets. Without a ``loss_fn`` the model computes its loss.
        microbatches: the number of micro-batches of a mini-batch.
        microbatch_size: instead, the largest size of a micro-batch; ``microbatches`` is then the usual number.
        schedule: a name (see ``penstock schedule --list``), a ``Schedule``, or ``Costs`` of the stages, for which the
            best order within the memory of 1F1B is searched; ``"auto"`` assumes equal costs. ``"sharded"`` runs one
            micro-batch at a time through all stages, for debugging. ``ps.plan`` finds costs, cuts and order.
        devices: without a mesh, every rank is a thread of this process with its device: a list, or one for all.
        mesh: with a mesh, every rank is a process.
        reduction: ``"mean"`` or ``"sum"``, for a ``loss_fn`` without a ``reduction``.
        outputs: the micro-batch outputs that a step returns: ``"all"``, ``"final"``, ``"sum"``, ``"every:N"``, a
            function of (so_far, output), or None. Under a mesh they are on the last stage's rank; ``pipe.broadcast``
            sends them to all ranks.
        init: ``init(stage)`` initialises the stages of a model that was created under ``torch.device("meta")``.
        recompute: recompute forwards instead of keeping their activations: ``"always"``, ``"except_last"`` (for all but
            the last micro-batch) or ``"never"``; for all stages, or ``{0: "always"}`` for some.
        seed: random numbers then depend only on the seed, the step, the micro-batch and the layer.
        accumulate: ``"fp32"`` sums gradients of half-precision parameters in single precision.
        batchnorm: ``"deferred"`` updates running statistics once per mini-batch, with those of the whole mini-batch.
        offload: the tensors to keep on the host.
        dynamic: for stages whose outputs have shapes, structure or plain values that depend on the data. Between
            processes, every message then has a header.
        parallelize: ``parallelize(stage, mesh)`` is called with each stage of this process, on its device with the
            first replica's weights. It returns a ``DistributedDataParallel``, ``fully_shard`` or tensor-parallel
            version of the stage, or None if it changed the stage in place. ``mesh["data"]`` and ``mesh["tensor"]`` are
            the device meshes for it.
        cuda_graphs: capture the actions of stages on GPUs as CUDA graphs after two steps, and replay them from then on:
            one launch per action. Stages that cannot be captured run eagerly; ``describe_graphs()`` tells why.
        compile: compile each stage by ``torch.compile``: True, or a dict of its options.
        timeout: a rank that waits for another one logs the reason after 60 seconds. After ``timeout`` seconds all ranks
            raise an error, and a process that hangs in a step ends. A pair sets both; None disables them.

    See docs/training.md.
    """

    def __init__(
        self,
        plan: Plan,
        loss_fn: Callable[..., Any] | None = None,
        *,
        microbatches: int = 1,
        microbatch_size: int | None = None,
        schedule: str | Schedule | Costs = "1f1b",
        devices: Devices = None,
        mesh: Mesh | None = None,
        reduction: str | None = None,
        outputs: Outputs = "all",
        init: Callable[[nn.Module], object] | None = None,
        recompute: Recompute = "never",
        seed: int | None = None,
        accumulate: str | None = None,
        batchnorm: str = "microbatch",
        offload: Offload | None = None,
        dynamic: bool = False,
        parallelize: Callable[[nn.Module, Mesh], nn.Module | None] | None = None,
        cuda_graphs: bool = False,
        compile: bool | Mapping[str, Any] = False,
        timeout: float | tuple[float | None, float | None] | None = 1800.0,
    ) -> None:
        arguments = dict(locals())
        options = Options(**{name: arguments[name] for name in arguments if name not in ("self", "plan", "mesh")})
        rendezvous = Rendezvous(mesh.world_ranks, mesh.rank) if isinstance(mesh, Mesh) else None
        try:
            self.plan, self._source, self._modules, self._fqn, executor = build(plan, options, mesh, rendezvous)
        except BaseException as error:
            if rendezvous is not None:
                rendezvous.cancel(error)
            raise
        self.mesh, self._options = mesh, options
        self._chain = plan.require_chain()
        self._model = self._chain.model
        self._executor: Executor = executor
        self._rendezvous = rendezvous
        self._traced: Any = None  # the last ``Trace``
        self.prediction: Prediction | None = None  # of the plan or the costs of this pipeline
        self._outputs = outputs
        self.last: StepResult | None = None  # the last step's result, without its outputs
        self.step_totals = StepTotals()  # of all steps
        self._loss_scale = 1.0
        self._offload = offload
        streams = offload is not None and (offload.optimizer or offload.weights)
        self._offload_check = require_offloaded(self.parameters()) if streams else None

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, inputs: Any = None, targets: Any = None) -> StepResult:
        """Forward and backward of one mini-batch. Gradients are added to ``.grad``, as by ``loss.backward()``.

        After a failed step, parameters without earlier gradients have none; other gradients may be incomplete sums.
        """
        start = time.perf_counter()
        self._executor.check_idle()
        if torch.is_inference_mode_enabled():
            raise PlanError("step() needs gradients, but was called under torch.inference_mode()")
        arguments = self._arguments(inputs)  # first, because it may replace the executor
        result = self._result(self._executor.train(arguments, targets, self._outputs), start)
        self.last = replace(result, outputs=None)
        self.step_totals.add(result)
        return result

    def evaluate(self, inputs: Any = None, targets: Any = None, *, outputs: Outputs = "same") -> StepResult:
        """Forward of one mini-batch without a graph: its outputs, and its loss if there are targets.

        Training flags are not changed: call ``pipe.eval()`` first for an ordinary evaluation. ``outputs`` is as in the
        constructor; ``"same"`` is the value passed there.
        """
        start = time.perf_counter()
        self._executor.check_idle()
        if outputs != "same":
            check_outputs(outputs)
        wanted = self._outputs if outputs == "same" else outputs
        with torch.no_grad():
            arguments = self._arguments(inputs)
            with self._executor.weights_in_use():
                outcome = self._executor.evaluate(arguments, targets, wanted)
        return self._result(outcome, start)

    def stream(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs of many mini-batches, in order, without a graph and without draining the pipeline between them.

        Each of ``batches`` has the form of the inputs of ``step``. The next mini-batches are in flight while the caller
        uses the outputs of one. No other call is possible until all outputs are consumed, or the iterator is closed.
        Under a mesh all ranks iterate; the rank of the last stage gets the outputs, the others None. Under a mesh, or
        with offloaded weights, mini-batches run one at a time.
        """
        self._executor.check_idle()
        remaining = iter(batches)
        for first in remaining:  # it may replace the executor
            arguments = chain([self._arguments(first)], (self._arguments(batch) for batch in remaining))
            yield from self._executor.stream(arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a mini-batch of any size.

        In one process the outputs are part of autograd's graph, unless under ``no_grad``: ``loss.backward()`` runs the
        backwards of the stages. Under a mesh this is for evaluation: call it under ``torch.no_grad()`` on all ranks.
        The rank of the last stage gets the outputs, the others None.
        """
        self._executor.check_idle()
        value = self._bind(args, kwargs) if args or kwargs else None
        executor = self._executor
        if torch.is_grad_enabled():
            return executor.call(value)
        with executor.weights_in_use():
            return executor.evaluate(value, None, "all", loss=False).outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in autograd's graph, for a loss that the caller computes. In one process: ``pipe(x)``.

        Under a mesh all ranks call it. The rank of the last stage gets the outputs, and must call backward on their
        loss before its next call of the pipeline. The others wait for this backward and get None. Gradients are added
        to ``.grad``, and summed over replicas: the losses of the replicas are terms of one sum.
        """
        if not torch.is_grad_enabled():
            return self(*args, **kwargs)
        self._executor.check_idle()
        value = self._bind(args, kwargs) if args or kwargs else None
        return self._executor.forward(value)

    def _result(self, outcome: StepOutcome, start: float) -> StepResult:
        seconds = time.perf_counter() - start
        return StepResult(
            outcome.loss, outcome.outputs, outcome.samples, outcome.microbatches, seconds, self._executor.bubble
        )

    def _arguments(self, inputs: Any) -> Any:
        """The input of the first stage: from a tuple of positional arguments, a dict of keywords, or one value."""
        if inputs is None:
            return None
        if isinstance(inputs, Arguments):
            return self._bind(*inputs)
        if isinstance(inputs, Mapping):
            return self._bind((), dict(inputs))
        return self._bind(inputs if isinstance(inputs, tuple) else (inputs,), {})

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input of the first stage."""
        if self._chain.provisional and self.mesh is None:
            self._resolve(args, kwargs)
        return self._chain.arguments(args, kwargs)

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Split the model again if its call does not fit its plan, which assumed a kind of call."""
        size = batch_size((args, kwargs), "inputs") or 1
        leaves, spec = flatten(scatter((args, kwargs), microbatch_sizes(size, self._source.count(size)))[0])
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        first = Arguments(*unflatten([leaf_to_device(leaf, device) for leaf in leaves], spec))
        try:
            self._chain.prepare(self.plan.groups, self._chain.variant(self._chain.arguments(*first)))
        except PlanError:
            executor, offload = self._executor, self._offload
            if executor.ties.copies or offload is not None or self.step_totals.steps:
                raise
            plan = self._chain.split_again(first)
            executor.close()
            self.plan, self._source, self._modules, self._fqn, self._executor = build(plan, self._options, None, None)
            self._chain = plan.require_chain()
        self._chain.provisional = False

    @property
    def has_first_stage(self) -> bool:
        """Whether this process has the first stage, which needs the inputs."""
        return 0 in self._modules

    @property
    def has_last_stage(self) -> bool:
        """Whether this process has the last stage, which needs the targets and returns the outputs."""
        return self.plan.num_stages - 1 in self._modules

    @property
    def lockstep(self) -> bool:
        """Whether, in calls and evaluations, a stage starts its next forward only after its last output was received.

        Set it to limit the outputs that wait for a slow stage. It is for threads with one stage each.
        """
        return self._executor.lockstep

    @lockstep.setter
    def lockstep(self, value: bool) -> None:
        self._executor.set_lockstep(value)

    def describe_graphs(self) -> str:
        """Which stages of this process run as CUDA graphs, and why the others do not."""
        return describe(self._executor.stages)

    # ── schedule and trace ───────────────────────────────────────────────────────────────────────────────────

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step with the full number of micro-batches."""
        return self._source.training(self._source.microbatches)

    def trace(self, steps: int | None = None, *, skip: int = 0, quiet: bool = False) -> AbstractContextManager[Any]:
        """Record the actions of all ranks in the next ``steps`` mini-batches; None: in all mini-batches of the block.

        The first ``skip`` mini-batches are not recorded. After the block ``with pipe.trace(steps=3) as trace:``,
        ``trace`` (a ``ps.Trace``) has the records of all ranks, on every rank. Under a mesh all ranks begin and end the
        block together. At its end the measured and the predicted time of a step are printed, unless ``quiet``.
        """
        self._executor.check_idle()
        executor, predicted = self._executor, self._predicted
        recording = _registry.trace_recording(executor, self.plan, self.mesh, steps, skip, predicted, quiet)
        self._traced = recording.trace
        return recording  # type: ignore[no-any-return]

    def replan(self, costs: Costs | None = None, *, seconds: float = 0.8) -> ReplanResult:
        """Switch to another order, if one is faster for the costs of the stages within the memory of the present order.

        ``costs`` are by default those of the last ``pipe.trace()``. Only the order of the actions changes; stages stay
        on their ranks, and gradients are the same. Under a mesh all ranks call it, with the same costs, between the
        same steps.
        """
        executor = self._executor
        executor.check_idle()
        if costs is None:
            if self._traced is None:
                raise PlanError("nothing was traced yet: run steps in 'with pipe.trace():' before, or pass costs=")
            costs = self._traced.costs()
            assert costs is not None
            if not any(costs.durations(self.schedule.num_stages)["B"]):
                raise PlanError("the last trace has no backward: run steps in 'with pipe.trace():', or pass costs=")
        found, schedule = find_faster_order(self.schedule, costs, executor.edges, seconds)
        if self._rendezvous is not None:
            self._rendezvous.compare({"what replan was given": digest(repr(costs)), "its order": digest(str(schedule))})
        if found.changed:
            self._source = self._source.with_schedule(schedule)
            executor.reschedule(executor.source.with_schedule(schedule))
        self.prediction = predict_from_costs("replan", costs, executor)
        return found

    def _predicted(self) -> Prediction | None:
        """The prediction for steps with the full number of micro-batches, if it applies to steps like the last one."""
        made_from, source, executor = self.prediction, self._source, self._executor
        if made_from is None:
            return None if source.costs is None else predict_from_costs("costs", source.costs, executor)
        if made_from.samples is None:
            return made_from
        if executor.source.ranks != source.ranks:  # ranks were merged, which the plan did not model
            return None
        samples = 0 if self.last is None else self.last.samples
        share = -(-samples // (1 if self.mesh is None else self.mesh.data))
        if share and -(-share // source.microbatches) != made_from.samples:
            return None
        stages = executor.stages.items()
        gpus = {executor.placement[s]: stage.device for s, stage in stages if stage.device.type != "cpu"}
        if len(set(gpus.values())) < len(gpus):  # several ranks allocate on one GPU
            return replace(made_from, memory=None)
        return made_from

    # ── offload and closing ──────────────────────────────────────────────────────────────────────────────────

    def offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Keep the optimizer's state on the host from now on; return the optimizer.

        With ``Offload(weights=True)``, weights and gradients are copied to their devices for its steps.
        """
        if self._offload is None or not (self._offload.optimizer or self._offload.weights):
            raise PlanError("offload_optimizer needs Pipeline(…, offload=Offload(optimizer=True))")
        return offload_optimizer(optimizer, self._offload, self._executor.weights)

    def close(self) -> None:
        """End the threads, or close the channels. The model keeps its parameters; the pipeline cannot run again."""
        self._executor.close()
        if self._offload_check is not None:
            self._offload_check.remove()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._executor.exit(error)
        self.close()

    def __repr__(self) -> str:
        source, ranks = self._source, f"{self.plan.num_stages} stages on {self._source.ranks} ranks"
        return f"Pipeline({ranks}, schedule {source.name!r}, {source.microbatches} micro-batches)"

    def __getattr__(self, name: str) -> Any:
        hint = (
            ": a pipeline is not an nn.Module. Train it by pipe.step, not by a trainer that calls the model; save "
            "it by ps.save(path, pipe, optimizer), not by get_state_dict(pipe, optimizer)"
        )
        raise AttributeError(f"'Pipeline' object has no attribute {name!r}{hint if hasattr(nn.Module, name) else ''}")

    def __getstate__(self) -> Any:
        raise PlanError("a pipeline cannot be copied or pickled: save pipe.state_dict(), and build another pipeline")


def find_faster_order(
    schedule: Schedule, costs: Costs, edges: Sequence[Edge], seconds: float
) -> tuple[ReplanResult, Schedule]:
    """The fastest order for these costs, or the present order if the saving is too small, without recomputes.

    The same arguments give the same result on every rank.
    """
    orders = tuple(tuple(action for action in order if action.kind != "R") for order in schedule.orders)
    again = {stage for stage, _ in schedule.recomputed}
    plain, count = replace(schedule, orders=orders), schedule.num_stages
    times = costs.durations(count)
    extra = [times["R"][s] if s in again else 0.0 for s in range(count)]  # recomputes count in the backwards
    if any(extra):
        longer = {kind: tuple(map(add, times[kind], extra)) for kind in "IB"}
        costs = replace(costs, i=longer["I"], b=longer["B"])
    if not any(costs.of_stages("activation", schedule.num_stages)):
        costs = replace(costs, activation=1.0)  # unknown: keep the same number of micro-batches in flight
    old = simulate(plain, costs, edges)
    found = auto(
        costs, schedule.placement, schedule.num_microbatches, cap=old.peak_memory, edges=edges, seconds=seconds,
        repeatable=True,
    )  # fmt: skip
    if found.makespan > old.makespan * (1 - MIN_SAVING):
        return ReplanResult(old.makespan, old.makespan, False), plain
    return ReplanResult(old.makespan, found.makespan, True), found.schedule


def predict_from_costs(by: str, costs: Costs, executor: Executor) -> Prediction:
    """The simulated step of the executor's order, with its memory peaks if ``costs.activation`` is given in bytes."""
    source = executor.source
    simulation = simulate(source.training(source.microbatches), costs, executor.edges)
    in_bytes = costs.activation != Costs.activation and any(simulation.peak_memory)
    return Prediction(simulation.makespan, by, saved=simulation.peak_memory if in_bytes else None)
