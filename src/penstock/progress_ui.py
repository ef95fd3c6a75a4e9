"""Progress of a loop on the terminal: permanent lines and, where stdout is a terminal, a bar below them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["ProgressUI", "progress_ui"]

_live_bars = 0


class ProgressUI:
    """Prints lines, and updates a bar if there is one (``live``)."""

    def __init__(self, bar: Progress | None = None) -> None:
        self.live = bar is not None
        self._bar = bar

    def begin(self, title: str, total: int | None) -> None:
        """Start a new bar of ``total`` steps (None: unknown)."""
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(title, total=total, text="")

    def advance(self, text: str | None) -> None:
        """Advance the bar by one step; ``text`` replaces the text beside it."""
        if self._bar is not None:
            (task,) = self._bar.task_ids
            self._bar.advance(task)
            if text is not None:
                self._bar.update(task, text=text)

    def line(self, text: str) -> None:
        """Print a permanent line."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.console.print(text, markup=False, highlight=False)


@contextmanager
def progress_ui() -> Iterator[ProgressUI]:
    """A bar if stdout is a terminal without one, else lines only."""
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
        with Progress(*columns, console=console, transient=True) as bar:
            yield ProgressUI(bar)
    finally:
        _live_bars -= 1
