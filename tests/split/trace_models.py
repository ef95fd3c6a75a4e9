"""Models that are cut by tracing: small, and each with one thing that is hard about it."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.split.marks import BeginBlock, Block, BlockFunction, CutPoint, cut

Pair = namedtuple("Pair", "hidden total")


class Residual(nn.Module):
    """Three residual blocks with a batch norm each, and a cut point in each form around them."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(3))
        self.head = nn.Linear(width, 4)
        self.first = CutPoint()
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))
        self.loose = [CutPoint()]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.stem(x).relu())
        for i, part in enumerate(self.parts):
            x = x + part(x)
            x = self.cuts[i](x) if i < 2 else self.loose[0](x)
        return self.head(x)


class UNet(nn.Module):
    """Long skips over every cut: what goes down at level i comes up at level i."""

    def __init__(self, depth: int = 3, width: int = 6) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.middle = nn.Linear(width, width)
        self.up = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = cut(layer(x).tanh())
            skips.append(x)
        x = cut(self.middle(x))
        for layer in self.up:
            x = cut(layer(torch.cat([x, skips.pop()], dim=-1)).tanh())
        return x


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.marks = {"middle": CutPoint()}

    def forward(self, x: Tensor) -> Tensor:
        x = self.marks["middle"](self.a(x))
        return self.b(x).relu()


class Odd(nn.Module):
    """A module that cannot be traced, and has no marks: it stays whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


class Nested(nn.Module):
    """Marks in nested modules, one of them called from an ``nn.Sequential``, next to modules that stay whole."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.odd = Odd(width)
        self.body = nn.Sequential(Inner(width), nn.ReLU(), Inner(width))
        self.head = Odd(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(cut(self.body(self.odd(x))))


class Positional(nn.Module):
    """A root-level parameter and buffers, an embedding used as a head, sizes that cross, tensors made on the way."""

    def __init__(self, words: int = 11, width: int = 6, length: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("hidden", torch.ones(width), persistent=False)
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.shift = torch.full((width,), 0.25)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.embed(ids) * math.sqrt(self.positions.shape[1]) + self.positions[:length]
        x = cut(x)
        x = self.mix(x.reshape(-1, x.shape[-1])) * self.scale + self.shift
        x = cut(x)
        x = x.view(batch, length, -1) + torch.arange(length, device=ids.device)[None, :, None]
        x = self.norm(x) * self.hidden
        x = cut(x)
        return F.linear(x, self.embed.weight)


class Dropping(nn.Module):
    """``self.training`` is read in a forward that is traced: by dropout, and by a branch."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.aux = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Any:
        early = self.a(x)
        x = cut(F.dropout(early, 0.5, self.training))
        x = cut(self.b(x) + torch.rand(x.shape[-1], device=x.device))
        if self.training:
            return x, self.aux(early)
        return x


class Twice(nn.Module):
    """One module called in two places, known under two names."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.shared = nn.Linear(width, width)
        self.other = nn.Linear(width, width)
        self.alias = self.shared

    def forward(self, x: Tensor) -> Tensor:
        x = cut(self.shared(x).relu())
        x = cut(self.other(x))
        return self.alias(x)


class Arguments(nn.Module):
    """Several inputs, keywords, ``None``, plain values, lists; a dict comes out."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, width)

    def forward(
        self, x: Tensor, extra: list[Tensor], *, mask: Tensor | None = None, power: int = 1, twice: bool = False,
        **named: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        x = cut(self.a(x))
        for item in extra:
            x = x + item
        if mask is not None:
            x = x * mask
        x = cut(self.b(x))
        if twice:
            x = self.c(x)
        for value in named.values():
            x = x - value
        x = cut(self.c(x) ** power)
        return {"out": x, "parts": [x.sum(), None], "masked": mask is not None}


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, Tensor]


class Outputs(nn.Module):
    """Tuples of all sorts inside, a dataclass outside; asserts, unpacking, in-place changes, no_grad and autocast."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.a = nn.Linear(width, 2 * width)
        self.b = nn.Linear(width, width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Output:
        assert x.dim() == 3, "a batch of sequences"
        out, (h, c) = self.lstm(x)
        out = cut(out)
        with torch.no_grad():
            peak = out.abs().amax()
        left, right = self.a(out).chunk(2, dim=-1)
        left = 2 * left
        left += right
        pair = Pair(left, self.relu(right * 2))
        left = cut(left)
        left = left.reshape(*left.shape[:-1], 2, -1).flatten(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(left)
        y = y.float() / peak
        y[:, 0] = 0
        return Output(cut(y) + pair.total.mean(), (h, c))


# -- the network of a tutorial on pipelining by blocks, in three styles of annotation, and its wrapper with the loss


class ConvLayer(nn.Module):
    def __init__(self, channels: int, filters: int, kernel: int, pool: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel)
        self.pool = nn.MaxPool2d(pool)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.pool(self.conv(x)))


class _Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer1 = ConvLayer(1, 10, 5, 2)
        self.layer2 = ConvLayer(10, 20, 5, 2)
        self.layer3 = nn.Linear(320, 256)
        self.layer3_act = nn.ReLU()
        self.layer4 = nn.Linear(256, 10)


class ScopedDigits(_Digits):
    """``with Block``."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.places: list[Any] = [*devices, *[None] * (4 - len(devices))]

    def forward(self, x: Tensor) -> Tensor:
        with Block("B1", device=self.places[0]):
            x = self.layer1(x)
        with Block("B2", device=self.places[1]):
            x = self.layer2(x)
        with Block("B3", device=self.places[2]):
            x = x.view(-1, 320)
            x = self.layer3_act(self.layer3(x))
        with Block("B4", device=self.places[3]):
            x = self.layer4(x)
        return x


class DecoratedLayer(ConvLayer):
    @BlockFunction("B2")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DecoratedDigits(_Digits):
    """``@BlockFunction`` on methods, and on the forward of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer2 = DecoratedLayer(10, 20, 5, 2)

    @BlockFunction("B1")
    def begin(self, x: Tensor) -> Tensor:
        return self.layer1(x)

    @BlockFunction("B3")
    def middle(self, x: Tensor) -> Tensor:
        return self.layer3_act(self.layer3(x.view(-1, 320)))

    @BlockFunction("B4")
    def end(self, x: Tensor) -> Tensor:
        return self.layer4(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.middle(self.layer2(self.begin(x))))


class BegunDigits(_Digits):
    """``BeginBlock`` on the layers, and on a function."""

    def __init__(self) -> None:
        super().__init__()
        BeginBlock(self.layer1, "B1")
        BeginBlock(self.layer2, "B2")
        self.flat = BeginBlock(lambda x: x.view(-1, 320), "B3")
        self.layer4 = BeginBlock(self.layer4, "B4")

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(self.layer2(self.layer1(x)))
        return self.layer4(self.layer3_act(self.layer3(x)))


class WithLoss(nn.Module):
    """The output, and with labels the loss too, in the last block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, args: Tensor, labels: Tensor | None = None) -> Any:
        output = self.model(args)
        if labels is None:
            return output
        with Block("B4"):
            loss = self.loss(output, labels)
        return output, loss


# -- a language model with cut points in a plain list, and the head's weight tied to the embedding's


class Sample(nn.Module):
    def __init__(self, layers: int = 3, words: int = 13, width: int = 8) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 16, batch_first=True) for _ in range(layers))
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.word_embeddings.weight
        self.cutpoints = [CutPoint() for _ in range(layers + 1)]

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.word_embeddings(ids)
        x = self.cutpoints[0](x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = self.cutpoints[i + 1](x)
        logits = self.lm_head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Bare(nn.Module):
    """Nothing is marked; a nested module, a Sequential, a list, and parts that nothing uses."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.trunk = Trunk(width)
        self.tail = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.unused = Odd(width)
        self.register_buffer("steps", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.stem(x))
        return self.tail(x + self.trunk(x) * self.scale)


class Trunk(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Odd(width) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.bias
        return x
