"""Several stages on one GPU: the overhead of threads, channels and split backwards.

Twelve transformer blocks in bfloat16, trained as 4 ranks on one device, against the plain model that accumulates
gradients over the same micro-batches. The work on the GPU is the same, so the best possible ratio is near 1. Medians of
interleaved variants. Skipped without a CUDA device.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from benchmarks.report import table
from benchmarks.transformer import Block

__all__ = ["run", "show"]

MICROBATCHES, BLOCKS, DIM, VOCABULARY = 8, 12, 1024, 256
SIZES = {"4 x 1024 tokens": (4, 1024), "1 x 512 tokens": (1, 512)}  # of a micro-batch
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "zbv")


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, DIM), *(Block(DIM, 16) for _ in range(BLOCKS)), nn.Linear(DIM, VOCABULARY)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        total = torch.zeros((), device="cuda")
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = loss_fn(model(part), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        return total

    return step


def pipe_step(pipe: ps.Pipeline, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return lambda: pipe.step(x, y).loss


def measure(step: Callable[[], Tensor], model: nn.Module) -> tuple[float, float, float]:
    """Seconds, peak GiB above the initial allocation, loss."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    loss = step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**30, float(loss)


def run(quick: bool = False) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"rows": [], "targets": [], "skipped": "no CUDA device"}
    rows = []
    for size, (sequences, tokens) in SIZES.items():
        x = torch.randint(VOCABULARY, (MICROBATCHES * sequences, tokens), device="cuda")
        y = torch.randint(VOCABULARY, (MICROBATCHES * sequences, tokens), device="cuda")
        plain = build_model()
        variants: dict[str, tuple[Callable[[], Tensor], nn.Module]] = {
            "plain accumulation": (plain_step(plain, x, y), plain)
        }
        pipes = []
        for name in SCHEDULES:
            model = copy.deepcopy(plain)
            stages = 8 if name == "zbv" else 4
            plan = ps.split(model, stages=stages)
            pipe = ps.Pipeline(
                plan, loss_fn, microbatches=MICROBATCHES, schedule=name, devices=["cuda:0"] * 4, outputs=None
            )
            pipes.append(pipe)
            variants[f"ours {name}"] = (pipe_step(pipe, x, y), model)
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
        for turn in range(3 if quick else 12):
            for name, (step, model) in variants.items():
                found = measure(step, model)
                if turn > 1 or quick:
                    taken[name].append(found)
        base = statistics.median(seconds for seconds, _, _ in taken["plain accumulation"])
        for name, found in taken.items():
            seconds = statistics.median(s for s, _, _ in found)
            rows.append(
                {
                    "size": size,
                    "variant": name,
                    "ms": seconds * 1e3,
                    "over_plain": seconds / base,
                    "peak_gib": found[-1][1],
                    "loss": found[-1][2],
                }
            )
        for pipe in pipes:
            pipe.close()
    return {"rows": rows, "targets": [], "gpu": torch.cuda.get_device_name()}


def show(result: dict[str, Any]) -> None:
    if not result["rows"]:
        print(f"skipped: {result['skipped']}")
        return
    table("one GPU, 4 ranks, m=8, 12 blocks of d=1024, bfloat16, medians", result["rows"])


if __name__ == "__main__":
    show(run())
