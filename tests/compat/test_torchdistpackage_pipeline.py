"""TorchDistPackage's ``forward_backward``: any number of ranks, and the plain model's result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compat.torchdistpackage import forward_backward, forward_eval, partition_uniform, tpc
from penstock.engine.microbatch import microbatch_sizes
from penstock.schedule.registry import build
from tests.compat.torchdistpackage_support import line, own_inputs, summed
from tests.support.models import assert_same, batch, gradients, labels, mlp
from tests.support.ranks import Ranks

SAMPLES = (10, 3, 8, 1)


# ── training and evaluation ──────────────────────────────────────────────────────────────────────────────────────


def trains(rank: int, n: int, m: int) -> None:
    at = line(n)
    model = mlp(5)
    plain = copy.deepcopy(model)
    mine, theirs = nn.Sequential(*partition_uniform(model)), partition_uniform(plain)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (mine, plain)]

    def fwd_fn(values: Any) -> Any:
        if not tpc.is_last_in_pipeline_group():
            return mine(values)
        output, target = values
        return F.mse_loss(mine(output), target)

    for samples in SAMPLES:  # tails are kept, and batches may be smaller than the number of micro-batches
        x, y = batch(samples), batch(samples, seed=5)
        plain.zero_grad()
        expected = summed(plain, x, y, m)
        found = forward_backward(optimizers[0], fwd_fn, None, own_inputs(x, y), m, dtype=torch.float16)
        assert_same(list(gradients(mine).values()), list(gradients(theirs).values()))
        if at == n - 1:
            assert_same(found, expected)
        pipeline = tpc.pipeline
        for optimizer in optimizers:
            optimizer.step()
        output = forward_backward(
            None, lambda v: mine(v[0] if isinstance(v, list) else v), None, own_inputs(x, y), m, forward_only=True
        )
        if at == n - 1:
            last = microbatch_sizes(samples, m)[-1]
            assert_same(output, plain(x[-last:]).detach())
            assert not output.requires_grad
        output = forward_eval(mine, x if at == 0 else [], dtype=torch.float16)
        assert output.shape[0] == samples
        if at == n - 1:
            assert_same(output, plain(x).detach())
        assert tpc.pipeline is pipeline  # groups are made once
    assert_same(list(mine.state_dict().values()), list(theirs.state_dict().values()))


@pytest.mark.parametrize("m", [1, 4])
def test_three_ranks(three: Ranks, m: int) -> None:
    """The original failed on rank 1 of three."""
    three.check(trains, 3, m)


def test_four_ranks(four: Ranks) -> None:
    four.check(trains, 4, 4)


def alone(rank: int) -> None:
    tpc.setup_process_groups([("data", 3), ("pipe", 1)])
    model = mlp(2)
    plain = copy.deepcopy(model)
    x, y = batch(10), batch(10, seed=5)
    found = forward_backward(None, lambda v: F.mse_loss(model(v[0]), v[1]), None, [x, y], 4)
    assert_same(found, summed(plain, x, y, 4))
    assert_same(gradients(model), gradients(plain))


def test_a_pipeline_of_one(three: Ranks) -> None:
    three.check(alone)


def order(rank: int, n: int, m: int) -> None:
    at = line(n)
    layer, done, inside = nn.Linear(4, 4), [], [0, 0]

    def fwd_fn(value: Any) -> Any:
        done.append("F")
        inside[0] += 1
        inside[1] = max(inside)
        output = layer(value)
        return output.sum() if at == n - 1 else output

    def bwd_fn(output: Any, grad: Any) -> None:
        done.append("B")
        inside[0] -= 1
        torch.autograd.backward(output, grad)

    forward_backward(None, fwd_fn, bwd_fn, own_inputs(batch(m), batch(m))[: at == 0], m)
    assert done == [action.kind for action in build("1f1b", n, m).orders[at]]
    assert inside == [0, n - at]


def test_order_and_activations_in_flight_are_1f1b(four: Ranks) -> None:
    four.check(order, 4, 8)


# ── what crosses ─────────────────────────────────────────────────────────────────────────────────────────────────


class WideModel(nn.Module):
    """Stages with several values between them, of many types, of which the shapes depend on the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 6).to(torch.bfloat16), nn.Linear(6, 4)

    def first(self, x: Tensor) -> tuple[Any, ...]:
        hidden = self.a(x)
        few = hidden[: 1 + len(x) // 2]
        return torch.arange(len(x)), hidden.to(torch.bfloat16), None, {"few": few.double(), "name": "first"}, few > 0

    def second(self, ids: Tensor, hidden: Tensor, nothing: None, named: dict[str, Any], mask: Tensor) -> list[Any]:
        assert nothing is None
        assert (ids.dtype, hidden.dtype, mask.dtype) == (torch.int64, torch.bfloat16, torch.bool)
        assert named["few"].dtype == torch.float64
        assert named["name"] == "first"
        return [self.b(hidden).float(), (named["few"] * mask).sum(), ids]

    def third(self, hidden: Tensor, number: Tensor, ids: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.c(hidden), target) + number.float() * ids.sum()

    def whole(self, x: Tensor, target: Tensor) -> Tensor:
        return self.third(*self.second(*self.first(x)), target)


def crosses(rank: int) -> None:
    at = line(3)
    model = WideModel()
    plain = copy.deepcopy(model)
    parts = [model.first, lambda values: model.second(*values), lambda values: model.third(*values)]
    for samples in (10, 7):
        x, y = batch(samples), labels(samples)
        sizes = list(microbatch_sizes(samples, 3))
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            plain.whole(part, target).backward()
        forward_backward(None, parts[at], None, own_inputs(x, y), 3)
    name = "abc"[at]
    assert_same(gradients(model.get_submodule(name)), gradients(plain.get_submodule(name)))


def test_several_values_cross_with_their_types_and_shapes(three: Ranks) -> None:
    three.check(crosses)


def backwards(rank: int) -> None:
    """Every rank's own backward: gradients come in the output's structure, and None means the loss."""
    at = line(3)
    layer, seen = nn.Linear(4, 4), []
    torch.manual_seed(1)

    def fwd_fn(values: Any) -> Any:
        if at == 0:
            return layer(values), torch.ones(2, dtype=torch.int64), layer(values)
        if at == 1:
            used, numbers, unused = values
            return {"x": layer(used) * numbers.sum(), "unused": layer(unused)}
        return layer(values["x"]).sum()

    def bwd_fn(output: Any, grad: Any) -> None:
        seen.append(grad)
        if at == 2:
            (10 * output).backward()
        elif at == 1:
            output["x"].backward(grad["x"])
        else:
            output[0].backward(grad[0])

    forward_backward(None, fwd_fn, bwd_fn, [batch(4)] if at == 0 else [], 2)
    assert len(seen) == 2
    if at == 2:
        assert seen == [None, None]
        assert_same(layer.bias.grad, torch.full((4,), 40.0))
    elif at == 1:
        assert seen[0]["unused"] is None
        assert seen[0]["x"].shape == (2, 4)
    else:
        assert [type(part).__name__ for part in seen[0]] == ["Tensor", "NoneType", "NoneType"]


def test_custom_backward_functions(three: Ranks) -> None:
    three.check(backwards)


def frozen(rank: int) -> None:
    """A stage in front that nothing is trained in has no backward to run: least of all that of a loss."""
    at = line(3)
    layer, seen = nn.Linear(4, 4).requires_grad_(at == 2), []

    def bwd_fn(output: Any, grad: Any) -> None:
        seen.append(grad)
        torch.autograd.backward(output, grad)

    forward_backward(None, lambda v: layer(v).sum() if at == 2 else layer(v), bwd_fn, [batch(4)] if at == 0 else [], 2)
    assert seen == ([None, None] if at == 2 else [])
    assert (layer.weight.grad is not None) == (at == 2)


def test_frozen_stages(three: Ranks) -> None:
    three.check(frozen)


def changes(rank: int) -> None:
    """In-place changes of inputs stay inside the stage."""
    at = line(3)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain, x = copy.deepcopy(model), batch(8)
    for part in x.split(2):
        h = part
        for layer in plain:
            h = layer(h.clone().mul_(2).tanh_())
        h.sum().backward()

    def fwd_fn(value: Tensor) -> Tensor:
        output = model[at](value.mul_(2).tanh_())
        return output.sum() if at == 2 else output

    forward_backward(None, fwd_fn, None, [x.clone()] if at == 0 else [], 4)
    assert_same(gradients(model[at]), gradients(plain[at]))


def test_inputs_changed_in_place(three: Ranks) -> None:
    three.check(changes)


def mixed(rank: int) -> None:
    """Plain values go to every micro-batch, and inputs of other sizes are cut in their own proportion."""
    at = line(3)
    seen: list[Any] = []

    def fwd_fn(values: Any) -> Any:
        seen.append(values)
        return torch.zeros(()) if at == 2 else batch(1)

    own = [[batch(8), 3, None], [], [batch(16)]][at]
    forward_backward(None, fwd_fn, None, own, 4, forward_only=True)
    assert len(seen) == 4
    if at == 0:
        assert [(len(a), b, c) for a, b, c in seen] == [(2, 3, None)] * 4
    elif at == 1:
        assert_same(seen[0], batch(1))
    else:
        assert [len(target) for _, target in seen] == [4] * 4
    seen.clear()
    last = forward_backward(None, fwd_fn, None, [[batch(3)], [7], ["a", "b"]][at], 4, forward_only=True)
    assert_same(last, torch.zeros(()) if at == 2 else batch(1))
    assert len(seen) == 3  # as many as there are samples, also where there are none
    if at == 1:
        assert seen[-1][1] == 7
    seen.clear()
    forward_backward(None, fwd_fn, None, [], 2, forward_only=True)  # nobody has inputs
    assert len(seen) == 2
    assert at > 0 or seen == [[], []]


def test_inputs_of_other_kinds(three: Ranks) -> None:
    three.check(mixed)
