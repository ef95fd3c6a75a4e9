"""``python -m benchmarks zoo``: pipelines of third-party models against the plain models.

For each model of ``zoo_models``: the loss and all gradients of the plain model, then for each number of stages,
schedule and recompute mode those of ``ps.Pipeline(ps.split(model, stages=n), …)``. Each model has one class:

    one line     ps.split(model, stages=n) is enough, and all results are equal
    with sample  one line is refused; with sample= the results are equal
    with help    both are refused; with blocks= or cuts= the results are equal
    refused      a PenstockError at the split, at the pipeline or at the step
    wrong        the loss or a gradient differs
    crash        another exception, a time limit or a dead process

The plain model runs in training mode with all dropout at 0. Where that is not deterministic, it runs in eval mode.
Where the plain mini-batch differs from the mean of the plain micro-batches (BatchNorm, load-balancing losses), the
micro-batches are the reference; a pipeline that equals the mini-batch (a loss that sums) is right, too. A difference
below the measured rounding error of the plain model is allowed. All of this is recorded for each model.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import penstock as ps
from benchmarks.zoo_models import BATCH, LIBRARIES, Entry, entries_of, generic_loss

CLASSES = ("plain runs", "one line", "with sample", "with help", "refused", "wrong", "crash", "plain fails")
SCHEDULES = ("1f1b", "zb_h1", "zbv")
MICROBATCHES = 2
MEMORY = 8 << 30  # bytes of address space for the process of one model
RTOL, ATOL = 1e-4, 1e-5  # of the largest element of a gradient, and of the largest of all gradients
MAX_ROUNDING = 1e-2  # of the largest of all gradients: how much measured rounding can excuse


# ── the plain model ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Result:
    """The loss and the gradients of one mini-batch."""

    loss: Tensor
    grads: dict[str, Tensor | None]


def build(entry: Entry, eval_mode: bool) -> nn.Module:
    """The model with the same weights every time, without dropout."""
    torch.manual_seed(0)
    model = entry.build()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and "Dropout" in type(module).__name__)):
                setattr(module, name, 0.0)
    return model.train(not eval_mode)


def call(model: nn.Module, inputs: Any) -> Any:
    inputs = tree_map(lambda leaf: leaf.tensor if isinstance(leaf, ps.Broadcast) else leaf, inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def as_double(leaf: Any) -> Any:
    if isinstance(leaf, ps.Broadcast):
        return ps.Broadcast(as_double(leaf.tensor))
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def microbatch(inputs: Any, index: int) -> Any:
    size = BATCH // MICROBATCHES

    def rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf
        count = leaf.shape[0] * size // BATCH
        return leaf[index * count : (index + 1) * count]

    def samples(value: Any) -> bool:  # annotations of images: a list with a dict per sample
        return isinstance(value, list) and len(value) == BATCH and all(isinstance(item, dict) for item in value)

    first = index * size
    return tree_map(lambda leaf: leaf[first : first + size] if samples(leaf) else rows(leaf), inputs, is_leaf=samples)


def loss_of(entry: Entry, output: Any) -> Tensor:
    if not entry.own_loss:
        return (entry.loss_fn or generic_loss)(output)
    if isinstance(output, dict):
        return output["loss"]
    return output.loss if hasattr(output, "loss") else output[0]


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def plain_result(entry: Entry, eval_mode: bool, whole: bool, seed: int = 1, double: bool = False) -> Result:
    """One backward of the mini-batch, or one per micro-batch with the mean of their losses."""
    model, inputs = build(entry, eval_mode), entry.inputs()
    if double:
        model, inputs = model.double(), tree_map(as_double, inputs)
    torch.manual_seed(seed)
    parts = [inputs] if whole else [microbatch(inputs, i) for i in range(MICROBATCHES)]
    total = torch.zeros(())
    for part in parts:
        loss = loss_of(entry, call(model, part)) / len(parts)
        loss.backward()
        total += loss.detach()
    return Result(total, gradients(model))


def difference(result: Result, reference: Result, rounding: dict[str, float] | None = None) -> str | None:
    """The first difference above the tolerance, in words. ``rounding`` is added to the tolerance of a gradient."""
    if not torch.isfinite(reference.loss):
        return f"loss {float(result.loss):.6g}, not finite in the plain model"
    if not torch.allclose(result.loss.float(), reference.loss.float(), rtol=RTOL, atol=ATOL):
        return f"loss {float(result.loss):.6g}, plain model {float(reference.loss):.6g}"
    largest = max((float(g.abs().max()) for g in reference.grads.values() if g is not None and g.numel()), default=0.0)
    for name, expected in reference.grads.items():
        got = result.grads.get(name)
        if expected is None and got is None:
            continue
        got = torch.zeros_like(expected) if got is None else got
        expected = torch.zeros_like(got) if expected is None else expected
        if not got.numel():
            continue
        error, tolerance = float((got - expected).abs().max()), RTOL * float(expected.abs().max()) + ATOL * largest
        tolerance += min((rounding or {}).get(name, 0.0), MAX_ROUNDING * largest)
        if not error <= tolerance:
            largest = float(expected.abs().max())
            return f"gradient of {name} differs by {error:.3g}, its largest element is {largest:.3g}"
    return None


@dataclass
class Reference:
    """The result to compare with, and how it was made."""

    entry: Entry
    result: Result
    eval_mode: bool
    note: str
    whole: Result
    """That of the mini-batch, which a loss that sums has to equal."""

    def __post_init__(self) -> None:
        self.allowances: set[str] = set()  # which of the wider comparisons were needed; they are recorded

    def difference(self, result: Result) -> str | None:
        if difference(result, self.result) is None:
            return None
        if difference(result, self.whole) is None:
            self.allowances.add("equals the mini-batch")
            return None
        found = difference(result, self.result, self.rounding)
        if found is None:
            self.allowances.add("within rounding")
        return found

    @cached_property
    def rounding(self) -> dict[str, float]:
        """Three times the difference between the gradients in single and in double precision; empty if it fails.

        BatchNorm over a few values can turn rounding errors into large ones.
        """
        whole = self.note.endswith("mini-batch")
        try:
            exact = plain_result(self.entry, self.eval_mode, whole, double=True).grads
        except Exception:
            return {}
        pairs = {name: (grad, exact[name]) for name, grad in self.result.grads.items()}
        return {
            name: 3 * float((grad - other).abs().max())
            for name, (grad, other) in pairs.items()
            if grad is not None and other is not None and grad.numel()
        }


def reference_of(entry: Entry) -> Reference:
    """Run the plain model on the mini-batch and on the micro-batches, with two seeds each."""
    for eval_mode in (True,) if entry.eval_mode else (False, True):
        whole = plain_result(entry, eval_mode, whole=not entry.microbatches_only)
        again = plain_result(entry, eval_mode, whole=not entry.microbatches_only, seed=2)
        if difference(again, whole) is None:
            break
    else:
        raise ValueError("the plain model is not deterministic")
    if not any(grad is not None and bool(grad.any()) for grad in whole.grads.values()):
        raise ValueError("the plain model has no gradient that is not 0")
    mode = "eval" if eval_mode else "train"
    parts = plain_result(entry, eval_mode, whole=False)
    if difference(parts, whole) is None and not entry.microbatches_only:
        return Reference(entry, whole, eval_mode, f"{mode}, mini-batch", whole)
    if difference(plain_result(entry, eval_mode, whole=False, seed=2), parts) is not None:
        raise ValueError("the plain model is not deterministic on micro-batches")
    return Reference(entry, parts, eval_mode, f"{mode}, micro-batches", whole)


# ── pipelines ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Grid:
    """The pipelines to try for each model."""

    stages: tuple[int, ...] = (2, 4)
    schedules: tuple[str, ...] = SCHEDULES
    recompute: tuple[str, ...] = ("never", "always")


def first_line(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {text}"[:400]


def root_cause(error: BaseException) -> BaseException:
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def failure(error: BaseException, where: str) -> dict[str, Any]:
    """The class and the texts of an exception."""
    kind = "refused" if isinstance(error, ps.PenstockError) else "crash"
    record = {"class": kind, "at": where, "error": first_line(error)}
    if root_cause(error) is not error:
        record["cause"] = first_line(root_cause(error))
    if kind == "crash":
        record["traceback"] = "".join(traceback.format_exception(error))[-3000:]
    return record


def ways(entry: Entry) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls of ``ps.split`` in the order in which they are tried."""
    sample = tree_map(lambda leaf: leaf.tensor if isinstance(leaf, ps.Broadcast) else leaf, entry.inputs())
    yield "one line", {}
    yield "with sample", {"sample": sample}
    if entry.help:
        yield "with help", dict(entry.help)
        yield "with help", {**entry.help, "sample": sample}


def stage_shares(plan: ps.Plan, model: nn.Module) -> dict[str, Any]:
    """The parameters of the largest stage over an even share, and those of the largest layer.

    Stages of even layers exceed an even share by one layer at most, so a larger excess is not due to the layers.
    """
    sizes = [stage.parameters for stage in plan.stages]
    even = max(1.0, sum(p.numel() for p in model.parameters()) / len(sizes))
    layers = {name: sum(p.numel() for p in m.parameters(recurse=False)) for name, m in model.named_modules()}
    name = max(layers, key=lambda key: layers[key])
    largest, layer = max(sizes) / even, layers[name] / even
    return {
        "largest_stage": round(largest, 3),
        "largest_layer": round(layer, 3),
        "largest_layer_name": name,
        "explained": largest <= max(1.1, layer * 1.1, 1 + layer),
        "stage_parameters": sizes,
    }


def try_split(entry: Entry, reference: Reference, stages: int, grid: Grid, extra: dict[str, Any]) -> dict[str, Any]:
    """One call of ``ps.split`` and all pipelines of its plan."""
    model = build(entry, reference.eval_mode)
    before = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    start = time.perf_counter()
    try:
        plan = ps.split(model, stages=stages, **extra)
    except Exception as error:
        return {"seconds": time.perf_counter() - start, **failure(error, "split")}
    record: dict[str, Any] = {"class": "one line", "seconds": time.perf_counter() - start}
    record["front"] = plan.recipe.get("front")
    record |= stage_shares(plan, model)
    for schedule in grid.schedules:
        for recompute in grid.recompute:
            outcome = try_pipeline(entry, plan, model, reference, schedule, recompute, record)
            if outcome is not None:  # once more, with a model that has not been through other pipelines
                model = build(entry, reference.eval_mode)
                try:
                    plan = ps.split(model, stages=stages, **extra)
                    outcome = try_pipeline(entry, plan, model, reference, schedule, recompute, record)
                except Exception as error:
                    outcome = failure(error, "second split")
                if outcome is not None:
                    return {**record, **outcome, "schedule": schedule, "recompute": recompute}
                reference.allowances.add("needs a new model for each pipeline")  # a counter in Python is not reset
            with torch.no_grad():
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    if name in before and tensor.shape == before[name].shape:
                        tensor.copy_(before[name])
    return record


def try_pipeline(
    entry: Entry,
    plan: ps.Plan,
    model: nn.Module,
    reference: Reference,
    schedule: str,
    recompute: str,
    record: dict[str, Any],
    **options: Any,
) -> dict[str, Any] | None:
    """The failure of one pipeline; None if its step equals the plain model's.

    ``record`` gets the shares of the stages that ran: without a sample, the first mini-batch may change the plan.
    """
    model.zero_grad(set_to_none=True)
    if not entry.own_loss:
        options["reduction"] = "mean"
    loss_fn = None if entry.own_loss else entry.loss_fn or generic_loss
    where = "pipeline"
    try:
        pipe = ps.Pipeline(
            plan, loss_fn, microbatches=MICROBATCHES, schedule=schedule, recompute=recompute, timeout=60.0, **options
        )
        where = "step"
        torch.manual_seed(1)
        loss = pipe.step(entry.inputs()).loss
    except Exception as error:
        if isinstance(error, ps.PlanError) and "outputs=" in str(error) and "outputs" not in options:
            # Outputs without a batch dimension cannot be joined, but a training step does not need them.
            return try_pipeline(entry, plan, model, reference, schedule, recompute, record, outputs=None)
        return failure(error, where)
    record |= stage_shares(pipe.plan, model)
    differs = reference.difference(Result(loss.detach(), gradients(model)))
    return None if differs is None else {"class": "wrong", "at": "step", "error": differs}


def examine(entry: Entry, grid: Grid) -> dict[str, Any]:
    """The record of one model."""
    try:
        reference = reference_of(entry)
    except Exception as error:
        found = {"error": first_line(error), "traceback": "".join(traceback.format_exception(error))[-2500:]}
        return {"class": "plain fails", "at": "plain", **found}
    size = sum(p.numel() for p in build(entry, reference.eval_mode).parameters())
    record: dict[str, Any] = {"class": "", "reference": reference.note, "parameters": size, "stages": {}}
    for stages in grid.stages:
        attempts = {}
        for way, extra in ways(entry):
            label = way if way not in attempts else f"{way} and sample"
            attempts[label] = found = try_split(entry, reference, stages, grid, extra)
            if found["class"] == "one line":
                found["class"] = way
            if found["class"] != "refused":
                break
        final = next((a["class"] for a in attempts.values() if a["class"] != "refused"), "refused")
        record["stages"][str(stages)] = {"class": final, "attempts": attempts}
    record["allowances"] = sorted(reference.allowances)
    classes = [one["class"] for one in record["stages"].values()]
    record["class"] = max(classes, key=CLASSES.index, default="plain runs")
    return record


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────


def child(entry: Entry, grid: Grid, path: str) -> None:
    """The body of the process of one model."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a model that is too large must not take the machine down
    with open(os.devnull, "w") as quiet:
        os.dup2(quiet.fileno(), 1)
        os.dup2(quiet.fileno(), 2)
    begin = time.perf_counter()
    try:
        record = examine(entry, grid)
    except BaseException as error:  # of this harness
        record = {**failure(error, "harness"), "class": "crash"}
    record["total_seconds"] = time.perf_counter() - begin
    Path(path).write_text(json.dumps(record))


def run_entries(
    named: Sequence[tuple[str, Entry]],
    grid: Grid,
    jobs: int,
    limit: float,
    report: Callable[[str, dict[str, Any]], None],
) -> None:
    """Fork one process per model, at most ``jobs`` at a time, and report each record. A hanging one is killed."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(named), list[tuple[Any, str, str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                name, entry = waiting.pop(0)
                path = str(Path(folder) / f"{len(waiting)}.json")
                process = context.Process(target=child, args=(entry, grid, path))
                process.start()
                running.append((process, name, path, time.monotonic()))
            for item in list(running):
                process, name, path, begin = item
                process.join(0.05)
                late = time.monotonic() - begin > limit
                if process.is_alive() and not late:
                    continue
                running.remove(item)
                if process.is_alive():
                    process.kill()
                    process.join()
                    report(name, {"class": "crash", "at": "time limit", "error": f"still running after {limit:.0f} s"})
                elif Path(path).exists():
                    report(name, json.loads(Path(path).read_text()))
                else:
                    text = f"the process ended with exit code {process.exitcode}"
                    report(name, {"class": "crash", "at": "process", "error": text})


# ── reports ────────────────────────────────────────────────────────────────────────────────────────────────────────


def reason(record: dict[str, Any]) -> str:
    """The first error of the model's class, with its place."""
    if "error" in record:
        return f"[{record['at']}] {record['error']}"
    texts = []
    for stages, one in record["stages"].items():
        for way, attempt in one["attempts"].items():
            if "error" in attempt and record["class"] in ("with sample", "with help", attempt["class"]):
                pipeline = f", {attempt['schedule']}, {attempt['recompute']}" if "schedule" in attempt else ""
                cause = f" ← {attempt['cause']}" if "cause" in attempt else ""
                texts.append(f"{stages} stages, {way} [{attempt['at']}{pipeline}]: {attempt['error']}{cause}")
    return texts[0] if texts else ""


def balance(record: dict[str, Any]) -> str:
    """``2: 1.05  4: 1.31``: the largest stage over an even share; a ``!`` where no layer explains it."""
    cells = []
    for stages, one in record.get("stages", {}).items():
        last = list(one["attempts"].values())[-1]
        if "largest_stage" in last:
            cells.append(f"{stages}: {last['largest_stage']:.2f}{'' if last['explained'] else '!'}")
    return "  ".join(cells)


def split_seconds(record: dict[str, Any]) -> float:
    attempts = [list(one["attempts"].values())[-1]["seconds"] for one in record.get("stages", {}).values()]
    return max(attempts, default=0.0)


def line(name: str, record: dict[str, Any]) -> str:
    text = f"{record['class']:<12} {name:<62} {record.get('reference', ''):<22} {balance(record):<20}"
    return f"{text} {split_seconds(record):5.2f}s  {reason(record)}".rstrip()


def summary(records: dict[str, dict[str, Any]], unavailable: dict[str, str]) -> str:
    """Counts per class and library, then one line per model, the worst class first."""
    counts: dict[str, Counter[str]] = {}
    for name, record in records.items():
        counts.setdefault(name.split("/")[0], Counter())[record["class"]] += 1
    total = sum(counts.values(), Counter[str]())
    shown = [kind for kind in CLASSES if total[kind] or kind not in ("plain runs", "plain fails")]
    head = f"{'library':<30}" + "".join(f"{kind:>13}" for kind in shown) + f"{'models':>10}"
    rows = [
        f"{library:<30}" + "".join(f"{count[kind]:>13}" for kind in shown) + f"{count.total():>10}"
        for library, count in [*counts.items(), ("all", total)]
    ]
    worst = sorted(records, key=lambda name: -CLASSES.index(records[name]["class"]))
    missing = [f"unavailable: {name}: {why}" for name, why in unavailable.items()]
    return "\n".join([head, *rows, "", *missing, "", *(line(name, records[name]) for name in worst)])


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks zoo", description="pipelines of third-party models")
    parser.add_argument("--library", action="append", help=f"only this library: {', '.join(LIBRARIES)}")
    parser.add_argument("--model", action="append", help="only models with this in their names")
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--recompute", default="never,always")
    parser.add_argument("--json", type=Path, help="write the records here, with the readable table beside it as .txt")
    parser.add_argument("--resume", action="store_true", help="keep the records that are in the JSON file")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model")
    parser.add_argument("--plain", action="store_true", help="only run the plain models, to check the entries")
    parser.add_argument("--here", action="store_true", help="run in this process, for a debugger")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    options = parser.parse_args(argv)
    unknown = set(options.library or ()) - set(LIBRARIES)
    if unknown:
        parser.error(f"no library {', '.join(sorted(unknown))}: there are {', '.join(LIBRARIES)}")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    grid = Grid(
        () if options.plain else tuple(map(int, options.stages.split(","))),
        tuple(options.schedules.split(",")),
        tuple(options.recompute.split(",")),
    )
    records: dict[str, dict[str, Any]] = {}
    if options.resume and options.json is not None and options.json.exists():
        records = json.loads(options.json.read_text())["models"]
    unavailable: dict[str, str] = {}

    def save() -> None:
        if options.json is not None:
            about = {
                "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "stages": options.stages,
                "schedules": options.schedules, "recompute": options.recompute,
            }  # fmt: skip
            data = {"about": about, "unavailable": unavailable, "models": records}
            options.json.write_text(json.dumps(data, indent=1) + "\n")
            options.json.with_suffix(".txt").write_text(summary(records, unavailable) + "\n")

    def report(name: str, record: dict[str, Any]) -> None:
        records[name] = record
        print(line(name, record), flush=True)
        save()

    for library in options.library or LIBRARIES:
        for module in LIBRARIES[library]:
            try:
                entries = entries_of(module)
            except Exception as error:
                unavailable[f"{library} ({module})"] = first_line(error)
                print(f"unavailable: {library} ({module}): {first_line(error)}", flush=True)
                continue
            named = [(f"{library}/{entry.name}", entry) for entry in entries]
            if options.model:
                named = [(name, entry) for name, entry in named if any(part in name for part in options.model)]
            named = [(name, entry) for name, entry in named if name not in records]
            if options.list:
                print(*(name for name, _ in named), sep="\n")
            elif options.here:
                for name, entry in named:
                    report(name, examine(entry, grid))
            else:
                run_entries(named, grid, options.jobs, options.limit, report)
    if not options.list:
        save()
        print("\n" + summary(records, unavailable).split("\n\n")[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
