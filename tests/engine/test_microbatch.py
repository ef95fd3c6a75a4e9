"""Cutting a mini-batch into micro-batches and joining their outputs: one is the inverse of the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.microbatch import batch_size, join, microbatch_sizes, scatter
from penstock.errors import PlanError
from tests.support.models import assert_same


@settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 20))
def test_sizes_are_even_larger_first_and_none_is_empty(batch: int, microbatches: int) -> None:
    sizes = microbatch_sizes(batch, microbatches)
    assert sum(sizes) == batch
    assert len(sizes) == min(batch, microbatches)
    assert min(sizes) >= max(1, max(sizes) - 1)
    assert list(sizes) == sorted(sizes, reverse=True)


def test_ten_samples_in_four() -> None:
    assert microbatch_sizes(10, 4) == (3, 3, 2, 2)


values = st.recursive(
    st.sampled_from(["tensor", "matrix", "scalar", None, 3, 2.5, "text", True]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=8,
)


def fill(template: Any, samples: int) -> Any:
    """Tensors in the place of their names."""
    if isinstance(template, dict):
        return {key: fill(value, samples) for key, value in template.items()}
    if isinstance(template, (list, tuple)):
        return type(template)(fill(value, samples) for value in template)
    shapes = {"tensor": (samples,), "matrix": (samples, 2)}
    return torch.randn(shapes[template]) if isinstance(template, str) and template in shapes else template


@settings(deadline=None)
@given(values, st.integers(1, 9), st.integers(1, 5))
def test_joining_what_was_cut_gives_it_back(template: Any, samples: int, microbatches: int) -> None:
    value = fill(template, samples)
    sizes = microbatch_sizes(samples, microbatches)
    parts = scatter(value, sizes)
    assert len(parts) == len(sizes)
    for size, part in zip(sizes, parts, strict=True):
        assert batch_size(part, "part") in (None, size)
    assert_same(join(parts), value, rtol=0, atol=0)


def test_tensors_without_dimensions_are_repeated_and_stacked() -> None:
    """A number for each micro-batch, such as a loss that a model gives beside its outputs."""
    parts = scatter({"scale": torch.tensor(2.0)}, [3, 2])
    assert_same(parts, [{"scale": torch.tensor(2.0)}] * 2)
    assert_same(join(parts), {"scale": torch.tensor([2.0, 2.0])})


def test_there_is_no_batch_size_without_tensors() -> None:
    assert batch_size({"a": None, "b": [3, torch.tensor(1.0)]}, "inputs") is None


def test_tensors_must_agree_on_the_batch_size() -> None:
    with pytest.raises(PlanError, match=r"targets disagree.*\[3, 4\]"):
        batch_size((torch.ones(3), torch.ones(4, 3)), "targets")


def test_outputs_of_different_structure_cannot_be_joined() -> None:
    with pytest.raises(PlanError, match="different structures"):
        join([(torch.ones(1),), [torch.ones(1)]])
