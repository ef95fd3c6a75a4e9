"""Costs at several micro-batch sizes, and between them.

seconds │            ·●      Measured at ●. Between two sizes a straight line; beyond them the line goes on, but it
        │       ·●·          never falls, and never below zero: a layer has a part that each sample adds (its
        │   ·●·              slope) and a fixed part (where it starts), and none of the two is negative.
        │·
        └─────────────── samples
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PlanError
from penstock.profile.costs import TIMES, Crossing, LayerCosts, Link, ModelCosts, check_samples

__all__ = ["Profile"]


@dataclass(frozen=True)
class Profile:
    """The costs of one model for micro-batches of one or more sizes, the smallest first.

    Where there is one size only, everything that a sample adds to is in proportion to the samples.
    """

    sizes: tuple[ModelCosts, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PlanError("a profile needs costs for at least one size of micro-batch")
        samples = [costs.samples for costs in self.sizes]
        if samples != sorted(set(samples)):
            raise PlanError(f"a profile has each size once, the smallest first, got sizes {samples}")
        first = self.sizes[0]
        for other in self.sizes[1:]:
            where = f"the costs for {first.samples} and for {other.samples} samples"
            if [layer.name for layer in other.layers] != [layer.name for layer in first.layers]:
                raise PlanError(f"{where} have other layers: a profile is of one model")
            for one, two in zip(first.layers, other.layers, strict=True):
                if any(getattr(one, what) != getattr(two, what) for what in FIXED):
                    raise PlanError(f"{where} differ in the parameters of layer {one.name!r}: it is another model")
            if [(c.src, c.dst) for c in other.crossings] != [(c.src, c.dst) for c in first.crossings]:
                raise PlanError(f"{where} have other crossings: a profile is of one model")

    def at(self, samples: int) -> ModelCosts:
        """The costs for micro-batches of ``samples`` samples."""
        check_samples(samples)
        for costs in self.sizes:
            if costs.samples == samples:
                return costs
        first = self.sizes[0]
        layers = tuple(self._layer(i, samples) for i in range(len(first.layers)))
        return replace(
            first,
            layers=layers,
            crossings=tuple(self._crossing(i, samples) for i in range(len(first.crossings))),
            samples=samples,
            kept_together=self._kept_together(samples, layers),
        )

    def _line(self, values: Sequence[float], samples: int) -> float:
        """What a quantity comes to, of which ``values`` are those of the sizes."""
        at = [costs.samples for costs in self.sizes]
        if len(at) == 1:
            return values[0] * samples / at[0]
        right = min(max(bisect_left(at, samples), 1), len(at) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (at[right] - at[left])
        if samples > at[-1]:
            return values[-1] + max(slope, 0.0) * (samples - at[-1])
        if samples < at[0]:
            slope = min(max(slope, 0.0), values[0] / at[0])  # neither part of it is negative
            return values[0] + slope * (samples - at[0])
        return values[left] + slope * (samples - at[left])

    def _layer(self, index: int, samples: int) -> LayerCosts:
        rows = [costs.layers[index] for costs in self.sizes]
        found: dict[str, Any] = {
            what: self._line([getattr(row, what) for row in rows], samples) for what in (*TIMES, "activation")
        }
        whole = [row.full_backward for row in rows]
        backward = None if all(row.backward is None for row in rows) else self._line(whole, samples)
        waits = [row.deferred for row in rows if row.deferred is not None]
        deferred = self._line(waits, samples) if len(waits) == len(rows) else None
        return replace(rows[0], backward=backward, deferred=deferred, **found)

    def _crossing(self, index: int, samples: int) -> Crossing:
        rows = [costs.crossings[index] for costs in self.sizes]
        known = [dict(row.values) for row in rows]
        if not all(known) or any(values.keys() != known[0].keys() for values in known):
            return replace(rows[0], bytes=self._line([row.bytes for row in rows], samples), values=())
        values = tuple((number, self._line([sizes[number] for sizes in known], samples)) for number in known[0])
        return replace(rows[0], bytes=sum(size for _, size in values), values=values)

    def _kept_together(self, samples: int, layers: Sequence[LayerCosts]) -> tuple[tuple[int, int, float], ...]:
        """What layers keep together, which is never more than each of them keeps: lines may cross beyond the sizes."""
        known = [{(a, b): size for a, b, size in costs.kept_together} for costs in self.sizes]
        left, found = [layer.activation for layer in layers], []
        for a, b in sorted(set().union(*known)):
            size = min(left[b], self._line([sizes.get((a, b), 0.0) for sizes in known], samples))
            left[b] -= size
            found.append((a, b, size))
        return tuple(found)

    def over(self, link: Link) -> Profile:
        """The same costs with another link between devices."""
        return Profile(tuple(replace(costs, link=link) for costs in self.sizes))

    def to_json(self) -> str:
        from penstock.profile.costfile import write

        return write(self.sizes)

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Profile:
        """A profile from JSON; ``origin`` names it in errors. Costs for one size are a profile too."""
        from penstock.profile.costfile import read

        return cls(tuple(sorted(read(text, origin), key=lambda costs: costs.samples)))

    def save(self, path: str | Path) -> None:
        """Write the costs of all sizes as JSON."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        from penstock.profile.costfile import text_of

        return cls.from_json(text_of(path), str(path))


FIXED = ("parameters", "gradients", "optimizer", "buffers")
