"""``pipe(x)``: the plain model's outputs, in a graph whose backward runs the stages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, mlp, plain_step, snapshot


def pipeline(model: nn.Sequential, stages: int = 3, **options: Any) -> ps.Pipeline:
    options.setdefault("microbatches", 4)
    return ps.Pipeline(ps.split(model, stages=stages), **options)


class Part(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_h1", "zbv"])
@pytest.mark.parametrize("samples", [1, 3, 8, 10])
def test_outputs_and_gradients_are_the_plain_models(schedule: str, samples: int) -> None:
    model = mlp()
    x, plain = batch(samples).requires_grad_(), batch(samples).requires_grad_()
    expected = plain_step(model, plain, batch(samples, seed=5), F.mse_loss)
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        output = pipe(x)
        F.mse_loss(output, batch(samples, seed=5)).backward()
    assert_same(output, expected.output)
    assert_same(gradients(model), expected.gradients)
    assert_same(x.grad, plain.grad)


def test_the_pipeline_may_stand_in_the_middle_of_a_graph() -> None:
    model, before, after = mlp(), nn.Linear(4, 4), nn.Linear(4, 4)
    expected = plain_step(nn.Sequential(before, model, after), batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        F.mse_loss(after(pipe(before(batch()))), batch(seed=5)).backward()
    assert_same(before.weight.grad, expected.gradients["0.weight"])
    assert_same(after.weight.grad, expected.gradients["2.weight"])


def test_torch_autograd_grad_gives_gradients_and_accumulates_none() -> None:
    model = mlp()
    expected = torch.autograd.grad(model(batch()).sum(), list(model.parameters()))
    with pipeline(model) as pipe:
        found = torch.autograd.grad(pipe(batch()).sum(), list(pipe.parameters()))
    assert_same(list(found), list(expected))
    assert all(grad is None for grad in gradients(model).values())


def test_torch_autograd_grad_of_the_input_alone() -> None:
    model, x = mlp(), batch().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with pipeline(model) as pipe:
        (found,) = torch.autograd.grad(pipe(x).sum(), x)
    assert_same(found, expected)
    assert all(grad is None for grad in gradients(model).values())


def test_backward_twice_with_retain_graph_adds_up() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss, steps=2)
    x = batch().requires_grad_()
    with pipeline(model) as pipe:
        loss = F.mse_loss(pipe(x), batch(seed=5))
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(model), expected.gradients)


def test_a_second_backward_without_retain_graph_says_what_to_do() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        output = pipe(batch())
        output.sum().backward()
        before = snapshot(model)
        with pytest.raises(RuntimeError, match=r"second time.*retain_graph=True"):
            output.sum().backward()
        assert_same(snapshot(model), before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_calls_before_backward_do_not_mix(order: tuple[int, int]) -> None:
    model = mlp()
    batches = [batch(8, seed=3), batch(6, seed=4)]
    plain = [plain_step(model, x, x, F.mse_loss) for x in batches]
    with pipeline(model) as pipe:
        losses = [F.mse_loss(pipe(x), x) for x in batches]
        for i in order:
            losses[i].backward()
            assert_same(gradients(model), plain[i].gradients)
            pipe.zero_grad()


def test_a_step_between_call_and_backward_does_not_mix_either() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model, loss_fn=F.mse_loss) as pipe:
        loss = F.mse_loss(pipe(batch()), batch(seed=5))
        pipe.step(batch(6, seed=9), batch(6, seed=10))
        pipe.zero_grad()
        loss.backward()
    assert_same(gradients(model), expected.gradients)


def test_two_outputs_of_one_call_may_go_back_together() -> None:
    model = mlp()
    expected = plain_step(model, torch.cat([batch(), batch(seed=9)]), torch.zeros(16, 4), F.mse_loss)
    with pipeline(model) as pipe:
        both = torch.cat([pipe(batch()), pipe(batch(seed=9))])
        F.mse_loss(both, torch.zeros(16, 4)).backward()
    assert_same(gradients(model), expected.gradients)


def test_a_hook_on_a_parameter_sees_its_gradient_once_and_may_change_it() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss).gradients["0.weight"]
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)
    with pipeline(model) as pipe:
        F.mse_loss(pipe(batch()), batch(seed=5)).backward()
    assert len(seen) == 1
    assert_same(seen[0], expected)
    assert_same(model[0].weight.grad, 2 * expected)  # type: ignore[operator]


def test_a_hook_after_accumulation_runs_once() -> None:
    model, seen = mlp(), []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p))
    with pipeline(model) as pipe:
        pipe(batch()).sum().backward()
    assert len(seen) == len(set(seen)) == 8


def test_a_frozen_parameter_gets_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    with pipeline(model) as pipe:
        pipe(batch()).sum().backward()
    assert [p.grad is None for p in model.parameters()] == [False, False, True, True, False, False]


def test_only_the_input_may_want_a_gradient() -> None:
    model, x = mlp().requires_grad_(False), batch().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    with pipeline(model) as pipe:
        pipe(x).sum().backward()
    assert_same(x.grad, expected)


def test_if_nothing_wants_a_gradient_the_output_has_no_graph() -> None:
    with pipeline(mlp().requires_grad_(False)) as pipe:
        assert not pipe(batch()).requires_grad


def test_autocast_follows_the_work() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            output = pipe(batch())
        assert output.dtype is torch.bfloat16
        output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_in_lockstep_the_result_is_the_same() -> None:
    """Skips over one and over several stages may wait as long as what goes beside them takes."""

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield ps.stash("near", x)
            yield ps.stash("far", 2 * x)
            return x

    class Takes(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: Tensor) -> Any:
            return x + (yield ps.pop(self.name))

    torch.manual_seed(0)
    keeps = ps.skippable(stash=["near", "far"])(Keeps)()
    near, far = (ps.skippable(pop=[name])(Takes)(name) for name in ("near", "far"))
    model = nn.Sequential(keeps, nn.Linear(4, 4), near, nn.Linear(4, 4), nn.Tanh(), far)
    expected = plain_step(model, batch(9), batch(9, seed=5), F.mse_loss)
    with ps.Pipeline(ps.split(model, balance=[1] * 6), F.mse_loss, microbatches=9) as pipe:
        pipe.lockstep = True
        F.mse_loss(pipe(batch(9)), batch(9, seed=5)).backward()
        assert_same(gradients(model), expected.gradients)
        assert_same(pipe.evaluate(batch(9), batch(9, seed=5)).loss, expected.loss)
        assert_same(pipe.step(batch(9), batch(9, seed=5)).loss, expected.loss)
        assert [len(list(pipe.stream([batch(9)] * 3)))] == [3]


def test_in_lockstep_a_skip_holds_nobody_up() -> None:
    """It waits for the stages that it goes past, and its sender must not: here stage 0 is two micro-batches ahead."""
    third, calls = threading.Event(), iter(range(100))

    class Keeps(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield ps.stash("far", x)
            if next(calls) == 2:
                third.set()
            return x

    class Takes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            assert third.wait(20)
            return x + (yield ps.pop("far"))

    first, last = ps.skippable(stash=["far"])(Keeps)(), ps.skippable(pop=["far"])(Takes)()
    plan = ps.split(nn.Sequential(first, nn.Identity(), last), balance=[1, 1, 1])
    with ps.Pipeline(plan, microbatches=4) as pipe:
        pipe.lockstep = True
        assert_same(pipe(batch()), 2 * batch())


def test_lockstep_is_for_one_stage_per_thread() -> None:
    with pipeline(mlp(), stages=4, schedule="interleaved") as pipe:
        with pytest.raises(ps.PlanError, match="one stage each"):
            pipe.lockstep = True
        assert not pipe.lockstep


# ── structures ───────────────────────────────────────────────────────────────────────────────────────────────────


class Shape(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda x: (x, 2 * x),
    "dict": lambda x: {"a": x, "b": [2 * x, None]},
    "same twice": lambda x: (x, x),
    "some without gradient": lambda x: (x.argmax(1), x, x.detach(), x > 0),
    "numbers": lambda x: (x, 3, "name"),
    "a list": lambda x: [x],
}


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_outputs_may_be_nested(kind: str, microbatches: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Shape(OUTPUTS[kind]))

    def total(output: Any) -> Tensor:
        leaves = torch.utils._pytree.tree_leaves(output)
        return sum((i + 1) * t.pow(2).sum() for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad)  # type: ignore[return-value]

    plain = model(batch(6))
    total(plain).backward()
    expected = gradients(model)
    model.zero_grad()
    with pipeline(model, microbatches=microbatches) as pipe:
        output = pipe(batch(6))
        flags = [t.requires_grad for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, Tensor)]
        assert flags == [t.requires_grad for t in torch.utils._pytree.tree_leaves(plain) if isinstance(t, Tensor)]
        total(output).backward()
    assert_same(output, plain)
    assert_same(gradients(model), expected)


def test_one_output_of_several_may_go_back_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Shape(lambda x: (x, 2 * x)))
    model(batch())[1].sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with pipeline(model) as pipe:
        pipe(batch())[1].sum().backward()
    assert_same(gradients(model), expected)


def test_keyword_arguments_are_a_dict_for_the_first_layer() -> None:
    model = nn.Sequential(Shape(lambda parts: parts["a"] + parts["b"]), nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        assert_same(pipe(a=batch(), b=batch(seed=5)), model({"a": batch(), "b": batch(seed=5)}))
        assert_same(pipe({"a": batch(), "b": batch(seed=5)}), model({"a": batch(), "b": batch(seed=5)}))


def test_sequentials_own_keyword_works() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        assert_same(pipe(input=batch()), model(batch()))


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("last", [nn.Identity, nn.Tanh])
def test_the_output_may_be_changed_in_place_where_the_plain_models_may(
    last: type[nn.Module], microbatches: int
) -> None:
    """Tanh keeps its output, so that plain torch refuses to go back: then the pipeline refuses too, or is right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), last())
    (model(batch()) + 1).pow(2).sum().backward()
    expected = gradients(model)
    model.zero_grad()
    with pipeline(model, microbatches=microbatches) as pipe:
        output = pipe(batch())
        output += 1
        said = None
        try:
            output.pow(2).sum().backward()
        except RuntimeError as error:
            said = str(error)
    if said is None:
        assert_same(gradients(model), expected)
    else:
        assert last is nn.Tanh
        assert "inplace" in said


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_any_number_of_samples_gives_the_plain_outputs(mode: Callable[[], Any]) -> None:
    model = mlp()
    with pipeline(model) as pipe, mode():
        for samples in (1, 2, 5, 8, 33):
            output = pipe(batch(samples))
            assert_same(output, model(batch(samples)))
            assert not output.requires_grad


def test_inference_mode_follows_the_work() -> None:
    """A stage may change inference tensors in place, like any code under inference mode."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe, torch.inference_mode():
        assert_same(pipe(batch() * 1), model(batch() * 1))


def test_under_no_grad_an_input_that_wants_a_gradient_is_just_an_input() -> None:
    model = mlp()
    with pipeline(model) as pipe, torch.no_grad():
        assert not pipe(batch().requires_grad_()).requires_grad


def test_eval_and_train_reach_every_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        assert pipe.eval() is pipe
        assert not pipe.training
        assert not any(module.training for module in model.modules())
        with torch.no_grad():
            assert_same(pipe(batch()), model(batch()))
        assert int(model[1].num_batches_tracked) == 0
        pipe.train()
        assert all(module.training for module in model.modules())


def test_an_empty_mini_batch_is_refused() -> None:
    with pipeline(mlp()) as pipe, torch.no_grad(), pytest.raises(ps.PlanError, match="empty"):
        pipe(batch(0))


def test_evaluation_leaves_gradients_alone() -> None:
    model = mlp()
    with pipeline(model, loss_fn=F.mse_loss) as pipe:
        pipe.step(batch(), batch())
        before = snapshot(model)
        with torch.no_grad():
            pipe(batch())
        assert_same(snapshot(model), before)


def test_threads_that_share_a_pipeline_take_turns() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    expected = model(x).detach()
    outputs: list[Tensor] = []

    with ps.Pipeline(ps.split(model, balance=[2, 1]), F.mse_loss, microbatches=4) as pipe:

        def call() -> None:
            with torch.no_grad():
                outputs.extend(pipe(x) for _ in range(25))

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(outputs) == 100
    for output in outputs:
        torch.testing.assert_close(output, expected)


def with_more(more: Any) -> nn.Sequential:
    class AndMore(nn.Module):
        def forward(self, x: Tensor) -> tuple[Any, ...]:
            return x, more(x)

    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), AndMore())


@pytest.mark.parametrize("more", [lambda x: torch.ones(5, 5), lambda x: x.t()], ids=["none", "second"])
def test_outputs_without_the_samples_first_are_refused_with_and_without_gradients(more: Any) -> None:
    with pipeline(with_more(more), stages=2) as pipe:
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(ps.PlanError, match="samples first"):
                pipe(batch(6))


def test_a_loss_of_each_micro_batch_is_an_output_with_and_without_gradients() -> None:
    with pipeline(with_more(lambda x: x.square().mean().reshape(1)), stages=2) as pipe:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert pipe(batch(6))[1].shape == (4,)


def test_a_plain_value_of_each_micro_batch_is_given_with_and_without_gradients() -> None:
    with pipeline(with_more(len), stages=2) as pipe:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert pipe(batch(6))[1] == [2, 2, 1, 1]
                assert pipe(batch(8))[1] == 2


class Turn(nn.Module):
    """Gives what the first function makes of a micro-batch, then what the second makes of the next one, and so on."""

    def __init__(self, *functions: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.next = cycle(functions)

    def forward(self, x: Tensor) -> Any:
        return next(self.next)(x)


def with_graph(x: Tensor) -> Tensor:
    return x * 2


def without_graph(x: Tensor) -> Tensor:
    return x.detach()


@pytest.mark.parametrize("turns", [(with_graph, without_graph), (without_graph, with_graph)])
def test_only_some_micro_batches_may_want_a_gradient(turns: tuple[Callable[[Tensor], Any], ...]) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Turn(*turns)), batch(8)
    torch.cat([model(part) for part in x.split(2)]).square().sum().backward()
    expected = snapshot(model)
    model.zero_grad()
    with pipeline(model, stages=2) as pipe:
        pipe(x).square().sum().backward()
    assert_same(snapshot(model), expected)


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], str]] = {
    "a tensor or nothing": (lambda x: (x, x * 2), lambda x: (x, None), "is a NoneType or a Tensor"),
    "nothing or a tensor": (lambda x: (x, None), lambda x: (x, x * 2), "is a NoneType or a Tensor"),
    "one or two": (lambda x: (x,), lambda x: (x, x), "have different structures"),
    "two or one": (lambda x: (x, x), lambda x: (x,), "have different structures"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_that_differ_in_kind_are_not_joined_without_their_gradients(kind: str) -> None:
    *turns, says = KINDS[kind]
    model = nn.Sequential(nn.Linear(4, 4), Turn(*turns))
    with pipeline(model, stages=2) as pipe, pytest.raises(ps.PlanError, match=says):
        pipe(batch())
