"""``GPipe`` trains as the plain model does: outputs, gradients, buffers, whatever the balance, chunks and mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.compat.torchgpipe import GPipe
from penstock.compat.torchgpipe.skip import pop, skippable, stash
from tests.support.models import assert_same, batch, gradients

CHECKPOINTS = ["always", "except_last", "never"]


@skippable(stash=["early", "none"])
class Early(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        yield stash("early", y)
        yield stash("none", None)
        return torch.tanh(y)


@skippable(pop=["early", "none"])
class Late(nn.Module):
    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        none = yield pop("none")
        assert none is None
        return x * early


class Fn(nn.Module):
    def __init__(self, fn: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.fn, self.layers = fn, nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        return self.fn(x, *self.layers)


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def tuples() -> nn.Sequential:
    """The first value of the pairs is an integer: torchgpipe cannot go back then, in any mode but "never"."""
    return nn.Sequential(
        Fn(lambda x, f: (x.argmax(1), f(x)), linear()),
        Fn(lambda pair, f: (pair[0], torch.tanh(f(pair[1])), pair[1]), linear()),
        Fn(lambda triple, f: f(triple[1]) * triple[2] + triple[0].unsqueeze(1), linear()),
    )


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "linears": lambda: nn.Sequential(linear(), nn.Tanh(), linear(), nn.ReLU(inplace=True), linear()),
    "tuples": tuples,
    "skips": lambda: nn.Sequential(linear(), Early(), linear(), nn.Tanh(), Late()),
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), nn.Tanh(), linear(), nn.Dropout(0.0)),
    "two outputs": lambda: nn.Sequential(linear(), nn.Tanh(), Fn(lambda x, f: (f(x), x), linear())),
}


def balances(layers: int) -> list[list[int]]:
    return [[layers], [1] * layers, [1, layers - 1], [layers - 1, 1]]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_outputs_and_gradients_are_the_plain_models(kind: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    original = MODELS[kind]()
    for balance in balances(len(original)):
        for samples, chunks in ((6, 1), (6, 3), (5, 3), (2, 8)):
            plain, module = copy.deepcopy(original), copy.deepcopy(original)
            model = GPipe(module, balance, devices=["cpu"] * len(balance), chunks=chunks, checkpoint=checkpoint)
            results = []
            for net in (plain, model):
                x = batch(samples).requires_grad_()
                output = net(x)
                rows = output if isinstance(output, tuple) else (output,)
                sum((i + 1) * row.square().sum() for i, row in enumerate(rows)).backward()
                results.append((output, x.grad, list(gradients(net).values())))
            assert_same(results[1], results[0])


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_any_optimizer_trains_the_models_own_parameters(checkpoint: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    plain, layers = copy.deepcopy(module), list(module)
    model = GPipe(module, [2, 2, 1], devices=["cpu"] * 3, chunks=4, checkpoint=checkpoint)
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (model, plain)]
    for step in range(5):
        for net, optimizer in zip((model, plain), optimizers, strict=True):
            F.mse_loss(net(batch(7, seed=step)), batch(7, seed=step + 50)).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    assert list(model) == layers
    assert_same(nn.Sequential(*layers).state_dict(), plain.state_dict(), atol=1e-5)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_plain_batch_norm_counts_micro_batches_once(checkpoint: str) -> None:
    """In torchgpipe, also those that run again: 8 updates for a mini-batch of 4."""
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.BatchNorm1d(4), linear())
    plain = copy.deepcopy(module)
    model = GPipe(module, [1, 2], devices=["cpu"] * 2, chunks=4, checkpoint=checkpoint)
    for _ in range(2):
        model(batch(8)).square().sum().backward()
        torch.cat([plain(part) for part in batch(8).split(2)]).square().sum().backward()
    assert_same(dict(model[1].named_buffers()), dict(plain[1].named_buffers()))
    assert int(model[1].num_batches_tracked) == 8
    assert_same(list(gradients(model).values()), list(gradients(plain).values()))


def test_layers_keep_the_modes_that_they_are_put_into() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5), linear())
    model = GPipe(module, [2, 2], devices=["cpu"] * 2, chunks=2, checkpoint="always")
    plain = copy.deepcopy(nn.Sequential(*model))
    model.eval()
    plain.eval()
    assert_same(model(batch()), plain(batch()))
    model.train()
    model[1].eval()  # frozen statistics
    model(batch()).sum().backward()
    assert int(model[1].num_batches_tracked) == 0
    assert not torch.equal(model(batch()), model(batch()))  # dropout


def test_dropout_in_a_forward_that_runs_again_is_the_same() -> None:
    """Also where the first forward was one in evaluation mode, which draws nothing."""

    def drop(x: Tensor) -> Tensor:
        for _ in range(20):
            x = F.dropout(x, p=0.05, training=training[0])
        return x

    training = [False]
    layers = [Fn(drop), nn.Dropout(0.3), Fn(drop)]
    model = GPipe(nn.Sequential(*layers), [1, 2], devices=["cpu"] * 2, chunks=5, checkpoint="always").eval()
    with torch.no_grad():
        model(torch.rand(10, 10))
    model.train()
    training[0] = True
    for _ in range(2):
        x = torch.rand(10, 10, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert x.grad is not None
        assert 0 < (y == 0).sum() < 100
        assert torch.equal(y == 0, x.grad == 0)
        rows = (y == 0).tolist()
        assert len({tuple(row) for row in rows}) > 1


def test_autocast_holds_in_all_partitions() -> None:
    """In torchgpipe's threads it is off."""
    torch.manual_seed(0)
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    for checkpoint in CHECKPOINTS:
        plain = copy.deepcopy(module)
        model = GPipe(copy.deepcopy(module), [1, 2], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        for net in (plain, model):
            with torch.autocast("cpu", torch.bfloat16):
                output = net(batch())
            assert output.dtype is torch.bfloat16
            output.float().sum().backward()
        assert_same(list(gradients(model).values()), list(gradients(plain).values()), rtol=2e-2, atol=2e-2)


def test_backward_may_run_twice() -> None:
    """In torchgpipe: pop from an empty deque."""
    for checkpoint in CHECKPOINTS:
        model = GPipe(nn.Sequential(linear(), linear()), [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)
        loss = model(batch()).square().sum()
        loss.backward(retain_graph=True)
        once = gradients(model)
        loss.backward()
        assert_same(gradients(model), {name: 2 * grad for name, grad in once.items() if grad is not None})


def test_inputs_modified_in_place() -> None:
    """In torchgpipe twice, where a forward runs again: the gradient is 3 instead of 2, silently."""

    def change(pair: tuple[Tensor, Tensor]) -> Tensor:
        foo, bar = pair
        bar.add_(1)
        return foo * bar

    for checkpoint in CHECKPOINTS:
        model = GPipe(nn.Sequential(Fn(change)), [1], devices=["cpu"], checkpoint=checkpoint)
        foo = torch.tensor([1.0], requires_grad=True)
        model((foo, torch.tensor([1.0]))).backward()
        assert foo.grad is not None
        assert foo.grad.item() == 2


def test_a_python_autograd_function_that_returns_its_input_may_stand_anywhere() -> None:
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    module = nn.Sequential(Fn(lambda x: Same.apply(x)), Fn(lambda x: Same.apply(x)))
    for checkpoint in CHECKPOINTS:
        x = batch().requires_grad_()
        y = GPipe(module, [1, 1], devices=["cpu"] * 2, chunks=2, checkpoint=checkpoint)(x)
        y.sum().backward()
        assert_same(y.detach(), x.detach())
        assert_same(x.grad, torch.ones(8, 4))


@pytest.mark.cuda
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("kind", MODELS)
def test_on_a_gpu(kind: str, checkpoint: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    torch.manual_seed(0)
    original = MODELS[kind]()
    plain = copy.deepcopy(original).cuda()
    balance = [1, len(original) - 1]
    model = GPipe(original, balance, devices=[0, 0], chunks=3, checkpoint=checkpoint)
    results = []
    for net in (plain, model):
        x = batch(6).cuda().requires_grad_()
        output = net(x)
        rows = output if isinstance(output, tuple) else (output,)
        sum((i + 1) * row.square().sum() for i, row in enumerate(rows)).backward()
        results.append((output, x.grad, list(gradients(net).values())))
    assert_same(results[1], results[0], rtol=1e-3, atol=1e-4)
