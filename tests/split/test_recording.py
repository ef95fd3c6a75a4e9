"""Recordings of forwards: aliases, contexts, questions about inputs, kinds of calls and of outputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import PlanError
from penstock.split.lazy import Lazy
from penstock.split.marks import cut
from penstock.split.plan import Plan, build_plan, run_stages
from tests.split.trace_checks import assert_owned, assert_runs_as_plain, chain_for, cut_everywhere, every_cut, untouched

pytestmark = pytest.mark.slow

X = torch.linspace(-1, 2, 24).reshape(4, 6)


class Body(nn.Module):
    """Three layers, and a forward that a test gives."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.linspace(1, 2, 6))
        self.body = body

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def recorded(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """A plan with every cut of a body, after each subset of its cuts was compared with the plain model."""
    model = Body(body)
    args = args or (X,)
    with untouched(model):
        chain = chain_for(model, sample=(args, kwargs))
    for groups in every_cut(chain):
        plan = build_plan(chain, groups)
        assert_owned(plan)
        assert_runs_as_plain(plan, *args, **kwargs)
    return plan


def losses(plan: Plan, steps: list[Any], microbatches: int = 2) -> list[Tensor]:
    """The losses of steps of a pipeline."""
    with ps.Pipeline(plan, lambda out: out.square().mean(), microbatches=microbatches, devices="cpu") as pipe:
        return [pipe.step(x).loss for x in steps]


def plain_loss(model: nn.Module, x: Tensor, microbatches: int = 2) -> Tensor:
    return torch.stack([model(part).square().mean() for part in x.chunk(microbatches)]).mean().detach()


# ── memory that values share ─────────────────────────────────────────────────────────────────────────────────────


def test_changes_in_place_of_views_in_one_stage() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        x.view(-1)[::2].mul_(2)
        x = cut(x) * 2
        first, second = x[:, :3], x[:, 3:]
        first.add_(second)
        y = cut(torch.cat([first, second.clone()], -1).relu_() + x)
        y[:, 0], y[:, 1:3] = 0, 1
        return self.b(y).clamp_(min=0)

    recorded(body)


def test_a_value_changed_in_place_in_one_stage_and_used_in_another_is_refused() -> None:
    def later(self: Any, x: Tensor) -> Tensor:
        x = cut(self.a(x))
        x.mul_(2)
        return cut(self.b(x)) + x

    def earlier(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)
        y = x.view(-1)
        cut(x).mul_(2)
        return cut(self.b(x)) + y.view(4, 6)

    def returned(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        cut(x).add_(1)
        return cut(self.b(x)), x

    for body in (later, earlier, returned):
        chain = chain_for(Body(body), sample=((X,), {}))
        assert_runs_as_plain(build_plan(chain, [chain.layers]), X)
        with pytest.raises(PlanError, match=r"test_recording.py:\d+: .* is changed in place in stage 1, but stage"):
            build_plan(chain, [(layer,) for layer in chain.layers])


def test_an_input_changed_in_place() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x += 1
        return self.b(cut(self.a(x)))

    plan = cut_everywhere(Body(body), sample=((X.clone(),), {}))
    assert_close(run_stages(plan, (X.clone(),), {}), plan.require_chain().model(X.clone()))


def test_outputs_that_are_one_tensor_stay_one() -> None:
    def body(self: Any, x: Tensor) -> Any:
        x = cut(self.a(x))
        y = self.b(x)
        return y, y, x, {"again": x}

    plan = recorded(body)
    first, second, third, named = run_stages(plan, (X,), {})
    assert first is second
    assert third is named["again"]


def test_inputs_and_parameters_that_are_returned() -> None:
    def body(self: Any, x: Tensor) -> Any:
        return self.b(cut(self.a(x))), x, self.scale, None, 3, "text"

    recorded(body)


# ── gradients and contexts ───────────────────────────────────────────────────────────────────────────────────────


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor  # type: ignore[attr-defined]
        return x.clone(), x.detach().sum()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> Any:
        return -ctx.factor * grad, None  # type: ignore[attr-defined]


def test_an_autograd_function_keeps_its_own_backward() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x, total = Reverse.apply(self.a(x), 3.0)
        return self.b(cut(x)) + total

    recorded(body)


def test_gradient_modes_and_detached_values() -> None:
    def body(self: Any, x: Tensor) -> Any:
        x = self.a(x)
        with torch.no_grad():
            target = cut(self.b(x))
            with torch.enable_grad():
                again = self.c(cut(x))
        return self.c(cut(x)) - target + again.detach(), again, target.requires_grad

    recorded(body)


def test_gradients_computed_in_the_forward() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = cut(self.a(x))
        energy = self.b(x).square().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return self.c(cut(force))

    recorded(body)


def test_autocast_on_and_off() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = cut(self.a(x))
            with torch.autocast("cpu", enabled=False):
                y = self.b(cut(x.float()))
            z = self.c(y)
        return y + z.float()

    plan = recorded(body)
    with torch.autocast("cpu", torch.bfloat16):
        assert_runs_as_plain(plan, X)


def checkpointed(self: Any, x: Tensor, reentrant: bool) -> Tensor:
    def part(x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x), 0.5, self.training))

    return self.c(cut(checkpoint(part, self.c(x), use_reentrant=reentrant)))


def test_checkpoints_in_the_forward() -> None:
    for reentrant in (False, True):
        recorded(checkpointed, X, reentrant)


def test_checkpoints_in_the_forward_run_their_part_again_in_backward() -> None:
    for reentrant in (False, True):
        model, runs = Body(checkpointed), []
        plan = cut_everywhere(model, sample=((X, reentrant), {}))
        model.a.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        run_stages(plan, (X, reentrant), {}).sum().backward()
        assert len(runs) == 2


def test_random_numbers_follow_the_seed() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = cut(F.dropout(self.a(x), 0.5, self.training))
        x = x + torch.randn_like(x) + torch.rand(6) + torch.empty(6).uniform_()
        return self.b(cut(x * torch.bernoulli(torch.full((6,), 0.5))))[torch.randperm(4)]

    plan = recorded(body)
    torch.manual_seed(5)
    first = run_stages(plan, (X,), {})
    assert not torch.equal(first, run_stages(plan, (X,), {}))
    torch.manual_seed(5)
    assert torch.equal(first, run_stages(plan, (X,), {}))


def test_a_generator_of_the_model() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(self.a(x) + torch.rand(6, generator=self.generator)))

    model = Body(body)
    model.generator = torch.Generator().manual_seed(1)
    plan = cut_everywhere(model, sample=((X,), {}))
    got = run_stages(plan, (X,), {})
    model.generator.manual_seed(1)
    assert_close(got, model(X))


def test_a_generator_state_set_in_the_forward_is_refused() -> None:
    def seeds(self: Any, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.b(cut(self.a(x) + torch.rand(6)))

    def forks(self: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng():
            x = x + torch.rand(6)
        return self.b(cut(self.a(x))) + torch.rand(6)

    for body in (seeds, forks):
        with pytest.raises(PlanError, match="random"):
            chain_for(Body(body), sample=((X,), {}))


def test_the_default_dtype() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = cut(self.a(x))
        return self.b(x + torch.ones(6)) * torch.tensor(0.5)

    torch.set_default_dtype(torch.float64)
    try:
        recorded(body, X.double())
    finally:
        torch.set_default_dtype(torch.float32)


# ── questions about the inputs ───────────────────────────────────────────────────────────────────────────────────


def test_a_random_number_compared_with_a_constant() -> None:
    def body(self: Any, x: Tensor, chance: float) -> Tensor:
        for layer in (self.a, self.b):
            x = cut(x)
            if torch.rand([]) >= chance:
                x = layer(x)
        return self.c(x)

    for chance in (0.0, 1.0):
        recorded(body, X, chance)
    with pytest.raises(PlanError, match=r"test_recording.py:\d+: `if torch.rand\(\[\]\) >= chance:`"):
        chain_for(Body(body), sample=((X, 0.5), {}))


def test_masks_and_indices_from_the_inputs() -> None:
    def body(self: Any, x: Tensor, keep: Tensor) -> Any:
        x = cut(self.a(x))
        kept = cut(self.b(x[keep]))
        x = x.masked_fill(~keep[:, None], 0)
        x[keep] = kept
        return self.c(x), kept.mean() if keep.any() else None, torch.nonzero(keep), keep.nonzero()[0].item()

    plan = recorded(body, X, torch.tensor([True, False, True, True]))
    for mask in ([True, False, False, True], [False, True, True, True], [True] * 4):
        assert_runs_as_plain(plan, X, torch.tensor(mask))


def test_numbers_in_the_inputs_decide_the_path() -> None:
    def body(self: Any, x: Tensor, count: Tensor) -> Tensor:
        x = cut(self.a(x))
        for _ in range(int(count)):
            x = self.b(x)
        return cut(self.c(x)) * count.item() if count > 1 else cut(x)

    plan = recorded(body, X, torch.tensor(2))
    for count in (0, 1, 2, 3, 1):
        assert_runs_as_plain(plan, X, torch.tensor(count))


def test_microbatches_of_one_step_take_different_paths() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = x if x.sum() > 0 else -x
        rows = x[x[:, 0] > 0]
        return self.c(cut(self.b(cut(self.a(x) + rows.sum(0))))) * x.amax().item()

    batches = [X, -X, X.flip(0), torch.cat([X[:2], -X[:2]])]
    model = Body(body)
    plain = copy.deepcopy(model)
    plan = cut_everywhere(model, sample=((X[:2],), {}))
    for got, x in zip(losses(plan, batches), batches, strict=True):
        torch.testing.assert_close(got, plain_loss(plain, x))
    torch.stack([plain(part).square().mean() / 2 for x in batches for part in x.chunk(2)]).sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_lists_and_arrays_of_inputs() -> None:
    def body(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        x = cut(self.a(x))
        for number in ids.tolist():
            x = x + number
        return self.b(x) * float(ids.numpy().sum()) + len(ids.detach().cpu().numpy().tolist())

    plan = recorded(body, X, torch.tensor([0, 3, 1]))
    assert_runs_as_plain(plan, X, torch.tensor([2, 3, 1]))


def test_assertions_about_inputs() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        assert x.max() < 10, "too large"
        return self.b(cut(self.a(x)))

    plan = recorded(body)
    with pytest.raises(AssertionError, match="too large"):
        run_stages(plan, (X * 100,), {})
    assert_runs_as_plain(plan, X)


def test_a_buffer_that_the_forward_changes_does_not_answer_questions() -> None:
    """The answers of all micro-batches are found before the first one runs."""

    def counts(self: Any, x: Tensor) -> Tensor:
        self.number += 1
        x = cut(self.a(x))
        return self.b(x) if self.number > 2 else self.c(x)

    def stores(self: Any, x: Tensor) -> Tensor:
        place = int(self.number)
        self.number.copy_((self.number + 1) % 4)
        return self.b(cut(self.a(x) * place))

    for body in (counts, stores):
        model = Body(body)
        model.register_buffer("number", torch.zeros((), dtype=torch.long))
        with untouched(model), pytest.raises(PlanError, match=r"test_recording.py:\d+: .*number"):
            chain_for(model, sample=((X,), {}))


def test_questions_that_depend_on_parameters_keep_the_module_whole() -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else y[:, :3].repeat(1, 2) * y.max().item()

    model = nn.Sequential(nn.Linear(6, 6), Asks(6, 6), nn.Linear(6, 6))
    plan = cut_everywhere(Wrapper(model), stages=3, sample=((X,), {}))
    assert_runs_as_plain(plan, X)
    assert_runs_as_plain(plan, -X)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


# ── one recording per kind of call ───────────────────────────────────────────────────────────────────────────────


def test_a_new_length_in_each_step() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        x = cut(self.a(x)) + torch.arange(length)[:, None]
        x = cut(self.b(x.reshape(rows * length, -1))).view(rows, length, 6)
        return self.c(x) / (2 if length > 4 else length)

    model = Body(body)
    plan = cut_everywhere(model, sample=((torch.ones(2, 3, 6),), {}))
    batches = [torch.randn(4, length, 6) for length in (3, 5, 2, 7, 1, 3)]
    for got, x in zip(losses(plan, batches), batches, strict=True):
        torch.testing.assert_close(got, plain_loss(model, x))
    model.zero_grad()
    assert_runs_as_plain(plan, torch.ones(5, 2, 6))  # micro-batches of another size


def test_an_attribute_changed_after_the_split() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(self.a(x) * self.factor)) + (self.c(x) if self.options["more"] else 0)

    model = Body(body)
    model.factor, model.options = 1.0, {"more": True}
    plan = cut_everywhere(model, sample=((X,), {}))
    assert_runs_as_plain(plan, X)
    model.factor = 3.0
    assert_runs_as_plain(plan, X)
    model.options["more"] = False
    assert_runs_as_plain(plan, X)


def test_parameters_frozen_after_the_split() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.c(cut(self.b(cut(self.a(x) * self.scale))))

    plan = recorded(body)
    model = plan.require_chain().model
    for name in ("a", "scale", "c"):
        getattr(model, name).requires_grad_(False)
        assert_runs_as_plain(plan, X)


def test_the_dtype_of_the_model_changed_after_the_split() -> None:
    def body(self: Any, ids: Tensor) -> Tensor:
        x = self.a(self.scale * ids)
        return self.b(cut(x) + torch.ones(6, dtype=x.dtype))

    ids = torch.arange(12).view(2, 6)
    plan = recorded(body, ids)
    plan.require_chain().model.to(torch.bfloat16)
    assert_runs_as_plain(plan, ids)


def test_other_dtypes_of_an_input() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(self.a(x.float() if x.dtype != torch.float32 else x + 1)))

    plan = recorded(body)
    assert_runs_as_plain(plan, X.long())
    assert_runs_as_plain(plan, X.double())


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_module_without_parameters_in_a_plain_list() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(self.loose[0](self.a(x))))

    class Loose(Body):
        loose = [nn.Sequential(nn.ReLU(), nn.Dropout(0.5))]  # noqa: RUF012

    plan = cut_everywhere(Loose(body), sample=((X,), {}))
    assert_runs_as_plain(plan, X)


def test_a_module_called_by_its_forward_and_parameters_read_directly() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        x = cut(self.a.forward(x) * self.scale)
        x = F.linear(x, self.b.weight.t() @ self.c.weight, self.b.bias)
        return cut(x) + self.get_parameter("c.bias") + dict(self.named_parameters())["scale"]

    plan = recorded(body)
    assert {name for name, _ in plan.stage_module(0).named_parameters()} == {"a.weight", "a.bias", "scale"}
    assert ("scale",) in [tie.names for tie in plan.ties]


def test_functional_call_with_other_parameters() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        twice = {"weight": self.a.weight * 2, "bias": self.scale}
        return self.b(cut(torch.func.functional_call(self.a, twice, (x,)))) + self.a(x)

    recorded(body)


def test_parametrized_weights() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(F.linear(x, self.a.weight))) + cut(self.c(x))

    model = Body(body)
    nn.utils.parametrizations.weight_norm(model.a)
    nn.utils.parametrizations.spectral_norm(model.b)
    assert_runs_as_plain(cut_everywhere(model, sample=((X,), {})), X)


def test_tensors_that_a_function_caches() -> None:
    @functools.cache
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(mask(len(x)) @ self.a(x)))

    plan = recorded(body)
    assert_runs_as_plain(plan, torch.cat([X, X]))
    assert_runs_as_plain(recorded(body), X)


def test_a_module_that_is_not_called() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.b(cut(self.a(x)))

    plan = recorded(body)
    held = {name for s in range(2) for name in plan.stage_module(s).state_dict()}
    assert {"c.weight", "c.bias", "scale"} <= held


def test_lazy_layers_and_meta_models() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.c(cut(self.b(cut(self.a(x) * self.scale))))

    late = Body(body)
    late.b = Lazy(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), seed=1)
    plan = cut_everywhere(late, sample=((X,), {}))
    assert isinstance(late.b, Lazy)
    assert list(plan.stage_module(1).state_dict()) == ["b.0.weight", "b.0.bias", "b.2.weight", "b.2.bias"]
    assert_runs_as_plain(plan, X)

    real = Body(body)
    with torch.device("meta"):
        plan = cut_everywhere(Body(body), sample=((X,), {}))
    modules = [plan.stage_module(s).to_empty(device="cpu") for s in range(3)]
    with torch.no_grad():
        for module in modules:
            for name, parameter in module.named_parameters():
                parameter.copy_(real.get_parameter(name))
    assert_close(run_stages(plan, (X,), {}, modules), real(X))


# ── kinds of outputs ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Result:
    logits: Tensor
    loss: Tensor | None = None
    names: tuple[str, ...] = ()


class Point(NamedTuple):
    x: Tensor
    y: Tensor


def test_dataclasses_and_named_tuples() -> None:
    def body(self: Any, x: Tensor) -> Any:
        point = Point(self.a(x), x)
        point = cut(Point(self.b(point.x), point.y))
        return Result(self.c(cut(point.x)), names=("logits",)), point

    model = Body(body)
    plan = cut_everywhere(model, sample=((X,), {}))
    (got, point), (want, plain_point) = run_stages(plan, (X,), {}), model(X)
    assert (type(got), got.loss, got.names, type(point)) == (Result, None, ("logits",), Point)
    assert_close((got.logits, *point), (want.logits, *plain_point))


def test_a_dataclass_as_an_argument_of_a_module() -> None:
    class Takes(nn.Module):
        def forward(self, result: Result) -> Result:
            return Result(result.logits * 2, result.logits.sum(), result.names)

    def body(self: Any, x: Tensor) -> Tensor:
        result = self.takes(Result(cut(self.a(x)), names=("a",)))
        return self.b(cut(result.logits)) + result.loss + len(result.names)

    model = Body(body)
    model.takes = Takes()
    assert_runs_as_plain(cut_everywhere(model, sample=((X,), {})), X)


def assert_close(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


# ── state that a recording would miss ────────────────────────────────────────────────────────────────────────────


def changes_a_view_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    self.bank.data[0].add_(h.detach().mean())
    return self.c(cut(self.b(cut(h)))) * self.bank


def changes_a_plain_tensor(self: Any, x: Tensor) -> Tensor:
    self.plain += 1
    return self.c(cut(self.b(cut(self.a(x))))) * self.plain


def moves_a_teacher(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        self.c.weight.data.mul_(0.9).add_(self.a.weight.data, alpha=0.1)
    return self.c(cut(self.b(cut(h))))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (changes_a_view_of_a_buffer, "'bank' is changed in place in stage 0, but stage 2 uses it too"),
        (changes_a_plain_tensor, r"test_recording.py:\d+: a tensor that is neither a parameter nor a buffer"),
        (moves_a_teacher, r"'c\.weight' is changed in place in stage 0, but stage 2 uses it too"),
    ],
)
def test_state_that_stages_would_miss_is_refused(body: Any, message: str) -> None:
    model = Body(body)
    model.register_buffer("bank", torch.ones(6))
    model.plain = torch.zeros(())
    with pytest.raises(PlanError, match=message):
        cut_everywhere(model, sample=((X,), {}))


class Counts(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        self.calls += 1
        return super().forward(x), self.calls


def test_a_number_that_a_module_returns_must_stay_the_same() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        h, calls = self.b(cut(self.a(x)))
        return self.c(cut(h)) * calls

    model = Body(body)
    model.b = Counts(6, 6)
    plan = cut_everywhere(model, sample=((X,), {}))
    run_stages(plan, (X,), {})
    with pytest.raises(PlanError, match=r"b returned 2, but 1 when the forward was recorded"):
        run_stages(plan, (X,), {})


def test_strides_of_inputs_and_replaced_modules() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        return self.c(cut(self.b(cut(self.a(x))))) * (2 if x.is_contiguous() else 3)

    plan = cut_everywhere(Body(body), sample=((X,), {}))
    assert_runs_as_plain(plan, X)
    assert_runs_as_plain(plan, X.t().contiguous().t())
    plan.require_chain().model.b = nn.Linear(6, 6)
    with pytest.raises(PlanError, match="modules of Body were replaced after the split"):
        run_stages(plan, (X,), {})
