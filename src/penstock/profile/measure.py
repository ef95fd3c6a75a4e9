"""How much an optimizer keeps for the parameters that it trains."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.engine.microbatch import batch_size, scatter, split_targets
from penstock.errors import PlanError
from penstock.profile.analytic import Hardware, get_hardware
from penstock.profile.costs import Crossing, LayerCosts, ModelCosts, Overhead, Profile, SharedParameters
from penstock.profile.flop_counter import analytic_clock
from penstock.profile.timing import Runs, Times, medians_of, overhead_of, runs_of
from penstock.progress_ui import ProgressUI, progress_ui
from penstock.split import chain_of
from penstock.split.chain import LayerChain
from penstock.split.measure import LayerRun, Measurement, measure, tensor_bytes
from penstock.split.module_state import ModuleState
from penstock.split.plan import Plan
from penstock.split.sample import accelerators_of, sample_arguments
from penstock.suggest import did_you_mean

__all__ = ["OptimizerLike", "measure_costs", "optimizer_state_ratio"]

OptimizerLike = str | float | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, how many times the parameters' bytes, an optimizer, or what makes one from parameters, such as its class."""

STATES = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0, "adagrad": 1.0, "rmsprop": 1.0, "lion": 1.0}
"""Values of an optimizer's state for each value of a parameter, of the same type."""


def optimizer_state_ratio(optimizer: OptimizerLike, dtype: torch.dtype) -> float:
    """The bytes of state for each byte of a parameter of this type.

    An optimizer is asked by a step with a small parameter. What does not grow with the parameter (a count of steps, a
    row and a column of it) is left out.
    """
    if optimizer is None:
        return 0.0
    if isinstance(optimizer, str):
        if optimizer.lower() not in STATES:
            hint = did_you_mean(optimizer.lower(), STATES, otherwise=f": known are {', '.join(STATES)}")
            raise PlanError(f"optimizer {optimizer!r} is not known by name{hint}. Its class would do as well")
        return STATES[optimizer.lower()]
    if isinstance(optimizer, bool) or (isinstance(optimizer, int | float) and not 0 <= optimizer < float("inf")):
        raise PlanError(f"optimizer={optimizer!r} must be how many times the bytes of parameters its states take")
    if isinstance(optimizer, int | float):
        return float(optimizer)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
            trial = _trial(optimizer, parameter)
            parameter.grad = torch.ones_like(parameter)
            trial.step()
            state: dict[str, Any] = trial.state[parameter]
    except Exception as error:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise PlanError(
            f"{name} cannot be asked what it keeps ({type(error).__name__}: {error}): say optimizer=2.0, how many "
            "times the bytes of the parameters its states take"
        ) from error
    grown = [value for value in state.values() if isinstance(value, Tensor) and value.numel() == parameter.numel()]
    return sum(value.numel() * value.element_size() for value in grown) / (parameter.numel() * dtype.itemsize)


def _trial(optimizer: Any, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """An optimizer like this one, for another parameter."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        made: torch.optim.Optimizer = optimizer([parameter])
        return made
    other = copy.copy(optimizer)
    other.state = defaultdict(dict)
    other.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    return other


# What a model costs on this machine: every layer measured as a stage, at one or more sizes of micro-batches.
#
#     profile = measure_costs(model, sample)             # sample: what the model is called with
#     profile.save("costs.json")
#     profile.at(16).layers[0].forward                   # seconds
#
# Bytes are exact; times are medians of means. The model is left as it was.

TURNS = 4  # of each layer, where there is time
_NARROW = (torch.bfloat16, torch.float16)


def measure_costs(
    model: nn.Module | LayerChain | Plan,
    sample: Any,
    *,
    device: str | torch.device | None = None,
    seconds: float = 5.0,
    sizes: Iterable[int] | None = None,
    optimizer: OptimizerLike = "adamw",
    loss_fn: Callable[[Any, Any], Any] | None = None,
    targets: Any = None,
    accumulate: str | None = None,
    threads: int | None = None,
    hardware: str | Hardware | None = None,
    progress: ProgressUI | None = None,
) -> Profile:
    """Measure every layer of a model for about ``seconds`` altogether, and longer where few runs take that long.

    ``sample`` is what the model is called with, and as many samples as the largest micro-batch has. ``sizes`` are the
    sizes of micro-batches to measure, by default all samples and a quarter of them. With ``loss_fn`` and ``targets``
    the loss belongs to the last layer. ``accumulate`` is the pipeline's.

    Layers run on ``device``, or where they are; on a CPU with ``threads`` threads, of which a pipeline's rank has its
    share of the cores. ``progress`` is a screen to report to, by default a bar where there is a terminal.

    With ``hardware`` the layers run once, and their operations and bytes are counted: what they would take there.
    """
    line = _line(model)
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise PlanError(f"seconds={seconds!r} must be a number from 0 up")
    there_not_here = None if hardware is None else get_hardware(hardware)
    clock = None if there_not_here is None else analytic_clock(there_not_here)
    if accumulate not in (None, "fp32"):
        raise PlanError(f"accumulate={accumulate!r} must be None or 'fp32', as the pipeline's")
    sample_arguments(sample)  # or an error, and so is what has no values yet:
    accelerators_of(line.model, sample)
    there, spread = _device(line, sample, device)
    parts = _parts(sample, targets, loss_fn, sizes)
    dtypes = {parameter.dtype for parameter in line.model.parameters()}
    count = len(line.layers)
    others = 2 * sum(map(tensor_bytes, line.model.parameters()))
    found = []
    with _threads(threads), _as_before(), progress_ui() if progress is None else nullcontext(progress) as shown:
        states = {dtype: optimizer_state_ratio(optimizer, dtype) for dtype in dtypes}
        nothing = overhead_of(there, min(0.2, seconds / 20)) if clock is None else Times(0.0, 0.0, 0.0, 0.0, 0.0)
        for samples, part, wanted in parts:
            runs: list[list[Runs]] = [[] for _ in range(count)]

            def timer(turn: LayerRun, shown: ProgressUI = shown, runs: list[list[Runs]] = runs) -> tuple[float, float]:
                runs[turn.index].append(runs_of(turn, there, seconds / len(parts) / count / TURNS, others, clock))
                shown.advance(f"{turn.name} ({turn.index + 1} of {count})")
                return 0.0, 0.0  # what else is measured are bytes

            finish = None if loss_fn is None else _finish(loss_fn, wanted, there)
            until = perf_counter() + seconds / len(parts)
            while not runs[0] or (clock is None and len(runs[0]) < TURNS and perf_counter() < until):
                shown.begin(f"measuring {samples} samples", count)
                measured = measure(line, part, device=None if spread else there, finish=finish, timer=timer)
            firsts, afters = zip(*map(medians_of, runs), strict=True)
            timed = [after.beside(nothing) for after in afters]
            more = Times.typical(first.beside(after) for first, after in zip(firsts, afters, strict=True))
            waits = [turns[0].deferred for turns in runs]
            name = there.type if there_not_here is None else there_not_here.name
            found.append(_costs(line, samples, measured, timed, waits, states, accumulate, name, more.plus(nothing)))
    return Profile(tuple(found))


def _line(model: nn.Module | LayerChain | Plan) -> LayerChain:
    if isinstance(model, Plan):
        return model.require_chain()
    return model if isinstance(model, LayerChain) else chain_of(model)


def _device(line: LayerChain, sample: Any, device: str | torch.device | None) -> tuple[torch.device, bool]:
    """Where the layers run, with its number, and whether that is on other devices as well."""
    if device is None:
        members = (*line.model.parameters(), *line.model.buffers())
        inputs = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]
        places = list(dict.fromkeys(tensor.device for tensor in members or inputs))
        return (places or [torch.device("cpu")])[0], len(places) > 1
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"device {found} is not there: this machine has no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found, False


def _finish(loss_fn: Callable[[Any, Any], Any], targets: Any, device: torch.device) -> Callable[[Any], Any]:
    (there,) = split_targets(targets, (batch_size(targets, "targets") or 1,), device)
    return lambda output: loss_fn(output, there)


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave the random generators as they were: what torch imports on its way draws numbers, too."""
    before = ModuleState(())
    try:
        yield
    finally:
        before.restore()


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Compute on a CPU with so many threads meanwhile."""
    if count is None:
        yield
        return
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise PlanError(f"threads={count!r} must be a number of threads, from 1 up")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _parts(sample: Any, targets: Any, loss_fn: Any, sizes: Iterable[int] | None) -> list[tuple[int, Any, Any]]:
    """The sizes, with the first samples and targets of each; sliced as micro-batches are."""
    if loss_fn is None and targets is not None:
        raise PlanError("there are targets, but no loss_fn that would use them")
    batch = batch_size(sample, "sample")
    others = batch_size(targets, "targets")
    if batch is not None and others is not None and batch != others:
        raise PlanError(f"the sample has {batch} samples, but the targets have {others}")
    if batch == 0:
        raise PlanError("the sample is empty: its tensors have no entries along dimension 0")
    whole = batch or 1
    wanted = sorted({whole, max(1, whole // 4)} if sizes is None else set(sizes))
    if not wanted or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= whole for n in wanted):
        raise PlanError(f"sizes={wanted} must be numbers of samples from 1 to {whole}, which is what the sample has")
    return [(n, _first(sample, n, whole), _first(targets, n, whole)) for n in wanted]


def _first(value: Any, samples: int, whole: int) -> Any:
    return value if samples == whole else scatter(value, (samples, whole - samples))[0]


def _costs(
    line: LayerChain,
    samples: int,
    measured: Measurement,
    timed: Sequence[Times],
    waits: Sequence[int],
    states: Mapping[torch.dtype, float],
    accumulate: str | None,
    device: str,
    beside: Times,
) -> ModelCosts:
    layers = []
    for cost, times, waiting in zip(measured.layers, timed, waits, strict=True):
        members = {id(tensor): tensor for _, tensor in line.members(cost.name)}.values()
        trained = [t for t in members if isinstance(t, nn.Parameter) and t.requires_grad]
        layers.append(
            LayerCosts(
                name=cost.name,
                forward=times.forward,
                input_gradient=times.input_gradient,
                weight_gradient=times.weight_gradient,
                recompute=times.recompute,
                activation=cost.activation_bytes,
                parameters=cost.parameter_bytes,
                gradients=sum(_gradient_bytes(parameter, accumulate) for parameter in trained),
                optimizer=sum(tensor_bytes(parameter) * states[parameter.dtype] for parameter in trained),
                buffers=sum(tensor_bytes(t) for t in members if not isinstance(t, nn.Parameter)),
                backward=times.backward,
                deferred=waiting,
            )
        )
    return ModelCosts(
        layers=tuple(layers),
        crossings=_crossings(line, measured),
        samples=samples,
        shared=_shared(line),
        kept_together=_kept_together(measured.kept),
        device=device,
        overhead=Overhead(**asdict(beside)),
    )


def _gradient_bytes(parameter: nn.Parameter, accumulate: str | None) -> int:
    """What its gradient takes during a step: in float32 where half precision is summed in that."""
    wide = accumulate == "fp32" and parameter.dtype in _NARROW
    return parameter.numel() * (4 if wide else parameter.element_size())


def _crossings(line: LayerChain, measured: Measurement) -> tuple[Crossing, ...]:
    """What crosses from layer to layer; values are listed where one goes to several layers."""
    edges = line.edges([(layer,) for layer in line.layers])
    found = []
    for s, cost in enumerate(measured.layers):
        targets = sorted(edge.dst for edge in edges if edge.src == s)
        numbers = [number for values in cost.sends for number in values]
        repeated = len(set(numbers)) < len(numbers)
        for dst, values in zip(targets, cost.sends, strict=True):
            listed = tuple(values.items()) if repeated else ()
            found.append(Crossing(s, dst, sum(values.values()), listed))
    return tuple(found)


def _shared(line: LayerChain) -> tuple[SharedParameters, ...]:
    """Parameters that several layers have, by which layers."""
    users: dict[int, tuple[Tensor, list[int]]] = {}
    for i, layer in enumerate(line.layers):
        for _, tensor in line.members(layer):
            layers = users.setdefault(id(tensor), (tensor, []))[1]
            if i not in layers:
                layers.append(i)
    sizes: dict[tuple[int, ...], int] = {}
    for tensor, who in users.values():
        if isinstance(tensor, nn.Parameter) and len(who) > 1:
            sizes[tuple(who)] = sizes.get(tuple(who), 0) + tensor_bytes(tensor)
    return tuple(SharedParameters(layers, size) for layers, size in sorted(sizes.items()))


def _kept_together(kept: Sequence[Mapping[int, int]]) -> tuple[tuple[int, int, float], ...]:
    """What a layer keeps that one before it keeps too: each storage is counted between a keeper and the next one."""
    last: dict[int, int] = {}
    sizes: dict[tuple[int, int], float] = {}
    for i, storages in enumerate(kept):
        for number, size in storages.items():
            if number in last:
                pair = (last[number], i)
                sizes[pair] = sizes.get(pair, 0) + size
            last[number] = i
    return tuple((a, b, size) for (a, b), size in sorted(sizes.items()))
