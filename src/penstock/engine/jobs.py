"""This rank's compiled programs, one for each kind of mini-batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.agree import Announcement
from penstock.engine.channel.local import LocalLane
from penstock.engine.channel.process import BackwardLane, ForwardLane, Wire
from penstock.engine.reduce import Reducer
from penstock.engine.runner import Ends, Lane, PostedLane, Runner, Wiring, compile_program
from penstock.engine.stage import StageEngine, make_slots
from penstock.schedule.flow import Edge
from penstock.schedule.lower import lower
from penstock.schedule.program import Program
from penstock.schedule.source import ScheduleSource

__all__ = ["Job", "Jobs", "Wires"]

Wires = dict[tuple[int, int, str], Wire]  # by sending rank, receiving rank and lane


@dataclass(frozen=True)
class Job:
    """A program with its lanes, and the ends that a step fills and reads."""

    runner: Runner
    ends: Ends
    lanes: tuple[Lane, ...]

    def close(self) -> None:
        for lane in self.lanes:
            if isinstance(lane, PostedLane):
                lane.close()


class Jobs:
    """Compiled when a kind of mini-batch comes for the first time, and kept.

    The first step of a kind runs over the ``quiet`` wires. It loads kernels, which a GPU may put off until no other
    one is running; and a receive of NCCL is a kernel that runs until its message has come. So nothing of NCCL's is
    under way then: what crosses is staged through the host.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        placement: Sequence[int],
        rank: int,
        device: torch.device,
        stages: Mapping[int, StageEngine],
        source: ScheduleSource,
        wires: Wires,
        quiet: Wires,
    ) -> None:
        self.edges = edges
        self.placement = placement
        self.rank = rank
        self.device = device
        self.stages = stages
        self.source = source
        self.wires = wires
        self.quiet = quiet
        self.reducer: Reducer | None = None  # there when the pipeline has replicas
        self._loaded: set[int] = set()
        self._jobs: OrderedDict[int, Job] = OrderedDict()
        self._first: Job | None = None  # that of a first step, run once
        self._programs: dict[tuple[int, bool, bool], Program] = {}

    def of(self, announced: Announcement) -> Job:
        """The job for an announced kind of mini-batch."""
        number = announced.number
        if number not in self._loaded:
            self._loaded.add(number)
            if self.quiet is not self.wires:
                self._first = self._compile(announced, self.quiet)
                return self._first
        self._first = None
        if number not in self._jobs:
            self._jobs[number] = self._compile(announced, self.wires)
            while len(self._jobs) > 16:  # batches of ever new shapes must not pile up compiled programs
                self._jobs.popitem(last=False)
        self._jobs.move_to_end(number)
        return self._jobs[number]

    def _compile(self, announced: Announcement, wires: Wires) -> Job:
        program = self._program(len(announced.sizes), announced.training, announced.apart)
        forward, backward = self._lanes(announced, wires)
        head = self.stages[max(self.stages)].head
        ends = Ends(seed=None if head is None else head.seed)
        reduce = None if self.reducer is None else self.reducer.ready
        wiring = Wiring(self.stages, make_slots(program, self.stages), forward, backward, ends, reduce)
        lanes = (*forward.values(), *backward.values())
        return Job(compile_program(program.instructions, wiring), ends, lanes)

    def _program(self, count: int, training: bool, apart: bool) -> Program:
        key = (count, training, apart)
        if key not in self._programs:
            source = self.source
            make = source.fill_drain if apart else source.training if training else source.forward_only
            self._programs[key] = lower(make(count), self.edges)[self.rank]
        return self._programs[key]

    def _lanes(self, announced: Announcement, wires: Wires) -> tuple[dict[Edge, Lane], dict[Edge, Lane]]:
        count = len(announced.sizes)
        forward: dict[Edge, Lane] = {}
        backward: dict[Edge, Lane] = {}
        for src, dst in self.edges:
            a, b = self.placement[src], self.placement[dst]
            if self.rank not in (a, b):
                continue
            if a == b:
                forward[src, dst] = LocalLane(count, self.device, self.device)
                backward[dst, src] = LocalLane(count, self.device, self.device)
                continue
            metas = announced.metas((src, dst))
            forward[src, dst] = ForwardLane(wires[a, b, "F"], f"stage {src}", metas)
            if announced.training:
                present = announced.present((src, dst))
                backward[dst, src] = BackwardLane(wires[b, a, "B"], f"stage {dst}", metas, present)
        return forward, backward

    def close(self) -> None:
        for job in (*self._jobs.values(), *([] if self._first is None else [self._first])):
            job.close()
        self._jobs.clear()
        self._first = None
        for wire in (*self.wires.values(), *self.quiet.values()):
            wire.close()
