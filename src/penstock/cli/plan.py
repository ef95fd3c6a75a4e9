"""``penstock plan``: pick stages, micro-batches and a schedule for a model and a number of devices."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from penstock.cli import UsageError, option, unwritable
from penstock.errors import PenstockError, PlanError

_EXAMPLES = """\
Examples; build() returns the model and a sample to measure it on:
  penstock plan train:build --devices 4 --batch 64
  penstock plan models.py:Net --sample models.py:batch --devices 2
  penstock plan train:build --hardware h100 --devices 8
  penstock plan --costs costs.json --devices 8 --batch 256 --save plan.json
  penstock plan --layers gpt:175b --hardware h100 --devices 4096
"""
_MODEL_HELP = "A model, or a function that returns one, or (model, sample)."
_LAYERS_HELP = "Sizes of a transformer: gpt:175b, llama:70b or layers=24,hidden=1024,…"
_DEFAULT_TOKENS = 4 << 20  # tokens of a mini-batch, for --layers


app = typer.Typer(add_completion=False)


@app.command(epilog=_EXAMPLES)
def plan(
    devices: Annotated[int, option("Number of devices.", min=1)],
    model: Annotated[str | None, typer.Argument(metavar="MODULE:NAME", help=_MODEL_HELP)] = None,
    sample: Annotated[
        str | None, option("The model's input, or a function that returns it.", metavar="MODULE:NAME")
    ] = None,
    costs: Annotated[str | None, option("Costs from a file, measured or written by hand.", metavar="FILE")] = None,
    layers: Annotated[str | None, option(_LAYERS_HELP, metavar="MODEL")] = None,
    hardware: Annotated[str | None, option("Kind of devices, need not be present: h100, …", metavar="NAME")] = None,
    tensor: Annotated[
        int | None, option("Devices that share each layer of --layers (default: searched).", min=1)
    ] = None,
    half_layers: Annotated[bool, option("Allow cuts between attention and MLP of --layers.", "--half-layers")] = False,
    memory: Annotated[str | None, option("Memory per device, as 16GiB (default: its own).", metavar="SIZE")] = None,
    batch: Annotated[int | None, option("Samples per mini-batch.", min=1)] = None,
    microbatches: Annotated[int | None, option("Micro-batches per replica (default: searched).", min=1)] = None,
    recompute: Annotated[
        Literal["yes", "no"] | None, option("Whether to recompute (default: as the memory requires).")
    ] = None,
    threads: Annotated[bool, option("Plan a pipeline of threads, without replicas.", "--threads")] = False,
    seconds: Annotated[float, option("Seconds to search.", min=0.001)] = 10.0,
    measure: Annotated[float | None, option("Seconds to measure (default: 5).", min=0.0)] = None,
    save: Annotated[
        str | None, option("Write the plan as JSON: ps.PlanResult.load(FILE, model) reads it.", metavar="FILE")
    ] = None,
) -> None:
    """Pick stages, micro-batches and a schedule for a model, and predict the time and memory of a step."""
    if not (model or costs or layers) or (layers and (model or costs)):
        raise UsageError("no model to plan: give one of MODULE:NAME, --costs FILE and --layers MODEL")
    useless = (
        (layers and not hardware, "--layers needs --hardware, the kind of devices"),
        ((tensor or half_layers) and not layers, "--tensor and --half-layers are for a model described by --layers"),
        (layers and threads, "--threads is for devices of this machine: leave it out with --layers"),
        (sample and not model, "--sample is the input of MODULE:NAME: give that, too"),
        (costs and hardware, "--hardware has no effect if --costs are given, which are those of certain hardware"),
        (measure is not None and (costs or layers or hardware), "--measure has no effect if no layer is timed"),
        (costs and not model and not batch, "give --batch, the number of samples of a mini-batch"),
    )
    for wrong, message in useless:
        if wrong:
            raise UsageError(message)
    if save and (reason := unwritable(save)):
        raise UsageError(f"--save: cannot write {save!r}: {reason}")
    options: dict[str, Any] = {
        "microbatches": microbatches,
        "recompute": {"yes": True, "no": False, None: None}[recompute],
        "seconds": seconds,
    }
    from torch import nn

    from penstock import profile
    from penstock.format import parse_bytes

    if layers and hardware:
        transformer, device = profile.parse_transformer(layers), profile.get_hardware(hardware)
        batch = batch or max(1, _DEFAULT_TOKENS // transformer.seq)
        options |= {"memory": memory, "tensor": tensor, "half_layers": half_layers}
        result = profile.plan_analytic(transformer, device, devices, batch, **options)
        share = transformer.flops(batch) / (result.seconds * devices * device.flops)
        print(
            f"{layers}: {transformer.parameters / 1e9:.3g} billion parameters, {batch} sequences of {transformer.seq} "
            f"tokens, on {devices} × {device.name}\n"
            f"{batch * transformer.seq / result.seconds:,.0f} tokens per second, {share:.1%} of the devices' peak\n"
        )
    elif costs and batch and not model:
        limit = float("inf") if memory is None else float(parse_bytes(memory))
        grids = [(1, p) for p in range(1, devices + 1)] if threads else None
        measured = profile.Profile.load(costs)
        result = profile.plan_costs(measured, batch=batch, devices=devices, grids=grids, memory=limit, **options)
    else:
        assert model is not None
        options |= {"devices": devices, "replicas": not threads, "memory": memory, "batch": batch, "costs": costs}
        options |= {"hardware": hardware, "measure_seconds": 5.0 if measure is None else measure}
        loaded = _load(model)
        module, inputs = loaded if isinstance(loaded, tuple) and len(loaded) == 2 else (loaded, None)
        if not isinstance(module, nn.Module):
            kind = type(module).__name__
            raise PlanError(f"{model} is, or returns, a {kind}: expected an nn.Module, or (model, sample)")
        inputs = _load(sample) if sample else inputs
        if inputs is None and not costs:
            raise PlanError(f"{model} returns no sample to measure the model on: give --sample, or --costs")
        result = profile.plan(module, inputs, **options)
    print(result)
    if save:
        result.save(save)
        print(f"\nsaved as {save}")


def _load(text: str) -> Any:
    """Load the object at ``module:name`` or ``file.py:name``; if it is a function or a class, call it."""
    place, _, name = text.rpartition(":")
    if not place or not name:
        raise PlanError(f"{text!r} must be MODULE:NAME, as in train:build_model or models.py:Net")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules.setdefault(spec.name, module)
            spec.loader.exec_module(module)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")  # as python -m does
            module = importlib.import_module(place)
    except PenstockError:
        raise
    except Exception as error:
        raise PlanError(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise PlanError(f"{place} has no {name!r}")
    found = getattr(module, name)
    if not (inspect.isclass(found) or inspect.isroutine(found)):
        return found
    try:
        return found()
    except PenstockError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this call
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
        raise PlanError(f"{text} failed when it was called without arguments: {reason}") from error
