"""What the layers of a chain weigh: their parameters, the memory that they take, and limits on it."""

from __future__ import annotations

import math
import re
import statistics
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.chain import LayerChain, build_plan
from penstock.split.sample import accelerators_of, backward_roots, preserve_state, sample_arguments, temporary_copies

__all__ = [
    "LONG_LAYER",
    "REPEATS",
    "TRAINING_FACTOR",
    "LayerCost",
    "LayerRun",
    "LayerTimer",
    "Measurement",
    "layer_memory",
    "measure",
    "memory_limits",
    "parameter_counts",
    "parse_bytes",
    "tensor_bytes",
]

TRAINING_FACTOR = 4.0
"""How many times its own size a parameter takes in training: itself, its gradient, two states of the optimizer."""

_UNITS = {"": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** n for n, letter in enumerate("kmgt", 1) for i in ("", "i")
}
_UNITS["b"] = 1


@dataclass(frozen=True)
class LayerCost:
    """What one layer costs on a sample: seconds and bytes."""

    name: str
    forward: float
    backward: float
    activation_bytes: int
    parameter_bytes: int
    sends: tuple[Mapping[int, int], ...]
    """What goes over each edge that leaves it, in the order of their destinations: the numbers of its values (one that
    goes over several edges has one number) and their bytes."""

    @property
    def output_bytes(self) -> tuple[int, ...]:
        """The bytes that go over each edge."""
        return tuple(sum(values.values()) for values in self.sends)


@dataclass(frozen=True)
class Measurement:
    """What all layers cost, and what they share."""

    layers: tuple[LayerCost, ...]
    kept: tuple[Mapping[int, int], ...]
    """What each layer keeps for its backward: the number of a storage, and its bytes."""
    crossing: tuple[int, ...]
    """The bytes that cross a cut before each layer; what several layers behind it need counts once."""


def tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def parameter_counts(chain: LayerChain) -> list[int]:
    """The number of parameters of each layer, and one more.

    A layer without parameters is not free: one unit keeps such layers from all landing in one stage. What two layers
    share counts in both, since both have to compute with it.
    """
    counts = []
    for layer in chain.layers:
        own = {id(tensor): tensor.numel() for _, tensor in chain.members(layer) if isinstance(tensor, nn.Parameter)}
        counts.append(1 + sum(own.values()))
    return counts


def layer_memory(
    chain: LayerChain, measured: Measurement | None, *, scale: float = TRAINING_FACTOR, chunks: int = 1
) -> list[dict[Hashable, float]]:
    """The bytes that each layer takes, piece by piece, so that a stage counts what its layers share once.

    A parameter that is trained counts ``scale`` times, one that is frozen and a buffer once. With a measurement, the
    values that its backward needs count too: those of one micro-batch, if the sample makes ``chunks`` of them.
    """
    pieces: list[dict[Hashable, float]] = []
    for i, layer in enumerate(chain.layers):
        taken: dict[Hashable, float] = {}
        for _, tensor in chain.members(layer):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            taken["member", id(tensor)] = tensor_bytes(tensor) * (scale if trained else 1)
        if measured is not None:
            taken.update((("kept", key), size / chunks) for key, size in measured.kept[i].items())
        pieces.append(taken)
    return pieces


def memory_limits(memory: Any, stages: int) -> list[int]:
    """The limit of each stage in bytes, from one for all stages or a list with one for each."""
    if isinstance(memory, (str, int, float)) or not isinstance(memory, Iterable):
        return [parse_bytes(memory)] * stages
    limits = [parse_bytes(limit) for limit in memory]
    if len(limits) != stages:
        raise PlanError(f"memory has {len(limits)} limits, but there are {stages} stages: give one for each, or one")
    return limits


def parse_bytes(size: Any) -> int:
    """A number of bytes, from a number or a text such as "16GiB" or "500 MB"."""
    number, unit = size, ""
    if isinstance(size, str):
        found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-zA-Z]*)\s*", size)
        if found is None or found[2].lower() not in _UNITS:
            raise PlanError(f'memory={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
        number, unit = float(found[1]), found[2].lower()
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
        raise PlanError(f'memory={size!r} is not a size: write a number of bytes, "16GiB" or "500MB"')
    return int(number * _UNITS[unit])


# What each layer of a chain costs, measured on a sample: time of forward and backward, memory, bytes sent on.
#
# Every layer runs as a stage of its own, with the values that come to it along the edges, and the model is left as it
# was. A copy of the model might not fit, so the layers take turns: only one at a time works on copies of its tensors.
#
#     layer 0   copies of its tensors ─▶ F (counted) B  F B  F B … ─▶ its own tensors again
#     layer 1                                   └─ output ─▶ copies ─▶ F (counted) B  F B …
#
# What is saved for backward counts by storage: autograd is asked what it keeps, a storage that it keeps several times
# counts once, parameters and buffers do not count (they are there anyway), the layer's input counts if it is kept.
# A value that a layer keeps and the next one too has the same number in both, so that a stage can count it once.
# What an autograd function keeps otherwise than by ``save_for_backward`` is not seen.
#
# A front end that runs much of the model in every stage has that in every layer's time: nothing is subtracted.

REPEATS = 5  # at least, for a median that two disturbances do not decide
LONG_LAYER = (
    0.05  # seconds: a layer that takes longer than that twice is not repeated further, disturbances are shorter
)


@dataclass(frozen=True)
class LayerRun:
    """A layer whose turn it is: its tensors are copies now, its forward and backward have run once."""

    index: int
    name: str
    stage: nn.Module
    members: Sequence[Tensor]
    devices: set[torch.device]
    targets: Sequence[int]
    values: Sequence[Any]

    def inputs(self) -> list[Any]:
        """What the stage is called with, in copies of its own."""
        return _fresh_inputs(self.values)

    def clear(self) -> None:
        """Drop the gradients."""
        for tensor in self.members:
            tensor.grad = None


LayerTimer = Callable[[LayerRun], tuple[float, float]]
"""The seconds of forward and backward of a layer whose turn it is."""


def measure(
    chain: LayerChain,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: str | torch.device | None = None,
    finish: Callable[[Any], Any] | None = None,
    timer: LayerTimer | None = None,
) -> Measurement:
    """Run the chain layer by layer on ``sample``, forward and backward, each in the modes that it is in.

    ``sample`` is what the model is called with: a tensor, a tuple of positional arguments or a dict of keywords.
    Layers are repeated for about ``timeout`` seconds altogether, and the medians taken; on ``device``, if given,
    to which each of them goes in its turn. Hooks on the model's modules do run.

    ``finish`` is called with the model's output, such as its loss, and belongs to the last layer. ``timer`` times a
    layer otherwise than as said.
    """
    entry = chain.arguments(*sample_arguments(sample))
    plan = build_plan(chain, [(layer,) for layer in chain.layers])
    there = None if device is None else torch.device(device)
    devices = accelerators_of(chain.model, entry)
    if there is not None and there.type != "cpu":
        devices.add(there)
    storages, count = _Storages(), len(chain.layers)
    timer = timer or partial(_median_times, budget=timeout / count)
    layers, kept, crossing = list[LayerCost](), list[Mapping[int, int]](), [0] * count

    with torch.inference_mode(False), torch.enable_grad(), preserve_state(chain.model, devices):
        under_way: dict[tuple[int, int], Any] = {(-1, 0): _to_edge_tensors(entry, storages, {}, there)}
        for s, layer in enumerate(chain.layers):
            values = [under_way.pop((src, s)) for src in plan.sources(s) or [-1]]
            targets, passed, last = plan.targets(s), dict[int, _EdgeTensor](), s == count - 1
            with _name_layer_in_errors(chain, s):
                stage = plan.stage_module(s)
                if last and finish is not None:
                    stage = _StageWithLoss(stage, finish)
                members = [*stage.parameters(), *stage.buffers(), *(tensor for _, tensor in chain.members(layer))]
                with temporary_copies(members, there):
                    output, keeps = _run_counting_memory(stage, values, members, storages)
                    for dst, value in zip(targets, output if len(targets) > 1 else [output], strict=not last):
                        under_way[s, dst] = _to_edge_tensors(value, storages, passed, None, dst)
                    del output
                    turn = LayerRun(s, layer, stage, members, devices, targets, values)
                    turn.clear()
                    forward, backward = timer(turn)
                    turn.clear()
            for one in passed.values():
                for cut in range(s + 1, one.dst + 1):
                    crossing[cut] += tensor_bytes(one.data)
            own = {id(t): tensor_bytes(t) for _, t in chain.members(layer) if isinstance(t, nn.Parameter)}
            sent = tuple(_sizes(under_way[s, dst], list(passed.values())) for dst in targets)
            layers.append(LayerCost(layer, forward, backward, sum(keeps.values()), sum(own.values()), sent))
            kept.append(keeps)
    return Measurement(tuple(layers), tuple(kept), tuple(crossing))


# ── one layer ────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _EdgeTensor:
    """A tensor on its way along edges, cut off from the graph of the layer that made it."""

    data: Tensor
    requires_grad: bool
    storage: int
    dst: int

    def fresh(self) -> Tensor:
        """A copy that a layer may write to, as it may to what another layer gives it."""
        return self.data.detach().requires_grad_(self.requires_grad).clone()


class _Storages:
    """Numbers for storages: the same one for a value in the layer that makes it and in the layers that get it."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._here: dict[int, int] = {}

    def enter(self, inputs: Iterable[tuple[Tensor, int]]) -> None:
        """A layer starts, with copies of values whose storages have numbers."""
        self._here = {_storage(tensor)[0]: number for tensor, number in inputs}

    def number(self, tensor: Tensor) -> int:
        place, size = _storage(tensor)
        if place not in self._here:
            self._here[place] = len(self.sizes)
            self.sizes.append(size)
        return self._here[place]


class _SavedTensor:
    """What autograd keeps in place of a tensor, for as long as it keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


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
            # What enters is copied: a sample may be a few rows of a large tensor, and has its own size here.
            data = leaf.detach() if dst else leaf.detach().to(device or leaf.device, copy=True)
            memo[id(leaf)] = _EdgeTensor(data, leaf.requires_grad, storages.number(data), dst)
        memo[id(leaf)].dst = max(memo[id(leaf)].dst, dst)
        return memo[id(leaf)]

    return pytree.tree_map(one, value)


def _edge_tensors(value: Any) -> list[_EdgeTensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, _EdgeTensor)]


def _sizes(value: Any, passed: Sequence[_EdgeTensor]) -> dict[int, int]:
    """What goes over an edge: the numbers of its tensors among those that the layer passes on, with their bytes."""
    sizes: dict[int, int] = {}
    for one in _edge_tensors(value):
        number = passed.index(one)
        sizes[number] = sizes.get(number, 0) + tensor_bytes(one.data)
    return sizes


class _StageWithLoss(nn.Module):
    """The last layer, and what is done with its output."""

    def __init__(self, stage: nn.Module, finish: Callable[[Any], Any]) -> None:
        super().__init__()
        self.stage, self.finish = stage, finish

    def forward(self, *values: Any) -> Any:
        return self.finish(self.stage(*values))


def _fresh_inputs(values: Sequence[Any]) -> list[Any]:
    return [pytree.tree_map(lambda leaf: leaf.fresh() if isinstance(leaf, _EdgeTensor) else leaf, v) for v in values]


def _run_counting_memory(
    stage: nn.Module, values: Sequence[Any], members: Sequence[Tensor], storages: _Storages
) -> tuple[Any, dict[int, int]]:
    """A layer's output, and what it keeps for its backward, which is run too: all of it is warm afterwards."""
    held: list[weakref.ref[_SavedTensor]] = []

    def pack(tensor: Tensor) -> _SavedTensor:
        holder = _SavedTensor(tensor)
        held.append(weakref.ref(holder))
        return holder

    inputs = _fresh_inputs(values)
    copies = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    storages.enter(zip(copies, (one.storage for value in values for one in _edge_tensors(value)), strict=True))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        output = stage(*inputs)
    there_anyway = {_storage(tensor)[0] for tensor in members}
    alive = [holder.tensor for ref in held if (holder := ref()) is not None]  # a graph may be dropped on the way
    numbers = {storages.number(tensor) for tensor in alive if _storage(tensor)[0] not in there_anyway}
    roots = backward_roots(output)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    return output, {number: storages.sizes[number] for number in sorted(numbers)}


def _median_times(turn: LayerRun, budget: float) -> tuple[float, float]:
    """The medians of the seconds that forward and backward take."""
    forward, backward, devices = list[float](), list[float](), turn.devices
    until = time.perf_counter() + budget
    while time.perf_counter() < until or not _enough_runs(forward, backward):
        inputs = turn.inputs()
        began = _synchronized_time(devices)
        output = turn.stage(*inputs)
        forward.append(_synchronized_time(devices) - began)
        roots = backward_roots(output)
        ones = [torch.ones_like(root) for root in roots]
        began = _synchronized_time(devices)
        if roots:
            torch.autograd.backward(roots, ones)
        backward.append(_synchronized_time(devices) - began if roots else 0.0)
        turn.clear()
    return statistics.median(forward), statistics.median(backward)


def _enough_runs(forward: Sequence[float], backward: Sequence[float]) -> bool:
    """Whether a layer was run often enough for a median."""
    return len(forward) >= REPEATS or (len(forward) >= 2 and min(map(add, forward, backward)) > LONG_LAYER)


def _synchronized_time(devices: set[torch.device]) -> float:
    """The time, when the devices have done what they were given to do."""
    for device in devices:
        torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def _name_layer_in_errors(chain: LayerChain, index: int) -> Iterator[None]:
    """Errors say which layer it was."""
    try:
        yield
    except Exception as error:
        where = f"layer {chain.layers[index]} (number {index + 1} of {len(chain.layers)})"
        raise PlanError(f"{where} does not run on the sample: {type(error).__name__}: {error}") from error
