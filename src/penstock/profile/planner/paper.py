"""Plans for devices that are not here, of models that are numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from penstock.errors import PlanError
from penstock.profile.costs import ModelCosts
from penstock.profile.described import Transformer, describe
from penstock.profile.hardware import Hardware, hardware_of
from penstock.profile.paper import costs_on_paper
from penstock.profile.planner.planned import Planned
from penstock.profile.planner.search import search
from penstock.profile.planner.ways import Cluster, grids_of, ways
from penstock.split.weights import bytes_of

__all__ = ["plan_on_paper"]


def plan_on_paper(
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
) -> Planned:
    """How many devices should share each layer, and how these groups should train a mini-batch of ``batch`` sequences.

    Where ``tensor`` is not said, one device and all powers of two up to a machine are looked at. What a group shares is
    also divided in its sequences, if ``sequence_parallel`` does not say otherwise. ``costs`` are further options of
    ``costs_on_paper``.
    """
    model, hardware = describe(model) if isinstance(model, str) else model, hardware_of(hardware)
    limit = hardware.memory if memory is None else float(bytes_of(memory))
    tries = [t for t in (1, 2, 4, 8, 16) if t <= hardware.per_machine] if tensor is None else [tensor]
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
        for way in ways(
            batch, grids_of(devices // t), layers, microbatches=microbatches, largest=64, recompute=recompute, tensor=t
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
    return Planned(answer.best, answer.others, names)


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
        return costs_on_paper(
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
