"""One epoch of a loader under way, and how far it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.train.prefetch import Delivery, Sent

__all__ = ["Iteration", "Position"]


@dataclass
class Position:
    """A place in the order of batches: those given out in an epoch, and whether that has ended."""

    epoch: int
    batches: int
    ended: bool = False


class Iteration:
    """One epoch, batch by batch. It keeps none of them."""

    def __init__(self, source: Iterator[Sent], delivery: Delivery, position: Position) -> None:
        self._source = source
        self._delivery = delivery
        self._position = position
        self.ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.ended:
            raise StopIteration
        try:
            batch = self._delivery.receive(next(self._source))
        except BaseException as error:
            self.ended = True
            self._position.ended = isinstance(error, StopIteration)  # after a failure its batch is still to be given
            raise
        self._position.batches += 1
        return batch
