"""Traced stages in a pipeline: threads, micro-batches, shapes inferred from copies, modes switched between steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

import penstock as ps
from penstock.split.lazy import Lazy
from penstock.split.marks import cut, groups_by_name
from penstock.split.plan import build_plan, run_stages
from tests.split.trace_checks import assert_owned, assert_runs_as_plain, chain_for, cut_everywhere, every_cut
from tests.split.trace_models import (
    Bare,
    Dropping,
    Nested,
    Odd,
    Positional,
    Sample,
    ScopedDigits,
    Twice,
    UNet,
    WithLoss,
)

pytestmark = pytest.mark.slow

X = torch.linspace(-1, 2, 24).reshape(4, 6)
IDS = torch.arange(20).reshape(4, 5) % 11
IMAGES = torch.linspace(-1, 1, 4 * 28 * 28).reshape(4, 1, 28, 28)


def words(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


@pytest.mark.parametrize(
    ("make", "how", "x", "y", "loss"),
    [
        (UNet, {}, X, X, F.mse_loss),
        (Nested, {}, X, X, F.mse_loss),
        (Twice, {}, X, X, F.mse_loss),
        (Positional, {}, IDS, IDS, words),
        (lambda: Sample().eval(), {}, IDS, IDS, words),
        (Bare, {"stages": 4}, X, X, F.mse_loss),
        (Bare, {"cuts": ["trunk.layers.2", "tail.1"]}, X, X, F.mse_loss),
        (ScopedDigits, {}, IMAGES, torch.arange(4), F.cross_entropy),
    ],
)
def test_a_step_gives_the_plain_models_gradients(
    make: Callable[[], nn.Module], how: dict[str, Any], x: Tensor, y: Tensor, loss: Callable[..., Tensor]
) -> None:
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    with ps.Pipeline(cut_everywhere(model, **how), loss_fn=loss, microbatches=2) as pipe:
        result = pipe.step(x, y)
        assert set(pipe.state_dict()) == set(plain.state_dict())
    halves = [loss(plain(a), b) / 2 for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    torch.stack(halves).sum().backward()
    torch.testing.assert_close(result.loss, torch.stack(halves).sum().detach())
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_wrapper_that_computes_its_loss_runs_with_and_without_labels() -> None:
    model = WithLoss(ScopedDigits())
    labels = torch.arange(4)
    chain = chain_for(model)
    plan = build_plan(chain, groups_by_name(chain, [["B1", "B2"], ["B3"], ["B4"]]))
    with ps.Pipeline(plan, loss_fn=lambda output, _: output[1], microbatches=2) as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(IMAGES), model(IMAGES))
        with torch.enable_grad():
            loss = pipe.step((IMAGES, labels), labels).loss
        torch.testing.assert_close(loss, model(IMAGES, labels)[1])
        torch.testing.assert_close(pipe(IMAGES), model(IMAGES))


def test_a_pipeline_follows_train_and_eval() -> None:
    model = Dropping()
    with ps.Pipeline(cut_everywhere(model), loss_fn=None, microbatches=1) as pipe, torch.no_grad():
        for training in (True, False, True):
            pipe.train(training)
            output = pipe(X)
            assert isinstance(output, tuple) == training
            assert model.training == training


# ── what a forward that is traced may do ─────────────────────────────────────────────────────────────────────────


class Reverse(torch.autograd.Function):
    """A backward of its own."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Any:
        return -ctx.factor * grad, None  # type: ignore[attr-defined]


class Methods(nn.Module):
    """A method of a module that is not its forward, in which its mode is read; a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        z = cut(self.coder.encode(x))
        return self.out(z) + self.coder(z)


class Coder(Odd):
    def __init__(self) -> None:
        super().__init__(6)
        self.scales = nn.ParameterList(torch.full((6,), float(i + 1)) for i in range(2))

    def encode(self, x: Tensor) -> Tensor:
        h = F.dropout(self.linear(x), 0.5, self.training)
        for scale in self.scales:
            h = h * scale
        return h


class Body(nn.Module):
    """``body`` is a forward that is traced, with a cut in it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.plain = [nn.ReLU()]
        self.lstm = nn.LSTM(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def reverses(self: Any, x: Tensor) -> Tensor:
    return self.b(cut(Reverse.apply(self.a(x), 3.0)))


def penalises(self: Any, x: Tensor) -> Any:
    return self.b(cut(self.a(x))), sum(p.pow(2).sum() for p in self.parameters())


def asks_parameters(self: Any, x: Tensor) -> Tensor:
    device, dtype = next(self.parameters()).device, self.a.weight.dtype
    x = cut(self.a(x))
    return self.b(x.to(dtype)) + torch.ones(6, device=device, dtype=dtype) * self.a.weight.shape[0]


def branches_on_kinds(self: Any, x: Any) -> Tensor:
    if isinstance(x, (list, tuple)):
        x = x[0]
    return self.b(cut(self.a(x * 2 if isinstance(x, Tensor) else x)))


def counts_in_place(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    self.count.mul_(1.5)
    return self.b(cut(self.a(x) * self.count))


def uses_a_module_in_a_plain_list(self: Any, x: Tensor) -> Tensor:
    return self.b(cut(self.plain[0](self.a(x))))


def flattens_an_lstm(self: Any, x: Tensor) -> Tensor:
    """The method reads the layer's list of its weights."""
    self.lstm.flatten_parameters()
    return self.b(cut(self.lstm(self.a(x))[0]))


def counts_sizes(self: Any, x: Tensor) -> Tensor:
    rows = x.shape[0]
    more = rows
    more += 1
    x = cut(self.a(x))
    return self.b(x)[:rows] * more + x.new_zeros(rows, 1)


def unpacks(self: Any, *xs: Tensor, **named: Tensor) -> Tensor:
    y = cut(self.a(sum(xs)))
    return torch.cat([y, *named.values(), *y.chunk(2)], 0)


@pytest.mark.parametrize(
    "body", [reverses, penalises, asks_parameters, branches_on_kinds, counts_in_place, uses_a_module_in_a_plain_list,
             flattens_an_lstm, counts_sizes, unpacks],
)  # fmt: skip
def test_a_traced_forward_may(body: Callable[..., Any]) -> None:
    model = Body(body)
    chain = chain_for(model, sample=((X,), {}))
    for groups in every_cut(chain):
        plan = build_plan(chain, groups)
        assert_owned(plan)
        assert_runs_as_plain(plan, X)
    if body is branches_on_kinds:
        assert_runs_as_plain(plan, [X])
    if body is unpacks:
        assert_runs_as_plain(plan, X, X, other=X)


def test_methods_that_are_not_forward_are_traced_with_their_modules_mode() -> None:
    plan = cut_everywhere(Methods())
    assert_owned(plan)
    assert_runs_as_plain(plan, X)


def test_reading_a_dtype_ties_nothing() -> None:
    chain = chain_for(Body(asks_parameters), sample=((X,), {}))
    plan = build_plan(chain, [(layer,) for layer in chain.layers])
    assert plan.ties == ()


def test_a_model_without_data_is_cut_like_any_other() -> None:
    with torch.device("meta"):
        model = Positional()
    plan = cut_everywhere(model)
    assert [list(stage.layers) for stage in plan.stages] == [
        list(s.layers) for s in cut_everywhere(Positional()).stages
    ]
    assert all(parameter.is_meta for parameter in plan.stage_module(0).parameters())


def test_a_lazy_layer_is_built_in_the_stage_that_has_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Lazy(lambda: nn.Linear(6, 6), seed=1)
            self.inner = Chain()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(cut(self.a(x)))

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b = Lazy(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU()), seed=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(x)

    model = Late()
    for how in ({}, {"cuts": ["inner"]}, {"stages": 2}):
        plan = cut_everywhere(model, **how)
        assert [stage.parameters for stage in plan.stages] == [42, 42]
        assert isinstance(model.a, Lazy)
        assert isinstance(model.inner.b, Lazy)
    second = plan.stage_module(1)
    assert isinstance(model.a, Lazy)
    assert list(second.state_dict()) == ["inner.b.0.weight", "inner.b.0.bias"]
    output = run_stages(plan, (X,), {})
    torch.testing.assert_close(output, model(X), rtol=0, atol=0)
    assert_owned(plan)
    assert_runs_as_plain(plan, X)


def test_parameters_that_are_replaced_after_the_split_are_those_of_the_stage() -> None:
    with torch.device("meta"):
        model = Positional()
    plan = cut_everywhere(model)
    model.to_empty(device="cpu")
    assert_owned(plan)


def test_a_cut_stage_keeps_no_values_between_calls() -> None:
    plan = cut_everywhere(UNet())
    stages = [plan.stage_module(index) for index in range(plan.num_stages)]
    first = run_stages(plan, (X,), {}, stages)
    second = run_stages(plan, (X + 1,), {}, stages)
    assert not torch.equal(first, second)
    torch.testing.assert_close(run_stages(plan, (X,), {}, stages), first, rtol=0, atol=0)


# ── calls that were guessed ──────────────────────────────────────────────────────────────────────────────────────


class Masked(nn.Module):
    """A layer that only calls with a mask use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.a(x)
        if mask is not None:
            x = self.b(x) * mask
        return self.c(x)


def test_a_model_split_for_a_guessed_call_is_split_again_for_the_first_mini_batch() -> None:
    model = Masked()
    plain = copy.deepcopy(model)
    plan = ps.split(model, stages=2)
    assert "b" not in [layer for layers in plan.groups for layer in layers]
    with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=2) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for x in (X, 2 * X):
            loss = plain(x, x).square().mean()
            loss.backward()
            torch.testing.assert_close(pipe.step((x, x)).loss, loss.detach())
            optimizer.step(), plain_optimizer.step()
            optimizer.zero_grad(), plain_optimizer.zero_grad()
        assert set(pipe.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_a_later_kind_of_call_that_needs_another_plan_is_refused() -> None:
    with ps.Pipeline(ps.split(Masked(), stages=2), lambda out: out.square().mean(), microbatches=2) as pipe:
        pipe.step(X)
        with pytest.raises(ps.PlanError, match=r"called as Masked\(x, mask\), the model uses b in stage 0.*sample="):
            pipe.step((X, X))


def test_marks_of_a_model_whose_call_cannot_be_guessed_need_a_sample() -> None:
    class Joins(Masked):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.b(cut(self.a(torch.cat([x.flatten(1), mask], 1))))

    with pytest.raises(ps.PlanError, match="it is not known how to call it"):
        ps.split(Joins(), stages=2)
    sample = torch.ones(4, 2, 2), torch.ones(4, 2)
    plan = ps.split(Joins(), stages=2, sample=sample)
    assert_runs_as_plain(plan, *sample)


def test_dropout_of_a_recomputed_stage_is_that_of_its_forward() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(F.dropout(self.a(x), 0.5, self.training)))

    model, found = Body(body), []
    plan = ps.split(model, stages=2, sample=X)
    for recompute in ("never", "always"):
        with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=1, recompute=recompute) as pipe:
            torch.manual_seed(4)
            loss = pipe.step(X).loss
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        model.zero_grad()
    torch.testing.assert_close(*found)
