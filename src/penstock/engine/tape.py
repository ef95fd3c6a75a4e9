"""A tape: what the ranks of this process do, and when, while somebody wants to know.

Without a tape a program runs as it is. With one, the clock is read before each of its calls, what is sent is weighed,
and nothing else is done that could be left until later: who waited for whom, and how long, is worked out from that.

On a GPU the clock says when work was launched. When it was done say two events for each action, which are looked at
once they have happened: nothing waits for them inside of a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns

import torch
from torch.autograd import profiler

from penstock.engine.devicetime import DeviceTimes
from penstock.engine.runner import Runner
from penstock.engine.script import Script, Walk

__all__ = ["Run", "Tape", "recorded", "spanned", "walking"]


@dataclass
class Run:
    """One mini-batch, or the backward of one that was begun before."""

    kind: str  # "step", "evaluate", "call" or "backward"
    begin: int
    end: int = 0
    failed: bool = False
    base: int = 0  # which of the devices' marks its events count from
    walks: list[Walk] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)  # what was done around the program


class Tape:
    """Records ``steps`` runs, all if that is None, after the first ``skip``. A backward belongs to its call."""

    def __init__(
        self,
        devices: Iterable[torch.device],
        steps: int | None,
        skip: int,
        clock: Callable[[], int] = perf_counter_ns,
    ) -> None:
        self.clock = clock
        self.left = steps
        self.skip = skip
        self.runs: list[Run] = []
        self.now: Run | None = None  # what is recorded now
        self.saved: dict[int, int] = {}  # bytes that a stage's graph keeps of one micro-batch
        self.times = DeviceTimes(devices, clock)
        self._pending: deque[tuple[Run, Walk]] = deque()  # whose events have not been looked at
        self.begin = clock()

    @contextmanager
    def run(self, kind: str) -> Iterator[None]:
        """Around one mini-batch: it is recorded, or not."""
        counts = kind != "backward"
        if counts and self.skip:
            self.skip -= 1
            yield
            return
        if self.now is not None or (counts and self.left == 0):
            yield
            return
        self._resolve(done=False)
        self.now = run = Run(kind, self.clock(), base=self.times.mark())
        self.runs.append(run)
        try:
            yield
        except BaseException:
            run.failed = True
            raise
        finally:
            run.end = self.clock()
            self.now = None
            self._pending.extend((run, walk) for walk in run.walks if walk.events)
            if counts and self.left is not None:
                self.left -= 1

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Around something that a rank does before or after its program."""
        run, begin = self.now, self.clock()
        yield
        if run is not None:
            run.spans.append((name, begin, self.clock()))

    def walk(self, runner: Runner) -> None:
        """Do what ``runner.run`` does, and write it down."""
        run = self.now
        assert run is not None
        script = self._script(runner)
        walk = script.walk = Walk(script.lines)
        run.walks.append(walk)
        stamps, clock, progress = walk.stamps, self.clock, runner.progress
        for progress.at, call in enumerate(script.calls):
            stamps[progress.at] = clock()
            call()
        stamps[-1] = clock()
        progress.at = -1

    def _script(self, runner: Runner) -> Script:
        """The runner's calls: made for its first walk, for its second, when less is to be found out, and then kept."""
        script = runner.script
        known = isinstance(script, Script) and script.saved is self.saved
        if isinstance(script, Script) and known and not script.curious and not profiler._is_profiler_enabled:
            return script
        made = Script(runner, self.clock, self.saved, self.times, curious=not known)
        runner.script = None if profiler._is_profiler_enabled else made
        return made

    def finish(self) -> None:
        """Nothing more is recorded; on GPUs, wait for what was."""
        self.left = 0
        self.times.finish()
        self._resolve(done=True)

    def forget_devices(self) -> None:
        """Leave what the host's clock says, and nothing of the GPUs'."""
        self._pending.clear()
        for run in self.runs:
            for walk in run.walks:
                walk.events.clear()
                walk.seconds.clear()

    def _resolve(self, *, done: bool) -> None:
        """Look at events that have happened, and let go of them; all have when it is ``done``."""
        while self._pending:
            run, walk = self._pending[0]
            if not done and not all(after.query() for _, _, after in walk.events.values()):
                return
            for at, (device, before, after) in walk.events.items():
                start, end = self.times.since(device, run.base, before, after)
                walk.seconds[at] = (device, start, end)
            walk.events.clear()
            self._pending.popleft()


def recorded(tape: Tape | None, kind: str) -> AbstractContextManager[None]:
    """Around one mini-batch, whether there is a tape or not."""
    return nullcontext() if tape is None else tape.run(kind)


def spanned(tape: Tape | None, name: str) -> AbstractContextManager[None]:
    """Around something outside of the program, whether there is a tape or not."""
    return nullcontext() if tape is None or tape.now is None else tape.span(name)


def walking(tape: Tape | None, runner: Runner) -> Callable[[], None]:
    """What runs a program: the runner itself, or a tape that records it."""
    return runner.run if tape is None or tape.now is None else partial(tape.walk, runner)
