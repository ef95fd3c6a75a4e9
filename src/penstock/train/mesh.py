"""``ps.Mesh``: the processes of a training run as a grid, and this process's coordinates.

Mesh(data=2, pipe=4), eight processes: a row is one pipeline, a column the replicas of one of its ranks

          pipe 0   pipe 1   pipe 2   pipe 3
data 0       0        1        2        3
data 1       4        5        6        7
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock._torch import default_store
from penstock.engine.failure.sockets import publish_process
from penstock.errors import PlanError
from penstock.train.launch import init, use_device

DIMENSIONS = ("data", "pipe", "tensor")


class Mesh:
    """``Mesh(data=2, pipe=4)``: eight processes, two replicas of a pipeline of four ranks.

    The dimensions are ``data``, ``pipe`` and ``tensor``, in any order; ranks are consecutive along the last one. An
    omitted dimension has size 1. ``-1`` stands for the world size divided by the other sizes, and is the default of
    ``pipe``. The mesh uses the default process group, or calls ``ps.init`` to create it. ``group``, a process group or
    a list of ranks, restricts the mesh to some processes.
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
        made = not dist.is_initialized()
        if made:
            init(device)
        if group is None:
            group = range(dist.get_world_size())
        if not isinstance(group, (dist.ProcessGroup, Sequence)):  # GroupMember.NON_GROUP_MEMBER
            raise PlanError(f"rank {dist.get_rank()} is not in the group that was given: only its members have a mesh")
        world = tuple(group if isinstance(group, Sequence) else dist.get_process_group_ranks(group))
        self._set_grid(_resolve(sizes, len(world)), world)
        self.device = use_device(device, made=made)
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
        """A mesh with the grid of a ``DeviceMesh``, whose dimensions may have other names: ``pipe="pp"``."""
        known = {data: "data", pipe: "pipe", tensor: "tensor"}
        names = device_mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in known]
        if unknown or len(names) != device_mesh.mesh.ndim:
            raise PlanError(f"the DeviceMesh has dimensions {names}: use from_device_mesh(mesh, data='dp', pipe='pp')")
        mesh = cls.__new__(cls)
        sizes = {known[name]: size for name, size in zip(names, device_mesh.mesh.shape, strict=True)}
        others = {name: 1 for name in DIMENSIONS if name not in sizes}
        mesh._set_grid({**others, **sizes}, device_mesh.mesh.flatten().tolist())
        wanted = device or (None if device_mesh.device_type == "cuda" else "cpu")
        mesh.device = use_device(wanted, made=True)
        mesh._device_mesh = device_mesh if set(names) == set(DIMENSIONS) else None
        return mesh

    def _set_grid(self, sizes: Mapping[str, int], world: Sequence[int]) -> None:
        self.sizes = dict(sizes)
        self.world_ranks = tuple(world)  # in the order of the grid
        self.rank = dist.get_rank()  # in the world
        publish_process(default_store(), self.rank)
        if self.rank not in self.world_ranks:
            raise PlanError(f"rank {self.rank} is not among the mesh's ranks {list(self.world_ranks)}")
        grid = torch.tensor(self.world_ranks).view(*self.sizes.values())
        (coordinates,) = (grid == self.rank).nonzero().tolist()
        self._ranks_along: dict[str, tuple[int, ...]] = {}
        for axis, name in enumerate(self.sizes):
            index = tuple(slice(None) if i == axis else k for i, k in enumerate(coordinates))
            self._ranks_along[name] = tuple(grid[index].tolist())
        self.data, self.pipe, self.tensor = (self.sizes[name] for name in DIMENSIONS)
        self.data_rank, self.pipe_rank, self.tensor_rank = (self._ranks_along[n].index(self.rank) for n in DIMENSIONS)

    def ranks(self, dimension: str) -> tuple[int, ...]:
        """The global ranks along one dimension of the mesh, this process included."""
        _check_name(dimension)
        return self._ranks_along[dimension]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The grid as a ``DeviceMesh``. The first access creates it; all processes of the mesh must take part."""
        if self._device_mesh is None:
            grid = torch.tensor(self.world_ranks, dtype=torch.int).view(*self.sizes.values())
            names = tuple(self.sizes)
            if len(self.world_ranks) == dist.get_world_size():
                self._device_mesh = DeviceMesh(self.device.type, grid, mesh_dim_names=names)
            else:  # DeviceMesh() would number groups differently in processes outside the mesh
                ranks = [list(self._ranks_along[name]) for name in names]
                groups: Any = [dist.new_group(each, use_local_synchronization=True) for each in ranks]
                self._device_mesh = DeviceMesh.from_group(groups, self.device.type, grid, mesh_dim_names=names)
        return self._device_mesh

    def __getitem__(self, dimensions: str | tuple[str, ...]) -> DeviceMesh:
        """``mesh["data"]``: a sub-mesh of the ``DeviceMesh``, for ``fully_shard`` and DTensor."""
        for name in (dimensions,) if isinstance(dimensions, str) else dimensions:
            _check_name(name)
        return self.device_mesh[dimensions]

    def __repr__(self) -> str:
        named = ", ".join(f"{name}={size}" for name, size in self.sizes.items() if size > 1 or name == "pipe")
        which = "the pipeline" if self.data == 1 else f"pipeline {self.data_rank}"
        return f"Mesh({named}), rank {self.rank}: rank {self.pipe_rank} of {which}, on {self.device}"


def _check_name(name: str) -> None:
    if name not in DIMENSIONS:
        raise PlanError(f"a mesh has no dimension {name!r}: the dimensions are {', '.join(DIMENSIONS)}")


def _resolve(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """All three sizes, in the order of the user's arguments: the default order if it fits, else omitted ones first.

    -1 is replaced by the world size divided by the other sizes.
    """
    resolved = {name: 1 for name in DIMENSIONS if name not in sizes}
    if "pipe" in resolved and -1 not in sizes.values():
        resolved["pipe"] = -1
    given = [f"{name}={size}" for name, size in sizes.items()]
    for name in resolved:
        value = os.environ.get(f"PENSTOCK_{name.upper()}")
        if value is not None:
            resolved[name] = int(value)
            given.append(f"{name}={value} by 'penstock run'")
    resolved.update(sizes)
    if list(sizes) == [name for name in DIMENSIONS if name in sizes]:
        resolved = {name: resolved[name] for name in DIMENSIONS}
    call = f"Mesh({', '.join(given)})"
    for name, size in resolved.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < -1 or size == 0:
            raise PlanError(f"{call}: {name} must be a number of processes, or -1 for the rest, got {size!r}")
    inferred = [name for name, size in resolved.items() if size == -1]
    if len(inferred) > 1:
        raise PlanError(f"{call}: only one size can be -1, not both {' and '.join(inferred)}")
    known = math.prod(size for size in resolved.values() if size != -1)
    if inferred and world % known == 0:
        resolved[inferred[0]] = world // known
    elif inferred or known != world:
        product = " × ".join(str(size) for size in resolved.values() if size not in (1, -1)) or "1"
        needs = f"a multiple of {known}" if inferred else str(known)
        raise PlanError(
            f"{call} needs {needs} processes ({product}), but the world has {world}: start as many, or change the mesh"
        )
    return resolved
