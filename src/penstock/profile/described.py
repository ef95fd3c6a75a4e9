"""Transformers described by numbers, without a tensor.

model = describe("gpt:175b")                     # or "llama:70b,seq=4096", or "layers=24,hidden=2048,…"
model.parameters                                 # 175e9
model.flops(batch=1536)                          # of a step
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from penstock.errors import PlanError
from penstock.near import did_you_mean

__all__ = ["MODELS", "Transformer", "describe"]


@dataclass(frozen=True)
class Transformer:
    """A decoder: an embedding, ``layers`` times attention and MLP, and a head."""

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    ffn: int = 0  # the width inside of the MLP; 0: four times hidden
    kv: int = 0  # heads of keys and values; 0: as many as there are heads
    llama: int = 0  # 1: gated MLP, RMSNorm, no biases, no dropout, rotary positions, a head of its own

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 0 if one.name in ("ffn", "kv", "llama") else 1
            if type(value) is not int or value < least:
                raise PlanError(f"a model with {one.name}={value!r}: it must be a whole number, from {least} up")
        if self.hidden % self.heads:
            raise PlanError(f"a model of hidden={self.hidden} cannot have {self.heads} heads: they must divide it")
        if self.heads % self.kv_heads:
            raise PlanError(f"a model of {self.heads} heads cannot have kv={self.kv}: it must divide them")
        if self.llama > 1:
            raise PlanError(f"a model with llama={self.llama}: 1 is like Llama, 0 is like GPT")

    @property
    def width(self) -> int:
        """Inside of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_heads(self) -> int:
        return self.kv or self.heads

    @property
    def kv_width(self) -> int:
        """Of keys, and of values."""
        return self.hidden // self.heads * self.kv_heads

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.hidden + self.kv_width)

    @property
    def mlp_weights(self) -> int:
        return (3 if self.llama else 2) * self.hidden * self.width

    @property
    def parameters(self) -> int:
        """All of them; what is tied counts once."""
        layer = self.attention_weights + self.mlp_weights + sum(self.small_parameters())
        ends = self.vocab * self.hidden * (2 if self.llama else 1)
        rest = self.hidden if self.llama else (self.seq + 2) * self.hidden  # the last norm, and positions
        return self.layers * layer + ends + rest

    def small_parameters(self) -> tuple[int, int]:
        """Norms and biases of the attention and of the MLP of a layer."""
        if self.llama:
            return self.hidden, self.hidden
        return 2 * self.hidden + 2 * self.hidden + 2 * self.kv_width, 2 * self.hidden + self.width + self.hidden

    def flops(self, batch: int) -> float:
        """Of the matrix products of a step, forward and backward, without anything done twice."""
        tokens = batch * self.seq
        weights = self.layers * (self.attention_weights + self.mlp_weights) + self.vocab * self.hidden
        return 3.0 * tokens * (2 * weights + self.layers * 4 * self.seq * self.hidden)


def _gpt(layers: int, hidden: int, heads: int) -> Transformer:
    return Transformer(layers, hidden, heads, vocab=51200, seq=2048)


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> Transformer:
    return Transformer(layers, hidden, heads, vocab=128256, seq=8192, ffn=ffn, kv=8, llama=1)


MODELS = {
    # Narayanan et al., arXiv 2104.04473, table 1
    "gpt:1.7b": _gpt(24, 2304, 24),
    "gpt:3.6b": _gpt(30, 3072, 32),
    "gpt:7.5b": _gpt(36, 4096, 32),
    "gpt:18b": _gpt(40, 6144, 48),
    "gpt:39b": _gpt(48, 8192, 64),
    "gpt:76b": _gpt(60, 10240, 80),
    "gpt:145b": _gpt(80, 12288, 96),
    "gpt:310b": _gpt(96, 16384, 128),
    # Korthikanti et al., arXiv 2205.05198, table 3; the last two are in both
    "gpt:22b": _gpt(48, 6144, 64),
    "gpt:175b": _gpt(96, 12288, 96),
    "gpt:530b": _gpt(105, 20480, 128),
    "gpt:1t": _gpt(128, 25600, 160),
    # Grattafiori et al., arXiv 2407.21783, table 3
    "llama:8b": _llama(32, 4096, 32, 14336),
    "llama:70b": _llama(80, 8192, 64, 28672),
    "llama:405b": _llama(126, 16384, 128, 53248),
}


def describe(text: str) -> Transformer:
    """A model by its name, by its numbers, or by its name with some numbers changed: ``"gpt:175b,seq=4096"``."""
    first, *others = (part.strip() for part in str(text).lower().split(","))
    numbers: dict[str, int] = {}
    known = [one.name for one in fields(Transformer)]
    if "=" in first:
        others.insert(0, first)
    elif first not in MODELS:
        hint = did_you_mean(first, MODELS, otherwise=f": known are {', '.join(MODELS)}")
        raise PlanError(f"model {first!r} is not known{hint}. It can be described, too: layers=24,hidden=2048,…")
    for part in others:
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            hint = did_you_mean(name, known, otherwise=f": it has {', '.join(known)}")
            raise PlanError(f"a model has no {name!r}{hint}")
        if not value.isascii() or not value.isdigit():
            raise PlanError(f"a model with {part!r}: write a whole number, as in {name}=8")
        if name in numbers:
            raise PlanError(f"a model with {name} given twice: {text!r}")
        numbers[name] = int(value)
    if "=" not in first:
        return replace(MODELS[first], **numbers)
    needed = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if name not in numbers]
    if needed:
        raise PlanError(f"a model needs {' and '.join(needed)} as well: {text!r} does not say")
    return Transformer(**numbers)
