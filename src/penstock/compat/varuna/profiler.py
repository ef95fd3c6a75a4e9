"""``Profiler`` measures a model between its cut points; ``AutoConfig`` finds the fastest configuration with that."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock import hooks
from penstock.compat.varuna.utils import check_model, device_of, positive
from penstock.format import format_size, format_size_exact, format_table, format_time
from penstock.profile import (
    Link,
    Links,
    ModelCosts,
    Profile,
    Ranks,
    Segments,
    device_grids,
    edges_between,
    measure_costs,
    measure_links,
    rank_static_bytes,
    stage_costs,
)
from penstock.schedule import build, recompute_modes, simulate, with_recompute

__all__ = ["AutoConfig", "Configuration", "Profiler", "load_links"]

COSTS, LINKS = "costs.json", "links.json"  # in the folder


class Profiler:
    """Measures a model with ``CutPoint``s, called as ``get_batch(size, device)`` says, and the links between ranks.

    In a process group all ranks measure together, as they will share their machines later; the first rank's results
    are written to ``out_folder``. With ``add_to_existing``, only sizes that are not there yet are measured.
    """

    def __init__(
        self,
        model: nn.Module,
        get_batch: Callable[..., Any],
        device: int | str | torch.device = -1,
        gpus_per_node: int | None = None,
        fp16: bool = False,
        out_folder: str | Path = "profiles",
        pstages_to_profile: Sequence[int] | None = None,
        from_cache: bool = True,
        add_to_existing: bool = False,
    ) -> None:
        check_model(model, fp16)
        if not callable(get_batch):
            raise ps.PlanError(f"get_batch must be a function of a size and a device, got {type(get_batch).__name__}")
        if pstages_to_profile is not None:
            raise ps.PlanError("all parts of the model are measured together: leave out pstages_to_profile")
        self.model, self.get_batch, self.fp16 = model, get_batch, fp16
        self.device = torch.device(device_of(device))
        self.gpus_per_node = None if gpus_per_node is None else positive("gpus_per_node", gpus_per_node)
        self.folder, self.add_to_existing = Path(out_folder), add_to_existing

    def profile_all(self, microbatch_sizes: Sequence[int], *, seconds: float = 5.0) -> Profile:
        """Measure micro-batches of these sizes for about ``seconds`` in total; return the folder's contents."""
        wanted = sorted({positive("a micro-batch size", size) for size in microbatch_sizes})
        if not wanted:
            raise ps.PlanError("give at least one size of micro-batches to measure")
        path = self.folder / COSTS
        known = Profile.load(path).sizes if self.add_to_existing and path.exists() else ()
        missing = [size for size in wanted if size not in [costs.samples for costs in known]]
        measured = self._measure(missing, seconds).sizes if missing else ()
        profile = Profile(tuple(sorted((*known, *measured), key=lambda costs: costs.samples)))
        links = self._measure_links()
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.save(path)
            text = json.dumps({name: asdict(link) for name, link in links.items()})
            (self.folder / LINKS).write_text(text, "utf-8")
        if dist.is_initialized():
            dist.barrier()
        return profile

    def _measure(self, sizes: Sequence[int], seconds: float) -> Profile:
        sample = self.get_batch(max(sizes), device="cpu")
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            chain = hooks.chain_of(self.model, sample=sample)
            return measure_costs(chain, sample, device=self.device, sizes=sizes, seconds=seconds)

    def _measure_links(self) -> dict[str, Link]:
        """The slowest links between neighbours on one machine ("inside") and on two ("outside")."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return {}
        pairs = measure_links(ps.Mesh(pipe=dist.get_world_size(), device=self.device)).pairs
        each = self.gpus_per_node or len(pairs) + 1
        found: dict[str, Link] = {}
        for name, crosses in (("inside", False), ("outside", True)):
            some = {pair: link for pair, link in pairs.items() if (pair[0] // each != pair[1] // each) is crosses}
            if some:
                found[name] = Links(some).worst
        return found


def load_links(folder: Path) -> dict[str, Link]:
    """The measured links by name, "inside" and "outside"; none if they were not measured."""
    path = folder / LINKS
    if not path.exists():
        return {}
    try:
        return {name: Link(**link) for name, link in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ps.PlanError(f"{path} is not what Profiler wrote: {error}") from error


@dataclass(frozen=True)
class Configuration:
    """A way to train, with the seconds of a step and the peak memory of a GPU."""

    stages: int
    replicas: int
    chunk_size: int
    seconds: float
    memory: float


class AutoConfig:
    """Predicts a step of ``Varuna`` in every configuration, by the costs that ``Profiler`` left in ``profile_folder``.

    The model is cut and scheduled as by ``Varuna``: equally many cut points per stage, 1F1B, all stages but the last
    recomputed. Micro-batches have the measured sizes. ``gpu_memory_capacity`` is in bytes, or text such as ``"16GiB"``;
    the default is that of this machine's GPU. More than ``gpus_per_vm`` GPUs use the links between machines.
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
            raise ps.PlanError(f"there is no profile in {str(folder)!r}: make it with Profiler(…).profile_all(sizes)")
        self.profile = Profile.load(folder / COSTS)
        self.links = load_links(folder)
        self.memory = inf
        if gpu_memory_capacity is not None:
            self.memory = float(hooks.parse_bytes(gpu_memory_capacity))
        elif torch.cuda.is_available():
            self.memory = float(torch.cuda.get_device_properties(0).total_memory)
        if verbose:
            print(self)

    def get_min(self) -> tuple[int, int, float]:
        """The number of stages, the micro-batch size and the seconds of a step of the fastest configuration."""
        best = min(self.choices, key=lambda choice: choice.seconds)
        return best.stages, best.chunk_size, best.seconds

    @cached_property
    def choices(self) -> tuple[Configuration, ...]:
        """All configurations that fit the memory."""
        layers = len(self.profile.sizes[0].layers)
        grids = [(d, p) for d, p in device_grids(self.num_gpus) if p <= layers and d <= self.batch_size]
        if not grids:
            limits = f"{layers} stages and {self.batch_size} samples"
            raise ps.PlanError(f"{self.num_gpus} GPUs are more than {limits} can use")
        every = [self._predict(costs, data, pipe) for data, pipe in grids for costs in self.profile.sizes]
        fitting = tuple(choice for choice in every if choice.memory <= self.memory)
        if not fitting:
            least = min(choice.memory for choice in every)
            raise ps.PlanError(
                f"no configuration fits into {format_size_exact(self.memory)}: the smallest needs "
                f"{format_size_exact(least)}; use more GPUs, or profile smaller micro-batches"
            )
        return fitting

    def _predict(self, costs: ModelCosts, data: int, pipe: int) -> Configuration:
        samples = -(-self.batch_size // data)
        count = -(-samples // costs.samples)
        name = "inside" if self.num_gpus <= self.gpus_per_vm else "outside"
        link = self.links.get(name) or next(iter(self.links.values()), costs.link)
        segments = Segments(self.profile.with_link(link).at(-(-samples // count)))
        cuts = even_cuts(segments, pipe)
        ranks = Ranks((1.0,) * pipe, (inf,) * pipe, (1.0,) * pipe)
        modes = recompute_modes(dict.fromkeys(range(pipe - 1), "always"), pipe)
        schedule = with_recompute(build("1f1b", pipe, count), modes)
        edges = tuple(edges_between(segments, cuts))
        simulation = simulate(schedule, stage_costs(segments, ranks, range(pipe), cuts), edges)
        gradients = [segments.total("gradients", i, j) for i, j in pairwise((0, *cuts))]
        static = rank_static_bytes(segments, range(pipe), cuts, pipe)
        return Configuration(
            pipe,
            data,
            costs.samples,
            max(
                ends[-1] + link.all_reduce_seconds(size, data)
                for ends, size in zip(simulation.ends, gradients, strict=True)
            ),
            max(held + peak for held, peak in zip(static, simulation.peak_memory, strict=True)),
        )

    def __str__(self) -> str:
        rows = []
        for one in sorted(self.choices, key=lambda choice: choice.seconds):
            numbers = (str(number) for number in (one.stages, one.replicas, one.chunk_size))
            rows.append((*numbers, format_time(one.seconds), format_size(one.memory)))
        heads = ["stages", "replicas", "chunk size", "step", "memory"]
        return "\n".join(format_table(heads, rows, right=range(5)))


def even_cuts(segments: Segments, stages: int) -> tuple[int, ...]:
    """The ends of stages with equally many layers, as ``Varuna`` makes them."""
    n, costs = segments.n, segments.costs
    crossing = [0.0, *(costs.bytes_between(range(cut), range(cut, n)) for cut in range(1, n))]
    return tuple(accumulate(hooks.partition([1] * n, stages, crossing=crossing, memory=[], limits=None)))
