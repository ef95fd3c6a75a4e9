"""Measure the costs of a model on this machine: each layer runs as a stage, at one or more micro-batch sizes.

    profile = measure_costs(model, sample)             # sample: the arguments of the model
    profile.save("costs.json")
    profile.at(16).layers[0].forward                   # seconds

Bytes are exact. Times are medians over several turns. The measurement does not change the model.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.engine.microbatch import batch_size, scatter, split_targets
from penstock.errors import PlanError, did_you_mean
from penstock.profile.analytic import Hardware, get_hardware
from penstock.profile.costs import Crossing, LayerCosts, ModelCosts, Overhead, Profile, SharedParameters
from penstock.profile.timing import ActionTimes, LayerTimings, count_time, measure_overhead, median_times, time_layer
from penstock.split import chain_of
from penstock.split.measure import LayerRun, Measurement, measure, tensor_bytes
from penstock.split.module_state import RandomStates
from penstock.split.plan import LayerChain, Plan
from penstock.split.sample import accelerators_of, sample_arguments
from penstock.train.progress import ProgressUI, progress_ui

TURNS = 4  # number of measurements of each layer, if the budget allows

OptimizerLike = str | float | torch.optim.Optimizer | Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None
"""A name, the ratio of state to parameter bytes, an optimizer, or a function (such as a class) that creates one."""

_STATE_RATIOS = {"sgd": 0.0, "momentum": 1.0, "adam": 2.0, "adamw": 2.0, "adagrad": 1.0, "rmsprop": 1.0, "lion": 1.0}
"""Values of optimizer state per parameter value, of the same dtype."""


def optimizer_state_ratio(optimizer: OptimizerLike, dtype: torch.dtype) -> float:
    """Bytes of optimizer state per byte of a parameter of this dtype.

    An optimizer makes a step on a small parameter. State of another size than the parameter (step counts, factored
    moments) does not count.
    """
    if optimizer is None:
        return 0.0
    if isinstance(optimizer, str):
        if optimizer.lower() not in _STATE_RATIOS:
            hint = did_you_mean(optimizer.lower(), _STATE_RATIOS, otherwise=f": known are {', '.join(_STATE_RATIOS)}")
            raise PlanError(f"optimizer {optimizer!r} is not known by name{hint}. Pass its class instead")
        return _STATE_RATIOS[optimizer.lower()]
    if isinstance(optimizer, bool) or (isinstance(optimizer, int | float) and not 0 <= optimizer < float("inf")):
        raise PlanError(f"optimizer={optimizer!r} must be the ratio of state to parameter bytes")
    if isinstance(optimizer, int | float):
        return float(optimizer)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            parameter = nn.Parameter(torch.ones(3, 5, dtype=dtype))
            if isinstance(optimizer, torch.optim.Optimizer):  # a new one of the same class, with the same options
                trial = copy.copy(optimizer)
                trial.state = defaultdict(dict)
                trial.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
            else:
                trial = optimizer([parameter])
            parameter.grad = torch.ones_like(parameter)
            trial.step()
            state: dict[str, Any] = trial.state[parameter]
    except Exception as error:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise PlanError(
            f"the state of {name} cannot be measured ({type(error).__name__}: {error}): give the ratio of state to "
            "parameter bytes, such as optimizer=2.0"
        ) from error
    grown = [value for value in state.values() if isinstance(value, Tensor) and value.numel() == parameter.numel()]
    return sum(value.numel() * value.element_size() for value in grown) / (parameter.numel() * dtype.itemsize)


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
    threads: int | None = None,
    hardware: str | Hardware | None = None,
    progress: ProgressUI | None = None,
) -> Profile:
    """Measure every layer of a model for about ``seconds`` in total, or until each layer was measured often enough.

    ``sample`` is the input of the model (a tensor, a tuple of arguments or a dict of keyword arguments), with as many
    samples as the largest micro-batch. ``sizes`` are the micro-batch sizes to measure, by default all samples and a
    quarter of them. With ``loss_fn`` and ``targets`` the last layer includes the loss.

    Layers run on ``device``, by default the device of the model. On a CPU they use ``threads`` threads, which should be
    the number of a rank. ``progress`` is the progress display, by default a bar on a terminal.

    With ``hardware`` the layers run once on this machine, and their times are computed from FLOPs and bytes.
    """
    chain = (
        model.require_chain() if isinstance(model, Plan) else chain_of(model) if isinstance(model, nn.Module) else model
    )
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < float("inf"):
        raise PlanError(f"seconds={seconds!r} must be a number from 0 up")
    target = None if hardware is None else get_hardware(hardware)
    clock = None if target is None else partial(count_time, target)
    sample_arguments(sample)  # raises for an invalid sample
    accelerators_of(chain.model, sample)  # raises for meta tensors
    run_device, several_devices = _device(chain, sample, device)
    parts = _size_samples(sample, targets, loss_fn, sizes)
    count = len(chain.layers)
    other_bytes = 2 * sum(map(tensor_bytes, chain.model.parameters()))
    costs = []
    with _preserve_threads_and_rng(threads), progress_ui() if progress is None else nullcontext(progress) as display:
        dtypes = {parameter.dtype for parameter in chain.model.parameters()}
        ratios = {dtype: optimizer_state_ratio(optimizer, dtype) for dtype in dtypes}
        overhead = measure_overhead(run_device, min(0.2, seconds / 20)) if clock is None else ActionTimes(*[0.0] * 5)
        for samples, part, part_targets in parts:
            timings: list[list[LayerTimings]] = [[] for _ in range(count)]

            def timer(
                layer: LayerRun, display: ProgressUI = display, timings: list[list[LayerTimings]] = timings
            ) -> tuple[float, float]:
                budget = seconds / len(parts) / count / TURNS
                timings[layer.index].append(time_layer(layer, run_device, budget, other_bytes, clock))
                display.advance(f"{layer.name} ({layer.index + 1} of {count})")
                return 0.0, 0.0  # only the bytes of the measurement are used

            finish: Callable[[Any], Any] | None = None
            if loss_fn is not None:
                (moved,) = split_targets(part_targets, (batch_size(part_targets, "targets") or 1,), run_device)
                finish = partial(lambda targets, output: loss_fn(output, targets), moved)
            until = perf_counter() + seconds / len(parts)
            while not timings[0] or (clock is None and len(timings[0]) < TURNS and perf_counter() < until):
                display.begin(f"measuring {samples} samples", count)
                placed = None if several_devices else run_device
                measured = measure(chain, part, device=placed, finish=finish, timer=timer)
            firsts, consecutive = zip(*map(median_times, timings), strict=True)
            differences = [one.minus(two) for one, two in zip(firsts, consecutive, strict=True)]
            launch = map(median, zip(*differences, strict=True))
            per_action = ActionTimes(*(round(a + b, 9) for a, b in zip(launch, overhead, strict=True)))
            layers = []
            for one, times, turns in zip(measured.layers, consecutive, timings, strict=True):
                members = {id(tensor): tensor for _, tensor in chain.members(one.name)}.values()
                trained = [t for t in members if isinstance(t, nn.Parameter) and t.requires_grad]
                layer_costs = LayerCosts(
                    name=one.name,
                    **times.minus(overhead)._asdict(),
                    activation=one.activation_bytes,
                    parameters=one.parameter_bytes,
                    gradients=sum(map(tensor_bytes, trained)),
                    optimizer=sum(tensor_bytes(parameter) * ratios[parameter.dtype] for parameter in trained),
                    buffers=sum(tensor_bytes(t) for t in members if not isinstance(t, nn.Parameter)),
                    deferred=turns[0].deferred_bytes,
                )
                layers.append(layer_costs)
            model_costs = ModelCosts(
                layers=tuple(layers),
                crossings=_crossings(chain, measured),
                samples=samples,
                shared=_shared(chain),
                kept_together=_kept_together(measured.kept),
                device=run_device.type if target is None else target.name,
                overhead=Overhead(**per_action._asdict()),
            )
            costs.append(model_costs)
    return Profile(tuple(costs))


def _device(chain: LayerChain, sample: Any, device: str | torch.device | None) -> tuple[torch.device, bool]:
    """The device on which layers run, and whether the model is on several devices."""
    if device is None:
        members = (*chain.model.parameters(), *chain.model.buffers())
        inputs = [leaf for leaf in pytree.tree_leaves(sample) if isinstance(leaf, Tensor)]
        places = list(dict.fromkeys(tensor.device for tensor in members or inputs))
        return (places or [torch.device("cpu")])[0], len(places) > 1
    found = torch.device(device)
    if found.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(f"device {found} is not available: this machine has no CUDA device")
    return torch.device("cuda", torch.cuda.current_device()) if found == torch.device("cuda") else found, False


@contextmanager
def _preserve_threads_and_rng(threads: int | None) -> Iterator[None]:
    """Set the number of intra-op threads; at the end, restore it and the state of the random number generators.

    Modules that torch imports on first use draw random numbers, too.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise PlanError(f"threads={threads!r} must be a number of threads, from 1 up")
    random_state, before = RandomStates(), torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None:
            torch.set_num_threads(before)
        random_state.restore()


def _size_samples(sample: Any, targets: Any, loss_fn: Any, sizes: Iterable[int] | None) -> list[tuple[int, Any, Any]]:
    """The first samples and targets for each size, sliced in the same way as micro-batches."""
    if loss_fn is None and targets is not None:
        raise PlanError("targets= needs loss_fn=")
    batch = batch_size(sample, "sample")
    others = batch_size(targets, "targets")
    if batch is not None and others is not None and batch != others:
        raise PlanError(f"the sample has {batch} samples, but the targets have {others}")
    if batch == 0:
        raise PlanError("the sample is empty: its tensors have no entries along dimension 0")
    whole = batch or 1
    wanted = sorted({whole, max(1, whole // 4)} if sizes is None else set(sizes))
    if not wanted or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= whole for n in wanted):
        raise PlanError(f"sizes={wanted} must be numbers of samples from 1 to {whole}, the samples that are given")

    def first(value: Any, samples: int) -> Any:
        return value if samples == whole else scatter(value, (samples, whole - samples))[0]

    return [(n, first(sample, n), first(targets, n)) for n in wanted]


def _crossings(chain: LayerChain, measured: Measurement) -> tuple[Crossing, ...]:
    """Bytes sent from layer to layer, with a list of values if one of them has several destinations."""
    edges = chain.edges([(layer,) for layer in chain.layers])
    found = []
    for s, cost in enumerate(measured.layers):
        targets = sorted(edge.dst for edge in edges if edge.src == s)
        numbers = [number for values in cost.sends for number in values]
        repeated = len(set(numbers)) < len(numbers)
        for dst, values in zip(targets, cost.sends, strict=True):
            listed = tuple(values.items()) if repeated else ()
            found.append(Crossing(s, dst, sum(values.values()), listed))
    return tuple(found)


def _shared(chain: LayerChain) -> tuple[SharedParameters, ...]:
    """Bytes of tied parameters, by their layers."""
    users: dict[int, dict[int, Tensor]] = defaultdict(dict)  # by tensor and layer
    for i, layer in enumerate(chain.layers):
        for _, tensor in chain.members(layer):
            users[id(tensor)][i] = tensor
    sizes: Counter[tuple[int, ...]] = Counter()
    for of_layer in users.values():
        tensor = next(iter(of_layer.values()))
        if isinstance(tensor, nn.Parameter) and len(of_layer) > 1:
            sizes[tuple(of_layer)] += tensor_bytes(tensor)
    return tuple(SharedParameters(layers, size) for layers, size in sorted(sizes.items()))


def _kept_together(kept: Sequence[Mapping[int, int]]) -> tuple[tuple[int, int, float], ...]:
    """Bytes of activations saved by two layers. A storage counts for each layer and the next layer that saves it."""
    last: dict[int, int] = {}
    sizes: Counter[tuple[int, int]] = Counter()
    for i, storages in enumerate(kept):
        for number, size in storages.items():
            if number in last:
                sizes[last[number], i] += size
            last[number] = i
    return tuple((a, b, float(size)) for (a, b), size in sorted(sizes.items()))
