"""``penstock plan``: stages, micro-batches and a schedule for a model and a number of devices."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli import UsageError, count, flag, unwritable, value
from penstock.errors import PenstockError, PlanError

if TYPE_CHECKING:
    from penstock.profile import PlanResult

_EXAMPLES = """\
Examples; build() returns the model and a sample to measure it on:
  penstock plan train:build --devices 4 --batch 64
  penstock plan models.py:Net --sample models.py:batch --devices 2
  penstock plan train:build --hardware h100 --devices 8
  penstock plan --costs costs.json --devices 8 --batch 256 --save plan.json
  penstock plan --layers gpt:175b --hardware h100 --devices 4096
"""
_MODEL_HELP = "A model, or a function that returns one, or (model, sample)."
_LAYERS_HELP = "A transformer by numbers: gpt:175b, llama:70b or layers=24,hidden=1024,…"
_DEFAULT_TOKENS = 4 << 20  # of a mini-batch of --layers


def _above_0(text: str) -> float:
    seconds = _from_0(text)
    if seconds == 0:
        raise typer.BadParameter(f"{text!r} is not a number of seconds above 0")
    return seconds


def _from_0(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a number of seconds")
    return seconds


app = typer.Typer(add_completion=False)


@app.command(epilog=_EXAMPLES)
def plan(
    devices: Annotated[int, count("Number of devices.")],
    model: Annotated[str | None, typer.Argument(metavar="MODULE:NAME", help=_MODEL_HELP)] = None,
    sample: Annotated[str | None, value("MODULE:NAME", "The model's input, or a function that returns it.")] = None,
    costs: Annotated[str | None, value("FILE", "Costs that were measured before, or written by hand.")] = None,
    layers: Annotated[str | None, value("MODEL", _LAYERS_HELP)] = None,
    hardware: Annotated[str | None, value("NAME", "Devices that are not here: h100, a100, …")] = None,
    tensor: Annotated[int | None, count("Devices that share each layer of --layers (default: searched).")] = None,
    half_layers: Annotated[bool, flag("--half-layers", "Cut --layers between attention and MLP, too.")] = False,
    memory: Annotated[str | None, value("SIZE", "Memory of each device, as 16GiB (default: its own).")] = None,
    batch: Annotated[int | None, count("Samples of a mini-batch.")] = None,
    microbatches: Annotated[int | None, count("Micro-batches of a replica's share (default: searched).")] = None,
    recompute: Annotated[
        Literal["yes", "no"] | None, typer.Option(help="Whether to recompute (default: where memory asks for it).")
    ] = None,
    threads: Annotated[bool, flag("--threads", "A pipeline of threads, without replicas.")] = False,
    seconds: Annotated[float, value("S", "How long to search.", parser=_above_0)] = 10.0,
    measure: Annotated[float | None, value("S", "How long to measure (default: 5).", parser=_from_0)] = None,
    save: Annotated[
        str | None, value("FILE", "Write the plan as JSON: ps.PlanResult.load(FILE, model) reads it.")
    ] = None,
) -> None:
    """Pick stages, micro-batches and a schedule for a model, and predict the time and memory of a step."""
    if not (model or costs or layers) or (layers and (model or costs)):
        raise UsageError("no model to plan: give one of MODULE:NAME, --costs FILE and --layers MODEL")
    useless = (
        (layers and not hardware, "--layers describes a model for devices that are not here: say which by --hardware"),
        (tensor and not layers, "--tensor is for a model that is described by --layers"),
        (half_layers and not layers, "--half-layers is for a model that is described by --layers"),
        (layers and threads, "--threads is for devices that are here, and those of --layers are not"),
        (sample and not model, "--sample is for a model that is to be measured: MODULE:NAME"),
        (costs and hardware, "--hardware has no effect where --costs are given: they are of some hardware already"),
        (
            measure is not None and (costs or layers or hardware),
            "--measure has no effect where nothing is timed: costs are given, or counted",
        ),
        (costs and not model and not batch, "say --batch, how many samples a mini-batch has"),
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
    if layers:
        assert hardware is not None
        result = _plan_analytic(
            layers, hardware, devices, batch, memory=memory, tensor=tensor, half_layers=half_layers, **options
        )
    elif not model:
        assert costs is not None
        assert batch is not None
        result = _plan_costs(costs, devices, batch, memory, threads, options)
    else:
        options |= {"devices": devices, "replicas": not threads, "memory": memory, "batch": batch, "costs": costs}
        options |= {"hardware": hardware, "measure_seconds": 5.0 if measure is None else measure}
        result = _plan_model(model, sample, options)
    print(result)
    if save:
        result.save(save)
        print(f"\nsaved as {save}")


def _plan_analytic(layers: str, hardware_name: str, devices: int, batch: int | None, **options: Any) -> PlanResult:
    from penstock.profile import get_hardware, parse_transformer, plan_analytic

    model, hardware = parse_transformer(layers), get_hardware(hardware_name)
    batch = batch or max(1, _DEFAULT_TOKENS // model.seq)
    result = plan_analytic(model, hardware, devices, batch, **options)
    share = model.flops(batch) / (result.seconds * devices * hardware.flops)
    print(
        f"{layers}: {model.parameters / 1e9:.3g} billion parameters, {batch} sequences of {model.seq} tokens, "
        f"on {devices} × {hardware.name}"
    )
    print(f"{batch * model.seq / result.seconds:,.0f} tokens per second, {share:.1%} of the devices' peak\n")
    return result


def _plan_costs(
    costs: str, devices: int, batch: int, memory: str | None, threads: bool, options: dict[str, Any]
) -> PlanResult:
    from penstock.format import parse_bytes
    from penstock.profile import Profile, plan_costs

    limit = float("inf") if memory is None else float(parse_bytes(memory))
    grids = [(1, p) for p in range(1, devices + 1)] if threads else None
    return plan_costs(Profile.load(costs), batch=batch, devices=devices, grids=grids, memory=limit, **options)


def _plan_model(name: str, sample_name: str | None, options: dict[str, Any]) -> PlanResult:
    from torch import nn

    from penstock.profile import plan

    found = _load(name)
    model, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise PlanError(f"{name} is, or returns, a {kind}: expected an nn.Module, or (model, sample)")
    if sample_name:
        sample = _load(sample_name)
    if sample is None and not options["costs"]:
        raise PlanError(f"{name} gives a model and no sample to measure it on: give --sample, or --costs")
    return plan(model, sample, **options)


def _find(text: str) -> Any:
    """The object that ``module:name`` or ``file.py:name`` names."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise PlanError(f"{text!r} must be MODULE:NAME, as in train:build_model or models.py:Net")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).exists():
                raise PlanError(f"there is no file {place}")
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
    return getattr(module, name)


def _load(text: str) -> Any:
    """The object that ``text`` names; a function or a class is called."""
    found = _find(text)
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
