"""A recompute sees the buffers that the first run saw, and changes none."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from penstock.engine.recompute.buffers import BatchNormFreeze, BufferGuard
from penstock.errors import PlanError


def values(batch: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(seed)) * 2 + 1


def step(module: nn.Module, parts: list[Tensor], guard: BufferGuard, mode: object = "mode") -> None:
    """Run all forwards, then recompute them, last first: outputs and buffers are the same."""
    outputs, saved = [], []
    for part in parts:
        guard.before(mode)
        outputs.append(module(part))
        saved.append(guard.after())
    state = {name: tensor.clone() for name, tensor in module.named_buffers()}
    kept = dict(module.named_buffers())
    for part, output, record in reversed(list(zip(parts, outputs, saved, strict=True))):
        for _ in range(2):
            with guard.batchnorm_freeze, guard.restored(record):
                assert torch.equal(module(part), output)
    for name, tensor in module.named_buffers():
        assert tensor is kept[name]
        assert torch.equal(tensor, state[name]), name


def check(make: Callable[[], nn.Module], *shape: int) -> None:
    """Two steps with recomputes leave the module as two steps of a plain loop."""
    ours = make()
    plain = copy.deepcopy(ours)
    guard = BufferGuard(ours)
    for n in range(2):
        parts = [values(3, *shape, seed=10 * n + k) for k in range(3)]
        step(ours, parts, guard)
        for part in parts:
            plain(part)
    expected = dict(plain.named_buffers())
    for name, tensor in ours.named_buffers():
        assert torch.equal(tensor, expected[name]), name


class Counts(nn.Module):
    """A buffer that each forward changes, and that the output depends on, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("still", torch.ones(2))
        self.register_buffer("last", None)
        self.count: Tensor
        self.last: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.count.sum() + (0 if self.last is None else self.last)
        if self.way == "in place":
            self.count += 1
        elif self.way == "data":
            self.count.data.add_(1)
        elif self.way == "another tensor":
            self.count = self.count + 1
        elif self.way == "none before":
            self.last = x.detach().mean()
        return output


@pytest.mark.parametrize("way", ["in place", "data", "another tensor", "none before", "not at all"])
def test_a_users_buffer(way: str) -> None:
    check(lambda: nn.Sequential(nn.Linear(3, 3), Counts(way)), 3)


class Norm(nn.BatchNorm1d):
    """A forward of its own, whose output depends on the running statistics."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        return super().forward(x) + self.running_mean.clone()


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.BatchNorm1d(3), (3,)),
        (lambda: nn.BatchNorm1d(3, momentum=None), (3,)),
        (lambda: nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
        (lambda: nn.BatchNorm1d(3, track_running_stats=False), (3,)),
        (lambda: nn.SyncBatchNorm(3), (3, 2)),
        (lambda: nn.BatchNorm1d(3).eval(), (3,)),
        (lambda: Norm(3), (3,)),
        (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (3, 4)),
        (lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), (3,)),
        (lambda: nn.Sequential(nn.BatchNorm1d(3), Norm(3), Counts("in place"), nn.BatchNorm1d(3)), (3,)),
    ],
)
def test_layers_of_torch(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    check(make, *shape)


SINGLE, DOUBLE, HALF = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("dtype", "of_layer"), [(SINGLE, SINGLE), (DOUBLE, DOUBLE), (HALF, HALF), (HALF, SINGLE)])
def test_a_frozen_batchnorm_computes_the_same(dtype: torch.dtype, of_layer: torch.dtype, affine: bool) -> None:
    layer = nn.BatchNorm1d(3, affine=affine, dtype=of_layer)
    freeze = BatchNormFreeze(layer)
    x = values(64, 3).to(dtype)
    output = layer(x)
    state = copy.deepcopy(layer.state_dict())
    with freeze, freeze:
        assert torch.equal(layer(x), output)
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
    layer(x)  # updates again
    assert int(layer.num_batches_tracked) == 2


def test_freeze_leaves_layers_in_evaluation_mode_their_statistics() -> None:
    layer = nn.BatchNorm1d(3)
    freeze = BatchNormFreeze(layer)
    with freeze:
        layer(values(8, 3))
    layer(values(8, 3, seed=1))
    output = layer.eval()(values(8, 3))
    with freeze:
        assert torch.equal(layer(values(8, 3)), output)


def test_freeze_ends_with_an_error() -> None:
    layer = nn.BatchNorm1d(3)
    buffers = dict(layer._buffers)
    with pytest.raises(ValueError, match="more than 1 value"), BatchNormFreeze(layer):
        layer(values(1, 3))
    assert all(layer._buffers[name] is tensor for name, tensor in buffers.items())


def test_a_recompute_that_fails_restores_the_buffers() -> None:
    module = Counts("in place")
    guard = BufferGuard(module)
    guard.before(0)
    module(values(2, 2))
    saved = guard.after()
    count = module.count
    with pytest.raises(RuntimeError, match="must match"), guard.restored(saved):
        module(values(2, 2) + module(torch.zeros(2, 3)))
    assert module.count is count
    assert count.tolist() == [1, 1]


def test_a_buffer_in_two_modules_stays_one() -> None:
    a, b = Counts("in place"), Counts("in place")
    b.count = a.count
    check(lambda: nn.Sequential(a, b), 3)


def test_buffers_are_compared_again_in_a_new_mode() -> None:
    class Sometimes(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(size))
            self.count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            output = x + self.count[0]
            if self.training:
                self.count.data += 1
            return output

    module = Sometimes(3).eval()
    guard = BufferGuard(module)
    parts = [values(2, 3, seed=k) for k in range(3)]
    step(module, parts, guard, "eval")
    module.train()
    step(module, parts, guard, "train")
    module.eval()
    step(module, parts, guard, "eval")
    assert module.count.tolist() == [3, 3, 3]


def test_a_layer_that_is_unfrozen_later() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Norm(3))
    model[1].eval()  # frozen, while the model trains
    guard = BufferGuard(model)
    parts = [values(2, 3, seed=k) for k in range(3)]
    step(model, parts, guard)
    model[1].train()
    step(model, parts, guard)
    assert int(model[1].num_batches_tracked) == 3


class Rarely(nn.Module):
    """Changes its buffer for the first time when it is told to."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(size))
        self.table: Tensor
        self.now = False

    def forward(self, x: Tensor) -> Tensor:
        output = x + self.table[0]
        if self.now:
            self.table += 1
        return output


def test_a_small_buffer_may_change_later_on() -> None:
    module = Rarely(3)
    guard = BufferGuard(module)
    parts = [values(2, 3, seed=k) for k in range(3)]
    step(module, parts, guard)
    module.table.fill_(7)  # somebody else's doing, between steps
    step(module, parts, guard)
    module.now = True
    step(module, parts, guard)
    assert module.table.tolist() == [10, 10, 10]


def test_a_large_buffer_that_begins_to_change_is_an_error_once() -> None:
    module = Rarely(1 << 19)
    guard = BufferGuard(module)
    parts = [values(2, 1, seed=k) for k in range(3)]
    step(module, parts, guard)
    module.now = True
    with pytest.raises(PlanError, match=r"changed table \(2097152 bytes\).*run the step again"):
        step(module, parts, guard)
    step(module, parts, guard)


def test_unchanged_buffers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Tensor] = []
    clone = Tensor.clone

    def counting(tensor: Tensor) -> Tensor:
        copied.append(tensor)
        return clone(tensor)

    monkeypatch.setattr("penstock.engine.recompute.buffers.clone_buffer", counting)
    module = nn.Sequential(Counts("in place"), Rarely(1 << 19))
    guard = BufferGuard(module)
    sizes = []
    for _ in range(3):
        copied.clear()
        guard.before(None)
        module(values(2, 2))
        guard.after()
        sizes.append([tensor.numel() for tensor in copied])
    assert sizes == [[2, 2, 1 << 19], [2], [2]]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Callable[[], torch.no_grad]) -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), Norm(3), Counts("in place"))
    guard = BufferGuard(module)
    parts = [values(3, 3, seed=k).requires_grad_() for k in range(2)]
    with context():
        step(module, parts, guard)
    step(module, parts, guard)
    with guard.batchnorm_freeze:
        module(parts[0]).sum().backward()
    assert int(module[0].num_batches_tracked) == 4
