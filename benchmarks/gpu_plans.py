"""(k) Predictions of plans on a GPU, for models bound by compute and by kernel launches.

``ps.plan`` measures and plans transformers in bfloat16 on one device, all layers in one stage, so the predictions are
the time and memory of the layers, micro-batch after micro-batch. Skipped without a CUDA device.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.one_gpu import loss_fn
from benchmarks.report import table
from benchmarks.transformer import Block

__all__ = ["run", "show"]

BLOCKS, VOCABULARY, MICROBATCHES = 12, 256, 8
SIZES = {  # model size, micro-batch size
    "d=2048, 2 x 2048 tokens": (2048, 2, 2048),
    "d=1024, 4 x 1024 tokens": (1024, 4, 1024),
    "d=1024, 1 x 512 tokens": (1024, 1, 512),
    "d=256, 1 x 128 tokens": (256, 1, 128),
}


def build_model(dim: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Embedding(VOCABULARY, dim), *(Block(dim, 16) for _ in range(BLOCKS)), nn.Linear(dim, VOCABULARY)]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def planned_and_run(dim: int, sequences: int, tokens: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The predicted and the measured seconds of a step and bytes at its peak."""
    model = build_model(dim)
    shape = (MICROBATCHES * sequences, tokens)
    x, y = (torch.randint(VOCABULARY, shape, device="cuda") for _ in range(2))
    found = ps.plan(
        model, x[:sequences], devices=["cuda:0"], batch=len(x), microbatches=MICROBATCHES, loss_fn=loss_fn,
        targets=y[:sequences], measure_seconds=seconds, optimizer="adamw",
    )  # fmt: skip
    times, taken = [], 0
    with found.pipeline(loss_fn, devices=["cuda:0"], outputs=None) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        for _ in range(rounds + 3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            begin = time.perf_counter()
            pipe.step(x, y)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            taken = torch.cuda.max_memory_allocated()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    measured = statistics.median(times[3:])
    return {
        "plan": str(found.configuration),
        "predicted ms": found.seconds * 1e3,
        "measured ms": measured * 1e3,
        "measured/predicted": measured / found.seconds,
        "predicted GiB": found.memory[0] / 2**30,
        "measured GiB": taken / 2**30,
        "memory, measured/predicted": taken / found.memory[0],
    }


def run(quick: bool = False) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"rows": [], "targets": [], "skipped": "no CUDA device"}
    rows = []
    for name, size in SIZES.items():
        gc.collect()  # memory left by the last one
        rows.append({"model": name, **planned_and_run(*size, *((0.5, 3) if quick else (4.0, 15)))})
    return {"rows": rows, "targets": [], "gpu": torch.cuda.get_device_name()}


def show(result: dict[str, Any]) -> None:
    if not result["rows"]:
        print(f"skipped: {result['skipped']}")
        return
    table("(k) plans on one GPU, 12 blocks, 8 micro-batches, bfloat16: predicted and measured", result["rows"])
