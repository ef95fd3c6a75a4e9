"""In-place changes of tensors give the plain model's result or an error, never a wrong result."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.models import TRAINING, stages_for
from tests.support.ranks import Ranks


class DoubleInPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class DoubleSomeMicrobatches(nn.Module):
    """In place for one of the micro-batches, out of place for the others."""

    def forward(self, x: Tensor) -> Tensor:
        microbatch = ps.current_microbatch()
        return x.mul_(2) if microbatch is not None and microbatch.index == 2 else x * 2


@ps.skippable(stash=["early"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield ps.stash("early", x)
        return x


@ps.skippable(pop=["early"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield ps.pop("early")
        return x + early


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def chain(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    return nn.Sequential(*layers).double()


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_gradients(model: nn.Module, plain: nn.Module) -> None:
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# ── inside a stage ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", TRAINING)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_output_changed_in_place_inside_a_stage(schedule: str, bias: bool) -> None:
    layers = [nn.Linear(4, 4, bias=bias) for _ in range(stages_for(schedule, 2))]
    model = chain(*(part for layer in layers for part in (layer, nn.ReLU(inplace=True))), linear())
    plain, x, y = copy.deepcopy(model), batch(6, 3, 4), batch(6, 3, 4, seed=2)
    balance = [2] * len(layers)
    balance[-1] += 1
    with ps.Pipeline(ps.split(model, balance=balance), F.mse_loss, microbatches=3, schedule=schedule) as pipe:
        for _ in range(2):
            pipe.step(x, y)
            F.mse_loss(plain(x), y).backward()
    assert_gradients(model, plain)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_occasional_input_mutation_fails_once(recompute: str) -> None:
    model = chain(linear(), DoubleSomeMicrobatches(), linear())
    plain, x, y = copy.deepcopy(model), batch(8, 4), batch(8, 4, seed=2)
    F.mse_loss(plain(x), y).backward()
    with ps.Pipeline(ps.split(model, balance=[1, 2]), F.mse_loss, microbatches=4, recompute=recompute) as pipe:
        with pytest.raises(RuntimeError, match="in-place operation") as failure:
            pipe.step(x, y)
        assert "run the step again" in str(failure.value.__notes__)
        pipe.step(x, y)
    assert_gradients(model, plain)


# ── the caller's tensors ───────────────────────────────────────────────────────────────────────────────────────────


def by_step(pipe: ps.Pipeline, x: Tensor, y: Tensor) -> None:
    pipe.step(x, y)


def by_call(pipe: ps.Pipeline, x: Tensor, y: Tensor) -> None:
    F.mse_loss(pipe(x), y).backward()


RUNS = [by_step, by_call]
Run = Callable[[ps.Pipeline, Tensor, Tensor], None]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("recompute", ["never", "except_last"])
@pytest.mark.parametrize("grad", [False, True])
def test_first_stage_may_change_its_input_in_place(run: Run, microbatches: int, recompute: str, grad: bool) -> None:
    model = chain(DoubleInPlace(), linear(), linear())
    plain, y = copy.deepcopy(model), batch(6, 4, seed=2)
    ours, theirs = (batch(6, 4).requires_grad_(grad) for _ in range(2))
    F.mse_loss(plain(theirs + 0), y).backward()
    options: dict[str, Any] = {"microbatches": microbatches, "recompute": recompute}
    with ps.Pipeline(ps.split(model, balance=[2, 1]), F.mse_loss, **options) as pipe:
        run(pipe, ours + 0, y)
    assert_gradients(model, plain)
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_error_if_a_stage_changes_an_input_saved_by_the_caller(run: Run, microbatches: int) -> None:
    model, before = chain(DoubleInPlace(), linear(), linear()), batch(6, 4).requires_grad_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        F.mse_loss(model(torch.sigmoid(before)), batch(6, 4)).backward()
    pipe = ps.Pipeline(ps.split(model, balance=[2, 1]), F.mse_loss, microbatches=microbatches)
    with pipe, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run(pipe, torch.sigmoid(before), batch(6, 4))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_error_if_the_caller_changes_an_input_saved_by_a_stage(microbatches: int) -> None:
    model, x = chain(linear(), linear()), batch(6, 4)
    with ps.Pipeline(ps.split(model, balance=[1, 1]), microbatches=microbatches) as pipe:
        output = pipe(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_unsaved_input_may_change_before_the_backward() -> None:
    model = chain(linear().requires_grad_(False), linear())
    plain, x = copy.deepcopy(model), batch(6, 4)
    plain(x).square().sum().backward()
    with ps.Pipeline(ps.split(model, balance=[1, 1]), microbatches=3) as pipe:
        output = pipe(x)
        x.add_(1)
        output.square().sum().backward()
    assert_gradients(model, plain)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        out: Tensor = self.second(ps.cut(self.first(x + y)))
        return out


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_tensor_passed_twice_must_not_change(recompute: str) -> None:
    x = batch(6, 4).requires_grad_() + 0
    options: dict[str, Any] = {"microbatches": 2, "recompute": recompute}
    with ps.Pipeline(ps.split(TwoInputs().double(), stages=2), F.mse_loss, **options) as pipe:
        with pytest.raises(ps.PlanError, match="changes one of its inputs in place"):
            pipe.step((x, x), batch(6, 4))
        pipe.step((x, x.clone()), batch(6, 4))


# ── a value used by two stages and forwarded by a third ────────────────────────────────────────────────────────────


def forwarded_value_model() -> nn.Sequential:
    """The second layer forwards a value that the last one gets, too; the third changes it in place."""
    return chain(linear(), Stash(), nn.Identity(), DoubleInPlace(), Pop(), linear())


def assert_forwarded_value_is_protected(**options: Any) -> None:
    plan = ps.split(forwarded_value_model(), balance=[2, 1, 1, 2])
    pipe = ps.Pipeline(plan, F.mse_loss, microbatches=2, **options)
    with pytest.raises((ps.PlanError, ps.PipelineError), match="stage 2 changes one of its inputs in place"):
        pipe.step(batch(6, 4), batch(6, 4, seed=2))


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_forwarded_value_is_protected(recompute: str) -> None:
    assert_forwarded_value_is_protected(recompute=recompute)


def _forwarded_value_on_rank(rank: int, dynamic: bool) -> None:
    assert_forwarded_value_is_protected(mesh=ps.Mesh(), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_forwarded_value_is_protected_over_processes(four: Ranks, dynamic: bool) -> None:
    four.check(_forwarded_value_on_rank, dynamic)


# ── inference mode, in which tensors do not count their changes ────────────────────────────────────────────────────


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_shared_values_in_inference_mode(recompute: str) -> None:
    model = chain(linear(), Stash(), linear(), Pop(), linear())
    plan = ps.split(model, balance=[2, 1, 2])
    with ps.Pipeline(plan, microbatches=2, recompute=recompute) as pipe, torch.inference_mode():
        torch.testing.assert_close(pipe(batch(6, 4)), model(batch(6, 4)))


def test_shared_value_changed_in_inference_mode() -> None:
    model = chain(linear(), Stash(), DoubleInPlace(), Pop(), linear())
    pipe = ps.Pipeline(ps.split(model, balance=[2, 1, 2]), microbatches=2)
    says = "stage 1 changes one of its inputs in place"
    with pipe, torch.inference_mode(), pytest.raises(ps.PlanError, match=says):
        pipe(batch(6, 4))


class ToSparse(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.eye(4, dtype=x.dtype).to_sparse()


class ToDense(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return parts[0] @ parts[1].to_dense()


def test_sparse_values_between_stages() -> None:
    model = chain(linear(), Stash(), ToSparse(), ToDense(), Pop(), linear())
    plain, x, y = copy.deepcopy(model), batch(6, 4), batch(6, 4, seed=2)
    F.mse_loss(plain(x), y).backward()
    with ps.Pipeline(ps.split(model, balance=[1, 2, 1, 2]), F.mse_loss, microbatches=2) as pipe:
        pipe.step(x, y)
    assert_gradients(model, plain)
