"""Forwards that cannot be traced or cut: the error names the line and the remedy, and the model stays as it was."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.marks import cut
from penstock.split.plan import build_plan, run_stages
from tests.split.trace_checks import assert_runs_as_plain, chain_for, cut_everywhere, untouched
from tests.split.trace_models import Nested, UNet

X = torch.linspace(-1, 2, 24).reshape(4, 6)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.calls = 0
        self.seen: list[Any] = []
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = cut(self.a(x))
        return self.other(x)


def bad(body: Callable[[Any, Tensor], Any]) -> nn.Module:
    return type("Bad", (Branching,), {"other": body})()


class MakesLayer(nn.Module):
    """It makes its layer at the first call, as BigBird does for short sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.Identity):
            self.layer = nn.Linear(6, 6)
        return self.layer(x)


class Strange:
    def __init__(self, value: Any) -> None:
        self.value = value


LOOSE = [nn.Linear(6, 6)]


def loops_on_data(self: Any, x: Tensor) -> Tensor:
    while x.sum() > 0:
        x = cut(x - 1)
    return x


def branches(self: Any, x: Tensor) -> Tensor:
    if x.mean() > 0:
        return x
    return cut(-x)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def keeps(self: Any, x: Tensor) -> Tensor:
    self.last = x
    return x


def fills_a_list(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return x


def assigns_a_buffer(self: Any, x: Tensor) -> Tensor:
    self.count = self.count + 1
    return x * self.count


def draws(self: Any, x: Tensor) -> Tensor:
    return x * random.random()


def draws_with_numpy(self: Any, x: Tensor) -> Tensor:
    return x * float(numpy.random.rand())


def returns_an_object(self: Any, x: Tensor) -> Any:
    return Strange(x)


def calls_a_loose_module(self: Any, x: Tensor) -> Tensor:
    return LOOSE[0](x)


REFUSED: dict[Callable[..., Any], str] = {
    loops_on_data: r"test_trace_refused.py:\d+: `while x.sum\(\) > 0:`.*known only when the model runs",
    branches: r"test_trace_refused.py:\d+: `if x.mean\(\) > 0:`.*Mark the cuts elsewhere, or move this part",
    counts: "sets calls.*would be lost",
    fills_a_list: "sets seen.*would be lost",
    assigns_a_buffer: "sets count while it runs.*change it in place",
    draws: "draws random numbers",
    draws_with_numpy: "draws random numbers",
    returns_an_object: "returns a Strange, which holds tensors: return a tensor, a tuple, a dict or a dataclass",
    calls_a_loose_module: r"test_trace_refused.py:\d+: the Linear that is called here has parameters",
}


def test_a_forward_that_cannot_be_recorded_is_an_error_with_its_line() -> None:
    for body, message in REFUSED.items():
        model = bad(body)
        with untouched(model), pytest.raises(PlanError, match=message):
            chain_for(model)


def test_an_attribute_that_is_set_and_never_read_is_a_warning() -> None:
    model = bad(keeps)
    with untouched(model), pytest.warns(UserWarning, match=r"Bad.forward sets last: .* keep the values"):
        plan = cut_everywhere(model)
    assert_runs_as_plain(plan, X)


def loops_on_size(self: Any, x: Tensor) -> Tensor:
    for _ in range(x.shape[0]):
        x = cut(self.a(x))
    return x


def iterates(self: Any, x: Tensor) -> Tensor:
    return torch.stack([cut(row) for row in x])


def asks_the_kind(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    return y[0] if isinstance(y, tuple) else y


def returns_an_ordered_dict(self: Any, x: Tensor) -> Any:
    return OrderedDict(x=x)


def test_forwards_that_depend_on_sizes_and_kinds_of_values_are_recorded() -> None:
    for body in (loops_on_size, iterates, asks_the_kind, returns_an_ordered_dict):
        model = bad(body)
        with untouched(model):
            plan = cut_everywhere(model, sample=((X,), {}))
        assert_runs_as_plain(plan, X)


def test_an_argument_that_is_no_tensor_or_plain_value_is_refused() -> None:
    model = bad(asks_the_kind)
    plan = cut_everywhere(model)
    with pytest.raises(PlanError, match="the argument x is a Strange: a model in stages takes tensors, numbers"):
        run_stages(plan, (Strange(X),), {})
    with pytest.raises(PlanError, match=r"the argument x\[1\] is a Strange"):
        run_stages(plan, ([X, Strange(X)],), {})


def test_hooks_on_a_module_that_is_cut_are_refused() -> None:
    for path in ("", "body", "body.0"):
        model = Nested()
        model.get_submodule(path).register_forward_hook(lambda *_: None)
        with untouched(model), pytest.raises(PlanError, match="has hooks"):
            chain_for(model)


def test_a_layer_that_a_forward_makes() -> None:
    """A module that stays whole makes it itself. Where cuts lie inside, it has to be there before the split."""
    model = nn.Sequential(OrderedDict(made=MakesLayer(), last=nn.Linear(6, 6)))
    with untouched(model):
        chain = chain_for(model, cuts=["last"])
    with untouched(model.made), pytest.raises(PlanError, match="run the model once before the split"):
        chain_for(model.made, stages=1)
    model(X)
    assert_runs_as_plain(build_plan(chain, [chain.layers[:1], chain.layers[1:]]), X)
    assert_runs_as_plain(cut_everywhere(model.made, stages=1), X)


class InPlace(nn.Module):
    def __init__(self, late: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        x = cut(self.a(x))
        y = x.view(-1)
        y.mul_(2)
        z = cut(self.a(x))
        return z + x if self.late else z


def test_a_value_changed_in_place_is_not_used_unchanged_elsewhere() -> None:
    assert_runs_as_plain(cut_everywhere(InPlace(late=False)), X)
    model = InPlace(late=True)
    chain = chain_for(model)
    assert_runs_as_plain(build_plan(chain, [chain.layers[:1], chain.layers[1:]]), X)
    with untouched(model), pytest.raises(PlanError, match=r"changed in place in stage 1, but stage 2 uses it"):
        build_plan(chain, [(layer,) for layer in chain.layers])


class SharedNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(cut(self.norm(x)))


def test_running_statistics_are_not_duplicated() -> None:
    chain = chain_for(SharedNorm())
    assert_runs_as_plain(build_plan(chain, [chain.layers]), X)
    with pytest.raises(PlanError, match=r"norm \(BatchNorm1d\).*stage 0 .*stage 1"):
        build_plan(chain, [(layer,) for layer in chain.layers])


class OnlyWhenAsked(nn.Module):
    """A word decides about a skip, and about the module that is called: the plan cannot know which words there are."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)

    def forward(self, x: Tensor, how: str = "plain") -> Tensor:
        y = cut(self.a(x))
        z = cut(self.b(y))
        return self.c(z + y) if how == "skip" else self.b(z) if how == "other" else self.c(z)


def test_a_kind_of_call_that_the_plan_did_not_know_of() -> None:
    plan = cut_everywhere(OnlyWhenAsked())
    assert (0, 2) not in [(edge.src, edge.dst) for edge in plan.edges]
    assert_runs_as_plain(plan, X, how="plain")
    assert_runs_as_plain(plan, X, how="skip")
    with pytest.raises(PlanError, match=r"how='other'.*uses b in stage 2"):
        run_stages(plan, (X,), {"how": "other"})


def test_an_error_of_the_forward_names_the_users_line() -> None:
    plan = cut_everywhere(UNet())
    with pytest.raises(RuntimeError) as caught:
        run_stages(plan, (torch.ones(2, 3),), {})
    assert any("trace_models.py" in note for note in caught.value.__notes__)


class Wrapped(nn.Module):
    """Its output is an object that is no tree of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Strange:
        return Strange(self.a(x))


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Wrapped()
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        strange = cut(self.a(x))
        return self.b(strange.value)


def test_a_module_that_returns_an_object_is_recorded_itself() -> None:
    assert_runs_as_plain(cut_everywhere(Crossing()), X)


def test_a_buffer_that_two_stages_use_is_not_changed_in_one_of_them() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return cut(self.a(x)) * self.count

    chain = chain_for(Counting())
    assert_runs_as_plain(build_plan(chain, [chain.layers]), X)
    with pytest.raises(PlanError, match="'count' is changed in place in stage 0, but stage 1 uses it too"):
        build_plan(chain, [(layer,) for layer in chain.layers])


def test_a_layer_that_does_not_know_its_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"0\.weight does not know its size yet"):
        chain_for(nn.Sequential(nn.LazyLinear(3)), stages=1)


def test_arguments_that_do_not_fit_are_named() -> None:
    plan = cut_everywhere(UNet())
    with pytest.raises(PlanError, match=r"UNet takes \(x.*missing a required argument"):
        run_stages(plan, (), {})
