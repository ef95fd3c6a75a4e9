"""(f) Memory and time of each recompute mode: a U-Net and a deep transformer, against the plain model.

Four stages on four threads train a mini-batch of m micro-batches. The figures are peak bytes that a step allocates:
activations, messages and gradients of activations, without parameters, their gradients and the mini-batch, which exist
before. Bytes count for the stage in whose forward or backward they are allocated; the maximum of three steps is shown.

The closed form uses figures of the plain model's run of one micro-batch, per stage:

    A  bytes alive after the forward          Y  the part of A that later stages keep as their input
    P  peak bytes of the backward, including A
    G  gradients of inputs that wait for an earlier stage: their number is the distance to that stage

    n = m micro-batches in flight for gpipe, min(m, p - rank) for 1f1b
    never         (n-1) A + P + G
    always          n Y   + P + G       inputs of all micro-batches in flight, and one that is recomputed
    except_last   (n-1) Y + A + P + G   backwards in order: the last micro-batch, which is not recomputed, waits longest
                  (n-1) Y + P + G       backwards in reverse order, as in torchgpipe: the last micro-batch is the first

A total is an upper bound, the sum over the ranks: not all have their peak at the same time. The plain model has no G,
and one P at a time. Under gpipe only the pace of the other ranks limits how far a late rank runs ahead, and so G.

Operators use one thread, so the plain model uses one core, and Penstock's ranks use all: ``over never`` is the cost of
recomputation; ``over loop``, over the plain model micro-batch by micro-batch, also depends on the number of cores.
torchgpipe is measured if it is installed (it is no dependency); on a CPU it uses one thread for all its work, and its
loss is computed on all outputs at once. On a GPU all ranks share one device, and totals are those of its allocator.
"""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import interleave, medians
from benchmarks.memory_tracker import MemoryTracker, tracker_accuracy
from benchmarks.recompute_cases import RANKS, Case, Step, Variant, cases, variants
from benchmarks.report import check, table

__all__ = ["run", "show"]

MIB = 2**20


# ── closed form ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StageBytes:
    """Bytes of one micro-batch per stage of the plain model."""

    A: list[int]
    Y: list[int]
    P: list[int]
    G: list[int]


def stage_bytes(case: Case) -> StageBytes:
    case = replace(case, device=torch.device("cpu"))
    model, stages = case.model()
    x, y = (tensor[: case.size] for tensor in case.data())
    F.mse_loss(model(x), y).backward()  # allocates the gradients of the parameters
    tracker = MemoryTracker(RANKS)
    held: list[Tensor] = []
    with tracker.watching(stages):
        with torch.no_grad():
            model(x)
        # edges[s][t]: bytes that stage s allocates and stage t is the last to use
        edges = [[0] * RANKS for _ in range(RANKS)]
        for s, t in combinations(range(RANKS), 2):
            later = tracker.at_entry[t + 1][s] if t + 1 < RANKS else 0
            edges[s][t] = tracker.at_entry[t][s] - later
        tracker.reset()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        worked = list(tracker.most)
        del loss
        tracker.reset()
        hooks = [layers[-1].register_forward_hook(lambda m, a, output: held.append(output)) for layers in stages[:-1]]
        loss = F.mse_loss(model(x), y)  # a pipeline keeps each stage's input even if its backward does not need it
        kept = list(tracker.alive)
        del loss
        for hook in hooks:
            hook.remove()
    waiting = [sum(edges[s][t] * (t - s) for s in range(t)) for t in range(RANKS)]
    return StageBytes(kept, [sum(row) for row in edges], worked, waiting)


def expected(variant: Variant, parts: StageBytes, m: int) -> tuple[list[int], int]:
    """The closed form: bytes per stage and in total."""
    if variant.schedule in ("whole", "accumulate"):
        n = m if variant.schedule == "whole" else 1
        on_top = max(p - a for a, p in zip(parts.A, parts.P, strict=True))
        return [n * p for p in parts.P], n * (sum(parts.A) + on_top)
    found = []
    for stage, (a, y, p, g) in enumerate(zip(parts.A, parts.Y, parts.P, parts.G, strict=True)):
        n = min(m, RANKS - stage) if variant.schedule == "1f1b" else m
        if variant.mode == "never":
            kept = (n - 1) * a
        elif variant.mode == "always" or n == 1:
            kept = n * y
        else:
            kept = (n - 1) * y + (0 if variant.schedule == "torchgpipe" else a)
        found.append(kept + p + g)
    return found, sum(found)


# ── running ────────────────────────────────────────────────────────────────────────────────────────────────────────


def most_alive(variant: Variant, device: torch.device, times: int) -> tuple[list[int], int]:
    """Peak bytes of a step, per stage and in total; on a GPU only in total."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        variant.step()
        torch.cuda.synchronize(device)
        return [], torch.cuda.max_memory_allocated(device) - before
    tracker = MemoryTracker(RANKS)
    by_stage, total = [0] * RANKS, 0
    with tracker.watching(variant.stages):
        for _ in range(times):
            gc.collect()
            tracker.reset()
            variant.step()
            by_stage = [max(pair) for pair in zip(by_stage, tracker.most, strict=True)]
            total = max(total, tracker.most_total)
        tracker.leaving = True
        variant.step()
    return by_stage, total


def measure(case: Case, rounds: int, traced: int) -> dict[str, Any]:
    parts = stage_bytes(case)
    with ExitStack() as stack:
        found, missing = variants(case, stack)
        for variant in found:
            variant.step()  # allocates gradients; stages are found not to change their inputs
        losses = [variant.step() for variant in found]
        if max(losses) - min(losses) > 1e-4 * abs(losses[0]):
            raise AssertionError(f"{case.name}: the variants do not compute the same loss: {losses}")
        times = interleave({variant.name: partial(timed, variant.step, case.device) for variant in found}, rounds)
        alive = {variant.name: most_alive(variant, case.device, traced) for variant in found}
    seconds, whole, loop = medians(times), found[0].name, found[1].name
    rows: list[dict[str, Any]] = []
    for variant in found:
        ranks, total = alive[variant.name]
        of_ranks, of_all = expected(variant, parts, case.microbatches)
        never = next(v for v in found if v.schedule == variant.schedule).name
        rows.append(
            {
                "variant": variant.name,
                "MiB": total / MIB,
                "expected": of_all / MIB,
                "ratio": total / of_all,
                "of plain": total / alive[whole][1],
                "worst rank MiB": max(ranks) / MIB if ranks else None,
                "worst ratio": max(a / b for a, b in zip(ranks, of_ranks, strict=True)) if ranks else None,
                "seconds": seconds[variant.name],
                "over loop": seconds[variant.name] / seconds[loop],
                "over never": seconds[variant.name] / seconds[never] if variant.mode != "never" else None,
                "ranks MiB": [size / MIB for size in ranks],
                "ranks expected MiB": [size / MIB for size in of_ranks],
                "times": times[variant.name],
            }
        )
    rows += [{"variant": name, "why not": why} for name, why in missing.items()]
    settings = {"microbatches": case.microbatches, "size": case.size, "sample": case.sample, "balance": case.balance}
    return {"model": case.name, "settings": settings, "KiB of a micro-batch by stage": kib(parts), "rows": rows}


def kib(parts: StageBytes) -> dict[str, list[float]]:
    return {name: [size / 1024 for size in sizes] for name, sizes in asdict(parts).items()}


def timed(step: Step, device: torch.device) -> float:
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def run(quick: bool = False) -> dict[str, Any]:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)  # otherwise the plain model's threads wait for each other if other jobs use the machine
    known = tracker_accuracy()
    targets = [check("bytes counted over bytes known", known, least=1.0), check("the same", known, most=1.0)]
    models = []
    for case in cases(quick, device):
        found = measure(case, rounds=1 if quick else 7, traced=1 if quick else 3)
        models.append(found)
        for row in found["rows"] if device.type == "cpu" else []:
            if row["variant"].startswith("ours"):
                what = f"{case.name}, {row['variant']}: measured over expected"
                targets.append(check(f"{what}, all", row["ratio"], most=1.02))
                targets.append(check(f"{what}, worst rank", row["worst ratio"], most=1.1))
    return {"device": str(device), "models": models, "targets": targets}


def show(result: dict[str, Any]) -> None:
    for found in result["models"]:
        table(f"(f) {found['model']}: most bytes alive in a step, and its time, {RANKS} stages", found["rows"])
        for name, sizes in found["KiB of a micro-batch by stage"].items():
            print(f"  {name} KiB by stage: " + ", ".join(f"{size:.0f}" for size in sizes))
