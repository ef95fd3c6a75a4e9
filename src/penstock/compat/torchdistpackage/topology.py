"""``tpc``: the process groups of a grid of ranks.

setup_process_groups([("data", 2), ("pipe", 2), ("tensor", 2)])     ranks are adjacent along the last dimension

             pipe 0       pipe 1
data 0    t0: 0  t1: 1    2  3          rank 5: data [1, 5], pipe [5, 7], tensor [4, 5], model [4, 5, 6, 7]
data 1        4      5    6  7
"""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import penstock as ps

__all__ = [
    *("ProcessTopology", "fix_rand", "get_mp_ckpt_suffix", "is_using_pp", "setup_distributed"),
    *("setup_node_groups", "test_comm", "torch_parallel_context", "tpc"),
]


class ProcessTopology:
    """The groups of this process by mode: the grid's dimensions, ``model`` (all but ``data``), ``global``, MoE's."""

    def __init__(self) -> None:
        self._ranks: dict[str, list[list[int]]] = {}
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._device: torch.device | None = None
        self.pipeline: Any = None  # the pipeline of this process's pipe group, created by forward_backward
        self.stage: Any = None  # the stage of this process

    def setup_process_groups(self, config: Sequence[tuple[str, float]]) -> None:
        """Create the groups of ``[("data", 4), ("pipe", 2), ("tensor", 2)]``, with any dimensions in any order.

        Every process of the world calls it. A second call replaces the groups of the first.
        """
        sizes = {name: int(size) for name, size in config}  # a quotient such as world / 2 is a float
        world, product = dist.get_world_size(), math.prod(size for _, size in config)
        fits = product == world == math.prod(sizes.values())
        if not fits or len(sizes) < len(config) or {"model", "global"} & set(sizes):
            raise ps.PlanError(
                f"{config} needs {product} processes, but the world has {world}; name every dimension once, with a "
                "whole number, and none 'model' or 'global', which are created automatically"
            )
        self.close_pipeline()
        self._ranks, self._groups = {}, {}
        grid = torch.arange(world).view(*sizes.values())
        for axis, name in enumerate(sizes):
            self._new_groups(name, grid.movedim(axis, -1).reshape(-1, sizes[name]).tolist())
        replicas = grid.movedim(list(sizes).index("data"), 0) if "data" in sizes else grid
        self._new_groups("model", replicas.reshape(sizes.get("data", 1), -1).tolist())
        self._new_groups("global", [list(range(world))])

    def build_moe_groups(self, moe_dp_size: int | None = None, moe_ep_size: int | None = None) -> None:
        """Divide every data group into groups of experts, ``moe_ep``, and of their replicas, ``moe_dp``."""
        size = self.get_group_size("data")
        dp = moe_dp_size or (size // moe_ep_size if moe_ep_size else size)
        ep = moe_ep_size or size // dp
        if dp * ep != size:
            raise ps.PlanError(f"moe_dp_size {dp} × moe_ep_size {ep} must be the size of a data group, {size}")
        grids = [torch.tensor(ranks).view(dp, ep) for ranks in self.all_ranks("data")]
        self._new_groups("moe_dp", [ranks for grid in grids for ranks in grid.T.tolist()])
        self._new_groups("moe_ep", [ranks for grid in grids for ranks in grid.tolist()])

    def _new_groups(self, mode: str, all_ranks: list[list[int]]) -> None:
        self._ranks[mode] = all_ranks
        self._groups[mode], _ = dist.new_subgroups_by_enumeration(all_ranks)  # type: ignore[no-untyped-call]

    def is_mode_inited(self, mode: str) -> bool:
        return mode in self._groups

    def get_group(self, mode: str) -> dist.ProcessGroup:
        assert mode in self._groups, f"{mode} is not initialized!"
        return self._groups[mode]

    def all_ranks(self, mode: str) -> list[list[int]]:
        """The global ranks of all groups of a mode."""
        self.get_group(mode)
        return self._ranks[mode]

    def get_ranks_in_group(self, mode: str) -> list[int]:
        return dist.get_process_group_ranks(self.get_group(mode))

    def get_group_rank(self, mode: str) -> int:
        return self.get_group(mode).rank()

    def get_group_size(self, mode: str) -> int:
        return self.get_group(mode).size()

    def is_first_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == 0

    def is_last_in_group(self, mode: str) -> bool:
        return self.get_group_rank(mode) == self.get_group_size(mode) - 1

    def is_first_group(self, mode: str) -> bool:
        return dist.get_rank() in self.all_ranks(mode)[0]

    def get_prev_global_rank(self, mode: str = "pipe") -> int:
        """The global rank before this one in its group, cyclically."""
        return self.get_ranks_in_group(mode)[self.get_group_rank(mode) - 1]

    def get_next_global_rank(self, mode: str = "pipe") -> int:
        return self.get_ranks_in_group(mode)[(self.get_group_rank(mode) + 1) % self.get_group_size(mode)]

    def __getattr__(self, name: str) -> Callable[[], Any]:
        """The methods for one mode: ``get_pp_rank()``, ``is_first_in_pipeline_group()`` and so on."""
        modes = ("tp", "tensor", "tensor"), ("pp", "pipeline", "pipe"), ("dp", "data", "data"), ("mp", "model", "model")
        for short, long, mode in modes:
            forms: dict[str, Callable[[str], Any]] = {
                f"get_{short}_rank": self.get_group_rank,
                f"get_{short}_size": self.get_group_size,
                f"is_first_in_{long}_group": self.is_first_in_group,
                f"is_last_in_{long}_group": self.is_last_in_group,
            }
            if name in forms:
                return lambda: forms[name](mode)
        raise AttributeError(f"tpc has no attribute {name!r}")

    @property
    def device(self) -> torch.device:
        """The device of this process: the device that was set, or that of ``ps.init``."""
        return ps.init() if self._device is None else self._device

    @device.setter
    def device(self, device: torch.device | str | None) -> None:
        new = None if device is None else torch.device(device)
        if new is not None and new.type == "cuda" and new.index is None:
            new = torch.device("cuda", torch.cuda.current_device())
        if new != self._device:
            self.close_pipeline()
        self._device = new

    def close_pipeline(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
        self.pipeline = None


tpc = torch_parallel_context = ProcessTopology()


def is_using_pp() -> bool:
    return tpc.is_mode_inited("pipe")


def test_comm() -> None:
    """All-reduce ones in every group and check the sums. Every process calls it."""
    for mode in tpc._groups:
        total = torch.ones((), device=tpc.device)
        dist.all_reduce(total, group=tpc.get_group(mode))
        if int(total) != tpc.get_group_size(mode):
            raise RuntimeError(f"{int(total)} of the {tpc.get_group_size(mode)} ranks of the {mode} group answered")


test_comm.__test__ = False  # type: ignore[attr-defined]  # not a pytest test


def setup_distributed(backend: str = "nccl", port: int | None = None) -> tuple[int, int, str | None, str | None]:
    """Initialise the process group from SLURM's or torchrun's variables; return rank, world size, port and address.

    ``"nccl"`` is replaced by gloo without one GPU per process. ``port`` is for SLURM. With ``"gloo"`` stages run on the
    CPU unless ``tpc.device`` is set.
    """
    if port is not None and not dist.is_initialized():
        os.environ.setdefault("MASTER_PORT", str(port))
    device = None if torch.cuda.is_available() and backend != "gloo" else "cpu"
    ps.init(device, backend=None if backend == "nccl" else backend)
    return dist.get_rank(), dist.get_world_size(), os.environ.get("MASTER_PORT"), os.environ.get("MASTER_ADDR")


def setup_node_groups(num_per_node: int = 8) -> dist.ProcessGroup:
    """The group of this process's machine, where each machine has ``num_per_node`` consecutive ranks."""
    world = dist.get_world_size()
    nodes = [list(range(first, min(first + num_per_node, world))) for first in range(0, world, num_per_node)]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(nodes)[0]  # type: ignore[no-untyped-call]
    return group


def fix_rand(rank: int = 0, seed: int = 1024) -> None:
    """Seed all generators, differently on each rank, and make cuDNN deterministic."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + rank)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def get_mp_ckpt_suffix() -> str:
    """The suffix of this rank's checkpoint file: ``_tp_0_pp_1.pth``, with the initialised modes."""
    modes = [("tp", "tensor"), ("pp", "pipe")]
    parts = [f"_{short}_{tpc.get_group_rank(mode)}" for short, mode in modes if tpc.is_mode_inited(mode)]
    return "".join(parts) + ".pth"
