"""From a plan and options to an executor that is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from penstock.engine.distributed import DistributedExecutor
from penstock.engine.executor import Executor
from penstock.engine.failure.status import HangLimits
from penstock.engine.failure.watch import Rendezvous, pipeline_config
from penstock.engine.loss import LossAndOutputs, check_outputs, loss_rule
from penstock.engine.offload.activations import activation_offload
from penstock.engine.offload.copies import HostBufferPool
from penstock.engine.offload.weights import HostWeights, host_weights
from penstock.engine.recompute.batchnorm import DeferredStatistics
from penstock.engine.recompute.buffers import BufferGuard
from penstock.engine.recompute.rng import StageRng
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.engine.replicas.ties import place_tied_parameters
from penstock.engine.stage import ParallelizedStage, StageEngine
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.provider import AUTO, ScheduleProvider
from penstock.split.plan import Plan
from penstock.train.devices import assign_devices, marked_devices, named_devices
from penstock.train.materialise import materialise
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload
from penstock.train.state import FqnMap, all_fqns

Parallelize = Callable[[nn.Module, Mesh], nn.Module | None]
"""Makes a parallel module of a stage's; None where it has changed the stage in place."""


class Options(SimpleNamespace):
    """The arguments of ``Pipeline`` beside its plan and mesh, under the same names."""

    def check(self) -> None:
        """Raise an error for an invalid value, before anything is built."""
        check_outputs(self.outputs)
        if self.batchnorm not in ("microbatch", "deferred"):
            raise PlanError(f"batchnorm must be 'microbatch' or 'deferred', got {self.batchnorm!r}")
        if self.accumulate not in (None, "fp32"):
            raise PlanError(f"accumulate must be 'fp32' or None, got {self.accumulate!r}")
        if not isinstance(self.dynamic, bool):
            raise PlanError(f"dynamic must be True or False, got {self.dynamic!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise PlanError(f"seed must be a whole number, got {self.seed!r}")
        for limit in self.limits:
            if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
                raise PlanError(
                    "timeout must be a number of seconds, or None for never, or a pair of them, for the warning and "
                    f"for the error: got {self.timeout!r}"
                )
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise PlanError(f"offload must be ps.Offload(…), got {type(self.offload).__name__}")
        if self.offload is not None and self.offload.weights and self.parallelize is not None:
            raise PlanError("parallelize wants weights that stay where they are: leave out Offload(weights=True)")
        if self.parallelize is not None and not callable(self.parallelize):
            raise PlanError(f"parallelize must be a function of (stage, mesh), got {type(self.parallelize).__name__}")
        if self.init is not None and not callable(self.init):
            raise PlanError(f"init must be a function of a stage's module, got {type(self.init).__name__}")

    @property
    def limits(self) -> tuple[Any, Any]:
        """Seconds until a warning and until an error, for a rank that waits in one place."""
        if isinstance(self.timeout, tuple) and len(self.timeout) == 2:
            return self.timeout
        return HangLimits().stuck_after, self.timeout

    def shared(self) -> dict[str, Any]:
        """The values that must be the same on every rank, beside the schedule."""
        names = ("seed", "accumulate", "batchnorm", "dynamic", "microbatch_size")
        found = {name: getattr(self, name) for name in names}
        return {**found, "timeout": self.limits, "parallelize": self.parallelize is not None}


@dataclass(frozen=True)
class Built:
    """The plan with its placement, the stages of this process, and their executor."""

    plan: Plan
    source: ScheduleProvider
    modules: dict[int, nn.Module]
    fqn: FqnMap
    executor: Executor


def build(plan: Plan, options: Options, mesh: Mesh | None, rendezvous: Rendezvous | None) -> Built:
    """Build the executor. Everything is checked before anything is moved, made or started."""
    if not isinstance(plan, Plan):
        raise PlanError(f"Pipeline takes a plan, got {type(plan).__name__}: make one with penstock.split(model, …)")
    plan.require_chain()
    options.check()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(pipe=…), got {type(mesh).__name__}")
    rule = loss_rule(options.loss_fn, options.reduction)
    if mesh is not None and options.devices is not None:
        raise PlanError("devices= is for threads in this process; under a mesh, say Mesh(pipe=…, device=…)")
    if mesh is None and options.parallelize is not None:
        raise PlanError("parallelize is for stages that several processes work on: pass mesh=ps.Mesh(…), too")
    source = _schedules(plan, options, mesh)
    device_of = _devices(plan, options, mesh, source)
    own = [s for s, rank in enumerate(source.placement) if mesh is None or rank == mesh.pipe_rank]
    placed = plan.placed(source.placement, device_of)
    modules = {s: plan.stage_module(s) for s in own}
    for s, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_dtensor(tensor):
                raise PlanError(
                    f"{name} of stage {s} is a DTensor already: build the pipeline of a plain model, and let "
                    "Pipeline(…, parallelize=…) shard or distribute its stages"
                )
    copies = place_tied_parameters(plan.ties, modules, {s: device_of[s] for s in own})
    offload = options.offload
    weights = host_weights(modules, device_of) if offload is not None and offload.weights else None
    materialise(modules, device_of, options.init, copies, weights)
    fqn, parallel = FqnMap(), dict[int, ParallelizedStage]()
    if mesh is not None:
        assert rendezvous is not None
        shared = {"mesh": mesh.sizes, **options.shared()}
        if options.parallelize is not None:
            from penstock.train.parallelize import parallelize_stages  # FSDP takes seconds to import

            rendezvous.compare(pipeline_config(placed, source, shared))
            fqn = FqnMap(all_fqns(plan.require_chain().model))
            parallel = parallelize_stages(modules, mesh, options, plan.ties, copies, fqn)
    pool = HostBufferPool(offload.budget_bytes) if offload is not None and offload.activations else None
    first = 0 if mesh is None else mesh.data_rank * source.microbatches
    stages = []
    for s, module in modules.items():
        loss = LossAndOutputs(rule) if s == plan.num_stages - 1 else None
        num_sources, num_targets = max(1, len(plan.sources(s))), max(1, len(plan.targets(s)))
        stage = StageEngine(s, module, device_of[s], loss, num_sources=num_sources, num_targets=num_targets)
        stage.parallel = parallel.get(s)
        if options.seed is not None or source.recomputes(s):
            stage.rng = StageRng(module, device_of[s], options.seed, first, fqn)
            if source.recomputes(s):
                stage.buffer_guard = BufferGuard(module)
        if options.batchnorm == "deferred":
            stage.norms = DeferredStatistics(module, s)
        if pool is not None:
            stage.offload = activation_offload(device_of[s], pool, module)
        stage.weights = weights
        stages.append(stage)
    gradients: dict[str, Any] = {
        "fp32_gradients": options.accumulate == "fp32",
        "loss_parameters": list(options.loss_fn.parameters()) if isinstance(options.loss_fn, nn.Module) else [],
    }
    executor: Executor
    if mesh is None:
        joined = source if weights is None else source.with_merged_ranks(_joined_ranks(source, device_of, weights))
        executor = ThreadExecutor(placed, stages, joined, copies, HangLimits(*options.limits), **gradients)
    else:
        assert rendezvous is not None
        executor = DistributedExecutor(placed, stages, source, copies, mesh, rendezvous, shared, **gradients)
    return Built(placed, source, modules, fqn, executor)


def _schedules(plan: Plan, options: Options, mesh: Mesh | None) -> ScheduleProvider:
    """The schedules of the pipeline, for any number of micro-batches."""
    named = named_devices(options.devices)
    costs = options.schedule if isinstance(options.schedule, Costs) else None
    source = ScheduleProvider(
        AUTO if costs is not None else options.schedule,
        plan.num_stages,
        [(edge.src, edge.dst) for edge in plan.edges],
        options.microbatches,
        ranks=None if mesh is None else mesh.pipe,
        max_ranks=None if named is None else len(named),
        recompute=options.recompute,
        microbatch_size=options.microbatch_size,
        costs=costs,
    )
    if mesh is not None and mesh.data > 1:
        if options.microbatch_size is not None and options.seed is not None:
            raise PlanError(
                "with a seed, replicas must know how many micro-batches the others have: say microbatches=…, and not "
                f"microbatch_size={options.microbatch_size}"
            )
        loss_fn = options.loss_fn
        named_parameters = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
        trained = [name for name, parameter in named_parameters if parameter.requires_grad]
        if trained:  # replicas sum the gradients of their stages alone
            raise PlanError(
                f"loss_fn has a parameter that is trained ({trained[0]}), whose gradients replicas would not sum: make "
                "loss_fn a part of the model, which then computes its loss, or freeze the parameter"
            )
    _check_running_statistics(plan, source.placement)
    return source


def _devices(plan: Plan, options: Options, mesh: Mesh | None, source: ScheduleProvider) -> list[torch.device]:
    """The device of each stage."""
    if mesh is not None:
        return [mesh.device] * plan.num_stages
    wanted = marked_devices(plan, source) if options.devices is None else options.devices
    of_rank = assign_devices(wanted, source.ranks)
    return [of_rank[rank] for rank in source.placement]


def _joined_ranks(source: ScheduleProvider, devices: Sequence[torch.device], weights: HostWeights) -> list[int]:
    """Ranks on one device take turns where weights are moved to and from it: their transfers need one order."""
    of_rank = dict(zip(source.placement, devices, strict=True))
    places = [of_rank[rank] if of_rank[rank] in weights.copies else rank for rank in range(source.ranks)]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return [numbers[place] for place in places]


def _check_running_statistics(plan: Plan, placement: Sequence[int]) -> None:
    """Refuse running statistics that stages of several ranks update: they would be updated in no defined order."""
    chain = plan.require_chain()
    first: dict[int, int] = {}
    for stage, layers in enumerate(plan.groups):
        for layer in layers:
            for name, tensor in chain.members(layer):
                if not name.endswith(("running_mean", "running_var")):
                    continue
                other = first.setdefault(id(tensor), stage)
                if placement[other] != placement[stage]:
                    raise PlanError(
                        f"{name} keeps running statistics of stages {other} and {stage}, on ranks "
                        f"{placement[other]} and {placement[stage]}: put them on one rank, or use a layer in each"
                    )
