"""Which layers go to which stage: by number, parameters, time and memory, under limits; and what is refused."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.format import parse_bytes
from penstock.split import balance, balance_by_size, balance_by_time, chain_of
from penstock.split.balance import TRAINING_FACTOR, balance_stages
from penstock.split.measure import LayerMeasurement, Measurement
from penstock.split.sequential import SequentialChain
from tests.support.models import assert_same, batch, mlp, snapshot

FLOAT = 4


def sizes(model: nn.Module, **how: Any) -> list[int]:
    return [len(layers) for layers in balance_stages(chain_of(model), **{"balance": None, "stages": None, **how})]


def linears(*widths: int) -> nn.Sequential:
    """Linear layers without bias from each width to the next."""
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Times that are given, not measured: tests do not depend on how fast the machine is. A pair is F and B."""

    def given(*seconds: float | tuple[float, float], crossing: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def measure(line: Any, sample: Any, **options: Any) -> Measurement:
            calls.append({"sample": sample, **options})
            pairs = [s if isinstance(s, tuple) else (s / 4, 3 * s / 4) for s in seconds]
            layers = [LayerMeasurement(name, *pair, 0, 0, ()) for name, pair in zip(line.layers, pairs, strict=True)]
            return Measurement(tuple(layers), ({},) * len(layers), crossing or (0,) * len(layers))

        monkeypatch.setattr(balance, "measure", measure)
        monkeypatch.setattr(sys.modules["penstock.split"], "measure_layers", measure)
        return calls

    return given


# ── by number and by parameters ──────────────────────────────────────────────────────────────────────────────────


def test_uniform_counts_layers_and_nothing_else() -> None:
    assert sizes(linears(100, 100, 1, 1, 1, 1, 1), balance="uniform", stages=3) == [2, 2, 2]
    assert sizes(linears(*[2] * 11), balance="uniform", stages=4) == [3, 3, 2, 2]


def test_parameters_are_the_default_without_a_sample() -> None:
    model = linears(100, 100, 1, 1, 1, 1, 1)
    assert sizes(model, stages=2) == sizes(model, stages=2, balance="parameters") == [1, 5]


def test_a_layer_without_parameters_weighs_a_little() -> None:
    assert sizes(nn.Sequential(nn.Linear(1, 1, bias=False), *(nn.ReLU() for _ in range(4))), stages=2) == [2, 3]


def test_lists_are_taken_as_they_are() -> None:
    assert sizes(linears(2, 2, 2, 2), balance=[1, 2]) == [1, 2]


def test_of_two_cuts_as_good_the_cheaper_one_is_taken() -> None:
    class Costly(SequentialChain):
        def crossing(self, cut: int) -> float:
            return 5.0 if cut == 1 else 1.0

    model = linears(4, 4, 4, 4, 4, 4)
    groups = balance_stages(Costly(model), balance="uniform", stages=3)
    assert [len(layers) for layers in groups] == [2, 2, 1]
    free = linears(10, 10, 1, 1, 1)  # the first layer is the heaviest stage wherever the second cut lies

    class Late(SequentialChain):
        def crossing(self, cut: int) -> float:
            return 0.0 if cut == 3 else 9.0

    assert [len(layers) for layers in balance_stages(Late(free), balance=None, stages=3)] == [1, 2, 1]


# ── a sample with its targets ────────────────────────────────────────────────────────────────────────────────────


class OfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ps.cut(self.first(x)))


class OfTwo(OfOne):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.second(ps.cut(self.first(x))) + y


class Both(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


@pytest.mark.parametrize(
    ("model", "taken"),
    [
        (OfOne(), 1),
        (OfTwo(), 2),
        (linears(4, 4, 4), 1),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), 1),
        (nn.Sequential(Both(), nn.Linear(4, 4)), 2),
    ],
    ids=["one argument", "two", "sequential", "nested", "a pair"],
)
def test_a_sample_may_have_its_targets_beside_it(model: nn.Module, taken: int, pretend: Any) -> None:
    calls, x, y = pretend(1, 1), batch(), batch(seed=5)
    ps.split(model, stages=2, sample=(x, y))
    assert calls[0]["sample"] is x if taken == 1 else calls[0]["sample"] == (x, y)


# ── by time ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_time_is_the_default_with_a_sample(pretend: Any) -> None:
    model, x = linears(4, 4, 4, 4), torch.ones(1, 4)
    calls = pretend(1.0, 1.0, 5.0)
    assert sizes(model, stages=2, sample=x) == sizes(model, stages=2, sample=x, balance="time") == [2, 1]
    assert sizes(model, stages=2, sample=x, balance="parameters") == [2, 1]
    assert [call["sample"] is x for call in calls] == [True, True]  # and parameters need no measurement


def test_forward_and_backward_both_count(pretend: Any) -> None:
    for heavy in ((9.0, 0.0), (0.0, 9.0)):
        pretend(heavy, (1.0, 1.0), (1.0, 1.0), (1.0, 1.0))
        assert balance_by_time(linears(4, 4, 4, 4, 4), torch.ones(1, 4), 2) == [1, 3]


def test_measured_bytes_decide_between_cuts_that_are_as_good(pretend: Any) -> None:
    pretend(4.0, 1.0, 1.0, 1.0, crossing=(0, 8, 8, 100))
    assert balance_by_time(linears(4, 4, 4, 4, 4), torch.ones(1, 4), 3) == [1, 1, 2]
    pretend(4.0, 1.0, 1.0, 1.0, crossing=(0, 8, 100, 8))
    assert balance_by_time(linears(4, 4, 4, 4, 4), torch.ones(1, 4), 3) == [1, 2, 1]


def test_options_of_the_measurement_are_handed_on(pretend: Any) -> None:
    calls = pretend(1.0, 1.0)
    balance_by_time(linears(4, 4, 4), torch.ones(1, 4), 2, timeout=7.0, device="cpu")
    assert (calls[0]["timeout"], calls[0]["device"]) == (7.0, "cpu")


def test_a_real_measurement_finds_the_slow_layer() -> None:
    """A layer with a thousand times the work of all others together stands alone."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2000):
                x = x + 1
            return x

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Slow(), nn.Linear(4, 4))
    before = snapshot(model)
    assert balance_by_time(model, batch(), 3, timeout=0.0) == [2, 1, 1]
    assert balance_by_time(model, (batch(),), 3, timeout=0.0) == [2, 1, 1]
    assert_same(snapshot(model), before)


# ── by memory ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_memory_counts_trained_parameters_and_what_backward_needs() -> None:
    """Floats that backward needs (8 rows): 32 1024 32 32. Parameters: 512 512 16 16."""
    model = linears(4, 128, 4, 4, 4)
    assert balance_by_size(model, batch(), 2, param_scale=0.0) == [2, 2]  # 1056 │ 64
    assert balance_by_size(model, batch(), 2, param_scale=1000.0) == [1, 3]  # 512 │ 544, thousandfold


def test_more_chunks_leave_less_to_keep() -> None:
    """Six times 256 floats that Tanh keeps, the last of which the first Linear shares; 256 for the other Linear.

    One chunk:  5 × 256 │ 256 + 40 + 256 + 640        64 chunks:  6 × 4 + 40 │ 4 + 640
    """
    model = nn.Sequential(*(nn.Tanh() for _ in range(6)), nn.Linear(4, 4), nn.Linear(4, 64))
    rows = torch.randn(64, 4, requires_grad=True)
    assert balance_by_size(model, rows, 2, chunks=1) == [5, 3]
    assert balance_by_size(model, rows, 2, chunks=64) == [7, 1]


def test_frozen_parameters_have_no_gradients_and_no_optimizer() -> None:
    model = linears(10, 10, 10, 10, 10, 10)
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    assert balance_by_size(model, torch.zeros(0, 10), 2, param_scale=4.0) == [4, 1]  # 1 1 1 4 │ 4
    assert balance_by_size(model, torch.zeros(0, 10), 2, param_scale=1.0) == [3, 2]


def test_balance_memory_is_balance_by_size_with_an_optimizer() -> None:
    model = mlp(layers=6, width=4)
    found = sizes(model, balance="memory", stages=3, sample=batch())
    assert found == balance_by_size(model, batch(), 3, param_scale=TRAINING_FACTOR)


def test_by_size_works_on_a_model_that_is_on_the_cpu_and_leaves_it_alone() -> None:
    model = mlp()
    before = snapshot(model)
    balance_by_size(model, batch(), 3, device="cpu")
    assert_same(snapshot(model), before)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────

LAYER = 10 * 10 * FLOAT * 4
"""A layer of 10 × 10 with its gradient and two states of the optimizer."""


@pytest.mark.parametrize("limit", [3 * LAYER, f"{3 * LAYER}", f"{3 * LAYER}B", [3 * LAYER] * 3], ids=str)
def test_a_limit_holds_for_every_stage(limit: Any) -> None:
    model = linears(10, 10, 10, 10, 10, 10, 10)
    assert sizes(model, balance="uniform", stages=3, memory=limit) == [2, 2, 2]


def test_a_limit_for_each_stage_moves_the_cut() -> None:
    model = linears(10, 10, 10, 10, 10, 10, 10)
    assert sizes(model, stages=3, memory=[LAYER, "1MB", 2 * LAYER]) == [1, 3, 2]
    assert sizes(model, stages=2, memory=[LAYER, "1MB"]) == [1, 5]


def test_activations_count_when_there_is_a_sample() -> None:
    model = linears(10, 10, 10, 10, 10)
    limit = 2 * LAYER + 100
    assert sizes(model, balance="uniform", stages=2, memory=limit) == [2, 2]
    with pytest.raises(ps.PlanError, match="and activations"):
        sizes(model, balance="uniform", stages=2, memory=limit, sample=torch.zeros(8, 10))


def test_what_layers_share_counts_once_in_a_stage() -> None:
    model = linears(10, 10, 10, 10, 10)
    model[1].weight = model[0].weight
    assert sizes(model, balance="uniform", stages=2, memory=[LAYER, 2 * LAYER]) == [2, 2]


def test_a_limit_that_cannot_be_kept_says_which_could() -> None:
    model = linears(10, 10, 10, 10, 10)
    with pytest.raises(ps.PlanError, match=rf"4 layers .* 3 stages .*{LAYER:,} bytes.* must grow by .*{LAYER:,} b"):
        sizes(model, stages=3, memory=LAYER)
    with pytest.raises(ps.PlanError, match=rf"must grow by .*{LAYER - 1:,} bytes"):
        sizes(model, stages=2, memory=[LAYER + 1, 2 * LAYER])


def test_a_layer_that_is_too_big_for_any_stage_is_named_with_both_numbers() -> None:
    with pytest.raises(ps.PlanError, match=r"at most 512 bytes.* layer 1 alone needs 1\.56 KiB \(1,600 bytes\)"):
        sizes(linears(1, 10, 10, 1), stages=3, memory=512)


def test_a_list_of_layers_must_keep_the_limit_too() -> None:
    model = linears(10, 10, 10, 10)
    assert sizes(model, balance=[1, 2], memory=2 * LAYER) == [1, 2]
    with pytest.raises(ps.PlanError, match=rf"stage 1 has layers that need .*{2 * LAYER:,} bytes.*{LAYER:,} bytes"):
        sizes(model, balance=[1, 2], memory=LAYER)


def test_sizes_as_people_write_them() -> None:
    for text, size in [
        ("16GiB", 2**34),
        ("500MB", 5 * 10**8),
        ("1.5 kib", 1536),
        ("7", 7),
        ("2tb ", 2 * 10**12),
        (5.9, 5),
        (12, 12),
    ]:
        assert parse_bytes(text) == size


def test_what_is_no_size_is_refused() -> None:
    for size in ["", "GiB", "16 gigs", "-1GB", "1e3", 0, -5, True, None, float("nan"), float("inf")]:
        with pytest.raises(ps.PlanError, match="is not a size"):
            parse_bytes(size)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("word", ["time", "memory"])
def test_what_is_measured_needs_a_sample(word: str) -> None:
    with pytest.raises(ps.PlanError, match=f"balance='{word}' is measured: give sample="):
        sizes(mlp(), balance=word, stages=2)


@pytest.mark.parametrize("word", ["uniform", "parameters", "time", "memory"])
def test_a_word_needs_the_number_of_stages(word: str) -> None:
    with pytest.raises(ps.PlanError, match=f"balance='{word}' .* give stages=n"):
        sizes(mlp(), balance=word, sample=batch())


@pytest.mark.parametrize("stages", [None, 2])
def test_an_unknown_word_is_refused_with_those_that_are_known(stages: int | None) -> None:
    with pytest.raises(
        ps.PlanError, match=r"balance must be a list .*'uniform', 'parameters', 'time', 'memory'; got 'sp"
    ):
        sizes(mlp(), balance="speed", stages=stages)


def test_limits_are_one_or_as_many_as_stages() -> None:
    with pytest.raises(ps.PlanError, match="memory has 3 limits, but there are 2 stages"):
        sizes(mlp(), stages=2, memory=["1GB"] * 3)


@pytest.mark.parametrize("stages", [0, 8, 2.0])
def test_a_number_of_stages_that_cannot_be_is_refused_before_anything_runs(stages: Any, pretend: Any) -> None:
    calls = pretend(*[1.0] * 7)
    for balanced in (balance_by_time, balance_by_size):
        with pytest.raises(ps.PlanError, match="stages"):
            balanced(mlp(), batch(), stages)
    assert calls == []


def test_chunks_and_scales_that_are_none_are_refused() -> None:
    with pytest.raises(ps.PlanError, match="chunks must be 1 or more"):
        balance_by_size(mlp(), batch(), 2, chunks=0)
    with pytest.raises(ps.PlanError, match="param_scale"):
        balance_by_size(mlp(), batch(), 2, param_scale=-1.0)
