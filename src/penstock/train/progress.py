"""What a pipeline has done so far, added up."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import default_store
from penstock.errors import PlanError
from penstock.progress_ui import ProgressUI, progress_ui
from penstock.train.launch import is_initialized, is_rank0

if TYPE_CHECKING:
    from penstock.train.pipeline import Pipeline

__all__ = ["StepTotals", "progress"]


class _StepNumbers(Protocol):
    """What is counted of a step."""

    @property
    def samples(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def bubble(self) -> float | None: ...


@dataclass
class StepTotals:
    """Sums over steps. ``idle`` of the ``watched`` seconds were spent waiting: those of steps whose bubble is known."""

    steps: int = 0
    samples: int = 0
    watched: float = 0.0
    idle: float = 0.0

    def add(self, result: _StepNumbers) -> None:
        self.steps += 1
        self.samples += result.samples
        if result.bubble is not None:
            self.watched += result.seconds
            self.idle += result.bubble * result.seconds

    def since(self, before: StepTotals) -> StepTotals:
        """What has come since ``before``."""
        return StepTotals(
            self.steps - before.steps,
            self.samples - before.samples,
            self.watched - before.watched,
            self.idle - before.idle,
        )

    @property
    def bubble(self) -> float | None:
        """The share of the time that was spent waiting; None where nothing is known of it."""
        return self.idle / self.watched if self.watched else None


# How a training loop goes, shown once: by rank 0, for all ranks.

T = TypeVar("T")

_LINE_INTERVAL = 5.0  # seconds between lines, where there is no bar
_EXCHANGE_INTERVAL = 1.0  # seconds between what a rank tells of its bubble
_REFRESH_INTERVAL = 0.2  # seconds between new texts beside the bar: on a GPU, to read the loss is to wait for it
_END_WAIT = 1.0  # seconds to wait at the end for what others tell

_num_loops = 0  # how many loops this process has begun to show: the same number on every rank


def progress(
    loader: Iterable[T],
    pipe: Pipeline | None = None,
    *,
    every: int | None = None,
    total: int | None = None,
    label: str = "",
) -> Iterator[T]:
    """What ``loader`` gives, while rank 0 shows step, loss, samples per second and the measured bubble of ``pipe``.

    On a terminal with ``rich`` that is a bar, else a line every few seconds; with ``every`` a line at every so many
    steps, on a terminal too. ``total`` is the number of steps where ``len(loader)`` does not say it. At the end a line
    stays. All ranks run the same loop, and the others show nothing. The bubble is the average over the ranks.
    """
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        raise PlanError(f"every must be a number of steps, got {every!r}")
    if total is None:
        with suppress(TypeError):
            total = len(loader)  # type: ignore[arg-type]
    return (
        _iterate_with_ui(loader, _LoopStats(pipe, total, label), every)
        if is_rank0()
        else _iterate_silently(loader, _LoopStats(pipe, total, label))
    )


def _iterate_silently(loader: Iterable[T], loop: _LoopStats) -> Iterator[T]:
    """A rank that shows nothing: it tells rank 0 of its bubble now and then."""
    told = time.monotonic()
    try:
        for item in loader:
            yield item
            loop.step()
            if time.monotonic() - told > _EXCHANGE_INTERVAL:
                told = time.monotonic()
                loop.board.tell(loop.bubble)
    finally:
        loop.board.tell(loop.bubble, last=True)


def _iterate_with_ui(loader: Iterable[T], loop: _LoopStats, every: int | None) -> Iterator[T]:
    with progress_ui() as shown:
        shown.begin(loop.label, loop.total)
        try:
            for item in loader:
                yield item
                loop.step()
                loop.show(shown, every)
            loop.board.wait()
        except GeneratorExit:
            loop.leave()
            raise
        finally:
            if loop.steps:
                shown.line(loop.conclusion())


class _LoopStats:
    """The numbers of one loop."""

    def __init__(self, pipe: Pipeline | None, total: int | None, label: str) -> None:
        self.pipe = pipe
        self.total = total
        self.label = label
        self.board = _BubbleExchange()
        self.steps = 0
        self.start = self.lined = self.blinked = time.monotonic()
        self.before = StepTotals() if pipe is None else replace(pipe.step_totals)
        self.warm = self.before  # after the first step, which is slower than the others
        self.warm_at = self.start
        self.counted = self.before.steps  # of the pipeline's steps

    def step(self) -> None:
        """One more is over."""
        self.steps += 1
        if self.pipe is not None:
            self.counted = self.pipe.step_totals.steps
            if self.steps == 1:
                self.warm, self.warm_at = replace(self.pipe.step_totals), time.monotonic()

    def leave(self) -> None:
        """The loop was left in the middle of a step, which counts if the pipeline has made its own."""
        if self.pipe is not None and self.pipe.step_totals.steps > self.counted:
            self.step()

    def show(self, shown: ProgressUI, every: int | None) -> None:
        now = time.monotonic()
        text = None
        if shown.live and (now - self.blinked > _REFRESH_INTERVAL or self.steps == 1):
            self.blinked, text = now, self.text()
        shown.advance(text)
        if self.steps % every == 0 if every is not None else not shown.live and now - self.lined > _LINE_INTERVAL:
            self.lined = now
            shown.line("  ".join(filter(None, (self.label, self.text()))))

    def text(self) -> str:
        """Where the loop stands."""
        return "  ".join([f"step {self.steps}{'' if self.total is None else f'/{self.total}'}", *self._numbers()])

    def conclusion(self) -> str:
        """What to keep of it."""
        seconds = time.monotonic() - self.start
        steps = f"{self.steps} step{'s' * (self.steps > 1)} in {seconds:.1f} s"
        return "  ".join([*filter(None, (self.label,)), steps, *self._numbers()])

    @property
    def bubble(self) -> float | None:
        """Of this process, since the first step."""
        done = self._done()
        return None if done is None else done.bubble

    def _done(self) -> StepTotals | None:
        if self.pipe is None:
            return None
        done = self.pipe.step_totals.since(self.warm)
        return done if done.steps else self.pipe.step_totals.since(self.before)

    def _numbers(self) -> list[str]:
        now = time.monotonic()
        done = self._done()
        if self.pipe is None or done is None or done.steps == 0:
            return [f"{self.steps / max(now - self.start, 1e-9):,.1f} steps/s"]
        warmed = self.pipe.step_totals.steps > self.warm.steps
        speed = done.samples / max(now - (self.warm_at if warmed else self.start), 1e-9)
        numbers = [f"{speed:,.0f} samples/s"]
        if self.pipe.last is not None and self.pipe.last.loss is not None:
            numbers.insert(0, f"loss {float(self.pipe.last.loss):.4f}")
        bubbles = [bubble for bubble in (self.bubble, *self.board.read()) if bubble is not None]
        if bubbles:
            numbers.append(f"bubble {sum(bubbles) / len(bubbles):.1%}")
        return numbers


class _BubbleExchange:
    """What the ranks tell of their bubbles, in the store of the process group.

    Nobody waits for it, so that a rank may leave its loop, or never begin it, without holding up the others.
    """

    def __init__(self) -> None:
        global _num_loops
        _num_loops += 1
        self.store: Any = None
        self.told: list[float | None] = []  # what was read last, and when
        self.read_at = -math.inf
        if is_initialized():
            self.store = PrefixStore(f"penstock/progress/{_num_loops}", default_store())
            self.rank = dist.get_rank()
            self.silent = set(range(dist.get_world_size())) - {self.rank}  # the ranks that were not heard of yet
            self.others: list[int] = []
            self.tell(None)

    def tell(self, bubble: float | None, *, last: bool = False) -> None:
        """This rank's bubble so far."""
        if self.store is not None:
            with suppress(RuntimeError):  # the store is gone, and so is whoever would read it
                self.store.set(str(self.rank), "none" if bubble is None else repr(bubble))
                if last:
                    self.store.set(f"{self.rank}/last", "1")

    def read(self) -> list[float | None]:
        """What the others have told last; looked up now and then."""
        now = time.monotonic()
        if self.store is not None and now - self.read_at > _EXCHANGE_INTERVAL:
            self.read_at = now
            with suppress(RuntimeError):
                told = self.store.multi_get([str(rank) for rank in self._heard()])
                self.told = [None if word == b"none" else float(word) for word in told]
        return self.told

    def wait(self) -> None:
        """Give those that have begun the loop a moment to tell how it ended."""
        end = time.monotonic() + _END_WAIT
        self.read_at = -math.inf
        with suppress(RuntimeError):
            last = [f"{rank}/last" for rank in self._heard()]
            while last and not self.store.check(last) and time.monotonic() < end:
                time.sleep(0.002)

    def _heard(self) -> list[int]:
        """The other ranks that have begun this loop."""
        if self.store is None:
            return []
        if self.silent and self.store.check([str(rank) for rank in self.silent]):
            come = set(self.silent)
        else:
            come = {rank for rank in self.silent if self.store.check([str(rank)])}
        self.silent -= come
        self.others += sorted(come)
        return self.others
