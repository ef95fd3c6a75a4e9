"""``Pipeline``: a plan, made to run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import add
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock import _registry
from penstock.engine.executor import Executor
from penstock.engine.failure.watch import Rendezvous, digest
from penstock.engine.forward_context import variant_in_flight
from penstock.engine.loss import Outputs, StepOutcome, check_outputs
from penstock.engine.message import flatten, unflatten
from penstock.engine.microbatch import batch_size, leaf_to_device, microbatch_sizes, scatter
from penstock.errors import PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.schedule import Edge, Recompute, Schedule
from penstock.schedule.search import auto
from penstock.schedule.simulate import Prediction, simulate
from penstock.split.check import compare_outputs
from penstock.split.plan import Arguments, Plan, run_stages
from penstock.train.build import Devices, Options, build
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload, offload_optimizer, require_offloaded
from penstock.train.state import PipelineState


@dataclass(frozen=True)
class StepResult:
    """The result of ``Pipeline.step``: ``loss`` on every rank, ``outputs`` where the last stage is.

    ``bubble`` is the share of the step's time in which ranks waited for others, as measured: of this process's rank
    under a mesh, else of all on average. It is not known on GPUs, where the host does not wait.
    """

    loss: Any  # a Tensor; None for an evaluation without targets
    outputs: Any
    samples: int  # of all replicas, where there is a loss
    microbatches: int  # of this replica
    seconds: float
    bubble: float | None = None


@dataclass
class StepTotals:
    """Sums over steps. ``idle`` of the ``measured`` seconds were spent waiting, in steps with a known bubble."""

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
        """The fraction of time spent waiting; None if it is not known."""
        return self.idle / self.measured if self.measured else None


MAX_VERIFIED = 16  # kinds of call whose stages are compared with the whole model
MIN_SAVING = 0.01  # the fraction of a step that a new order must save


@dataclass(frozen=True)
class ReplanResult:
    """The result of ``pipe.replan()``: simulated times of a step, and whether the order has changed."""

    before: float
    after: float
    changed: bool

    def __str__(self) -> str:
        if not self.changed:
            return f"the order stays: a step of {self.before:.4g} s, and no other order was found that saves 1 %"
        saved = 1 - self.after / self.before
        return f"a new order: a step of {self.after:.4g} s instead of {self.before:.4g} s, {saved:.1%} less"


class Pipeline(PipelineState):
    """Trains the model of a plan, stage by stage, micro-batch by micro-batch, to the plain model's result.

    Args:
        plan: the stages, from ``ps.split`` or ``ps.plan``.
        loss_fn: ``loss_fn(output, target)`` returns the loss of a micro-batch, averaged or summed over its samples as
            its own ``reduction`` says, or ``(sum, count)``; ``loss_fn(output)`` finds it in the output, without
            targets. Without a ``loss_fn`` the model computes its loss.
        microbatches: the number of micro-batches that a mini-batch is split into.
        microbatch_size: instead, the largest size of a micro-batch; ``microbatches`` is then the usual number.
        schedule: a name (see ``penstock schedule --list``), a ``Schedule``, or ``Costs`` of the stages, for which an
            order is searched in the memory of 1F1B; ``"auto"`` searches one for equal costs. ``"sharded"`` sends one
            micro-batch at a time through all stages, for debugging. ``ps.plan`` finds costs, cuts and order.
        devices: without a mesh, every rank is a thread of this process with its device: a list, or one for all.
        mesh: with a mesh, every rank is a process.
        reduction: ``"mean"`` or ``"sum"``, where ``loss_fn`` does not say it.
        outputs: which of the micro-batches' outputs a step keeps: ``"all"``, ``"final"``, ``"sum"``, ``"every:N"``, a
            function of (so_far, output), or None. Under a mesh they are on the last stage's rank; ``pipe.broadcast``
            sends them to all.
        init: ``init(stage)`` fills the stages of a model built under ``torch.device("meta")``.
        recompute: recompute forwards instead of keeping their activations: ``"always"``, ``"except_last"`` (for all but
            the last micro-batch) or ``"never"``; for all stages, or ``{0: "always"}`` for some.
        seed: random numbers then depend on it, the step, the micro-batch and the layer, and on nothing else.
        accumulate: ``"fp32"`` sums gradients of half-precision parameters in single precision.
        batchnorm: ``"deferred"`` commits the running statistics of the whole mini-batch.
        offload: what to keep on the host.
        dynamic: for stages whose outputs' shapes, structure or values depend on the data: between processes, every
            message then describes itself.
        parallelize: ``parallelize(stage, mesh)`` is called with each stage of this process, on its device with the
            first replica's weights. It returns a ``DistributedDataParallel``, ``fully_shard`` or tensor-parallel module
            of it, or None where it changed the stage in place. ``mesh["data"]`` and ``mesh["tensor"]`` are the device
            meshes for them.
        timeout: a rank that waits for another one in one place logs why after 60 seconds, and gives up after
            ``timeout``: then all ranks stop, and a process that hangs in a step ends. A pair sets both. None is never.

    docs/training.md tells more.
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
        self._verified: set[Any] = set()  # the kinds of call whose stages were compared with the whole model
        self.prediction: Prediction | None = None  # of what this pipeline was made from, such as a plan
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

        A step that fails leaves no gradients where there were none; those of earlier steps may be incomplete sums.
        """
        start = time.perf_counter()
        self._executor.check_idle()
        if torch.is_inference_mode_enabled():
            raise PlanError("step() needs gradients, but was called under torch.inference_mode()")
        arguments = self._arguments(inputs)  # before the executor, which it may replace
        result = self._result(self._executor.train(arguments, targets, self._outputs), start)
        self.last = replace(result, outputs=None)
        self.step_totals.add(result)
        return result

    def evaluate(self, inputs: Any = None, targets: Any = None, *, outputs: Outputs = "same") -> StepResult:
        """Forward of one mini-batch without a graph: its outputs, and its loss where there are targets.

        Training flags are not changed: call ``pipe.eval()`` first for an ordinary evaluation. ``outputs`` is as for the
        pipeline; ``"same"`` is the pipeline's.
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

        Each of ``batches`` is what ``step`` takes as inputs. The next ones are in flight while the caller uses the
        outputs of one; nothing else can be run until all are taken, or the iterator is closed. Under a mesh all ranks
        iterate; the rank of the last stage gets the outputs, the others None. Under a mesh, or with weights that live
        on the host, mini-batches run one at a time.
        """
        self._executor.check_idle()
        remaining = iter(batches)
        for first in remaining:  # it may replace the executor
            arguments = chain([self._arguments(first)], (self._arguments(batch) for batch in remaining))
            yield from self._executor.stream(arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a mini-batch of any size.

        In this process the outputs are part of autograd's graph, unless under ``no_grad``: ``loss.backward()`` runs
        the stages' backwards. Under a mesh this is for evaluation: call it under ``torch.no_grad()`` on all ranks;
        the rank of the last stage gets the outputs, the others None.
        """
        self._executor.check_idle()
        value = self._bind(args, kwargs) if args or kwargs else None
        executor = self._executor
        if torch.is_grad_enabled():
            return executor.call(value)
        with executor.weights_in_use():
            return executor.evaluate(value, None, "all", loss=False).outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs in autograd's graph, for a loss that is computed outside: in one process as ``pipe(x)``.

        Under a mesh all ranks call it. The rank of the last stage gets the outputs, and must call backward on a loss
        of them before it does anything else with the pipeline; the others wait for that, and get None. Gradients are
        added to ``.grad``, and summed over replicas: their losses count as parts of one sum.
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
        """The input of the first stage. For a new kind of call of a traced model, its stages are verified first."""
        if self._chain.provisional and self.mesh is None:
            self._resolve(args, kwargs)
        if self._chain.verify and self.mesh is None and len(self._verified) < MAX_VERIFIED:
            self._verify(args, kwargs)
        return self._chain.arguments(args, kwargs)

    def _resolve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Split the model again if it is not called in the way that its plan was made for, which was a guess."""
        first = self._first_microbatch(args, kwargs)
        try:
            self.plan.prepare(self._chain.arguments(*first))
        except PlanError:
            executor, offload = self._executor, self._offload
            if executor.ties.copies or offload is not None or self.step_totals.steps:
                raise
            plan = self._chain.split_again(first)
            executor.close()
            self.plan, self._source, self._modules, self._fqn, self._executor = build(plan, self._options, None, None)
            self._chain = plan.require_chain()
        self._chain.provisional = False

    def _first_microbatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        size = batch_size((args, kwargs), "inputs") or 1
        leaves, spec = flatten(scatter((args, kwargs), microbatch_sizes(size, self._source.count(size)))[0])
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        return Arguments(*unflatten([leaf_to_device(leaf, device) for leaf in leaves], spec))

    def _verify(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the stages' outputs with the whole model's on the first micro-batch of a new kind of call."""
        leaves, spec = flatten((args, kwargs))
        kinds = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
        key = (repr(spec), kinds, self._model.training)
        if key in self._verified:
            return
        self._verified.add(key)
        tensors = (*self._model.parameters(), *self._model.buffers())
        devices = {tensor.device for tensor in tensors}
        if len(devices) != 1 or torch.device("meta") in devices or not batch_size((args, kwargs), "inputs"):
            return
        first = self._first_microbatch(args, kwargs)
        whole = partial(self._model, **self._chain.fixed)
        variant = self._chain.variant(self._chain.arguments(*first))  # in the caller's grad mode

        def staged(*args: Any, **kwargs: Any) -> Any:
            with variant_in_flight(variant):
                return run_stages(self.plan, args, kwargs)

        difference = compare_outputs(self._model, whole, staged, *first)
        if difference is not None:
            self._verified.discard(key)
            raise PlanError(
                f"the {self.plan.num_stages} stages do not compute what the whole model computes, on the first "
                f"micro-batch: {difference}. Cut the model another way: at other modules (cuts=…), between its blocks "
                "(blocks=…), or at marks; ps.split(…, verify=False) leaves this comparison out"
            )

    @property
    def has_first_stage(self) -> bool:
        """Whether this process has the first stage, which the inputs go to."""
        return 0 in self._modules

    @property
    def has_last_stage(self) -> bool:
        """Whether this process has the last stage, which the targets go to and the outputs come from."""
        return self.plan.num_stages - 1 in self._modules

    @property
    def lockstep(self) -> bool:
        """Whether, in calls and evaluations, a stage starts its next forward only when its last output is taken.

        Set it to keep outputs from piling up before a slow stage. It is for threads with one stage each.
        """
        return self._executor.lockstep

    @lockstep.setter
    def lockstep(self, value: bool) -> None:
        self._executor.set_lockstep(value)

    # ── schedule and trace ───────────────────────────────────────────────────────────────────────────────────

    @property
    def schedule(self) -> Schedule:
        """The schedule of a step of a full number of micro-batches."""
        return self._source.training(self._source.microbatches)

    def trace(self, steps: int | None = None, *, skip: int = 0, quiet: bool = False) -> AbstractContextManager[Any]:
        """Record what every rank does in the next ``steps`` mini-batches, all within the block if None.

        The first ``skip`` are left out. When ``with pipe.trace(steps=3) as trace:`` has ended, ``trace`` (a
        ``ps.Trace``) has the records of all ranks, on every one of them. Under a mesh all ranks begin and end the block
        together. At its end the time of a step is printed beside the prediction, unless ``quiet``.
        """
        self._executor.check_idle()
        executor, predicted = self._executor, self._predicted
        recording = _registry.trace_recording(executor, self.plan, self.mesh, steps, skip, predicted, quiet)
        self._traced = recording.trace
        return recording  # type: ignore[no-any-return]

    def replan(self, costs: Costs | None = None, *, seconds: float = 0.8) -> ReplanResult:
        """Switch to another order, if one is faster for the stages' costs, in the memory of the present one.

        ``costs`` are by default those of the last ``pipe.trace()``. Stages stay on their ranks, and nothing changes but
        the order: gradients are the same. Under a mesh all ranks call it, with the same costs, between the same steps.
        """
        executor = self._executor
        executor.check_idle()
        if costs is None:
            if self._traced is None:
                raise PlanError("nothing was traced yet: run steps in 'with pipe.trace():' before, or give costs=")
            costs = self._traced.costs()
            assert costs is not None
            if not any(costs.durations(self.schedule.num_stages)["B"]):
                raise PlanError("the last trace has no backward: run steps in 'with pipe.trace():', or give costs=")
        found, schedule = find_faster_order(self.schedule, costs, executor.edges, seconds)
        if self._rendezvous is not None:
            self._rendezvous.compare({"what replan was given": digest(repr(costs)), "its order": digest(str(schedule))})
        if found.changed:
            self._source = self._source.with_schedule(schedule)
            executor.reschedule(executor.source.with_schedule(schedule))
        self.prediction = predict_from_costs("replan", costs, executor)
        return found

    def _predicted(self) -> Prediction | None:
        """The prediction for steps of a full number of micro-batches, as far as it holds for steps like the last."""
        made_from, source, executor = self.prediction, self._source, self._executor
        if made_from is None:
            return None if source.costs is None else predict_from_costs("costs", source.costs, executor)
        if made_from.samples is None:
            return made_from
        if executor.source.ranks != source.ranks:  # ranks take turns, which the plan did not model
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

    # ── offload and end of life ──────────────────────────────────────────────────────────────────────────────

    def offload_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Keep the optimizer's state on the host from now on, as ``Offload(optimizer=True)`` says; returns it.

        With ``Offload(weights=True)`` it moves the weights and gradients to their devices for its steps.
        """
        if self._offload is None or not (self._offload.optimizer or self._offload.weights):
            raise PlanError("offload_optimizer needs Pipeline(…, offload=Offload(optimizer=True))")
        return offload_optimizer(optimizer, self._offload, self._executor.weights)

    def close(self) -> None:
        """End the threads, or leave the channels. The model keeps its parameters; the pipeline cannot run again."""
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
            ": a pipeline is no nn.Module. Train it by pipe.step, not by a trainer that calls the model; save "
            "by ps.save(path, pipe, optimizer), not get_state_dict(pipe, optimizer)"
        )
        raise AttributeError(f"'Pipeline' object has no attribute {name!r}{hint if hasattr(nn.Module, name) else ''}")

    def __getstate__(self) -> Any:
        raise PlanError("a pipeline is not copied or pickled: save pipe.state_dict(), and build another pipeline")


def find_faster_order(
    schedule: Schedule, costs: Costs, edges: Sequence[Edge], seconds: float
) -> tuple[ReplanResult, Schedule]:
    """The fastest order for these costs, or the present one if it saves too little; recomputes are left out.

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
        costs = replace(costs, activation=1.0)  # unknown: keep as many micro-batches in flight as before
    old = simulate(plain, costs, edges)
    found = auto(
        costs, schedule.placement, schedule.num_microbatches, cap=old.peak_memory, edges=edges, seconds=seconds,
        repeatable=True,
    )  # fmt: skip
    if found.makespan > old.makespan * (1 - MIN_SAVING):
        return ReplanResult(old.makespan, old.makespan, False), plain
    return ReplanResult(old.makespan, found.makespan, True), found.schedule


def predict_from_costs(by: str, costs: Costs, executor: Executor) -> Prediction:
    """The simulated step of the executor's order; and its peaks, if ``costs.activation`` is given, in bytes."""
    source = executor.source
    simulation = simulate(source.training(source.microbatches), costs, executor.edges)
    in_bytes = costs.activation != Costs.activation and any(simulation.peak_memory)
    return Prediction(simulation.makespan, by, saved=simulation.peak_memory if in_bytes else None)
