"""``ps.plan``: measure a model, search, and answer with a plan to run."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.engine.microbatch import batch_size
from penstock.errors import PlanError
from penstock.profile.costs import Link, ModelCosts
from penstock.profile.links import local_link, measure_links
from penstock.profile.measure import measure_costs
from penstock.profile.planner.planned import Planned
from penstock.profile.planner.search import search
from penstock.profile.planner.ways import Cluster, grids_of, ways
from penstock.profile.sizes import Profile
from penstock.profile.states import OptimizerLike
from penstock.split.fronts import line_of
from penstock.split.line import Line
from penstock.split.planning import plan_of
from penstock.split.weights import bytes_of
from penstock.train.mesh import Mesh

__all__ = ["plan", "plan_costs"]

_PATIENCE = timedelta(minutes=30)
_times: Counter[tuple[int, ...]] = Counter()  # how often this process has planned for the same ranks


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
) -> Planned:
    """The fastest way to train ``model`` that fits: where it is cut, in which order its stages work, and the rest.

    ``sample`` is what the model is called with, of as many samples as the largest micro-batch may have; its layers are
    measured on it, unless ``costs`` are given. ``batch`` is the mini-batch, by default as large as the sample.

    ``devices`` are those of this process, of which a pipeline of threads takes some or all. With ``replicas`` they are
    as many processes of a run to come, and how many replicas of the pipeline they make is searched too. Under ``mesh``
    there is a process for each rank already: the first one measures and plans, and all get its answer.

    ``memory`` is what a device has (a number of bytes, ``"16GiB"``, or one for each); by default what a GPU has, and no
    limit on a CPU, where a rank then keeps no more activations than the fullest rank of 1F1B. ``speeds`` tells how fast
    devices are that are not alike.

    Where memory is limited, as many stages are recomputed as it takes; with ``recompute`` all or none are. ``cuts`` and
    ``blocks`` say where the model may be cut, as in ``ps.split``. With ``loss_fn`` and ``targets`` the loss is measured
    too.

    The search takes about ``seconds`` of a core, measuring about ``measure_seconds``.
    """
    if mesh is not None and devices is not None:
        raise PlanError("under a mesh its processes are the devices: leave out devices=")
    line = line_of(model, cuts=cuts, blocks=blocks, sample=sample)
    places = None if mesh is not None else _places(devices)
    count = mesh.pipe * mesh.data if mesh is not None else len(places or ())
    if mesh is not None and link is None:
        link = measure_links(mesh).worst

    def measured() -> Profile:
        return _profile(costs, line, sample, count, mesh, places, optimizer, loss_fn, targets, measure_seconds)

    def work() -> Planned:
        profile = measured()
        between = link
        if between is None and costs is None and places is not None and count > 1:
            between = local_link(places[0], places[1])
        profile = profile if between is None else profile.over(between)
        samples = None if sample is None else batch_size(sample, "sample")
        whole = samples if batch is None else batch
        if whole is None:
            raise PlanError("say batch=, how many samples a mini-batch has")
        answer = plan_costs(
            profile,
            batch=whole,
            grids=_grids(count, mesh, replicas),
            memory=_memory(memory, places, mesh, count),
            microbatches=microbatches,
            largest=samples if costs is None else None,
            recompute=recompute,
            speeds=speeds,
            seconds=seconds,
            seed=seed,
        )
        where = None if places is None else tuple(places)
        return replace(answer, layers=line.layers, plan=plan_of(line, answer.groups), devices=where)

    if mesh is None:
        return work()
    if mesh.rank != mesh.world_ranks[0] and costs is None and sample is not None:
        measured()  # for the company: in a step, too, processes share caches and memory with each other
    return _together(mesh, work, model)


def _grids(devices: int, mesh: Mesh | None, replicas: bool) -> list[tuple[int, int]]:
    """Numbers of replicas and ranks."""
    if mesh is not None:
        return [(mesh.data, mesh.pipe)]
    return grids_of(devices) if replicas else [(1, ranks) for ranks in range(1, devices + 1)]


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
    report: Callable[[str], None] = lambda text: None,
) -> Planned:
    """The same from costs alone, without a model; ``link`` is the one between replicas."""
    for what, number in (("batch", batch), ("devices", devices), ("microbatches", microbatches)):
        if number is not None and (type(number) is not int or number < 1):
            raise PlanError(f"{what}={number!r} must be a whole number, from 1 up")
    grids = grids if grids is not None else grids_of(devices or 1)
    most = max(data * pipe for data, pipe in grids)
    limits = (memory,) * most if isinstance(memory, (int, float)) else tuple(memory)
    speed = (1.0,) * most if speeds is None else tuple(speeds)
    for what, given in (("memory", limits), ("speeds", speed)):
        if len(given) < most:
            raise PlanError(f"{what} has {len(given)} numbers, but there are {most} devices: give one for each")
    if any(not each > 0 for each in limits):
        raise PlanError(f"memory must be numbers above 0, got {list(limits)}")
    if any(not 0 < each < inf for each in speed):
        raise PlanError(f"speeds must be numbers above 0, got {list(speed)}")
    layers = [layer.name for layer in profile.sizes[0].layers]
    fits = [(data, pipe) for data, pipe in grids if pipe <= len(layers)]
    if not fits:
        fewest = min(pipe for _, pipe in grids)
        raise PlanError(
            f"{fewest} devices asked for, but the model has only {len(layers)} layers to divide among them: take fewer "
            "ranks and more replicas, or cut it finer (cuts=)"
        )
    again = False if recompute is None and min(limits) == inf else recompute
    found = ways(batch, fits, len(layers), microbatches=microbatches, largest=largest, recompute=again)
    if not found:
        raise PlanError(
            f"a mini-batch of {batch} samples cannot be divided among {min(d for d, _ in fits)} replicas, and the "
            f"model has only {len(layers)} layers for ranks: take fewer devices, or a larger batch="
        )
    cluster = Cluster(speed, limits, link)
    answer = search(lambda way: profile.at(way.samples), found, cluster, seconds=seconds, seed=seed, report=report)
    return Planned(answer.best, answer.others, tuple(layers))


def _places(devices: int | Sequence[str | torch.device] | None) -> list[str]:
    if devices is None:
        count = torch.cuda.device_count()
        if count == 0:
            raise PlanError("say devices=, how many ranks there may be, or which devices: there is no GPU here")
        return [f"cuda:{i}" for i in range(count)]
    if isinstance(devices, int):
        if devices < 1:
            raise PlanError(f"devices={devices} must be at least 1")
        gpus = torch.cuda.device_count()
        return [f"cuda:{i}" for i in range(devices)] if gpus >= devices else ["cpu"] * devices
    places = [str(torch.device(device)) for device in devices]
    if not places:
        raise PlanError("devices has none: say how many ranks there may be, or which devices")
    return places


def _memory(memory: Any, places: Sequence[str] | None, mesh: Mesh | None, count: int) -> list[float]:
    if memory is not None:
        each = memory if isinstance(memory, (list, tuple)) else [memory] * count
        return [float(bytes_of(size)) for size in each]
    where = [str(mesh.device)] * count if mesh is not None else list(places or ())
    return [_has(torch.device(place)) for place in where]


def _has(device: torch.device) -> float:
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else inf


def _profile(
    costs: Profile | ModelCosts | str | Path | None,
    line: Line,
    sample: Any,
    count: int,
    mesh: Mesh | None,
    places: Sequence[str] | None,
    optimizer: OptimizerLike,
    loss_fn: Callable[[Any, Any], Any] | None,
    targets: Any,
    seconds: float,
) -> Profile:
    if isinstance(costs, (str, Path)):
        costs = Profile.load(costs)
    if isinstance(costs, ModelCosts):
        costs = Profile((costs,))
    if costs is not None:
        names = [layer.name for layer in costs.sizes[0].layers]
        if names != list(line.layers):
            raise PlanError(
                f"the costs are of {len(names)} layers ({names[0]} … {names[-1]}), but the model has "
                f"{len(line.layers)} ({line.layers[0]} … {line.layers[-1]}): they are those of another model"
            )
        return costs
    if sample is None:
        raise PlanError("give sample=, what the model is called with, to measure its layers on; or costs=")
    device = str(mesh.device) if mesh is not None else (places or ["cpu"])[0]
    threads = max(1, (os.cpu_count() or 1) // count) if torch.device(device).type == "cpu" else None
    return measure_costs(
        line, sample, device=device, seconds=seconds, optimizer=optimizer, loss_fn=loss_fn, targets=targets,
        threads=threads,
    )  # fmt: skip


def _together(mesh: Mesh, work: Callable[[], Planned], model: nn.Module) -> Planned:
    """The first process of a mesh plans; the others get its answer, or its error."""
    _times[mesh.world_ranks] += 1
    key = f"penstock/plan/{mesh.world_ranks}/{_times[mesh.world_ranks]}"
    store = dist.distributed_c10d._get_default_store()
    if mesh.rank != mesh.world_ranks[0]:
        store.wait([key], _PATIENCE)
        told = json.loads(store.get(key))
        if "error" in told:
            raise PlanError(f"rank {mesh.world_ranks[0]}, which plans for all, failed: {told['error']}")
        return Planned.from_json(told["planned"], model)
    try:
        planned = work()
    except Exception as error:
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(key, json.dumps({"planned": planned.to_json()}))
    return planned
