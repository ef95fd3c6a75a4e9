"""The loss of a mini-batch from its micro-batches: whatever the loss function averages over."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, labels, mlp, plain_step

WEIGHT = torch.tensor([0.1, 2.0, 0.5, 1.0])


def step(model: nn.Sequential, x: Any, y: Any = None, loss_fn: Any = None, **options: Any) -> ps.StepResult:
    options = {"microbatches": 4, **options}
    with ps.Pipeline(ps.split(model, stages=2), loss_fn, **options) as pipe:
        return pipe.step(x, y)


def assert_plain(loss_fn: Any, x: Tensor, y: Tensor, **options: Any) -> None:
    model = mlp()
    expected = plain_step(model, x, y, loss_fn)
    result = step(model, x, y, loss_fn, **options)
    assert_same(result.loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


# ── mean and sum ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("samples", [3, 8, 10])
@pytest.mark.parametrize(
    "loss_fn",
    [
        F.mse_loss,
        nn.MSELoss(),
        nn.MSELoss(reduction="sum"),
        partial(F.mse_loss, reduction="sum"),
        partial(F.smooth_l1_loss, beta=0.5),
        partial(nn.MSELoss(reduction="sum")),
        nn.L1Loss(),
        lambda output, target: (output - target).abs().mean(),
    ],
    ids=["function", "module", "module sum", "partial sum", "partial", "partial of module", "L1", "lambda"],
)
def test_means_and_sums_are_those_of_the_mini_batch(loss_fn: Any, samples: int) -> None:
    assert_plain(loss_fn, batch(samples), batch(samples, seed=5))


@pytest.mark.parametrize("samples", [3, 8, 10])
def test_a_function_that_sums_says_so_by_reduction(samples: int) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).pow(2).sum()

    assert_plain(loss_fn, batch(samples), batch(samples, seed=5), reduction="sum")


@pytest.mark.parametrize("loss_fn", [nn.KLDivLoss(reduction="batchmean"), partial(F.kl_div, reduction="batchmean")])
def test_a_batchmean_is_a_mean_over_the_samples(loss_fn: Any) -> None:
    assert_plain(loss_fn, batch(10), batch(10, seed=5).softmax(1))


def test_a_loss_with_parameters_or_state_of_its_own_may_be_a_module() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            return F.mse_loss(output, target)

    loss_fn = Counting()
    step(mlp(), batch(), batch(), loss_fn)
    assert loss_fn.calls == 4


class Weighed(nn.Module):
    """A loss that is trained with the model."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.weight, self.counts = nn.Parameter(torch.linspace(0.5, 2, 4)), counts

    def forward(self, output: Tensor, target: Tensor) -> Any:
        errors = (output * self.weight - target).square()
        return (errors.sum(), errors.numel()) if self.counts else errors.mean()


@pytest.mark.parametrize("counts", [False, True])
def test_a_loss_may_have_parameters_that_are_trained(counts: bool) -> None:
    model, x, y = mlp(), batch(10), batch(10, seed=5)
    plain, loss_fn, plain_loss = copy.deepcopy(model), Weighed(counts), Weighed(False)
    with ps.Pipeline(ps.split(model, stages=2), loss_fn, microbatches=4) as pipe:
        for _ in range(2):
            pipe.step(x, y)
            plain_loss(plain(x), y).backward()
    assert_same(loss_fn.weight.grad, plain_loss.weight.grad)
    assert_same(gradients(model), gradients(plain))


def test_the_loss_has_no_graph() -> None:
    assert not step(mlp(), batch(), batch(), F.mse_loss).loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_has_the_plain_models_precision_or_more(dtype: torch.dtype) -> None:
    result = step(mlp().to(dtype), batch().to(dtype), batch(seed=5).to(dtype), F.mse_loss)
    assert result.loss.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


# ── cross-entropy averages over the targets that count ───────────────────────────────────────────────────────────


def ignoring(samples: int, *ignored: int, index: int = -100) -> Tensor:
    y = labels(samples)
    y[list(ignored)] = index
    return y


COUNTED = {
    "plain": (F.cross_entropy, labels(10)),
    "module": (nn.CrossEntropyLoss(), labels(10)),
    "some ignored": (F.cross_entropy, ignoring(10, 0, 1, 5)),
    "a whole micro-batch ignored": (F.cross_entropy, ignoring(10, 0, 1, 2)),
    "own ignore_index": (nn.CrossEntropyLoss(ignore_index=2), labels(10)),
    "partial with ignore_index": (partial(F.cross_entropy, ignore_index=0), labels(10)),
    "weights": (nn.CrossEntropyLoss(weight=WEIGHT), labels(10)),
    "weights and ignored": (partial(F.cross_entropy, weight=WEIGHT), ignoring(10, 3, 4)),
    "smoothing": (nn.CrossEntropyLoss(label_smoothing=0.2), ignoring(10, 0, 7)),
    "smoothing and weights": (partial(F.cross_entropy, label_smoothing=0.2, weight=WEIGHT), ignoring(10, 0, 7)),
    "class probabilities": (F.cross_entropy, batch(10, seed=7).softmax(1)),
    "probabilities and weights": (nn.CrossEntropyLoss(weight=WEIGHT), batch(10, seed=7).softmax(1)),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), ignoring(10, 0, 7)),
    "partial sum": (partial(F.cross_entropy, reduction="sum", ignore_index=1), labels(10)),
    "said to be a mean": (partial(F.cross_entropy, reduction="mean"), ignoring(10, 0, 1, 5)),
}


@pytest.mark.parametrize("case", COUNTED)
def test_cross_entropy_is_that_of_the_mini_batch(case: str) -> None:
    loss_fn, y = COUNTED[case]
    assert_plain(loss_fn, batch(10), y)


def test_saying_that_cross_entropy_is_a_mean_does_not_change_it() -> None:
    assert_plain(F.cross_entropy, batch(10), ignoring(10, 0, 1, 5), reduction="mean")


def test_a_subclass_of_cross_entropy_averages_as_cross_entropy_does() -> None:
    class Mine(nn.CrossEntropyLoss):
        """Under a name of its own."""

    assert_plain(Mine(), batch(10), ignoring(10, 0, 1, 5))


def test_when_everything_is_ignored_the_loss_is_nan_as_it_is_plainly() -> None:
    assert_plain(F.cross_entropy, batch(10), torch.full((10,), -100))


@pytest.mark.parametrize("loss_fn", [F.nll_loss, nn.NLLLoss(), nn.NLLLoss(weight=WEIGHT, ignore_index=1)])
def test_negative_log_likelihood_is_that_of_the_mini_batch(loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LogSoftmax(1))
    y = ignoring(10, 0, 7)
    if isinstance(loss_fn, nn.NLLLoss) and loss_fn.ignore_index == 1:
        y = labels(10)
    expected = plain_step(model, batch(10), y, loss_fn)
    assert_same(step(model, batch(10), y, loss_fn).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_cross_entropy_over_pixels() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 3, 1))
    x = torch.randn(5, 1, 4, 4)
    y = torch.randint(3, (5, 4, 4))
    y[0] = y[3, :2] = -100
    expected = plain_step(model, x, y, F.cross_entropy)
    assert_same(step(model, x, y, F.cross_entropy).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_cross_entropy_of_targets_that_are_no_tensor_says_so() -> None:
    with pytest.raises(ps.PlanError, match="tensor as target, got str"):
        step(mlp(), batch(), "seven", F.cross_entropy)
    with pytest.raises(ps.PlanError, match=r"no targets: pass them to step"):
        step(mlp(), batch(), None, F.cross_entropy)


# ── (sum, count) ─────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over what is not padding, which only the function itself can count."""
    kept = target >= 0
    total = F.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (total * kept).sum(), kept.sum()


def mean(output: Tensor, target: Tensor) -> Tensor:
    total, count = tokens(output, target)
    return total / count


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("ignored", [(), (0, 4), (0, 1, 2)], ids=["none", "some", "a micro-batch"])
def test_a_sum_and_a_count_are_divided_over_the_whole_mini_batch(ignored: tuple[int, ...], schedule: str) -> None:
    model, y = mlp(), ignoring(10, *ignored, index=-1)
    expected = plain_step(model, batch(10), y, mean)
    result = step(model, batch(10), y, tokens, schedule=schedule)
    assert_same(result.loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_the_count_may_be_a_number() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return F.mse_loss(output, target, reduction="sum"), output.numel()

    model = mlp()
    expected = plain_step(model, batch(10), batch(10, seed=5), F.mse_loss)
    assert_same(step(model, batch(10), batch(10, seed=5), loss_fn).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_a_sum_and_a_count_accumulate_over_steps_each_with_its_own_count() -> None:
    """Only the new part of ``.grad`` may be rescaled by the count that is known at the end of a step."""
    model, plain = mlp(), mlp()
    with ps.Pipeline(ps.split(model, stages=2), tokens, microbatches=4) as pipe:
        for ignored in ((0, 1), (), (2, 3, 4, 5)):
            x, y = batch(10, seed=len(ignored)), ignoring(10, *ignored, index=-1)
            mean(plain(x), y).backward()
            pipe.step(x, y)
    assert_same(gradients(model), gradients(plain))


def test_inputs_get_the_gradient_of_a_counted_loss() -> None:
    model, y = mlp(), ignoring(10, 0, 4, index=-1)
    x, plain = batch(10).requires_grad_(), batch(10).requires_grad_()
    mean(model(plain), y).backward()
    step(model, x, y, tokens)
    assert_same(x.grad, plain.grad)


def test_a_pair_for_some_micro_batches_only_is_refused() -> None:
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        calls.append(1)
        return (output.sum(), 1) if len(calls) == 1 else output.sum()

    with pytest.raises(ps.PlanError, match="some micro-batches"):
        step(mlp(), batch(), batch(), loss_fn)


def test_three_values_are_refused() -> None:
    with pytest.raises(ps.PlanError, match=r"3 values.*\(sum, count\)"):
        step(mlp(), batch(), batch(), lambda output, target: (output.sum(), 1, 2))


# ── a model that computes its own loss ───────────────────────────────────────────────────────────────────────────


class Own(nn.Module):
    """The end of such a model; ``shape`` says how it hands the loss over."""

    def __init__(self, shape: str) -> None:
        super().__init__()
        self.linear, self.shape = nn.Linear(4, 4), shape

    def forward(self, x: Tensor) -> Any:
        logits = self.linear(x)
        loss = logits.pow(2).mean()
        if self.shape == "scalar":
            return loss
        if self.shape == "dict":
            return {"loss": loss, "logits": logits}
        return SimpleNamespace(loss=loss, logits=logits)


def own(shape: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Own(shape))


@pytest.mark.parametrize("shape", ["scalar", "dict", "object"])
@pytest.mark.parametrize("samples", [3, 8, 10])
def test_without_a_loss_fn_the_model_says_its_loss(shape: str, samples: int) -> None:
    model = own(shape)
    expected = plain_step(own("scalar"), batch(samples))
    assert_same(step(model, batch(samples)).loss, expected.loss)
    assert_same(gradients(model), expected.gradients)


def test_the_outputs_beside_the_loss_are_joined() -> None:
    outputs = step(own("dict"), batch(10)).outputs
    with torch.no_grad():
        assert_same(outputs["logits"], own("dict")(batch(10))["logits"])


def test_outputs_of_a_kind_that_cannot_be_joined_are_not_passed_off_as_whole() -> None:
    """An object of the user's own is one leaf: the first micro-batch's alone is not the mini-batch's output."""
    outputs = step(own("object"), batch(10)).outputs
    if isinstance(outputs, SimpleNamespace):
        assert len(outputs.logits) == 10
        assert not outputs.logits.requires_grad


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


REFUSED = {
    "a vector": (lambda output, target: output.sum(1), r"shape \(2,\)"),
    "a number": (lambda output, target: 3.0, "a float"),
    "nothing": (lambda output, target: None, "a NoneType"),
    "a constant": (lambda output, target: torch.ones(()), "does not depend"),
    "detached": (lambda output, target: output.detach().sum(), "does not depend"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_loss_that_is_no_loss_is_refused(case: str) -> None:
    loss_fn, says = REFUSED[case]
    model = mlp()
    with pytest.raises(ps.PlanError, match=says):
        step(model, batch(), batch(), loss_fn)
    assert all(grad is None for grad in gradients(model).values())


def test_a_model_that_gives_no_loss_is_told_to_give_one() -> None:
    with pytest.raises(ps.PlanError, match=r"no loss_fn was given.*shape \(2, 4\)"):
        step(mlp(), batch())


# ── in the output ────────────────────────────────────────────────────────────────────────────────────────────────


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = mlp(), nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with ps.Block("inner"):
            x = self.inner(x)
        with ps.Block("head"):
            x = self.head(x)
            return x, F.mse_loss(x, y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_function_of_one_argument_finds_the_loss_in_the_output(reduction: str) -> None:
    model, x, y = WithLoss(), batch(), batch(seed=5)
    expected = [model(*pair) for pair in zip(x.split(2), y.split(2), strict=True)]
    losses = torch.stack([loss for _, loss in expected])
    total = losses.mean() if reduction == "mean" else losses.sum()
    total.backward()
    wanted = gradients(model)
    model.zero_grad()
    plan = ps.split(model, stages=["inner", "head"])
    with ps.Pipeline(plan, lambda output: output[1], microbatches=4, devices="cpu", reduction=reduction) as pipe:
        result = pipe.step((x, y))
        assert_same(result.loss, total.detach())
        assert_same(gradients(model), wanted)
        assert_same(result.outputs, (torch.cat([out for out, _ in expected]).detach(), losses.detach()))
        assert_same(pipe.evaluate((x, y)).loss, total.detach())
