"""The best way to cut a line of weights, against trying them all."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.split.balance import MemoryLimitError, WeightPieces, partition


def parts_of(items: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [items[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def total(items: Sequence[float] | Sequence[WeightPieces]) -> Fraction:
    """The weight of a part: pieces shared by several of its items count once."""
    bags = [item if isinstance(item, Mapping) else {(i,): item} for i, item in enumerate(items)]
    pieces = {key: weight for bag in bags for key, weight in bag.items()}
    return sum((Fraction(weight) for weight in pieces.values()), Fraction(0))


def heaviest(weights: Sequence[Any], sizes: Sequence[int]) -> Fraction:
    return max(total(part) for part in parts_of(weights, sizes))


def cost(crossing: Sequence[float], sizes: Sequence[int]) -> Fraction:
    return sum((Fraction(crossing[sum(sizes[:i])]) for i in range(1, len(sizes))), Fraction(0))


def unevenness(weights: Sequence[Any], sizes: Sequence[int]) -> tuple[Fraction, int]:
    squares = (total(part) ** 2 for part in parts_of(weights, sizes))
    return sum(squares, Fraction(0)), sum(size**2 for size in sizes)


def ways(items: int, parts: int) -> Iterator[list[int]]:
    """All ways to cut."""
    for cuts in combinations(range(1, items), parts - 1):
        yield [b - a for a, b in zip([0, *cuts], [*cuts, items], strict=True)]


numbers = st.integers(0, 20) | st.floats(0, 20, allow_nan=False) | st.sampled_from([0.1, 0.2, 0.3, 0.7])
bags = st.dictionaries(st.integers(0, 4), st.just(0)).map(lambda keys: {key: key * 1.5 + 1 for key in keys})


@st.composite
def lines(draw: st.DrawFn, weights: st.SearchStrategy[Any] = numbers) -> tuple[list[Any], int]:
    line = draw(st.lists(weights, min_size=1, max_size=8))
    return line, draw(st.integers(1, len(line)))


def check_shape(sizes: list[int], items: int, parts: int) -> None:
    assert len(sizes) == parts
    assert sum(sizes) == items
    assert min(sizes) >= 1


# ── the heaviest part ────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(lines() | lines(bags))
def test_no_way_to_cut_has_a_lighter_heaviest_part(case: tuple[list[Any], int]) -> None:
    weights, parts = case
    sizes = partition(weights, parts)
    check_shape(sizes, len(weights), parts)
    assert heaviest(weights, sizes) == min(heaviest(weights, way) for way in ways(len(weights), parts))


@pytest.mark.parametrize("parts", [0, 4, -1])
def test_parts_that_would_be_empty_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"3 items into {parts}"):
        partition([1, 2, 3], parts)


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused_by_its_place(bad: float) -> None:
    with pytest.raises(ValueError, match=r"weights\[1\]"):
        partition([1, bad], 1)
    with pytest.raises(ValueError, match=r"crossing\[1\]"):
        partition([1, 1], 1, crossing=[1, bad])


def test_floats_are_taken_as_what_they_are_not_as_they_add_up() -> None:
    """0.1 + 0.2 + 0.3 is 0.6 or 0.6000000000000001, as one adds: two ways to cut would seem to differ."""
    assert partition([0.3, 0.2, 0.1, 0.1, 0.2, 0.3], 2) == [3, 3]


# ── ties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(lines(st.integers(0, 3)) | lines(), st.lists(st.sampled_from([0, 1, 0.1, 0.2, 0.3]), min_size=8, max_size=8))
def test_of_the_lightest_the_one_with_the_cheapest_cuts_then_the_most_even(
    case: tuple[list[Any], int], crossing: list[float]
) -> None:
    weights, parts = case
    crossing = crossing[: len(weights)]
    sizes = partition(weights, parts, crossing=crossing)
    check_shape(sizes, len(weights), parts)

    def wish(way: list[int]) -> tuple[Any, ...]:
        return heaviest(weights, way), cost(crossing, way), unevenness(weights, way)

    assert wish(sizes) == min(wish(way) for way in ways(len(weights), parts))


def test_the_picture_above_the_module() -> None:
    assert partition([4, 1, 1, 5, 2, 3], 3, crossing=[0, 9, 9, 1, 1, 9]) == [3, 1, 2]


def test_one_heavy_item_leaves_the_rest_to_be_even() -> None:
    assert partition([10, 1, 1, 1, 1, 1, 1], 3) == [1, 3, 3]


def test_nothing_weighs_anything_and_the_parts_are_even_all_the_same() -> None:
    assert partition([0] * 10, 4) == [3, 3, 2, 2]


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────


@settings(deadline=None)
@given(
    lines() | lines(bags),
    st.lists(numbers, min_size=8, max_size=8) | st.lists(bags, min_size=8, max_size=8),
    st.integers(0, 60) | st.lists(st.floats(0, 60), min_size=8, max_size=8),
    st.lists(st.integers(0, 3), min_size=8, max_size=8),
)
def test_limits_are_kept_by_the_best_that_keeps_them_and_refused_if_none_does(
    case: tuple[list[Any], int], memory: list[Any], limits: float | list[float], crossing: list[int]
) -> None:
    weights, parts = case
    memory, crossing = memory[: len(weights)], crossing[: len(weights)]
    each = limits[:parts] if isinstance(limits, list) else [limits] * parts

    def keeps(way: list[int], more: int = 0) -> bool:
        return all(total(part) <= limit + more for part, limit in zip(parts_of(memory, way), each, strict=True))

    allowed = [way for way in ways(len(weights), parts) if keeps(way)]
    given_limits = each if isinstance(limits, list) else limits
    if not allowed:
        with pytest.raises(MemoryLimitError) as caught:
            partition(weights, parts, memory=memory, limits=given_limits)
        more = caught.value.short  # and that is the least that would do, to the byte
        assert any(keeps(way, more) for way in ways(len(weights), parts))
        assert not any(keeps(way, more - 1) for way in ways(len(weights), parts))
        too_big = [i for i, item in enumerate(memory) if total([item]) > max(each)]
        assert (caught.value.item in too_big) if too_big else (caught.value.item is None)
        return
    sizes = partition(weights, parts, memory=memory, limits=given_limits, crossing=crossing)
    check_shape(sizes, len(weights), parts)
    assert keeps(sizes)
    least = min((heaviest(weights, way), cost(crossing, way), unevenness(weights, way)) for way in allowed)
    assert (heaviest(weights, sizes), cost(crossing, sizes), unevenness(weights, sizes)) == least


def test_an_item_that_fits_in_only_one_of_the_parts_goes_there() -> None:
    assert partition([1, 1, 1, 1], 2, memory=[1, 1, 1, 9], limits=[9, 9]) == [3, 1]
    assert partition([1, 1, 1, 1], 2, memory=[9, 1, 1, 1], limits=[9, 9]) == [1, 3]
    with pytest.raises(MemoryLimitError, match="6 more would do"):
        partition([1, 1, 1, 1], 2, memory=[9, 1, 1, 1], limits=[3, 9])


def test_a_limit_that_cannot_be_kept_says_what_can_and_which_item_is_too_big() -> None:
    with pytest.raises(MemoryLimitError, match="do not fit into the parts: 3 more would do"):
        partition([1, 1, 1], 2, memory=[1, 7, 1], limits=5)


def test_what_is_shared_counts_once_in_a_part() -> None:
    shared = [{"w": 10, "a": 1}, {"w": 10, "b": 1}, {"c": 12}]
    assert partition([1, 1, 1], 2, memory=shared, limits=12) == [2, 1]
    with pytest.raises(ValueError, match=r"'w' with 11, an item before it with 10"):
        partition([{"w": 10}, {"w": 11}], 1)


def test_as_many_limits_as_parts() -> None:
    with pytest.raises(ValueError, match="3 limits"):
        partition([1, 1, 1], 2, memory=[1, 1, 1], limits=[1, 2, 3])


# ── size ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("limits", [None, 1000.0, [1000.0 + i for i in range(64)]], ids=["free", "one", "each"])
def test_two_hundred_layers_into_sixty_four_stages(limits: Any) -> None:
    """A tenth of a second; an algorithm gone exponential would run into the timeout."""
    dice = random.Random(0)
    weights, memory = [dice.random() for _ in range(200)], [{0: 10.0, i: dice.random()} for i in range(1, 201)]
    crossing = [dice.random() for _ in range(200)]
    sizes = partition(weights, 64, crossing=crossing, memory=memory, limits=limits)
    check_shape(sizes, 200, 64)
