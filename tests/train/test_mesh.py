"""``ps.Mesh``: who stands where, in grids of four processes, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import penstock as ps
from tests.support.ranks import Ranks


@contextmanager
def launcher_sizes(**sizes: object) -> Iterator[None]:
    """The environment that ``penstock run`` sets for a script."""
    with mock.patch.dict(os.environ, {f"PENSTOCK_{name.upper()}": str(size) for name, size in sizes.items()}):
        yield


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(ps.PlanError) as caught:
        yield
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


def place(mesh: ps.Mesh) -> tuple[int, int, int]:
    return mesh.data_rank, mesh.pipe_rank, mesh.tensor_rank


# Sizes ------------------------------------------------------------------------------------------------------


def sizes_and_order(rank: int) -> None:
    """
    Mesh(data=2, pipe=2)        Mesh(pipe=2, data=2)
              pipe 0  pipe 1              data 0  data 1
      data 0    0       1         pipe 0    0       1
      data 1    2       3         pipe 1    2       3
    """
    high, low = divmod(rank, 2)
    mesh = ps.Mesh(data=2, pipe=2)
    assert place(mesh) == (high, low, 0)
    assert (mesh.ranks("pipe"), mesh.ranks("data")) == ((2 * high, 2 * high + 1), (low, low + 2))
    mesh = ps.Mesh(pipe=2, data=2)
    assert place(mesh) == (low, high, 0)
    assert (mesh.ranks("pipe"), mesh.ranks("data")) == ((low, low + 2), (2 * high, 2 * high + 1))
    assert place(ps.Mesh(pipe=2, tensor=2)) == (0, high, low)
    assert place(ps.Mesh(tensor=2, pipe=2)) == (0, low, high)
    assert place(ps.Mesh(tensor=2, data=2, pipe=1)) == (low, 0, high)
    for mesh in (ps.Mesh(), ps.Mesh(pipe=4), ps.Mesh(pipe=-1), ps.Mesh(data=1), ps.Mesh(data=1, pipe=-1, tensor=1)):
        assert place(mesh) == (0, rank, 0)
        assert (mesh.data, mesh.pipe, mesh.tensor, len(mesh.world_ranks)) == (1, 4, 1, 4)
    for mesh in (ps.Mesh(data=2), ps.Mesh(data=-1, pipe=2), ps.Mesh(data=2, pipe=-1)):
        assert (mesh.data, mesh.pipe, mesh.tensor) == (2, 2, 1)
        assert place(mesh) == (high, low, 0)
    mesh = ps.Mesh(data=-1)
    assert (mesh.data, mesh.pipe, mesh.tensor) == (4, 1, 1)


def test_dimensions_in_any_order_and_sizes_left_open(four: Ranks) -> None:
    four.check(sizes_and_order)


def queries(rank: int) -> None:
    mesh = ps.Mesh(data=2, pipe=2)
    first = 2 * (rank // 2)
    assert mesh.rank == rank
    assert mesh.world_ranks == (0, 1, 2, 3)
    assert mesh.sizes == {"tensor": 1, "data": 2, "pipe": 2}
    assert mesh.ranks("pipe") == (first, first + 1)
    assert mesh.ranks("tensor") == (rank,)
    assert mesh.device == torch.device("cpu")
    assert repr(mesh) == f"Mesh(data=2, pipe=2), rank {rank}: rank {rank % 2} of pipeline {rank // 2}, on cpu"
    assert repr(ps.Mesh()) == f"Mesh(pipe=4), rank {rank}: rank {rank} of the pipeline, on cpu"


def test_queries(four: Ranks) -> None:
    four.check(queries)


def wrong_sizes(rank: int) -> None:
    with refused("Mesh(pipe=3) needs 3 processes (3), but the world has 4"):
        ps.Mesh(pipe=3)
    with refused("Mesh(data=2, pipe=4) needs 8 processes (2 × 4), but the world has 4"):
        ps.Mesh(data=2, pipe=4)
    with refused("Mesh(data=3) needs a multiple of 3 processes (3), but the world has 4"):
        ps.Mesh(data=3)
    with refused("Mesh(data=-1, pipe=-1): only one size can be -1, not both data and pipe"):
        ps.Mesh(data=-1, pipe=-1)
    wrong: Any
    for wrong in (0, -2, 1.5, True, "4", None):
        with refused(f"pipe must be a number of processes, or -1 for the rest, got {wrong!r}"):
            ps.Mesh(pipe=wrong)
    with refused("a mesh has no dimension 'pipes': the dimensions are data, pipe, tensor"):
        ps.Mesh(pipes=4)
    with refused("a mesh has no dimension 'dp': the dimensions are data, pipe, tensor"):
        ps.Mesh(dp=4)
    with refused("a mesh has no dimension 'date'"):
        ps.Mesh().ranks("date")
    with refused("a mesh has no dimension 'x'"):
        ps.Mesh()["x"]
    with refused("device cuda:77 is not there"):
        ps.Mesh(device="cuda:77")
    with refused("'nothing' is not a device"):
        ps.Mesh(device="nothing")


def test_wrong_sizes_and_names(four: Ranks) -> None:
    four.check(wrong_sizes)


def as_run_says(rank: int) -> None:
    with launcher_sizes(pipe=2, data=2, tensor=1):
        assert place(ps.Mesh()) == (rank // 2, rank % 2, 0)
        assert place(ps.Mesh(pipe=2, data=2)) == (rank % 2, rank // 2, 0)
        assert place(ps.Mesh(data=-1)) == place(ps.Mesh(data=2)) == (rank // 2, rank % 2, 0)
        with refused("Mesh(pipe=4, data=2 by 'penstock run', tensor=1 by 'penstock run') needs 8", "world has 4"):
            ps.Mesh(pipe=4)
    with launcher_sizes(pipe="0"), refused("got 0"):
        ps.Mesh()


def test_sizes_that_penstock_run_was_told(four: Ranks) -> None:
    four.check(as_run_says)


# Parts of the world, and torch's grids ----------------------------------------------------------------------


def total(mesh: ps.Mesh, dimension: str) -> float:
    """The sum of the ranks along one dimension, by the group that ``mesh[…]`` has for it."""
    value = torch.tensor(float(mesh.rank))
    dist.all_reduce(value, group=mesh[dimension].get_group())
    return value.item()


def parts(rank: int) -> None:
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine, other = halves[rank % 2], halves[1 - rank % 2]
    mesh = ps.Mesh(group=mine)
    assert mesh.world_ranks == mesh.ranks("pipe") == ((0, 2) if rank % 2 == 0 else (1, 3))
    assert (mesh.pipe, mesh.pipe_rank, len(mesh.world_ranks)) == (2, rank // 2, 2)
    with refused(f"rank {rank} is not in the group that was given"):
        ps.Mesh(group=other)
    with refused("Mesh(pipe=4) needs 4 processes (4), but the world has 2"):
        ps.Mesh(pipe=4, group=mine)
    # Both halves make their grids at the same time, and then one of them alone makes another.
    assert total(mesh, "pipe") == (2 if rank % 2 == 0 else 4)
    if rank % 2 == 0:
        mesh = ps.Mesh(data=2, group=mine)
        assert total(mesh, "data") == 2
        assert total(mesh, "pipe") == rank
    # Torch numbers its groups, and would now have other numbers on these ranks than on the others.
    value = torch.ones(())
    dist.all_reduce(value, group=dist.new_group([0, 1, 2, 3]))
    assert value.item() == 4


def test_a_group_over_a_part_of_the_world(four: Ranks) -> None:
    four.check(parts, timeout=30)


def grids(rank: int) -> None:
    mesh = ps.Mesh(data=2, pipe=2)
    assert mesh.device_mesh is mesh.device_mesh
    assert mesh["data"].mesh.tolist() == [rank % 2, rank % 2 + 2]
    assert mesh["pipe"].size() == 2
    assert mesh["tensor"].size() == 1
    assert mesh[("data", "pipe")].shape == (2, 2)
    assert total(mesh, "data") == sum(mesh.ranks("data"))
    assert total(mesh, "pipe") == sum(mesh.ranks("pipe"))
    assert total(mesh, "tensor") == rank


def test_lines_of_torchs_device_mesh(four: Ranks) -> None:
    four.check(grids)


def from_torch(rank: int) -> None:
    theirs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    mesh = ps.Mesh.from_device_mesh(theirs, data="dp", pipe="pp")
    assert place(mesh) == (rank % 2, rank // 2, 0)
    assert mesh.ranks("pipe") == (rank % 2, rank % 2 + 2)
    assert mesh.device == torch.device("cpu")
    assert total(mesh, "pipe") == sum(mesh.ranks("pipe"))
    assert total(mesh, "tensor") == rank  # which their grid does not have
    with refused("dimensions ('pp', 'dp')", "from_device_mesh(mesh, data='dp', pipe='pp')"):
        ps.Mesh.from_device_mesh(theirs)
    with refused("dimensions ()"):
        ps.Mesh.from_device_mesh(init_device_mesh("cpu", (4,)))

    same = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("tensor", "data", "pipe"))
    assert ps.Mesh.from_device_mesh(same).device_mesh is same

    grid = torch.arange(4).view(2, 2)[rank // 2]  # a grid of each half
    half = ps.Mesh.from_device_mesh(theirs["dp"], pipe="dp")
    assert half.ranks("pipe") == tuple(grid.tolist())


def test_from_a_device_mesh_with_names_of_its_own(four: Ranks) -> None:
    four.check(from_torch)
