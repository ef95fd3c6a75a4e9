"""(b) A transformer of 8 blocks on two ranks, against one process.

Two processes with one thread each train the model in 8 micro-batches over gloo: ours with 1F1B and the zero-bubble
schedules, torch.distributed.pipelining with its own. One process with one thread accumulates the gradients of the same
micro-batches. All variants are interleaved in the same two processes, a few steps each per round, in an order that
rotates; a step lasts from a common start until both ranks are done. The losses of all must agree.

The limit of the speed-up is simulated with F = I = W and no communication: 2·m/(m+1) with 1F1B, a little under 2 with
the zero-bubble schedules. The balance of the two halves is measured, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import penstock as ps
from benchmarks.common import interleave, interleave_one_at_a_time, medians, spawn, time_on_all_ranks
from benchmarks.report import check, table
from penstock.schedule import build, simulate

__all__ = ["run", "show"]

RANKS, MICROBATCHES, BLOCKS, VOCABULARY = 2, 8, 8, 64
ZERO_BUBBLE = ("zb_h1", "zb_h2", "zbv")
THEIRS: dict[Any, list[int]] = {  # and the placement of the stages
    Schedule1F1B: [0, 1],
    ScheduleInterleavedZeroBubble: [0, 1, 0, 1],
    ScheduleZBVZeroBubble: [0, 1, 1, 0],
}
# width, tokens per sequence, sequences per micro-batch
SIZES = {"d=256": (256, 128, 1), "d=64": (64, 128, 4)}


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # batch, heads, tokens, dim of a head
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def limit(variant: str) -> float:
    """The largest possible speed-up with the variant's schedule."""
    twins = {"torch 1F1B": "1f1b", "torch InterleavedZeroBubble": "zbv", "torch ZBVZeroBubble": "zbv"}
    simulated = simulate(build(twins.get(variant, variant.removeprefix("ours ")), RANKS, MICROBATCHES))
    return sum(simulated.busy) / simulated.makespan


def build_model(dim: int) -> nn.Sequential:
    """The small vocabulary makes the costs of embedding and head negligible."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, VOCABULARY))
    return nn.Sequential(nn.Embedding(VOCABULARY, dim), *(Block(dim, 4) for _ in range(BLOCKS)), head)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def balance(stages: int) -> list[int]:
    """Layers per stage: equal numbers of blocks, the embedding with the first, the head with the last."""
    sizes = [BLOCKS // stages] * stages
    sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] + 1
    return sizes


class Training:
    """The model, the data, and the variants: each trains a copy of the model; losses are recorded."""

    def __init__(self, dim: int, tokens: int, batch: int) -> None:
        self.model = build_model(dim)
        data = torch.randint(VOCABULARY, (batch * MICROBATCHES, tokens + 1))
        self.x, self.y = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        self.mesh = ps.Mesh(pipe=RANKS)
        self.losses: dict[str, list[float]] = {}

    def timed(self, name: str, model: nn.Module, step: Callable[[], Tensor | None]) -> Callable[[], float]:
        """Seconds of a step, which returns the loss on the ranks that have it."""
        seen = self.losses.setdefault(name, [])

        def measured() -> float:
            loss: list[Tensor | None] = []
            seconds = time_on_all_ranks(lambda: loss.append(step()))
            seen.extend(float(value.detach()) for value in loss if value is not None)
            model.zero_grad()
            return seconds

        return measured

    @contextmanager
    def plain(self, shown: str) -> Iterator[Callable[[], float]]:
        """Rank 0 trains alone while rank 1 waits."""
        model = copy.deepcopy(self.model)

        def step() -> Tensor | None:
            if dist.get_rank() != 0:
                return None
            total = torch.zeros(())
            for inputs, targets in zip(self.x.chunk(MICROBATCHES), self.y.chunk(MICROBATCHES), strict=True):
                loss = loss_fn(model(inputs), targets) / MICROBATCHES
                loss.backward()
                total += loss.detach()
            return total

        yield self.timed(shown, model, step)

    @contextmanager
    def ours(self, name: str, shown: str) -> Iterator[Callable[[], float]]:
        model = copy.deepcopy(self.model)
        plan = ps.split(model, balance=balance(4 if name == "zbv" else 2))
        pipe = ps.Pipeline(plan, loss_fn, microbatches=MICROBATCHES, schedule=name, mesh=self.mesh, outputs=None)
        with pipe:
            yield self.timed(shown, model, lambda: pipe.step(self.x, self.y).loss)

    @contextmanager
    def theirs(self, kind: Any, where: Sequence[int], shown: str) -> Iterator[Callable[[], float]]:
        """torch's runtime on the same stages, with the placement of its schedule."""
        model = copy.deepcopy(self.model)
        plan = ps.split(model, balance=balance(len(where)))
        own = [s for s, rank in enumerate(where) if rank == dist.get_rank()]
        stages = [PipelineStage(plan.stage_module(s), s, len(where), torch.device("cpu")) for s in own]
        schedule = kind(stages[0] if kind is Schedule1F1B else stages, MICROBATCHES, loss_fn=loss_fn)
        inputs, last = (self.x,) if 0 in own else (), len(where) - 1 in own

        def step() -> Tensor | None:
            losses: list[Tensor] = []
            known: dict[str, Any] = {"target": self.y, "losses": losses} if last else {}
            schedule.step(*inputs, return_outputs=False, **known)
            return torch.stack(losses).mean() if last else None

        yield self.timed(shown, model, step)


def halves(model: nn.Sequential, x: Tensor, y: Tensor) -> float:
    """Seconds of the first stage over those of the second for one micro-batch, on the slower rank."""
    first, second = model[: BLOCKS // 2 + 1], model[BLOCKS // 2 + 1 :]
    inputs, targets = x.chunk(MICROBATCHES)[0], y.chunk(MICROBATCHES)[0]

    def front() -> None:
        hidden = first(inputs)
        hidden.backward(torch.ones_like(hidden))

    middle = first(inputs).detach().requires_grad_()

    def back() -> None:
        loss_fn(second(middle), targets).backward()

    found = medians(
        interleave({"front": lambda: time_on_all_ranks(front), "back": lambda: time_on_all_ranks(back)}, 15, warmup=3)
    )
    model.zero_grad()
    return found["front"] / found["back"]


def measure(dim: int, tokens: int, batch: int, rounds: int) -> dict[str, Any]:
    """On each rank: seconds per step of every variant, its losses, and the balance of the halves."""
    training = Training(dim, tokens, batch)
    makers = {"one process": partial(training.plain, "one process")}
    for name in ("1f1b", *ZERO_BUBBLE):
        makers[f"ours {name}"] = partial(training.ours, name, f"ours {name}")
    for kind, where in THEIRS.items():
        shown = f"torch {kind.__name__.removeprefix('Schedule')}"
        makers[shown] = partial(training.theirs, kind, where, shown)
    seconds = interleave_one_at_a_time(makers, rounds)
    found = halves(training.model, training.x, training.y)
    return {"seconds": seconds, "losses": training.losses, "halves": found}


def run(quick: bool = False) -> dict[str, Any]:
    rows, targets, settings = [], [], {}
    for size, (dim, tokens, batch) in SIZES.items():
        found = spawn(measure, RANKS, dim, tokens, batch, 2 if quick else 8, deadline=900)
        losses = {name: found[0]["losses"][name] or found[1]["losses"][name] for name in found[0]["losses"]}
        reference = losses["one process"][0]
        for name, values in losses.items():
            if any(abs(value - reference) > 1e-4 * abs(reference) for value in values):
                raise AssertionError(f"{size}, {name}: losses {values}, but one process has {reference}")
        seconds = found[0]["seconds"]
        middle = medians(seconds)
        alone = middle["one process"]
        for name, value in middle.items():
            row: dict[str, Any] = {"size": size, "variant": name, "ms per step": value * 1e3, "speed-up": alone / value}
            if name != "one process":
                row |= {"limit": limit(name), "of the limit": alone / value / limit(name)}
            rows.append(row | {"loss": losses[name][0], "seconds per step": seconds[name]})
        settings[size] = {"dim": dim, "tokens": tokens, "batch": batch, "first half over second": found[0]["halves"]}
        speed = {name: alone / value for name, value in middle.items()}
        best = max(ZERO_BUBBLE, key=lambda name: speed[f"ours {name}"])
        peer = max(value for name, value in speed.items() if name.startswith("torch"))
        ours_best = speed[f"ours {best}"]
        targets += [
            check(f"{size}, ours 1f1b, speed-up over ideal", speed["ours 1f1b"] / limit("ours 1f1b"), least=0.97),
            check(f"{size}, ours {best}, speed-up", ours_best, least=1.9),
            check(f"{size}, ours 1f1b over torch's 1F1B", speed["ours 1f1b"] / speed["torch 1F1B"], least=1.0),
            check(f"{size}, ours {best} over torch's best", ours_best / peer, least=1.0),
        ]
    return {"settings": settings, "rows": rows, "targets": targets}


def show(result: dict[str, Any]) -> None:
    table(f"(b) {BLOCKS} blocks, 2 gloo ranks with one thread each, m={MICROBATCHES}, medians", result["rows"])
    for size, settings in result["settings"].items():
        print(f"{size}: the first half of the model takes {settings['first half over second']:.3f} of the second's")
