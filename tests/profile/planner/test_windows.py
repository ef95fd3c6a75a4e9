"""Windows of states: what is at each row and column is that of their ``x`` and ``y``."""

from __future__ import annotations

from math import inf

import pytest
import torch

from penstock.profile.planner.windows import Reached, Window


@pytest.mark.parametrize(
    "window", [Window(5, 7, 3, 3), Window(5, 3, 3, 4), Window(2, 9, 2, 6), Window(9, 9, 10, 11), Window(0, 0, 1, 1)]
)
def test_values_are_those_of_the_places(window: Window) -> None:
    values = torch.arange(20.0).view(2, 10)
    down, across = window.down(values), window.across(values, inf)
    assert across.shape == (2, window.rows, window.columns)
    for row in range(window.rows):
        x = window.x - row
        assert down[:, row].tolist() == values[:, x].tolist()
        for column in range(window.columns):
            y = window.both + column - x
            assert across[:, row, column].tolist() == (values[:, y].tolist() if 0 <= y < 10 else [inf] * 2)


def test_states_are_told_by_their_bits() -> None:
    words = torch.zeros(2, 4, 5, dtype=torch.int64)
    words[0, 1, 2], words[1, 2, 3], words[1, 1, 2] = 0b101, 0b10, 1
    states = sorted([(0, 6, 6), (2, 6, 6), (4, 5, 8), (3, 6, 6)])
    for reached in (whole := Reached(words, 7, 10), whole.trimmed()):
        assert reached is not None
        assert sorted(zip(*(numbers.tolist() for numbers in reached.every(3)), strict=True)) == states
        assert [numbers.tolist() for numbers in reached.having(1, 1)] == [[5], [8]]
    assert reached.words.shape == (2, 2, 2)
    assert Reached(torch.zeros_like(words), 7, 10).trimmed() is None
