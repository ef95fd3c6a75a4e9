"""Weights on the host do not change results: they are bitwise equal."""

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
from tests.equivalence.check import check_in_threads, check_step
from tests.equivalence.models import TRAINING, Case
from tests.equivalence.test_offload import case_for, check_same, offload_optimizer, plain_optimizer, train
from tests.equivalence.test_skip_connections import dense_skips
from tests.support.copies import LateCopies
from tests.support.ranks import Ranks
from tests.support.weights import LateWeights, offload_weights_everywhere, use_late_weights

pytestmark = pytest.mark.slow

ALL = ps.Offload(activations=False, weights=True)


@pytest.fixture(autouse=True)
def one_operator_thread() -> Iterator[None]:
    """All ranks use one operator thread, else the rounding of sums depends on the number of ranks."""
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    torch.set_num_threads(1)
    torch.backends.cudnn.deterministic = True
    yield
    torch.set_num_threads(before[0])
    torch.backends.cudnn.deterministic = before[1]


@pytest.fixture
def late_weights(monkeypatch: pytest.MonkeyPatch) -> list[LateWeights]:
    return use_late_weights(monkeypatch)


# ── public API on the CPU: nothing is copied ───────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_offload_in_threads(schedule: str) -> None:
    case = case_for(schedule, 2)
    check_same(train(case, offload_optimizer, offload=ps.Offload(weights=True)), train(case, plain_optimizer))


def train_on_rank(rank: int, schedule: str, recompute: str, moves: bool) -> None:
    torch.set_num_threads(1)
    case, mesh = case_for(schedule, 2), ps.Mesh(pipe=2)
    plain = train(case, plain_optimizer, mesh=mesh, recompute=recompute)
    with pytest.MonkeyPatch.context() as patch:
        late_weights = use_late_weights(patch) if moves else []
        check_same(train(case, offload_optimizer, mesh=mesh, offload=ALL, recompute=recompute), plain)
        assert all(weights.late.bytes_to_device > 0 for weights in late_weights)
    assert len(late_weights) == moves
    if moves:
        with pytest.MonkeyPatch.context() as patch:
            offload_weights_everywhere(patch)
            check_step(replace(case, repeat_first=True), mesh)  # with a weight tied between the ranks


@pytest.mark.parametrize(
    ("schedule", "recompute", "moves"),
    [("1f1b", "never", False), ("1f1b", "never", True), ("zbv", "except_last", True), ("sharded", "never", True)],
)
def test_offload_over_processes(two: Ranks, schedule: str, recompute: str, moves: bool) -> None:
    two.check(train_on_rank, schedule, recompute, moves)


def train_as_replicas(rank: int, schedule: str, stages: int, bucket: int) -> None:
    """Two replicas with all stages each: gradients are reduced on the host."""
    torch.set_num_threads(1)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        late_weights = use_late_weights(patch)
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
                    # In the last step one replica has no samples.
                    mine = slice(rank * 5, 5 + rank * 7) if step < 2 else slice(0, 12 * rank)
                    record.append(pipe.step(X[mine] + step, Y[mine]).loss)
                    record += [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
                    record.append(pipe.clip_grad_norm_(0.05))
                    optimizer.step()
                    optimizer.zero_grad()
                found.append([*record, *(tensor.clone() for tensor in pipe.state_dict().values())])
    assert late_weights[0].late.bytes_to_device > 0
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("schedule", "stages", "bucket"),
    [("looped_bfs", 8, 1), ("interleaved", 8, 1 << 20), ("zbv", 2, 1), ("dualpipev", 2, 1 << 20)],
)
def test_replicas(two: Ranks, schedule: str, stages: int, bucket: int) -> None:
    two.check(train_as_replicas, schedule, stages, bucket)


# ── with LateCopies on the CPU: everything is copied ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [("zbv", "never"), *((schedule, "except_last") for schedule in TRAINING)],
)
def test_every_schedule(late_weights: list[LateWeights], schedule: str, recompute: str) -> None:
    case = case_for(schedule, 4)
    ours = train(case, offload_optimizer, offload=ALL, recompute=recompute)
    check_same(ours, train(case, plain_optimizer, recompute=recompute))
    (weights,) = late_weights
    sizes = sorted(weights.bytes_of(stage) for stage in weights.modules)
    assert 0 < weights.most <= sum(sizes[-2:])
    assert weights.late.bytes_to_device > 2 * sum(sizes)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv"])
def test_with_activations(late_weights: list[LateWeights], schedule: str) -> None:
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
    late_weights = offload_weights_everywhere(monkeypatch)
    modes = ("never", "always") if TRAINING.index(schedule) % 2 else ("always", "never")
    for count, recompute in zip((1, 3), modes, strict=True):
        stages = case_for(schedule, count).stages
        check_in_threads(Case(("frozen", "twice", "lookup"), True, 3, schedule, stages, 4, 10, "pair", recompute))
    check_in_threads(dense_skips(schedule, 3))
    assert all(weights.late.bytes_to_device > 0 for weights in late_weights)


# ── training loops ─────────────────────────────────────────────────────────────────────────────────────────────────

Loop = Callable[[ps.Pipeline, torch.optim.Optimizer], list[Any]]
X, Y = (torch.randn(12, 16, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())))


def assert_same_with_offload(
    loop: Loop,
    build: Callable[[], nn.Sequential] = model,
    device: str = "cpu",
    offload: ps.Offload = ALL,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: Any,
) -> None:
    """Compare results and final state of a loop with weights on the host and without."""
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


def train_with_clipping(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(3):
        found.append(pipe.step(X + step, Y).loss)
        found.append(pipe.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_with_accumulation(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(4):
        found.append(pipe.step(X + step, Y).loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
    return found


def train_with_scaler(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
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


def train_with_checkpoint(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Save a checkpoint, load it into a plain model, and back into the pipeline after some steps."""
    found = train_with_clipping(pipe, optimizer)
    file = io.BytesIO()
    torch.save((pipe.state_dict(), optimizer.state_dict()), file)
    plain = model().eval()
    plain.load_state_dict({name: value.cpu() for name, value in pipe.state_dict().items()})
    found.append(plain(X))
    found += train_with_clipping(pipe, optimizer)
    file.seek(0)
    weights, state = torch.load(file)
    pipe.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return found + train_with_clipping(pipe, optimizer)


def train_with_evaluation(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    found = []
    for step in range(2):
        found += train_with_clipping(pipe, optimizer)
        pipe.eval()
        found += [pipe.evaluate(X, Y).loss, *pipe.stream([X, X + 1, X + 2, X + 3])]
        with torch.no_grad():
            found.append(pipe(X[: 5 + step]))
        with torch.inference_mode():
            found.append(pipe(X).clone())
        pipe.train()
    return found


def train_with_forward_calls(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """``pipe(x)`` with gradients: backward at once, after other runs, or never."""
    target = Y.to(pipe._executor.stages[7].device)
    found = train_with_clipping(pipe, optimizer)
    loss = F.mse_loss(pipe(X), target)
    found += [loss, *torch.autograd.grad(loss, list(pipe.parameters()), retain_graph=True)]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found += train_with_clipping(pipe, optimizer)
    loss = F.mse_loss(pipe(X), target)
    found += [pipe.step(X, Y).loss, pipe.evaluate(X, Y).loss]
    loss.backward()
    found += [p.grad for p in pipe.parameters()]
    found.append(pipe.clip_grad_norm_(0.05))
    optimizer.step()
    optimizer.zero_grad()
    found.append(pipe(X))
    return found + train_with_accumulation(pipe, optimizer)


def train_with_hooks(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Hooks on parameters get the same values."""
    found: list[Any] = []
    parameter = next(iter(pipe.parameters()))
    parameter.register_hook(lambda grad: found.append(grad.clone()))
    parameter.register_post_accumulate_grad_hook(lambda p: found.append(p.grad.clone() + p.detach()))
    train_with_clipping(pipe, optimizer)
    assert len(found) == 2 * 3 * 4
    return found


def train_with_failed_steps(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Steps that fail before they run, in a forward, and in a backward, with and without existing gradients."""

    def fail(grad: Tensor) -> None:
        raise ValueError("in a hook")

    found = train_with_clipping(pipe, optimizer)
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
    return found + train_with_accumulation(pipe, optimizer)


LOOPS = [
    train_with_clipping,
    train_with_accumulation,
    train_with_scaler,
    train_with_checkpoint,
    train_with_evaluation,
    train_with_forward_calls,
    train_with_hooks,
    train_with_failed_steps,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_training_loops(late_weights: list[LateWeights], loop: Loop) -> None:
    assert_same_with_offload(loop)
    assert late_weights[0].late.bytes_to_device > 0
    assert loop is train_with_forward_calls or late_weights[0].most == 2 * late_weights[0].bytes_of(0)


def pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return (output - target).square().sum(), torch.tensor(float(output.numel()))


class ToBfloat16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


def bfloat16_model() -> nn.Sequential:
    first, *others = model().bfloat16()
    return nn.Sequential(nn.Sequential(ToBfloat16(), first), *others)


def half_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output.float(), target.float())


def tied_model() -> nn.Sequential:
    """The first stage and the last share a weight."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16) for _ in range(8)]
    layers[7].weight = layers[0].weight
    return nn.Sequential(*layers)


def meta_model() -> nn.Sequential:
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
    "loss with count": {"loss_fn": pair},
    "fp32 accumulation": {"build": bfloat16_model, "loss_fn": half_loss, "accumulate": "fp32"},
    "half precision": {"build": bfloat16_model, "loss_fn": half_loss},
    "deferred statistics": {"batchnorm": "deferred"},
    "tied": {"build": tied_model, "schedule": "sharded"},  # else two threads add to one gradient in any order
    "meta device": {"build": meta_model, "init": fill},
    "momentum": {"make": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9)},
    "closure": {"make": lambda p, lr: torch.optim.LBFGS(p, lr=lr, max_iter=2)},
    "weights only": {"offload": ps.Offload(optimizer=False, activations=False, weights=True)},
    "small buckets": {"offload": ps.Offload(activations=False, weights=True, bucket=1)},
    "1f1b": {"schedule": "1f1b", "recompute": "except_last", "seed": 3},
    "zb_h1": {"schedule": "zb_h1"},
}


def train_with_closure(pipe: ps.Pipeline, optimizer: torch.optim.Optimizer) -> list[Any]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = pipe.step(X, Y).loss
        return loss

    return [optimizer.step(closure) for _ in range(3)]


@pytest.mark.parametrize("name", CASES)
def test_options(late_weights: list[LateWeights], name: str) -> None:
    loop = train_with_closure if name == "closure" else train_with_accumulation
    assert_same_with_offload(loop, **CASES[name])
    if name in ("deferred statistics", "tied", "weights only", "small buckets", "1f1b"):
        assert_same_with_offload(train_with_clipping, **CASES[name])
    if name in ("loss with count", "fp32 accumulation"):
        assert_same_with_offload(train_with_failed_steps, **CASES[name])
    assert late_weights[0].late.bytes_to_device > 0


def test_meta_init_puts_one_stage_on_the_device_at_a_time(late_weights: list[LateWeights]) -> None:
    seen = []

    def init(stage: nn.Module) -> None:
        seen.append(late_weights[0].bytes_on_device())
        fill(stage)

    with ps.Pipeline(ps.split(meta_model(), stages=8), F.mse_loss, offload=ALL, init=init, devices="cpu") as pipe:
        one = late_weights[0].bytes_of(0)
        assert seen == [one] * 8
        assert all(bool(p.isfinite().all()) for p in pipe.parameters())
        assert late_weights[0].bytes_on_device() == 0


def test_offload_does_not_change_plan_or_schedule(late_weights: list[LateWeights]) -> None:
    shown = []
    for offload in (ALL, None):
        plan = ps.split(model(), stages=8)
        with ps.Pipeline(plan, F.mse_loss, microbatches=4, devices=["cpu"] * 8, offload=offload) as pipe:
            shown.append((str(pipe.plan), str(pipe.schedule), repr(pipe)))
    assert shown[0] == shown[1]


def test_optimizer_without_offload_is_refused() -> None:
    plan = ps.split(model(), stages=8)
    offload = ps.Offload(optimizer=False, activations=False, weights=True)
    with ps.Pipeline(plan, F.mse_loss, devices="cpu", offload=offload) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        with pytest.raises(ps.PlanError, match=r"use pipe.offload_optimizer\(AdamW\(pipe.parameters\(\)"):
            optimizer.step()
        pipe.offload_optimizer(optimizer).step()


# ── on a GPU ───────────────────────────────────────────────────────────────────────────────────────────────────────

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
EVERYTHING = ps.Offload(weights=True)
MIB = 1 << 20


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("offload", [ALL, EVERYTHING], ids=["weights and state", "everything"])
@pytest.mark.parametrize("loop", LOOPS)
def test_training_loops_on_a_gpu(loop: Loop, offload: ps.Offload) -> None:
    assert_same_with_offload(loop, device="cuda:0", offload=offload)


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("name", CASES)
def test_options_on_a_gpu(name: str) -> None:
    loop = train_with_closure if name == "closure" else train_with_accumulation
    assert_same_with_offload(loop, device="cuda:0", **CASES[name])
    if name not in ("closure", "fp32 accumulation", "half precision"):
        assert_same_with_offload(train_with_clipping, device="cuda:0", **CASES[name])
    if name in ("loss with count", "fp32 accumulation"):
        assert_same_with_offload(train_with_failed_steps, device="cuda:0", **CASES[name])


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_on_a_gpu(schedule: str) -> None:
    case = case_for(schedule, 4)
    ours = train(case, offload_optimizer, offload=EVERYTHING, devices="cuda:0")
    plain = train(case, plain_optimizer, devices="cuda:0")
    check_same([(name, t.cpu()) for name, t in ours], [(name, t.cpu()) for name, t in plain])


@pytest.mark.cuda
@needs_gpu
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
    ids=["foreach", "for loop", "fused", "capturable", "momentum", "Adagrad", "Adafactor"],
)
@pytest.mark.parametrize("state", [True, False], ids=["weights and state", "weights only"])
def test_optimizers_on_a_gpu(make: Callable[..., torch.optim.Optimizer], state: bool) -> None:
    offload = ps.Offload(optimizer=state, activations=False, weights=True, bucket=1)
    assert_same_with_offload(train_with_checkpoint, device="cuda:0", offload=offload, make=make)


@pytest.mark.cuda
@needs_gpu
def test_recurrent_layers_on_a_gpu() -> None:
    """The weights of an LSTM are parts of one storage, stay on the device, and in one: otherwise torch warns."""

    class First(nn.Module):
        def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
            return pair[0]

    def recurrent() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.LSTM(16, 16), First()) for _ in range(8)))

    assert_same_with_offload(train_with_clipping, recurrent, device="cuda:0")


@pytest.mark.cuda
@needs_gpu
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_gpu_holds_two_of_eight_stages(schedule: str) -> None:
    """The GPU holds the weights of two stages, and gradients of three: one per copy direction, one in use."""
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
        for counts in (False, True):  # the first round loads kernels and allocates workspaces
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
@needs_gpu
def test_model_larger_than_gpu_memory() -> None:
    """Build, train and evaluate a model whose weights never fit on the GPU."""
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(32)))  # 512 MiB, and 512 MiB of gradients
    with torch.no_grad():
        for weight in layers.parameters():
            weight.mul_(3**0.5)  # keeps activations from vanishing
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
