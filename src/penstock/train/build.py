"""From a plan and options to stages that are ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.engine.distributed import DistributedExecutor
from penstock.engine.failure.rendezvous import Rendezvous, pipeline_config
from penstock.engine.failure.status import HangLimits
from penstock.engine.loss import LossAndOutputs, loss_rule
from penstock.engine.offload.activations import activation_offload
from penstock.engine.offload.copies import HostBufferPool
from penstock.engine.offload.weights import HostWeights, host_weights
from penstock.engine.parallelized import ParallelizedStage
from penstock.engine.recompute.batchnorm import DeferredStatistics
from penstock.engine.recompute.buffers import BufferGuard
from penstock.engine.recompute.rng import StageRng
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.engine.replicas.ties import place_tied_parameters
from penstock.engine.stage import StageEngine
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PlanError
from penstock.schedule.provider import ScheduleProvider
from penstock.split.plan import Plan
from penstock.train.devices import assign_devices, marked_devices, named_devices
from penstock.train.materialise import materialise
from penstock.train.mesh import Mesh
from penstock.train.options import Options
from penstock.train.state import FqnMap, all_fqns

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """The plan with its placement, the stages of this process, and the crew that runs them."""

    plan: Plan
    source: ScheduleProvider
    modules: dict[int, nn.Module]
    own_name: FqnMap
    crew: ThreadExecutor | DistributedExecutor


def build(plan: Plan, options: Options, mesh: Mesh | None, rendezvous: Rendezvous | None) -> Built:
    """Everything is checked before anything is moved, made or started."""
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
    named = named_devices(options.devices)
    source = ScheduleProvider(
        options.order,
        plan.num_stages,
        [(edge.src, edge.dst) for edge in plan.edges],
        options.microbatches,
        ranks=None if mesh is None else mesh.pipe,
        max_ranks=None if named is None else len(named),
        recompute=options.recompute,
        microbatch_size=options.microbatch_size,
        costs=options.costs,
    )
    if options.microbatch_size is not None and options.seed is not None and mesh is not None and mesh.data > 1:
        raise PlanError(
            "with a seed, replicas must know how many micro-batches the others have: say microbatches=…, and not "
            f"microbatch_size={options.microbatch_size}"
        )
    if mesh is not None and mesh.data > 1:
        _refuse_trained_loss(options.loss_fn)
    _refuse_shared_statistics(plan, source.placement)
    device_of = _devices(plan, options, mesh, source)
    if options.lockstep:
        _check_lockstep(options, mesh, source, device_of)
    own = [s for s, rank in enumerate(source.placement) if mesh is None or rank == mesh.pipe_rank]
    placed = plan.placed(source.placement, device_of)
    modules = {s: plan.stage_module(s) for s in own}
    _refuse_sharded(modules)
    copies = place_tied_parameters(plan.ties, modules, {s: device_of[s] for s in own})
    offload = options.offload
    weights = host_weights(modules, device_of) if offload is not None and offload.weights else None
    materialise(modules, device_of, options.init, copies, weights)
    own_name, parallel = FqnMap(), dict[int, ParallelizedStage]()
    if mesh is not None:
        assert rendezvous is not None
        shared = {"mesh": mesh.sizes, **options.shared()}
        if options.parallelize is not None:
            from penstock.train.parallelize import parallelize_stages  # FSDP takes seconds to import

            rendezvous.compare(pipeline_config(placed, source, shared))
            own_name = FqnMap(all_fqns(plan.require_chain().model))
            parallel = parallelize_stages(modules, mesh, options, plan.ties, copies, own_name)
    pool = HostBufferPool(offload.budget_bytes) if offload is not None and offload.activations else None
    first = 0 if mesh is None else mesh.data_rank * source.microbatches
    stages = []
    for s, module in modules.items():
        head = LossAndOutputs(rule) if s == plan.num_stages - 1 else None
        takes, gives = max(1, len(plan.sources(s))), max(1, len(plan.targets(s)))
        stage = StageEngine(s, module, device_of[s], head, takes=takes, gives=gives)
        stage.parallel = parallel.get(s)
        if options.seed is not None or source.recomputes(s):
            stage.randomness = StageRng(module, device_of[s], options.seed, first, own_name)
            if source.recomputes(s):
                stage.unnoticed = BufferGuard(module)
        if options.batchnorm == "deferred":
            stage.norms = DeferredStatistics(module, s)
        if pool is not None:
            stage.offload = activation_offload(device_of[s], pool, module)
        stage.weights = weights
        stages.append(stage)
    if mesh is None:
        joined = source if weights is None else source.with_merged_ranks(_joined(source, device_of, weights))
        limits = HangLimits(options.stuck_after, options.timeout)
        crew_here = ThreadExecutor(placed, stages, joined, copies, limits, options.lockstep)
        return Built(placed, source, modules, own_name, crew_here)
    assert rendezvous is not None
    crew = DistributedExecutor(placed, stages, source, copies, mesh, rendezvous, shared)
    return Built(placed, source, modules, own_name, crew)


def _devices(plan: Plan, options: Options, mesh: Mesh | None, source: ScheduleProvider) -> list[torch.device]:
    """The device of each stage."""
    if mesh is not None:
        return [mesh.device] * plan.num_stages
    wanted = marked_devices(plan, source) if options.devices is None else options.devices
    of_rank = assign_devices(wanted, source.ranks)
    return [of_rank[rank] for rank in source.placement]


def _check_lockstep(
    options: Options, mesh: Mesh | None, source: ScheduleProvider, devices: Sequence[torch.device]
) -> None:
    if mesh is not None or len(set(source.placement)) < len(devices):
        raise PlanError("lockstep=True is for threads of this process that have one stage each")
    gpus = [device for device in devices if device.type == "cuda"]
    if options.offload is not None and options.offload.weights and len(set(gpus)) < len(gpus):
        raise PlanError(
            "lockstep=True is for threads that have one stage each, but with Offload(weights=True) one thread has all "
            "stages of a GPU: leave one of them out, or give every stage a GPU of its own"
        )


def _refuse_sharded(modules: Mapping[int, nn.Module]) -> None:
    for stage, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_dtensor(tensor):
                raise PlanError(
                    f"{name} of stage {stage} is a DTensor already: build the pipeline of a plain model, and let "
                    "Pipeline(…, parallelize=…) shard or distribute its stages"
                )


def _joined(source: ScheduleProvider, devices: Sequence[torch.device], weights: HostWeights) -> list[int]:
    """Ranks on one device take turns where weights come and go: who has them there is then a matter of one order."""
    of_rank = dict(zip(source.placement, devices, strict=True))
    places = [of_rank[rank] if of_rank[rank] in weights.copies else rank for rank in range(source.ranks)]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return [numbers[place] for place in places]


def _refuse_trained_loss(loss_fn: object) -> None:
    """Replicas sum the gradients of their stages."""
    trained = [n for n, p in loss_fn.named_parameters() if p.requires_grad] if isinstance(loss_fn, nn.Module) else []
    if trained:
        raise PlanError(
            f"loss_fn has a parameter that is trained ({trained[0]}), whose gradients replicas would not sum: make "
            "loss_fn a part of the model, which then computes its loss, or freeze the parameter"
        )


def _refuse_shared_statistics(plan: Plan, placement: Sequence[int]) -> None:
    """Running statistics that stages of several ranks update would be updated in no certain order, or fall apart."""
    line = plan.require_chain()
    home: dict[int, int] = {}
    for stage, layers in enumerate(plan.groups):
        for layer in layers:
            for name, tensor in line.members(layer):
                if not name.endswith(("running_mean", "running_var")):
                    continue
                other = home.setdefault(id(tensor), stage)
                if placement[other] != placement[stage]:
                    raise PlanError(
                        f"{name} keeps running statistics of stages {other} and {stage}, on ranks "
                        f"{placement[other]} and {placement[stage]}: put them on one rank, or use a layer in each"
                    )
