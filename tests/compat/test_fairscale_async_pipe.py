"""fairscale's ``AsyncPipe``: one process per stage, and the plain model's result."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.compat.fairscale.nn import model_parallel
from penstock.compat.fairscale.nn.pipe import AsyncPipe, LazyModule
from penstock.compat.fairscale.nn.pipe.skip import pop, skippable, stash
from tests.support.models import assert_same, batch, gradients, mlp, plain_step
from tests.support.ranks import Ranks


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def own(expected: dict[str, Any], rank: int, balance: list[int]) -> dict[str, Any]:
    """Of the plain model's names, those of a rank's layers, as they are called in its ``AsyncPipe``."""
    first = sum(balance[:rank])
    return {f"0.{k}": v for k, v in expected.items() if first <= int(k.split(".")[0]) < first + balance[rank]}


def state(pipe: AsyncPipe) -> dict[str, Tensor]:
    """Each tensor once: the partition has two names."""
    found = pipe.state_dict()
    names = [name for name in found if name.startswith("0.")]
    assert set(found) == {*names, *(f"partition.{name[2:]}" for name in names)}
    return {name: found[name] for name in names}


def trains(rank: int, checkpoint: str, lazy: bool, balance: list[int]) -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    layers = [LazyModule(lambda layer=layer: copy.deepcopy(layer)) for layer in model] if lazy else model
    pipe = AsyncPipe(layers, balance, group=everyone(), chunks=4, checkpoint=checkpoint, worker_map={0: "a"})
    assert len(pipe) == len(list(pipe)) == balance[rank]
    assert pipe[-1] is pipe.partitions[0].module[-1]
    assert pipe.final_stage == (rank == len(balance) - 1)
    assert set(state(pipe)) == set(own(plain.state_dict(), rank, balance))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (pipe, plain)]
    for samples in (8, 5, 8):
        x, y = batch(samples), batch(samples, seed=5)
        output = pipe(x)
        if pipe.final_stage:
            loss = F.mse_loss(output, y)
            loss.backward()
            assert_same(loss.detach(), F.mse_loss(plain(x), y).detach())
            with pytest.raises(ValueError, match="back_helper should only be called on non-final stages"):
                pipe.back_helper(output)
        else:
            assert isinstance(output, list)
            pipe.back_helper(output)
        F.mse_loss(plain(x), y).backward()
        assert_same(gradients(pipe), own(gradients(plain), rank, balance))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        pipe.eval()
        output = pipe(x)
        if pipe.final_stage:
            assert_same(output, plain(x).detach())
        pipe.train()
    assert_same(state(pipe), own(plain.state_dict(), rank, balance))
    assert pipe.pipeline is not None
    pipe.pipeline.close()


@pytest.mark.parametrize(("checkpoint", "lazy"), [("except_last", True), ("always", False), ("never", True)])
def test_training_equals_the_plain_model(three: Ranks, checkpoint: str, lazy: bool) -> None:
    three.check(trains, checkpoint, lazy, [2, 3, 2])


def groups(rank: int) -> None:
    with pytest.raises(ps.PlanError, match="context_parallel_size must be 1, got 2"):
        model_parallel.initialize_model_parallel(1, 3, context_parallel_size=2)
    assert not model_parallel.model_parallel_is_initialized()
    model_parallel.initialize_model_parallel(1, 3, context_parallel_size=1, timeout=timedelta(minutes=2))
    assert model_parallel.model_parallel_is_initialized()
    assert model_parallel.get_pipeline_parallel_ranks() == [0, 1, 2]
    assert model_parallel.get_pipeline_parallel_group().rank() == rank
    assert model_parallel.get_model_parallel_world_size() == 1
    assert model_parallel.get_data_parallel_rank() == 0
    assert model_parallel.get_model_parallel_src_rank() == rank
    if rank == 2:
        with pytest.warns(UserWarning, match="More ranks than partitions, some ranks unused"):
            pipe = AsyncPipe(mlp(2), [2, 1])
        assert pipe.pipeline is None
        assert pipe.partition is None
        assert len(pipe) == 0
        assert pipe(batch()).shape == (8, 4)
    else:
        pipe = AsyncPipe(mlp(2), [2, 1])
        expected = plain_step(mlp(2), batch(), batch(seed=5), F.mse_loss)
        output = pipe(batch())
        if pipe.final_stage:
            F.mse_loss(output, batch(seed=5)).backward()
        assert_same(gradients(pipe), own(expected.gradients, rank, [2, 1]))
        assert pipe.pipeline is not None
        pipe.pipeline.close()
    with pytest.raises(IndexError, match=r"too few ranks to hold given partitions \(ranks: 3, partitions: 4\)"):
        AsyncPipe(mlp(), [2, 2, 2, 1])
    model_parallel.destroy_model_parallel()
    with pytest.raises(AssertionError, match="pipeline parallel group is not initialized"):
        AsyncPipe(mlp(), [3, 4])


def test_groups_and_unused_ranks(three: Ranks) -> None:
    three.check(groups)


@skippable(stash=["early"])
class Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        yield stash("early", y)
        return torch.tanh(y)


@skippable(pop=["early"])
class Late(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        return x * early


def skips(rank: int) -> None:
    """In fairscale, an error: skips do not cross processes there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Early(), nn.BatchNorm1d(4), nn.Linear(4, 4), Late())
    layers = [LazyModule(lambda layer=layer: layer) for layer in copy.deepcopy(model)]
    pipe = AsyncPipe(layers, [2, 2, 1], group=everyone(), chunks=2, deferred_batch_norm=True)
    x, y = batch(), batch(seed=5)
    output = pipe(x)
    expected = torch.cat([model(part) for part in x.split(4)])
    F.mse_loss(expected, y).backward()
    if pipe.final_stage:
        F.mse_loss(output, y).backward()
    assert_same(gradients(pipe), own(gradients(model), rank, [2, 2, 1]))
    if rank == 1:
        assert int(pipe[0].num_batches_tracked) == 1
    assert pipe.pipeline is not None
    pipe.pipeline.close()


def test_skips_cross_processes_and_statistics_are_the_mini_batchs(three: Ranks) -> None:
    three.check(skips)


def wrong(rank: int) -> None:
    one = nn.Linear(4, 4)
    faults: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "number of chunks must be positive integer", [1], {"chunks": 0}),
        (ValueError, "checkpoint is not one of 'always', 'except_last', or 'never'", [1], {"checkpoint": "no"}),
        (ValueError, r"different length \(module: 1, sum of balance: 2\)", [2], {}),
        (ValueError, r"all balance numbers must be positive integer \(balance: \[2, -1\]\)", [2, -1], {}),
    ]
    for kind, text, balance, options in faults:
        with pytest.raises(kind, match=text):
            AsyncPipe(nn.Sequential(one), balance, group=everyone(), **options)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        AsyncPipe([one, one], [1, 1], group=everyone())
    with pytest.raises(TypeError, match=r"layer must be nn\.Module or callable"):
        AsyncPipe([one, 3, nn.Linear(4, 4)], [1, 1, 1], group=everyone())
    pipe = AsyncPipe(nn.Sequential(one, nn.Linear(4, 4), nn.Linear(4, 4)), [1, 1, 1], group=everyone())
    with pytest.raises(TypeError, match="expected Tensor, but got str"):
        pipe("hello")


def test_errors_are_fairscales(three: Ranks) -> None:
    three.check(wrong)


class Positive(nn.Module):
    """The samples whose sum is positive: how many that are, nobody knows before."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1) > 0] if x.detach().sum().item() else x


def by_value(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Positive(), nn.Linear(4, 4))
    expected = torch.cat([copy.deepcopy(model)(part) for part in batch().split(2)])
    pipe = AsyncPipe(model, [1, 1, 1], group=everyone(), chunks=4)
    output = pipe(batch())
    if pipe.final_stage:
        assert_same(output.detach(), expected.detach())
        output.sum().backward()
    assert pipe.pipeline is not None
    pipe.pipeline.close()


def test_layers_may_depend_on_values(three: Ranks) -> None:
    three.check(by_value)


class Boom(Exception):
    pass


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise Boom("on purpose")


def raises(rank: int) -> None:
    """In fairscale the other ranks would wait for ever."""
    pipe = AsyncPipe(nn.Sequential(nn.Linear(4, 4), Raises(), nn.Linear(4, 4)), [1, 1, 1], group=everyone())
    with pytest.raises(Boom if rank == 1 else ps.PipelineError, match="on purpose"):
        pipe(batch())


def test_an_exception_reaches_every_rank_and_its_own_as_it_is(three: Ranks) -> None:
    three.check(raises)
