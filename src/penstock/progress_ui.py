"""Progress of a loop: lines that stay and, on a terminal, a live bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressUI:
    """Reports of a loop. Without a ``progress`` of rich there is no bar: for files, pipes and nested loops."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    @property
    def live(self) -> bool:
        """Whether the text of ``advance`` is visible."""
        return self.progress is not None

    def begin(self, title: str, total: int | None) -> None:
        """Start a bar of ``total`` steps; None: an unknown number."""
        if self.progress is not None:
            if self.task is not None:
                self.progress.remove_task(self.task)
            self.task = self.progress.add_task(title, total=total, text="")

    def advance(self, text: str | None, steps: int = 1) -> None:
        """Count steps. ``text`` replaces the text beside the bar; None keeps it."""
        if self.progress is not None and self.task is not None:
            self.progress.advance(self.task, steps)
            if text is not None:
                self.progress.update(self.task, text=text)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self.progress is None:
            print(text, flush=True)
        else:
            self.progress.console.print(text, markup=False, highlight=False)


_live_bars = 0


@contextmanager
def progress_ui() -> Iterator[ProgressUI]:
    """A bar where stdout is a terminal, but not within a loop that has one already; otherwise lines only."""
    global _live_bars
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(file=sys.stdout)
    if _live_bars or not console.is_terminal:
        yield ProgressUI()
        return
    columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[text]}"))
    _live_bars += 1
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            yield ProgressUI(progress)
    finally:
        _live_bars -= 1
