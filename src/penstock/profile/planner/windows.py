"""Which states of two runs are looked at together: how far these have got, ``x`` and ``y``.

What ranks have done together is about the same in all of them: where the first run has got further, the second one has
not. So rows are those of one ``x``, and columns those of one ``x + y``, of which there are few::

            x + y = 7   8   9
    x = 5   y =     2   3   4
    x = 4           3   4   5       rows count down, so that y goes up in both ways
    x = 3           4   5   6
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Place", "Reached", "Window"]

Place = tuple[int, int]
"""How far the two runs have got."""


@dataclass(frozen=True)
class Window:
    """The ``x`` of the first row, the ``x + y`` of the first column, and how many there are of them."""

    x: int
    both: int
    rows: int
    columns: int

    def down(self, values: Tensor) -> Tensor:
        """Of values for each ``x``, those of the rows."""
        return values[..., self.x - self.rows + 1 : self.x + 1].flip(-1)

    def along(self, values: Tensor, none: float) -> Tensor:
        """Of values for each ``y``, those of the first row and then of the last column; ``none`` if there is none."""
        first = self.both - self.x
        last, count = first + self.rows + self.columns - 1, values.shape[-1]
        if first >= 0 and last <= count:
            return values[..., first:last]
        part = values[..., max(0, first) : min(last, count)]
        found = values.new_full((*values.shape[:-1], last - first), none)
        found[..., max(0, -first) : max(0, -first) + part.shape[-1]] = part
        return found

    def across(self, values: Tensor, none: float) -> Tensor:
        """Of values for each ``y``, those of all rows and columns."""
        return self.along(values, none).unfold(-1, self.columns, 1)


@dataclass(frozen=True)
class Reached:
    """The states before a rank: for each row and column words of bits."""

    words: Tensor  # [words, rows, columns]
    x: int
    both: int

    @property
    def window(self) -> Window:
        return Window(self.x, self.both, *self.words.shape[1:])

    def trimmed(self) -> Reached | None:
        """Without rows and columns at the sides that have no bits; None if there are none at all."""
        some = self.words.any(0)
        rows, columns = (some.any(way).nonzero().flatten().tolist() for way in (1, 0))
        if not rows:
            return None
        part = self.words[:, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        return Reached(part, self.x - rows[0], self.both + columns[0])

    def every(self, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """All bits that are set, numbered on from word to word of so many, with their ``x`` and ``y``."""
        word, row, column = self.words.nonzero().unbind(1)
        state, bit = (self.words[word, row, column][:, None] >> torch.arange(bits) & 1).nonzero().unbind(1)
        return bits * word[state] + bit, *self._places(row[state], column[state])

    def having(self, word: int, bit: int) -> tuple[Tensor, Tensor]:
        """The ``x`` and ``y`` of all states with a bit."""
        return self._places(*(self.words[word] & (1 << bit)).nonzero().unbind(1))

    def _places(self, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
        x = self.x - row
        return x, self.both + column - x
