"""Models as people write them: a GPT, a ResNet, a U-Net, recurrent networks, a mixture of experts, a generator."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo_models import BATCH, Entry, ids, noise


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 99
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 32


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.n_head, self.n_embd = config.n_head, config.n_embd
        bias = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", bias.view(1, 1, config.block_size, config.block_size))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT: a ModuleDict, tied weights, an assertion on the length, a loss if there are targets."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(config.vocab_size, config.n_embd),
                wpe=nn.Embedding(config.block_size, config.n_embd),
                drop=nn.Dropout(0.1),
                h=nn.ModuleList([GPTBlock(config) for _ in range(config.n_layer)]),
                ln_f=nn.LayerNorm(config.n_embd),
            )
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = idx.size()
        assert t <= self.config.block_size, f"Cannot forward sequence of length {t}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss


class BasicBlock(nn.Module):
    def __init__(self, in_planes: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride), nn.BatchNorm2d(planes))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    """The ResNet of pytorch-cifar: functional ops between the layers, an in-place addition."""

    def __init__(self, num_blocks: tuple[int, ...] = (2, 2, 2, 2)) -> None:
        super().__init__()
        self.in_planes = 8
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.layer1 = self._make_layer(8, num_blocks[0], 1)
        self.layer2 = self._make_layer(16, num_blocks[1], 2)
        self.layer3 = self._make_layer(32, num_blocks[2], 2)
        self.layer4 = self._make_layer(64, num_blocks[3], 2)
        self.linear = nn.Linear(64, 10)

    def _make_layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        layers = []
        for s in [stride] + [1] * (blocks - 1):
            layers.append(BasicBlock(self.in_planes, planes, s))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        out = F.avg_pool2d(out, 4)
        out = out.view(out.size(0), -1)
        return self.linear(out)


class DoubleConv(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, padding=1), nn.GroupNorm(2, outside), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.double_conv(x)


class UNet(nn.Module):
    """Skips in a list, with the padding of odd sizes that depends on shapes."""

    def __init__(self, features: tuple[int, ...] = (8, 16, 32)) -> None:
        super().__init__()
        self.downs, self.ups, self.pool = nn.ModuleList(), nn.ModuleList(), nn.MaxPool2d(2)
        channels = 3
        for feature in features:
            self.downs.append(DoubleConv(channels, feature))
            channels = feature
        for feature in reversed(features):
            self.ups.append(nn.ConvTranspose2d(feature * 2, feature, 2, stride=2))
            self.ups.append(DoubleConv(feature * 2, feature))
        self.bottleneck = DoubleConv(features[-1], features[-1] * 2)
        self.final_conv = nn.Conv2d(features[0], 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip_connections = []
        for down in self.downs:
            x = down(x)
            skip_connections.append(x)
            x = self.pool(x)
        x = self.bottleneck(x)
        skip_connections = skip_connections[::-1]
        for idx in range(0, len(self.ups), 2):
            x = self.ups[idx](x)
            skip = skip_connections[idx // 2]
            if x.shape != skip.shape:
                x = F.interpolate(x, size=skip.shape[2:])
            x = self.ups[idx + 1](torch.cat((skip, x), dim=1))
        return self.final_conv(x)


class LSTMLanguageModel(nn.Module):
    """The word language model of the PyTorch examples; it returns the hidden state, too."""

    def __init__(self, vocab: int = 99, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(vocab, width)
        self.rnn = nn.LSTM(width, width, layers, batch_first=True)
        self.decoder = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Any:
        output, hidden = self.rnn(self.drop(self.encoder(tokens)))
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1), hidden


class StackedGRU(nn.Module):
    """One GRU per layer with residuals, then attention pooling."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(layers))
        self.score, self.head = nn.Linear(width, 1), nn.Linear(width, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for rnn in self.layers:
            y, _ = rnn(x)
            x = x + y
        return self.head((torch.softmax(self.score(x), 1) * x).sum(1))


class Seq2Seq(nn.Module):
    """A recurrent encoder and decoder with attention, one step of the decoder at a time."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(99, width), nn.Embedding(99, width)
        self.encoder = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.bridge, self.cell = nn.Linear(2 * width, width), nn.GRUCell(3 * width, width)
        self.query, self.out = nn.Linear(width, 2 * width), nn.Linear(3 * width, 99)

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        memory, state = self.encoder(self.source(src))
        hidden = torch.tanh(self.bridge(torch.cat([state[0], state[1]], dim=1)))
        outputs = []
        for t in range(trg.shape[1]):
            weights = torch.softmax(torch.bmm(memory, self.query(hidden).unsqueeze(2)), dim=1)
            context = (weights * memory).sum(1)
            hidden = self.cell(torch.cat([self.target(trg[:, t]), context], dim=1), hidden)
            outputs.append(self.out(torch.cat([hidden, context], dim=1)))
        return torch.stack(outputs, dim=1)


class Experts(nn.Module):
    """Top-2 routing with a loop over experts and index_add, as in Mixtral's first release."""

    def __init__(self, width: int, number: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, number, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(number)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = F.softmax(self.gate(flat), dim=-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            if rows.numel() > 0:
                out.index_add_(0, rows, expert(flat[rows]) * weights[rows, slots, None])
        load = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        return out.view_as(x), (load * probabilities.mean(0)).sum() * len(self.experts)


class MixtureOfExperts(nn.Module):
    """Returns the loss with an auxiliary loss of all layers, and the logits."""

    def __init__(self, width: int = 32, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(99, width), nn.Linear(width, 99)
        self.layers = nn.ModuleList(Experts(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x, auxiliary = self.embed(tokens), 0.0
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y, loss = layer(norm(x))
            x, auxiliary = x + y, auxiliary + loss
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.transpose(1, 2), targets) + 0.01 * auxiliary, "logits": logits}


class Generator(nn.Module):
    """The generator of DCGAN: transposed convolutions in one Sequential, BatchNorm, conditioned on a class."""

    def __init__(self, z: int = 16, width: int = 8) -> None:
        super().__init__()
        self.label = nn.Embedding(10, z)
        self.main = nn.Sequential(
            nn.ConvTranspose2d(z, width * 4, 4, 1, 0, bias=False), nn.BatchNorm2d(width * 4), nn.ReLU(True),
            nn.ConvTranspose2d(width * 4, width * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * 2), nn.ReLU(True),
            nn.ConvTranspose2d(width * 2, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip

    def forward(self, z: Tensor, label: Tensor) -> Tensor:
        return self.main((z * self.label(label))[:, :, None, None])


class StyleGenerator(nn.Module):
    """A mapping network whose style modulates each block, and a sum of images over resolutions."""

    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.mapping = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2)) for _ in range(3)))
        self.const = nn.Parameter(torch.randn(1, width, 4, 4))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.styles = nn.ModuleList(nn.Linear(16, 2 * width) for _ in range(blocks))
        self.to_rgb = nn.ModuleList(nn.Conv2d(width, 3, 1) for _ in range(blocks))

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(F.normalize(z, dim=1))
        x, image = self.const.repeat(z.shape[0], 1, 1, 1), None
        for i, (conv, style, rgb) in enumerate(zip(self.convs, self.styles, self.to_rgb, strict=True)):
            if i > 0:
                x = F.interpolate(x, scale_factor=2)
            scale, shift = style(w)[:, :, None, None].chunk(2, dim=1)
            x = F.leaky_relu(conv(x) * (1 + scale) + shift, 0.2)
            image = rgb(x) if image is None else F.interpolate(image, scale_factor=2) + rgb(x)
        return image


class DenseNet(nn.Module):
    """Every layer sees the features of all earlier ones."""

    def __init__(self, growth: int = 8, layers: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(8 + i * growth, growth, 3, padding=1) for i in range(layers))
        self.head = nn.Linear(8 + layers * growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(F.relu(layer(torch.cat(features, 1))))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class TwoTowers(nn.Module):
    """A recommender: embeddings of users and items in a dict, two towers, a dot product, an early return."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(50, width), "item": nn.Embedding(60, width)})
        tower = lambda: nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))  # noqa: E731
        self.user_tower, self.item_tower, self.temperature = tower(), tower(), nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: dict[str, Tensor], return_vectors: bool = False) -> Any:
        user = self.user_tower(self.tables["user"](batch["user"]))
        item = self.item_tower(self.tables["item"](batch["item"]).mean(1))
        if return_vectors:
            return user, item
        return {"score": (user * item).sum(-1) * self.temperature.exp(), "norm": user.norm(dim=-1)}


class Perceiver(nn.Module):
    """Latents that read the inputs in every block; the same block is used twice."""

    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.latents, self.embed = nn.Parameter(torch.randn(8, width)), nn.Linear(12, width)
        self.cross = nn.ModuleList(nn.MultiheadAttention(width, 4, batch_first=True) for _ in range(depth))
        self.shared = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True)
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        latents = self.latents.expand(x.shape[0], -1, -1)
        for cross in self.cross:
            latents = latents + cross(latents, x, x, need_weights=False)[0]
            latents = self.shared(latents)
        return self.head(latents.mean(1))


def entries() -> list[Entry]:
    tokens = lambda: (ids(BATCH, 16),)  # noqa: E731
    image = lambda: (noise(BATCH, 3, 32, 32),)  # noqa: E731
    pair = lambda: (ids(BATCH, 12), ids(BATCH, 12, seed=3))  # noqa: E731
    return [
        Entry("GPT", lambda: GPT(GPTConfig()), pair, loss_fn=lambda out: out[1]),
        Entry("GPT without targets", lambda: GPT(GPTConfig()), tokens),
        Entry("ResNet", ResNet, image),
        Entry("UNet", UNet, lambda: (noise(BATCH, 3, 20, 20),), help={"cuts": ["downs.2", "bottleneck", "ups.2"]}),
        Entry("LSTMLanguageModel", LSTMLanguageModel, tokens),
        Entry("StackedGRU", StackedGRU, tokens, help={"blocks": "layers"}),
        Entry("Seq2Seq", Seq2Seq, pair),
        Entry("MixtureOfExperts", MixtureOfExperts, pair, own_loss=True, help={"blocks": "layers"}),
        Entry("Generator", Generator, lambda: (noise(BATCH, 16), ids(BATCH, vocab=10))),
        Entry("StyleGenerator", StyleGenerator, lambda: (noise(BATCH, 16),)),
        Entry("DenseNet", DenseNet, image),
        Entry("TwoTowers", TwoTowers, lambda: ({"user": ids(BATCH, vocab=50), "item": ids(BATCH, 3, vocab=60)},)),
        Entry("Perceiver", Perceiver, lambda: (noise(BATCH, 20, 12),)),
    ]
