"""Builds the executor of a plan and the options of its pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.cuda_graphs import CudaGraphs
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
from penstock.engine.recompute.python_state import PythonStateGuard
from penstock.engine.recompute.rng import StageRng
from penstock.engine.recompute.shared_state import SharedStateCheck
from penstock.engine.replicas.dtensor import is_dtensor
from penstock.engine.replicas.ties import place_tied_parameters
from penstock.engine.stage import ParallelizedStage, StageEngine
from penstock.engine.threads import ThreadExecutor
from penstock.errors import PlanError
from penstock.schedule.costs import Costs
from penstock.schedule.provider import AUTO, ScheduleProvider
from penstock.split.plan import Plan
from penstock.split.trace.stage import EnteredModule
from penstock.train.launch import num_gpus, parse_device
from penstock.train.mesh import Mesh
from penstock.train.optimizer_offload import Offload
from penstock.train.state import FqnMap

Devices = Sequence[torch.device | str | int] | torch.device | str | int | None


class Options(SimpleNamespace):
    """The arguments of ``Pipeline`` besides plan and mesh, under the same names."""

    def check(self) -> None:
        """Raise an error for an invalid value."""
        check_outputs(self.outputs)
        if self.batchnorm not in ("microbatch", "deferred"):
            raise PlanError(f"batchnorm must be 'microbatch' or 'deferred', got {self.batchnorm!r}")
        if self.accumulate not in (None, "fp32"):
            raise PlanError(f"accumulate must be 'fp32' or None, got {self.accumulate!r}")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise PlanError(f"seed must be a whole number, got {self.seed!r}")
        for limit in self.limits:
            if limit is not None and (not isinstance(limit, (int, float)) or isinstance(limit, bool) or not limit > 0):
                raise PlanError(f"timeout must be seconds, None for never, or a pair of them: got {self.timeout!r}")
        if not isinstance(self.compile, (bool, Mapping)):
            raise PlanError(f"compile must be a bool or a dict of options of torch.compile, got {self.compile!r}")
        if self.cuda_graphs and isinstance(self.compile, Mapping) and "reduce-overhead" in self.compile.values():
            raise PlanError(
                "compile={'mode': 'reduce-overhead'} makes CUDA graphs of its own, which cuda_graphs=True cannot "
                "capture: leave out one of them"
            )
        if self.offload is not None and not isinstance(self.offload, Offload):
            raise PlanError(f"offload must be ps.Offload(…), got {type(self.offload).__name__}")
        if self.offload is not None and self.offload.weights and self.parallelize is not None:
            raise PlanError("parallelize does not support offloaded weights: leave out Offload(weights=True)")
        if self.parallelize is not None:
            try:
                inspect.signature(self.parallelize).bind("stage", "mesh")
            except TypeError as error:
                raise PlanError(
                    f"parallelize is called as parallelize(stage, mesh), but {self.parallelize!r} cannot be: {error}. "
                    "Pass a function of both, such as lambda stage, mesh: torch.compile(stage)"
                ) from None

    @property
    def limits(self) -> tuple[Any, Any]:
        """Seconds until a warning and until an error, for a rank that waits without progress."""
        if isinstance(self.timeout, tuple) and len(self.timeout) == 2:
            return self.timeout
        return HangLimits().stuck_after, self.timeout


def build(
    plan: Plan, options: Options, mesh: Mesh | None, rendezvous: Rendezvous | None
) -> tuple[Plan, ScheduleProvider, dict[int, nn.Module], FqnMap, Executor]:
    """The placed plan, its schedules, the stages of this process, the map of their names, and their executor.

    All arguments are checked before modules are moved and threads are started.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"Pipeline takes a plan, got {type(plan).__name__}: make one with penstock.split(model, …)")
    plan.require_chain()
    options.check()
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(pipe=…), got {type(mesh).__name__}")
    rule = loss_rule(options.loss_fn, options.reduction)
    if mesh is not None and options.devices is not None:
        raise PlanError("devices= is for threads in this process: under a mesh, pass Mesh(pipe=…, device=…)")
    if mesh is None and options.parallelize is not None:
        raise PlanError(
            "parallelize needs a mesh: pass mesh=ps.Mesh(…) too. In one process, change the modules of "
            "pipe.stage_modules in place, as stage.compile() does"
        )
    source = _schedules(plan, options, mesh)
    device_of = _devices(plan, options, mesh, source)
    own = [s for s, rank in enumerate(source.placement) if mesh is None or rank == mesh.pipe_rank]
    placed = plan.placed(source.placement, device_of)
    config: dict[str, Any] = {}
    if mesh is not None:  # before stages are built, which changes modules of this rank only
        names = ("seed", "accumulate", "batchnorm", "dynamic", "microbatch_size")
        shared = {"mesh": mesh.sizes, **{name: getattr(options, name) for name in names}}  # the same on every rank
        shared |= {"timeout": options.limits, "parallelize": options.parallelize is not None}
        config = pipeline_config(placed, source, shared)
    modules = {s: plan.stage_module(s) for s in own}
    for s, module in modules.items():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_dtensor(tensor):
                raise PlanError(f"{name} of stage {s} is a DTensor already: let Pipeline(…, parallelize=…) shard it")
    copies = place_tied_parameters(plan.ties, modules, {s: device_of[s] for s in own})
    offload = options.offload
    weights = host_weights(modules, device_of) if offload is not None and offload.weights else None
    materialise(modules, device_of, options.init, copies, weights)
    fqn, parallel = FqnMap(), dict[int, ParallelizedStage]()
    if mesh is not None and options.parallelize is not None:
        from penstock.train.parallelize import parallelize_stages  # FSDP takes seconds to import

        assert rendezvous is not None
        rendezvous.compare(config)
        fqn = FqnMap(plan.require_chain().model)
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
                sharded = stage.parallel is not None and stage.parallel.sharded is not None
                loss_fn = None if loss is None else options.loss_fn
                stage.buffer_guard = BufferGuard(module, loss_fn, sharded=sharded)
                stage.python_state = PythonStateGuard(module, loss_fn)
        if options.batchnorm == "deferred":
            stage.norms = DeferredStatistics(module, s)
        alone = mesh is None and source.microbatches == 1  # stages work one after the other, on the same objects
        if stage.parallel is None and not alone:
            check = SharedStateCheck(s, module, _modules_of_others(plan, module))
            stage.shared_state = check if check.states else None
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
        joined = source
        merged = set(weights.copies) if weights is not None else set[torch.device]()
        if options.cuda_graphs:
            merged |= {device for device in device_of if CudaGraphs.supports(device)}
        if merged:  # one rank per device: transfers of weights need one order, and replays of graphs one thread
            of_rank = dict(zip(source.placement, device_of, strict=True))
            places = [of_rank[rank] if of_rank[rank] in merged else rank for rank in range(source.ranks)]
            joined = source.with_merged_ranks([list(dict.fromkeys(places)).index(place) for place in places])
        executor = ThreadExecutor(placed, stages, joined, copies, HangLimits(*options.limits), **gradients)
    else:
        assert rendezvous is not None
        distributed_args = (mesh, rendezvous, config, options.limits, options.dynamic)
        executor = DistributedExecutor(placed, stages, source, copies, *distributed_args, **gradients)
    if options.compile:
        compile_stages(modules.values(), {} if options.compile is True else options.compile)
    if options.cuda_graphs:
        executor.graphs = CudaGraphs(stages, options.loss_fn, "the pipeline is dynamic" if options.dynamic else "")
    return placed, source, modules, fqn, executor


def _modules_of_others(plan: Plan, module: nn.Module) -> list[nn.Module]:
    """The modules that other stages than this one call."""
    chain = plan.require_chain()
    own = {*dict(module.named_modules(remove_duplicate=False)), *chain.entered, ""}
    return [part for path, part in chain.model.named_modules(remove_duplicate=False) if path not in own]


def _schedules(plan: Plan, options: Options, mesh: Mesh | None) -> ScheduleProvider:
    """The schedules of the pipeline, for any number of micro-batches."""
    one_device = options.devices is None or isinstance(options.devices, (str, torch.device, int))
    costs = options.schedule if isinstance(options.schedule, Costs) else None
    source = ScheduleProvider(
        AUTO if costs is not None else options.schedule,
        plan.num_stages,
        [(edge.src, edge.dst) for edge in plan.edges],
        options.microbatches,
        ranks=None if mesh is None else mesh.pipe,
        max_ranks=None if one_device else len(options.devices),
        recompute=options.recompute,
        microbatch_size=options.microbatch_size,
        costs=costs,
    )
    if mesh is not None and mesh.data > 1:
        if options.microbatch_size is not None and options.seed is not None:
            raise PlanError("with a seed, replicas need equally many micro-batches: pass only microbatches=")
        loss_fn = options.loss_fn
        named_parameters = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
        trained = [name for name, parameter in named_parameters if parameter.requires_grad]
        if trained:  # replicas sum the gradients of their stages only
            raise PlanError(
                f"loss_fn has a parameter that is trained ({trained[0]}), whose gradients replicas would not sum: make "
                "loss_fn a part of the model, which then computes its loss, or freeze the parameter"
            )
    first: dict[int, int] = {}  # stages on several ranks would update running statistics in an undefined order
    for stage, layers in enumerate(plan.groups):
        for name, tensor in (member for layer in layers for member in plan.require_chain().members(layer)):
            if name.endswith(("running_mean", "running_var")):
                ranks = [source.placement[s] for s in (first.setdefault(id(tensor), stage), stage)]
                if ranks[0] != ranks[1]:
                    raise PlanError(
                        f"{name} keeps running statistics of stages {first[id(tensor)]} and {stage}, on ranks "
                        f"{ranks[0]} and {ranks[1]}: put them on one rank, or use a layer in each"
                    )
    return source


def _devices(plan: Plan, options: Options, mesh: Mesh | None, source: ScheduleProvider) -> list[torch.device]:
    """The device of each stage: the mesh's, the ``devices`` option, or the devices of the plan's blocks."""
    if mesh is not None:
        return [mesh.device] * plan.num_stages
    wanted = options.devices
    if wanted is None and plan.devices is not None:
        device_of_rank: dict[int, str] = {}
        for stage, (rank, device) in enumerate(zip(source.placement, plan.devices, strict=True)):
            if device_of_rank.setdefault(rank, device) != device:
                raise PlanError(
                    f"the plan puts stage {stage} on {device}, but the schedule gives it to rank {rank}, which has a "
                    f"stage on {device_of_rank[rank]}: choose a schedule with one stage per rank, or pass devices="
                )
        wanted = [device_of_rank[rank] for rank in range(source.ranks)]
    of_rank = assign_devices(wanted, source.ranks)
    return [of_rank[rank] for rank in source.placement]


def assign_devices(devices: Devices, ranks: int) -> list[torch.device]:
    """One device per rank: from a list, one for all, or by default the GPUs cyclically, or the CPU."""
    if devices is None:
        gpus = num_gpus()
        return [torch.device("cuda", r % gpus) if gpus else torch.device("cpu") for r in range(ranks)]
    given = [devices] * ranks if isinstance(devices, (str, torch.device, int)) else list(devices)
    if len(given) < ranks:
        raise PlanError(f"too few devices: {ranks} ranks, but {len(given)} devices: pass one for each rank")
    parsed = map(parse_device, given[:ranks])
    return [torch.device("cuda", device.index or 0) if device.type == "cuda" else device for device in parsed]


def compile_stages(stages: Iterable[nn.Module], options: Mapping[str, Any]) -> None:
    """Compile the stages: of a recorded model, the modules that they call."""
    pending = list(stages)
    while pending:
        module = pending.pop()
        if isinstance(module, EnteredModule):
            pending += module.children()
        elif not isinstance(module, torch.jit.ScriptModule) and (
            next(module.children(), None) is not None or not type(module).__module__.startswith("torch.nn.")
        ):
            module.compile(**options)


def materialise(
    modules: Mapping[int, nn.Module],
    devices: Sequence[torch.device],
    init: Callable[[nn.Module], object] | None,
    copies: list[list[nn.Parameter]],
    weights: HostWeights | None,
) -> None:
    """Move stages to their devices. Tensors on the meta device are allocated there and initialised by ``init``.

    A parameter with several names stays one tensor per device. ``copies`` (see ``place_tied_parameters``) is updated.
    With offloaded ``weights``, only one stage's parameters are on the device at a time.
    """
    on_meta: dict[int, list[str]] = {}
    for stage, module in modules.items():
        tensors = (*module.named_parameters(), *module.named_buffers())
        names = on_meta[stage] = [name for name, tensor in tensors if tensor.is_meta]
        if names and init is None:
            raise PlanError(
                f"stage {stage} has {len(names)} tensors on the meta device, without data ({names[0]} is one): pass "
                "Pipeline(…, init=…), a function that initialises the parameters and buffers of a stage's module"
            )
    allocated: dict[int, Tensor] = {}
    for stage, module in modules.items():
        _allocate(module, devices[stage], allocated)
        module.to(devices[stage])
        if weights is not None:
            weights.offload_stage(stage)
    for row in copies:
        row[:] = [allocated.get(id(parameter), parameter) for parameter in row]  # type: ignore[misc]
    for stage, module in modules.items():
        if on_meta[stage] and init is not None:
            try:
                with torch.no_grad(), nullcontext() if weights is None else weights.initializing(stage):
                    init(module)
            except Exception as error:
                error.add_note(f"in init of stage {stage}")
                raise
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            left = [name for name in on_meta[stage] if state[name].numel() and bool(state[name].isnan().all())]
            if left:
                raise PlanError(
                    f"init left {len(left)} tensors of stage {stage} without values ({left[0]} is one): it must fill "
                    "all parameters and buffers, including those that are not in the state dict"
                )


def _allocate(module: nn.Module, device: torch.device, allocated: dict[int, Tensor]) -> None:
    """Allocate a module's tensors that are on the meta device. Float tensors are NaN until ``init`` has filled them."""
    for part in module.modules():
        for members in (part._parameters, part._buffers):
            for name, tensor in members.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in allocated:
                    empty = torch.empty_like(tensor, device=device)
                    if empty.is_floating_point() or empty.is_complex():
                        empty.fill_(torch.nan)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    allocated[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                members[name] = allocated[id(tensor)]  # type: ignore[assignment]
