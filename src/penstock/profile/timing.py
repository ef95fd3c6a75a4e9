"""How long some work takes on a device: by the host's clock, or by a GPU's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.forward_context import caller_context
from penstock.engine.message import Message, flatten, merge_messages
from penstock.engine.recompute.buffers import BufferGuard, version_of
from penstock.engine.recompute.rng import StageRng
from penstock.engine.recorder import deferred_bytes
from penstock.engine.stage import SavedForward, Slot, StageEngine, begin_run
from penstock.split.measure import LONG_LAYER, REPEATS, LayerRun
from penstock.split.sample import backward_roots

__all__ = ["Clock", "Runs", "Span", "Times", "measure_time", "medians_of", "overhead_of", "runs_of", "single_gpu"]

Span = Callable[[], float]
"""The seconds of some work; a GPU is waited for when they are asked for."""

Clock = Callable[[Callable[[], object], set[torch.device]], Span]
"""Does some work, on some devices, and has the seconds that it takes."""


def measure_time(work: Callable[[], object], devices: set[torch.device]) -> Span:
    """Do some work, and take the time that it takes: on the device, if all of it is on one GPU."""
    if (device := single_gpu(devices)) is not None:
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
    took = perf_counter() - start
    return lambda: took


def single_gpu(devices: set[torch.device]) -> torch.device | None:
    """The GPU that does all the work."""
    return next((device for device in devices if len(devices) == 1 and device.type == "cuda"), None)


# How long a layer takes as a stage: F, B, I, W and R, by the engine itself.
#
# A backward that is split leaves for W what the engine can put off (linear, convolution, embedding, norm) and does the
# rest in I. What that is in a given layer is the engine's to know, so it is the engine that runs here, on one
# micro-batch over and over:
#
#     as a stage that keeps its activations     F B   F I W   F B   F I W   …
#     as a stage that is recomputed             F R B   F R B   …
#
# Gradients are summed from one run to the next, as they are from the second micro-batch of a step on. Each action takes
# some microseconds beside its layers: these are known from a stage that does nothing, and taken off.
#
# Layers take turns several times, and the medians are those of all turns: a machine that is slower for a while is so
# for all layers alike, and they are weighed against each other as they are.
#
# A layer that runs over and over finds its weights in the caches of a CPU. In a step others run between, so as much is
# read before each action as these have; but not what comes to the layer, which has just been made.
#
# A GPU works while the next work is launched, and waits where launching takes longer. So it is not waited for, and an
# action runs on some micro-batches in a row: the first is launched by a host that comes from something else, which
# takes it longer, as it does with the first layer of a stage; the others tell what a layer takes after a layer.

ENOUGH = 1000  # runs, for any median
DISTURBED = 3  # times as long as the median, or longer: it was not the layer that took it
FORGOTTEN = 32 << 20  # bytes: more than most caches have of them
IN_A_ROW = 5  # micro-batches, on a GPU

Took = tuple[float, float]
"""The seconds of an action after something else, and after the same action."""


@dataclass(frozen=True)
class Times:
    """The seconds of one layer's actions."""

    forward: float
    backward: float
    input_gradient: float
    weight_gradient: float
    recompute: float

    def beside(self, other: Times) -> Times:
        """What is left of these when the others are taken off."""
        return Times(*(max(0.0, round(a - b, 9)) for a, b in zip(astuple(self), astuple(other), strict=True)))

    def plus(self, other: Times) -> Times:
        """Both together."""
        return Times(*(round(a + b, 9) for a, b in zip(astuple(self), astuple(other), strict=True)))

    @classmethod
    def typical(cls, many: Iterable[Times]) -> Times:
        """The medians."""
        return cls(*map(median, zip(*map(astuple, many), strict=True)))


def overhead_of(device: torch.device, budget: float) -> Times:
    """What the actions of a stage take that does nothing."""
    devices = set() if device.type == "cpu" else {device}
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.ones(1, device=device, requires_grad=True)
        return medians_of([runs_of(LayerRun(0, "nothing", nn.Identity(), [], devices, [1], [value]), device, budget)])[
            1
        ]


@dataclass(frozen=True)
class Runs:
    """What one layer's actions took in one of its turns: F, B, I and W together, and R."""

    kept: list[tuple[Took, ...]]
    recomputed: list[tuple[Took, ...]]
    deferred: int = 0
    """Bytes that wait for W, of one micro-batch."""


def medians_of(turns: Sequence[Runs]) -> tuple[Times, Times]:
    """Of the means of all turns the medians: after something else, and after the same action."""

    def times(which: int) -> Times:
        rows = [
            [
                _mean([took[which] for took in column])
                for column in (*zip(*turn.kept, strict=True), *zip(*turn.recomputed, strict=True))
            ]
            for turn in turns
        ]
        return Times(*(round(median(column), 9) for column in zip(*rows, strict=True)))  # no clock knows more

    return times(0), times(1)


def _mean(seconds: Sequence[float]) -> float:
    """Without what is far from the median: a step has many actions, and what some take longer is a part of it."""
    most = DISTURBED * median(seconds)
    return fmean(one for one in seconds if one <= most)


def runs_of(turn: LayerRun, device: torch.device, budget: float, others: int = 0, clock: Clock | None = None) -> Runs:
    """Run a layer's actions for about ``budget`` seconds; they have run before what is counted.

    ``others`` are the bytes that the other layers have, of parameters and gradients. With a ``clock`` that tells the
    same each time, they run once.
    """
    module = turn.stage if turn.targets else _Roots(turn.stage)
    takes, gives = len(turn.values), max(1, len(turn.targets))
    forget = _forgetting(min(others, FORGOTTEN)) if device.type == "cpu" and clock is None else None
    in_a_row = clock is None and single_gpu(turn.devices) is not None and not _changes_buffers(turn)
    numbers = list(range(IN_A_ROW if in_a_row else 1))

    def timed(action: Callable[..., object], *arguments: Sequence[Any], hot: Iterable[Tensor | None] = ()) -> _Timed:
        if forget is not None:
            forget(hot)
        return _Timed(action, list(zip(*arguments, strict=True)), turn.devices, clock or measure_time)

    def fresh() -> Message:
        return (
            merge_messages([_message(value) for value in turn.inputs()])[0] if takes > 1 else _message(turn.inputs()[0])
        )

    def forwards(engine: StageEngine, slots: Sequence[Slot]) -> tuple[_Timed, list[list[Tensor | None]]]:
        """And gradients for what they give."""
        messages = [fresh() for _ in numbers]
        done = timed(engine.forward, numbers, messages, slots, hot=_tensors(messages[0]))
        return done, [_ones(slot) for slot in slots]

    keeping = StageEngine(turn.index, module, device, num_sources=takes, num_targets=gives)
    wholes, splits = [Slot() for _ in numbers], [Slot(keeping.new_queue()) for _ in numbers]

    waiting: list[int] = []

    def kept() -> list[_Timed]:
        forward, grads = forwards(keeping, wholes)
        backward = timed(keeping.backward, grads, wholes, hot=grads[0])
        _, grads = forwards(keeping, splits)
        input_gradient = timed(keeping.input_gradient, grads, splits, hot=grads[0])
        if not waiting:
            waiting.append(deferred_bytes(splits[0], keeping))
        return [forward, backward, input_gradient, timed(keeping.weight_gradient, splits)]

    again = StageEngine(turn.index, module, device, num_sources=takes, num_targets=gives)
    again.rng, again.buffer_guard = StageRng(module, device, None), BufferGuard(module)
    dropped = [Slot(saved=SavedForward()) for _ in numbers]

    def recomputed() -> list[_Timed]:
        _, grads = forwards(again, dropped)
        recompute = timed(again.recompute, numbers, dropped)
        for gradients, slot in zip(grads, dropped, strict=True):
            again.backward(gradients, slot)
            slot.clear()
        return [recompute]

    begin_run((keeping, again), caller_context(), len(numbers), "measuring")
    with ExitStack() as stack:
        for kind, *_ in caller_context().autocast:  # forwards enter it by themselves; a backward runs outside of it
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.callback(again.close)
        if clock is not None:
            return Runs([_took(kept())], [_took(recomputed())], waiting[0])
        return Runs(_repeated(kept, budget * 0.8), _repeated(recomputed, budget * 0.2), waiting[0])


def _changes_buffers(turn: LayerRun) -> bool:
    """Whether a forward does, so that the backward of the one before it might miss what it saw."""
    buffers = list(turn.stage.buffers())
    before = [version_of(buffer) for buffer in buffers]
    if buffers:
        with torch.no_grad():
            turn.stage(*turn.inputs())
    return [version_of(buffer) for buffer in turn.stage.buffers()] != before


class _Timed:
    """An action on micro-batches in a row, done, and what it took."""

    def __init__(
        self, action: Callable[..., object], calls: list[Any], devices: set[torch.device], clock: Clock = measure_time
    ) -> None:
        self.others = len(calls) - 1
        self.first = clock(lambda: action(*calls[0]), devices)
        self.rest = clock(lambda: [action(*call) for call in calls[1:]], devices) if self.others else None

    def took(self) -> Took:
        first = self.first()
        return first, first if self.rest is None else self.rest() / self.others


class _Roots(nn.Module):
    """The last layer: of what the model gives, that which its backward starts from."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Any) -> Any:
        return backward_roots(self.stage(*values))


def _forgetting(size: int) -> Callable[[Iterable[Tensor | None]], None] | None:
    """Something that has caches forget all but the given tensors, as the work of other layers does."""
    if not size:
        return None
    others = torch.ones(max(1, size // 4))

    def forget(hot: Iterable[Tensor | None]) -> None:
        for tensor in (others, *hot):
            if tensor is not None and tensor.is_floating_point():
                tensor.detach().sum()

    return forget


def _tensors(message: Message) -> list[Tensor]:
    return [leaf for leaf in message.leaves if isinstance(leaf, Tensor)]


def _message(value: Any) -> Message:
    leaves, spec = flatten(value)
    wants = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return Message(leaves, spec, wants).detached()


def _ones(slot: Slot) -> list[Tensor | None]:
    """Gradients for what a forward gave, which is let go of: it has been sent, so to speak."""
    messages = slot.messages or [slot.message]
    grads: list[Tensor | None] = [
        torch.ones_like(message.leaves[i]) for message in messages if message is not None for i in message.wants
    ]
    slot.message, slot.messages = None, []
    return grads


def _repeated(run: Callable[[], list[_Timed]], budget: float) -> list[tuple[Took, ...]]:
    """What runs take: as many as the budget allows, and as many as a median needs."""
    until = perf_counter() + budget
    run()  # is slower than any other
    runs: list[tuple[Took, ...]] = []
    while (perf_counter() < until and len(runs) < ENOUGH) or not _settled(runs):
        runs.append(_took(run()))
    return runs


def _took(run: list[_Timed]) -> tuple[Took, ...]:
    return tuple(timed.took() for timed in run)


def _settled(runs: list[tuple[Took, ...]]) -> bool:
    enough = len(runs) >= 2 and min(sum(first for first, _ in took) for took in runs) > LONG_LAYER
    return len(runs) >= REPEATS or enough
