"""``pipe.forward``: a loss that is made outside of the pipeline, in one process and under a mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import assert_same, batch, gradients, mlp, plain_step
from tests.support.ranks import Ranks


def under_mesh(model: nn.Module, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "mesh": ps.Mesh(), **options}
    return ps.Pipeline(ps.split(model, stages=options.pop("stages", dist.get_world_size())), **options)


def own_gradients(pipe: ps.Pipeline, expected: dict[str, Tensor | None]) -> None:
    """Of the parameters that this rank has; a tie may stand there under its first name alone."""
    ties = {name: tie.names[0] for tie in pipe.plan.ties for name in tie.names}
    own = gradients(pipe.named_parameters())
    assert own
    assert_same(own, {name: expected[ties.get(name, name)] for name in own})


def test_in_one_process_it_is_a_plain_call() -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with ps.Pipeline(ps.split(model, stages=2), microbatches=4) as pipe:
        F.mse_loss(pipe.forward(batch()), batch(seed=5)).backward()
    assert_same(gradients(model), expected.gradients)


def trains(rank: int, schedule: str, stages: int, recompute: str) -> None:
    torch.manual_seed(0)
    norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norms[0], nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), norms[1])
    plain = copy.deepcopy(model)
    with under_mesh(model, stages=stages, schedule=schedule, recompute=recompute, batchnorm="deferred") as pipe:
        for samples in (8, 10, 8):
            x, y = batch(samples), batch(samples, seed=5)
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            expected = torch.cat([plain(part) for part in theirs.tensor_split(4)])  # as micro-batches, for BatchNorm
            F.mse_loss(expected, y).backward()
            output = pipe.forward(mine)
            assert (output is not None) == pipe.has_last_stage
            if output is not None:
                assert_same(output.detach(), expected.detach())
                pipe.eval()  # a forward that runs again finds the modes that it found before
                F.mse_loss(output, y).backward()
                pipe.train()
            own_gradients(pipe, gradients(plain))
            if pipe.has_first_stage:
                assert_same(mine.grad, theirs.grad)
            pipe.zero_grad()
            plain.zero_grad()
            with torch.no_grad():
                pipe(x)
        assert int(pipe.state_dict().get("1.num_batches_tracked", 6)) == 6


@pytest.mark.parametrize(
    ("schedule", "stages", "recompute"), [("1f1b", 2, "never"), ("zbv", 4, "never"), ("interleaved", 4, "except_last")]
)
def test_the_last_rank_makes_the_loss_and_all_ranks_get_their_gradients(
    two: Ranks, schedule: str, stages: int, recompute: str
) -> None:
    two.check(trains, schedule, stages, recompute)


def mixed(rank: int) -> None:
    """Steps, calls and forwards of one pipeline, over a tie, with outputs of which one is not used."""

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, 2 * x, x.argmax(1)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Two())
    model[4].weight = model[0].weight
    expected = plain_step(model, batch(), None, lambda output, _: output[1].square().mean())
    with under_mesh(model, loss_fn=lambda output, y: output[1].square().mean()) as pipe:
        for kind in ("step", "forward", "call", "forward", "step"):
            if kind == "step":
                pipe.step(batch(), batch())
            elif kind == "forward":
                output = pipe.forward(batch())
                if output is not None:
                    output[1].square().mean().backward()
            else:
                with torch.no_grad():
                    pipe(batch())
                continue
            own_gradients(pipe, expected.gradients)
            pipe.clip_grad_norm_(1.0)
            pipe.zero_grad()


def test_steps_calls_and_forwards_follow_one_another(three: Ranks) -> None:
    three.check(mixed)


def nothing_to_train(rank: int) -> None:
    with under_mesh(mlp().requires_grad_(False)) as pipe:
        output = pipe.forward(batch())
        assert output is None or not output.requires_grad
        with torch.no_grad():
            pipe(batch())


def test_where_nothing_wants_a_gradient_nobody_waits_for_one(two: Ranks) -> None:
    two.check(nothing_to_train)


def half_precision(rank: int) -> None:
    model = mlp().bfloat16()
    expected = copy.deepcopy(model).float()
    F.mse_loss(expected(batch().bfloat16().float()), batch(seed=5)).backward()
    with under_mesh(model, accumulate="fp32") as pipe:
        output = pipe.forward(batch().bfloat16())
        if output is not None:
            F.mse_loss(output.float(), batch(seed=5)).backward()
        for name, p in pipe.named_parameters():
            assert p.grad is not None
            assert p.grad.dtype is torch.bfloat16
            torch.testing.assert_close(p.grad.float(), gradients(expected)[name], rtol=0.1, atol=2e-2)


def test_gradients_may_be_summed_in_single_precision(two: Ranks) -> None:
    two.check(half_precision)


def without_backward(rank: int) -> str:
    with under_mesh(mlp()) as pipe:
        with pytest.raises(ps.PipelineError, match="has had no backward") as raised:
            _ = pipe.forward(batch()) is None or pipe.forward(batch())
        return str(raised.value)


def test_a_backward_that_is_left_out_is_an_error_on_every_rank(two: Ranks) -> None:
    said = two.check(without_backward)
    assert all("rank 1" in text for text in said)


def twice(rank: int) -> None:
    with under_mesh(mlp()) as pipe:
        output = pipe.forward(batch())
        if output is not None:
            output.sum().backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="second time"):
                output.sum().backward()
        with torch.no_grad():
            pipe(batch())


def test_a_second_backward_is_refused_and_does_no_harm(two: Ranks) -> None:
    two.check(twice)


class Fault(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raised: Tensor = _Raise.apply(x)
        return raised


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def fails(rank: int, where: int) -> None:
    layers = list(mlp())
    layers.insert(where, Fault())
    with under_mesh(nn.Sequential(*layers)) as pipe:

        def forward_and_back() -> None:
            output = pipe.forward(batch())
            if output is not None:
                output.sum().backward()
                with torch.no_grad():
                    pipe(batch())

        with pytest.raises(ps.PipelineError, match="on purpose"):
            forward_and_back()


@pytest.mark.parametrize("where", [1, 7])
def test_a_failing_backward_reaches_every_rank(two: Ranks, where: int) -> None:
    two.check(fails, where)


def different(rank: int) -> str:
    with under_mesh(mlp(), loss_fn=F.mse_loss) as pipe:
        work = (lambda: pipe.step(batch(), batch())) if rank == 0 else (lambda: pipe.forward(batch()))
        with pytest.raises(ps.PipelineError) as raised:
            work()
        return str(raised.value)


def test_ranks_that_do_different_things_are_told(two: Ranks) -> None:
    assert all("runs a step of the pipeline, but this rank runs a forward" in text for text in two.check(different))


def replicas(rank: int) -> None:
    model = mlp()
    x, y = batch(8), batch(8, seed=5)
    expected = plain_step(model, x, y, F.mse_loss)
    with under_mesh(model, mesh=ps.Mesh(data=2, pipe=2), stages=2) as pipe:
        half = slice(0, 4) if rank < 2 else slice(4, 8)
        output = pipe.forward(x[half])
        if output is not None:
            (F.mse_loss(output, y[half]) / 2).backward()
        own_gradients(pipe, expected.gradients)


def test_replicas_sum_their_gradients(four: Ranks) -> None:
    four.check(replicas)


def accumulated(rank: int, parallel: bool) -> None:
    """A second backward adds to the sums over the replicas; and a step after it finds the parameters as they were."""
    from torch.distributed.fsdp import fully_shard

    def shard(stage: nn.Module, mesh: ps.Mesh) -> nn.Module:
        return fully_shard(stage, mesh=mesh["data"])

    model = mlp()
    plain = copy.deepcopy(model)
    x, y = batch(8), batch(8, seed=5)
    how = {"parallelize": shard} if parallel else {}
    plan, mesh = ps.split(model, stages=2), ps.Mesh(data=2, pipe=2)
    with ps.Pipeline(plan, F.mse_loss, microbatches=2, mesh=mesh, **how) as pipe:
        half = slice(0, 4) if rank < 2 else slice(4, 8)
        for scale in (1.0, 3.0):
            (scale * F.mse_loss(plain(x), y)).backward()
            output = pipe.forward(x[half])
            if output is not None:
                (scale * F.mse_loss(output, y[half]) / 2).backward()
        F.mse_loss(plain(x), y).backward()
        pipe.step(x[half], y[half])
        expected = gradients(plain)
        for name, parameter in pipe.named_parameters():
            grad = parameter.grad
            assert grad is not None
            assert_same(grad.full_tensor() if parallel else grad, expected[name])


@pytest.mark.parametrize("parallel", [False, True])
def test_replicas_sum_what_a_backward_adds_and_not_what_was_there(four: Ranks, parallel: bool) -> None:
    four.check(accumulated, parallel)


class Positive(nn.Module):
    """As many rows as there are positive values: nobody can tell before."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[x[:, 0] > 0]


class Adds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.weight * pair[0] + pair[1].sum()


def described(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Positive(), Adds())
    plain = copy.deepcopy(model)
    x, y = batch(8), batch(8, seed=5)
    plan = ps.split(model, balance=[2, 1])
    with ps.Pipeline(plan, F.mse_loss, microbatches=4, mesh=ps.Mesh(), dynamic=True) as pipe:
        for _ in range(2):  # steps and forwards of as many micro-batches have programs of their own
            pipe.step(x, y)
            output = pipe.forward(x)
            if output is not None:
                F.mse_loss(output, y).backward()
            for _ in range(2):
                F.mse_loss(torch.cat([plain(part) for part in x.split(2)]), y).backward()
            own_gradients(pipe, gradients(plain))


def test_messages_may_describe_themselves(two: Ranks) -> None:
    two.check(described)
