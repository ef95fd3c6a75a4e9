"""What a program knows of lanes: one edge in one direction, and each micro-batch's passage along it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

__all__ = ["Lane", "Passage", "passage"]


class Passage(NamedTuple):
    """The calls that carry one micro-batch's message along a lane, made once and called in every step.

    What another rank sends lands first, and is taken then: so a rank that waits is seen to wait, and not to compute.
    """

    send: Callable[[Any], None]
    land: Callable[[], None]
    take: Callable[[], Any]
    post: Callable[[], None] | None = None  # between processes: a receive is posted ahead,
    sent: Callable[[], None] | None = None  # and a send is over some time later
    taken: Callable[[], None] | None = None  # there where a sender waits until what it sent, or enough, is taken


class Lane(Protocol):
    """One edge in one direction: what a stage sends along it, another one takes."""

    def at(self, microbatch: int) -> Passage: ...


class Posted(Protocol):
    """A lane between processes, whose methods are told of which micro-batch."""

    def send(self, microbatch: int, payload: Any) -> None: ...

    def land(self, microbatch: int) -> None: ...

    def take(self, microbatch: int) -> Any: ...

    def post(self, microbatch: int) -> None: ...

    def sent(self, microbatch: int) -> None: ...


def passage(lane: Posted, microbatch: int) -> Passage:
    """The passage of a lane between processes, by its methods."""
    return Passage(*(partial(call, microbatch) for call in (lane.send, lane.land, lane.take, lane.post, lane.sent)))
