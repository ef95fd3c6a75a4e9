"""Every deferred op, with all its options, gives the gradients of the plain op."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.engine.weightgrad import WeightGradQueue, make_recorder, ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)][: 1 + torch.cuda.is_available()]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _defer_small_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LARGE", 0)
    monkeypatch.setattr(ops, "_LARGE_ON_CUDA", 0)


class Use(nn.Module):
    """Uses parameters of its own in any way."""

    def __init__(self, op: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.op = op
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, **dict(self.named_parameters()))


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape)


def compare(
    module: nn.Module,
    inputs: list[Tensor],
    *,
    deferred: int | None = None,
    whole: bool = True,
    around: Callable[[], Any] = torch.enable_grad,
    grad: Callable[[Tensor], Tensor] = torch.randn_like,
    **tolerance: float,
) -> None:
    """Two micro-batches: the first makes ``.grad``, the second adds to it.

    ``deferred`` ops must be in the queue, and take care of the ``whole`` weight gradient.
    """
    plain = copy.deepcopy(module)
    queue = WeightGradQueue(make_recorder(module))
    for x in inputs:
        mine, theirs = (x.detach().requires_grad_(x.requires_grad) for _ in range(2))
        with around():
            wanted = plain(theirs)
        with around(), queue.recording():
            output = module(mine)
        assert output.dtype == wanted.dtype
        torch.testing.assert_close(output, wanted, **tolerance)
        if not wanted.requires_grad:
            assert not output.requires_grad
            continue
        g = grad(wanted)
        wanted.backward(g)
        before = {name: p.grad for name, p in module.named_parameters()}
        with queue.deferring():
            output.backward(g)
        if deferred is not None:
            assert len(queue) == deferred
        if deferred and whole and all(p.requires_grad for p in module.parameters()):
            assert all(p.grad is before[name] for name, p in module.named_parameters()), "computed in I"
        queue.run()
        assert len(queue) == 0
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, **tolerance)
        for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None and q.grad is not None:
                assert p.grad.dtype == p.dtype
                assert p.grad.layout == q.grad.layout
                if p.grad.layout == torch.strided:
                    assert p.grad.stride() == q.grad.stride()
                torch.testing.assert_close(p.grad, q.grad, **tolerance)


def batches(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(2)]


LINEAR = [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6)]


@pytest.mark.parametrize("shape", LINEAR, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear(shape: tuple[int, ...], bias: bool, device: str) -> None:
    compare(nn.Linear(6, 4, bias).double().to(device), batches(*shape, device=device), deferred=1)


@pytest.mark.parametrize("shape", LINEAR, ids=str)
def test_functional_products(shape: tuple[int, ...]) -> None:
    w, b = rand(6, 4).double(), rand(4).double()
    compare(Use(lambda x, w: x @ w, w=w), batches(*shape), deferred=1)
    compare(Use(lambda x, w: torch.matmul(x, other=w), w=w), batches(*shape), deferred=1)
    compare(Use(lambda x, w, b: F.linear(x, w, bias=b), w=w.t(), b=b), batches(*shape), deferred=1)
    if len(shape) == 2:
        compare(Use(lambda x, w: x.mm(w), w=w), batches(*shape), deferred=1)
        compare(Use(lambda x, w, b: torch.addmm(b, x, w), w=w, b=b), batches(*shape), deferred=1)


def test_products_that_are_left_to_autograd() -> None:
    w, b = rand(6, 4).double(), rand(4).double()
    left = {
        "scaled": Use(lambda x, w, b: torch.addmm(b, x, w, beta=2), w=w, b=b),
        "weight first": Use(lambda x, w: w.t() @ x.t(), w=w),
        "broadcast bias": Use(lambda x, w, b: F.linear(x, w.clone(), b), w=w.t(), b=b[:1]),
        "computed weight": Use(lambda x, w: F.linear(x, w * 2), w=w.t()),
        "vector": Use(lambda x, w: x @ w[:, 0], w=w),
        "batch of weights": Use(lambda x, w: x @ w, w=w.expand(2, 6, 4).clone()),
    }
    for module in left.values():
        compare(module, batches(3, 6), deferred=0)


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "input", "input and bias"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 6),
        lambda: nn.Conv1d(3, 3, 2),
        lambda: nn.ConvTranspose1d(3, 3, 2),
        lambda: nn.LayerNorm(6),
        lambda: nn.GroupNorm(1, 3),
    ],
    ids=["linear", "conv", "transposed", "layer", "group"],
)
def test_frozen(make: Callable[[], nn.Module], frozen: str, device: str) -> None:
    module = make().double().to(device)
    inputs = batches(4, 3, 6, device=device)
    if "weight" in frozen or frozen == "both":
        module.weight.requires_grad_(False)
    if "bias" in frozen or frozen == "both":
        module.bias.requires_grad_(False)
    if "input" in frozen:
        inputs = [x.detach() for x in inputs]
    compare(module, inputs, deferred=0 if frozen in ("weight", "both") else 1)


def test_everything_frozen_leaves_no_node() -> None:
    module = nn.Linear(6, 4).requires_grad_(False)
    queue = WeightGradQueue(make_recorder(module))
    with queue.recording():
        assert module(torch.randn(2, 6)).grad_fn is None
        assert "Linear" not in type(module(torch.randn(2, 6, requires_grad=True)).grad_fn).__name__


CONVS: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": "same"},
    {"padding": "valid", "bias": False},
    {"groups": 2, "padding": 2},
    {"padding": 1, "padding_mode": "circular"},
]


@pytest.mark.parametrize("options", CONVS, ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [(2,), ()], ids=["batch", "alone"])
def test_conv(dims: int, options: dict[str, Any], batch: tuple[int, ...], device: str) -> None:
    module = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, **options).double().to(device)
    compare(module, batches(*batch, 4, *[7, 6, 5][:dims], device=device), deferred=1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_conv_with_uneven_sides_is_left_to_autograd() -> None:
    compare(nn.Conv2d(2, 3, (2, 3), padding="same").double(), batches(2, 2, 5, 5), deferred=0)


@pytest.mark.parametrize(
    "options", [{}, {"stride": 3, "padding": 1, "output_padding": 2}, {"groups": 2, "dilation": 2, "bias": False}]
)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("batch", [(2,), ()], ids=["batch", "alone"])
def test_conv_transpose(dims: int, options: dict[str, Any], batch: tuple[int, ...], device: str) -> None:
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    module = kinds[dims - 1](4, 6, 3, **options).double().to(device)
    compare(module, batches(*batch, 4, *[5, 4, 3][:dims], device=device), deferred=1)


def test_conv_of_an_empty_batch_and_of_channels_last() -> None:
    compare(nn.Conv2d(4, 6, 3).double(), batches(0, 4, 5, 5), deferred=1)
    module = nn.Conv2d(4, 6, 3).double().to(memory_format=torch.channels_last)
    images = [x.detach().contiguous(memory_format=torch.channels_last) for x in batches(2, 4, 5, 5)]
    compare(module, [x.requires_grad_() for x in images], deferred=1)


@pytest.mark.parametrize(
    ("options", "deferred"),
    [
        ({}, 1),
        ({"padding_idx": 2}, 1),
        ({"padding_idx": -1}, 1),
        ({"scale_grad_by_freq": True}, 1),
        ({"scale_grad_by_freq": True, "padding_idx": 3}, 1),
        ({"max_norm": 0.5}, 0),
        ({"sparse": True}, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0,)], ids=str)
def test_embedding(options: dict[str, Any], deferred: int, shape: tuple[int, ...], device: str) -> None:
    if device == "cuda" and 0 in shape and not {"max_norm", "scale_grad_by_freq"}.isdisjoint(options):
        pytest.skip("torch 2.11 cannot do this itself")
    inputs = [torch.randint(7, shape, device=device) for _ in range(2)]
    compare(nn.Embedding(7, 3, **options).double().to(device), inputs, deferred=deferred)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.LayerNorm(6),
    "layer over two dimensions": lambda: nn.LayerNorm((4, 6)),
    "layer without bias": lambda: nn.LayerNorm(6, bias=False),
    "rms": lambda: nn.RMSNorm(6),
    "rms with eps": lambda: nn.RMSNorm((4, 6), eps=1e-3),
    "group": lambda: nn.GroupNorm(2, 4),
    "instance": lambda: nn.GroupNorm(4, 4),
}


@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS.keys())
@pytest.mark.parametrize("batch", [3, 0])
def test_norm(make: Callable[[], nn.Module], batch: int, device: str) -> None:
    module = make().double().to(device)
    with torch.no_grad():
        for p in module.parameters():
            p.uniform_(0.5, 2)
    compare(module, batches(batch, 4, 6, device=device), deferred=1)


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(6, elementwise_affine=False), lambda: nn.GroupNorm(2, 4, affine=False)]
)
def test_norm_without_parameters(make: Callable[[], nn.Module]) -> None:
    compare(make().double(), batches(3, 4, 6), deferred=0)


def test_small_norms_are_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for make in NORMS.values():
        compare(make().double(), batches(3, 4, 6), deferred=0)


OPS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(6, 6), (3, 4, 6)),
    "conv": (lambda: nn.Conv2d(4, 4, 3), (3, 4, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 4, 3), (3, 4, 6, 5)),
    "layer": (lambda: nn.LayerNorm(6), (3, 4, 6)),
    "rms": (lambda: nn.RMSNorm(6), (3, 4, 6)),
    "group": (lambda: nn.GroupNorm(2, 4), (3, 4, 6)),
}


@pytest.mark.parametrize(("make", "shape"), OPS.values(), ids=OPS.keys())
def test_non_contiguous_inputs_and_gradients(
    make: Callable[[], nn.Module], shape: tuple[int, ...], device: str
) -> None:
    inputs = [x.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for x in batches(*shape, device=device)]

    def strided(like: Tensor) -> Tensor:
        return torch.randn(*like.shape, 2, dtype=like.dtype, device=device)[..., 0]

    def expanded(like: Tensor) -> Tensor:
        return torch.ones((), dtype=like.dtype, device=device).expand_as(like)

    for grad in (strided, expanded):
        compare(make().double().to(device), [x.requires_grad_() for x in inputs], grad=grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("make", "shape"), OPS.values(), ids=OPS.keys())
def test_other_types(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    compare(make().to(dtype).to(device), batches(*shape, dtype=dtype, device=device), deferred=1, **tolerance)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's, of the plain rms_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("make", "shape"), OPS.values(), ids=OPS.keys())
def test_autocast(make: Callable[[], nn.Module], shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    """Inputs in any type: what an earlier op made of them."""
    module = make().double() if dtype is torch.float64 else make()
    if device == "cuda" and dtype is torch.float64:
        pytest.skip("autocast norms want one type")
    compare(
        module.to(device),
        batches(*shape, dtype=dtype, device=device),
        around=lambda: torch.autocast(device, torch.bfloat16),
        rtol=2e-2,
        atol=5e-2,
    )


def test_autocast_products_and_repeated_modules() -> None:
    w = rand(6, 6)
    linear = nn.Linear(6, 6)
    for module, deferred in (
        (Use(lambda x, w: x @ w, w=w), 1),
        (Use(lambda x, w, b: torch.addmm(b, x, w), w=w, b=rand(6)), 1),
        (nn.Sequential(nn.Embedding(5, 6), linear, linear, nn.ReLU(), linear), 4),
    ):
        integers = isinstance(module, nn.Sequential)
        x = torch.randint(5, (8,)) if integers else torch.randn(8, 6, requires_grad=True)
        around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
        compare(module, [x, x], around=around, deferred=deferred, rtol=2e-2, atol=5e-2)


class Attention(nn.Module):
    def __init__(self, keys: Callable[[Tensor], Tensor], width: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, bias=bias, kdim=width, batch_first=True)
        self.keys = keys

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.inner(x, self.keys(x), x)
        return torch.cat([out, weights], -1)


def test_attention() -> None:
    """A linear is deferred where it takes a whole parameter, not a piece of the one for q, k and v."""
    for module, deferred in (
        (Attention(lambda x: x), 2),
        (Attention(lambda x: x, bias=False), 2),
        (Attention(lambda x: x.flip(1)), 1),
        (Attention(lambda x: x[..., :6], 6), 1),
        (Attention(lambda x: x[..., :6], 6, bias=False), 4),
    ):
        for training in (True, False):
            module.inner.zero_grad()
            module.double().train(training)
            compare(module, batches(2, 5, 8), deferred=deferred, whole=deferred > 1)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(training: bool, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first).double()
    compare(layer.train(training), batches(2, 5, 8), deferred=6)


def test_transformer_decoder_layer() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x.flip(1))  # type: ignore[no-any-return]

    compare(Decoder().double(), batches(2, 5, 8))
