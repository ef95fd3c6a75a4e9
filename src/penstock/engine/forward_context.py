"""Thread-local state of a forward: the micro-batch it works on, and the caller's autocast and default device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.errors import PlanError
from penstock.split.trace.stage import TracedStage


class MicroBatch:
    """One micro-batch of one step: a key under which layers may store values, freed with the step.

    It equals only itself, not its ``index``, because micro-batches of other steps have the same index.
    """

    __slots__ = ("__weakref__", "index", "known", "variant")

    def __init__(self, index: int, variant: str | None = None) -> None:
        self.index = index
        self.variant = variant  # the kind of call, if the stages of a recorded model distinguish several
        self.known = False  # whether ``current_microbatch`` returned it to a layer, which may have stored values

    def __repr__(self) -> str:
        return f"MicroBatch({self.index})"

    def __index__(self) -> int:
        return self.index

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int):  # would silently be False
            raise PlanError(f"{self!r} is not a number: compare current_microbatch().index with {other}")
        return self is other


class _ForwardState(threading.local):
    microbatch: MicroBatch | None = None
    checkpointing = False
    recomputing = False
    keeper: Any = None  # the ``KeptValues`` of a forward that will be recomputed
    rng_session: Any = None  # the ``_RngSession`` of a forward whose modules draw random numbers


forward_state = _ForwardState()


TracedStage.current_variant = staticmethod(lambda: getattr(forward_state.microbatch, "variant", None))


@contextmanager
def variant_in_flight(variant: str | None) -> Iterator[None]:
    """Run a forward outside of a step as a micro-batch of this kind of call."""
    forward_state.microbatch, before = MicroBatch(0, variant), forward_state.microbatch
    try:
        yield
    finally:
        forward_state.microbatch = before


def current_microbatch() -> MicroBatch | None:
    """The micro-batch whose forward runs in this thread; None outside of a pipeline."""
    if forward_state.microbatch is not None:
        forward_state.microbatch.known = True
    return forward_state.microbatch


def is_checkpointing() -> bool:
    """Whether this forward saves nothing for its backward and will be recomputed."""
    return forward_state.checkpointing


def is_recomputing() -> bool:
    """Whether this forward is recomputed for its backward."""
    return forward_state.recomputing


@dataclass(frozen=True)
class CallerContext:
    """Autocast and default device of the thread that called the pipeline.

    Only forwards run in it: a backward runs outside autocast, as in a plain training loop.
    """

    autocast: tuple[tuple[str, torch.dtype, bool], ...]  # device type, dtype, cache
    device: torch.device | None

    def __bool__(self) -> bool:
        return bool(self.autocast) or self.device is not None

    def entered(self) -> ExitStack:
        """A context manager that sets autocast and default device."""
        stack = ExitStack()
        for kind, dtype, cache in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cache))
        if self.device is not None:
            stack.enter_context(self.device)
        return stack


def caller_context() -> CallerContext:
    """The calling thread's autocast and default device."""
    cache = torch.is_autocast_cache_enabled()
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    autocast = tuple((kind, torch.get_autocast_dtype(kind), cache) for kind in kinds)
    default = torch.get_default_device()
    return CallerContext(autocast, None if default == torch.device("cpu") else default)
