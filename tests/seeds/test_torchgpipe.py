"""The programs of torchgpipe's user guide (0.0.2), with changed imports and the ellipses filled in."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.compat.torchgpipe import GPipe, current_microbatch, is_recomputing
from penstock.compat.torchgpipe_balancing import balance_by_size, balance_by_time
from tests.support.models import assert_same, batch, gradients, labels

# All partitions may share one GPU.
pytestmark = pytest.mark.filterwarnings("ignore:.* partitions share .* GPU")


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def assert_matches_plain(model: GPipe, plain: nn.Module, input: Tensor, **tolerance: float) -> None:
    """Compare output and gradients with the plain model."""
    output = model(input.to(model.devices[0]))
    expected = plain(input)
    for one in (output, expected):
        one.square().sum().backward()
    assert_same(output.detach().cpu(), expected.detach(), **tolerance)
    found = [None if grad is None else grad.cpu() for grad in gradients(model).values()]
    assert_same(found, list(gradients(plain).values()), **tolerance)


# ── Applying GPipe ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_four_partitions_and_eight_microbatches(device_type: str) -> None:
    torch.manual_seed(0)
    a, b, c, d = linear(), nn.Tanh(), linear(), nn.Tanh()
    plain = copy.deepcopy(nn.Sequential(a, b, c, d))
    data_loader = [batch(16), batch(5), batch(16, seed=3)]

    model = nn.Sequential(a, b, c, d)
    model = GPipe(model, balance=[1, 1, 1, 1], chunks=8)

    for input in data_loader:
        output = model(input)

        assert output.device.type == device_type
        assert_same(output.cpu(), plain(input))
    assert_matches_plain(model, plain, batch(16), atol=1e-5)


def test_named_devices(device_type: str) -> None:
    model = nn.Sequential(linear(), linear(), linear(), linear())
    plain = copy.deepcopy(model)
    model = GPipe(
        model,
        balance=[1, 1, 1, 1],
        devices=[0, 0, 0, 0] if device_type == "cuda" else ["cpu"] * 4,  # Specify GPUs.
        chunks=8,
    )
    assert [device.type for device in model.devices] == [device_type] * 4
    assert_matches_plain(model, plain, batch(16), atol=1e-5)


def test_missing_devices_are_refused() -> None:
    if torch.cuda.device_count() > 7:
        pytest.skip("they are there")
    model = nn.Sequential(linear(), linear(), linear(), linear())
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda|device|NVIDIA"):
        GPipe(model, balance=[1, 1, 1, 1], devices=[4, 5, 6, 7], chunks=8)


# ── Input and Output Device ────────────────────────────────────────────────────────────────────────────────────────


def test_input_and_target_go_to_the_first_and_last_device(device_type: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    plain = copy.deepcopy(model)
    model = GPipe(model, balance=[2, 1], chunks=4)
    data_loader = [(batch(8, seed=s), labels(8, seed=s)) for s in range(3)]

    in_device = model.devices[0]
    out_device = model.devices[-1]

    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for input, target in data_loader:
        expected = F.cross_entropy(plain(input), target)
        expected.backward()

        # input on in_device
        input = input.to(in_device, non_blocking=True)

        # target on out_device
        target = target.to(out_device, non_blocking=True)

        # output on out_device
        output = model(input)
        loss = F.cross_entropy(output, target)
        loss.backward()

        assert output.device == loss.device
        assert_same(loss.detach().cpu(), expected.detach())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same([p.detach().cpu() for p in model.parameters()], [p.detach() for p in plain.parameters()], atol=1e-5)


# ── Automatic Balancing ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_balance_by_time(device_type: str) -> None:
    model = nn.Sequential(nn.MaxPool2d(56), nn.Flatten(), nn.Linear(48, 256), nn.Linear(256, 256), nn.Linear(256, 4))

    sample = torch.rand(128, 3, 224, 224)
    balance = balance_by_time(model, sample, partitions=4)

    plain = copy.deepcopy(model)
    model = GPipe(model, balance, chunks=8)

    assert len(balance) == 4
    assert sum(balance) == 5
    assert_matches_plain(model, plain, sample[:16], rtol=1e-3, atol=1e-4)


def test_balance_by_size(device_type: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, 4), linear(), linear())
    assert balance_by_size(model, batch(), partitions=2) == [1, 3]


# ── Restrictions ───────────────────────────────────────────────────────────────────────────────────────────────────


class ResNet(nn.Module):
    """A replacement of torchvision's, which is not a Sequential either."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv1(x)


def resnet101() -> ResNet:
    return ResNet()


def test_non_sequential_model_is_refused() -> None:
    model = resnet101()
    with pytest.raises(TypeError, match="non-sequential module cannot be partitioned"):
        GPipe(model, balance=[1], chunks=1)  # type: ignore[arg-type]


class MyModule(nn.Module):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return a + b - c


def test_layers_take_one_argument(device_type: str) -> None:
    model = nn.Sequential(linear(), MyModule(), linear())
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        model(batch())  # FAILS!
    model = GPipe(model, balance=[1, 2], chunks=2)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        model(batch())


class ExampleLayer(nn.Module):
    """A layer with one of the guide's signatures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input: Tensor | tuple[Tensor, Tensor]) -> object:
        one = input[0] + input[1] if isinstance(input, tuple) else input
        return {"tensor": one, "pair": (one, one), "dict": {"a": one}, "label": (one, "label")}[self.kind]


@pytest.mark.parametrize("kind", ["tensor", "pair"])
def test_tensor_or_tensors(device_type: str, kind: str) -> None:
    # OK
    model = GPipe(nn.Sequential(ExampleLayer(kind), ExampleLayer("tensor"), linear()), balance=[1, 1, 1], chunks=2)
    assert model(batch()).shape == (8, 4)
    assert GPipe(nn.Sequential(ExampleLayer("tensor")), balance=[1])((batch(), batch())).shape == (8, 4)


@pytest.mark.parametrize("kind", ["dict", "label"])
def test_other_structures_are_refused(device_type: str, kind: str) -> None:
    # Error
    model = GPipe(nn.Sequential(linear(), ExampleLayer(kind)), balance=[1, 1], chunks=2)
    with pytest.raises(TypeError, match="expected Tensor, but got"):
        model(batch())
    with pytest.raises(TypeError, match="positional argument"):
        model(batch(), batch())
    with pytest.raises(TypeError, match="expected Tensor, but got str"):
        model((batch(), "label"))


# ── Skip Connections ───────────────────────────────────────────────────────────────────────────────────────────────


def test_skip_connection_as_a_tuple(device_type: str) -> None:
    torch.manual_seed(0)
    layer1, layer2, layer3 = linear(), linear(), linear()

    class Layer1(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = layer1

        #         ┌────────────────┐
        # input --│-+-> layer1 ----│--> output
        #         │ '--------------│--> skip
        #         └────────────────┘
        def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
            return self.layer1(input), input

    class Layer2(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer2 = layer2

        #         ┌────────────────┐
        # input --│---> layer2 ----│--> output
        #  skip --│----------------│--> skip
        #         └────────────────┘
        def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            input, skip = input_and_skip
            return self.layer2(input), skip

    class Layer3(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer3 = layer3

        #         ┌────────────────┐
        # input --│---> layer3 --+-│--> output
        #  skip --│--------------' │
        #         └────────────────┘
        def forward(self, input_and_skip: tuple[Tensor, Tensor]) -> Tensor:
            input, skip = input_and_skip
            return self.layer3(input) + skip

    model = nn.Sequential(Layer1(), Layer2(), Layer3())
    plain = copy.deepcopy(model)

    model = GPipe(model, balance=[1, 1, 1], chunks=8)

    assert_matches_plain(model, plain, batch(16), atol=1e-5)


# ── Long Skip Connections ──────────────────────────────────────────────────────────────────────────────────────────

# The shared memory between Layer1 and Layer8.
skip_buf = None


class FailingLayer1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = linear()

    def forward(self, input: Tensor) -> Tensor:
        # Remember the skipping tensor.
        global skip_buf
        skip_buf = input

        return self.layer1(input)


class FailingLayer8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer8 = linear()

    def forward(self, input: Tensor) -> Tensor:
        # Retrieve the skipping tensor.
        global skip_buf
        skip = skip_buf

        # Release the shared memory.
        skip_buf = None

        # The tensor should be copied to the device manually.
        skip = skip.to(input.device)

        return self.layer8(input) + skip


def test_failing_example_is_refused(device_type: str) -> None:
    model = nn.Sequential(FailingLayer1(), *(linear() for _ in range(6)), FailingLayer8())
    model(batch())  # works in one piece
    with pytest.raises(ps.PlanError, match=r"reads the global variable 'skip_buf'.*several micro-batches.*skippable"):
        GPipe(model, balance=[1] * 8, chunks=8)


# The shared memory between Layer1 and Layer8 indexed by micro-batch.
skips: dict[Tensor | None, Tensor] = {}


class Layer1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = linear()

    def forward(self, input: Tensor) -> Tensor:
        # Remember the skipping tensor per micro-batch.
        skips[current_microbatch()] = input

        return self.layer1(input)


class Layer8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer8 = linear()

    def forward(self, input: Tensor) -> Tensor:
        # Retrieve the skipping tensor for the current micro-batch.
        skip = skips.pop(current_microbatch())

        # The tensor should be copied to the device manually.
        skip = skip.to(input.device)

        return self.layer8(input) + skip


@pytest.fixture
def eight_layers() -> Iterator[nn.Sequential]:
    """The guide's eight layers after one more, whose gradient also passes through the skip."""
    torch.manual_seed(0)
    skips.clear()
    yield nn.Sequential(linear(), Layer1(), *(linear() for _ in range(6)), Layer8())
    skips.clear()


@pytest.mark.parametrize("balance", [[2, 1, 1, 1, 1, 1, 1, 1], [1, 4, 4]])
def test_long_skip_by_microbatch(device_type: str, eight_layers: nn.Sequential, balance: list[int]) -> None:
    plain = copy.deepcopy(eight_layers)
    model = GPipe(eight_layers, balance=balance, chunks=8, checkpoint="never")
    assert_matches_plain(model, plain, batch(16), atol=1e-5)
    assert not skips


def test_long_skip_by_microbatch_with_recompute(device_type: str, eight_layers: nn.Sequential) -> None:
    model = GPipe(eight_layers, balance=[2, 1, 1, 1, 1, 1, 1, 1], chunks=8)
    with pytest.raises(RuntimeError, match=r"checkpoint='never'.*torchgpipe\.skip"):
        model(batch(16))


# ── Detecting Recomputation ────────────────────────────────────────────────────────────────────────────────────────


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0

    def forward(self, input: Tensor) -> Tensor:
        if not is_recomputing():
            self.counter += 1
        return input


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_counter_with_recompute(device_type: str, checkpoint: str) -> None:
    counter = Counter()
    model = GPipe(nn.Sequential(linear(), counter, linear()), balance=[1, 2], chunks=4, checkpoint=checkpoint)
    model(batch(8)).sum().backward()
    assert counter.counter == 4


def test_deferred_batch_norm_with_recompute(device_type: str) -> None:
    bn = nn.BatchNorm1d(4)
    model = GPipe(nn.Sequential(copy.deepcopy(bn), linear()), balance=[1, 1], chunks=4, deferred_batch_norm=True)
    model(batch(8)).sum().backward()
    bn(batch(8))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert_same(getattr(model[0], name).cpu(), getattr(bn, name))
