"""Time the actions of a layer (F, B, I, W and R) by running it as a stage in the engine.

The engine decides which weight gradients of a layer are deferred to W. So the layer runs in the engine, repeatedly on
the same micro-batch:

    as a stage that saves its activations     F B   F I W   F B   F I W   …
    as a stage that is recomputed             F R B   F R B   …

Gradients accumulate in all runs, as in a step from the second micro-batch on. The fixed cost of an action is measured
with an empty stage and subtracted.

Layers are timed in several turns, and the result is the median over the turns: a slow phase of the machine affects all
layers.

On a CPU, a layer that runs repeatedly has its weights in the caches. In a step, other layers run in between. So the
caches are flushed before each action, except for the inputs of the layer, which the previous layer has just computed.

On a GPU, kernels run while the host launches the next ones, and the GPU is idle if launching takes longer. The timing
does not synchronize within an action, which runs on several micro-batches in a row. The first run includes the launch
latency, as for the first layer of a stage. The other runs have the time of a layer that follows another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from penstock._torch import TorchDispatchMode, pytree
from penstock.engine.forward_context import caller_context
from penstock.engine.message import Message, flatten, merge_messages
from penstock.engine.recompute.buffers import BufferGuard, version_of
from penstock.engine.recompute.python_state import PythonStateGuard
from penstock.engine.recompute.rng import StageRng
from penstock.engine.recorder import deferred_bytes
from penstock.engine.stage import SavedForward, Slot, StageEngine, begin_run
from penstock.profile.analytic import Hardware
from penstock.split.measure import LayerRun, repeat_runs, tensor_bytes
from penstock.split.sample import backward_roots

OUTLIER = 3  # runs above this multiple of the median do not count
FLUSHED_BYTES = 32 << 20  # larger than most caches
CONSECUTIVE = 5  # micro-batches in a row, on a GPU

Elapsed = Callable[[], float]
"""Returns the seconds of a call. Calling it synchronizes with the GPU."""

Clock = Callable[[Callable[[], object], set[torch.device]], Elapsed]
"""Calls a function that runs on these devices, and measures its time."""

Seconds = tuple[float, float]
"""The time of an action after other actions, and directly after the same action."""


def measure_time(work: Callable[[], object], devices: set[torch.device]) -> Elapsed:
    """Call ``work`` and measure its time, with CUDA events if it runs on a single GPU."""
    if (device := _single_gpu(devices)) is not None:
        with torch.cuda.device(device):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record()
            work()
            ended.record()

        def on_device() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1000

        return on_device
    for device in devices:
        torch.accelerator.synchronize(device)
    start = perf_counter()
    work()
    for device in devices:
        torch.accelerator.synchronize(device)
    seconds = perf_counter() - start
    return lambda: seconds


def _single_gpu(devices: set[torch.device]) -> torch.device | None:
    return next((device for device in devices if len(devices) == 1 and device.type == "cuda"), None)


class ActionTimes(NamedTuple):
    """Seconds of the actions of one layer."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    recompute: float

    def minus(self, other: ActionTimes) -> ActionTimes:
        return ActionTimes(*(max(0.0, round(a - b, 9)) for a, b in zip(self, other, strict=True)))


def measure_overhead(device: torch.device, budget: float) -> ActionTimes:
    """The times of the actions of an empty stage."""
    devices = set() if device.type == "cpu" else {device}
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones(1, device=device, requires_grad=True)
        empty = LayerRun(0, "nothing", nn.Identity(), [], devices, [1], [value])
        return median_times([time_layer(empty, device, budget)])[1]


class LayerTimings(NamedTuple):
    """The timings of one layer in one turn: rows of F, B, I and W, and rows of R."""

    actions: list[tuple[Seconds, ...]]
    recomputes: list[tuple[Seconds, ...]]
    deferred_bytes: int = 0  # kept from I to W, for one micro-batch


def median_times(turns: Sequence[LayerTimings]) -> tuple[ActionTimes, ActionTimes]:
    """Medians over the turns of the mean of each turn: after other actions, and directly after the same action.

    Outliers do not count. Moderate variation counts, because it occurs in a step, too.
    """

    def mean(seconds: Sequence[float]) -> float:
        limit = OUTLIER * median(seconds)
        return fmean(one for one in seconds if one <= limit)

    def times(which: int) -> ActionTimes:
        rows = [
            [
                mean([seconds[which] for seconds in column])
                for column in (*zip(*turn.actions, strict=True), *zip(*turn.recomputes, strict=True))
            ]
            for turn in turns
        ]
        return ActionTimes(*(round(median(column), 9) for column in zip(*rows, strict=True)))  # clocks have 1 ns

    return times(0), times(1)


def time_layer(
    layer: LayerRun, device: torch.device, budget: float, other_bytes: int = 0, clock: Clock | None = None
) -> LayerTimings:
    """Time the actions of a layer for about ``budget`` seconds, after a warm-up.

    ``other_bytes`` is the size of the parameters and gradients of the other layers. With a ``clock`` that counts
    instead of measuring, each action runs once.
    """
    module = layer.stage if layer.targets else _BackwardRoots(layer.stage)
    num_sources, num_targets = len(layer.values), max(1, len(layer.targets))
    flushed = min(other_bytes, FLUSHED_BYTES) if device.type == "cpu" and clock is None else 0
    others = torch.ones(-(-flushed // 4))
    consecutive = clock is None and _single_gpu(layer.devices) is not None and not _changes_buffers(layer)
    numbers = list(range(CONSECUTIVE if consecutive else 1))

    def timed(
        action: Callable[..., object], *arguments: Sequence[Any], hot: Iterable[Tensor | None] = ()
    ) -> Callable[[], Seconds]:
        if flushed:
            flush_caches(others, hot)
        return time_action(action, list(zip(*arguments, strict=True)), layer.devices, clock or measure_time)

    def input_message() -> Message:
        messages = []
        for leaves, spec in map(flatten, layer.inputs()):
            wants = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
            messages.append(Message(leaves, spec, wants).detached())
        return merge_messages(messages)[0] if num_sources > 1 else messages[0]

    def forwards(engine: StageEngine, slots: Sequence[Slot]) -> tuple[Callable[[], Seconds], list[list[Tensor | None]]]:
        """Time a forward; return gradients of ones for its outputs, which are released as after a send."""
        messages = [input_message() for _ in numbers]
        hot = [leaf for leaf in messages[0].leaves if isinstance(leaf, Tensor)]
        done = timed(engine.forward, numbers, messages, slots, hot=hot)
        grads: list[list[Tensor | None]] = []
        for slot in slots:
            sent = [message for message in slot.messages if message is not None]
            grads.append([torch.ones_like(message.leaves[i]) for message in sent for i in message.wants])
            slot.messages = []
        return done, grads

    saving = StageEngine(layer.index, module, device, num_sources=num_sources, num_targets=num_targets)
    full, split = [Slot() for _ in numbers], [Slot(saving.new_queue()) for _ in numbers]
    deferred: list[int] = []

    def actions() -> list[Callable[[], Seconds]]:
        forward, grads = forwards(saving, full)
        backward = timed(saving.backward, grads, full, hot=grads[0])
        _, grads = forwards(saving, split)
        input_gradient = timed(saving.input_gradient, grads, split, hot=grads[0])
        if not deferred:
            deferred.append(deferred_bytes(split[0], saving))
        return [forward, backward, input_gradient, timed(saving.weight_gradient, split)]

    recomputing = StageEngine(layer.index, module, device, num_sources=num_sources, num_targets=num_targets)
    recomputing.rng, recomputing.buffer_guard = StageRng(module, device, None), BufferGuard(module)
    recomputing.python_state = PythonStateGuard(module)
    dropped = [Slot(saved=SavedForward()) for _ in numbers]

    def recomputes() -> list[Callable[[], Seconds]]:
        _, grads = forwards(recomputing, dropped)
        recompute = timed(recomputing.recompute, numbers, dropped)
        for gradients, slot in zip(grads, dropped, strict=True):
            recomputing.backward(gradients, slot)
        return [recompute]

    def repeat(run: Callable[[], list[Callable[[], Seconds]]], share: float) -> list[tuple[Seconds, ...]]:
        def times() -> tuple[Seconds, ...]:
            return tuple(seconds() for seconds in run())

        if clock is not None:
            return [times()]
        until = perf_counter() + share * budget
        run()  # warm-up
        return repeat_runs(times, until - perf_counter(), lambda row: sum(first for first, _ in row))

    begin_run((saving, recomputing), caller_context(), [None] * len(numbers), "measuring")
    with ExitStack() as stack:
        for kind, *_ in caller_context().autocast:  # the engine enters autocast for forwards, but not for backwards
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(recomputing.close)
        return LayerTimings(repeat(actions, 0.8), repeat(recomputes, 0.2), deferred[0])


def flush_caches(others: Tensor, hot: Iterable[Tensor | None]) -> None:
    """Evict all tensors from the caches except the hot ones, by reading ``others``."""
    for tensor in (others, *hot):
        if tensor is not None and tensor.is_floating_point():
            tensor.detach().sum()


def _changes_buffers(layer: LayerRun) -> bool:
    """Whether a forward writes to buffers, so that a second forward would invalidate the backward of the first."""
    buffers = list(layer.stage.buffers())
    before = [version_of(buffer) for buffer in buffers]
    if buffers:
        with torch.no_grad():
            layer.stage(*layer.inputs())
    return [version_of(buffer) for buffer in layer.stage.buffers()] != before


def time_action(
    action: Callable[..., object], calls: list[Any], devices: set[torch.device], clock: Clock
) -> Callable[[], Seconds]:
    """Run an action on consecutive micro-batches; return a function for the first time and the mean of the others."""
    first = clock(lambda: action(*calls[0]), devices)
    others = clock(lambda: [action(*call) for call in calls[1:]], devices) if calls[1:] else None

    def seconds() -> Seconds:
        alone = first()
        return alone, alone if others is None else others() / (len(calls) - 1)

    return seconds


class _BackwardRoots(nn.Module):
    """The last layer; its outputs are only the tensors with which its backward starts."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Any) -> Any:
        return backward_roots(self.stage(*values))


# ── hardware that is not present ─────────────────────────────────────────────────────────────────────────────────

LAUNCH = 2e-6  # seconds to launch an operation (assumption)
_LOOKUPS = ("aten::embedding", "aten::index", "aten::index_select", "aten::gather")  # read only the bytes they return
_NO_TRAFFIC = (  # views that torch does not mark as views, and allocations
    "aten::detach", "aten::_unsafe_view", "aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided",
    "aten::new_empty_strided",
)  # fmt: skip


def count_time(hardware: Hardware, work: Callable[[], object], devices: set[torch.device]) -> Elapsed:
    """A clock for hardware that is not present: operations run on this machine, and their FLOPs and bytes are counted.

    The time of an operation is the maximum of its FLOPs at the effective rate of the hardware, of the bytes that it
    reads and writes at the effective memory bandwidth, and of the launch latency.
    """
    with _CostCounter(hardware) as counter:
        work()
    return lambda: counter.seconds


class _CostCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the time of all operations inside the block."""

    def __init__(self, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hardware, self.seconds = hardware, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if schema.name in _NO_TRAFFIC or (func.is_view and not schema.is_mutable):
            return result
        tensors = pytree.tree_leaves((result, result) if schema.name in _LOOKUPS else (args, kwargs, result))
        moved = float(sum(tensor_bytes(leaf) for leaf in tensors if isinstance(leaf, Tensor)))
        if moved:
            products = self.hardware.compute(_flops(func, args, kwargs, result))
            self.seconds += max(products, self.hardware.move(moved), LAUNCH)
        return result


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    """FLOPs of matrix products, convolutions and attention; 0 for other operations."""
    count = flop_registry.get(func._overloadpacket)
    if count is not None:
        return float(count(*args, **kwargs, out_val=result))
    name = func._schema.name
    if not name.startswith("aten::_scaled_dot_product"):  # torch does not count the CPU's kernels
        return 0.0
    query, key = args[1:3] if name.endswith("backward") else args[:2]
    forward: float = 4.0 * query.numel() * key.shape[-2]
    return 2.5 * forward if name.endswith("backward") else forward
