"""(d) Cost of splitting the backward: I + W of Penstock and of torch.distributed.pipelining over the full backward.

``.venv/bin/python -m benchmarks.split_backward [--quick]``

glibc does not trim the heap (`_keep_heap`): otherwise memory held from I to W is returned to the system after each W
and page-faulted again in the next I, which added 3% to I + W at the real size on the machine this was written on.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from penstock.engine.weightgrad import WeightGradQueue, make_recorder

__all__ = ["main", "run", "show"]

HOST_TARGET = 1.2  # I + W over the full backward, bound by the host
WALL_TARGET = 1.0  # at real sizes


class Layer(nn.Module):
    """A pre-norm transformer encoder layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, dim = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, time, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, time, dim)
        x = x + self.o(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Case:
    """One stage and three implementations of its forward and backward, which return seconds of F, I (or B) and W."""

    def __init__(self, layers: int, dim: int, tokens: int, batch: int, device: str) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(*(Layer(dim, 4) for _ in range(layers))).to(device)
        self.x = torch.randn(batch, tokens, dim, device=device, requires_grad=True)
        self.grad = torch.randn(batch, tokens, dim, device=device)
        self.queue = WeightGradQueue(make_recorder(self.module))
        self.sync: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else lambda: None

    def full(self) -> tuple[float, float, float]:
        start = self._now()
        output = self.module(self.x)
        middle = self._now()
        torch.autograd.backward([output], [self.grad])
        return middle - start, self._now() - middle, 0.0

    def ours(self) -> tuple[float, float, float]:
        start = self._now()
        with self.queue.recording():
            output = self.module(self.x)
        first = self._now()
        with self.queue.deferring():
            torch.autograd.backward([output], [self.grad])
        second = self._now()
        self.queue.run()
        return first - start, second - first, self._now() - second

    def peer(self) -> tuple[float, float, float]:
        start = self._now()
        output = self.module(self.x)
        first = self._now()
        _, groups = stage_backward_input([output], [self.grad], [self.x], self.module.parameters())
        second = self._now()
        stage_backward_weight(self.module.parameters(), groups)
        return first - start, second - first, self._now() - second

    def _now(self) -> float:
        self.sync()
        return time.perf_counter()

    def gradients(self, implementation: Callable[[], object]) -> list[Tensor]:
        self.module.zero_grad()
        self.x.grad = None
        implementation()
        return [p.grad.clone() for p in (self.x, *self.module.parameters()) if p.grad is not None]

    def measure(self, repeats: int) -> dict[str, list[tuple[float, float, float]]]:
        """Interleave the implementations. Gradients accumulate, as from the second micro-batch on."""
        implementations = {"full": self.full, "ours": self.ours, "peer": self.peer}
        wanted = self.gradients(self.full)
        for implementation in ("ours", "peer"):
            torch.testing.assert_close(self.gradients(implementations[implementation]), wanted, rtol=1e-3, atol=1e-3)
        seconds: dict[str, list[tuple[float, float, float]]] = {
            implementation: [] for implementation in implementations
        }
        orders = list(permutations(implementations))  # every order
        for repeat in range(repeats):
            if repeat % 10 == 0:
                gc.collect()
            gc.disable()
            for name in orders[repeat % len(orders)]:
                seconds[name].append(implementations[name]())
                self.x.grad = None
            gc.enable()
        return seconds


@contextmanager
def _keep_heap() -> Iterator[bool]:
    """Keep glibc from trimming the heap and from using mmap. Yields False without glibc."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        yield False
        return
    try:
        yield all([mallopt(mmap_max, 0), mallopt(trim_threshold, -1), mallopt(top_pad, 64 << 20)])
    finally:
        for option, default in ((mmap_max, 65536), (trim_threshold, 128 << 10), (top_pad, 0)):
            mallopt(option, default)


def run(quick: bool = False, device: str = "cpu") -> dict[str, Any]:
    """Measure with one operator thread. ``quick`` is a short run with rough numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with _keep_heap() as heap_kept:
            rows = _rows(quick, device)
    finally:
        torch.set_num_threads(threads)
    return {
        "benchmark": "split_backward",
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "device": device,
        "threads": 1,
        "heap_kept": heap_kept,
        "rows": rows,
    }


def _rows(quick: bool, device: str) -> list[dict[str, Any]]:
    rows = []
    cases = [("host", n, 64, 16, 1, repeats) for n, repeats in ((1, 400), (8, 120), (32, 40))]
    cases += [("wall", 4, 512, 128, 4, 15)]
    for kind, layers, dim, tokens, batch, repeats in cases:
        case = Case(layers, dim, tokens, batch, device)
        times = case.measure(max(3, repeats // 20) if quick else repeats)
        row: dict[str, Any] = {"kind": kind, "layers": layers, "dim": dim, "tokens": tokens, "batch": batch}
        for name, seconds in times.items():
            parts = "FBW" if name == "full" else "FIW"
            row[f"{name}_us"] = {
                part: median(t) * 1e6 for part, t in zip(parts, zip(*seconds, strict=True), strict=True)
            }
            # Ratios within a round: a temporary slowdown of the machine affects both sides.
            turns = list(zip(seconds, times["full"], strict=True))
            row[f"{name}_backward_ratio"] = median((i + w) / b for (_, i, w), (_, b, _) in turns)
            row[f"{name}_step_ratio"] = median(sum(ours) / sum(full) for ours, full in turns)
        row["target"] = HOST_TARGET if kind == "host" else WALL_TARGET
        row["met"] = row["ours_backward_ratio"] <= row["target"]
        rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    print(f"Split backward, torch {result['torch']}, {result['device']}, one thread. Times in µs, medians.\n")
    print("                          |       full        |                    ours                     | torch's split")
    print(
        "      layers  dim  tokens |       F         B |      F        I        W   (I+W)/B     step |  (I+W)/B   step"
    )
    for row in result["rows"]:
        full, ours = row["full_us"], row["ours_us"]
        print(
            f"{row['kind']}  {row['layers']:6} {row['dim']:4} {row['tokens'] * row['batch']:7} | "
            f"{full['F']:7.0f} {full['B']:9.0f} | "
            f"{ours['F']:6.0f} {ours['I']:8.0f} {ours['W']:8.0f} {row['ours_backward_ratio']:9.2f} "
            f"{row['ours_step_ratio']:8.2f} | {row['peer_backward_ratio']:8.2f} {row['peer_step_ratio']:6.2f}"
            + ("" if row["met"] else f"   target {row['target']:.1f} missed")
        )
    print("\nTargets for (I+W)/B: 1.2 where the host is the bottleneck, 1.0 at the real size. step: (F+I+W)/(F+B).")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="also write the numbers to this file")
    options = parser.parse_args()
    result = run(options.quick, options.device)
    show(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
