"""BatchNorm in a pipeline: statistics of micro-batches, or deferred statistics of the whole mini-batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.engine.microbatch import microbatch_sizes
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv"]
RECOMPUTE = ["never", "except_last", "always"]
# Micro-batches, batch size, momentum: even, uneven, some of one sample, fewer samples than micro-batches.
SIZES = [(4, 12, 0.1), (4, 10, None), (4, 5, 0.3), (3, 2, None)]
Size = tuple[int, int, float | None]


def model(momentum: float | None = 0.1) -> nn.Sequential:
    """Each BatchNorm is beside the other layers, so a layer's input does not depend on the normalisation of others.

    Its input is then the same in micro-batches and in one forward of the mini-batch, and so are deferred statistics.
    """
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Conv2d(3, 3, 3, padding=1), StatisticsOnly(nn.BatchNorm2d(3, momentum=momentum)), nn.Tanh()]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(48, 3)).double()


class StatisticsOnly(nn.Module):
    """Runs the layer for its statistics and the gradients of its parameters only."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        normalized = self.norm(x)
        return x + normalized - normalized.detach()


class CustomForward(nn.BatchNorm2d):
    """A subclass with its own forward, whose output depends on the running statistics also in training."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        before = self.running_mean.clone().view(-1, 1, 1)
        return super().forward(x * 2) * (1 + before)


class Checkpointed(StatisticsOnly):
    """Activation checkpointing by the user, inside a stage."""

    def forward(self, x: Tensor) -> Tensor:
        normalized = checkpoint(self.norm, x, use_reentrant=False)
        return x + normalized - normalized.detach()


def data(batch: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x * torch.arange(1, batch + 1).view(-1, 1, 1, 1) + 3, torch.randint(3, (batch,), generator=generator)


def make_pipeline(net: nn.Sequential, schedule: str, **options: Any) -> ps.Pipeline:
    stages = 4 if schedule in ("interleaved", "zbv") else 2
    balance = {2: [5, 9], 4: [2, 4, 5, 3]}[stages]
    return ps.Pipeline(ps.split(net, balance=balance), F.cross_entropy, schedule=schedule, **options)


def accumulate_over_microbatches(net: nn.Module, x: Tensor, y: Tensor, microbatches: int) -> Tensor:
    """The plain training loop with gradient accumulation."""
    sizes = list(microbatch_sizes(len(x), microbatches))
    losses = []
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        loss = F.cross_entropy(net(part), target) * len(part) / len(x)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def forward_whole_batch(net: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        net(x)


def assert_state_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-11, atol=1e-13, msg=f"{name}: {{}}".format)


def assert_gradients_equal(pipe: ps.Pipeline, plain: nn.Module) -> None:
    theirs = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    assert_state_equal({name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}, theirs)


def check(schedule: str, recompute: str, batchnorm: str, sizes: Sequence[Size], **where: Any) -> None:
    """Compare two steps: gradients and loss with the loop, statistics with the loop or the whole mini-batch."""
    for microbatches, batch, momentum in sizes:
        net = model(momentum)
        looped, full = copy.deepcopy(net), copy.deepcopy(net)
        options = {"microbatches": microbatches, "recompute": recompute, "batchnorm": batchnorm}
        with make_pipeline(net, schedule, **options, **where) as pipe:
            for seed in (1, 2):
                x, y = data(batch, seed)
                loss = accumulate_over_microbatches(looped, x, y, microbatches)
                forward_whole_batch(full, x)
                torch.testing.assert_close(pipe.step(x, y).loss, loss)
                assert_gradients_equal(pipe, looped)
            assert_state_equal(pipe.state_dict(), (full if batchnorm == "deferred" else looped).state_dict())


@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_statistics_in_threads(schedule: str, recompute: str, batchnorm: str) -> None:
    """Two of the sizes for each: all pairs of any two arguments."""
    number = SCHEDULES.index(schedule) + RECOMPUTE.index(recompute) + (batchnorm == "deferred")
    check(schedule, recompute, batchnorm, SIZES[number % 2 :: 2])


def _check_on_rank(rank: int, schedule: str, batchnorm: str) -> None:
    for recompute, size in (("never", SIZES[1]), ("always", SIZES[2])):
        check(schedule, recompute, batchnorm, [size], mesh=ps.Mesh(pipe=2))


@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_statistics_over_two_processes(schedule: str, batchnorm: str, two: Ranks) -> None:
    two.check(_check_on_rank, schedule, batchnorm)


def _evaluate_on_rank(rank: int) -> None:
    net = model()
    plain = copy.deepcopy(net)
    x, _ = data(10)
    with (
        make_pipeline(net, "1f1b", microbatches=4, mesh=ps.Mesh(pipe=2), batchnorm="deferred") as pipe,
        torch.no_grad(),
    ):
        pipe(x)
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())
        pipe.eval()
        pipe(x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())


def test_forward_call_updates_statistics_once_over_two_processes(two: Ranks) -> None:
    two.check(_evaluate_on_rank)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_forward_call_updates_statistics_once(recompute: str, context: Any) -> None:
    net = model()
    plain = copy.deepcopy(net)
    x, _ = data(10)
    with make_pipeline(net, "1f1b", microbatches=4, batchnorm="deferred", recompute=recompute) as pipe:
        with context():
            output = pipe(x)
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())
        if output.requires_grad:
            output.sum().backward()
        assert_state_equal(pipe.state_dict(), plain.state_dict())
        assert int(net[1].norm.num_batches_tracked) == 1
        pipe.eval()
        with context():
            torch.testing.assert_close(pipe(x), plain.eval()(x))
        assert_state_equal(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_user_checkpoint_updates_statistics_once(recompute: str) -> None:
    net = model()
    for i in (1, 7):
        net[i] = Checkpointed(net[i].norm)
    plain = copy.deepcopy(net)
    x, y = data(10)
    with make_pipeline(net, "1f1b", microbatches=4, batchnorm="deferred", recompute=recompute) as pipe:
        pipe.step(x, y)
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())
        pipe(x).sum().backward()
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_failed_step_leaves_statistics_unchanged(when: str, schedule: str) -> None:
    net = model()
    before = copy.deepcopy(net.state_dict())
    x, y = data(8)

    def fail(grad: Tensor) -> Tensor:
        raise RuntimeError("no gradient today")

    def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor | None:
        if torch.equal(args[0], x[6:]) and when == "forward":
            raise RuntimeError("no output today")
        if torch.equal(args[0], x[6:]):
            output.register_hook(fail)
        return None

    handle = net[0].register_forward_hook(hook)
    with make_pipeline(net, schedule, microbatches=4, batchnorm="deferred") as pipe:
        with pytest.raises(RuntimeError, match="today"):
            pipe.step(x, y)
        assert_state_equal(pipe.state_dict(), before)
        handle.remove()
        plain = model()
        pipe.step(x, y)  # no statistics of the failed step remain
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
def test_batchnorm_subclass_with_custom_forward(batchnorm: str, recompute: str) -> None:
    net = model()
    net[1], net[7] = StatisticsOnly(CustomForward(3).double()), StatisticsOnly(CustomForward(3).double())
    looped, full = copy.deepcopy(net), copy.deepcopy(net)
    x, y = data(10)
    with make_pipeline(net, "1f1b", microbatches=4, batchnorm=batchnorm, recompute=recompute) as pipe:
        pipe.step(x, y)
        accumulate_over_microbatches(looped, x, y, 4)
        forward_whole_batch(full, x)
        assert_state_equal(pipe.state_dict(), (full if batchnorm == "deferred" else looped).state_dict())
        if batchnorm == "microbatch":
            assert_gradients_equal(pipe, looped)


def test_eval_mode_layers_keep_their_statistics() -> None:
    net = model()
    net[4].eval()
    plain = copy.deepcopy(net)
    x, y = data(8)
    with make_pipeline(net, "1f1b", microbatches=4, batchnorm="deferred", recompute="always") as pipe:
        pipe.step(x, y)
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())
    assert int(net[4].norm.num_batches_tracked) == 0


def test_autocast() -> None:
    net = model().float()
    plain = copy.deepcopy(net)
    x, y = data(8)
    with make_pipeline(net, "1f1b", microbatches=4, batchnorm="deferred", recompute="always") as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(x.float(), y)
            forward_whole_batch(plain, x.float())
        for name, tensor in pipe.state_dict().items():
            torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-2, atol=1e-3)
        assert int(net[1].norm.num_batches_tracked) == 1


def test_invalid_batchnorm_options_are_refused() -> None:
    with pytest.raises(ps.PlanError, match=r"batchnorm must be 'microbatch' or 'deferred', got 'sync'"):
        make_pipeline(model(), "1f1b", batchnorm="sync")
    net = model()
    net[1].norm = nn.SyncBatchNorm(3)
    with pytest.raises(ps.PlanError, match=r"stage 0: 1\.norm is a SyncBatchNorm"):
        make_pipeline(net, "1f1b", batchnorm="deferred")


def test_batchnorm_shared_by_two_ranks_is_refused() -> None:
    net = model()
    net[10] = net[1]
    for batchnorm in ("microbatch", "deferred"):
        with pytest.raises(ps.PlanError, match=r"10\.norm\.running_mean keeps running statistics of stages 0 and 1"):
            make_pipeline(net, "1f1b", batchnorm=batchnorm)


def test_batchnorm_shared_by_two_stages_of_one_rank() -> None:
    net = model()
    net[11] = net[1]  # in the first stage and in the last
    plain = copy.deepcopy(net)
    x, y = data(10)
    with make_pipeline(net, "zbv", microbatches=4, batchnorm="deferred") as pipe:
        pipe.step(x, y)
        forward_whole_batch(plain, x)
        assert_state_equal(pipe.state_dict(), plain.state_dict())
