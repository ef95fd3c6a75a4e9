"""Golden files: what schedules, plans and steps come to, byte for byte, to compare before and after a refactoring.

    python tools/golden.py write [DIR]                    records
    python tools/golden.py check [DIR] [--only plans,steps]   compares; exits with 1 where anything differs

DIR is by default $PENSTOCK_GOLDEN, or ``.golden`` in the repository. The package is the one on PYTHONPATH, or where
that is not set the one beside this file. Only public names are used. Results are written by value (fields of
dataclasses by position, kinds of instructions numbered as they occur), so that renaming a class, a field or a kind
changes nothing. Of exceptions only the public type counts. The search (``auto``) is left out: it depends on the clock.
Hashes of floating point hold for one machine and one torch: record and compare on the same one.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import importlib
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if not os.environ.get("PYTHONPATH"):
    sys.path.insert(0, str(ROOT / "src"))
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import penstock as ps  # noqa: E402
from penstock.schedule import Costs, build, from_text, simulate, to_csv, to_text, verify  # noqa: E402

Cases = Iterator[tuple[str, str]]
"""The name of a case, and its result in one line."""

KNOWN = (ps.PlanError, ps.ScheduleError, ps.PipelineError, ps.PenstockError)
RANKS_DEADLINE = 120.0  # seconds for all cases of two processes


# ── results as text ──────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """``value`` as nested tuples of numbers and strings, without the names of classes and fields."""
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(plain(getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return tuple(sorted(((plain(k), plain(v)) for k, v in value.items()), key=repr))
    if isinstance(value, (set, frozenset)):
        return tuple(sorted((plain(v) for v in value), key=repr))
    if isinstance(value, (list, tuple)):
        return tuple(plain(v) for v in value)
    return value


def short(text: str, shown: int = 40) -> str:
    """A hash of ``text``, and how it begins."""
    text = text.replace("\n", " / ")
    return f"{hashlib.sha256(text.encode()).hexdigest()[:24]} {text[:shown]}"


def raised(error: BaseException) -> str:
    """The public type of an exception."""
    return next((kind.__name__ for kind in KNOWN if isinstance(error, kind)), type(error).__name__)


def attempt(function: Callable[[], str]) -> str:
    try:
        return function()
    except Exception as error:
        if os.environ.get("PENSTOCK_GOLDEN_DEBUG"):
            print(f"  {type(error).__name__}: {error}", file=sys.stderr)
        return f"!{raised(error)}"


def digest(value: Any) -> str:
    """Of a tensor's bytes, type and shape, or of a structure of such."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return hashlib.sha256(data + f"{flat.dtype}{tuple(flat.shape)}".encode()).hexdigest()[:16]
    if isinstance(value, Mapping):
        return digest([part for key in value for part in (str(key), value[key])])
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(" ".join(map(digest, value)).encode()).hexdigest()[:16]
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


# ── schedules ────────────────────────────────────────────────────────────────────────────────────────────────

STAGES_PER_RANK: dict[str, tuple[int | None, ...]] = {
    "gpipe": (None,),
    "1f1b": (None,),
    "interleaved": (1, 2, 3),
    "looped_bfs": (1, 2, 3),
    "zb_h1": (None,),
    "zb_h2": (None,),
    "zbv": (None,),
    "dualpipev": (None,),
    "v_half": (None,),
    "v_min": (None,),
    "sharded": (1, 2),
    "forward_only": (1, 2),
}


def _lower() -> Callable[..., Any]:
    for path in ("penstock.schedule.lower", "penstock.schedule.lowering", "penstock.schedule"):
        try:
            found = getattr(importlib.import_module(path), "lower", None)
        except ImportError:
            continue
        if callable(found):
            return found  # type: ignore[no-any-return]
    raise SystemExit("golden: no function 'lower' found: add its module to the list in tools/golden.py")


def lowered(schedule: Any, edges: Any, options: tuple[Any, ...]) -> str:
    """The programs; ``options`` are the keyword arguments in the order of the signature (depth, live_sends, …)."""
    lower = _lower()
    names = [p.name for p in inspect.signature(lower).parameters.values() if p.kind is p.KEYWORD_ONLY]
    programs = plain(lower(schedule, edges, **dict(zip(names, options, strict=False))))
    numbers: dict[str, str] = {}

    def kind(text: str) -> str:
        return text if len(text) == 1 else numbers.setdefault(text, f"k{len(numbers)}")

    def numbered(value: Any) -> Any:
        if isinstance(value, str):
            return kind(value)
        return tuple(map(numbered, value)) if isinstance(value, tuple) else value

    return short(repr(numbered(programs)))


def with_recompute(text: str, wanted: Callable[[int, int], bool]) -> str:
    """A schedule's text with an R before each backward of the wanted (stage, micro-batch)."""
    lines = []
    for line in text.splitlines():
        words = []
        for word in [] if line.startswith("#") else line.split():
            letter = next((c for c in word if c in "BI"), None)
            if letter and wanted(*map(int, word.split(letter))):
                words.append(word.replace(letter, "R"))
            words.append(word)
        lines.append(line if line.startswith("#") else " ".join(words))
    return "\n".join(lines) + "\n"


def simulated(schedule: Any, costs: Any, edges: Any = None) -> str:
    """Times and reports of a simulation, without the schedule and the costs that were given."""
    found = simulate(schedule, costs, edges)
    values = [getattr(found, field.name) for field in dataclasses.fields(found)]
    values = [value for value in values if not isinstance(value, (ps.Schedule, Costs))]
    return short(repr((found.makespan, found.peak_memory, found.bubble, plain(values))), 60)


def schedules() -> Cases:
    for name, choices in STAGES_PER_RANK.items():
        for p in (1, 2, 3, 4, 5, 8):
            for v in choices:
                for m in sorted({1, 3, p, 2 * p, 2 * p + 1} if p < 5 else {p, p + 3}):
                    yield from _schedule(f"{name} p={p} m={m} v={v}", lambda: build(name, p, m, v))  # noqa: B023


def _schedule(label: str, make: Callable[[], Any]) -> Cases:
    try:
        schedule = make()
    except Exception as error:
        yield label, f"!{raised(error)}"
        return
    text = to_text(schedule)
    stages, m = len(schedule.placement), schedule.num_microbatches
    yield f"{label} text", short(text, 200)
    yield f"{label} placement", repr(tuple(schedule.placement))
    yield f"{label} csv", attempt(lambda: short(to_csv(schedule)))
    yield f"{label} read back", str(from_text(text) == schedule)
    yield f"{label} verify", attempt(lambda: repr(plain(verify(schedule))))
    uneven = Costs(
        f=[1 + s % 3 / 4 for s in range(stages)], i=[1.5 - s % 2 / 8 for s in range(stages)], w=0.75, r=1.25,
        latency=0.125, bytes=3.0, bandwidth=16.0, activation=[2.0 + s for s in range(stages)], keep=0.5,
        checkpoint=0.25,
    )  # fmt: skip
    web = [(s, s + 1) for s in range(stages - 1)] + [(0, s) for s in range(2, stages, 2)]
    yield f"{label} simulate", attempt(lambda: simulated(schedule, None))
    yield f"{label} simulate uneven", attempt(lambda: simulated(schedule, uneven))
    yield f"{label} lower", attempt(lambda: lowered(schedule, None, ()))
    if m in (3, 2 * len(schedule.orders)) or len(schedule.orders) == 5:
        yield f"{label} simulate web", attempt(lambda: simulated(schedule, uneven, web))
        yield f"{label} lower web", attempt(lambda: lowered(schedule, web, (1, 2, False)))
        yield f"{label} lower described", attempt(lambda: lowered(schedule, None, (3, 1, True)))
        for mode, wanted in (
            ("always", lambda s, k: True),
            ("except_last", lambda s, k: k < m - 1),
            ("even stages", lambda s, k: s % 2 == 0),
        ):
            again = from_text(with_recompute(text, wanted))
            yield f"{label} recompute {mode} verify", attempt(lambda: repr(plain(verify(again))))  # noqa: B023
            yield f"{label} recompute {mode} simulate", attempt(lambda: simulated(again, uneven))  # noqa: B023
            yield f"{label} recompute {mode} lower", attempt(lambda: lowered(again, None, ()))  # noqa: B023
            yield f"{label} recompute {mode} csv", attempt(lambda: short(to_csv(again)))  # noqa: B023


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────────────

MALFORMED = (
    "", "-", "# name: x\n", "0F0 0B0 x", "0F0 0Q0", "F0", "0F", "0F0 0F0 0B0", "0F0", "0B0", "0B0 0F0", "0F0 0B0 0B0",
    "0F0 0W0 0I0", "0F0 0I0", "0F0 0W0", "0F0 0I0 0W0 0W0", "0F0 0R0 0R0 0B0", "0R0 0F0 0B0", "0F0 0B0 0R0",
    "0F0 0B0\n1B0 1F0", "0F0 0B0\n2F0 2B0", "0F0 0B0 0F2 0B2", "0F0 0B0\n0F1 0B1", "1F0 1B0\n0F0",
    "0F0 0F1 0B1 0B0\n1F1 1B1 1F0 1B0", "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", "0F0 0B0\n1F0", "0F0\n1F0 1B0",
    "0F0 0F1 0B0 0B1\n1F0 1B0", "0F0 0B0 1F0 1B0", "1F0 0F0 1B0 0B0", "0F0 1F0 1B0 0B0\n-", "-\n0F0 0B0",
)  # fmt: skip

CORRUPT = (
    lambda a: ps.Schedule("x", (0,), ((a(0, "F", 0), a(0, "B", 0)),), 2),
    lambda a: ps.Schedule("x", (1,), ((a(0, "F", 0), a(0, "B", 0)),), 1),
    lambda a: ps.Schedule("x", (0, 0), ((a(0, "F", 0), a(0, "B", 0)),), 1),
    lambda a: ps.Schedule("x", (0, 1), ((a(0, "F", 0), a(0, "B", 0)), (a(0, "F", 0),)), 1),
    lambda a: ps.Schedule("x", (0,), ((a(0, "F", -1), a(0, "B", 0)),), 1),
    lambda a: ps.Schedule("x", (0,), ((a(0, "Z", 0), a(0, "B", 0)),), 1),
    lambda a: ps.Schedule("x", (), (), 1),
    lambda a: ps.Schedule("x", (0,), ((),), 0),
)

BUILDS: tuple[tuple[Any, ...], ...] = (
    ("nothing", 2, 2), ("1f1b", 0, 2), ("1f1b", 2, 0), ("1f1b", 2, 2, 2), ("zbv", 2, 2, 3), ("zbv", 2, 2, 2),
    ("interleaved", 2, 3, 2), ("interleaved", 2, 4, 0), ("ZB-H1", 2, 2), ("GPIPE", 2, 2), ("sharded", 2, -1),
    ("looped_bfs", 3, 2, 2), ("dualpipev", 3, 1), ("dualpipev", 2, 1), ("v_min", 1, 1),
)  # fmt: skip

COSTS: tuple[dict[str, Any], ...] = (
    {"f": -1.0}, {"bandwidth": 0.0}, {"checkpoint": 2.0}, {"f": float("nan")}, {"f": [1.0]}, {"f": [1.0, 1.0, 1.0]},
    {"latency": {(0, 1): 1.0}}, {"latency": {(1, 0): 1.0}}, {"i": float("inf")},
)  # fmt: skip


def errors() -> Cases:
    for text in MALFORMED:
        yield f"text {text!r}", attempt(lambda: f"ok {plain(verify(from_text(text)))}")  # noqa: B023
    for number, make in enumerate(CORRUPT):
        yield f"corrupt {number}", attempt(lambda: f"ok {plain(verify(make(ps.Action)))}")  # noqa: B023
    for arguments in BUILDS:
        yield f"build {arguments}", attempt(lambda: short("ok " + to_text(build(*arguments))))  # noqa: B023
    for costs in COSTS:
        yield f"costs {costs}", attempt(lambda: "ok " + simulated(build("1f1b", 2, 2), Costs(**costs)))  # noqa: B023
    for edges in ([(0, 1)], [(1, 0)], [(0, 0)], [(0, 5)], [], [(0, 1), (1, 2), (0, 2)], [(0, 2), (1, 2)]):
        yield f"edges {edges}", attempt(lambda: f"ok {plain(verify(build('gpipe', 3, 2), edges))}")  # noqa: B023
    for label, function in _refusals():
        yield label, attempt(lambda: f"ok {function()}")  # noqa: B023


def _refusals() -> Iterator[tuple[str, Callable[[], Any]]]:
    def bad_split(**options: Any) -> Callable[[], Any]:
        return lambda: len(ps.split(mlp(), **options).stages)

    for options in (
        {}, {"stages": 0}, {"stages": 99}, {"balance": [1, 1]}, {"balance": "none", "stages": 2}, {"balance": []},
        {"balance": "uniform"}, {"stages": -1}, {"cuts": ["nothing"]}, {"blocks": "nothing", "stages": 2},
        {"stages": 2, "memory": 1}, {"stages": [["0"], ["nope"]]}, {"stages": 2, "memory": "16GiB"},
        {"stages": 2, "memory": "much"}, {"shared_weights": [("0.weight", "nope")], "stages": 2},
    ):  # fmt: skip
        yield f"split {options}", bad_split(**options)

    def bad_pipeline(options: dict[str, Any]) -> Callable[[], Any]:
        def run() -> str:
            with ps.Pipeline(ps.split(mlp(), stages=2), F.mse_loss, **options):
                return "built"

        return run

    for options in (
        {"schedule": "nothing"}, {"microbatches": 0}, {"schedule": "zbv", "devices": ["cpu", "cpu"]},
        {"recompute": "x"},
        {"recompute": {5: "always"}}, {"seed": "x"},
        {"batchnorm": "x"}, {"accumulate": "x"}, {"timeout": 0}, {"outputs": "x"}, {"offload": 1}, {"devices": []},
        {"microbatches": 2, "microbatch_size": 2}, {"reduction": "x"}, {"schedule": build("1f1b", 3, 2)}, {"mesh": 1},
    ):  # fmt: skip
        label = {k: to_text(v) if isinstance(v, ps.Schedule) else v for k, v in options.items()}
        yield f"pipeline {label}", bad_pipeline(options)
    yield "pipeline of no plan", lambda: ps.Pipeline(mlp())  # type: ignore[arg-type]


# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────

WIDTH, CLASSES, VOCABULARY = 8, 4, 32


class Residual(nn.Module):
    def __init__(self, norm: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.norm(self.linear(x))))


@ps.skippable(stash=["early"])
class Stem(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        h = torch.relu(super().forward(x))
        yield ps.stash("early", h)
        return h


@ps.skippable(pop=["early"])
class Head(nn.Linear):
    def forward(self, h: Tensor) -> Any:
        early = yield ps.pop("early")
        return super().forward(h + early)


class Fork(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Gather(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1].sin()


class Parts(nn.Module):
    """``early`` and the input are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Residual(norm=False) for _ in range(8))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        early = h = torch.relu(self.stem(x))
        for layer in self.layers:
            h = layer(h)
        return self.head(h * self.scale + early + x)


class Marked(Parts):
    def __init__(self) -> None:
        super().__init__()
        self.points = [ps.CutPoint() for _ in range(8)]

    def forward(self, x: Tensor) -> Tensor:
        early = h = torch.relu(self.stem(x))
        for point, layer in zip(self.points, self.layers, strict=True):
            h = layer(point(h))
        return self.head(h * self.scale + early + x)


class MarkedByFunction(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        for layer in self.layers:
            h = layer(ps.cut(h))
        return self.head(h * self.scale)


class Blocked(Parts):
    def forward(self, x: Tensor) -> Tensor:
        with ps.Block("B0"):
            early = h = torch.relu(self.stem(x))
        for i, layer in enumerate(self.layers):
            with ps.Block(f"B{i}"):
                h = layer(h)
        return self.head(h * self.scale + early + x)


class Straight(Parts):
    """No skips: a trunk of layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x))
        for layer in self.layers:
            h = layer(h)
        return self.head(h * self.scale)


class Language(nn.Module):
    """A tiny transformer whose output weights may be those of its embedding."""

    def __init__(self, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=dropout, batch_first=True) for _ in range(4)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(5)
        return make()

    return made


def _mlp() -> nn.Module:
    inner = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(WIDTH, CLASSES))


def _tied() -> nn.Module:
    first = nn.Linear(WIDTH, WIDTH)
    body = [nn.Tanh(), *(Residual(norm=False) for _ in range(5))]
    return nn.Sequential(first, *body, first, nn.Linear(WIDTH, CLASSES))


def _llama(**more: Any) -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(**sizes, intermediate_size=24, num_key_value_heads=1, use_cache=False, **tokens, **more)
    )


def _gpt2() -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False))


def _bert() -> nn.Module:
    import transformers as hf

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2}
    return hf.BertForMaskedLM(hf.BertConfig(**sizes, intermediate_size=24, max_position_embeddings=16))


mlp = _seeded(_mlp)
half = _seeded(lambda: _mlp().to(torch.bfloat16))
batchnorm = _seeded(lambda: nn.Sequential(*(Residual() for _ in range(8)), nn.Linear(WIDTH, CLASSES)))
dropout = _seeded(lambda: nn.Sequential(*(Residual(False, 0.3) for _ in range(8)), nn.Linear(WIDTH, CLASSES)))
skips = _seeded(lambda: nn.Sequential(Stem(WIDTH, WIDTH), *(Residual(False) for _ in range(6)), Head(WIDTH, CLASSES)))
tied = _seeded(_tied)
pairs = _seeded(
    lambda: nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), Fork(), Gather())), nn.Linear(8, 4))
)
parts, marked, by_function = _seeded(Parts), _seeded(Marked), _seeded(MarkedByFunction)
blocked, straight = _seeded(Blocked), _seeded(Straight)
language, language_tied = _seeded(lambda: Language(False)), _seeded(Language)
language_dropout = _seeded(lambda: Language(False, 0.2))
llama, llama_tied, gpt2, bert = (
    _seeded(_llama), _seeded(lambda: _llama(tie_word_embeddings=True)), _seeded(_gpt2), _seeded(_bert),
)  # fmt: skip


def lazy() -> nn.Module:
    layers = list(mlp())  # type: ignore[arg-type]
    return nn.Sequential(*(ps.Lazy(lambda layer=layer: layer) for layer in layers))  # type: ignore[misc]


def flat() -> nn.Module:
    model = straight()
    model.scale = None  # type: ignore[assignment]
    return ps.flatten(model, ["stem", torch.relu, "layers", "head"])


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────

PLANS: tuple[tuple[Callable[[], nn.Module], dict[str, Any]], ...] = (
    (mlp, {"stages": 2}), (mlp, {"stages": 4, "balance": "uniform"}), (mlp, {"balance": [2, 3, 4]}),
    (mlp, {"stages": 3, "balance": "parameters"}), (mlp, {"stages": 1}), (mlp, {"stages": 9}),
    (mlp, {"stages": 3, "balance": "memory", "sample": torch.ones(4, WIDTH)}), (mlp, {"stages": 2, "memory": "1MiB"}),
    (mlp, {"stages": 2, "shared_weights": [("0.weight", "6.weight")]}), (mlp, {"cuts": ["2", "6"]}),
    (batchnorm, {"stages": 4}), (dropout, {"balance": [4, 5]}), (skips, {"stages": 2}), (skips, {"stages": 4}),
    (skips, {"balance": [1, 6, 1]}), (tied, {"stages": 4}), (tied, {"balance": [3, 3, 3]}), (pairs, {"stages": 4}),
    (lazy, {"stages": 3, "balance": "uniform"}), (flat, {"stages": 4}), (flat, {"stages": 2, "balance": "uniform"}),
    (marked, {"stages": 4}), (marked, {"stages": 2, "balance": "uniform"}), (by_function, {"stages": 3}),
    (marked, {"balance": [2, 2, 2, 3]}),
    (blocked, {"stages": [["B0", "B1", "B2"], ["B3", "B4"], ["B5", "B6", "B7"]]}), (blocked, {"stages": 2}),
    (parts, {"stages": 4}), (parts, {"cuts": ["layers.2", "layers.5"]}), (parts, {"stages": 2, "balance": "uniform"}),
    (straight, {"blocks": "layers", "stages": 4}), (straight, {"stages": 4}),
    (straight, {"cuts": ["layers.4", "head"]}),
    (language, {"stages": 4}), (language_tied, {"stages": 4}), (language_tied, {"blocks": "layers", "stages": 2}),
    (language_dropout, {"stages": 3}),
    (llama, {"stages": 2}), (llama, {"stages": 4}), (llama_tied, {"stages": 2}), (llama, {"balance": [1, 1, 2]}),
    (gpt2, {"stages": 2}), (gpt2, {"stages": 4, "balance": "uniform"}), (bert, {"stages": 2}), (bert, {"stages": 3}),
)  # fmt: skip

_MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp, "half": half, "batchnorm": batchnorm, "dropout": dropout, "skips": skips, "tied": tied, "pairs": pairs,
    "parts": parts, "marked": marked, "by_function": by_function, "blocked": blocked, "straight": straight,
    "language": language, "language_tied": language_tied,
    "language_dropout": language_dropout, "llama": llama, "llama_tied": llama_tied,
    "gpt2": gpt2, "bert": bert, "lazy": lazy, "flat": flat,
}  # fmt: skip
_NAME_OF = {make: name for name, make in _MODELS.items()}


def plans() -> Cases:
    for make, options in PLANS:
        label = f"{_NAME_OF[make]} " + str({k: "given" if k == "sample" else v for k, v in options.items()})
        try:
            plan = ps.split(make(), **options)
        except Exception as error:
            if os.environ.get("PENSTOCK_GOLDEN_DEBUG"):
                print(f"  {label}: {type(error).__name__}: {error}", file=sys.stderr)
            yield label, f"!{raised(error)}"
            continue
        data = json.loads(plan.to_json())
        how = data.pop("recipe", None)
        yield label, json.dumps(data)
        yield f"{label} recipe", json.dumps(how)
        state = [list(plan.stage_module(s).state_dict()) for s in range(len(plan.stages))]
        yield f"{label} state", short(repr(state), 200)


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass(frozen=True)
class Step:
    """One pipeline on ``ranks`` threads or processes, trained for two steps, called and evaluated."""

    model: str
    schedule: str
    stages: int
    microbatches: int = 4
    batch: int = 8
    ranks: int = 2
    recompute: Any = "never"
    options: tuple[tuple[str, Any], ...] = ()
    split: tuple[tuple[str, Any], ...] = ()
    data: int = 1  # replicas

    def __str__(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        shown = {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}
        shown["options"] = {k: v if isinstance(v, (str, int, bool)) else type(v).__name__ for k, v in self.options}
        return " ".join(f"{name}={value}" for name, value in shown.items())


def _inputs(step: Step, seed: int) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    if step.model in ("llama", "llama_tied", "gpt2", "bert"):
        ids = torch.randint(3, VOCABULARY, (step.batch, 6), generator=generator)
        return {"input_ids": ids, "labels": ids}, None
    if step.model.startswith("language"):
        ids = torch.randint(VOCABULARY, (step.batch, 6), generator=generator)
        return ids, ids.roll(1, 1)
    x = torch.randn(step.batch, WIDTH, generator=generator)
    y = torch.randint(CLASSES, (step.batch,), generator=generator)
    return (x.to(torch.bfloat16) if step.model == "half" else x), y


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), target.flatten())


def run(step: Step, mesh: Any = None) -> str:
    """Everything that two training steps, a call and an evaluation leave behind."""
    model = _MODELS[step.model]()
    own_loss = step.model in ("llama", "llama_tied", "gpt2", "bert")
    split: dict[str, Any] = dict(step.split) or {"stages": step.stages}
    plan = ps.split(model, **split)
    where: dict[str, Any] = {"devices": ["cpu"] * step.ranks} if mesh is None else {"mesh": mesh}
    loss = None if own_loss else _cross_entropy
    reduction = {} if own_loss else {"reduction": "mean"}
    found: list[str] = []
    options = {"schedule": step.schedule, "recompute": step.recompute, **where, **reduction, **dict(step.options)}
    lockstep, everywhere = options.pop("lockstep", False), options.pop("outputs_everywhere", False)
    torch.manual_seed(11)
    with ps.Pipeline(plan, loss, microbatches=step.microbatches, **options) as pipe:
        pipe.lockstep = lockstep
        parameters = list(pipe.parameters())
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
        for turn in range(2):
            x, y = _inputs(step, 100 + turn + (0 if mesh is None else 10 * mesh.data_rank))
            result = pipe.step(x, y)
            if everywhere:
                result = dataclasses.replace(result, outputs=pipe.broadcast(result.outputs))
            found += [f"loss={digest(result.loss)}", f"outputs={digest(result.outputs)}", f"samples={result.samples}"]
            found += [f"{name}={digest(parameter.grad)}" for name, parameter in sorted(pipe.named_parameters())]
            if optimizer is not None:
                optimizer.step()
                if turn == 0:
                    optimizer.zero_grad()
        if mesh is None and not own_loss:
            x, _ = _inputs(step, 200)
            if x.is_floating_point():
                x.requires_grad_()
            output = pipe(x)
            output.float().square().sum().backward()
            found += [f"call={digest(output)}", f"input={digest(x.grad)}"]
            found += [f"{name}={digest(parameter.grad)}" for name, parameter in sorted(pipe.named_parameters())]
        found.append(f"rng={digest(torch.get_rng_state())}")
        found.append(f"state={digest({k: v for k, v in pipe.state_dict().items() if isinstance(v, Tensor)})}")
        pipe.eval()
        x, y = _inputs(step, 300)
        result = pipe.evaluate(x, y)
        if everywhere:
            result = dataclasses.replace(result, outputs=pipe.broadcast(result.outputs))
        found += [f"evaluation={digest(result.loss)}", f"outputs={digest(result.outputs)}"]
    return " ".join(found)


TWO_EACH = ("interleaved", "looped_bfs", "zbv", "v_half", "v_min", "dualpipev", "sharded")
ONE_EACH = ("gpipe", "1f1b", "zb_h1", "zb_h2")


def _with(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


def _steps() -> list[Step]:
    made = []
    every = [(name, 2) for name in ONE_EACH] + [(name, 4) for name in TWO_EACH]
    for model in ("mlp", "skips"):
        made += [Step(model, name, stages) for name, stages in every]
    # Threads add to the gradient of a tied parameter as they come, so its last bits differ from run to run: in one
    # process ties are compared on one rank, or one action at a time. Between processes they are reproducible.
    made += [Step("tied", name, 4, ranks=1) for name in ("interleaved", "looped_bfs", "sharded")]
    made += [Step("language_tied", name, 4, ranks=1) for name in ("interleaved", "looped_bfs", "sharded")]
    made += [Step("tied", name, 2, ranks=1) for name in ("zbv", "v_half", "v_min", "dualpipev")]
    for name, stages in every:
        made.append(Step("batchnorm", name, stages, recompute="always", options=_with(batchnorm="deferred")))
        made.append(Step("dropout", name, stages, recompute="except_last", options=_with(seed=7), batch=7))
    made += [Step("language", name, stages) for name, stages in every[::2]]
    for name, stages in (("1f1b", 4), ("zb_h1", 4), ("gpipe", 4), ("interleaved", 8), ("zbv", 8)):
        made.append(Step("parts", name, stages, 8, 16, ranks=4))
        made.append(Step("half", name, stages, 8, 16, ranks=4, options=_with(accumulate="fp32")))
    for name, stages in (("1f1b", 2), ("zb_h1", 2), ("interleaved", 4), ("gpipe", 4)):
        ranks = stages if name == "gpipe" else 2
        made.append(Step("llama", name, stages, ranks=ranks))
        made.append(Step("language_dropout", name, stages, ranks=ranks, options=_with(seed=3), recompute="always"))
        made.append(Step("batchnorm", name, stages, ranks=ranks))
        made.append(Step("pairs", name, stages, 3, 8, ranks=ranks, recompute={0: "always"}))
    made += [
        Step("llama_tied", "looped_bfs", 2, ranks=1, recompute="always"),
        Step("gpt2", "interleaved", 2, ranks=1, options=_with(seed=1)),
        Step("bert", "zbv", 2, ranks=1, options=_with(seed=1)),
        Step("mlp", "1f1b", 2, 3, 7),
        Step("mlp", "zb_h2", 2, 5, 13, recompute="always"),
        Step("mlp", "1f1b", 2, options=_with(microbatch_size=3, outputs="final"), microbatches=1, batch=10),
        Step("mlp", "1f1b", 2, options=_with(outputs="sum")),
        Step("mlp", "1f1b", 2, options=_with(outputs="every:2")),
        Step("mlp", "1f1b", 2, options=_with(outputs=None)),
        Step("mlp", "gpipe", 2, options=_with(lockstep=True)),
        Step("mlp", "1f1b", 2, options=_with(dynamic=True)),
        Step("mlp", "1f1b", 2, options=_with(offload=ps.Offload(optimizer=False, activations=True))),
        Step("lazy", "1f1b", 3, ranks=3, split=_with(stages=3, balance="uniform")),
        Step("flat", "1f1b", 2),
        Step("marked", "zb_h1", 4, ranks=4),
        Step("blocked", "1f1b", 2),
        Step("straight", "1f1b", 2, split=_with(blocks="layers", stages=2)),
        Step("mlp", "gpipe", 1, ranks=1),
        Step("batchnorm", "1f1b", 2, 3, 8, options=_with(batchnorm="deferred")),
    ]
    return made


def steps() -> Cases:
    for step in _steps():
        yield str(step), attempt(lambda: run(step))  # noqa: B023


# ── two processes ────────────────────────────────────────────────────────────────────────────────────────────

RANKS = (
    Step("mlp", "1f1b", 2),
    Step("mlp", "gpipe", 2, 3, 7),
    Step("mlp", "interleaved", 4),
    Step("mlp", "zbv", 4, 4, 9),
    Step("skips", "zb_h1", 2),
    Step("skips", "dualpipev", 4),
    Step("tied", "1f1b", 2),
    Step("tied", "looped_bfs", 4),
    Step("batchnorm", "1f1b", 2, recompute="always", options=_with(batchnorm="deferred")),
    Step("dropout", "zb_h2", 2, options=_with(seed=7), recompute="except_last"),
    Step("half", "1f1b", 2, options=_with(accumulate="fp32")),
    Step("language", "v_half", 4),
    Step("language_tied", "1f1b", 2),
    Step("parts", "1f1b", 2, options=_with(outputs_everywhere=True)),
    Step("pairs", "sharded", 2, options=_with(dynamic=True)),
    Step("mlp", "1f1b", 1, data=2, ranks=1),
    Step("batchnorm", "gpipe", 1, data=2, ranks=1, options=_with(batchnorm="deferred", seed=2)),
)


def ranks() -> Cases:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank{rank}.json") for rank in range(2)]
        base = {**os.environ, "PYTHONPATH": _source(), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(Path(__file__).resolve()), "rank"]
        processes = [
            subprocess.Popen([*command, str(file)], env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank, file in enumerate(files)
        ]
        try:
            end = time.monotonic() + RANKS_DEADLINE
            codes = [process.wait(max(1.0, end - time.monotonic())) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            raise SystemExit(f"golden: the two processes ended with {codes}")
        found = [json.loads(file.read_text()) for file in files]
    for step in RANKS:
        for rank in range(2):
            yield f"{step} rank {rank}", found[rank][str(step)]


def _one_rank(path: str) -> None:
    """The main function of each of the two processes."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ps.init("cpu", backend="gloo")
    meshes: dict[int, Any] = {}
    found = {}
    for step in RANKS:
        if step.data not in meshes:
            meshes[step.data] = ps.Mesh(data=step.data, pipe=2 // step.data, device="cpu")
        found[str(step)] = attempt(lambda: run(step, meshes[step.data]))  # noqa: B023
    Path(path).write_text(json.dumps(found))


# ── the command ──────────────────────────────────────────────────────────────────────────────────────────────

GROUPS: dict[str, Callable[[], Cases]] = {
    "schedules": schedules, "errors": errors, "plans": plans, "steps": steps, "ranks": ranks,
}  # fmt: skip


def _source() -> str:
    return str(Path(ps.__file__).resolve().parents[1])


def _record(group: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in GROUPS[group]():
        name = name.replace("\n", "\\n").replace("\t", " ")
        if name in found:
            raise SystemExit(f"golden: two cases of {group} are named {name!r}")
        found[name] = value.replace("\n", "\\n").replace("\t", " ")
    return found


def _read(path: Path) -> dict[str, str]:
    return dict(line.split("\t", 1) for line in path.read_text().split("\n") if line)  # type: ignore[misc]


def _difference(old: str, new: str) -> str:
    """The two values; of steps, the entries that differ."""
    one, two = old.split(" "), new.split(" ")
    if "loss=" in old and len(one) == len(two):
        pairs = [(a, b) for a, b in zip(one, two, strict=True) if a != b]
        lines = [f"    was {a}  is {b}" for a, b in pairs[:6]]
        return "\n".join([*lines, *([f"    … {len(pairs)} of {len(one)} entries"] if len(pairs) > 6 else [])])
    at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    begin = max(0, at - 60)
    return f"    was …{old[begin : begin + 300]}\n    is  …{new[begin : begin + 300]}"


def main() -> int:
    if sys.argv[1:2] == ["rank"]:
        _one_rank(sys.argv[2])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=("write", "check"))
    default = Path(os.environ.get("PENSTOCK_GOLDEN", ROOT / ".golden"))
    parser.add_argument("folder", nargs="?", type=Path, default=default)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas: " + ", ".join(GROUPS))
    parser.add_argument("-v", "--verbose", action="store_true", help="say where penstock is, and how long each took")
    arguments = parser.parse_intermixed_args()
    groups = [name.strip() for name in arguments.only.split(",") if name.strip()]
    if strange := [name for name in groups if name not in GROUPS]:
        parser.error(f"there is no group {strange[0]!r}: choose of {', '.join(GROUPS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.verbose:
        print(f"golden: penstock in {_source()}")
    cases, differing = 0, []
    for group in groups:
        start = time.perf_counter()
        path = arguments.folder / f"{group}.txt"
        if arguments.action == "check" and not path.is_file():
            raise SystemExit(f"golden: there is no {path}: write it first, or set PENSTOCK_GOLDEN")
        found = _record(group)
        cases += len(found)
        if arguments.action == "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(f"{name}\t{value}\n" for name, value in found.items()))
        else:
            old = _read(path)
            for name in [*old, *(name for name in found if name not in old)]:
                was, now = old.get(name, "(no such case)"), found.get(name, "(no such case)")
                if was != now:
                    differing.append(f"  {group}: {name}\n{_difference(was, now)}")
        if arguments.verbose:
            failed = sum(value.startswith("!") for value in found.values())
            print(f"golden: {group}: {len(found)} cases, {failed} raise, {time.perf_counter() - start:.1f} s")
    if differing:
        print(f"golden: {len(groups)} files, {cases} cases, {len(differing)} differ")
        print("\n".join(differing[:10]))
        return 1
    print(f"golden: {len(groups)} files, {cases} cases, {'equal' if arguments.action == 'check' else 'written'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
