"""``ps.plan``: measure a model, search, and answer with a plan to run."""

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
from penstock.profile.costs import Link, ModelCosts, Profile
from penstock.profile.links import local_link, measure_links, process_link
from penstock.profile.measure import OptimizerLike, measure_costs
from penstock.profile.planner.candidates import Cluster, configurations, device_grids
from penstock.profile.planner.devices import check_numbers, device_memory, device_names, one_for_each
from penstock.profile.planner.result import PlanResult
from penstock.profile.planner.search import search
from penstock.split import chain_of
from penstock.split.chain import LayerChain, build_plan
from penstock.split.sample import sample_inputs
from penstock.train.mesh import Mesh

__all__ = ["plan", "plan_analytic", "plan_costs"]

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
    """The fastest way to train ``model`` that fits: where it is cut, in which order its stages work, and the rest.

    ``sample`` is what the model is called with, of as many samples as the largest micro-batch may have; its layers are
    measured on it, unless ``costs`` are given. It may be ``(inputs, targets)`` where the model takes one argument.
    ``batch`` is the mini-batch, by default as large as the sample.

    ``devices`` are those of this process, of which a pipeline of threads takes some or all. With ``replicas`` they are
    as many processes of a run to come, and how many replicas of the pipeline they make is searched too; the ``link``
    between two is measured, if it is not given. Under ``mesh`` there is a process for each rank already: the first one
    measures and plans, and all get its answer.

    ``memory`` is what a device has (a number of bytes, ``"16GiB"``, or one for each); by default what a GPU has, and no
    limit on a CPU, where a rank then keeps no more activations than the fullest rank of 1F1B. ``speeds`` tells how fast
    devices are that are not alike. With ``hardware="h100"`` the devices are as many of these, which need not be here:
    layers run once, their operations and bytes are counted, and memory and link are those of the hardware.

    Where memory is limited, as many stages are recomputed as it takes; with ``recompute`` all or none are. ``cuts`` and
    ``blocks`` say where the model may be cut, as in ``ps.split``. With ``loss_fn`` and ``targets`` the loss is measured
    too, and ``optimizer`` says what its states take; costs that are given have all that.

    The search takes about ``seconds`` of a core, measuring about ``measure_seconds``.
    """
    if mesh is not None and (devices is not None or hardware is not None):
        what = "hardware" if devices is None else "devices"
        raise PlanError(f"under a mesh its processes are the devices: leave out {what}=")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(pipe=…), got {type(mesh).__name__}")
    if link is not None and not isinstance(link, Link):
        raise PlanError(f"link must be a Link(latency, bandwidth) of penstock.profile.costs, got {link!r}")
    if recompute not in (None, True, False):
        raise PlanError(f"recompute={recompute!r} must be True (all stages), False (none) or None (where it must be)")
    if not isinstance(measure_seconds, (int, float)) or not 0 <= measure_seconds < inf:
        raise PlanError(f"measure_seconds={measure_seconds!r} must be how long to measure, a number from 0 up")
    if sample is None and costs is None:
        raise PlanError("give sample=, what the model is called with, to measure its layers on; or costs=")
    inputs = sample_inputs(model, sample) if isinstance(model, nn.Module) else sample
    if inputs is not sample:  # (inputs, targets)
        sample, targets = inputs, sample[1] if targets is None and loss_fn is not None else targets
    line = chain_of(model, cuts=cuts, blocks=blocks, sample=sample)
    elsewhere = None if hardware is None else _elsewhere(hardware, devices, costs)
    places = [str(mesh.device)] * (mesh.pipe * mesh.data) if mesh is not None else device_names(devices)
    limits = device_memory(elsewhere.memory if memory is None and elsewhere is not None else memory, places)
    samples = None if sample is None else batch_size(sample, "sample")
    whole = samples if batch is None else batch
    if whole is None:
        raise PlanError("say batch=, how many samples a mini-batch has")
    asked: dict[str, Any] = {
        "batch": whole, "microbatches": microbatches, "recompute": recompute, "seconds": seconds, "seed": seed,
        "memory": one_for_each("memory", limits, len(places)),
        "speeds": None if speeds is None else one_for_each("speeds", speeds, len(places)),
        "grids": _grids(len(places), mesh, replicas), "largest": samples if costs is None else None,
    }  # fmt: skip
    check_numbers(asked)  # before minutes are spent on measuring
    if mesh is not None and link is None:
        link = measure_links(mesh).worst

    def measured() -> Profile:
        if costs is not None:
            return _given(costs, line)
        on_cpu = torch.device(places[0]).type == "cpu"
        return measure_costs(
            line, sample, device=None if elsewhere is not None else places[0], seconds=measure_seconds,
            optimizer=optimizer, loss_fn=loss_fn, targets=targets, hardware=elsewhere,
            threads=max(1, (os.cpu_count() or 1) // len(places)) if on_cpu and elsewhere is None else None,
        )  # fmt: skip

    def work() -> PlanResult:
        profile, between = measured(), link
        if between is None and costs is None and len(places) > 1:
            if elsewhere is not None:
                between = elsewhere.link(len(places))
            else:
                between = process_link(places[0], len(places)) if replicas else local_link(places[0], places[1])
        answer = plan_costs(profile if between is None else profile.with_link(between), **asked)
        where = None
        if mesh is None and elsewhere is None:
            cluster = Cluster(asked["speeds"] or (1.0,) * len(places), asked["memory"])
            chosen = cluster.chosen(answer.way.data * answer.way.pipe)
            where = tuple(places[i] for i in (*chosen, *(i for i in range(len(places)) if i not in chosen)))
        return replace(answer, layers=line.layers, plan=build_plan(line, answer.groups), devices=where)

    if mesh is None:
        return work()
    if mesh.rank != mesh.world_ranks[0] and costs is None:
        measured()  # for the company: in a step, too, processes share caches and memory with each other
    return _together(mesh, work, model)


def _elsewhere(hardware: str | Hardware, devices: Any, costs: object) -> Hardware:
    """Hardware that the devices are; there is no more to be said of them than how many."""
    if costs is not None:
        raise PlanError("costs are of the hardware that they were made for: give costs= or hardware=, not both")
    if type(devices) is not int:
        raise PlanError(f"devices={devices!r} must be how many of this hardware there are")
    return get_hardware(hardware)


def _grids(devices: int, mesh: Mesh | None, replicas: bool) -> list[tuple[int, int]]:
    """Numbers of replicas and ranks."""
    if mesh is not None:
        return [(mesh.data, mesh.pipe)]
    return device_grids(devices) if replicas else [(1, ranks) for ranks in range(1, devices + 1)]


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
) -> PlanResult:
    """The same from costs alone, without a model; ``link`` is the one between replicas."""
    check_numbers({"batch": batch, "devices": devices, "microbatches": microbatches, "seconds": seconds, "seed": seed})
    grids = grids if grids is not None else device_grids(devices or 1)
    most = max(data * pipe for data, pipe in grids)
    limits = one_for_each("memory", memory, most)
    speed = (1.0,) * most if speeds is None else one_for_each("speeds", speeds, most)
    layers = [layer.name for layer in profile.sizes[0].layers]
    fits = [(data, pipe) for data, pipe in grids if pipe <= len(layers)]
    if not fits:
        fewest = min(pipe for _, pipe in grids)
        raise PlanError(
            f"{fewest} devices asked for, but the model has only {len(layers)} layers to divide among them: take fewer "
            "ranks and more replicas, or cut it finer (cuts=)"
        )
    again = False if recompute is None and min(limits) == inf else recompute
    found = configurations(batch, fits, len(layers), microbatches=microbatches, largest=largest, recompute=again)
    if not found:
        raise PlanError(
            f"a mini-batch of {batch} samples cannot be divided among {min(d for d, _ in fits)} replicas, and the "
            f"model has only {len(layers)} layers for ranks: take fewer devices, or a larger batch="
        )
    cluster = Cluster(speed, limits, link)
    answer = search(lambda way: profile.at(way.samples), found, cluster, seconds=seconds, seed=seed, report=report)
    return PlanResult(answer.best, answer.others, tuple(layers))


def _given(costs: Profile | ModelCosts | str | Path, line: LayerChain) -> Profile:
    """Costs that were given, if they are those of the model."""
    if isinstance(costs, (str, Path)):
        costs = Profile.load(costs)
    if isinstance(costs, ModelCosts):
        costs = Profile((costs,))
    if not isinstance(costs, Profile):
        raise PlanError(f"costs must be a Profile, ModelCosts or the name of their file, got {type(costs).__name__}")
    names = [layer.name for layer in costs.sizes[0].layers]
    for i, (cost, layer) in enumerate(zip_longest(names, line.layers)):
        if cost != layer:
            raise PlanError(
                f"the costs are of {len(names)} layers ({names[0]} … {names[-1]}), but the model has "
                f"{len(line.layers)} ({line.layers[0]} … {line.layers[-1]}), and number {i} is {cost!r} here and "
                f"{layer!r} there: they are those of another model"
            )
    return costs


def _together(mesh: Mesh, work: Callable[[], PlanResult], model: nn.Module) -> PlanResult:
    """The first process of a mesh plans; the others get its answer, or its error."""
    _times[mesh.world_ranks] += 1
    key = f"penstock/plan/{mesh.world_ranks}/{_times[mesh.world_ranks]}"
    store = default_store()
    if mesh.rank != mesh.world_ranks[0]:
        store.wait([key], _PATIENCE)
        told = json.loads(store.get(key))
        if "error" in told:
            raise PlanError(f"rank {mesh.world_ranks[0]}, which plans for all, failed: {told['error']}")
        return PlanResult.from_json(told["planned"], model)
    try:
        planned = work()
    except Exception as error:
        store.set(key, json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(key, json.dumps({"planned": planned.to_json()}))
    return planned


# Plans for devices that are not here, of models that are numbers.


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
    """How many devices should share each layer, and how these groups should train a mini-batch of ``batch`` sequences.

    Where ``tensor`` is not said, one device and all powers of two up to a machine are looked at. What a group shares is
    also divided in its sequences, if ``sequence_parallel`` does not say otherwise. ``costs`` are further options of
    ``analytic_costs``.
    """
    model, hardware = parse_transformer(model) if isinstance(model, str) else model, get_hardware(hardware)
    limit = hardware.memory if memory is None else float(parse_bytes(memory))
    tries = [t for t in (1, 2, 4, 8, 16) if t <= hardware.devices_per_node] if tensor is None else [tensor]
    fit = [t for t in tries if not (devices % t or model.heads % t or model.width % t)]
    if not fit:
        raise PlanError(
            f"{', '.join(map(str, tries))} devices cannot share a layer: that must divide {devices} devices, "
            f"{model.heads} heads and an MLP of {model.width}"
        )
    layers = model.layers * (2 if half_layers else 1) + 2
    found = [
        way
        for t in fit
        for way in configurations(
            batch,
            device_grids(devices // t),
            layers,
            microbatches=microbatches,
            largest=64,
            recompute=recompute,
            tensor=t,
        )
    ]
    if not found:
        raise PlanError(f"{devices} devices are too many for {layers} layers and {batch} sequences")
    costs_at = {t: _costs_at(model, hardware, t, devices, half_layers, sequence_parallel, costs) for t in fit}
    answer = search(
        lambda way: costs_at[way.tensor](way.samples),
        found,
        Cluster.alike(devices, limit, hardware.link(devices)),
        seconds=seconds,
        seed=seed,
    )
    names = tuple(layer.name for layer in costs_at[answer.best.way.tensor](1).layers)
    return PlanResult(answer.best, answer.others, names)


def _costs_at(
    model: Transformer,
    hardware: Hardware,
    tensor: int,
    devices: int,
    half_layers: bool,
    sequence_parallel: bool | None,
    options: dict[str, Any],
) -> Callable[[int], ModelCosts]:
    @cache
    def costs_at(samples: int) -> ModelCosts:
        return analytic_costs(
            model,
            hardware,
            samples=samples,
            tensor=tensor,
            sequence_parallel=tensor > 1 if sequence_parallel is None else sequence_parallel,
            half_layers=half_layers,
            devices=devices,
            **options,
        )

    return costs_at
