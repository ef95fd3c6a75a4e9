"""Weights on the host change where they are, and nothing else: results are the same bit for bit."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.offload.activations import ActivationOffload
from penstock.engine.offload.copies import HostBufferPool
from tests.equivalence.check import check_step
from tests.equivalence.models import TRAINING, Case
from tests.equivalence.test_offload import case_for, check_same, offload_optimizer, plain_optimizer, train
from tests.equivalence.test_webs import dense
from tests.support.copies import LateCopies
from tests.support.ranks import Ranks
from tests.support.weights import LateWeights, late_weights, weights_everywhere

ALL = ps.Offload(activations=False, weights=True)


@pytest.fixture(autouse=True)
def same_sums() -> Iterator[None]:
    """Ranks that take turns have the operator threads of one: sums over several are rounded otherwise."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    yield
    torch.set_num_threads(before[0])
    torch.backends.cudnn.deterministic = before[1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    return late_weights(monkeypatch)


# ── through the API: on the CPU nothing moves ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_threads(schedule: str) -> None:
    case = case_for(schedule, 2)
    check_same(train(case, offload_optimizer, offload=ps.Offload(weights=True)), train(case, plain_optimizer))


def in_rank(rank: int, schedule: str, recompute: str, moves: bool) -> None:
    torch.set_num_threads(1)
    case, mesh = case_for(schedule, 2), ps.Mesh(pipe=2)
    plain = train(case, plain_optimizer, mesh=mesh, recompute=recompute)
    with pytest.MonkeyPatch.context() as patch:
        made = late_weights(patch) if moves else []
        check_same(train(case, offload_optimizer, mesh=mesh, offload=ALL, recompute=recompute), plain)
        assert all(weights.late.bytes_to_device > 0 for weights in made)
    assert len(made) == moves
    if moves:
        with pytest.MonkeyPatch.context() as patch:
            weights_everywhere(patch)
            check_step(replace(case, repeat_first=True), mesh)  # with a tie between the ranks


@pytest.mark.parametrize("moves", [False, True], ids=["nothing moves", "everything moves"])
@pytest.mark.parametrize(("schedule", "recompute"), [("1f1b", "never"), ("zbv", "except_last"), ("sharded", "never")])
def test_processes(two: Ranks, schedule: str, recompute: str, moves: bool) -> None:
    two.check(in_rank, schedule, recompute, moves)


def as_replicas(rank: int, schedule: str, stages: int, bucket: int) -> None:
    """Two replicas of a pipeline, each with all stages: their gradients are summed on the host."""
    torch.set_num_threads(1)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        made = late_weights(patch)
        patch.setattr("penstock.engine.replicas.reduce.BUCKET", bucket)
        for offload in (ALL, None):
            plan, mesh = ps.split(model(), stages=stages), ps.Mesh(data=2, pipe=1)
            options: dict[str, Any] = {"schedule": schedule, "microbatches": 2, "mesh": mesh, "offload": offload}
            with ps.Pipeline(plan, F.mse_loss, **options) as pipe:
                optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
                if offload is not None:
                    pipe.offload_optimizer(optimizer)
                record = []
                for step in range(3):
                    # At last, one of them has nothing.
                    mine = slice(rank * 5, 5 + rank * 7) if step < 2 else slice(0, 12 * rank)
                    record.append(pipe.step(X[mine] + step, Y[mine]).loss)
                    record += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
                    record.append(pipe.clip_grad_norm_(0.05))
                    optimizer.step()
                    optimizer.zero_grad()
                found.append([*record, *(tensor.clone() for tensor in pipe.state_dict().values())])
    assert made[0].late.bytes_to_device > 0
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("bucket", [1, 1 << 20], ids=["one by one", "together"])
@pytest.mark.parametrize(("schedule", "stages"), [("looped_bfs", 8), ("interleaved", 8), ("zbv", 2), ("dualpipev", 2)])
def test_replicas(two: Ranks, schedule: str, stages: int, bucket: int) -> None:
    two.check(as_replicas, schedule, stages, bucket)


# ── with stand-ins on the CPU: everything moves ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("recompute", ["never", "except_last"])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule(made: list[LateWeights], schedule: str, recompute: str) -> None:
    case = case_for(schedule, 4)
    ours = train(case, offload_optimizer, offload=ALL, recompute=recompute)
    check_same(ours, train(case, plain_optimizer, recompute=recompute))
    (weights,) = made
    sizes = sorted(weights.bytes_of(stage) for stage in weights.modules)
    assert 0 < weights.most <= sum(sizes[-2:])
    assert weights.late.bytes_to_device > 2 * sum(sizes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_with_activations(made: list[LateWeights], schedule: str) -> None:
    pool, all_copies = HostBufferPool(), []

    def prepare(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for stage in pipe._executor.stages.values():
            module, copies = stage.module, LateCopies()
            resident = [*module.parameters(), *module.buffers()]
            stage.offload = ActivationOffload(torch.device("cpu"), copies, pool, resident, smallest=1, window=500)
            all_copies.append(copies)
        return pipe.offload_optimizer(optimizer)

    case = case_for(schedule, 3)
    check_same(train(case, prepare, offload=ALL), train(case, plain_optimizer))
    assert sum(copies.bytes_to_device for copies in all_copies) > 0


@pytest.mark.parametrize("schedule", TRAINING)
def test_frozen_layers_ties_skips_and_plain_calls(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    made = weights_everywhere(monkeypatch)
    for count in (1, 3):
        stages = case_for(schedule, count).stages
        for recompute in ("never", "always"):
            check_step(Case(("frozen", "twice", "lookup"), True, 3, schedule, stages, 4, 10, "pair", recompute))
        check_step(dense(schedule, count))
    assert all(weights.late.bytes_to_device > 0 for weights in made)


# ── what a training loop does ────────────────────────────────────────────────────────────────────────────────────

Loop = Callable[[ps.Pipeline, torch.optim.Optimizer], list[Any]]
X, Y = (torch.randn(12, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())))


def same(
    loop: Loop,
    build: Callable[[], nn.Sequential] = model,
    device: str = "cpu",
    offload: ps.Offload = ALL,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> None:
    """A loop gives the same with weights on the host and without, and leaves the same behind."""
    found: list[list[Tensor]] = []
    for each in (offload, None):
        options = {"loss_fn": F.mse_loss, "microbatches": 4, "schedule": "gpipe", **options}
        plan = ps.split(build(), stages=8)
        with ps.Pipeline(plan, devices=[device] * 8, offload=each, **options) as pipe:
            optimizer = make(pipe.parameters(), lr=0.01)
            if each is not None:
                pipe.offload_optimizer(optimizer)
            record = [torch.as_tensor(value).detach().cpu().clone() for value in loop(pipe, optimizer)]
            record += [tensor.cpu().clone() for tensor in pipe.state_dict().values()]
            record += [p.grad.cpu().clone() for p in pipe.parameters() if p.grad is not None]
            for state in optimizer.state_dict()["state"].values():
                record += [value.cpu().clone() for value in state.values() if isinstance(value, Tensor)]
        found.append(record)
    assert len(found[0]) == len(found[1])
    for number, (mine, theirs) in enumerate(zip(*found, strict=True)):
        assert torch.equal(mine, theirs), number


def clipped(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(3):
        found.append(pipe.step(X + step, Y).loss)
        found.append(pipe.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return found


def accumulated(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(4):
        found.append(pipe.step(X + step, Y).loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    return found


def scaled(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found, scaler = [], ps.GradScaler(pipe, init_scale=2.0**8, growth_interval=2)
    for step in range(4):
        found.append(pipe.step(X * (float("inf") if step == 1 else 1), Y).loss.nan_to_num())
        scaler.unscale_(optimizer)
        if step != 1:
            found.append(pipe.clip_grad_norm_(0.05))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    pipe.load_state_dict({name: value.nan_to_num() for name, value in pipe.state_dict().items()})
    return [*found, scaler.get_scale()]


def saved(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """A checkpoint in the middle: loaded into a plain model, and back into the pipeline after some steps."""
    found = clipped(pipe, optimizer)
    file = io.BytesIO()
    torch.save((pipe.state_dict(), optimizer.state_dict()), file)
    plain = model().eval()
    plain.load_state_dict({name: value.cpu() for name, value in pipe.state_dict().items()})
    found.append(plain(X))
    found += clipped(pipe, optimizer)
    file.seek(0)
    weights, state = torch.load(file)
    pipe.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return found + clipped(pipe, optimizer)


def evaluated(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(2):
        found += clipped(pipe, optimizer)
        pipe.eval()
        found += [pipe.evaluate(X, Y).loss, *pipe.stream([X, X + 1, X + 2, X + 3])]
        with torch.no_grad():
            found.append(pipe(X[: 5 + step]))
        with torch.inference_mode():
            found.append(pipe(X).clone())
        pipe.train()
    return found


def called(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """``pipe(x)`` with gradients: backward at once, after other runs, and not at all."""
    target = Y.to(pipe._executor.stages[7].device)
    found = clipped(pipe, optimizer)
    loss = F.mse_loss(pipe(X), target)
    found += [loss, *torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=True)]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found += clipped(pipe, optimizer)
    loss = F.mse_loss(pipe(X), target)
    found += [pipe.step(X, Y).loss, pipe.evaluate(X, Y).loss]
    loss.backward()
    found += [p.grad for p in pipe.parameters()]
    found.append(pipe.clip_grad_norm_(0.05))
    optimizer.step()
    optimizer.zero_grad()
    found.append(pipe(X))
    return found + accumulated(pipe, optimizer)


def watched(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Hooks on parameters see what they would see."""
    found: list[Any] = []
    parameter = next(iter(pipe.parameters()))
    parameter.register_hook(lambda grad: found.append(grad.clone()))
    parameter.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone() + p.detach()))
    clipped(pipe, optimizer)
    assert len(found) == 2 * 3 * 4
    return found


def failed(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Steps that fail before they run, in a forward, and in a backward, with gradients there and without."""

    def fail(grad: Tensor) -> None:
        raise ValueError("in a hook")

    found = clipped(pipe, optimizer)
    for _ in range(2):
        with pytest.raises(ps.PlanError, match="no targets"):
            pipe.step(X)
        with pytest.raises(RuntimeError):
            pipe.step(X[:, :3], Y)
        hook = next(iter(pipe.parameters())).register_hook(fail)
        with pytest.raises(ValueError, match="in a hook"):
            pipe.step(X, Y)
        hook.remove()
        found += [p.clone() for p in pipe.parameters()]
        found += [p.grad.clone() for p in pipe.parameters() if p.grad is not None and pipe._executor._rescales]
        found.append(pipe.step(X, Y).loss)
    optimizer.zero_grad()
    return found + accumulated(pipe, optimizer)


LOOPS = [clipped, accumulated, scaled, saved, evaluated, called, watched, failed]


@pytest.mark.parametrize("loop", LOOPS)
def test_loops(made: list[LateWeights], loop: Loop) -> None:
    same(loop)
    assert made[0].late.bytes_to_device > 0
    assert loop is called or made[0].most == 2 * made[0].bytes_of(0)


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(float(output.numel()))


class Half(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def half() -> nn.Sequential:
    first, *others = model().bfloat16()
    return nn.Sequential(nn.Sequential(Half(), first), *others)


def half_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def embedding() -> nn.Sequential:
    """A tie between the first stage and the last: one parameter, in one place."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    layers[7].weight = layers[0].weight
    return nn.Sequential(*layers)


def described() -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("meta"):
        return model()


def fill(stage: nn.Module) -> None:
    for part in stage.modules():
        if isinstance(part, (nn.Linear, nn.BatchNorm1d)):
            part.reset_parameters()
        if isinstance(part, nn.Linear):
            part.bias.data.fill_(0.1)


CASES: dict[str, dict[str, Any]] = {
    "a loss that counts": {"loss_fn": pair},
    "sums in float32": {"build": half, "loss_fn": half_loss, "accumulate": "fp32"},
    "half precision": {"build": half, "loss_fn": half_loss},
    "deferred statistics": {"batchnorm": "deferred"},
    "a tie": {"build": embedding, "schedule": "sharded"},  # else two threads add to one gradient, in any order
    "filled on the device": {"build": described, "init": fill},
    "momentum": {"make": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
    "all together": {"make": lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=2)},
    "weights alone": {"offload": ps.Offload(optimizer=False, activations=False, weights=True)},
    "small buckets": {"offload": ps.Offload(activations=False, weights=True, bucket=1)},
    "1f1b": {"schedule": "1f1b", "recompute": "except_last", "seed": 3},
    "zb_h1": {"schedule": "zb_h1"},
}


def closed(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = pipe.step(X, Y).loss
        return loss

    return [optimizer.step(closure) for _ in range(3)]


@pytest.mark.parametrize("name", CASES)
def test_options(made: list[LateWeights], name: str) -> None:
    loop = closed if name == "all together" else accumulated
    same(loop, **CASES[name])
    if name not in ("all together", "sums in float32", "half precision"):
        same(clipped, **CASES[name])
    if name in ("a loss that counts", "sums in float32"):
        same(failed, **CASES[name])
    assert made[0].late.bytes_to_device > 0


def test_a_model_that_is_described_has_one_stage_on_the_device_at_a_time(made: list[LateWeights]) -> None:
    seen = []

    def init(stage: nn.Module) -> None:
        seen.append(made[0].bytes_on_device())
        fill(stage)

    with ps.Pipeline(ps.split(described(), stages=8), F.mse_loss, offload=ALL, init=init, devices="cpu") as pipe:
        one = made[0].bytes_of(0)
        assert seen == [one] * 8
        assert all(bool(p.isfinite().all()) for p in pipe.parameters())
        assert made[0].bytes_on_device() == 0


def test_the_plan_and_the_schedule_are_as_without(made: list[LateWeights]) -> None:
    """Ranks that take turns are ranks still: what is shown does not change."""
    shown = []
    for offload in (ALL, None):
        plan = ps.split(model(), stages=8)
        with ps.Pipeline(plan, F.mse_loss, microbatches=4, devices=["cpu"] * 8, offload=offload) as pipe:
            shown.append((str(pipe.plan), str(pipe.schedule), repr(pipe)))
    assert shown[0] == shown[1]


def test_an_optimizer_that_does_not_know_is_refused() -> None:
    plan = ps.split(model(), stages=8)
    offload = ps.Offload(optimizer=False, activations=False, weights=True)
    with ps.Pipeline(plan, F.mse_loss, devices="cpu", offload=offload) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        with pytest.raises(ps.PlanError, match=r"use pipe.offload_optimizer\(AdamW\(pipe.parameters\(\)"):
            optimizer.step()
        pipe.offload_optimizer(optimizer).step()


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
EVERYTHING = ps.Offload(weights=True)
MIB = 1 << 20


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("offload", [ALL, EVERYTHING], ids=["weights and state", "everything"])
@pytest.mark.parametrize("loop", LOOPS)
def test_loops_on_a_gpu(loop: Loop, offload: ps.Offload) -> None:
    same(loop, device="cuda:0", offload=offload)


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("name", CASES)
def test_options_on_a_gpu(name: str) -> None:
    loop = closed if name == "all together" else accumulated
    same(loop, device="cuda:0", **CASES[name])
    if name not in ("all together", "sums in float32", "half precision"):
        same(clipped, device="cuda:0", **CASES[name])
    if name in ("a loss that counts", "sums in float32"):
        same(failed, device="cuda:0", **CASES[name])


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_a_gpu(schedule: str) -> None:
    case = case_for(schedule, 4)
    ours = train(case, offload_optimizer, offload=EVERYTHING, devices="cuda:0")
    plain = train(case, plain_optimizer, devices="cuda:0")
    check_same([(name, t.cpu()) for name, t in ours], [(name, t.cpu()) for name, t in plain])


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize(
    "make",
    [
        lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=True),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, foreach=False),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True),
        lambda p, lr: torch.optim.AdamW(p, lr=lr, capturable=True),
        lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
        lambda p, lr: torch.optim.Adagrad(p, lr=lr),
        lambda p, lr: torch.optim.Adafactor(p, lr=lr),
    ],
    ids=["foreach", "one by one", "fused", "capturable", "momentum", "Adagrad", "Adafactor"],
)
@pytest.mark.parametrize("state", [True, False], ids=["state too", "weights alone"])
def test_optimizers_on_a_gpu(make: Callable[..., torch.optim.Optimizer], state: bool) -> None:
    offload = ps.Offload(optimizer=state, activations=False, weights=True, bucket=1)
    same(saved, device="cuda:0", offload=offload, make=make)


@pytest.mark.cuda
@on_a_gpu
def test_recurrent_layers_on_a_gpu() -> None:
    """Their weights are parts of one storage, and stay on the device: torch warns if they are not parts of one."""

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
            return pair[0]

    def recurrent() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.LSTM(16, 16), First()) for _ in range(8)))

    same(clipped, recurrent, device="cuda:0")


@pytest.mark.cuda
@on_a_gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_of_eight_stages_the_gpu_has_two(schedule: str) -> None:
    """Their weights, and the gradients of three: one leaves, one is added to, one comes."""
    torch.manual_seed(0)
    device, one = torch.device("cuda:0"), 32 * MIB
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
    plan, x = ps.split(layers, stages=8), torch.randn(64, 2048, device=device)

    def peak(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    offload = ps.Offload(activations=False, weights=True, bucket=3 * one)
    options: dict[str, Any] = {"microbatches": 8, "schedule": schedule, "outputs": None}
    torch.cuda.synchronize()
    empty = torch.cuda.memory_allocated()
    with ps.Pipeline(plan, F.mse_loss, devices=[device] * 8, offload=offload, **options) as pipe:
        assert torch.cuda.memory_allocated() - empty < one / 4
        optimizer = pipe.offload_optimizer(torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False))
        for counts in (False, True):  # the first time kernels are loaded, workspaces made, and weights looked at
            optimizer.zero_grad()
            settled = torch.cuda.memory_allocated()
            of_evaluation = peak(lambda: pipe.evaluate(x))
            of_step = peak(lambda: pipe.step(x, x))
            of_update = peak(optimizer.step)
            if counts:
                assert one < of_evaluation < 2.5 * one
                assert one < of_step < 6.5 * one
                assert of_update < 6 * one
                assert torch.cuda.memory_allocated() - settled < one / 4
        assert all(p.is_cpu and p.is_pinned() for p in pipe.parameters())
        assert all(p.grad is not None and p.grad.is_cpu and p.grad.is_pinned() for p in pipe.parameters())


@pytest.mark.cuda
@on_a_gpu
def test_a_model_larger_than_its_share_of_the_gpu() -> None:
    """What is built, trained and evaluated does not have its weights on the GPU at any time."""
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))  # 512 MiB, and as much of gradients
    with torch.no_grad():
        for weight in layers.parameters():
            weight.mul_(3**0.5)  # so that what goes through all of them does not vanish
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 480 * MIB) / total, device)
    try:
        plan = ps.split(layers, stages=16)
        offload = ps.Offload(weights=True, bucket=48 * MIB)
        x = torch.randn(32, 2048, device=device)
        with ps.Pipeline(plan, F.mse_loss, microbatches=4, schedule="gpipe", devices="cuda:0", offload=offload) as pipe:
            optimizer = pipe.offload_optimizer(torch.optim.AdamW(pipe.parameters(), lr=1e-3, foreach=False))
            losses = []
            for _ in range(3):
                losses.append(float(pipe.step(x, torch.ones_like(x)).loss))
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            assert all(map(math.isfinite, losses))
            assert len(set(losses)) == 3
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
