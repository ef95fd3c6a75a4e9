"""``AutoConfig``: how many stages, and how large micro-batches, are the fastest for so many GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import torch

from penstock.compat.varuna.inputs import positive
from penstock.compat.varuna.profiler import COSTS, links_of
from penstock.errors import PlanError
from penstock.format import format_size, format_size_exact, format_table, format_time, parse_bytes
from penstock.profile.costs import Link, ModelCosts, Profile
from penstock.profile.planner.candidates import device_grids
from penstock.profile.planner.segments import Cuts, Ranks, Segments, edges_between, stage_costs, static_bytes
from penstock.schedule import one_f_one_b
from penstock.schedule.recompute import recompute_modes, with_recompute
from penstock.schedule.simulate import simulate
from penstock.split.partition import partition

__all__ = ["AutoConfig", "Choice"]


@dataclass(frozen=True)
class Choice:
    """One way to train: what a step takes, and the fullest GPU."""

    stages: int
    replicas: int
    chunk_size: int
    seconds: float
    memory: float


class AutoConfig:
    """What a step of ``Varuna`` takes in every way, by the costs that ``Profiler`` left in ``profile_folder``.

    The model is cut and ordered as ``Varuna`` does it: as many cut points for each stage, 1F1B, and all stages but the
    last recomputed. Micro-batches have the sizes that were measured. ``gpu_memory_capacity`` is in bytes, or
    ``"16GiB"``; by default what this machine's GPU has. Between machines of ``gpus_per_vm`` GPUs messages go over the
    links between them, where those were measured.
    """

    def __init__(
        self,
        num_gpus: int,
        gpus_per_vm: int,
        batch_size: int,
        profile_folder: str | Path,
        gpu_memory_capacity: Any = None,
        verbose: bool = False,
    ) -> None:
        self.num_gpus, self.batch_size = positive("num_gpus", num_gpus), positive("batch_size", batch_size)
        self.gpus_per_vm = positive("gpus_per_vm", gpus_per_vm)
        folder = Path(profile_folder)
        if not (folder / COSTS).is_file():
            raise PlanError(f"there is no profile in {str(folder)!r}: make it with Profiler(…).profile_all(sizes)")
        self.profile = Profile.load(folder / COSTS)
        self.links = links_of(folder)
        self.memory = _capacity(gpu_memory_capacity)
        if verbose:
            print(self)

    def get_min(self) -> tuple[int, int, float]:
        """The number of stages, the size of micro-batches and the seconds of a step of the fastest way."""
        best = min(self.choices, key=lambda choice: choice.seconds)
        return best.stages, best.chunk_size, best.seconds

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """All ways that keep the memory."""
        layers = len(self.profile.sizes[0].layers)
        grids = [
            (data, pipe) for data, pipe in device_grids(self.num_gpus) if pipe <= layers and data <= self.batch_size
        ]
        if not grids:
            raise PlanError(f"{self.num_gpus} GPUs are more than {layers} stages and {self.batch_size} samples can use")
        found = [self._choice(costs, data, pipe) for data, pipe in grids for costs in self.profile.sizes]
        fit = tuple(choice for choice in found if choice.memory <= self.memory)
        if not fit:
            least = min(choice.memory for choice in found)
            raise PlanError(
                f"nothing keeps the memory of {format_size_exact(self.memory)}: the least that it takes is "
                f"{format_size_exact(least)}; take more GPUs, or measure smaller micro-batches"
            )
        return fit

    def _choice(self, costs: ModelCosts, data: int, pipe: int) -> Choice:
        share = -(-self.batch_size // data)
        count = -(-share // costs.samples)
        link = self._link(costs)
        segments = Segments(self.profile.over(link).at(-(-share // count)))
        cuts = _even(segments, pipe)
        ranks = Ranks((1.0,) * pipe, (inf,) * pipe, (1.0,) * pipe)
        placement = range(pipe)
        modes = recompute_modes(dict.fromkeys(range(pipe - 1), "always"), pipe)
        schedule = with_recompute(one_f_one_b(pipe, count), modes)
        simulation = simulate(
            schedule, stage_costs(segments, ranks, placement, cuts), tuple(edges_between(segments, cuts))
        )
        begins = (0, *cuts[:-1])
        sizes = [segments.total("gradients", i, j) for i, j in zip(begins, cuts, strict=True)]
        summing = [link.summing(size, data) for size in sizes]
        held = static_bytes(segments, placement, cuts, pipe)
        return Choice(
            pipe,
            data,
            costs.samples,
            max(ends[-1] + sums for ends, sums in zip(simulation.ends, summing, strict=True)),
            max(stays + peak for stays, peak in zip(held, simulation.peak_memory, strict=True)),
        )

    def _link(self, costs: ModelCosts) -> Link:
        name = "inside" if self.num_gpus <= self.gpus_per_vm else "outside"
        return self.links.get(name) or next(iter(self.links.values()), costs.link)

    def __str__(self) -> str:
        rows = []
        for one in sorted(self.choices, key=lambda choice: choice.seconds):
            numbers = (str(number) for number in (one.stages, one.replicas, one.chunk_size))
            rows.append((*numbers, format_time(one.seconds), format_size(one.memory)))
        return "\n".join(
            format_table(["stages", "replicas", "chunk size", "step", "memory"], rows, right={0, 1, 2, 3, 4})
        )


def _even(segments: Segments, stages: int) -> Cuts:
    """The cuts of as many layers for each stage, as ``Varuna`` makes them."""
    n, costs = segments.n, segments.costs
    crossing = [0.0, *(costs.between(range(cut), range(cut, n)) for cut in range(1, n))]
    return tuple(accumulate(partition([1] * n, stages, crossing=crossing, memory=[], limits=None)))


def _capacity(given: Any) -> float:
    if given is not None:
        return float(parse_bytes(given))
    return float(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else inf
