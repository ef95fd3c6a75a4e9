"""Thread-local state that must follow the work: autocast and the default device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.forward_context import MicroBatch
from penstock.engine.stage import StageEngine

__all__ = ["CallerContext", "RunNames", "begin_run", "caller_context"]

_DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class CallerContext:
    """What the caller had switched on when it called the pipeline.

    It is entered around forwards alone: a backward runs outside autocast, as in a plain training loop.
    """

    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device type, dtype, cache
    device: torch.device | None

    def __bool__(self) -> bool:
        return bool(self.autocast) or self.device is not None

    def contexts(self) -> list[AbstractContextManager[object]]:
        autocasts = [torch.autocast(kind, dtype, cache_enabled=cache) for kind, dtype, cache in self.autocast]
        return [*autocasts, *([] if self.device is None else [self.device])]


class ReentrantContext:
    """An ambient state that a stage enters again for each forward."""

    def __init__(self, ambient: CallerContext) -> None:
        self.ambient = ambient
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for context in self.ambient.contexts():
            stack.enter_context(context)
        self.open.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.open.pop().__exit__(*error)


def begin_run(
    stages: Iterable[StageEngine], state: CallerContext, microbatches: int, run_name: str
) -> Sequence[MicroBatch]:
    """Let the stages' forwards run in the caller's state, on so many micro-batches; ``run_name`` names the run."""
    moments = [MicroBatch(k) for k in range(microbatches)]
    for stage in stages:
        stage.moments = moments
        if stage.randomness is not None:
            stage.randomness.run_name = run_name
        stage.around = ReentrantContext(state) if state else None
        mode = (state, *[part.training for part in stage.parts])
        stage.mode = stage.modes.setdefault(mode, mode)  # one object for each: it is compared by identity
    return moments


class RunNames:
    """Names for the runs of a pipeline: steps and other calls are counted apart."""

    def __init__(self) -> None:
        self.counts = {"step": 0, "call": 0}

    def next(self, *, training: bool) -> str:
        kind = "step" if training else "call"
        self.counts[kind] += 1
        return f"{kind} {self.counts[kind]}"


def caller_context() -> CallerContext:
    """The calling thread's state."""
    cache = torch.is_autocast_cache_enabled()
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind), cache) for kind in _DEVICE_TYPES if torch.is_autocast_enabled(kind)
    )
    default = torch.get_default_device()
    return CallerContext(autocast, None if default == torch.device("cpu") else default)
