"""``pipe.trace()``: clocks are set when the block begins, and when it ends all ranks' records become one."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from penstock.engine.channel.control import TRACE
from penstock.engine.local import LocalCrew
from penstock.engine.process import ProcessCrew
from penstock.engine.tape import Tape
from penstock.engine.watch import Stopped
from penstock.errors import PlanError
from penstock.profile.trace.account import with_memory
from penstock.profile.trace.align import Aligned, Offset, align
from penstock.profile.trace.parts import parts_of
from penstock.profile.trace.steps import Part, Step, Track
from penstock.profile.trace.trace import Trace
from penstock.schedule.prediction import Prediction
from penstock.schedule.schedule import Schedule
from penstock.split.plan import Plan
from penstock.train.launch import say, speaks
from penstock.train.mesh import Mesh
from penstock.version import __version__

__all__ = ["Recording"]

OVER, LEFT = "over", "left"
clock: Callable[[], int] = time.perf_counter_ns


@dataclass(frozen=True)
class _Share:
    """What one process has recorded."""

    tracks: list[Track]
    saved: dict[int, int]
    runs: list[tuple[str, bool, list[Part]]]  # kind, failed, parts; their tracks are numbered within the share


class Recording:
    """The block. What it gives is filled when it ends."""

    def __init__(
        self,
        crew: LocalCrew | ProcessCrew,
        plan: Plan,
        schedule: Schedule,
        mesh: Mesh | None,
        steps: int | None,
        skip: int,
        prediction: Callable[[], Prediction | None] = lambda: None,
        quiet: bool = False,
    ) -> None:
        """``prediction`` is asked when the block has ended; ``quiet``: nothing is said then."""
        if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
            raise PlanError(f"trace(steps={steps!r}): how many steps to record must be at least 1, or None for all")
        if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
            raise PlanError(f"trace(skip={skip!r}): how many steps to leave out first must be at least 0")
        self.crew, self.mesh = crew, mesh
        self.steps, self.skip = steps, skip
        self.prediction, self.quiet = prediction, quiet
        self.number = 0
        order = schedule if isinstance(crew, ProcessCrew) else crew.source.training(crew.source.microbatches)
        self.trace = Trace(order, tuple(crew.edges), plan=json.loads(plan.to_json()), versions=_versions())

    def __enter__(self) -> Trace:
        crew = self.crew
        if crew.tape is not None:
            raise PlanError("this pipeline is being traced already: end that trace before another one begins")
        if self.trace.tracks:
            raise PlanError("this trace has ended: call pipe.trace() again for another one")
        tape = Tape([stage.device for stage in crew.stages.values()], self.steps, self.skip, clock)
        self.tape = tape
        self.aligned = Aligned(0, Offset())
        if isinstance(crew, ProcessCrew):
            offset = crew.guarded(lambda: align(crew, self._read))
            self.aligned = Aligned(self._read(), offset)
            crew.traces += 1
            self.number = crew.traces
        crew.tape = tape
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        crew, self.crew.tape = self.crew, None
        try:
            self.tape.finish()
        except RuntimeError:
            if error is None:
                raise
            self.tape.forget_devices()  # a GPU that has failed cannot be asked
        if not isinstance(crew, ProcessCrew):
            self._fill([self._share()])
            self._tell(error)
            return
        alone = None
        if error is not None:
            alone = f"rank {self._here} left it by {type(error).__name__}: {error}".splitlines()[0]
        elif crew.closed:
            alone = "the pipeline was closed in it"
        if alone is not None:
            self._fill([self._share()], alone)
            if crew.ended is None and not crew.closed:
                with contextlib.suppress(RuntimeError):  # a store that is gone has nobody left to tell
                    crew.watch.lines.store.set(self._key(self._here), LEFT)
            return
        self._fill([self._share()], "the others' could not be had")
        words = crew.guarded(lambda: self._words(OVER))
        gone = [rank for rank, word in words.items() if word != OVER]
        if gone:
            self._fill([self._share()], f"rank {gone[0]} left it by an error")
            return
        offset = crew.guarded(lambda: align(crew, self._read))
        self.aligned.again(self._read(), offset)
        self._fill(crew.guarded(lambda: _gathered(crew, self._share())))
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        """Say what was predicted beside what was measured, where anybody is told anything."""
        self.trace.prediction = self.prediction()
        if error is None and not self.quiet and speaks():
            text = self.trace.comparison
            if text is not None:
                say(text)

    def _read(self) -> int:
        return self.tape.clock() - self.tape.begin

    # ── what the processes tell each other ───────────────────────────────────────────────────────────────────

    @property
    def _here(self) -> int:
        return 0 if self.mesh is None else self.mesh.rank

    def _key(self, rank: int) -> str:
        return f"trace/{self.number}/{rank}"

    def _words(self, word: str) -> dict[int, str]:
        """How each rank has ended the block: through the store, since one that left it may talk of other things by now.

        It is looked for and not waited for there: a rank that is gone must not be waited for.
        """
        assert self.mesh is not None
        crew = self.crew
        assert isinstance(crew, ProcessCrew)
        store, ranks = crew.watch.lines.store, self.mesh.world_ranks
        store.set(self._key(self._here), word)
        keys = [self._key(rank) for rank in ranks]
        pause = 0.001
        with crew.doing.waiting([rank for rank in ranks if rank != self._here], "until this trace is ended by"):
            while not store.check(keys):
                if crew.watch.cause is not None:
                    raise Stopped(crew.watch.cause)
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
        return {rank: store.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}

    # ── what becomes of the tape ─────────────────────────────────────────────────────────────────────────────

    def _share(self) -> _Share:
        crew, tape = self.crew, self.tape
        tracks = _tracks(crew, self.mesh, self.aligned.error)
        places = {track.place: number for number, track in enumerate(tracks)}

        def seconds(at: int) -> float:
            return self.aligned(at - tape.begin)

        runs = [
            (run.kind, run.failed, parts_of(tape, run, seconds, crew.placement, places)) for run in tape.runs if run.end
        ]
        return _Share(tracks, dict(tape.saved), runs)

    def _fill(self, shares: Sequence[_Share], missing: str | None = None) -> None:
        """The trace, of the shares of one or all processes."""
        trace = self.trace
        found: dict[tuple[int, str], list[tuple[bool, list[Part]]]] = {}
        tracks: list[Track] = []
        for share in shares:
            for number, (kind, failed, parts) in enumerate(share.runs):
                moved = [replace(part, track=part.track + len(tracks)) for part in parts]
                found.setdefault((number, kind), []).append((failed, moved))
            tracks += share.tracks
        steps = [
            Step(number, kind, tuple(p for _, parts in rows for p in parts), any(failed for failed, _ in rows))
            for (number, kind), rows in sorted(found.items())
        ]
        trace.tracks = tuple(tracks)
        trace.saved = {stage: size for share in shares for stage, size in share.saved.items()}
        trace.steps = with_memory(steps, trace.saved)
        trace.memory = "allocated" if any("cuda" in track.device for track in tracks) else "saved"
        trace.missing = missing


def _tracks(crew: LocalCrew | ProcessCrew, mesh: Mesh | None, error: float) -> list[Track]:
    """The ranks of this process."""
    if mesh is not None:
        replica = mesh.data_rank * mesh.tensor + mesh.tensor_rank
        return [Track(mesh.rank, replica, mesh.pipe_rank, _device(mesh.device), error, _gpu(mesh.device))]
    of_rank = {crew.placement[s]: stage.device for s, stage in reversed(crew.stages.items())}
    return [Track(rank, 0, rank, _device(device), gpu=_gpu(device)) for rank, device in sorted(of_rank.items())]


def _device(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _gpu(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def _gathered(crew: ProcessCrew, share: _Share) -> list[_Share]:
    """Every process's, on every one of them, in the order of the replicas and of their ranks."""
    with crew.control.within(TRACE):
        shares: list[Any] = crew.control.gather(share)
    for twins in (crew.twins, crew.replicas):
        if twins is not None:
            shares = [one for row in twins.control.gather(shares) for one in row]
    return shares


def _versions() -> dict[str, str]:
    return {"penstock": __version__, "torch": torch.__version__, "python": platform.python_version()}
