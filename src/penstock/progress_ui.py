"""What a loop shows while it runs: lines to keep and, on a terminal with ``rich``, a live bar below."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["ProgressUI", "progress_ui"]


class ProgressUI(Protocol):
    """Where a loop reports to; ``live`` where what ``advance`` says can be seen."""

    live: bool

    def begin(self, title: str, total: int | None) -> None:
        """A new stretch of ``total`` steps starts; None: nobody knows how many."""

    def advance(self, text: str | None) -> None:
        """One step is done; ``text`` says how it stands, None: as before."""

    def line(self, text: str) -> None:
        """Something to keep."""


class _LineUI:
    """For files, pipes and bare installations: what is to be kept, and nothing that moves."""

    live = False

    def begin(self, title: str, total: int | None) -> None:
        pass

    def advance(self, text: str | None) -> None:
        pass

    def line(self, text: str) -> None:
        print(text, flush=True)


class _BarUI:
    """For terminals."""

    live = True

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def begin(self, title: str, total: int | None) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(title, total=total, text="")

    def advance(self, text: str | None) -> None:
        assert self.task is not None
        self.progress.advance(self.task)
        if text is not None:
            self.progress.update(self.task, text=text)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


_live_bars = 0  # on the screen now


@contextmanager
def progress_ui() -> Iterator[ProgressUI]:
    """The best screen that there is: inside of a loop that has a bar, another one has lines only."""
    global _live_bars
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield _LineUI()
        return
    console = Console(file=sys.stdout)
    if _live_bars or not console.is_terminal:
        yield _LineUI()
        return
    columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[text]}"))
    _live_bars += 1
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            yield _BarUI(progress)
    finally:
        _live_bars -= 1
