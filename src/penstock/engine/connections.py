"""How a rank is connected with the others: all groups of processes that it is in, and what is built on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from penstock.engine.channel.base import Endpoint, WaitTimer
from penstock.engine.channel.groups import Group, open_group, uses_nccl
from penstock.engine.failure.sockets import abort_nccl
from penstock.engine.failure.watch import Watch
from penstock.engine.rank_programs import Endpoints
from penstock.engine.replicas import ReplicaGroup
from penstock.schedule.schedule import Edge

__all__ = ["Connections", "MeshCoordinates"]


class MeshCoordinates(Protocol):
    """Where this process stands: what the engine needs to know of a mesh."""

    rank: int  # in the world
    data_rank: int
    pipe_rank: int
    tensor_rank: int
    device: torch.device

    def ranks(self, dimension: str) -> Sequence[int]: ...


class Connections:
    """The groups of one rank. Ranks must open those that they share in the same order."""

    def __init__(self, place: MeshCoordinates, watch: Watch, wait_timer: WaitTimer) -> None:
        self.place = place
        self.rank, self.ranks = place.pipe_rank, place.ranks("pipe")
        self.sockets, self.status = watch.sockets, watch.status
        self.wait_timer = wait_timer
        self.groups: list[Group] = []

    def group(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """A group of this pipeline's ranks; for tensors of this rank's device, if no other is given."""
        name = f"pipeline {self.place.data_rank}.{self.place.tensor_rank} {name}"
        with self.status.waiting([self.ranks[r] for r in ranks if r != self.rank], "to connect with"):
            group = open_group(self.sockets, name, ranks, self.rank, device or self.place.device)
        self.groups.append(group)
        return group

    def twins(self, dimension: str) -> ReplicaGroup | None:
        """This rank's twins along a dimension of the mesh, if it has any."""
        place = self.place
        ranks = place.ranks(dimension)
        if len(ranks) == 1:
            return None
        others = {"data": place.data_rank, "pipe": place.pipe_rank, "tensor": place.tensor_rank}
        del others[dimension]
        name = f"{dimension} of {others}"
        with self.status.waiting([r for r in ranks if r != place.rank], "to connect with"):
            numbers = open_group(self.sockets, name, ranks, place.rank, torch.device("cpu"))
            groups = [numbers]
            if uses_nccl(place.device):
                groups.append(open_group(self.sockets, f"{name} on GPUs", ranks, place.rank, place.device))
        self.groups += groups
        met = ReplicaGroup(ranks, place.rank, numbers, groups[-1], self.status)
        met.control.wait_timer = self.wait_timer
        return met

    def endpoints(
        self, edges: Sequence[Edge], placement: Sequence[int], prefix: str, device: torch.device
    ) -> Endpoints:
        """A group of two for every direction in which this rank sends or receives."""
        wanted = set()
        for src, dst in edges:
            a, b = placement[src], placement[dst]
            if a != b:
                wanted |= {(a, b, "F"), (b, a, "B")}
        endpoints = {}
        for a, b, direction in sorted(wanted):  # both ends make their groups in the same order
            if self.rank in (a, b):
                peer = self.ranks[b if self.rank == a else a]
                group = self.group(f"{prefix}{a}>{b}{direction}", (a, b), device)
                endpoints[a, b, direction] = Endpoint(group, peer, self.place.device, self.wait_timer)
                with self.status.waiting([peer], "to connect with"):
                    endpoints[a, b, direction].connect(sender=self.rank == a)
        return endpoints

    @property
    def closed(self) -> bool:
        return not self.groups

    def close(self) -> None:
        """Leave all groups; whoever else refers to one has let go of it before."""
        abort_nccl([group for group in self.groups if group.name() == "nccl"])
        self.groups.clear()  # gloo closes its connections with its last reference
