"""``Profiler``: what the model costs between its cut points, kept in a folder for ``AutoConfig``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from penstock.compat.varuna.inputs import check_model, device_of, positive
from penstock.errors import PlanError
from penstock.profile.costs import Link, Profile
from penstock.profile.links import Links, measure_links
from penstock.profile.measure import measure_costs
from penstock.split import chain_of
from penstock.train.launch import is_initialized
from penstock.train.mesh import Mesh

__all__ = ["COSTS", "Profiler", "links_of"]

COSTS, LINKS = "costs.json", "links.json"  # in the folder


class Profiler:
    """Measures a model with ``CutPoint``s, called as ``get_batch(size, device)`` says, and the links between ranks.

    Where there is a process group all ranks do it together, as they will share their machines later; what the first one
    finds is kept in ``out_folder``. With ``add_to_existing``, sizes are measured that are not there yet.
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
            raise PlanError(f"get_batch must be a function of a size and a device, got {type(get_batch).__name__}")
        if pstages_to_profile is not None:
            raise PlanError("all parts of the model are measured together: leave out pstages_to_profile")
        self.model, self.get_batch, self.fp16 = model, get_batch, fp16
        self.device = torch.device(device_of(device, -1))
        self.gpus_per_node = None if gpus_per_node is None else positive("gpus_per_node", gpus_per_node)
        self.folder, self.add_to_existing = Path(out_folder), add_to_existing

    def profile_all(self, microbatch_sizes: Sequence[int], *, seconds: float = 5.0) -> Profile:
        """Measure micro-batches of these sizes, for about ``seconds`` altogether; what the folder has then."""
        wanted = sorted({positive("a micro-batch size", size) for size in microbatch_sizes})
        if not wanted:
            raise PlanError("give at least one size of micro-batches to measure")
        path = self.folder / COSTS
        known = Profile.load(path).sizes if self.add_to_existing and path.exists() else ()
        missing = [size for size in wanted if size not in [costs.samples for costs in known]]
        found = (*known, *(self._measure(missing, seconds).sizes if missing else ()))
        profile = Profile(tuple(sorted(found, key=lambda costs: costs.samples)))
        links = self._links()
        if not is_initialized() or dist.get_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            profile.save(path)
            told = json.dumps({name: asdict(link) for name, link in links.items()})
            (self.folder / LINKS).write_text(told, "utf-8")
        if is_initialized():
            dist.barrier()
        return profile

    def _measure(self, sizes: Sequence[int], seconds: float) -> Profile:
        sample = self.get_batch(max(sizes), device="cpu")
        with torch.autocast(self.device.type, torch.float16, enabled=self.fp16):
            line = chain_of(self.model, sample=sample)
            return measure_costs(line, sample, device=self.device, sizes=sizes, seconds=seconds)

    def _links(self) -> dict[str, Link]:
        """The worst ones between neighbours of one machine, and of two."""
        if not is_initialized() or dist.get_world_size() == 1:
            return {}
        pairs = measure_links(Mesh(pipe=dist.get_world_size(), device=self.device)).pairs
        each = self.gpus_per_node or len(pairs) + 1
        found: dict[str, Link] = {}
        for name, apart in (("inside", False), ("outside", True)):
            some = {pair: link for pair, link in pairs.items() if (pair[0] // each != pair[1] // each) is apart}
            if some:
                found[name] = Links(some).worst
        return found


def links_of(folder: Path) -> dict[str, Link]:
    """The links that were measured, if any: inside of a machine, and between two."""
    path = folder / LINKS
    if not path.exists():
        return {}
    try:
        return {name: Link(**link) for name, link in json.loads(path.read_text("utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise PlanError(f"{path} is not what Profiler wrote: {error}") from error
