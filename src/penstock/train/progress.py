"""``ps.progress``: rank 0 reports the progress of a training loop, for all ranks: lines and, on a terminal, a bar."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from penstock._torch import default_store
from penstock.errors import PlanError
from penstock.format import count_noun
from penstock.train.launch import is_rank0
from penstock.train.pipeline import Pipeline, StepTotals

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

T = TypeVar("T")

_LINE_INTERVAL = 5.0  # seconds between lines without a bar
_EXCHANGE_INTERVAL = 1.0  # seconds between exchanges of the ranks' bubbles
_REFRESH_INTERVAL = 0.2  # seconds between updates of the bar: reading the loss synchronises with a GPU
_END_WAIT = 1.0  # seconds to wait at the end for the other ranks' bubbles

_num_loops = 0  # loops that this process has reported: the same on every rank


def progress(
    loader: Iterable[T],
    pipe: Pipeline | None = None,
    *,
    every: int | None = None,
    total: int | None = None,
    label: str = "",
) -> Iterator[T]:
    """Iterate over ``loader`` while rank 0 shows step, loss, samples per second and the measured bubble of ``pipe``.

    On a terminal this is a bar, else a line every few seconds. With ``every``, a line is printed after each ``every``
    steps in both cases. ``total`` is the number of steps if the loader has no length. A summary line is printed at the
    end. All ranks run the same loop; only rank 0 prints. The bubble is the average over the ranks.
    """
    if every is not None and every < 1:
        raise PlanError(f"every must be a number of steps, got {every}")
    if total is None:
        with suppress(TypeError):
            total = len(loader)  # type: ignore[arg-type]
    loop = _Loop(pipe, total, label)
    with progress_ui() if is_rank0() else nullcontext() as ui:
        if ui is not None:
            ui.begin(loop.label, loop.total)
        try:
            for item in loader:
                yield item
                loop.step()
                if ui is None:
                    loop.publish()
                else:
                    loop.show(ui, every)
            if ui is not None:
                end = time.monotonic() + _END_WAIT
                loop.read_others(now=True)
                while not all(last for _, last in loop.others) and time.monotonic() < end:
                    time.sleep(0.002)
                    loop.read_others(now=True)
        except GeneratorExit:  # the loop ended by break: count its last step if the pipeline has run it
            if loop.pipe is not None and loop.pipe.step_totals.steps > loop.pipeline_steps:
                loop.step()
            raise
        finally:
            if ui is None:
                loop.publish(last=True)
            elif loop.steps:
                ui.line(loop.text(f"{count_noun(loop.steps, 'step')} in {time.monotonic() - loop.start:.1f} s"))


class _Loop:
    """The statistics of one loop. Speed and bubble exclude the first step, which is slower than the others.

    Ranks publish their bubbles in the store of the process group. No rank blocks: a rank may end its loop, or never
    begin it, without delaying the others.
    """

    def __init__(self, pipe: Pipeline | None, total: int | None, label: str) -> None:
        global _num_loops
        _num_loops += 1
        self.pipe, self.total, self.label = pipe, total, label
        self.steps = 0
        self.start = self.first_step_end = self.last_line = self.last_refresh = time.monotonic()
        self.at_start = self.after_first_step = StepTotals() if pipe is None else replace(pipe.step_totals)
        self.pipeline_steps = self.at_start.steps
        self.store: Any = None
        self.exchanged_at = -math.inf
        self.others: list[tuple[float | None, bool]] = []  # the other ranks' bubbles, and whether these are the last
        if dist.is_initialized():
            self.store = PrefixStore(f"penstock/progress/{_num_loops}", default_store())
            self.publish()

    def step(self) -> None:
        self.steps += 1
        if self.pipe is not None:
            self.pipeline_steps = self.pipe.step_totals.steps
            if self.steps == 1:
                self.after_first_step, self.first_step_end = replace(self.pipe.step_totals), time.monotonic()

    def show(self, ui: ProgressUI, every: int | None) -> None:
        now = time.monotonic()
        step = f"step {self.steps}{'' if self.total is None else f'/{self.total}'}"
        text = None
        if ui.live and (now - self.last_refresh > _REFRESH_INTERVAL or self.steps == 1):
            self.last_refresh, text = now, self.text(step, labelled=False)
        ui.advance(text)
        if self.steps % every == 0 if every is not None else not ui.live and now - self.last_line > _LINE_INTERVAL:
            self.last_line = now
            ui.line(self.text(step))

    def text(self, steps: str, labelled: bool = True) -> str:
        """Label, steps, loss, speed and bubble."""
        now = time.monotonic()
        parts = [self.label, steps] if labelled and self.label else [steps]
        totals, since = (StepTotals(), now) if self.pipe is None else self.measured(self.pipe)
        if self.pipe is None or totals.steps == 0:
            return "  ".join([*parts, f"{self.steps / max(now - self.start, 1e-9):,.1f} steps/s"])
        if self.pipe.last is not None and self.pipe.last.loss is not None:
            parts.append(f"loss {float(self.pipe.last.loss):.4f}")
        parts.append(f"{totals.samples / max(now - since, 1e-9):,.0f} samples/s")
        self.read_others()
        bubbles = [b for b in (totals.bubble, *(bubble for bubble, _ in self.others)) if b is not None]
        if bubbles:
            parts.append(f"bubble {sum(bubbles) / len(bubbles):.1%}")
        return "  ".join(parts)

    def measured(self, pipe: Pipeline) -> tuple[StepTotals, float]:
        """The pipeline's totals and their start time, without the first step if there were more."""
        totals = pipe.step_totals.since(self.after_first_step)
        if totals.steps:
            return totals, self.first_step_end
        return pipe.step_totals.since(self.at_start), self.start

    def publish(self, *, last: bool = False) -> None:
        """Publish this rank's bubble, at most once per interval; ``last`` at the end of its loop."""
        if self.store is not None and (last or self.exchange_is_due()):
            bubble = None if self.pipe is None else self.measured(self.pipe)[0].bubble
            with suppress(RuntimeError):  # the store and all readers may be gone
                self.store.set(str(dist.get_rank()), json.dumps([bubble, last]))

    def read_others(self, *, now: bool = False) -> None:
        """Read the other ranks' bubbles, at most once per interval unless ``now``. Rank 0 reads."""
        if self.store is not None and (now or self.exchange_is_due()):
            with suppress(RuntimeError):
                ranks = [str(rank) for rank in range(1, dist.get_world_size())]
                begun = [rank for rank in ranks if self.store.check([rank])]
                self.others = [tuple(json.loads(entry)) for entry in self.store.multi_get(begun)]

    def exchange_is_due(self) -> bool:
        due = time.monotonic() - self.exchanged_at > _EXCHANGE_INTERVAL
        if due:
            self.exchanged_at = time.monotonic()
        return due


class ProgressUI:
    """The lines and the bar of a loop. ``live``: there is a bar."""

    def __init__(self, progress: Progress) -> None:
        self.progress, self.live = progress, not progress.disable
        self.task: TaskID | None = None

    def begin(self, title: str, total: int | None) -> None:
        """Start a bar with ``total`` steps; None: an unknown number."""
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(title, total=total, text="")

    def advance(self, text: str | None, steps: int = 1) -> None:
        """Count steps. ``text`` replaces the text beside the bar; None keeps it."""
        if self.task is not None:
            self.progress.advance(self.task, steps)
            if text is not None:
                self.progress.update(self.task, text=text)

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


_live_bars = 0


@contextmanager
def progress_ui() -> Iterator[ProgressUI]:
    """A bar if stdout is a terminal and no other loop has one; otherwise only lines."""
    global _live_bars
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stdout)
    columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[text]}"))
    live = console.is_terminal and not _live_bars
    _live_bars += live
    try:
        with Progress(*columns, console=console, transient=True, disable=not live) as progress:
            yield ProgressUI(progress)
    finally:
        _live_bars -= live
