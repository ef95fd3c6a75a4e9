"""Progress of a loop: lines that stay and, on a terminal, a live bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn


class ProgressUI:
    """Reports of a loop. ``live``: with a bar, whose text is visible."""

    def __init__(self, console: Console, live: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(10), TextColumn("{task.fields[text]}"))
        self.live = live
        self.progress = Progress(*columns, console=console, transient=True, disable=not live)
        self.task: TaskID | None = None

    def begin(self, title: str, total: int | None) -> None:
        """Start a bar of ``total`` steps; None: an unknown number."""
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
        """Print a line that stays."""
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


_live_bars = 0


@contextmanager
def progress_ui() -> Iterator[ProgressUI]:
    """A bar where stdout is a terminal, but not within a loop that has one already; otherwise lines only."""
    global _live_bars
    console = Console(file=sys.stdout)
    ui = ProgressUI(console, live=console.is_terminal and not _live_bars)
    _live_bars += ui.live
    try:
        with ui.progress:
            yield ui
    finally:
        _live_bars -= ui.live
