"""Hypothesis strategies for cases."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.schedule.schedule import MODES
from tests.equivalence.models import LAYERS, TRAINING, Case, stages_for
from tests.equivalence.skip_models import SkipCase


@st.composite
def cases(draw: st.DrawFn, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> Case:
    schedule = draw(st.sampled_from(TRAINING))
    return Case(
        layers=tuple(draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=8))),
        repeat_first=draw(st.booleans()),
        cuts=draw(st.integers(0, 99)),
        schedule=schedule,
        stages=stages_for(schedule, draw(st.sampled_from(ranks))),
        microbatches=draw(st.integers(1, 7)),
        batch=draw(st.integers(1, 13)),
        loss=draw(st.sampled_from(["mean", "sum", "ignore", "pair"])),
        recompute=draw(st.sampled_from(MODES)),
    )


@st.composite
def skip_cases(draw: st.DrawFn, ranks: tuple[int, ...] = (1, 2, 3, 4)) -> SkipCase:
    schedule = draw(st.sampled_from(TRAINING))
    stages = stages_for(schedule, draw(st.sampled_from(ranks)))
    sizes = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    layers = sum(sizes)
    links = tuple(
        tuple(sorted(draw(st.sets(st.integers(0, max(0, i - 1)), max_size=2)))) if i > 1 else () for i in range(layers)
    )
    return SkipCase(
        links=links,
        frozen=draw(st.integers(-1, layers - 2)),
        balance=tuple(sizes),
        schedule=schedule,
        microbatches=draw(st.integers(1, 7)),
        batch=draw(st.integers(1, 13)),
        loss=draw(st.sampled_from(["mean", "sum"])),
        recompute=draw(st.sampled_from(MODES)),
    )
