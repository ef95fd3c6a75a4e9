"""A step with many micro-batches has the loss and gradients of a step with one, whatever its loss averages over."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from tests.support.ranks import Ranks

CLASSES, WIDTH, LENGTH = 5, 6, 4
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5])

LossFn = Callable[[Tensor, Tensor], Tensor]


def masked_mean(logits: Tensor, y: Tensor) -> Tensor:
    kept = y != -100
    return (logits.logsumexp(-1) * kept).sum() / kept.sum()


LOSSES: dict[str, LossFn] = {  # of logits (tokens, classes) and labels, of which -100 are ignored
    "cross-entropy": lambda logits, y: F.cross_entropy(logits, y),
    "weighted": lambda logits, y: F.cross_entropy(logits, y, weight=WEIGHT),
    "smoothed": lambda logits, y: F.cross_entropy(logits, y, label_smoothing=0.1),
    "nll": lambda logits, y: F.nll_loss(logits.log_softmax(-1), y),
    "summed": lambda logits, y: F.cross_entropy(logits, y, reduction="sum"),
    "summed over its count": lambda logits, y: F.cross_entropy(logits, y, reduction="sum") / (y != -100).sum(),
    "masked mean": masked_mean,
    "selected": lambda logits, y: F.mse_loss(logits[y != -100], torch.ones_like(logits[y != -100])),
    "mean of selected": lambda logits, y: logits[y != -100].square().mean(),
    "mse": lambda logits, y: F.mse_loss(logits, torch.ones_like(logits)),
    "bce": lambda logits, y: F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)),
    "sum": lambda logits, y: -logits.square().sum(),
    "sum over samples": lambda logits, y: logits.square().sum() / logits.shape[0],
    "two alike": lambda logits, y: (F.cross_entropy(logits, y) + F.cross_entropy(2 * logits, y)) / 2,
    "with a constant": lambda logits, y: 0.5 * F.cross_entropy(logits, y) + 0.25,
}


FEW_LOSSES = ["cross-entropy", "summed over its count", "selected", "mse", "sum over samples", "with a constant"]


class OwnLoss(nn.Module):
    """A model that computes its loss, as a scalar or beside its logits."""

    def __init__(self, loss: LossFn, scalar: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, CLASSES)
        self.loss, self.scalar = loss, scalar

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x).tanh()
        logits = self.head(x)
        loss = self.loss(logits.flatten(0, 1), labels.flatten())
        return loss if self.scalar else {"loss": loss, "logits": logits}


def front_ends(kind: str, loss: LossFn) -> tuple[nn.Module, ps.Plan, Any]:
    """A model, its plan, and its ``loss_fn``."""
    torch.manual_seed(0)
    if kind == "sequential":
        model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        return model, ps.split(model, stages=2), lambda out, y: loss(out.flatten(0, 1), y.flatten())
    model = OwnLoss(loss, scalar=kind == "scalar")
    how: dict[str, Any] = {"blocks": "layers"} if kind == "blocks" else {"cuts": ["layers.1"]}
    return model, ps.split(model, stages=2, sample=SAMPLE, balance="uniform", **how), None  # guesses take longer


def batch(ignored: list[bool]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(len(ignored))
    samples = len(ignored) // LENGTH
    x = torch.randn(samples, LENGTH, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (samples, LENGTH), generator=generator)
    return x, y.masked_fill(torch.tensor(ignored).view(samples, LENGTH), -100)


SAMPLE = batch([False, True, False, False] * 2)


def plain(model: nn.Module, loss_fn: Any, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    model = copy.deepcopy(model)
    output = model(x) if loss_fn else model(x, y)
    loss = loss_fn(output, y) if loss_fn else output if isinstance(output, Tensor) else output["loss"]
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def check(kind: str, name: str, ignored: list[bool], microbatches: int, schedule: str) -> None:
    model, plan, loss_fn = front_ends(kind, LOSSES[name])
    x, y = batch(ignored)
    loss, gradients = plain(model, loss_fn, x, y)
    given = (x, y) if loss_fn is None else x
    targets = None if loss_fn is None else y
    with ps.Pipeline(plan, loss_fn, microbatches=microbatches, schedule=schedule) as pipe:
        result = pipe.step(given, targets)
        torch.testing.assert_close(result.loss, loss)
        torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)
        torch.testing.assert_close(pipe.evaluate(given, targets).loss, loss)
        if loss_fn is None:
            for inference in (torch.no_grad, torch.inference_mode):
                with inference():
                    output = pipe(x, y)
                torch.testing.assert_close(output if isinstance(output, Tensor) else output["loss"], loss)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, str, list[bool], int, str]:
    samples = draw(st.integers(2, 7))
    ignored = draw(st.lists(st.booleans(), min_size=samples * LENGTH, max_size=samples * LENGTH))
    ignored[draw(st.integers(0, len(ignored) - 1))] = False  # a mean over nothing is not a number, plainly too
    kind = draw(st.sampled_from(["sequential", "scalar", "entry", "blocks"]))
    name, schedule = draw(st.sampled_from(sorted(LOSSES))), draw(st.sampled_from(["1f1b", "gpipe", "zb_h1"]))
    return kind, name, ignored, draw(st.integers(1, samples)), schedule


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases())
def test_many_micro_batches_are_as_one(case: tuple[str, str, list[bool], int, str]) -> None:
    check(*case)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind in ("sequential", "scalar") for name in LOSSES),
        *(("blocks", name) for name in FEW_LOSSES),
    ],
)
def test_a_micro_batch_without_counted_targets(kind: str, name: str) -> None:
    """Its own mean is 0 / 0, and its gradients must not become NaN."""
    check(kind, name, [True] * 2 * LENGTH + [False, True] * LENGTH, 2, "1f1b")


@pytest.mark.parametrize("name", ["sum over samples", "summed over its count"])
def test_a_divisor_is_read_while_a_forward_is_observed(name: str) -> None:
    """``sum() / 2`` of a recomputed stage: torch's detach() failed on the 2, which is a 0-dim tensor in the graph."""
    model, plan, _ = front_ends("scalar", LOSSES[name])
    x, y = batch([False] * 4 * LENGTH)
    loss, gradients = plain(model, None, x, y)
    with ps.Pipeline(plan, microbatches=2, recompute="always") as pipe:
        torch.testing.assert_close(pipe.step((x, y)).loss, loss)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


def _on_rank(rank: int, data: int) -> None:
    """Ranks learn the factor of their gradients from the last one. All losses over replicas, otherwise a few."""
    mesh = ps.Mesh(data=data, pipe=2, device="cpu")
    ignored = [True, False, False, False] * 3 + [True] * 4 + [True, True, True, False] * 2
    x, y = batch(ignored)
    shares = [slice(0, 2), slice(2, 6)] if data == 2 else [slice(None)]
    for name in LOSSES if data == 2 else FEW_LOSSES:
        model, plan, _ = front_ends("entry", LOSSES[name])
        loss, gradients = plain(model, None, x, y)
        wanted = dict(zip(dict(model.named_parameters()), gradients, strict=True))
        with ps.Pipeline(plan, microbatches=2, mesh=mesh, dynamic="selected" in name) as pipe:
            rows = shares[mesh.data_rank]
            result = pipe.step((x[rows], y[rows]))
            torch.testing.assert_close(result.loss, loss, msg=lambda text, name=name: f"{name}: {text}")
            for key, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[key], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("data", [1, 2])
def test_many_micro_batches_are_as_one_over_processes(data: int, two: Ranks, four: Ranks) -> None:
    (two if data == 1 else four).check(_on_rank, data)


# ── half precision ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["sequential", "scalar", "blocks"])
@pytest.mark.parametrize("name", ["cross-entropy", "smoothed", "masked mean", "mse"])
def test_half_precision_gradients_are_those_of_the_plain_model(kind: str, name: str, dtype: torch.dtype) -> None:
    """The backward was once seeded with the sum of the losses, so that it rounded at another scale."""
    ignored = [True, False, False, True, False, False, False, False] * 4
    model, plan, loss_fn = front_ends(kind, LOSSES[name])
    model.to(dtype)
    x, y = batch(ignored)
    x = x.to(dtype)
    given, targets = ((x, y), None) if loss_fn is None else (x, y)
    loss, gradients = plain(model, loss_fn, x, y)
    with ps.Pipeline(plan, loss_fn, microbatches=1) as pipe:
        assert pipe.step(given, targets).loss.to(dtype) == loss
    for parameter, grad in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, grad)
    # Several micro-batches with equal counts, in a plain loop: each loss times its share.
    model.zero_grad()
    looped = copy.deepcopy(model)
    for part, labels in zip(x.chunk(4), y.chunk(4), strict=True):
        output = looped(part) if loss_fn else looped(part, labels)
        loss = loss_fn(output, labels) if loss_fn else output if isinstance(output, Tensor) else output["loss"]
        (loss * 0.25).backward()
    with ps.Pipeline(plan, loss_fn, microbatches=4, schedule="1f1b") as pipe:
        pipe.step(given, targets)
    for parameter, other in zip(model.parameters(), looped.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_a_scaled_half_precision_loss_overflows_where_the_plain_one_does() -> None:
    model, plan, _ = front_ends("scalar", LOSSES["cross-entropy"])
    model.half()
    x, y = batch([False] * 8 * LENGTH)
    reference = copy.deepcopy(model)
    (reference(x.half(), y) * 2.0**12).backward()
    with ps.Pipeline(plan, microbatches=1) as pipe:
        ps.GradScaler(pipe, init_scale=2.0**12)
        pipe.step((x.half(), y))
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_means_over_different_elements_are_refused() -> None:
    """One weight per micro-batch cannot be right for both of its terms."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, y.clamp(min=0))

    model, plan, _ = front_ends("scalar", loss)
    x, y = batch([True, False, False, False] * 2 + [False] * 8)
    with ps.Pipeline(plan, microbatches=2) as pipe, pytest.raises(ps.PlanError, match=r"\[6\.0, 8\.0\] and, in its"):
        pipe.step((x, y))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_sum_beside_a_mean_is_refused() -> None:
    model, plan, _ = front_ends(
        "scalar", lambda logits, y: F.cross_entropy(logits, y) + F.cross_entropy(logits, y, reduction="sum")
    )
    with ps.Pipeline(plan, microbatches=2) as pipe, pytest.raises(ps.PlanError, match="adds a sum over samples"):
        pipe.step(batch([False] * 8))
    assert model is plan.model


def test_counts_that_change_between_accumulated_steps() -> None:
    model, plan, _ = front_ends("scalar", LOSSES["cross-entropy"])
    reference = copy.deepcopy(model)
    with ps.Pipeline(plan, microbatches=2) as pipe:
        for ignored in ([False] * 8, [True] * 3 + [False] * 5, [False] * 8):
            x, y = batch(ignored)
            pipe.step((x, y))
            reference(x, y).backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize(
    ("name", "value"),
    [("weight", WEIGHT), ("ignore_index", 2), ("reduction", "sum"), ("label_smoothing", 0.2)],
)
def test_options_of_a_loss_that_are_set_after_the_pipeline_was_made(name: str, value: Any) -> None:
    """Targets were counted, and losses averaged, as the options said when the pipeline was made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES))
    x, y = torch.randn(8, WIDTH), torch.tensor([0, 1, 2, 2, 3, 4, 2, 0])
    loss_fn, reference = nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), copy.deepcopy(model)
    with ps.Pipeline(ps.split(model, stages=2), loss_fn, microbatches=2) as pipe:
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            loss = loss_fn(reference(x), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, y).loss, loss.detach())
            for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, other.grad)
            setattr(loss_fn, name, value)


# ── losses that compare samples with each other ──────────────────────────────────────────────────────────────────


def clip_loss(output: Tensor) -> Tensor:
    first, second = F.normalize(output[:, :3], dim=-1), F.normalize(output[:, 3:], dim=-1)
    logits, numbers = 10 * first @ second.T, torch.arange(len(output))
    return (F.cross_entropy(logits, numbers) + F.cross_entropy(logits.T, numbers)) / 2


def two_views_loss(output: Tensor) -> Tensor:
    both = F.normalize(torch.cat([output[:, :3], output[:, 3:]]), dim=-1)
    similar = (both @ both.T).masked_fill(torch.eye(len(both), dtype=torch.bool), -torch.inf)
    return F.cross_entropy(similar, torch.arange(len(both)).roll(len(output)))


def pair_loss(output: Tensor) -> Tensor:
    signs = 2 * torch.eye(len(output)) - 1
    return -F.logsigmoid(torch.einsum("id,jd->ij", output, output) * signs).mean()


def distance_loss(output: Tensor) -> Tensor:
    return torch.cdist(output, 2 * output + 1).mean()


class OwnContrast(nn.Module):
    """Embeddings, whose loss the model computes itself where it has one."""

    def __init__(self, loss: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.first, self.second, self.loss = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), loss

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x if self.loss is None else self.loss(x)


CONTRASTS = [clip_loss, two_views_loss, pair_loss, distance_loss]


@pytest.mark.parametrize("in_model", [False, True])
@pytest.mark.parametrize("loss", CONTRASTS)
def test_a_loss_that_compares_samples_is_warned_of_once(loss: Callable[[Tensor], Tensor], in_model: bool) -> None:
    model, x = OwnContrast(loss if in_model else None), torch.randn(8, WIDTH)
    loss_fn = None if in_model else lambda output, target: loss(output)
    targets = None if in_model else x
    reference = copy.deepcopy(model)
    wanted = reference(x) if in_model else loss(reference(x))
    wanted.backward()
    plan = ps.split(model, stages=2, sample=x)
    with ps.Pipeline(plan, loss_fn, microbatches=1) as pipe:
        torch.testing.assert_close(pipe.step(x, targets).loss, wanted.detach())
    if not in_model:
        model.zero_grad()
        with ps.Pipeline(plan, loss_fn, microbatches=2) as pipe:  # the remedy
            loss(pipe(x)).backward()
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    with ps.Pipeline(plan, loss_fn, microbatches=2) as pipe:
        with pytest.warns(UserWarning, match=r"compares the 4 samples of a micro-batch.*microbatches=1"):
            pipe.step(x, targets)
        pipe.step(x, targets)


class FixedProduct(nn.Linear):
    """A batched product with a constant, for which autograd saves one of the operands alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("id,jd->ij", super().forward(x), torch.ones(4, WIDTH))


class CosineHead(nn.Module):
    """As many classes as a micro-batch has samples, whose weights are computed: no contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.a, self.b = (nn.Parameter(torch.randn(size)) for size in ((4, WIDTH), (4, 2), (2, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x), F.normalize(self.weight) + self.a @ self.b)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("head", [CosineHead, lambda: FixedProduct(WIDTH, WIDTH)], ids=["cosine", "fixed"])
def test_a_classifier_of_as_many_classes_as_samples_is_no_contrast(head: Callable[[], nn.Module], stages: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), head())
    reference, x, y = copy.deepcopy(model), torch.randn(8, WIDTH), torch.arange(8) // 2
    F.cross_entropy(reference(x), y).backward()
    with ps.Pipeline(ps.split(model, stages=stages), F.cross_entropy, microbatches=2) as pipe:
        pipe.step(x, y)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
