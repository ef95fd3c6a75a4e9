"""``penstock plan``: how to train a model on so many devices: where to cut it, in which order to work, how fast."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import positive, unwritable
from penstock.errors import PenstockError, PlanError

if TYPE_CHECKING:
    from penstock.profile.planner.result import PlanResult

__all__ = ["configure", "run"]

_EXAMPLES = """\
examples:
  penstock plan train:build --devices 4 --batch 64       build() gives the model, and a sample to measure it on
  penstock plan models.py:Net --sample models.py:batch --devices 2 --memory 16GiB
  penstock plan train:build --hardware h100 --devices 8  the same for devices that are not here
  penstock plan --costs costs.json --devices 8 --batch 256 --save plan.json
  penstock plan --layers gpt:175b --hardware h100 --devices 4096
                                                         a model described by numbers, for devices that are not here
"""
_TOKENS = 4 << 20  # of a mini-batch, where none is said


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _EXAMPLES
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:NAME", help="a model, or a function that returns one, or (model, sample)")
    add("--sample", metavar="MODULE:NAME", help="what the model is called with, or a function that returns it")
    add("--costs", metavar="FILE", help="costs that were measured before, or written by hand")
    add("--layers", metavar="MODEL", help="a transformer by numbers: gpt:175b, llama:70b, or layers=24,hidden=1024,…")
    add("--hardware", metavar="NAME", help="devices that are not here: h100, a100, …")
    add("--tensor", type=positive, metavar="N", help="devices that share each layer of --layers (default: searched)")
    add("--half-layers", action="store_true", help="let --layers be cut between attention and MLP, too")
    add("--devices", type=positive, metavar="N", required=True, help="how many devices there are")
    add("--memory", metavar="SIZE", help="what each device has, as 16GiB (default: what it has, where that is known)")
    add("--batch", type=positive, metavar="N", help="samples of a mini-batch")
    add("--microbatches", type=positive, metavar="N", help="what a replica's share is cut into (default: searched)")
    add("--recompute", choices=("yes", "no"), help="whether to recompute (default: where memory asks for it)")
    add("--threads", action="store_true", help="a pipeline of threads, without replicas, on up to so many devices")
    add("--seconds", type=_above_0, default=10.0, metavar="S", help="how long to search (default 10)")
    add("--measure", type=_from_0, metavar="S", help="how long to measure (default 5)")
    add("--save", metavar="FILE", help="write the plan as JSON: ps.PlanResult.load(FILE, model) reads it")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    given = [name for name in ("model", "costs", "layers") if getattr(args, name)]
    if not given or ("layers" in given and len(given) > 1):
        args.usage_error("what is to be planned? Give one of MODULE:NAME, --costs FILE and --layers MODEL")
    if args.layers and not args.hardware:
        args.usage_error("--layers describes a model for devices that are not here: say which by --hardware")
    for option, reason in _useless(args):
        args.usage_error(f"{option} {reason}")
    if args.save and (unable := unwritable(args.save)):
        args.usage_error(f"--save: cannot write {args.save!r}: {unable}")
    planned = _described(args) if args.layers else _from_costs(args) if not args.model else _measured(args)
    print(planned)
    if args.save:
        planned.save(args.save)
        print(f"\nsaved as {args.save}")
    return 0


def _useless(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Options that would do nothing, and why."""
    if not args.layers:
        for option, given in (("--tensor", args.tensor), ("--half-layers", args.half_layers)):
            if given:
                yield option, "is for a model that is described by --layers"
    if args.layers and args.threads:
        yield "--threads", "is for devices that are here, and those of --layers are not"
    if args.sample and not args.model:
        yield "--sample", "is for a model that is to be measured: MODULE:NAME"
    if args.costs and args.hardware:
        yield "--hardware", "has no say where --costs are given: they are of some hardware already"
    if args.measure is not None and (args.costs or args.layers or args.hardware):
        yield "--measure", "has no say where nothing is timed: costs are given, or counted"


def _options(args: argparse.Namespace) -> dict[str, Any]:
    recompute = {"yes": True, "no": False, None: None}[args.recompute]
    return {"microbatches": args.microbatches, "recompute": recompute, "seconds": args.seconds}


def _described(args: argparse.Namespace) -> PlanResult:
    from penstock.profile.analytic import get_hardware, parse_transformer
    from penstock.profile.planner.plan import plan_analytic

    model, hardware = parse_transformer(args.layers), get_hardware(args.hardware)
    batch = args.batch or max(1, _TOKENS // model.seq)
    planned = plan_analytic(
        model, hardware, args.devices, batch, tensor=args.tensor, half_layers=args.half_layers, memory=args.memory,
        **_options(args),
    )  # fmt: skip
    share = model.flops(batch) / (planned.seconds * args.devices * hardware.flops)
    print(
        f"{args.layers}: {model.parameters / 1e9:.3g} billion parameters, {batch} sequences of {model.seq} tokens, "
        f"on {args.devices} × {hardware.name}"
    )
    print(f"{batch * model.seq / planned.seconds:,.0f} tokens per second, {share:.1%} of the devices' peak\n")
    return planned


def _from_costs(args: argparse.Namespace) -> PlanResult:
    from penstock.format import parse_bytes
    from penstock.profile.costs import Profile
    from penstock.profile.planner.plan import plan_costs

    if args.batch is None:
        args.usage_error("say --batch, how many samples a mini-batch has")
    memory = float("inf") if args.memory is None else float(parse_bytes(args.memory))
    grids = [(1, p) for p in range(1, args.devices + 1)] if args.threads else None
    profile = Profile.load(args.costs)
    return plan_costs(profile, batch=args.batch, devices=args.devices, grids=grids, memory=memory, **_options(args))


def _measured(args: argparse.Namespace) -> PlanResult:
    from torch import nn

    from penstock.profile.planner.plan import plan

    found = _called(args.model)
    model, sample = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module):
        what = type(model).__name__
        raise PlanError(f"{args.model} is, or returns, a {what}: expected an nn.Module, or (model, sample)")
    if args.sample:
        sample = _called(args.sample)
    if sample is None and not args.costs:
        raise PlanError(f"{args.model} gives a model and no sample to measure it on: give --sample, or --costs")
    return plan(
        model, sample, devices=args.devices, replicas=not args.threads, memory=args.memory, batch=args.batch,
        costs=args.costs, hardware=args.hardware, measure_seconds=5.0 if args.measure is None else args.measure,
        **_options(args),
    )  # fmt: skip


def _find(text: str) -> Any:
    """What ``module:name`` or ``file.py:name`` names."""
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


def _called(text: str) -> Any:
    """The result of the function or class that ``text`` names; anything else is what it is."""
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
        said = f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
        raise PlanError(f"{text} failed when it was called without arguments: {said}") from error


def _above_0(text: str) -> float:
    seconds = _from_0(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _from_0(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds
