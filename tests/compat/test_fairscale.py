"""fairscale's ``Pipe``: where it is not torchgpipe's ``GPipe``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from penstock.compat import fairscale
from penstock.compat.fairscale.nn.pipe import Pipe, is_checkpointing, is_recomputing
from penstock.compat.fairscale.nn.pipe.balance import balance_by_time
from penstock.compat.fairscale.nn.pipe.pipe import verify_module
from penstock.compat.torchgpipe import GPipe
from tests.support.models import assert_same, batch, gradients, mlp


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), last)


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("balance", [[5], [2, 3], [1, 3, 1]])
def test_shared_parameters_on_one_device(checkpoint: str, balance: list[int]) -> None:
    model, plain = tied(), tied()
    pipe = Pipe(model, balance, devices=["cpu"] * len(balance), chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        for net in (plain, pipe):
            net(batch()).square().sum().backward()
    assert_same(list(gradients(pipe).values()), list(gradients(plain).values()))
    assert pipe[0].weight is pipe[-1].weight


def test_shared_parameters_on_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="module with duplicate parameters on distinct devices is not supported"):
        Pipe(tied(), [2, 3], devices=["cpu", "meta"])


def test_duplicate_layers_are_refused() -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        verify_module(nn.Sequential(layer, layer))
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
        Pipe(layer, [1])  # type: ignore[arg-type]


def test_messages_name_pipe() -> None:
    with pytest.raises(ValueError, match=r"balance is required[\s\S]*fairscale\.nn\.pipe\.balance"):
        Pipe(mlp())
    with pytest.raises(TypeError, match="because Pipe should manage device placement"):
        Pipe(mlp(), [7], devices=["cpu"]).cpu()


def test_attributes_and_keys_are_gpipes() -> None:
    pipe = Pipe(mlp(), [3, 4], devices=["cpu"] * 3, chunks=2)
    assert (pipe.balance, len(pipe.devices), pipe.chunks, pipe.checkpoint) == ([3, 4], 2, 2, "except_last")
    assert "partitions.1.4.weight" in pipe.state_dict()
    plain = copy.deepcopy(nn.Sequential(*pipe))
    assert_same(pipe(batch(5)), plain(batch(5)))
    assert not is_checkpointing()
    assert not is_recomputing()


def test_import_paths() -> None:
    assert fairscale.nn.Pipe is fairscale.nn.pipe.Pipe is Pipe
    assert issubclass(Pipe, GPipe)
    assert fairscale.nn.pipe.balance.balance_by_time is balance_by_time
    assert callable(fairscale.nn.pipe.skip.skippable)
    assert callable(fairscale.nn.model_parallel.initialize_model_parallel)
    with pytest.raises(AttributeError, match=r"Pipe and AsyncPipe, and nothing else of it: no nn\.MOELayer"):
        _ = fairscale.nn.MOELayer
