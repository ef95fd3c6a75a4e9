"""A schedule: for each rank, the order in which it does its stages' work. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.errors import ScheduleError
from penstock.schedule.action import Action

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """Who does what, in which order.

    ``placement[s]`` is the rank that holds stage ``s``; ``orders[r]`` is what rank ``r`` does, in order.
    Idle time is not part of a schedule: a rank starts an action when the one before it is done and its
    inputs are there.
    """

    name: str
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds of work that occur."""
        return frozenset(action.kind for order in self.orders for action in order)

    @property
    def trains(self) -> bool:
        """Whether there is any backward work."""
        return bool(self.kinds - {"F"})

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in the order of the model."""
        return tuple(s for s, r in enumerate(self.placement) if r == rank)

    def first(self, num_microbatches: int) -> Schedule:
        """The same order for the first ``num_microbatches`` only.

        Dropping micro-batches keeps a schedule valid: no action waits for another micro-batch's data, and
        what remains keeps its order.
        """
        if num_microbatches > self.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name!r} is for {self.num_microbatches} micro-batches, not for {num_microbatches}"
            )
        if num_microbatches == self.num_microbatches:
            return self
        orders = tuple(tuple(a for a in order if a.microbatch < num_microbatches) for order in self.orders)
        return replace(self, orders=orders, num_microbatches=num_microbatches)

    @classmethod
    def of(
        cls, name: str, placement: Sequence[int], orders: Iterable[Iterable[Action]], num_microbatches: int
    ) -> Schedule:
        """From any iterables."""
        return cls(name, tuple(placement), tuple(tuple(order) for order in orders), num_microbatches)

    def __str__(self) -> str:
        from penstock.schedule.text import to_text

        return to_text(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from penstock.notebook import schedule_html

        return schedule_html(self)

    def _repr_svg_(self) -> str | None:
        from penstock.notebook import schedule_svg

        return schedule_svg(self)
