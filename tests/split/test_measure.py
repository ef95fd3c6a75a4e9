"""Measured costs of layers: their values, all kinds of layers, and an unchanged model."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.split import chain_of
from penstock.split.lazy import Lazy
from penstock.split.measure import LayerMeasurement, Measurement, measure
from penstock.split.module_state import ModuleState
from penstock.split.plan import Edge, Groups, LayerChain
from tests.support.models import assert_same, batch, mlp, snapshot, stateful_model

FLOAT = 4


def sent_bytes(cost: LayerMeasurement) -> tuple[int, ...]:
    return tuple(sum(values.values()) for values in cost.sends)


def measured(model: nn.Module, sample: Any, **options: Any) -> Measurement:
    return measure(chain_of(model), sample, timeout=0.0, **options)


def costs(model: nn.Module, sample: Any, **options: Any) -> dict[str, LayerMeasurement]:
    return {layer.name: layer for layer in measured(model, sample, **options).layers}


class Fn(nn.Module):
    """A function as a layer."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any) -> Any:
        return self.fn(x)


# ── bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_of_a_small_model_by_hand() -> None:
    """8 rows. A linear layer keeps its input if its weight is trained; Tanh keeps its output."""
    found = costs(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), batch())
    assert [cost.activation_bytes for cost in found.values()] == [8 * 4 * FLOAT, 8 * 16 * FLOAT, 8 * 16 * FLOAT]
    assert [cost.parameter_bytes for cost in found.values()] == [(4 * 16 + 16) * FLOAT, 0, (16 * 2 + 2) * FLOAT]
    assert [sent_bytes(cost) for cost in found.values()] == [(8 * 16 * FLOAT,), (8 * 16 * FLOAT,), ()]


def test_a_value_that_two_layers_keep_has_one_number() -> None:
    """The Tanh keeps its output, which is the input that the last layer keeps."""
    first, tanh, last = measured(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)), batch()).kept
    assert tanh == last
    assert first.keys().isdisjoint(tanh)


def test_a_storage_that_is_kept_several_times_counts_once() -> None:
    both = Fn(lambda x: x * x + x.view(-1).exp().view(x.shape) + x.sin())  # x three times, and exp's output
    found = costs(nn.Sequential(nn.Linear(4, 4), both), batch())
    assert found["1"].activation_bytes == 2 * 8 * 4 * FLOAT


def test_parameters_and_buffers_do_not_count_nor_what_is_seen_of_them() -> None:
    scaled = nn.Linear(4, 4, bias=False)
    found = costs(nn.Sequential(nn.Linear(4, 4), nn.Sequential(scaled)), batch().requires_grad_())
    assert found["1"].activation_bytes == 8 * 4 * FLOAT  # its input, not its weight
    frozen = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    assert costs(frozen, batch())["1"].activation_bytes == 0  # the weight only
    eval_norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False)).eval()
    assert costs(eval_norm, batch())["1"].activation_bytes in (0, 8 * 4 * FLOAT)  # never its running statistics


def test_what_a_layer_drops_before_it_ends_does_not_count() -> None:
    def wasteful(x: Tensor) -> Tensor:
        for _ in range(3):
            x.exp().detach()
        return x.exp()

    assert costs(nn.Sequential(nn.Linear(4, 4), Fn(wasteful)), batch())["1"].activation_bytes == 8 * 4 * FLOAT


def test_a_recomputed_layer_keeps_nothing_but_its_input() -> None:
    deep = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 4))

    class Recomputed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.deep, self.reentrant = deep, reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.deep, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    plain = costs(nn.Sequential(nn.Linear(4, 4), deep), batch())["1"].activation_bytes
    assert plain == 8 * (4 + 64) * FLOAT
    for reentrant in (True, False):
        found = costs(nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant)), batch())["1"]
        assert found.activation_bytes <= 8 * 4 * FLOAT
        assert found.backward > 0


def test_a_sample_that_is_a_few_rows_of_much_counts_as_the_few() -> None:
    much = torch.randn(10_000, 4)
    assert costs(nn.Sequential(nn.Linear(4, 4)), much[:8])["0"].activation_bytes == 8 * 4 * FLOAT


def test_in_place_layers_share_the_storage_of_their_input() -> None:
    linear, relu, last = measured(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)), batch()).kept
    assert relu == last
    assert sum(relu.values()) == 8 * 4 * FLOAT
    assert linear.keys().isdisjoint(relu)


# ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_times_are_positive_and_a_frozen_start_has_no_backward() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    found = costs(model, batch())
    assert all(cost.forward > 0 for cost in found.values())
    assert [name for name, cost in found.items() if cost.backward == 0.0] == ["0", "1"]
    assert costs(model, batch().requires_grad_())["0"].backward > 0  # an input that wants its gradient


def test_a_larger_budget_is_spent_on_repeats() -> None:
    runs: list[int] = []

    def count(x: Tensor) -> Tensor:
        runs.append(1)
        return x

    line = chain_of(nn.Sequential(nn.Linear(4, 4), Fn(count)))
    measure(line, batch(), timeout=0.0)
    few = len(runs)
    measure(line, batch(), timeout=0.5)
    assert len(runs) - few > few


# ── all kinds of layers ──────────────────────────────────────────────────────────────────────────────────────────


def test_integers_tuples_none_and_plain_values_cross() -> None:
    model = nn.Sequential(
        nn.Embedding(10, 4),
        Fn(lambda x: (x, None, x.argmax(-1), {"n": 3})),
        Fn(lambda v: (v[0] * v[3]["n"], v[2])),
        Fn(lambda v: v[0].sum((-1, -2)) + v[1].float().mean()),
    )
    found = measured(model, torch.arange(10).view(2, 5))
    x, ids = 2 * 5 * 4 * FLOAT, 2 * 5 * 8
    assert [sent_bytes(cost) for cost in found.layers] == [(x,), (x + ids,), (x + ids,), ()]
    assert found.crossing == (0, x, x + ids, x + ids)


class Skips(LayerChain):
    """h = a(x); y = b(h); out = c(y) + h + x: a skip over one layer, and one over two."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2), "c": nn.Linear(2, 4)})
        self.layers, self.recipe = ("a", "b", "c"), {}

    def members(self, layer: str) -> list[tuple[str, Tensor]]:
        return [(f"{layer}.{name}", p) for name, p in self.model[layer].named_parameters()]

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        assert len(groups) == 3
        return Edge(0, 1, ("h",)), Edge(0, 2, ("h", "x")), Edge(1, 2, ("y",))

    def stage(self, groups: Groups, index: int) -> nn.Module:
        def run(*values: Any) -> Any:
            module = self.model[self.layers[index]]
            if index == 0:
                h = module(values[0])
                return h, (h, values[0])
            return module(values[0]) if index == 1 else module(values[1]) + values[0][0] + values[0][1]

        return Fn(lambda *values: run(*values)) if index == 0 else _Many(run)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kwargs["x"] if kwargs else args[0]


class _Many(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *values: Any) -> Any:
        return self.run(*values)


@pytest.mark.parametrize("sample", [batch(), (batch(),), {"x": batch()}], ids=["tensor", "tuple", "dict"])
def test_skips_cross_the_cuts_that_they_pass_and_a_value_counts_once_at_a_cut(sample: Any) -> None:
    found = measure(Skips(), sample, timeout=0.0)
    x, y = 8 * 4 * FLOAT, 8 * 2 * FLOAT
    assert [sent_bytes(cost) for cost in found.layers] == [(x, 2 * x), (y,), ()]
    assert found.crossing == (0, 2 * x, 2 * x + y)  # h to both layers is one value before b


def test_recurrent_layers_and_tied_weights_run() -> None:
    rnn = nn.Sequential(nn.LSTM(4, 4, batch_first=True), Fn(lambda v: v[0]), nn.Linear(4, 4), nn.Linear(4, 4))
    rnn[3].weight = rnn[2].weight
    before = snapshot(rnn)
    costs(rnn, torch.randn(2, 3, 4))
    assert_same(snapshot(rnn), before)


def test_the_last_layer_may_compute_the_loss() -> None:
    found = costs(nn.Sequential(nn.Linear(4, 4), Fn(lambda x: {"loss": x.mean(), "logits": x, "none": None})), batch())
    assert found["1"].backward > 0


# ── no trace ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("device", [None, "cpu"])
def test_nothing_in_the_model_or_the_generators_changes(device: str | None) -> None:
    model = stateful_model()
    hook_calls: list[str] = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: hook_calls.append("grad"))
    before, states = snapshot(model), (torch.get_rng_state(), random.getstate())
    grad, flags = model[0].weight.grad, [p.requires_grad for p in model.parameters()]
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    places = [t.data_ptr() for t in (*model.parameters(), *model.buffers())]
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    sample = batch().requires_grad_()
    rows = sample.detach().clone()

    costs(model, sample, device=device)

    assert_same(snapshot(model), before)
    assert model[0].weight.grad is grad
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
    assert [t.data_ptr() for t in (*model.parameters(), *model.buffers())] == places
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert hook_calls == []
    assert model[3].log == []
    now = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert {name: vs.keys() for name, vs in now.items()} == {name: vs.keys() for name, vs in attributes.items()}
    assert sample.grad is None
    assert torch.equal(sample, rows)
    (model(sample).sum() + model[0].weight.sum()).backward()  # and hooks run again
    assert hook_calls == ["grad"]


def test_a_sample_that_the_first_layer_writes_to_stays_as_it_is() -> None:
    sample = batch()
    rows = sample.clone()
    costs(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), sample)
    assert torch.equal(sample, rows)


def test_a_graph_that_waits_for_its_backward_is_not_disturbed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    loss = model(batch()).sum()
    costs(model, batch())
    loss.backward()
    assert model[0].weight.grad is not None


def test_it_measures_training_also_where_gradients_are_off() -> None:
    model = mlp()
    with torch.no_grad():
        assert all(cost.backward > 0 for cost in costs(model, batch()).values())
    with torch.inference_mode():
        assert all(cost.backward > 0 for cost in costs(model, batch()).values())


def test_hooks_of_the_user_do_run() -> None:
    model, seen = mlp(), list[int]()
    model[0].register_forward_hook(lambda *_: seen.append(1))
    costs(model, batch())
    assert seen


# ── what goes wrong ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_layer_that_fails_is_named_and_the_model_is_as_it_was() -> None:
    model = stateful_model()
    model.append(nn.Linear(5, 5))
    before = snapshot(model)
    with pytest.raises(ps.PlanError, match=r"layer 8 \(number 9 of 9\) does not run on the sample: RuntimeError"):
        costs(model, batch())
    assert_same(snapshot(model), before)


def test_a_backward_that_fails_is_named_too() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("no")

    model = nn.Sequential(nn.Linear(4, 4), Fn(Bad.apply))
    model[0].weight.grad = torch.ones(4, 4)
    before = snapshot(model)
    with pytest.raises(ps.PlanError, match=r"layer 1 .*ArithmeticError: no"):
        costs(model, batch())
    assert_same(snapshot(model), before)


@pytest.mark.parametrize("sample", [[batch()], 3, {1: batch()}, "x"], ids=repr)
def test_a_sample_that_is_none_is_refused(sample: Any) -> None:
    with pytest.raises(ps.PlanError, match="sample is the arguments of a call"):
        costs(mlp(), sample)


def test_what_has_no_values_yet_cannot_be_measured() -> None:
    with torch.device("meta"):
        meta = mlp()
    with pytest.raises(ps.PlanError, match=r"0\.weight is on the meta device"):
        costs(meta, batch())
    lazy = nn.Sequential(nn.Linear(4, 4), Lazy(lambda: nn.Linear(4, 4)))
    with pytest.raises(ps.PlanError, match="layer 1 is not built yet"):
        costs(lazy, batch())
    assert isinstance(lazy[1], Lazy)


def test_a_snapshot_of_modules_sees_and_undoes_changes_inside_of_containers() -> None:
    module: Any = nn.Linear(2, 2)
    module.long, module.empty, module.nested, module.one = list(range(1000)), [], {1: [2, [3]]}, [1]
    changes: dict[str, Callable[[], Any]] = {
        "long": lambda: module.long.append(1),
        "empty": lambda: module.empty.append(1),
        "nested": lambda: module.nested[1][1].append(1),
        "one": lambda: module.one.clear(),
    }
    for name, change in changes.items():
        state = ModuleState([module])
        assert state.changed(module) == []
        change()
        assert state.changed(module) == [name]
        state.restore()
    assert (len(module.long), module.empty, module.nested, module.one) == (1000, [], {1: [2, [3]]}, [1])
