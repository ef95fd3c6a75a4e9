"""This rank's compiled programs, one for each kind of mini-batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.channel.base import Channel, Endpoint
from penstock.engine.channel.dynamic import DynamicBackwardChannel, DynamicEndpoints, DynamicForwardChannel
from penstock.engine.channel.local import LocalChannel
from penstock.engine.channel.process import BackwardChannel, ForwardChannel, ProcessChannel
from penstock.engine.replicas.reduce import GradReducer
from penstock.engine.runner import Bindings, PipelineIO, Runner, compile_program
from penstock.engine.stage import StageEngine, make_slots
from penstock.engine.step_protocol import MAX_KINDS, LRUCache, StepHeader
from penstock.schedule.lower import Program, lower
from penstock.schedule.provider import ScheduleProvider
from penstock.schedule.schedule import Edge

__all__ = ["Endpoints", "ProgramCache", "RankProgram"]

Endpoints = dict[tuple[int, int, str], Endpoint]  # by sending rank, receiving rank and direction


@dataclass(frozen=True)
class RankProgram:
    """A program with its channels, and the ends that a step fills and reads."""

    runner: Runner
    ends: PipelineIO
    channels: tuple[Channel, ...]

    def close(self) -> None:
        for channel in self.channels:
            if isinstance(channel, ProcessChannel | DynamicForwardChannel):
                channel.close()


class ProgramCache:
    """Compiled when a kind of mini-batch comes for the first time, and kept.

    The first step of a kind runs over the ``quiet`` endpoints. It loads kernels, which a GPU may put off until no other
    one is running; and a receive of NCCL is a kernel that runs until its message has come. So nothing of NCCL's is
    under way then: what crosses is staged through the host. Of a ``dynamic`` pipeline's mini-batches no more is known
    than how many micro-batches they have, and headers always go over the quiet endpoints.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        placement: Sequence[int],
        rank: int,
        device: torch.device,
        stages: Mapping[int, StageEngine],
        source: ScheduleProvider,
        endpoints: Endpoints,
        quiet: Endpoints,
        dynamic: bool = False,
    ) -> None:
        self.edges = edges
        self.placement = placement
        self.rank = rank
        self.device = device
        self.stages = stages
        self.source = source
        self.endpoints = endpoints
        self.quiet = quiet
        self.reducer: GradReducer | None = None  # there when the pipeline has replicas
        self.dynamic = dynamic
        self._loaded: LRUCache[Hashable, bool] = LRUCache(MAX_KINDS)
        self._jobs: LRUCache[Hashable, RankProgram] = LRUCache(
            16
        )  # fewer: what is compiled is larger than what is known
        self._first: RankProgram | None = None  # that of a first step, run once
        self._programs: dict[tuple[int, bool, bool], Program] = {}

    def of(self, announced: StepHeader) -> RankProgram:
        """The job for an announced kind of mini-batch."""
        kind: Hashable = announced.number
        if self.dynamic:
            kind = (len(announced.sizes), announced.training, announced.apart)
        first = kind not in self._loaded
        self._loaded[kind] = True
        if first and self.quiet is not self.endpoints:
            self._first = self._compile(announced, self.quiet)
            return self._first
        self._first = None
        if kind not in self._jobs:
            self._jobs[kind] = self._compile(announced, self.endpoints)
        return self._jobs[kind]

    def _compile(self, announced: StepHeader, endpoints: Endpoints) -> RankProgram:
        program = self._program(len(announced.sizes), announced.training, announced.apart)
        forward, backward = self._make_channels(announced, endpoints)
        head = self.stages[max(self.stages)].head
        ends = PipelineIO(seed=None if head is None else head.seed)
        # Gradients of weights that live on the host leave the device when their visit ends, sums under way or not.
        moving = any(stage.weights is not None for stage in self.stages.values())
        reduce = None if self.reducer is None or moving else self.reducer.ready
        wiring = Bindings(self.stages, make_slots(program, self.stages), forward, backward, ends, reduce)
        channels = (*forward.values(), *backward.values())
        return RankProgram(compile_program(program.instructions, wiring), ends, channels)

    def _program(self, count: int, training: bool, apart: bool) -> Program:
        key = (count, training, apart)
        if key not in self._programs:
            source = self.source
            make = source.fill_drain if apart else source.training if training else source.forward_only
            self._programs[key] = lower(make(count), self.edges, with_headers=self.dynamic)[self.rank]
        return self._programs[key]

    def _make_channels(
        self, announced: StepHeader, endpoints: Endpoints
    ) -> tuple[dict[Edge, Channel], dict[Edge, Channel]]:
        count = len(announced.sizes)
        shared = DynamicEndpoints(endpoints, self.quiet) if self.dynamic else None
        forward: dict[Edge, Channel] = {}
        backward: dict[Edge, Channel] = {}
        for src, dst in self.edges:
            a, b = self.placement[src], self.placement[dst]
            if self.rank not in (a, b):
                continue
            if a == b:
                forward[src, dst] = LocalChannel(count, self.device, self.device)
                backward[dst, src] = LocalChannel(count, self.device, self.device)
                continue
            if shared is not None:
                forward[src, dst] = DynamicForwardChannel(shared, (a, b, "F"), f"stage {src}")
                backward[dst, src] = DynamicBackwardChannel(shared, (b, a, "B"), f"stage {dst}")
                continue
            metas = announced.metas((src, dst))
            forward[src, dst] = ForwardChannel(endpoints[a, b, "F"], f"stage {src}", metas)
            if announced.training:
                present = announced.present((src, dst))
                backward[dst, src] = BackwardChannel(endpoints[b, a, "B"], f"stage {dst}", metas, present)
        return forward, backward

    def reschedule(self, source: ScheduleProvider) -> None:
        """Forget what was compiled for another order."""
        self._forget()
        self._programs.clear()
        self.source = source

    def _forget(self) -> None:
        for job in (*self._jobs.values(), *([] if self._first is None else [self._first])):
            job.close()
        self._jobs.clear()
        self._first = None

    def close(self) -> None:
        self._forget()
        for endpoint in (*self.endpoints.values(), *self.quiet.values()):
            endpoint.close()
