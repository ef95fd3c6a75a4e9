"""Models of ``torch.nn`` itself, alone and in small wrappers."""

# ruff: noqa: C408 (settings are written as keyword arguments)
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_models import BATCH, Entry, ids, noise


class Translator(nn.Module):
    """The model of the translation tutorial: ``nn.Transformer`` with masks made outside."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(99, width), nn.Embedding(99, width)
        self.transformer = nn.Transformer(width, 4, 2, 2, 64, batch_first=True)
        self.generator = nn.Linear(width, 99)
        self.register_buffer("positions", torch.randn(1, 64, width))

    def forward(self, src: Tensor, trg: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(trg.shape[1], device=trg.device)
        source = self.source(src) * math.sqrt(32) + self.positions[:, : src.shape[1]]
        target = self.target(trg) * math.sqrt(32) + self.positions[:, : trg.shape[1]]
        padding = src == 7
        out = self.transformer(source, target, tgt_mask=mask, src_key_padding_mask=padding, tgt_is_causal=True)
        return self.generator(out)


class Classifier(nn.Module):
    """``nn.TransformerEncoder`` with a padding mask and a class token."""

    def __init__(self, width: int = 32, norm_first: bool = False) -> None:
        super().__init__()
        self.embed, self.cls = nn.Embedding(99, width, padding_idx=0), nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 64, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = torch.cat([self.cls.expand(tokens.shape[0], -1, -1), self.embed(tokens)], dim=1)
        padding = torch.arange(x.shape[1], device=x.device)[None, :] > lengths[:, None]
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


class Recurrent(nn.Module):
    """A recurrent layer over packed sequences; the lengths are data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(99, 16), nn.LSTM(16, 32, 2, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        output, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(output.sum(1))


def entries() -> list[Entry]:
    lengths = lambda: (ids(BATCH, 12), torch.tensor([12, 9, 12, 7]))  # noqa: E731
    pair = lambda: (ids(BATCH, 12), ids(BATCH, 10, seed=3))  # noqa: E731
    floats = lambda: (noise(BATCH, 10, 32), noise(BATCH, 8, 32, seed=3))  # noqa: E731
    layer: dict[str, Any] = dict(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
    return [
        Entry("Transformer", lambda: nn.Transformer(32, 4, 2, 2, 64, batch_first=True), floats),
        Entry("TransformerEncoder",
              lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 4), lambda: (noise(BATCH, 10, 32),)),
        Entry("TransformerDecoder",
              lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer), 4, nn.LayerNorm(32)), floats),
        Entry("Translator", Translator, pair),
        Entry("Classifier", Classifier, lengths),
        Entry("Classifier norm_first", lambda: Classifier(norm_first=True), lengths),
        Entry("packed LSTM", Recurrent, lengths),
        Entry("Sequential MLP", lambda: nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(5))), lambda: (noise(BATCH, 16),)),
        Entry("Sequential with LazyLinear-like shapes", lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 49, 32),
            nn.ReLU(True), nn.Dropout(), nn.Linear(32, 32), nn.Linear(32, 5)), lambda: (noise(BATCH, 3, 16, 16),)),
        Entry("LSTM", lambda: nn.LSTM(16, 16, 4, batch_first=True), lambda: (noise(BATCH, 6, 16),)),
        Entry("MultiheadAttention", lambda: nn.MultiheadAttention(32, 4, batch_first=True),
              lambda: tuple(noise(BATCH, 6, 32, seed=s) for s in range(3))),
    ]  # fmt: skip
