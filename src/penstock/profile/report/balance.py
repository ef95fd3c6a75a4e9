"""A better cut, as far as a trace can tell: it has the times of stages, not of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from penstock.schedule.costs import Costs
from penstock.schedule.simulate import Simulation, simulate
from penstock.split.partition import partition

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["Cut", "better_cut", "layers_of", "mapped", "moves", "recut", "stage_seconds"]

_LARGE = 200_000  # actions to simulate; for more of them, only the most even cut is looked at


@dataclass(frozen=True)
class Cut:
    """How many layers each stage has, and would have: with ``costs``, a step is shorter by ``saved`` of its time."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    layers: tuple[str, ...]
    costs: Costs
    saved: float

    @property
    def text(self) -> str:
        """What to change, in words."""
        moved = self._moved()
        if len(moved) == 1:
            layer, old, new = moved[0]
            return f"moving layer {layer} from stage {old} to stage {new}"
        numbers, there = (", ".join(map(str, sizes)) for sizes in (self.after, self.before))
        return f"a cut into stages of {numbers} layers, not {there},"

    def _moved(self) -> list[tuple[str, int, int]]:
        pairs = zip(self.layers, _owners(self.before), _owners(self.after), strict=True)
        return [(layer, old, new) for layer, old, new in pairs if old != new]


def layers_of(trace: Trace) -> list[tuple[str, ...]] | None:
    """The names of each stage's layers, from the trace's plan; None if it has none of them all."""
    stages = trace.plan.get("stages", [])
    if len(stages) != trace.schedule.num_stages or not all(stage["layers"] for stage in stages):
        return None
    return [tuple(map(str, stage["layers"])) for stage in stages]


def stage_seconds(costs: Costs, num_stages: int, trains: bool) -> list[float]:
    """The time of one micro-batch in each stage, there and back."""
    times = costs.durations(num_stages)
    return [f + b for f, b in zip(times["F"], times["B"], strict=True)] if trains else times["F"]


def better_cut(trace: Trace, base: Simulation) -> Cut | None:
    """The fastest of some cuts, if the layers of a stage cost alike; None where none is faster, or layers are unknown.

    Looked at are the most even cut, and those in which one layer moves to the next stage or to the one before. Messages
    are taken to be as large and as fast as they are, wherever the cut is. No rank keeps more than the fullest does now.
    """
    groups = layers_of(trace)
    if groups is None or sum(map(len, groups)) == len(groups):
        return None
    before = tuple(map(len, groups))
    seconds = stage_seconds(base.costs, len(groups), base.schedule.trains)
    shares = [s / count for s, count in zip(seconds, before, strict=True) for _ in range(count)]
    cuts = [tuple(partition(shares, len(groups)))]
    if sum(map(len, base.schedule.orders)) * len(groups) <= _LARGE:
        cuts += moves(before)
    best: Cut | None = None
    for after in cuts:
        costs = recut(base.costs, before, after)
        found = simulate(base.schedule, costs, trace.edges)
        saved = 1 - found.makespan / base.makespan if base.makespan else 0.0
        fits = max(found.peak_memory) <= max(base.peak_memory) * (1 + 1e-9)
        if fits and saved > (0.0 if best is None else best.saved):
            best = Cut(before, after, tuple(layer for group in groups for layer in group), costs, saved)
    return best


def moves(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All cuts in which one layer is on the other side of one cut."""
    for stage in range(len(sizes) - 1):
        for here, there in ((stage, stage + 1), (stage + 1, stage)):
            if sizes[here] > 1:
                yield tuple(n - (s == here) + (s == there) for s, n in enumerate(sizes))


def recut(costs: Costs, before: Sequence[int], after: Sequence[int]) -> Costs:
    """The costs of stages of other sizes, each layer with an even share of what its stage had."""
    ends = list(accumulate(after))

    def moved(numbers: list[float]) -> list[float]:
        shares = [number / count for number, count in zip(numbers, before, strict=True) for _ in range(count)]
        return [sum(shares[end - count : end]) for end, count in zip(ends, after, strict=True)]

    return mapped(costs, len(before), moved)


def mapped(costs: Costs, num_stages: int, change: Callable[[list[float]], list[float]]) -> Costs:
    """The costs with all that is counted by stages changed: ``change`` gets the numbers of all stages."""
    names = [name for name in ("f", "i", "w", "b", "r", "activation") if getattr(costs, name) is not None]
    changed: dict[str, Any] = {name: tuple(change(costs.of_stages(name, num_stages))) for name in names}
    return replace(costs, **changed)


def _owners(sizes: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(sizes) for _ in range(count)]
