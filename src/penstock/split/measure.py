"""Measure each layer of a chain on a sample: time of forward and backward, memory, bytes sent.

Each layer runs as a stage of its own, on the values that arrive along its edges. The model is not changed: while a
layer runs, its tensors hold copies of their data. A copy of the whole model might not fit, so layers run in turn:

    layer 0   copy tensors ─▶ F (memory counted) B  F B  F B … ─▶ restore
    layer 1                        └─ output ─▶ copy tensors ─▶ F (memory counted) B  F B …

Tensors saved for backward are counted by storage: a storage that is saved several times counts once, parameters and
buffers do not count, the layer's input counts if it is saved. A storage that two layers save has the same number in
both, so that a stage counts it once. Tensors that an autograd function keeps without ``save_for_backward`` are not
seen.

A front end that runs shared code in every stage has it in the time of every layer: nothing is subtracted.
"""

from __future__ import annotations

import statistics
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.plan import LayerChain, build_plan
from penstock.split.sample import accelerators_of, backward_roots, preserve_state, sample_arguments, temporary_copies

T = TypeVar("T")

REPEATS = 5  # the least number of runs: a median that two outliers do not change
MAX_REPEATS = 1000
LONG_LAYER = 0.05  # seconds: a layer that takes longer is run twice only, since outliers are shorter


@dataclass(frozen=True)
class LayerMeasurement:
    """Time and memory of one layer on a sample, in seconds and bytes."""

    name: str
    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int
    sends: tuple[Mapping[int, int], ...]
    """Per outgoing edge, ordered by destination: the bytes of each value by number. A value on several edges has one
    number."""


@dataclass(frozen=True)
class Measurement:
    """Time and memory of all layers."""

    layers: tuple[LayerMeasurement, ...]
    kept: tuple[Mapping[int, int], ...]
    """Per layer: the bytes of each storage saved for backward, by storage number."""
    crossing: tuple[int, ...]
    """Per layer: the bytes that cross a cut before it; a value with several users counts once."""


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class LayerRun:
    """A layer that is ready to be timed: its tensors hold copies, its forward and backward have run once."""

    index: int
    name: str
    stage: nn.Module
    members: Sequence[Tensor]
    devices: set[torch.device]
    targets: Sequence[int]
    values: Sequence[Any]

    def inputs(self) -> list[Any]:
        """Fresh copies of the stage's inputs."""
        return [pytree.tree_map(lambda x: x.fresh() if isinstance(x, _EdgeTensor) else x, v) for v in self.values]

    def clear_grads(self) -> None:
        for tensor in self.members:
            tensor.grad = None


def measure(
    chain: LayerChain,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: str | torch.device | None = None,
    finish: Callable[[Any], Any] | None = None,
    timer: Callable[[LayerRun], tuple[float, float]] | None = None,
) -> Measurement:
    """Run the chain layer by layer on ``sample``, forward and backward, in the modules' present modes.

    Layers are repeated for about ``timeout`` seconds in total and the medians are taken. Each layer is moved to
    ``device``, if given, while it runs. Hooks on the model's modules run.

    ``finish`` is applied to the model's output, for example a loss function; its cost belongs to the last layer.
    ``timer`` replaces the timing of a layer: it returns the seconds of its forward and backward.
    """
    entry = chain.arguments(*sample_arguments(sample))
    plan = build_plan(chain, [(layer,) for layer in chain.layers])
    target = None if device is None else torch.device(device)
    devices = accelerators_of(chain.model, entry)
    if target is not None and target.type != "cpu":
        devices.add(target)
    storages, count = _Storages(), len(chain.layers)
    timer = timer or partial(_median_times, budget=timeout / count)
    layers, saved, crossing = list[LayerMeasurement](), list[Mapping[int, int]](), [0] * count

    with torch.inference_mode(False), torch.enable_grad(), preserve_state(chain.model, devices):
        edge_values: dict[tuple[int, int], Any] = {(-1, 0): _to_edge_tensors(entry, storages, {}, target)}
        for s, layer in enumerate(chain.layers):
            values = [edge_values.pop((src, s)) for src in plan.sources(s) or [-1]]
            targets, passed, last = plan.targets(s), dict[int, _EdgeTensor](), s == count - 1
            try:
                stage = plan.stage_module(s)
                if last and finish is not None:
                    stage = _StageWithLoss(stage, finish)
                members = [*stage.parameters(), *stage.buffers(), *(tensor for _, tensor in chain.members(layer))]
                run = LayerRun(s, layer, stage, members, devices, targets, values)
                with temporary_copies(members, target):
                    output, saved_bytes = _run_counting_memory(run, storages)
                    for dst, value in zip(targets, output if len(targets) > 1 else [output], strict=not last):
                        edge_values[s, dst] = _to_edge_tensors(value, storages, passed, None, dst)
                    del output
                    run.clear_grads()
                    forward, backward = timer(run)
                    run.clear_grads()
            except Exception as error:
                where = f"layer {layer} (number {s + 1} of {count})"
                raise PlanError(f"{where} does not run on the sample: {type(error).__name__}: {error}") from error
            for tensor in passed.values():
                for cut in range(s + 1, tensor.dst + 1):
                    crossing[cut] += tensor_bytes(tensor.data)
            own = {id(t): tensor_bytes(t) for _, t in chain.members(layer) if isinstance(t, nn.Parameter)}
            sent = tuple(_sizes(edge_values[s, dst], list(passed.values())) for dst in targets)
            layers.append(
                LayerMeasurement(layer, forward, backward, sum(saved_bytes.values()), sum(own.values()), sent)
            )
            saved.append(saved_bytes)
    return Measurement(tuple(layers), tuple(saved), tuple(crossing))


@dataclass(eq=False)
class _EdgeTensor:
    """A tensor sent along edges, detached from the graph of the layer that made it."""

    data: Tensor
    requires_grad: bool
    storage: int
    dst: int

    def fresh(self) -> Tensor:
        """A copy that the receiving layer may modify in place."""
        return self.data.detach().requires_grad_(self.requires_grad).clone()


class _Storages:
    """Numbers storages: a value has the same number in the layer that makes it and in those that receive it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._current: dict[int, int] = {}

    def enter(self, inputs: Iterable[tuple[Tensor, int]]) -> None:
        """Begin a layer, whose inputs are copies of values whose storages have numbers."""
        self._current = {_storage(tensor)[0]: number for tensor, number in inputs}

    def number(self, tensor: Tensor) -> int:
        place, size = _storage(tensor)
        if place not in self._current:
            self._current[place] = len(self.sizes)
            self.sizes.append(size)
        return self._current[place]


def _storage(tensor: Tensor) -> tuple[int, int]:
    if tensor.layout is not torch.strided:
        return id(tensor), tensor_bytes(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _to_edge_tensors(
    value: Any, storages: _Storages, memo: dict[int, _EdgeTensor], device: torch.device | None, dst: int = 0
) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in memo:
            # Inputs are copied: a sample may be a view of a large tensor, and must count by its own size.
            data = leaf.detach() if dst else leaf.detach().to(device or leaf.device, copy=True)
            memo[id(leaf)] = _EdgeTensor(data, leaf.requires_grad, storages.number(data), dst)
        memo[id(leaf)].dst = max(memo[id(leaf)].dst, dst)
        return memo[id(leaf)]

    return pytree.tree_map(one, value)


def _edge_tensors(value: Any) -> list[_EdgeTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _EdgeTensor)]


def _sizes(value: Any, passed: Sequence[_EdgeTensor]) -> dict[int, int]:
    """The bytes of the tensors on an edge, by their number among the tensors that the layer sends."""
    sizes: Counter[int] = Counter()
    for one in _edge_tensors(value):
        sizes[passed.index(one)] += tensor_bytes(one.data)
    return dict(sizes)


class _StageWithLoss(nn.Module):
    def __init__(self, stage: nn.Module, finish: Callable[[Any], Any]) -> None:
        super().__init__()
        self.stage, self.finish = stage, finish

    def forward(self, *values: Any) -> Any:
        return self.finish(self.stage(*values))


def _run_counting_memory(run: LayerRun, storages: _Storages) -> tuple[Any, dict[int, int]]:
    """Run forward and backward once, as a warm-up; the output, and the bytes saved for backward by storage number."""
    saved: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        detached = tensor.detach()  # freed with the graph
        saved.append(weakref.ref(detached))
        return detached

    inputs = run.inputs()
    copies = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    storages.enter(zip(copies, (one.storage for value in run.values for one in _edge_tensors(value)), strict=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run.stage(*inputs)
    member_storages = {_storage(tensor)[0] for tensor in run.members}
    alive = [tensor for ref in saved if (tensor := ref()) is not None]  # the graph may be freed in part
    numbers = {storages.number(tensor) for tensor in alive if _storage(tensor)[0] not in member_storages}
    roots = backward_roots(output)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return output, {number: storages.sizes[number] for number in sorted(numbers)}


def _median_times(run: LayerRun, budget: float) -> tuple[float, float]:
    """The median seconds of forward and backward."""

    def once() -> tuple[float, float]:
        inputs = run.inputs()
        start = _synchronized_time(run.devices)
        output = run.stage(*inputs)
        forward = _synchronized_time(run.devices) - start
        roots = backward_roots(output)
        ones = [torch.ones_like(root) for root in roots]
        start = _synchronized_time(run.devices)
        if roots:
            torch.autograd.backward(roots, ones)
        backward = _synchronized_time(run.devices) - start if roots else 0.0
        run.clear_grads()
        return forward, backward

    forward, backward = zip(*repeat_runs(once, budget, lambda times: times[0] + times[1]), strict=True)
    return statistics.median(forward), statistics.median(backward)


def repeat_runs(run: Callable[[], T], budget: float, seconds: Callable[[T], float]) -> list[T]:
    """The results of ``run``, called for ``budget`` seconds and often enough for a median.

    ``seconds`` is the time of a run, given its result.
    """
    until, runs = perf_counter() + budget, list[T]()
    while True:
        enough = len(runs) >= REPEATS or (len(runs) >= 2 and min(map(seconds, runs)) > LONG_LAYER)
        if enough and (perf_counter() >= until or len(runs) >= MAX_REPEATS):
            return runs
        runs.append(run())


def _synchronized_time(devices: set[torch.device]) -> float:
    """The time after all work on ``devices`` has finished."""
    for device in devices:
        torch.accelerator.synchronize(device)
    return perf_counter()
