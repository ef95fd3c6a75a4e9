"""``tpc``: the processes as a grid, and this one's groups in it.

setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)])     neighbours along the last are neighbours

             pipe 0       pipe 1
data 0    t0: 0  t1: 1    2  3          rank 5: data [1, 5], pipe [5, 7], tensor [4, 5], model [4, 5, 6, 7]
data 1        4      5    6  7
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from penstock.engine.functions import FunctionCrew
from penstock.errors import PlanError
from penstock.train.launch import device_of_process
from penstock.train.mesh import Mesh

__all__ = ["ProcessTopology", "is_using_pp", "test_comm", "torch_parallel_context", "tpc"]


class ProcessTopology:
    """The groups of this process, by mode: those of the grid, ``model`` (all but ``data``), ``global``, and MoE's."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[list[int]]] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._device: torch.device | None = None
        self._pipeline: FunctionCrew | None = None

    def setup_process_groups(self, config: Sequence[tuple[str, int]]) -> None:
        """Make the groups of ``[("data", 4), ("pipe", 2), ("tensor", 2)]``, in any order, of any of these and others.

        All processes of the world call it. A second call replaces the groups of the first.
        """
        sizes = dict(config)
        world = dist.get_world_size()
        if len(sizes) < len(config) or {"model", "global"} & set(sizes):
            raise PlanError(f"{config}: give every dimension once; 'model' and 'global' are made by themselves")
        if math.prod(sizes.values()) != world or any(size < 1 for size in sizes.values()):
            said = " × ".join(f"{name} {size}" for name, size in sizes.items())
            raise PlanError(f"{said} needs {math.prod(sizes.values())} processes, but the world has {world}")
        if self._pipeline is not None:
            self._pipeline.close()
        self._ranks, self._groups, self._pipeline = {}, {}, None
        names = list(sizes)
        grid = torch.arange(world).view(*sizes.values())
        for axis, name in enumerate(names):
            self._make(name, grid.movedim(axis, -1).reshape(-1, sizes[name]).tolist())
        replicas = grid.movedim(names.index("data"), 0) if "data" in sizes else grid
        self._make("model", replicas.reshape(sizes.get("data", 1), -1).tolist())
        self._make("global", [list(range(world))])

    def build_moe_groups(self, moe_dp_size: int | None = None, moe_ep_size: int | None = None) -> None:
        """Divide every data group into groups of experts, ``moe_ep``, and of their replicas, ``moe_dp``."""
        size = self.get_dp_size()
        dp = moe_dp_size or (size // moe_ep_size if moe_ep_size else size)
        ep = moe_ep_size or size // dp
        if dp * ep != size:
            raise PlanError(f"moe_dp_size {dp} × moe_ep_size {ep} must be the size of a data group, {size}")
        grids = [torch.tensor(ranks).view(dp, ep) for ranks in self.all_ranks("data")]
        self._make("moe_dp", [ranks for grid in grids for ranks in grid.T.tolist()])
        self._make("moe_ep", [ranks for grid in grids for ranks in grid.tolist()])

    def _make(self, mode: str, everyone: list[list[int]]) -> None:
        """All groups of one mode: every process makes all of them."""
        self._ranks[mode] = everyone
        for ranks in everyone:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._groups[mode] = group

    # ── any group ────────────────────────────────────────────────────────────────────────────────────────────

    def is_mode_inited(self, mode: str) -> bool:
        return mode in self._groups

    def get_group(self, mode: str) -> dist.ProcessGroup:
        """This process's group of a mode."""
        assert mode in self._groups, f"{mode} is not initialized!"
        return self._groups[mode]

    def all_ranks(self, mode: str) -> list[list[int]]:
        """The ranks of all groups of a mode."""
        self.get_group(mode)
        return self._ranks[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        """The ranks, in the world, of this process's group."""
        return next(ranks for ranks in self.all_ranks(mode) if dist.get_rank() in ranks)

    def get_group_rank(self, mode: str) -> int:
        return self.get_ranks_in_group(mode).index(dist.get_rank())

    def get_group_size(self, mode: str) -> int:
        return len(self.get_ranks_in_group(mode))

    def is_first_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    def is_first_group(self, mode: str) -> bool:
        """Whether this process is in the first of a mode's groups."""
        return dist.get_rank() in self.all_ranks(mode)[0]

    def get_prev_global_rank(self, mode: str = "pipe") -> int:
        """The rank, in the world, before this one in its group; before the first comes the last."""
        return self.get_ranks_in_group(mode)[self.get_group_rank(mode) - 1]

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        return self.get_ranks_in_group(mode)[(self.get_group_rank(mode) + 1) % self.get_group_size(mode)]

    # ── one group each ───────────────────────────────────────────────────────────────────────────────────────

    def get_tp_rank(self) -> int:
        return self.get_group_rank("tensor")

    def get_pp_rank(self) -> int:
        return self.get_group_rank("pipe")

    def get_dp_rank(self) -> int:
        return self.get_group_rank("data")

    def get_mp_rank(self) -> int:
        return self.get_group_rank("model")

    def get_tp_size(self) -> int:
        return self.get_group_size("tensor")

    def get_pp_size(self) -> int:
        return self.get_group_size("pipe")

    def get_dp_size(self) -> int:
        return self.get_group_size("data")

    def get_mp_size(self) -> int:
        return self.get_group_size("model")

    def is_first_in_pipeline_group(self) -> bool:
        return self.is_first_in_group("pipe")

    def is_last_in_pipeline_group(self) -> bool:
        return self.is_last_in_group("pipe")

    def is_first_in_tensor_group(self) -> bool:
        return self.is_first_in_group("tensor")

    def is_last_in_tensor_group(self) -> bool:
        return self.is_last_in_group("tensor")

    def is_first_in_data_group(self) -> bool:
        return self.is_first_in_group("data")

    def is_last_in_data_group(self) -> bool:
        return self.is_last_in_group("data")

    def is_first_in_model_group(self) -> bool:
        return self.is_first_in_group("model")

    def is_last_in_model_group(self) -> bool:
        return self.is_last_in_group("model")

    # ── Penstock's ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def device(self) -> torch.device:
        """What this process computes on, unless it is set: its GPU if it was started for GPUs, else the CPU."""
        return device_of_process(None, False) if self._device is None else self._device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        wanted = None if device is None else torch.device(device)
        if wanted is not None and wanted.type == "cuda" and wanted.index is None:
            wanted = torch.device("cuda", torch.cuda.current_device())
        if wanted != self._device and self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
        self._device = wanted

    def pipeline(self) -> FunctionCrew:
        """What runs this process's pipeline: made once for the groups, and anew after a failure."""
        if self._pipeline is None or self._pipeline.ended is not None:
            ranks = self.get_ranks_in_group("pipe")
            mesh = Mesh(data=1, pipe=len(ranks), tensor=1, group=ranks, device=self.device)
            self._pipeline = FunctionCrew(mesh)
        return self._pipeline


tpc = torch_parallel_context = ProcessTopology()


def is_using_pp() -> bool:
    """Whether there are pipeline groups."""
    return tpc.is_mode_inited("pipe")


def test_comm() -> None:
    """Add up ones in every group, and raise if that is not its size. All processes call it."""
    for mode in tpc._groups:
        total = torch.ones((), device=tpc.device)
        dist.all_reduce(total, group=tpc.get_group(mode))
        if int(total) != tpc.get_group_size(mode):
            raise RuntimeError(f"{int(total)} of the {tpc.get_group_size(mode)} ranks of the {mode} group answered")


test_comm.__test__ = False  # type: ignore[attr-defined]  # it is no test of pytest's
