"""torchgpipe's ``DeferredBatchNorm``: by itself, and in a ``GPipe``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from tests.support.models import assert_same, gradients

convert = DeferredBatchNorm.convert_deferred_batch_norm


def tilted(samples: int = 8) -> Tensor:
    """Channels of unlike variance, samples of unlike mean."""
    x = torch.rand(samples, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    return x * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1) + 2.0 ** torch.arange(samples).view(-1, 1, 1, 1)


def in_chunks(module: nn.Module, x: Tensor, chunks: int = 4) -> Tensor:
    return torch.cat([module(part) for part in x.chunk(chunks)])


def statistics(bn: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in bn.named_buffers() if name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("momentum", [0.1, 0.5, None])
def test_running_statistics_are_those_of_the_mini_batch(momentum: float | None) -> None:
    bn = nn.BatchNorm2d(3, momentum=momentum)
    deferred = convert(copy.deepcopy(bn), chunks=4)
    for samples in (8, 12):
        bn(tilted(samples))
        in_chunks(deferred, tilted(samples))
        assert_same(statistics(deferred), statistics(bn))
    x = tilted()
    assert_same(deferred.eval()(x), bn.eval()(x))


def test_micro_batches_are_normalised_by_their_own_statistics() -> None:
    bn = nn.BatchNorm2d(3)
    deferred = convert(copy.deepcopy(bn), chunks=4)
    x, y = tilted().requires_grad_(), tilted().requires_grad_()
    outputs = in_chunks(bn, x), in_chunks(deferred, y)
    assert_same(outputs[1], outputs[0])
    for output in outputs:
        output.square().mean().backward()
    assert_same(y.grad, x.grad)
    assert_same(gradients(deferred), gradients(bn))
    assert not deferred.sum.requires_grad


def test_conversion_keeps_parameters_buffers_and_modes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.BatchNorm1d(3)))
    model[1][0].eval()
    before = copy.deepcopy(model.state_dict())
    weight = model[1][1].weight
    converted = convert(model, chunks=2)
    assert converted is model
    assert all(isinstance(layer, DeferredBatchNorm) for layer in model[1])
    assert [layer.training for layer in model[1]] == [False, True]
    assert model[1][1].weight is weight
    assert_same({k: v for k, v in model.state_dict().items() if "sum" not in k}, before)
    assert convert(model[1][0], chunks=2) is model[1][0]
    other = convert(model[1][0], chunks=3)
    assert other is not model[1][0]
    assert other.chunks == 3
    plain = nn.BatchNorm2d(3, track_running_stats=False)
    assert convert(plain, 2) is plain


def test_checkpoints_have_torchgpipes_keys() -> None:
    deferred = DeferredBatchNorm(3, chunks=4)
    names = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked", "sum", "sum_squares"}
    assert set(deferred.state_dict()) == names


@pytest.mark.parametrize("again", [True, False])
def test_copies_made_within_a_mini_batch_are_independent(again: bool) -> None:
    deferred = convert(nn.BatchNorm2d(3), chunks=2)
    bn = nn.BatchNorm2d(3)
    x = tilted()
    deferred(x[:4])
    twin = copy.deepcopy(deferred)
    (twin if again else deferred)(x[4:])
    bn(x)
    assert_same(statistics(twin if again else deferred), statistics(bn))
    assert int((deferred if again else twin).num_batches_tracked) == 0


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_in_a_gpipe_a_mini_batch_may_have_any_number_of_micro_batches(checkpoint: str, by_hand: bool) -> None:
    """torchgpipe commits after ``chunks`` micro-batches: batches of 5, and of 3 samples, leak into the next ones."""
    bn = nn.BatchNorm2d(3)
    module = nn.Sequential(nn.Identity(), copy.deepcopy(bn))
    if by_hand:
        module = convert(module, chunks=4)
    model = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint, deferred_batch_norm=not by_hand)
    assert isinstance(model[1], DeferredBatchNorm)
    for samples in (8, 5, 7, 3, 8):
        model(tilted(samples)).sum().backward()
        bn(tilted(samples))
        assert_same(statistics(model[1]), statistics(bn))
    assert_same(model.eval()(tilted()), bn.eval()(tilted()))
    assert gradients(model)["partitions.1.1.weight"] is not None


def test_a_large_mean_does_not_hide_the_variance() -> None:
    """The difference of two large sums would be noise."""
    bn = nn.BatchNorm1d(2)
    model = GPipe(nn.Sequential(copy.deepcopy(bn)), [1], devices=["cpu"], chunks=4, deferred_batch_norm=True)
    x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0)) + 1e4
    model(x)
    bn(x)
    assert_same(statistics(model[0]), statistics(bn), rtol=1e-3)


def test_recomputed_forwards_do_not_count() -> None:
    """With batchnorm="microbatch" the layer itself defers, and ignores recomputed forwards."""
    bn, x = nn.BatchNorm2d(3), tilted()
    deferred = convert(copy.deepcopy(bn), chunks=4)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), deferred)
    plan = ps.split(model, balance=[1, 1])
    with ps.Pipeline(plan, lambda output: output.square().mean(), microbatches=4, recompute="always") as pipe:
        pipe.step(x)
    bn(model[0](x).detach())
    assert_same(statistics(deferred), statistics(bn))
