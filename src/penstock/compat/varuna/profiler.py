"""``Profiler`` measures a model between its cut points; ``AutoConfig`` predicts the fastest configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock import hooks
from penstock import profile as profiling
from penstock.compat.varuna.varuna import check_model, device_of, positive
from penstock.schedule import build, recompute_modes, simulate, with_recompute

__all__ = ["AutoConfig", "Profiler"]

COSTS = "costs.json"  # in the folder


class Profiler:
    """Measures a model with ``CutPoint``s on batches of ``get_batch(size, device)``, and the links between ranks.

    In a process group all ranks measure at the same time, because they share their machines in training. The results
    of the first rank, with the slowest link, are written to ``out_folder``. With ``add_to_existing``, only missing
    sizes are measured. ``gpus_per_node`` and ``from_cache`` have no effect.
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
        if pstages_to_profile is not None:
            raise ps.PlanError("all parts of the model are measured together: leave out pstages_to_profile")
        self.model, self.get_batch, self.fp16 = model, get_batch, fp16
        self.device = torch.device(device_of(device))
        self.folder, self.add_to_existing = Path(out_folder), add_to_existing

    def profile_all(self, microbatch_sizes: Sequence[int], *, seconds: float = 5.0) -> profiling.Profile:
        """Measure micro-batches of these sizes for about ``seconds`` in total; return the folder's contents."""
        path = self.folder / COSTS
        known = profiling.Profile.load(path).sizes if self.add_to_existing and path.exists() else ()
        wanted = {positive("a micro-batch size", size) for size in microbatch_sizes}
        missing = sorted(wanted - {costs.samples for costs in known})
        measured: tuple[profiling.ModelCosts, ...] = ()
        if missing:
            sample = self.get_batch(max(missing), device="cpu")
            with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
                chain = hooks.chain_of(self.model, sample=sample)
                options: dict[str, Any] = {"device": self.device, "sizes": missing, "seconds": seconds}
                measured = profiling.measure_costs(chain, sample, **options).sizes
        profile = profiling.Profile(tuple(sorted((*known, *measured), key=lambda costs: costs.samples)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            mesh = ps.Mesh(pipe=dist.get_world_size(), device=self.device)
            profile = profile.with_link(profiling.measure_links(mesh).worst)
        if not dist.is_initialized() or dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.save(path)
        if dist.is_initialized():
            dist.barrier()
        return profile


class AutoConfig:
    """Predicts a step of ``Varuna`` in every configuration, from the costs of ``Profiler`` in ``profile_folder``.

    The model is cut and scheduled as in ``Varuna``: the same number of cut points per stage, 1F1B, and recomputes of
    all stages but the last. Micro-batches have the measured sizes. ``gpu_memory_capacity`` is in bytes, or text such as
    ``"16GiB"``; the default is the memory of this machine's GPU. ``gpus_per_vm`` and ``verbose`` have no effect.
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
        self.profile = profiling.Profile.load(Path(profile_folder) / COSTS)
        self.memory = inf
        if gpu_memory_capacity is not None:
            self.memory = float(hooks.parse_bytes(gpu_memory_capacity))
        elif torch.cuda.is_available():
            self.memory = float(torch.cuda.get_device_properties(0).total_memory)

    def get_min(self) -> tuple[int, int, float]:
        """The number of stages, the micro-batch size and the seconds of a step of the fastest configuration."""
        found = []
        for data, pipe in profiling.device_grids(self.num_gpus):
            if pipe <= len(self.profile.sizes[0].layers) and data <= self.batch_size:
                for costs in self.profile.sizes:
                    seconds, memory = self.predict(costs, data, pipe)
                    if memory <= self.memory:
                        found.append((seconds, pipe, costs.samples))
        if not found:
            limit = f"{self.memory:.0f} bytes: use more GPUs, or profile smaller micro-batches"
            raise ps.PlanError(f"{self.num_gpus} GPUs have no configuration that fits into {limit}")
        seconds, stages, size = min(found)
        return stages, size, seconds

    def predict(self, costs: profiling.ModelCosts, data: int, pipe: int) -> tuple[float, float]:
        """The seconds of a step with ``data`` replicas of ``pipe`` stages, and the peak memory of a GPU."""
        samples = -(-self.batch_size // data)
        count = -(-samples // costs.samples)
        segments = profiling.Segments(self.profile.at(-(-samples // count)))
        n = segments.n  # as in Varuna, stages have the same number of layers
        crossing = [0.0, *(costs.bytes_between(range(cut), range(cut, n)) for cut in range(1, n))]
        cuts = tuple(accumulate(hooks.partition([1] * n, pipe, crossing=crossing)))
        ranks = profiling.Ranks((1.0,) * pipe, (inf,) * pipe, (1.0,) * pipe)
        modes = recompute_modes(dict.fromkeys(range(pipe - 1), "always"), pipe)
        schedule = with_recompute(build("1f1b", pipe, count), modes)
        edges = tuple(profiling.edges_between(segments, cuts))
        simulation = simulate(schedule, profiling.stage_costs(segments, ranks, range(pipe), cuts), edges)
        gradients = [segments.total("gradients", i, j) for i, j in pairwise((0, *cuts))]
        all_reduce = [costs.link.all_reduce_seconds(size, data) for size in gradients]
        static = profiling.rank_static_bytes(segments, range(pipe), cuts, pipe)
        seconds = max(ends[-1] + extra for ends, extra in zip(simulation.ends, all_reduce, strict=True))
        memory = max(held + peak for held, peak in zip(static, simulation.peak_memory, strict=True))
        return seconds, memory
