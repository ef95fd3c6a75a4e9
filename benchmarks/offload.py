"""Offloading on one GPU: memory saved, time cost, and use of the host link.

A transformer in bfloat16 is trained with AdamW and a fill-drain schedule of several ranks on one device, so that all
activations wait: without offloading, and with activations, optimizer state, both, weights, and all offloaded. One model
has many activations and four stages, the other many weights and sixteen stages. Variants are built, measured and closed
one after the other. The losses of all steps must agree; the table shows whether they are bitwise equal. (Attention's
backward on a GPU is not deterministic: two runs of one variant may differ, too.)

    peak GiB        peak allocation in a step with its update, including weights
    over nothing    seconds of step and update, over those of the variant without offloading
    GiB moved       both ways, per step; ``link`` is the seconds that this takes at the measured bandwidth, both ways at
                    once, and ``link use`` those seconds over the seconds of the step

Skipped without a CUDA device.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from benchmarks.report import check, table
from benchmarks.transformer import Block
from penstock.engine.offload.copies import CopyStreams
from penstock.train.optimizer_offload import OffloadedOptimizer

__all__ = ["run", "show"]

GIB = 2**30
VARIANTS: dict[str, ps.Offload | None] = {
    "nothing": None,
    "activations": ps.Offload(optimizer=False),
    "optimizer": ps.Offload(activations=False),
    "both": ps.Offload(),
    "weights": ps.Offload(optimizer=False, activations=False, weights=True),
    "all": ps.Offload(weights=True),
}
MANY_ACTIVATIONS = (
    "nothing",
    "activations",
    "optimizer",
    "both",
)  # weights, too, exceed 128 GiB of host memory
MANY_WEIGHTS = ("nothing", "optimizer", "weights", "all")


@dataclass(frozen=True)
class Size:
    blocks: int
    dim: int
    sequences: int  # of a micro-batch
    tokens: int
    microbatches: int
    steps: int
    ranks: int = 4
    vocabulary: int = 256


FULL = Size(blocks=24, dim=2048, sequences=4, tokens=1024, microbatches=16, steps=6)
WIDE = Size(blocks=8, dim=4096, sequences=1, tokens=1024, microbatches=8, steps=2, ranks=8)
QUICK = Size(blocks=8, dim=512, sequences=2, tokens=256, microbatches=8, steps=2)
QUICK_WIDE = Size(blocks=8, dim=512, sequences=1, tokens=64, microbatches=4, steps=2, ranks=8)


def run(quick: bool = False) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"rows": [], "targets": [], "skipped": "no CUDA device"}
    device = torch.device("cuda", 0)
    link = bandwidth(device, 64 if quick else 1024)
    rows, targets = [], []
    many, wide = (QUICK, QUICK_WIDE) if quick else (FULL, WIDE)
    for size, names in ((many, MANY_ACTIVATIONS), (wide, MANY_WEIGHTS)):
        found = [measure(name, size, device, link) for name in names]
        compare(found)
        rows += found
        for row in found[1:]:
            what = f"{row['model']}, {row['offloads']}: peak over nothing"
            targets.append(check(what, row["peak over nothing"], most=0.99))
    return {"rows": rows, "targets": [] if quick else targets, "link": link, "gpu": torch.cuda.get_device_name(device)}


def compare(rows: list[dict[str, Any]]) -> None:
    """Compare the variants of a model with the first, which offloads nothing."""
    base = rows[0]
    for row in rows:
        row["over nothing"] = row["seconds"] / base["seconds"]
        row["peak over nothing"] = row["peak GiB"] / base["peak GiB"]
        row["same bits"] = row["losses"] == base["losses"]
        if any(abs(a - b) > 0.01 * abs(b) for a, b in zip(row["losses"], base["losses"], strict=True)):
            raise AssertionError(f"offloading {row['offloads']} changed the losses: {row['losses']}, {base['losses']}")


def measure(name: str, size: Size, device: torch.device, link: dict[str, float]) -> dict[str, Any]:
    """Steps of one variant, alone on the device, without the first one, which allocates buffers and state."""
    gc.collect()
    torch.cuda.empty_cache()
    x, y = (_tokens(size, device, seed) for seed in (1, 2))
    losses, times, peaks, moved = [], [], [], []
    with trainer(VARIANTS[name], size, device) as (pipe, optimizer, moves):
        for _ in range(size.steps + 1):
            before = moves()
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            start = time.perf_counter()
            losses.append(pipe.step(x, y).loss)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
            peaks.append(torch.cuda.max_memory_allocated(device) / GIB)
            moved.append((moves() - before) / GIB)
        reserved = torch.cuda.max_memory_reserved(device) / GIB
    seconds = median(times[1:])
    on_link = moved[-1] / link["both ways GiB/s"]
    return {
        "model": f"{size.blocks} x {size.dim}",
        "offloads": name,
        "seconds": seconds,
        "peak GiB": max(peaks[1:]),
        "reserved GiB": reserved,
        "GiB moved": moved[-1],
        "GiB/s": moved[-1] / seconds,
        "link": on_link,
        "link use": on_link / seconds,
        "losses": [float(loss) for loss in losses],
        "times": times,
    }


@contextmanager
def trainer(offload: ps.Offload | None, size: Size, device: torch.device) -> Iterator[tuple[Any, Any, Any]]:
    """A pipeline, its optimizer, and a function that returns the bytes copied so far."""
    torch.manual_seed(0)
    with device:
        blocks = [Block(size.dim, max(1, size.dim // 64)).bfloat16() for _ in range(size.blocks)]
        layers = [nn.Embedding(size.vocabulary, size.dim), *blocks, nn.Linear(size.dim, size.vocabulary)]
    plan = ps.split(nn.Sequential(*layers).bfloat16(), stages=size.ranks)
    options: dict[str, Any] = {"microbatches": size.microbatches, "schedule": "gpipe", "outputs": None}
    with ps.Pipeline(plan, loss_fn, devices=[str(device)] * size.ranks, offload=offload, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4)
        copies = [stage.offload.copies for stage in pipe._executor.stages.values() if stage.offload is not None]
        weights = pipe._executor.weights
        if weights is not None:
            copies += weights.copies.values()
        if offload is not None and (offload.optimizer or offload.weights):
            of_state = CopyStreams(device)
            copies.append(of_state)
            goes = offload.optimizer

            def copies_for(tensor: Tensor) -> CopyStreams | None:
                return of_state if goes and tensor.is_cuda else None

            OffloadedOptimizer(optimizer, offload.bucket_bytes, copies_for, weights=weights)
        yield pipe, optimizer, lambda: sum(each.bytes_to_host + each.bytes_to_device for each in copies)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _tokens(size: Size, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (size.microbatches * size.sequences, size.tokens)
    return torch.randint(size.vocabulary, shape, generator=generator).to(device)


def bandwidth(device: torch.device, mib: int) -> dict[str, float]:
    """Bandwidth between host and device with pinned memory: each direction alone, and both at once."""
    out, back = CopyStreams(device), CopyStreams(device)
    here = [torch.empty(mib << 20, dtype=torch.uint8, device=device) for _ in range(2)]
    there = [out.allocate_host(tensor) for tensor in here]

    def seconds(outward: bool, homeward: bool) -> float:
        taken = []
        for _ in range(5):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            if outward:
                out.to_host([(here[0], there[0])])
            if homeward:
                back.to_device([(there[1], here[1])])
            torch.cuda.synchronize(device)
            taken.append(time.perf_counter() - start)
        return min(taken)

    size = (mib << 20) / GIB
    return {
        "to host GiB/s": size / seconds(True, False),
        "to device GiB/s": size / seconds(False, True),
        "both ways GiB/s": 2 * size / seconds(True, True),
    }


def show(result: dict[str, Any]) -> None:
    if not result["rows"]:
        print(f"skipped: {result['skipped']}: this benchmark needs one, and has measured nothing")
        return
    print(f"{result['gpu']}: " + ", ".join(f"{name} {value:.1f}" for name, value in result["link"].items()))
    table("offloading on one GPU, fill-drain, bfloat16, AdamW", result["rows"])


if __name__ == "__main__":
    show(run())
