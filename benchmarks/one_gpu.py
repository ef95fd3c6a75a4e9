"""Four ranks on one GPU: the cost of a pipeline where there is no bubble to fill, eager and as CUDA graphs.

Transformers in bfloat16, trained as a pipeline on one device, against the plain model that accumulates gradients over
the same micro-batches, eager and with ``torch.compile(mode="reduce-overhead")``. The work on the GPU is the same, so
the ratio to the plain model is the overhead of pipeline and host. Medians of interleaved variants; each model in a
process of its own. Skipped without a CUDA device.

``python -m benchmarks.one_gpu NAME`` runs one model.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from benchmarks.report import check, table
from benchmarks.transformer import Block

__all__ = ["run", "show"]

VOCABULARY, RANKS = 256, 4
PEAK = 989e12  # dense bfloat16 operations per second of an H200, by its data sheet
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "use_cache": False,
    "attn_implementation": "sdpa",
}


@dataclass(frozen=True)
class Size:
    """A model, its micro-batches, and targets in ms: as graphs, and with compiled stages."""

    dim: int
    blocks: int
    sequences: int
    tokens: int
    microbatches: int
    graphs_ms: float | None = None
    compiled_ms: float | None = None


SIZES = {
    "4 x 1024 tokens": Size(1024, 12, 4, 1024, 8, 95, 81),
    "1 x 512 tokens": Size(1024, 12, 1, 512, 16, 54, 48),
    "d=2048": Size(2048, 8, 1, 1024, 16, 108, 98),
    "Llama, 1.1e9 parameters": Size(2048, 16, 1, 2048, 8),
}
PLAIN, COMPILED = "plain", "plain, reduce-overhead"
# schedule, CUDA graphs, compiled
PIPELINES = {
    "1f1b": ("1f1b", False, False),
    "zb_h1": ("zb_h1", False, False),
    "zbv": ("zbv", False, False),
    "1f1b, graphs": ("1f1b", True, False),
    "zb_h1, graphs": ("zb_h1", True, False),
    "zbv, graphs": ("zbv", True, False),
    "1f1b, graphs, compiled": ("1f1b", True, True),
}
WARMUP, TURNS = 5, 9


def build(name: str) -> nn.Module:
    size = SIZES[name]
    torch.manual_seed(0)
    if name.startswith("Llama"):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**LLAMA)).to("cuda", torch.bfloat16)
    blocks = (Block(size.dim, 16) for _ in range(size.blocks))
    layers = [nn.Embedding(VOCABULARY, size.dim), *blocks, nn.Linear(size.dim, VOCABULARY)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def plain_step(model: nn.Module, x: Tensor, y: Tensor, size: Size, *, compiled: bool) -> Callable[[], Tensor]:
    forward = torch.compile(model, mode="reduce-overhead") if compiled else model
    own_loss = not isinstance(model, nn.Sequential)

    def step() -> Tensor:
        total = torch.zeros((), device="cuda")
        for part, target in zip(x.chunk(size.microbatches), y.chunk(size.microbatches), strict=True):
            if compiled:
                torch.compiler.cudagraph_mark_step_begin()
            loss = forward(input_ids=part, labels=target).loss if own_loss else loss_fn(forward(part), target)
            loss = loss / size.microbatches
            loss.backward()
            total += loss.detach()
        return total

    return step


def pipeline_step(pipe: ps.Pipeline, x: Tensor, y: Tensor, *, own_loss: bool) -> Callable[[], Tensor]:
    return lambda: (pipe.step({"input_ids": x, "labels": y}) if own_loss else pipe.step(x, y)).loss


def measure(step: Callable[[], Tensor], model: nn.Module, *, zeroed: bool = False) -> float:
    """The seconds of a step. Gradients are None before, or ``zeroed`` in place."""
    for parameter in model.parameters():
        if zeroed and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def warm_up(step: Callable[[], Tensor], model: nn.Module, *, zeroed: bool = False) -> float:
    """Run some steps; the GiB that the last ones have reserved."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for turn in range(WARMUP):
        measure(step, model, zeroed=zeroed)
        if turn == WARMUP - 3:
            torch.cuda.empty_cache()
    return (torch.cuda.memory_reserved() - before) / 2**30


def run_size(name: str, quick: bool) -> list[dict[str, Any]]:
    size = SIZES[name]
    plain = build(name)
    own_loss, vocabulary = not isinstance(plain, nn.Sequential), VOCABULARY
    x, y = torch.randint(vocabulary, (2, size.microbatches * size.sequences, size.tokens), device="cuda")
    steps = {PLAIN: (plain_step(plain, x, y, size, compiled=False), plain)}
    memory = {PLAIN: warm_up(*steps[PLAIN])}
    pipes: dict[str, ps.Pipeline] = {}
    for variant, (schedule, graphs, compiled) in PIPELINES.items():
        model = copy.deepcopy(plain)
        pipes[variant] = ps.Pipeline(
            ps.split(model, stages=2 * RANKS if schedule == "zbv" else RANKS),
            None if own_loss else loss_fn,
            microbatches=size.microbatches,
            schedule=schedule,
            devices=["cuda:0"] * RANKS,
            outputs=None,
            cuda_graphs=graphs,
            compile=compiled,
        )
        steps[variant] = pipeline_step(pipes[variant], x, y, own_loss=own_loss), model
        memory[variant] = warm_up(*steps[variant])
    gradients = {variant: [p.grad for p in model.parameters()] for variant, (_, model) in steps.items()}
    differences = {
        variant: max(float((a - b).abs().max()) for a, b in zip(gradients[variant], gradients[schedule], strict=True))
        for variant, (schedule, graphs, compiled) in PIPELINES.items()
        if graphs and not compiled
    }
    del gradients
    fast = copy.deepcopy(plain)
    for parameter in fast.parameters():  # a gradient must not be memory of a graph, which the next replay overwrites
        parameter.grad = torch.zeros_like(parameter)
    steps[COMPILED] = plain_step(fast, x, y, size, compiled=True), fast
    memory[COMPILED] = warm_up(*steps[COMPILED], zeroed=True)
    taken: dict[str, list[float]] = {variant: [] for variant in steps}
    for _ in range(3 if quick else TURNS):
        for variant, (step, model) in steps.items():
            taken[variant].append(measure(step, model, zeroed=variant == COMPILED))
    medians = {variant: statistics.median(seconds) for variant, seconds in taken.items()}
    tokens = x.numel()
    attention = 6 * size.blocks * size.dim * size.tokens  # per token, causal: forward and backward
    operations = 6 * sum(p.numel() for p in plain.parameters()) + attention
    rows = [
        {
            "size": name,
            "variant": variant,
            "ms": seconds * 1e3,
            "over_best_plain": seconds / min(medians[PLAIN], medians[COMPILED]),
            "tokens_per_second": tokens / seconds,
            "flops_utilisation": operations * tokens / seconds / PEAK,
            "memory_gib": memory[variant],
            "differs_from_eager": differences.get(variant),
        }
        for variant, seconds in medians.items()
    ]
    for variant, pipe in pipes.items():
        if PIPELINES[variant][1]:
            print(variant, pipe.describe_graphs(), sep="\n", file=sys.stderr)
        pipe.close()
    return rows


def targets_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for name, size in SIZES.items():
        ms = {row["variant"]: row["ms"] for row in rows if row["size"] == name}
        if size.graphs_ms is not None:
            found.append(check(f"{name}: graphs, ms", ms["1f1b, graphs"], most=size.graphs_ms))
            found.append(check(f"{name}: graphs and compile, ms", ms["1f1b, graphs, compiled"], most=size.compiled_ms))
        for schedule in ("zb_h1", "zbv"):
            ratio = ms[f"{schedule}, graphs"] / ms["1f1b, graphs"]
            found.append(check(f"{name}: {schedule} over 1f1b as graphs", ratio, most=1.02))
        gib = {row["variant"]: row["memory_gib"] for row in rows if row["size"] == name}
        for schedule in ("1f1b", "zb_h1", "zbv"):
            ratio = gib[f"{schedule}, graphs"] / gib[schedule]
            found.append(check(f"{name}: {schedule}, memory of graphs over eager", ratio, most=1.15))
    return found


def run(quick: bool = False) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"rows": [], "targets": [], "skipped": "no CUDA device"}
    rows: list[dict[str, Any]] = []
    for name in SIZES:
        command = [sys.executable, "-m", "benchmarks.one_gpu", name, *(["--quick"] if quick else [])]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rows += json.loads(output.splitlines()[-1])
    return {"rows": rows, "targets": targets_of(rows), "gpu": torch.cuda.get_device_name()}


def show(result: dict[str, Any]) -> None:
    if not result["rows"]:
        print(f"skipped: {result['skipped']}")
        return
    table("one GPU, 4 ranks, bfloat16, medians", result["rows"])


if __name__ == "__main__":
    print(json.dumps(run_size(sys.argv[1], "--quick" in sys.argv)))
