"""What the demo shows while it runs: a line for every epoch and, on a terminal with ``rich``, a live bar below."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

__all__ = ["Screen", "screen"]


class Screen(Protocol):
    """Where the demo reports to."""

    def begin(self, title: str, total: int) -> None:
        """A new stretch of ``total`` steps starts."""

    def advance(self, text: str) -> None:
        """One step is done; ``text`` says how it stands."""

    def line(self, text: str) -> None:
        """Something to keep."""


class _Lines:
    """For files, pipes and bare installations: what is to be kept, and nothing that moves."""

    def begin(self, title: str, total: int) -> None:
        pass

    def advance(self, text: str) -> None:
        pass

    def line(self, text: str) -> None:
        print(text, flush=True)


class _Bar:
    """For terminals."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task: TaskID | None = None

    def begin(self, title: str, total: int) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
        self.task = self.progress.add_task(title, total=total, text="")

    def advance(self, text: str) -> None:
        assert self.task is not None
        self.progress.update(self.task, advance=1, text=text)

    def line(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)


@contextmanager
def screen() -> Iterator[Screen]:
    """The best screen that there is."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
    except ImportError:
        yield _Lines()
        return
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.fields[text]}"))
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bar(progress)
