"""Mixed precision: a pipelined step is bitwise equal to the plain loop over the same micro-batches.

Every case is a function of the mesh: it runs in threads (None) and over two processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.replicas.fp32_accumulate import Fp32GradAccumulator
from penstock.engine.replicas.ties import LocalTies
from tests.equivalence.check import LOSSES

pytestmark = pytest.mark.slow

WIDTH, BATCH, PARTS = 8, 16, 8
SCHEDULES = ["1f1b", "zb_h1"]  # B, and I with W
HALF = [torch.bfloat16, torch.float16]

Case = Callable[..., None]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The plain loop uses as many operator threads as a rank: the order of some sums depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["threads", "processes"])
def run_case(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a case in threads, or over two processes."""

    def run(case: Case, *args: Any) -> None:
        if request.param == "threads":
            case(None, *args)
        else:
            request.getfixturevalue("two").check(_on_rank, case, args)

    return run


def _on_rank(rank: int, case: Case, args: tuple[Any, ...]) -> None:
    case(ps.Mesh(pipe=2), *args)


# ── model, data, comparisons ───────────────────────────────────────────────────────────────────────────────────────


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)
    )


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(4, (BATCH,), generator=generator)


def pipeline(
    model: nn.Module, schedule: str, mesh: ps.Mesh | None, loss_fn: Any = F.cross_entropy, **options: Any
) -> ps.Pipeline:
    plan = ps.split(model, stages=2)
    return ps.Pipeline(plan, loss_fn, microbatches=PARTS, schedule=schedule, mesh=mesh, **options)


def parts(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.chunk(PARTS), y.chunk(PARTS), strict=True))


def assert_gradients(pipe: ps.Pipeline, expected: nn.Module | dict[str, Tensor | None], **close: float) -> None:
    wanted = {n: p.grad for n, p in expected.named_parameters()} if isinstance(expected, nn.Module) else expected
    for name, parameter in pipe.named_parameters():
        want = wanted[name]
        assert (parameter.grad is None) == (want is None), name
        if parameter.grad is not None and want is not None:
            assert parameter.grad.dtype is want.dtype
            rtol, atol = close.get("rtol", 0.0), close.get("atol", 0.0)
            torch.testing.assert_close(parameter.grad, want, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def assert_parameters(pipe: ps.Pipeline, expected: nn.Module) -> None:
    wanted = dict(expected.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


# ── autocast ───────────────────────────────────────────────────────────────────────────────────────────────────────


def autocast(mesh: ps.Mesh | None, dtype: torch.dtype, schedule: str, recompute: str) -> None:
    model, (x, y) = network(), data()
    plain, outputs, total = copy.deepcopy(model), [], torch.zeros(())
    for a, b in parts(x, y):
        with torch.autocast("cpu", dtype):
            outputs.append(plain(a))
            loss = F.cross_entropy(outputs[-1], b) / PARTS
        loss.backward()
        total += loss.detach()
    with pipeline(model, schedule, mesh, recompute=recompute) as pipe:
        with torch.autocast("cpu", dtype):
            result = pipe.step(x, y)
        assert result.loss.dtype is torch.float32
        torch.testing.assert_close(result.loss, total, rtol=1e-6, atol=0)
        if pipe.has_last_stage:
            assert result.outputs.dtype is dtype
            assert torch.equal(result.outputs, torch.cat(outputs))
        assert_gradients(pipe, plain)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_autocast(run_case: Any, dtype: torch.dtype, schedule: str, recompute: str) -> None:
    run_case(autocast, dtype, schedule, recompute)


# ── GradScaler ─────────────────────────────────────────────────────────────────────────────────────────────────────


def train_with_and_without_scaler(mesh: ps.Mesh | None, schedule: str) -> None:
    """Power-of-two scales change nothing, with momentum, clipping and accumulation over two steps."""
    trained = []
    for enabled in (True, False):
        model = network()
        with pipeline(model, schedule, mesh) as pipe:
            scaler = ps.GradScaler(pipe, init_scale=2.0**10, growth_interval=2, enabled=enabled)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for iteration in range(4):
                for more in range(2):
                    losses.append(pipe.step(*data(2 * iteration + more)).loss.item())
                scaler.unscale_(optimizer)
                norm = pipe.clip_grad_norm_(0.1)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scaler.get_scale() == (2.0**12 if enabled else 1.0)
            trained.append((losses, norm.item(), {name: p.detach().clone() for name, p in pipe.named_parameters()}))
    (losses, norm, ours), (plain_losses, plain_norm, theirs) = trained
    assert losses == plain_losses
    assert norm == plain_norm
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(ours[name], p) for name, p in network().named_parameters() if name in ours)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_scaler_does_not_change_float32_training(run_case: Any, schedule: str) -> None:
    run_case(train_with_and_without_scaler, schedule)


def train_float16(mesh: ps.Mesh | None, schedule: str) -> None:
    """The initial scale is too high: some steps are skipped, the scale falls and grows again."""
    model = network()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"init_scale": 2.0**24, "growth_interval": 2}
    with pipeline(model, schedule, mesh) as pipe:
        scaler, theirs = ps.GradScaler(pipe, **options), torch.amp.GradScaler("cpu", **options)
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.01)
        plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
        scales = []
        for iteration in range(12):
            x, y = data(iteration)
            for a, b in parts(x, y):
                with torch.autocast("cpu", torch.float16):
                    loss = F.cross_entropy(plain(a), b) / PARTS
                theirs.scale(loss).backward()
            with torch.autocast("cpu", torch.float16):
                pipe.step(x, y)
            theirs.step(plain_optimizer)
            scaler.step(optimizer)
            theirs.update()
            scaler.update()
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            assert scales[-1] == theirs.get_scale()
            assert_parameters(pipe, plain)
        pairs = list(pairwise(scales))
        assert any(b < a for a, b in pairs), "no step was held back: the case shows nothing"
        assert any(b > a for a, b in pairs), "the scale never grew: the case shows nothing"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_float16_scaler_matches_torch_amp(run_case: Any, schedule: str) -> None:
    run_case(train_float16, schedule)


def inf_in_one_stage(mesh: ps.Mesh | None, stage: str) -> None:
    model = network()
    before = copy.deepcopy(model)
    with pipeline(model, "1f1b", mesh) as pipe:
        scaler = ps.GradScaler(pipe)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(*data())
        for name, parameter in pipe.named_parameters():
            if name == stage:
                assert parameter.grad is not None
                parameter.grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert_parameters(pipe, before)
        assert scaler.get_scale() == 2.0**15
        optimizer.zero_grad()
        pipe.step(*data())
        scaler.step(optimizer)  # no rank skips this one
        scaler.update()
        assert all(not torch.equal(p, dict(before.named_parameters())[n]) for n, p in pipe.named_parameters())


@pytest.mark.parametrize("stage", ["0.weight", "5.bias"])
def test_inf_in_one_stage_skips_the_step_on_all_ranks(run_case: Any, stage: str) -> None:
    run_case(inf_in_one_stage, stage)


def stage_without_parameters(mesh: ps.Mesh | None, frozen: bool) -> None:
    """The second stage has no parameters, or only frozen ones."""
    torch.manual_seed(0)
    tail = nn.Linear(WIDTH, WIDTH).requires_grad_(False) if frozen else nn.Tanh()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), tail)
    plan = ps.split(model, balance=[1, 1])
    with ps.Pipeline(plan, F.cross_entropy, microbatches=PARTS, mesh=mesh) as pipe:
        scaler = ps.GradScaler(pipe, init_scale=2.0**8, growth_interval=1)
        own = list(pipe.parameters())
        optimizer = torch.optim.SGD(own, lr=0.1) if own else None
        for _ in range(2):
            pipe.step(*data())
            scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("frozen", [False, True])
def test_scaler_with_a_rank_without_gradients(run_case: Any, frozen: bool) -> None:
    run_case(stage_without_parameters, frozen)


def scale_loss_of_kind(mesh: ps.Mesh | None, kind: str) -> None:
    """A sum with its count, which is divided at the end of the step; a mean with ignored targets; a sum."""
    x, y = data()
    y[::3] = -100
    grads = []
    for scale in (1.0, 2.0**12):
        with pipeline(network(), "1f1b", mesh, LOSSES[kind]) as pipe:
            ps.GradScaler(pipe, init_scale=scale)
            result = pipe.step(x, y)
            found = {n: p.grad / scale for n, p in pipe.named_parameters() if p.grad is not None}
            grads.append((result.loss.item(), found))
    assert grads[0][1]
    assert grads[0][0] == grads[1][0], "the loss is not scaled"
    assert all(torch.equal(grads[0][1][name], grads[1][1][name]) for name in grads[0][1])


@pytest.mark.parametrize("kind", ["pair", "ignore", "sum"])
def test_scaler_with_each_kind_of_loss(run_case: Any, kind: str) -> None:
    run_case(scale_loss_of_kind, kind)


def test_scaling_the_loss_of_a_forward_call() -> None:
    model = network()
    plain = copy.deepcopy(model)
    x, y = data()
    with pipeline(model, "1f1b", None) as pipe:
        scaler, theirs = ps.GradScaler(pipe), torch.amp.GradScaler("cpu")
        optimizer, plain_optimizer = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipe, plain))
        scaler.scale(F.cross_entropy(pipe(x), y)).backward()
        outputs = torch.cat([plain(a) for a, _ in parts(x, y)])
        theirs.scale(F.cross_entropy(outputs, y)).backward()
        assert_gradients(pipe, plain, rtol=1e-5, atol=1e-2)
        scaler.step(optimizer)
        theirs.step(plain_optimizer)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter, dict(plain.named_parameters())[name])


# ── accumulate="fp32" ──────────────────────────────────────────────────────────────────────────────────────────────


def summed(
    model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any = F.cross_entropy, factor: float = 1 / PARTS
) -> dict[str, Tensor]:
    """Float32 sums over micro-batches of gradients in the model's dtype."""
    totals: dict[str, Tensor] = {}
    for a, b in parts(x, y):
        one = copy.deepcopy(model)
        loss = loss_fn(one(a), b)
        loss.backward(torch.full_like(loss, factor))
        for name, parameter in one.named_parameters():
            assert parameter.grad is not None
            totals[name] = totals[name] + parameter.grad if name in totals else parameter.grad.float()
    return totals


def half_data(dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    x, y = data(seed)
    return x.to(dtype), y


def accumulate_in_float32(mesh: ps.Mesh | None, dtype: torch.dtype, schedule: str, recompute: str) -> None:
    model, (x, y) = network().to(dtype), half_data(dtype)
    expected = {name: total.to(dtype) for name, total in summed(model, x, y).items()}
    found = {}
    for accumulate in ("fp32", None):
        with pipeline(copy.deepcopy(model), schedule, mesh, accumulate=accumulate, recompute=recompute) as pipe:
            pipe.step(x, y)
            if accumulate:
                assert_gradients(pipe, expected)
            found[accumulate] = [p.grad for p in pipe.parameters()]
    assert any(not torch.equal(a, b) for a, b in zip(*found.values(), strict=True)), "the example loses no bits"


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_fp32_accumulation_rounds_once(run_case: Any, dtype: torch.dtype, schedule: str, recompute: str) -> None:
    run_case(accumulate_in_float32, dtype, schedule, recompute)


def accumulate_over_steps(mesh: ps.Mesh | None, schedule: str) -> None:
    """Between steps the sum has the parameter's dtype, rounded once per step; clipping uses the rounded gradients."""
    model = network().bfloat16()
    expected: dict[str, Tensor] = {}
    with pipeline(copy.deepcopy(model), schedule, mesh, accumulate="fp32") as pipe:
        for seed in range(3):
            x, y = half_data(torch.bfloat16, seed)
            pipe.step(x, y)
            for name, total in summed(model, x, y).items():
                expected[name] = (total + expected[name] if name in expected else total).bfloat16()
            assert_gradients(pipe, expected)  # type: ignore[arg-type]
        whole = torch.stack([grad.float().norm() for grad in expected.values()]).norm()
        torch.testing.assert_close(pipe.clip_grad_norm_(0.5), whole, rtol=1e-5, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_accumulation_over_steps(run_case: Any, schedule: str) -> None:
    run_case(accumulate_over_steps, schedule)


def loss_with_count(mesh: ps.Mesh | None, schedule: str) -> None:
    model, (x, y) = network().bfloat16(), half_data(torch.bfloat16)
    counts = [3 + k for k in range(PARTS)]
    given = iter(counts)

    def total(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.float(), target, reduction="sum")

    estimate = counts[0] * PARTS  # by the first micro-batch, whose backward comes before the other forwards
    totals = summed(model, x, y, total, 1 / estimate)
    factor = estimate / sum(counts)
    expected = {name: (total * factor).bfloat16() for name, total in totals.items()}
    loss_fn = lambda output, target: (total(output, target), next(given))  # noqa: E731
    with pipeline(model, schedule, mesh, loss_fn, accumulate="fp32") as pipe:
        pipe.step(x, y)
        assert_gradients(pipe, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_accumulation_scales_before_rounding(run_case: Any, schedule: str) -> None:
    run_case(loss_with_count, schedule)


def train_tied(mesh: ps.Mesh | None, schedule: str) -> None:
    """A weight tied between the first and the last stage: gradients of both are summed in float32.

    In threads both add to one sum in no fixed order, so the last bit may differ.
    """
    torch.manual_seed(0)
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    apart = nn.Sequential(first, nn.Tanh(), nn.Tanh(), last).bfloat16()
    last.load_state_dict(first.state_dict())
    x, y = half_data(torch.bfloat16)
    totals = summed(apart, x, y)
    model = nn.Sequential(first, nn.Tanh(), nn.Tanh(), first)
    expected = {name: totals[f"0.{name}"] + totals[f"3.{name}"] for name in ("weight", "bias")}
    plan = ps.split(model, balance=[2, 2])
    options: dict[str, Any] = {"microbatches": PARTS, "schedule": schedule, "mesh": mesh, "accumulate": "fp32"}
    with ps.Pipeline(plan, F.cross_entropy, **options) as pipe:
        for name in ("weight", "bias"):
            for _ in range(2):
                pipe.zero_grad()
                pipe.step(x, y)
                (grad,) = (p.grad for n, p in pipe.named_parameters() if n.endswith(name))
                want = expected[name].bfloat16()
                assert grad is not None
                close = {"rtol": 2.0**-7, "atol": 1e-6} if mesh is None else {"rtol": 0.0, "atol": 0.0}
                torch.testing.assert_close(grad, want, **close)
                assert (grad != want).sum() <= 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fp32_accumulation_of_tied_weights(run_case: Any, schedule: str) -> None:
    run_case(train_tied, schedule)


class UnusedModule(nn.Module):
    """Registers a module without using it."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor) -> Tensor:
        return x * 1


def train_tie_without_gradient(mesh: ps.Mesh | None) -> None:
    torch.manual_seed(0)
    first = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(WIDTH, 4), UnusedModule(first)).bfloat16()
    x, y = half_data(torch.bfloat16)
    totals = summed(model, x, y)
    plan = ps.split(model, balance=[2, 2])
    with ps.Pipeline(plan, F.cross_entropy, microbatches=PARTS, mesh=mesh, accumulate="fp32") as pipe:
        pipe.step(x, y)
        for name, parameter in pipe.named_parameters():
            want = totals[name.replace("3.held.", "0.")].bfloat16()
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, want), name


def test_tied_weight_without_gradient_on_one_rank(run_case: Any) -> None:
    run_case(train_tie_without_gradient)


def test_fp32_accumulation_of_local_ties() -> None:
    copies = [nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2)]
    ties = LocalTies([copies])
    with Fp32GradAccumulator(copies):
        for which, part in ((0, 1.0), (0, 2.0**-9), (1, 2.0**-9), (1, 2.0**-9)):
            (copies[which] * part).sum().backward()
        ties.sum_grads()
    for parameter in copies:
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full((2,), 1 + 3 * 2.0**-9).bfloat16())
    assert copies[0].grad is not copies[1].grad


class FailsInBackward(nn.Module):
    """An identity that fails in the backward of one micro-batch if enabled."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        moment = ps.current_microbatch()
        if self.fails and x.requires_grad and moment is not None and moment.index == 3:
            x.register_hook(_fail)
        return x * 1


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("told to")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_failed_step_leaves_gradients_unchanged(schedule: str) -> None:
    fragile = FailsInBackward()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), fragile, nn.Linear(WIDTH, 4)).bfloat16()
    x, y = half_data(torch.bfloat16)
    plan = ps.split(model, balance=[1, 3])
    with ps.Pipeline(plan, F.cross_entropy, microbatches=PARTS, schedule=schedule, accumulate="fp32") as pipe:
        pipe.step(x, y)
        model[0].zero_grad()
        before = [(p.grad, None if p.grad is None else p.grad.clone()) for p in pipe.parameters()]
        fragile.fails = True
        with pytest.raises(ArithmeticError, match="told to"):
            pipe.step(x, y)
        for parameter, (held, value) in zip(pipe.parameters(), before, strict=True):
            assert parameter.grad is held
            assert held is None or (value is not None and torch.equal(held, value))
        fragile.fails = False
        pipe.zero_grad()
        pipe.step(x, y)
        assert_gradients(pipe, {n: t.bfloat16() for n, t in summed(model, x, y).items()})


@pytest.mark.parametrize("accumulate", ["fp32", None])
def test_fp32_accumulation_in_a_forward_call(accumulate: str | None) -> None:
    model, (x, y) = network().bfloat16(), half_data(torch.bfloat16)
    with pipeline(model, "1f1b", None, accumulate=accumulate) as pipe:
        outputs = pipe(x)
        sum(F.cross_entropy(a, b) / PARTS for a, b in parts(outputs, y)).backward()  # type: ignore[union-attr]
        expected = {name: total.bfloat16() for name, total in summed(model, x, y).items()}
        with nullcontext() if accumulate else pytest.raises(AssertionError):
            assert_gradients(pipe, expected)  # type: ignore[arg-type]


def test_invalid_accumulate_option_is_refused() -> None:
    with pytest.raises(ps.PlanError, match="accumulate must be 'fp32' or None, got 'fp64'"):
        pipeline(network(), "1f1b", None, accumulate="fp64")
