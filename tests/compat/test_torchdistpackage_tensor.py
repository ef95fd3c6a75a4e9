"""TorchDistPackage beside a pipeline: tensor ranks, and norms over all model ranks."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compat.torchdistpackage import clip_grad_norm_, forward_backward, tpc
from tests.compat.torchdistpackage_support import own_inputs, summed
from tests.support.models import assert_same, batch
from tests.support.ranks import Ranks

# ── tensor ranks ──────────────────────────────────────────────────────────────────────────────────────────────────


class Enter(torch.autograd.Function):
    """An input common to all tensor ranks enters their shards of a layer: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=tpc.get_group("tensor"))
        return grad


class Leave(torch.autograd.Function):
    """The parts' outputs are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=tpc.get_group("tensor"))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def tensor_parallel(rank: int) -> None:
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4, bias=False)) for _ in range(2))
    stage, half = tpc.get_pp_rank(), tpc.get_tp_rank()
    whole: Any = copy.deepcopy(plain[stage])
    up = nn.Parameter(whole[0].weight.data.chunk(2)[half].clone())
    bias = nn.Parameter(whole[0].bias.data.chunk(2)[half].clone())
    down = nn.Parameter(whole[2].weight.data.chunk(2, 1)[half].clone())

    def fwd_fn(values: Any) -> Any:
        x = values[0] if stage else values
        x = Leave.apply(F.linear(torch.tanh(F.linear(Enter.apply(x), up, bias)), down))  # type: ignore[no-untyped-call]
        return F.mse_loss(x, values[1]) if stage else x

    forward_backward(None, fwd_fn, None, own_inputs(batch(10), batch(10, seed=5)), 4)
    summed(nn.Sequential(*plain), batch(10), batch(10, seed=5), 4)
    mine: Any = plain[stage]
    assert_same(up.grad, mine[0].weight.grad.chunk(2)[half])
    assert_same(bias.grad, mine[0].bias.grad.chunk(2)[half])
    assert_same(down.grad, mine[2].weight.grad.chunk(2, 1)[half])
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    assert_same(clip_grad_norm_([up, bias, down], 0.1), expected)


def test_stages_over_several_tensor_ranks(four: Ranks) -> None:
    four.check(tensor_parallel)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Halves(nn.Module):
    """A layer whose weight is in two parts, on two tensor ranks, and whose bias both have."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)


def norms(rank: int, norm_type: float) -> None:
    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 4) for _ in range(2)], [torch.randn(4) for _ in range(2)]
    stage, half = tpc.get_pp_rank(), tpc.get_tp_rank()
    layer = Halves(torch.zeros(2, 4), torch.zeros(4))
    layer.weight.grad, layer.bias.grad = whole[0][stage][0].chunk(2)[half].clone(), whole[1][stage].clone()
    layer.bias.grad *= 1 + 1e-6 * half  # sums on a GPU come in any order
    plain = [nn.Parameter(torch.zeros_like(t)) for t in (whole[0][0][0], whole[0][1][0], *whole[1])]
    for parameter, grad in zip(plain, (whole[0][0][0], whole[0][1][0], *whole[1]), strict=True):
        parameter.grad = grad.clone()
    expected = nn.utils.clip_grad_norm_(plain, 1.0, norm_type)
    found = clip_grad_norm_(layer.parameters(), 1.0, norm_type)
    assert_same(found, expected)
    assert_same(layer.weight.grad, plain[stage].grad.chunk(2)[half])  # type: ignore[union-attr]
    assert_same(layer.bias.grad, plain[2 + stage].grad)
    if stage == 0:  # a rank without gradients takes part
        layer.zero_grad()
    assert_same(clip_grad_norm_(iter(layer.parameters()), 100.0, norm_type), _norm(plain[1::2], norm_type))
    if stage == 1 and half == 0:
        layer.weight.grad[0, 0] = math.inf  # type: ignore[index]
    with pytest.raises(RuntimeError, match=r"of the gradients is inf: they cannot be clipped"):
        clip_grad_norm_(layer.parameters(), 1.0, norm_type, error_if_nonfinite=True)


def _norm(parameters: list[nn.Parameter], norm_type: float) -> Tensor:
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    return torch.linalg.vector_norm(flat, norm_type)


@pytest.mark.parametrize("norm_type", [2.0, math.inf, 1.0])
def test_the_norm_is_that_of_the_whole_model(four: Ranks, norm_type: float) -> None:
    """The original added up norms of ranks."""
    four.check(norms, norm_type)


def distributed_tensors(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tpc.setup_process_groups([("pipe", 2), ("tensor", 2)])
    stage = tpc.get_pp_rank()
    mesh = DeviceMesh.from_group(tpc.get_group("tensor"), "cpu", tpc.get_ranks_in_group("tensor"))
    grads = [torch.randn(4, 4, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    plain = nn.Parameter(torch.zeros(4, 4))
    parameters = [plain]
    plain.grad = grads[stage].clone()
    for placement in (Shard(0), Replicate()):
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [placement]))
        parameter.grad = distribute_tensor(grads[2 + stage].clone(), mesh, [placement])
        parameters.append(parameter)
    expected = torch.stack([*grads, *grads[2:]]).norm()
    assert_same(clip_grad_norm_(parameters, 1.0), expected)
    assert_same(parameters[1].grad.full_tensor(), grads[2 + stage] / expected)  # type: ignore[union-attr]


def test_the_norm_with_distributed_tensors(four: Ranks) -> None:
    four.check(distributed_tensors)
