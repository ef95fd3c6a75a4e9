"""The processes of a training run as a grid, and this one's place in it.

Mesh(data=2, pipe=4), eight processes          a row is one pipeline, a column the replicas of one part of it

          pipe 0   pipe 1   pipe 2   pipe 3
data 0       0        1        2        3
data 1       4        5        6        7
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import PlanError
from penstock.suggest import did_you_mean
from penstock.train.launch import device_of_process, init, is_initialized

__all__ = ["DIMENSIONS", "Mesh"]

DIMENSIONS = ("data", "pipe", "tensor")


class Mesh:
    """``Mesh(data=2, pipe=4)``: eight processes, two replicas of a pipeline of four ranks.

    The dimensions are ``data``, ``pipe`` and ``tensor``, in this order or any other: neighbours along the last one are
    neighbours in the world. One that is not named has size 1, and ``-1`` takes what the others leave of the world;
    where ``pipe`` is not named, it does. Uses the process group that there is, or starts one as ``penstock.init``
    does; ``group``, a process group or a list of ranks, is for some of its processes alone.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        **sizes: int,
    ) -> None:
        for name in sizes:
            _check_name(name)
        made = not is_initialized()
        if made:
            init(device)
        if group is None:
            group = range(dist.get_world_size())
        if not isinstance(group, (dist.ProcessGroup, Sequence)):  # what torch gives to those outside of it
            raise PlanError(f"rank {dist.get_rank()} is not in the group that was given: only its members have a mesh")
        world = tuple(group if isinstance(group, Sequence) else dist.get_process_group_ranks(group))
        self._place(_resolve(sizes, len(world)), world)
        self._settle(device_of_process(device, made))
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        data: str = "data",
        pipe: str = "pipe",
        tensor: str = "tensor",
        device: torch.device | str | None = None,
    ) -> Mesh:
        """The same grid as a ``DeviceMesh``, whose dimensions may have other names: ``pipe="pp"``."""
        known = {data: "data", pipe: "pipe", tensor: "tensor"}
        names = device_mesh.mesh_dim_names or ()
        strange = [name for name in names if name not in known]
        if strange or len(names) != device_mesh.mesh.ndim:
            raise PlanError(
                f"the dimensions of the DeviceMesh are named {tuple(names) or 'nothing'}: say which is which, as in "
                "Mesh.from_device_mesh(mesh, data='dp', pipe='pp')"
            )
        mesh = cls.__new__(cls)
        sizes = {known[name]: size for name, size in zip(names, device_mesh.mesh.shape, strict=True)}
        others = {name: 1 for name in DIMENSIONS if name not in sizes}
        mesh._place({**others, **sizes}, device_mesh.mesh.flatten().tolist())
        mesh._settle(device_of_process(device or (None if device_mesh.device_type == "cuda" else "cpu"), True))
        mesh._device_mesh = device_mesh if set(names) == set(DIMENSIONS) else None
        return mesh

    def _settle(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _place(self, sizes: Mapping[str, int], world: Sequence[int]) -> None:
        self.sizes = dict(sizes)
        self.world_ranks = tuple(world)  # in the order of the grid
        self.rank = dist.get_rank()  # in the world
        if self.rank not in self.world_ranks:
            raise PlanError(f"rank {self.rank} is not among the mesh's ranks {list(self.world_ranks)}")
        grid = torch.tensor(self.world_ranks).view(*self.sizes.values())
        (here,) = (grid == self.rank).nonzero().tolist()
        self._lines: dict[str, tuple[int, ...]] = {}
        for axis, name in enumerate(self.sizes):
            at = tuple(slice(None) if i == axis else k for i, k in enumerate(here))
            self._lines[name] = tuple(grid[at].tolist())
        self.data, self.pipe, self.tensor = (self.sizes[name] for name in DIMENSIONS)
        self.data_rank, self.pipe_rank, self.tensor_rank = (self._lines[n].index(self.rank) for n in DIMENSIONS)

    # ── this process's place ─────────────────────────────────────────────────────────────────────────────────

    def ranks(self, dimension: str) -> tuple[int, ...]:
        """The ranks, in the world, of the processes that differ from this one along one dimension alone; it is one."""
        _check_name(dimension)
        return self._lines[dimension]

    @property
    def world(self) -> int:
        """How many processes the mesh has."""
        return len(self.world_ranks)

    @property
    def pipe_ranks(self) -> tuple[int, ...]:
        """The ranks, in the world, of this process's pipeline, from the first on."""
        return self._lines["pipe"]

    @property
    def is_first(self) -> bool:
        return self.pipe_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pipe_rank == self.pipe - 1

    @property
    def first_rank(self) -> int:
        """The rank, in the world, of the pipeline's first process."""
        return self.pipe_ranks[0]

    @property
    def last_rank(self) -> int:
        return self.pipe_ranks[-1]

    @property
    def prev_rank(self) -> int | None:
        """The rank, in the world, of the process before this one in the pipeline; None for the first."""
        return None if self.is_first else self.pipe_ranks[self.pipe_rank - 1]

    @property
    def next_rank(self) -> int | None:
        return None if self.is_last else self.pipe_ranks[self.pipe_rank + 1]

    # ── for torch ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def device_mesh(self) -> DeviceMesh:
        """The grid as torch's ``DeviceMesh``; made when first asked for, which all its processes must do together."""
        if self._device_mesh is None:
            grid = torch.tensor(self.world_ranks, dtype=torch.int).view(*self.sizes.values())
            names = tuple(self.sizes)
            if self.world == dist.get_world_size():
                self._device_mesh = DeviceMesh(self.device.type, grid, mesh_dim_names=names)
            else:  # torch would number its groups differently in the processes outside of it
                lines = [_line_group(self._lines[name]) for name in names]
                self._device_mesh = DeviceMesh.from_group(lines, self.device.type, grid, mesh_dim_names=names)
        return self._device_mesh

    def __getitem__(self, dimensions: str | tuple[str, ...]) -> DeviceMesh:
        """``mesh["data"]``: this process's line of the ``DeviceMesh``, as ``fully_shard`` and DTensor take it."""
        for name in (dimensions,) if isinstance(dimensions, str) else dimensions:
            _check_name(name)
        return self.device_mesh[dimensions]

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1 or name == "pipe")
        which = "the pipeline" if self.data == 1 else f"pipeline {self.data_rank}"
        return f"Mesh({named}), rank {self.rank}: rank {self.pipe_rank} of {which}, on {self.device}"


def _check_name(name: str) -> None:
    if name not in DIMENSIONS:
        hint = did_you_mean(name, DIMENSIONS, otherwise=f": the dimensions are {', '.join(DIMENSIONS)}")
        raise PlanError(f"a mesh has no dimension {name!r}{hint}")


def _line_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _resolve(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """All three sizes, in the order in which they were named; those that were not in their usual place, or before."""
    wanted = {name: 1 for name in DIMENSIONS if name not in sizes}
    if "pipe" in wanted and -1 not in sizes.values():
        wanted["pipe"] = -1
    said = [f"{name}={size}" for name, size in sizes.items()]
    for name in wanted:
        told = os.environ.get(f"PENSTOCK_{name.upper()}")
        if told is not None:
            if not told.isascii() or not told.isdigit():
                raise PlanError(f"PENSTOCK_{name.upper()} must be a number of processes, got {told!r}")
            wanted[name] = int(told)
            said.append(f"{name}={told} by 'penstock run'")
    wanted.update(sizes)
    if list(sizes) == [name for name in DIMENSIONS if name in sizes]:
        wanted = {name: wanted[name] for name in DIMENSIONS}
    return _fill_open_size(wanted, f"Mesh({', '.join(said)})", world)


def _fill_open_size(wanted: dict[str, int], said: str, world: int) -> dict[str, int]:
    """With what is left of the world in the place of -1."""
    for name, size in wanted.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0:
            raise PlanError(f"{said}: {name} must be a number of processes, or -1 for what is left, got {size!r}")
    open_ = [name for name, size in wanted.items() if size == -1]
    if len(open_) > 1:
        raise PlanError(f"{said}: only one size can be -1, not both {' and '.join(open_)}")
    known = math.prod(size for size in wanted.values() if size != -1)
    if open_ and world % known == 0:
        wanted[open_[0]] = world // known
    elif open_ or known != world:
        product = " × ".join(str(size) for size in wanted.values() if size not in (1, -1)) or "1"
        needs = f"a multiple of {known}" if open_ else str(known)
        raise PlanError(
            f"{said} needs {needs} processes ({product}), but the world has {world}: start as many, or change the mesh"
        )
    return wanted
