"""A step visits few source files: a reader who follows one has to open no more than these."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from tests.support.ranks import Ranks


class Visited:
    """The functions of the package that are called, by file."""

    def __init__(self) -> None:
        self.functions: dict[str, set[str]] = defaultdict(set)

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        # The thread that watches for failures wakes up now and then: it is no part of a step.
        if event == "call" and "/penstock/" in frame.f_code.co_filename and not _is_watch(threading.current_thread()):
            file = frame.f_code.co_filename.split("/penstock/", 1)[1]
            self.functions[file].add(frame.f_code.co_qualname)

    def __str__(self) -> str:
        rows = [f"{file}: {', '.join(sorted(names))}" for file, names in sorted(self.functions.items())]
        return f"{len(rows)} files\n" + "\n".join(rows)


def _is_watch(thread: threading.Thread) -> bool:
    return thread is not threading.main_thread() and not thread.name.startswith("penstock rank")


def visited_by_step(**options: Any) -> Visited:
    """Those of the third step."""
    visited = Visited()
    threading.setprofile(visited)  # for the threads of the pipeline
    try:
        plan = ps.split(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), balance=[2, 2])
        with ps.Pipeline(plan, F.mse_loss, microbatches=4, **options) as pipe:
            x, y = torch.randn(8, 8), torch.randn(8, 8)
            pipe.step(x, y)
            pipe.step(x, y)
            visited.functions.clear()
            sys.setprofile(visited)
            try:
                pipe.step(x, y)
            finally:
                sys.setprofile(None)
            return visited
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


def test_a_step_of_threads_visits_at_most_15_files() -> None:
    visited = visited_by_step()
    assert len(visited.functions) <= 15, visited


def under_a_mesh(rank: int) -> None:
    visited = visited_by_step(mesh=ps.Mesh())
    assert len(visited.functions) <= 20, visited


def test_a_step_under_a_mesh_visits_at_most_20_files(two: Ranks) -> None:
    two.check(under_a_mesh)
