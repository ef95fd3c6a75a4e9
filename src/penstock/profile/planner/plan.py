"""``ps.plan``: measure a model and search the fastest configuration that fits; or plan from costs or model sizes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from penstock._torch import default_store
from penstock.engine.microbatch import batch_size
from penstock.errors import PlanError
from penstock.format import parse_bytes
from penstock.profile.analytic import Hardware, Transformer, analytic_costs, get_hardware, parse_transformer
from penstock.profile.costs import Link, ModelCosts, Profile, check_counts
from penstock.profile.links import local_link, measure_links, process_link
from penstock.profile.measure import OptimizerLike, measure_costs
from penstock.profile.planner.result import PlanResult
from penstock.profile.planner.search import Cluster, configurations, device_grids, search
from penstock.split import chain_of
from penstock.split.plan import LayerChain, build_plan
from penstock.split.sample import sample_inputs
from penstock.train.build import assign_devices
from penstock.train.mesh import Mesh

_num_plans: Counter[tuple[int, ...]] = Counter()  # number of plans of this process, by the ranks of the mesh


def plan(
    model: nn.Module,
    sample: Any = None,
    *,
    devices: int | Sequence[str | torch.device] | None = None,
    mesh: Mesh | None = None,
    replicas: bool = False,
    memory: Any = None,
    batch: int | None = None,
    microbatches: int | None = None,
    recompute: bool | None = None,
    costs: Profile | ModelCosts | str | Path | None = None,
    hardware: str | Hardware | None = None,
    speeds: Sequence[float] | None = None,
    link: Link | None = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    measure_seconds: float = 5.0,
    seconds: float = 10.0,
    seed: int = 0,
) -> PlanResult:
    """Profile ``model`` and pick stages, micro-batches and a schedule that fit the memory.

    ``sample`` is the input of the model. Its number of samples is the limit for micro-batches. Layers are measured on
    it, unless ``costs`` are given. If the model takes one argument, ``sample`` may be ``(inputs, targets)``. ``batch``
    is the size of the mini-batch, by default that of the sample.

    ``devices`` are devices of this process, for a pipeline of threads that uses some or all of them. With ``replicas``
    they are the processes of a later run, the number of replicas is searched too, and the ``link`` between two
    processes is measured if it is not given. Under ``mesh`` all ranks call ``ps.plan``. The first rank plans, and all
    ranks get its result.

    ``memory`` is the limit of each device (bytes, ``"16GiB"``, or a list), by default the memory of the GPU. A CPU has
    no default limit; its ranks then hold at most as many activations as any rank of 1F1B. ``speeds`` are the relative
    speeds of devices. ``hardware="h100"`` plans for ``devices`` of that kind, which need not be present: the times of
    layers are computed from their FLOPs and bytes.

    ``recompute=None`` recomputes as few stages as the memory requires, True all stages, False none. ``cuts`` and
    ``blocks`` define where the model may be cut, as in ``ps.split``. With ``loss_fn`` and ``targets`` the loss is
    measured too. ``optimizer`` determines the bytes of the optimizer state.

    The search takes about ``seconds`` of CPU time, the measurement about ``measure_seconds``.
    """
    if mesh is not None and (devices is not None or hardware is not None):
        raise PlanError("under a mesh its processes are the devices: leave out devices= and hardware=")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(pipe=…), got {type(mesh).__name__}")
    if link is not None and not isinstance(link, Link):
        raise PlanError(f"link must be a Link(latency, bandwidth) of penstock.profile, got {link!r}")
    if recompute not in (None, True, False):
        raise PlanError(f"recompute={recompute!r} must be True (all stages), False (none) or None (as memory requires)")
    if not isinstance(measure_seconds, (int, float)) or not 0 <= measure_seconds < inf:
        raise PlanError(f"measure_seconds={measure_seconds!r} must be the measuring time, a number from 0 up")
    if sample is None and costs is None:
        raise PlanError("give sample=, the input of the model, to measure its layers on; or costs=")
    inputs = sample_inputs(model, sample) if isinstance(model, nn.Module) else sample
    if inputs is not sample:  # (inputs, targets)
        sample, targets = inputs, sample[1] if targets is None and loss_fn is not None else targets
    chain = chain_of(model, cuts=cuts, blocks=blocks, sample=sample)
    if hardware is not None and costs is not None:
        raise PlanError("costs are those of certain hardware already: give costs= or hardware=, not both")
    if hardware is not None and type(devices) is not int:
        raise PlanError(f"devices={devices!r} must be the number of devices, if hardware= is given")
    target = None if hardware is None else get_hardware(hardware)
    names = [str(mesh.device)] * (mesh.pipe * mesh.data) if mesh is not None else _device_names(devices)
    limits = _device_memory(target.memory if memory is None and target is not None else memory, names)
    samples = None if sample is None else batch_size(sample, "sample")
    batch = samples if batch is None else batch
    if batch is None:
        raise PlanError("give batch=, the number of samples of a mini-batch")
    grids = device_grids(len(names)) if replicas else [(1, ranks) for ranks in range(1, len(names) + 1)]
    options: dict[str, Any] = {
        "batch": batch, "microbatches": microbatches, "recompute": recompute, "seconds": seconds, "seed": seed,
        "memory": _per_device("memory", limits, len(names)),
        "speeds": None if speeds is None else _per_device("speeds", speeds, len(names)),
        "grids": grids if mesh is None else [(mesh.data, mesh.pipe)], "largest": samples if costs is None else None,
    }  # fmt: skip
    _check_options(batch, microbatches, seconds, seed)  # before the measurement, which takes seconds
    if mesh is not None and link is None:
        link = measure_links(mesh).worst

    def measured() -> Profile:
        if costs is not None:
            return _check_costs(costs, chain)
        on_cpu = torch.device(names[0]).type == "cpu"
        return measure_costs(
            chain, sample, device=None if target is not None else names[0], seconds=measure_seconds,
            optimizer=optimizer, loss_fn=loss_fn, targets=targets, hardware=target,
            threads=max(1, (os.cpu_count() or 1) // len(names)) if on_cpu and target is None else None,
        )  # fmt: skip

    def work() -> PlanResult:
        profile, between = measured(), link
        if between is None and costs is None and len(names) > 1:
            if target is not None:
                between = target.link(len(names))
            else:
                between = process_link(names[0], len(names)) if replicas else local_link(names[0], names[1])
        result = plan_costs(profile if between is None else profile.with_link(between), **options)
        where = None
        if mesh is None and target is None:
            cluster = Cluster(options["speeds"] or (1.0,) * len(names), options["memory"])
            used = cluster.fastest(result.configuration.data * result.configuration.pipe)
            where = tuple(names[i] for i in (*used, *(i for i in range(len(names)) if i not in used)))
        return replace(result, layers=chain.layers, plan=build_plan(chain, result.groups), devices=where)

    if mesh is None:
        return work()
    if mesh.rank != mesh.world_ranks[0] and costs is None:
        measured()  # as load: processes share caches and memory bandwidth, as in a step
    return _plan_on_first_rank(mesh, work, model)


def _check_options(batch: Any, microbatches: Any, seconds: Any, seed: Any, devices: Any = 1) -> None:
    check_counts(batch=batch, devices=devices, microbatches=1 if microbatches is None else microbatches)
    if not isinstance(seconds, (int, float)) or not 0 < seconds < inf:
        raise PlanError(f"seconds={seconds!r}: expected a search time above 0")
    if type(seed) is not int:
        raise PlanError(f"seed={seed!r} must be a whole number")


def _device_names(devices: Any) -> list[str]:
    """The names of devices; of a number of devices, the first GPUs or, if there are too few, the CPU repeatedly."""
    gpus = torch.cuda.device_count()
    if devices is None:
        if gpus == 0:
            raise PlanError("this machine has no GPU: give devices=, the number of ranks or a list of devices")
        return [f"cuda:{i}" for i in range(gpus)]
    if type(devices) is int:
        if devices < 1:
            raise PlanError(f"devices={devices} must be at least 1")
        return [f"cuda:{i}" for i in range(devices)] if gpus >= devices else ["cpu"] * devices
    if not isinstance(devices, (list, tuple)) or not devices:
        raise PlanError(f"devices={devices!r} must be a number of ranks, or a list with one device per rank")
    return [str(device) for device in assign_devices(devices, len(devices))]


def _device_memory(memory: Any, names: Sequence[str]) -> list[float]:
    """Bytes of each device: the given limit, or the memory of the GPU; unlimited on a CPU."""
    if memory is not None:
        each = memory if isinstance(memory, (list, tuple)) else [memory] * len(names)
        return [float(parse_bytes(size)) for size in each]
    kinds = [torch.device(name) for name in names]
    return [float(torch.cuda.get_device_properties(d).total_memory) if d.type == "cuda" else inf for d in kinds]


def _per_device(option: str, given: Any, devices: int) -> tuple[float, ...]:
    """Check an option with a number above 0 per device."""
    numbers = (given,) * devices if isinstance(given, (int, float)) and option == "memory" else given
    if not isinstance(numbers, (list, tuple)):
        raise PlanError(f"{option}={given!r} must be a list of numbers, one for each device")
    if len(numbers) != devices:
        raise PlanError(f"{option} has {len(numbers)} numbers, but there are {devices} devices: give one for each")
    for number in numbers:
        most = inf if option == "memory" else 1e30
        if type(number) not in (int, float) or not 0 < number <= most:
            raise PlanError(f"{option} must be numbers above 0, and speeds finite, got {list(numbers)}")
    return tuple(map(float, numbers))


def plan_costs(
    profile: Profile,
    *,
    batch: int,
    devices: int | None = None,
    grids: Sequence[tuple[int, int]] | None = None,
    memory: Sequence[float] | float = inf,
    microbatches: int | None = None,
    largest: int | None = None,
    recompute: bool | None = None,
    speeds: Sequence[float] | None = None,
    link: Link | None = None,
    seconds: float = 10.0,
    seed: int = 0,
) -> PlanResult:
    """Plan from costs, without a model; ``link`` is the link between replicas."""
    _check_options(batch, microbatches, seconds, seed, 1 if devices is None else devices)
    grids = grids if grids is not None else device_grids(devices or 1)
    most = max(data * pipe for data, pipe in grids)
    limits = _per_device("memory", memory, most)
    speed = (1.0,) * most if speeds is None else _per_device("speeds", speeds, most)
    layers = [layer.name for layer in profile.sizes[0].layers]
    fits = [(data, pipe) for data, pipe in grids if pipe <= len(layers)]
    if not fits:
        fewest = min(pipe for _, pipe in grids)
        raise PlanError(
            f"{fewest} devices asked for, but the model has only {len(layers)} layers to divide among them: take fewer "
            "ranks and more replicas, or cut it finer (cuts=)"
        )
    recompute = False if recompute is None and min(limits) == inf else recompute
    found = configurations(batch, fits, len(layers), microbatches=microbatches, largest=largest, recompute=recompute)
    if not found:
        raise PlanError(
            f"a mini-batch of {batch} samples cannot be divided among {min(d for d, _ in fits)} replicas, and the "
            f"model has only {len(layers)} layers for ranks: take fewer devices, or a larger batch="
        )
    cluster = Cluster(speed, limits, link)
    best, others = search(lambda one: profile.at(one.samples), found, cluster, seconds=seconds, seed=seed)
    return PlanResult(best, others, tuple(layers))


def _check_costs(costs: Profile | ModelCosts | str | Path, chain: LayerChain) -> Profile:
    """Load the given costs as a profile, and check that they are costs of this model."""
    if isinstance(costs, (str, Path)):
        costs = Profile.load(costs)
    if isinstance(costs, ModelCosts):
        costs = Profile((costs,))
    if not isinstance(costs, Profile):
        raise PlanError(f"costs must be a Profile, ModelCosts or the name of their file, got {type(costs).__name__}")
    names = [layer.name for layer in costs.sizes[0].layers]
    for i, (cost, layer) in enumerate(zip_longest(names, chain.layers)):
        if cost != layer:
            raise PlanError(
                f"the costs are of another model: they have {len(names)} layers, the model has {len(chain.layers)}; "
                f"layer {i} is {cost!r} in the costs and {layer!r} in the model"
            )
    return costs


def _plan_on_first_rank(mesh: Mesh, work: Callable[[], PlanResult], model: nn.Module) -> PlanResult:
    """Plan on the first rank of the mesh; the other ranks get its result or its error."""
    _num_plans[mesh.world_ranks] += 1
    key = f"penstock/plan/{mesh.world_ranks}/{_num_plans[mesh.world_ranks]}"
    store = default_store()
    if mesh.rank != mesh.world_ranks[0]:
        store.wait([key], timedelta(minutes=30))
        message = json.loads(store.get(key))
        if "error" in message:
            raise PlanError(f"rank {mesh.world_ranks[0]}, which plans for all ranks, failed: {message['error']}")
        return PlanResult.from_json(message["result"], model)
    try:
        result = work()
    except Exception as error:
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(key, json.dumps({"result": result.to_json()}))
    return result


def plan_analytic(
    model: str | Transformer,
    hardware: str | Hardware,
    devices: int,
    batch: int,
    *,
    tensor: int | None = None,
    half_layers: bool = False,
    memory: Any = None,
    microbatches: int | None = None,
    recompute: bool | None = None,
    sequence_parallel: bool | None = None,
    seconds: float = 10.0,
    seed: int = 0,
    **costs: Any,
) -> PlanResult:
    """Plan for a transformer given by its sizes, on hardware that need not be present.

    ``tensor`` is the number of devices that share each layer. By default all powers of two up to the size of a node are
    searched. Groups of devices use sequence parallelism, unless ``sequence_parallel`` is False. ``costs`` are further
    options of ``analytic_costs``.
    """
    _check_options(batch, microbatches, seconds, seed, devices)
    model, hardware = parse_transformer(model) if isinstance(model, str) else model, get_hardware(hardware)
    limit = hardware.memory if memory is None else float(parse_bytes(memory))
    tries = [t for t in (1, 2, 4, 8, 16) if t <= hardware.devices_per_node] if tensor is None else [tensor]
    fit = [t for t in tries if not (devices % t or model.heads % t or model.width % t)]
    if not fit:
        raise PlanError(
            f"{', '.join(map(str, tries))} devices cannot share a layer: their number must divide {devices} devices, "
            f"{model.heads} heads and an MLP of {model.width}"
        )
    layers = model.layers * (2 if half_layers else 1) + 2
    options: dict[str, Any] = {"microbatches": microbatches, "largest": 64, "recompute": recompute}
    grids = {t: device_grids(devices // t) for t in fit}
    found = [one for t in fit for one in configurations(batch, grids[t], layers, tensor=t, **options)]
    if not found:
        raise PlanError(f"{devices} devices are too many for {layers} layers and {batch} sequences")

    @cache
    def costs_at(tensor: int, samples: int) -> ModelCosts:
        parallel = tensor > 1 if sequence_parallel is None else sequence_parallel
        return analytic_costs(
            model, hardware, samples=samples, tensor=tensor, sequence_parallel=parallel, half_layers=half_layers,
            devices=devices, **costs,
        )  # fmt: skip

    cluster = Cluster((1.0,) * devices, (limit,) * devices, hardware.link(devices))
    best, others = search(lambda one: costs_at(one.tensor, one.samples), found, cluster, seconds=seconds, seed=seed)
    return PlanResult(best, others, tuple(layer.name for layer in costs_at(best.configuration.tensor, 1).layers))
