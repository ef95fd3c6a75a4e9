"""From a plan and options to stages that are ready to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from penstock.engine.batchnorm import DeferredBatchNorm
from penstock.engine.buffers import Unnoticed
from penstock.engine.head import Head
from penstock.engine.hostcopy import HostPool
from penstock.engine.local import LocalCrew
from penstock.engine.loss import loss_rule
from penstock.engine.meeting import Meeting
from penstock.engine.offload import activation_offload
from penstock.engine.process import ProcessCrew
from penstock.engine.randomness import Randomness
from penstock.engine.stage import StageEngine
from penstock.engine.ties import place_ties
from penstock.errors import PlanError
from penstock.schedule.source import ScheduleSource
from penstock.split.plan import Plan
from penstock.train.devices import assign, devices_of, marked_devices
from penstock.train.materialise import materialise
from penstock.train.mesh import Mesh
from penstock.train.options import Options

__all__ = ["Built", "build"]


@dataclass(frozen=True)
class Built:
    """The plan with its placement, the stages of this process, and the crew that runs them."""

    plan: Plan
    source: ScheduleSource
    modules: dict[int, nn.Module]
    crew: LocalCrew | ProcessCrew


def build(plan: Plan, options: Options, mesh: Mesh | None, meeting: Meeting | None) -> Built:
    """Everything is checked before anything is moved, made or started."""
    if not isinstance(plan, Plan):
        raise PlanError(f"Pipeline takes a plan, got {type(plan).__name__}: make one with penstock.split(model, …)")
    plan.attached()
    options.check()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(pipe=…), got {type(mesh).__name__}")
    rule = loss_rule(options.loss_fn, options.reduction)
    if mesh is not None and options.devices is not None:
        raise PlanError("devices= is for threads in this process; under a mesh, say Mesh(pipe=…, device=…)")
    named = devices_of(options.devices)
    source = ScheduleSource(
        options.order,
        plan.num_stages,
        [(edge.src, edge.dst) for edge in plan.edges],
        options.microbatches,
        ranks=None if mesh is None else mesh.pipe,
        places=None if named is None else len(named),
        recompute=options.recompute,
    )
    if options.lockstep and (mesh is not None or len(set(source.placement)) < plan.num_stages):
        raise PlanError("lockstep=True is for threads of this process that have one stage each")
    _refuse_shared_statistics(plan, source.placement)
    device_of = _devices(plan, options, mesh, source)
    own = [s for s, rank in enumerate(source.placement) if mesh is None or rank == mesh.pipe_rank]
    placed = plan.placed(source.placement, device_of)
    modules = {s: plan.stage_module(s) for s in own}
    copies = place_ties(plan.ties, modules, {s: device_of[s] for s in own})
    materialise(modules, device_of, options.init, copies)
    offload = options.offload
    pool = HostPool(offload.budget_bytes) if offload is not None and offload.activations else None
    first = 0 if mesh is None else mesh.data_rank * source.microbatches
    stages = []
    for s, module in modules.items():
        head = Head(rule) if s == plan.num_stages - 1 else None
        takes, gives = max(1, len(plan.sources(s))), max(1, len(plan.targets(s)))
        stage = StageEngine(s, module, device_of[s], head, takes=takes, gives=gives)
        if options.seed is not None or source.recomputes(s):
            stage.randomness = Randomness(module, device_of[s], options.seed, first)
            if source.recomputes(s):
                stage.unnoticed = Unnoticed(module)
        if options.batchnorm == "deferred":
            stage.norms = DeferredBatchNorm(module, s)
        if pool is not None:
            stage.offload = activation_offload(device_of[s], pool, module)
        stages.append(stage)
    if mesh is None:
        return Built(placed, source, modules, LocalCrew(placed, stages, source, copies, options.lockstep))
    assert meeting is not None
    return Built(placed, source, modules, ProcessCrew(placed, stages, source, copies, mesh, meeting, options.shared()))


def _devices(plan: Plan, options: Options, mesh: Mesh | None, source: ScheduleSource) -> list[torch.device]:
    """The device of each stage."""
    if mesh is not None:
        return [mesh.device] * plan.num_stages
    wanted = marked_devices(plan, source) if options.devices is None else options.devices
    of_rank = assign(wanted, source.ranks)
    return [of_rank[rank] for rank in source.placement]


def _refuse_shared_statistics(plan: Plan, placement: Sequence[int]) -> None:
    """Running statistics that stages of several ranks update would be updated in no certain order, or fall apart."""
    line = plan.attached()
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
