"""Ranks that take turns: their orders as one, with as few changes from one to the other as the work allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.schedule.action import Action
from penstock.schedule.flow import Edge, flow
from penstock.schedule.schedule import Schedule

__all__ = ["take_turns"]


def take_turns(schedule: Schedule, edges: Iterable[Edge], joined: Sequence[int]) -> Schedule:
    """The same actions on fewer ranks: ``joined[r]`` does the work of rank ``r``, in the order that ``r`` has.

    Each goes on until it must wait for another, so GPipe goes through its stages one after the other::

        rank 0: 0F0 0F1 .   .   .   0B0 0B1        rank 0: 0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1
        rank 1: .   1F0 1F1 1B0 1B1
    """
    orders: list[list[Action]] = [[] for _ in range(max(joined) + 1)]
    for rank, begin, end in flow(schedule, edges).runs:
        orders[joined[rank]].extend(schedule.orders[rank][begin:end])
    placement = [joined[rank] for rank in schedule.placement]
    return Schedule.of(schedule.name, placement, orders, schedule.num_microbatches)
