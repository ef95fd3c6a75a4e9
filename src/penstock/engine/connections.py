"""The process groups of a rank, and its programs, compiled over the channels of these groups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.engine.channel.base import Channel, Endpoint, Group, open_group, uses_nccl
from penstock.engine.channel.dynamic import DynamicBackwardChannel, DynamicEndpoint, DynamicForwardChannel
from penstock.engine.channel.local import LocalChannel
from penstock.engine.channel.process import BackwardChannel, ForwardChannel
from penstock.engine.failure.sockets import abort_nccl
from penstock.engine.failure.watch import Watch
from penstock.engine.replicas import ReplicaGroup
from penstock.engine.replicas.reduce import GradReducer
from penstock.engine.runner import Bindings, LRUCache, PipelineIO, Runner, compile_program
from penstock.engine.stage import StageEngine, make_slots
from penstock.engine.step_protocol import MAX_KINDS, StepHeader
from penstock.schedule.lower import LoweredProgram, lower
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge

Endpoints = dict[tuple[int, int, str], Endpoint]  # by sending rank, receiving rank and direction


class MeshCoordinates(Protocol):
    rank: int  # in the world
    world_ranks: tuple[int, ...]
    data_rank: int
    pipe_rank: int
    tensor_rank: int
    device: torch.device

    def ranks(self, dimension: str) -> Sequence[int]: ...


class Connections:
    """The process groups of one rank. Ranks must open shared groups in the same order."""

    def __init__(self, mesh: MeshCoordinates, watch: Watch) -> None:
        self.mesh = mesh
        self.rank, self.ranks = mesh.pipe_rank, mesh.ranks("pipe")
        self.sockets, self.status = watch.sockets, watch.status
        self.wait_timer = watch.wait_timer
        self.groups: list[Group] = []

    def group(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """A group of this pipeline's ranks, for tensors on ``device`` (default: this rank's)."""
        name = f"pipeline {self.mesh.data_rank}.{self.mesh.tensor_rank} {name}"
        with self.status.waiting([self.ranks[r] for r in ranks if r != self.rank], "to connect with"):
            group = open_group(self.sockets, name, ranks, self.rank, device or self.mesh.device)
        self.groups.append(group)
        return group

    def replicas(self, dimension: str) -> ReplicaGroup | None:
        """The processes along a dimension of the mesh; None if this process is the only one."""
        mesh = self.mesh
        ranks = mesh.ranks(dimension)
        if len(ranks) == 1:
            return None
        others = {"data": mesh.data_rank, "pipe": mesh.pipe_rank, "tensor": mesh.tensor_rank}
        del others[dimension]
        name = f"{dimension} of {others}"
        with self.status.waiting([r for r in ranks if r != mesh.rank], "to connect with"):
            numbers = open_group(self.sockets, name, ranks, mesh.rank, torch.device("cpu"))
            groups = [numbers]
            if uses_nccl(mesh.device):
                groups.append(open_group(self.sockets, f"{name} on GPUs", ranks, mesh.rank, mesh.device))
        self.groups += groups
        return ReplicaGroup(ranks, mesh.rank, numbers, groups[-1], self.status, self.wait_timer)

    def endpoints(self, edges: Sequence[Edge], placement: Sequence[int], name: str, device: torch.device) -> Endpoints:
        """A group of two ranks for every peer and direction in which this rank sends or receives."""
        wanted = set()
        for src, dst in edges:
            a, b = placement[src], placement[dst]
            if a != b:
                wanted |= {(a, b, "F"), (b, a, "B")}
        endpoints = {}
        for a, b, direction in sorted(wanted):  # both ends create their groups in the same order
            if self.rank in (a, b):
                peer = self.ranks[b if self.rank == a else a]
                group = self.group(f"{name}{a}>{b}{direction}", (a, b), device)
                endpoints[a, b, direction] = Endpoint(group, peer, self.mesh.device, self.wait_timer)
                with self.status.waiting([peer], "to connect with"):
                    endpoints[a, b, direction].connect(sender=self.rank == a)
        return endpoints

    def close(self) -> None:
        """Close all groups. Other references to them must have been dropped before."""
        abort_nccl([group for group in self.groups if group.name() == "nccl"])
        self.groups.clear()  # gloo closes its connections with its last reference


@dataclass(frozen=True)
class RankProgram:
    """A compiled program with its channels, inputs and outputs."""

    runner: Runner
    io: PipelineIO
    channels: tuple[Channel, ...]


@dataclass
class ProgramCache:
    """This rank's compiled programs, one for each kind of mini-batch, compiled on its first use.

    The first step of a kind runs over the ``staged`` endpoints. It loads kernels, and a GPU may delay the load until no
    other kernel is running. A receive of NCCL is a kernel that runs until its message has arrived. So no NCCL operation
    may be in flight during the first step, and messages are staged through the host. In a ``dynamic`` pipeline, the
    kind of a mini-batch is its number of micro-batches, and headers are always sent over the staged endpoints.
    """

    edges: Sequence[Edge]
    placement: Sequence[int]
    rank: int
    device: torch.device
    stages: Mapping[int, StageEngine]
    source: ScheduleProvider
    endpoints: Endpoints
    staged: Endpoints
    dynamic: bool
    reducer: GradReducer | None = None  # set when the pipeline has replicas

    def __post_init__(self) -> None:
        self._loaded: LRUCache[Hashable, bool] = LRUCache(MAX_KINDS)
        self._compiled: LRUCache[Hashable, RankProgram] = LRUCache(16)  # compiled programs are larger than headers
        self._first: RankProgram | None = None  # the program of a first step, used once
        self._programs: dict[tuple[int, bool, bool], LoweredProgram] = {}

    def get(self, header: StepHeader) -> RankProgram:
        kind: Hashable = header.number
        if self.dynamic:
            kind = (len(header.sizes), header.training, header.caller_loss)
        first = kind not in self._loaded
        self._loaded[kind] = True
        if first and self.staged is not self.endpoints:
            self._first = self._compile(header, self.staged)
            return self._first
        self._first = None
        if kind not in self._compiled:
            self._compiled[kind] = self._compile(header, self.endpoints)
        return self._compiled[kind]

    def _compile(self, header: StepHeader, endpoints: Endpoints) -> RankProgram:
        key = (len(header.sizes), header.training, header.caller_loss)
        if key not in self._programs:
            source = self.source
            make = source.fill_drain if key[2] else source.training if key[1] else source.forward_only
            self._programs[key] = lower(make(key[0]), self.edges, with_headers=self.dynamic)[self.rank]
        program = self._programs[key]
        dynamic = {key: DynamicEndpoint(endpoint, self.staged[key]) for key, endpoint in endpoints.items()}
        forward: dict[Edge, Channel] = {}
        backward: dict[Edge, Channel] = {}
        for src, dst in self.edges:
            a, b = self.placement[src], self.placement[dst]
            if self.rank not in (a, b):
                continue
            if a == b:
                forward[src, dst] = LocalChannel(len(header.sizes), self.device, self.device)
                backward[dst, src] = LocalChannel(len(header.sizes), self.device, self.device)
            elif self.dynamic:
                forward[src, dst] = DynamicForwardChannel(dynamic[a, b, "F"], f"stage {src}", dynamic.values())
                backward[dst, src] = DynamicBackwardChannel(dynamic[b, a, "B"], f"stage {dst}", dynamic.values())
            else:
                metas = [header.crossing[src, dst][kind] for kind in header.kinds]  # per micro-batch
                forward[src, dst] = ForwardChannel(endpoints[a, b, "F"], f"stage {src}", metas)
                if header.training:
                    present = [header.gradients[src, dst][kind] for kind in header.kinds]
                    backward[dst, src] = BackwardChannel(endpoints[b, a, "B"], metas, present)
        loss = self.stages[max(self.stages)].loss
        io = PipelineIO(seed=None if loss is None else loss.seed)
        # Gradients of offloaded weights are copied to the host with them: no reduction may be in flight then.
        moving = any(stage.weights is not None for stage in self.stages.values())
        reduce = None if self.reducer is None or moving else self.reducer.ready
        graphs = not header.caller_loss and any(stage.graphs is not None for stage in self.stages.values())
        slots = make_slots(program, self.stages, graphs=graphs)
        bindings = Bindings(self.stages, slots, forward, backward, io, reduce)
        channels = (*forward.values(), *backward.values())
        return RankProgram(compile_program(program.instructions, bindings), io, channels)

    def reschedule(self, source: ScheduleProvider) -> None:
        self._clear()
        self._programs.clear()
        self.source = source

    def _clear(self) -> None:
        for program in (*self._compiled.values(), *([] if self._first is None else [self._first])):
            for channel in program.channels:
                channel.close()
        self._compiled.clear()
        self._first = None

    def close(self) -> None:
        self._clear()
        for endpoint in (*self.endpoints.values(), *self.staged.values()):
            endpoint.close()
