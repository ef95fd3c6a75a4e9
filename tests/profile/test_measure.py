"""Costs measured: exact bytes, the engine's own division of a backward, every size, and no trace in the model."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.profile import measure as measure_module
from penstock.profile import timing
from penstock.profile.costs import Crossing, ModelCosts, Overhead, Profile, SharedParameters
from penstock.profile.measure import _kept_together, measure_costs
from penstock.split import measure as split_measure
from tests.split.block_models import Masked, chain_of_blocks
from tests.support.models import assert_same, batch, labels, mlp, snapshot, stateful_model
from tests.support.published import work_of

FLOAT = 4
HAS_GPU = torch.cuda.is_available()
NO_GPU = pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
CUDA = pytest.param("cuda", marks=[pytest.mark.cuda, NO_GPU])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(model: Any, sample: Any, **options: Any) -> ModelCosts:
    """At the size of the sample, with as few runs as can be."""
    return measure_costs(model, sample, **{"seconds": 0.0, **options}).sizes[-1]


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bytes_by_hand_at_each_size(device: str) -> None:
    """A linear layer keeps its input; Tanh its output, which the last layer keeps as well.

    With the input, a weight gradient waits with the gradient of the output.
    """
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    profile = measure_costs(model, batch(8), seconds=0.0, sizes=[2, 8], device=device)
    for costs in profile.sizes:
        rows = costs.samples
        assert [layer.name for layer in costs.layers] == ["0", "1", "2"]
        assert [layer.activation for layer in costs.layers] == [rows * n * FLOAT for n in (4, 16, 16)]
        assert [layer.deferred for layer in costs.layers] == [rows * n * FLOAT for n in (4 + 16, 0, 16 + 2)]
        assert [layer.parameters for layer in costs.layers] == [80 * FLOAT, 0, 34 * FLOAT]
        assert [layer.gradients for layer in costs.layers] == [80 * FLOAT, 0, 34 * FLOAT]
        assert [layer.optimizer for layer in costs.layers] == [160 * FLOAT, 0, 68 * FLOAT]
        assert costs.crossings == (Crossing(0, 1, rows * 16 * FLOAT), Crossing(1, 2, rows * 16 * FLOAT))
        assert costs.kept_together == ((1, 2, rows * 16 * FLOAT),)
        assert costs.device == device
    assert [costs.samples for costs in profile.sizes] == [2, 8]
    assert profile.at(3).layers[1].activation == 3 * 16 * FLOAT


def test_what_three_layers_keep_is_counted_between_each_two() -> None:
    """A stage of all three has it once, and so has one of the first two, or the last two."""
    assert _kept_together([{0: 8, 1: 4}, {0: 8}, {0: 8, 1: 4, 2: 1}]) == ((0, 1, 8), (0, 2, 4), (1, 2, 8))


def test_frozen_parameters_buffers_and_ties() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[3].weight = model[2].weight
    costs = measured(model, batch())
    frozen, norm, _, last = costs.layers
    assert (frozen.parameters, frozen.gradients, frozen.optimizer) == (20 * FLOAT, 0, 0)
    assert norm.buffers == 8 * FLOAT + 8  # running mean and variance, and a count
    assert last.parameters == 20 * FLOAT
    assert costs.shared == (SharedParameters((2, 3), 16 * FLOAT),)


def test_a_value_that_several_layers_need_is_known_as_one() -> None:
    """The mask goes from the first block, where the embedding is, to all others."""
    x, mask = 4 * 6 * 8 * FLOAT, 4 * 6 * 6 * FLOAT
    sample = torch.randint(16, (4, 6)), torch.ones(4, 6, 6)
    costs = measured(chain_of_blocks(Masked(), *sample), sample)
    direct = [crossing for crossing in costs.crossings if crossing.src == 0]
    assert [crossing.dst for crossing in direct] == [1, 2, 3]
    assert all(mask in dict(crossing.values).values() for crossing in direct)
    assert costs.bytes_between([0], [1, 2, 3]) == direct[0].bytes
    assert direct[0].bytes - direct[1].bytes == x


@pytest.mark.parametrize(
    ("optimizer", "times"),
    [
        ("adamw", 2),
        ("SGD", 0),
        ("momentum", 1),
        (None, 0),
        (1.5, 1.5),
        (torch.optim.Adam, 2),
        (torch.optim.SGD, 0),
        (torch.optim.RMSprop, 1),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1),
        (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3),
    ],
)
def test_states_of_optimizers(optimizer: Any, times: float) -> None:
    layers = measured(nn.Sequential(nn.Linear(4, 4)), batch(), optimizer=optimizer).layers
    assert layers[0].optimizer == times * 20 * FLOAT


def test_states_of_an_optimizer_that_is_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups, parameters = optimizer.param_groups, list(optimizer.param_groups[0]["params"])
    before = snapshot(model)
    assert measured(model, batch(), optimizer=optimizer).layers[0].optimizer == 20 * FLOAT
    assert optimizer.param_groups is groups
    assert all(one is other for one, other in zip(groups[0]["params"], parameters, strict=True))
    assert not optimizer.state
    assert_same(snapshot(model), before)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Clock:
    """A clock that layers move on; each look at it may take some time too."""

    def __init__(self) -> None:
        self.now = self.look = 0.0

    def __call__(self) -> float:
        self.now += self.look
        return self.now

    def spent(self, what: str) -> None:
        """Somebody has worked."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    for module in (timing, split_measure):
        monkeypatch.setattr(module, "perf_counter", made)
    return made


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Timed) -> Tensor:
        ctx.layer, ctx.weight = layer, weight
        layer.clock.spent("forward")
        layer.clock.now += 1.0 if ps.is_recomputing() else layer.forward_time * x.shape[0]
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer: Timed = ctx.layer
        layer.clock.spent("backward")
        layer.clock.now += 20.0

        def weight_gradient() -> Tensor:
            layer.clock.spent("weights")
            layer.clock.now += 300.0
            return torch.ones_like(layer.weight)

        found = ps.hooks.defer_weight_grad(ctx.weight, weight_gradient) if layer.defers else weight_gradient()
        return grad, found, None


class Timed(nn.Module):
    """2 seconds for each sample forward, 20 for the input's gradient, 300 for the weight's, 1 to recompute."""

    def __init__(self, clock: Clock, defers: bool, forward_time: float = 2.0) -> None:
        super().__init__()
        self.clock, self.defers, self.forward_time = clock, defers, forward_time
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Work.apply(x, self.weight, self)  # type: ignore[no-any-return,no-untyped-call]


def test_a_backward_is_divided_as_the_engine_divides_it(clock: Clock) -> None:
    """Work that is not deferred to W counts as I."""
    costs = measured(nn.Sequential(Timed(clock, True), Timed(clock, False), nn.ReLU()), batch(4))
    put_off, at_once, none = costs.layers
    times = [(c.forward, c.input_gradient, c.weight_gradient, c.recompute, c.backward) for c in costs.layers]
    assert times[0] == (8.0, 20.0, 300.0, 1.0, 320.0)
    assert times[1] == (8.0, 320.0, 0.0, 1.0, 320.0)
    assert times[2] == (0.0, 0.0, 0.0, 0.0, 0.0)
    assert work_of(put_off) == work_of(at_once) == 328.0
    assert work_of(none) == 0


def test_what_an_action_takes_by_itself_is_taken_off(clock: Clock) -> None:
    clock.look = 0.5
    costs = measured(nn.Sequential(Timed(clock, True), nn.ReLU()), batch(4))
    first, second = costs.layers
    assert (first.forward, first.input_gradient, first.weight_gradient, first.recompute) == (8.0, 20.0, 300.0, 1.0)
    assert work_of(second) == 0.0
    assert costs.overhead == Overhead(0.5, 0.5, 0.5, 0.5, 0.5)
    assert Profile((costs,)).at(1).overhead == costs.overhead


def test_a_frozen_start_has_no_backward(clock: Clock) -> None:
    model = nn.Sequential(Timed(clock, True).requires_grad_(False), Timed(clock, True))
    frozen, trained = measured(model, batch(1)).layers
    assert (frozen.forward, frozen.full_backward, frozen.input_gradient, frozen.weight_gradient) == (2.0, 0.0, 0.0, 0.0)
    assert trained.full_backward == 320.0


def test_each_size_is_measured(clock: Clock) -> None:
    profile = measure_costs(nn.Sequential(Timed(clock, True)), batch(8), seconds=0.0)
    assert [(costs.samples, costs.layers[0].forward) for costs in profile.sizes] == [(2, 4.0), (8, 16.0)]
    assert profile.at(5).layers[0].forward == 10.0
    assert profile.at(5).layers[0].weight_gradient == 300.0  # a fixed part only
    assert [c.samples for c in measure_costs(nn.Sequential(Timed(clock, True)), batch(1), seconds=0.0).sizes] == [1]


def test_the_first_run_does_not_count_and_a_median_does(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Timed(clock, True)
    runs = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        layer.forward_time = 1000.0 if runs in (2, 3, 6, 8) else 0.001  # 2 and 3 warm up, 6 and 8 are disturbed
        return Timed.forward(layer, x)

    monkeypatch.setattr(split_measure, "LONG_LAYER", 1e9)
    layer.forward = forward  # type: ignore[method-assign]
    assert measured(nn.Sequential(layer), batch(1)).layers[0].forward == 0.001


def test_times_are_medians_over_turns_of_means_without_disturbances() -> None:
    def runs(*seconds: float) -> timing.LayerTimings:
        kept = [((one + 1, one),) * 4 for one in seconds]
        return timing.LayerTimings(kept, [((3 * one, 2 * one),) for one in seconds])

    first, after = timing.median_times([runs(1.0, 1.0, 2.0, 1.0, 100.0), runs(9.0), runs(1.0)])
    assert (after.forward, after.weight_gradient, after.recompute) == (1.25, 1.25, 2.5)
    assert (first.forward, first.weight_gradient, first.recompute) == (2.25, 2.25, 3.75)


def test_an_action_in_a_row_takes_what_the_others_take_and_what_the_first_takes_is_told(clock: Clock) -> None:
    times, seen = iter([7.0, 1.0, 2.0, 3.0]), []

    def action(number: int, name: str) -> None:
        seen.append((number, name))
        clock.now += next(times)

    assert timing.time_action(action, [(0, "a"), (1, "b"), (2, "c"), (3, "d")], set(), timing.measure_time)() == (
        7.0,
        2.0,
    )
    assert seen == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    times = iter([5.0])
    assert timing.time_action(action, [(0, "a")], set(), timing.measure_time)() == (5.0, 5.0), "alone, it is both"


def test_what_the_first_layer_takes_longer_is_the_stages_and_no_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([(9.0, 4.0), (30.0, 27.0), (12.0, 5.0)])  # in one turn of each of three layers

    def runs(*_: Any) -> timing.LayerTimings:
        one = next(took)
        return timing.LayerTimings([(one,) * 4], [(one,)])

    monkeypatch.setattr(measure_module, "measure_overhead", lambda *_: timing.ActionTimes(*[0.5] * 5))
    monkeypatch.setattr(measure_module, "time_layer", runs)
    costs = measured(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), batch(2, 4), sizes=[2])
    assert [layer.forward for layer in costs.layers] == [3.5, 26.5, 4.5]
    assert costs.overhead == Overhead(*[5.5] * 5), "the median of 5, 3 and 7, and what any action takes"


@pytest.mark.parametrize(("layer", "does"), [(nn.BatchNorm1d(4), True), (nn.BatchNorm1d(4).eval(), False)])
def test_who_changes_buffers_is_known(layer: nn.Module, does: bool) -> None:
    turn = timing.LayerRun(0, "it", layer, [], set(), [], [batch(2, 4)])
    assert timing._changes_buffers(turn) is does


@pytest.mark.parametrize("width", [8, 2000])
def test_between_its_runs_a_layer_is_forgotten_but_not_what_comes_to_it(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, came = [], []
    flush = timing.flush_caches

    def spied(others: torch.Tensor, hot: Any) -> None:
        hot = tuple(hot)
        sizes.append(4 * others.numel())
        came.append([tensor.shape for tensor in hot])
        flush(others, hot)

    monkeypatch.setattr(timing, "flush_caches", spied)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))
    measured(model, batch(2, 4))
    parameters = 4 * sum(p.numel() for p in model.parameters())
    assert set(sizes) == {2 * parameters}, "of parameters and gradients; never for a stage that does nothing"
    assert [(2, 4)] in came, "the input of the first"
    assert [(2, width)] in came, "of the second, and the first one's gradient"
    assert [] in came, "before weight gradients"
    whole = torch.arange(3.0)
    flush(torch.ones(2), [whole, None, torch.arange(3)])
    assert whole.tolist() == [0.0, 1.0, 2.0]


def test_layers_take_turns_so_that_slow_moments_are_those_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is ten times as slow for a while, in the second of four turns: no layer seems to be slower."""
    told = Told()
    turns, slow = measure_module.time_layer, 0

    def disturbed(turn: Any, *rest: Any) -> Any:
        nonlocal slow
        runs = turns(turn, *rest)
        begun = sum(isinstance(said, tuple) for said in told.said)
        factor, slow = (10.0, slow + 1) if begun == 2 else (1.0, slow)
        took = (factor, factor)
        return runs._replace(actions=[(took,) * 4 for _ in runs.actions], recomputes=[(took,) for _ in runs.recomputes])

    monkeypatch.setattr(measure_module, "time_layer", disturbed)
    monkeypatch.setattr(split_measure, "MAX_REPEATS", 5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    found = measure_costs(model, batch(4), seconds=20.0, sizes=[4], progress=told).at(4)
    assert told.said == [("measuring 4 samples", 3), "0 (1 of 3)", "1 (2 of 3)", "2 (3 of 3)"] * measure_module.TURNS
    assert slow == 3
    assert [layer.forward for layer in found.layers] == pytest.approx([1.0] * 3, rel=0.01)


def test_a_larger_budget_is_spent_on_repeats(clock: Clock) -> None:
    clock.look = 0.01
    layers = [Timed(clock, True) for _ in range(2)]
    began = clock.now
    measure_costs(nn.Sequential(*layers), batch(4), seconds=0.0, sizes=[4])
    few = clock.now - began
    measure_costs(nn.Sequential(*layers), batch(4), seconds=20 * few, sizes=[4])
    spent = clock.now - began - few
    assert 10 * few < spent < 30 * few


def test_the_loss_belongs_to_the_last_layer(clock: Clock) -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        assert output.shape[0] == targets.shape[0]
        clock.now += 7.0
        return nn.functional.cross_entropy(output, targets)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    profile = measure_costs(model, batch(8), seconds=0.0, loss_fn=loss, targets=labels(8))
    plain = measure_costs(model, batch(8), seconds=0.0)
    for costs, without in zip(profile.sizes, plain.sizes, strict=True):
        assert [layer.forward for layer in costs.layers] == [0.0, 7.0]
        assert costs.layers[1].activation > without.layers[1].activation
        assert costs.layers[0].activation == without.layers[0].activation
        assert costs.layers[1].parameters == without.layers[1].parameters


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_real_layers_take_real_time(device: str) -> None:
    n = 512 if device == "cpu" else 8192  # a small layer takes no longer than the overhead of an action on a GPU
    model = nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.LayerNorm(n), nn.Linear(n, n))
    costs = measured(model, torch.randn(2 * n, n), device=device, seconds=0.1)
    first, gelu, _, last = costs.layers
    assert all(0 < layer.forward < 60 and layer.recompute > 0 and layer.full_backward > 0 for layer in (first, last))
    assert last.input_gradient > 0
    assert last.weight_gradient > gelu.weight_gradient
    assert costs.overhead.forward > 0
    assert costs.overhead.backward > 0


def test_it_measures_training_also_where_gradients_are_off(clock: Clock) -> None:
    model = nn.Sequential(Timed(clock, True))
    with torch.no_grad():
        assert measured(model, batch(1), optimizer=torch.optim.Adam).layers[0].full_backward == 320.0
    with torch.inference_mode():
        assert measured(model, batch(1), optimizer=torch.optim.Adam).layers[0].full_backward == 320.0


def test_autocast_is_in_the_forward_and_not_in_the_backward(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(clock, "spent", lambda what: seen.append((what, torch.is_autocast_enabled("cpu"))))
    model = nn.Sequential(nn.Linear(4, 4), Timed(clock, True))
    with torch.autocast("cpu", torch.bfloat16):
        costs = measured(model, batch(), sizes=[8])
    assert costs.crossings == (Crossing(0, 1, 8 * 4 * 2),)
    assert {on for what, on in seen if what == "forward"} == {True}
    del seen[: [what for what, _ in seen].index("backward") + 2]  # the run that counts bytes
    assert {on for what, on in seen if what != "forward"} == {False}


def test_a_backward_starts_at_the_loss_alone(clock: Clock) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loss, self.logits = Timed(clock, True), Timed(clock, True)

        def forward(self, x: Tensor) -> Any:
            return {"loss": self.loss(x).mean(), "logits": self.logits(x)}

    assert measured(nn.Sequential(Both()), batch(1)).layers[0].full_backward == 320.0


def test_a_layer_that_had_its_turn_leaves_no_gradient_and_no_hook() -> None:
    model, seen = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)), list[Any]()
    hooks = [model[1]._forward_hooks, model[1]._forward_pre_hooks]
    model[2].register_forward_hook(lambda *_: seen.append((model[0].weight.grad, *map(len, hooks))))
    measured(model, batch())
    assert set(seen) == {(None, 0, 0)}


def test_the_threads_that_a_rank_would_have() -> None:
    seen: list[int] = []
    model = mlp()
    model[0].register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    measured(model, batch(), threads=before + 1)
    assert set(seen) == {before + 1}
    assert torch.get_num_threads() == before
    model[0].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ps.PlanError, match="ZeroDivisionError"):
        measured(model, batch(), threads=before + 1)
    assert torch.get_num_threads() == before


class Told:
    """A screen that remembers."""

    live = False

    def __init__(self) -> None:
        self.said: list[Any] = []

    def begin(self, title: str, total: int | None) -> None:
        self.said.append((title, total))

    def advance(self, text: str | None) -> None:
        self.said.append(text)

    def line(self, text: str) -> None:
        self.said.append(text)


def test_progress_is_shown() -> None:
    told = Told()
    measure_costs(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), batch(4), seconds=0.0, progress=told)
    assert told.said == [
        ("measuring 1 samples", 2),
        "0 (1 of 2)",
        "1 (2 of 2)",
        ("measuring 4 samples", 2),
        "0 (1 of 2)",
        "1 (2 of 2)",
    ]


# ── no trace ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", [None, "cpu", CUDA])
def test_nothing_in_the_model_or_the_generators_changes(device: str | None) -> None:
    model = stateful_model()
    told: list[str] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: told.append("grad"))
    before, states = snapshot(model), (torch.get_rng_state(), random.getstate())
    grad, modes = model[0].weight.grad, [module.training for module in model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    places = [(id(t), t.data_ptr(), t.requires_grad) for t in (*model.parameters(), *model.buffers())]
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    sample = batch().requires_grad_()
    rows = sample.detach().clone()

    measure_costs(model, sample, seconds=0.0, device=device)

    assert_same(snapshot(model), before)
    assert model[0].weight.grad is grad
    assert torch.equal(grad, torch.full((4, 4), 3.0))
    assert [module.training for module in model.modules()] == modes
    now = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
    assert now == hooks
    assert [(id(t), t.data_ptr(), t.requires_grad) for t in (*model.parameters(), *model.buffers())] == places
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert told == []
    vs = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: own.keys() for name, own in vs.items()} == {name: own.keys() for name, own in attributes.items()}
    assert sample.grad is None
    assert torch.equal(sample, rows)


def test_a_layer_that_fails_is_named_and_the_model_is_as_it_was() -> None:
    model = stateful_model()
    model.append(nn.Linear(5, 5))
    before = snapshot(model)
    with pytest.raises(ps.PlanError, match=r"layer 8 \(number 9 of 9\) does not run on the sample: RuntimeError"):
        measured(model, batch())
    assert_same(snapshot(model), before)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sizes": [0]}, "from 1 to 8"),
        ({"sizes": [9]}, "from 1 to 8"),
        ({"sizes": []}, "from 1 to 8"),
        ({"sizes": [1.5]}, "from 1 to 8"),
        ({"seconds": -1}, "seconds=-1"),
        ({"seconds": float("nan")}, "seconds=nan"),
        ({"threads": 0}, "threads=0"),
        ({"optimizer": "adamv"}, "did you mean 'adam'"),
        ({"optimizer": -1.0}, "optimizer=-1.0"),
        ({"optimizer": True}, "optimizer=True"),
        ({"optimizer": lambda parameters: 1 / 0}, "cannot be measured"),
        ({"targets": labels(8)}, "targets= needs loss_fn="),
        ({"targets": labels(4), "loss_fn": nn.functional.cross_entropy}, "has 8 samples, but the targets have 4"),
        pytest.param({"device": "cuda"}, "has no CUDA device", marks=pytest.mark.skipif(HAS_GPU, reason="it has one")),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.PlanError) as caught:
        measure_costs(mlp(), batch(8), **{"seconds": 0.0, **options})
    assert words in str(caught.value)


def test_samples_that_make_no_sense() -> None:
    with pytest.raises(ps.PlanError, match="the sample is empty"):
        measured(mlp(), batch(0))
    with pytest.raises(ps.PlanError, match="sample is the arguments of a call"):
        measured(mlp(), 3)
    with pytest.raises(ps.PlanError, match="disagree on the batch size"):
        measured(mlp(), (batch(3), batch(4)))


@pytest.mark.cuda
@NO_GPU
@pytest.mark.parametrize("moved", [True, False])
def test_a_model_a_sample_and_targets_may_be_on_different_sides(moved: bool) -> None:
    model = mlp().cuda() if moved else mlp()
    loss = nn.functional.cross_entropy
    costs = measured(model, batch(), loss_fn=loss, targets=labels(), device=None if moved else "cuda")
    assert costs.device == "cuda"
    assert next(model.parameters()).is_cuda == moved


def test_an_optimizer_is_asked_once_for_each_type() -> None:
    asked: list[int] = []

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        asked.append(1)
        return torch.optim.Adam(parameters)

    measured(mlp(), batch(), optimizer=make)
    assert len(asked) == 1


def test_what_has_no_values_yet_cannot_be_measured() -> None:
    with torch.device("meta"):
        meta = mlp()
    with pytest.raises(ps.PlanError, match=r"0\.weight is on the meta device"):
        measured(meta, batch())
    with pytest.raises(ps.PlanError, match="layer 1 is not built yet"):
        measured(nn.Sequential(nn.Linear(4, 4), ps.Lazy(lambda: nn.Linear(4, 4))), batch())


def test_a_plan_knows_its_model() -> None:
    plan = ps.split(mlp(), stages=2)
    assert [layer.name for layer in measured(plan, batch()).layers] == [name for group in plan.groups for name in group]


# The first time, torch imported modules that draw a number from Python's generator when they are imported.
def test_the_first_measurement_of_a_program_draws_no_random_numbers() -> None:
    program = """
import random, torch
from penstock.profile.measure import measure_costs
model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.randn(4, 4)
before = random.getstate()
measure_costs(model, x, seconds=0)
assert random.getstate() == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
