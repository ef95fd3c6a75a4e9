"""The best way to cut a line of weights, against trying them all."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.split.partition import partition


def heaviest(weights: list[int], sizes: list[int]) -> int:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return max(sum(weights[start : start + size]) for start, size in zip(starts, sizes, strict=True))


def best(weights: list[int], parts: int) -> int:
    """The smallest heaviest part over all ways to cut."""
    ends = range(1, len(weights))
    ways = ([*cuts, len(weights)] for cuts in combinations(ends, parts - 1))
    return min(heaviest(weights, [b - a for a, b in zip([0, *way], way, strict=False)]) for way in ways)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=9).flatmap(
        lambda w: st.tuples(st.just(w), st.integers(1, len(w)))
    )
)
def test_no_way_to_cut_has_a_lighter_heaviest_part(case: tuple[list[int], int]) -> None:
    weights, parts = case
    sizes = partition(weights, parts)
    assert len(sizes) == parts
    assert sum(sizes) == len(weights)
    assert min(sizes) >= 1
    assert heaviest(weights, sizes) == best(weights, parts)


@pytest.mark.parametrize("parts", [0, 4, -1])
def test_parts_that_would_be_empty_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"3 items into {parts}"):
        partition([1, 2, 3], parts)
