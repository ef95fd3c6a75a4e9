"""What the layers of a model cost, and what lies between devices: plain data, measured, computed or written by hand.

    costs = ModelCosts.load("costs.json")
    costs.layers[3].forward      # seconds for one micro-batch of costs.samples samples

Whatever they come from, costs without a hole or a number that is none are all that there can be: else it is an error
here, which names the layer.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PlanError

__all__ = ["Crossing", "LayerCosts", "Link", "ModelCosts", "Overhead", "SharedParameters"]


@dataclass(frozen=True)
class LayerCosts:
    """One layer, for one micro-batch: seconds and bytes."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    recompute: float  # the forward once more, without what need not be repeated
    activation: float  # what its backward needs, from F to W
    parameters: float
    gradients: float
    optimizer: float  # its states of the optimizer
    buffers: float = 0.0
    backward: float | None = None  # the whole backward at once, where it is known; else it takes as long as both halves
    deferred: float | None = None  # what waits for W from I on, where it is known; else it is the activation

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"a layer's name must be a text, got {self.name!r}")
        for what in (*TIMES, *BYTES):
            check_number(getattr(self, what), f"layer {self.name!r}: {what}")
        for what in ("backward", "deferred"):
            if getattr(self, what) is not None:
                check_number(getattr(self, what), f"layer {self.name!r}: {what}")

    @property
    def full_backward(self) -> float:
        """The seconds of a backward that is not split."""
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    @property
    def waits(self) -> float:
        """The bytes that its weight gradient needs while it waits."""
        return self.activation if self.deferred is None else self.deferred

    @property
    def work(self) -> float:
        """Forward and backward."""
        return self.forward + self.full_backward


LARGEST = 1e30  # seconds or bytes: beyond that it is a mistake, and what is computed of it would be no number
TIMES = ("forward", "input_gradient", "weight_gradient", "recompute")
BYTES = ("activation", "parameters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class Crossing:
    """What goes from one layer to a later one: the activation to the next, or a skip.

    ``values`` are the numbers and bytes of the values that it consists of, where they are known. A value that goes to
    several layers has the same number in each of their crossings, and a stage that has several of these gets it once.
    """

    src: int
    dst: int
    bytes: float
    values: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_number(self.bytes, f"what crosses from layer {self.src} to layer {self.dst}: bytes")
        for number, size in self.values:
            check_number(size, f"what crosses from layer {self.src} to layer {self.dst}: bytes of value {number}")
        total = sum(size for _, size in self.values)
        if self.values and not math.isclose(total, self.bytes, abs_tol=0.5):
            raise PlanError(
                f"what crosses from layer {self.src} to layer {self.dst} has {self.bytes} bytes, but its values "
                f"have {total} together"
            )


@dataclass(frozen=True)
class SharedParameters:
    """Bytes of parameters that several layers have (a tie): a stage that has several of these layers has them once."""

    layers: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        check_number(self.bytes, f"the parameters that layers {list(self.layers)} share: bytes")


@dataclass(frozen=True)
class Link:
    """From one device to another: a value of n bytes arrives after ``latency + n / bandwidth`` seconds.

    Ranks that compute on the host do not compute while it sends and receives: at each end a value takes
    ``host + n / host_bandwidth`` seconds of its rank's own time.
    """

    latency: float = 0.0
    bandwidth: float = float("inf")
    host: float = 0.0
    host_bandwidth: float = float("inf")

    def __post_init__(self) -> None:
        for what in ("latency", "host"):
            check_number(getattr(self, what), f"link: {what}")
        for what in ("bandwidth", "host_bandwidth"):
            if getattr(self, what) != math.inf:
                check_number(getattr(self, what), f"link: {what}")
            if getattr(self, what) == 0:
                raise PlanError(f"link: {what} is 0, which would never deliver anything: it must be above that")

    def seconds(self, size: float) -> float:
        """How long a value of ``size`` bytes is under way."""
        return self.latency + size / self.bandwidth

    def host_seconds(self, size: float) -> float:
        """What a value of ``size`` bytes takes of the time of the rank that sends it, and of the one that gets it."""
        return self.host + size / self.host_bandwidth

    def summing(self, size: float, devices: int) -> float:
        """How long it takes to add up ``size`` bytes of each of so many devices, around a ring."""
        return 2 * (devices - 1) * self.seconds(size / devices)


@dataclass(frozen=True)
class Overhead:
    """What the actions of a stage take beside its layers, once for each action and not for each layer: seconds."""

    forward: float = 0.0
    input_gradient: float = 0.0
    weight_gradient: float = 0.0
    recompute: float = 0.0
    backward: float = 0.0

    def __post_init__(self) -> None:
        for what in (*TIMES, "backward"):
            check_number(getattr(self, what), f"overhead: {what}")


@dataclass(frozen=True)
class ModelCosts:
    """All layers, for micro-batches of ``samples`` samples."""

    layers: tuple[LayerCosts, ...]
    crossings: tuple[Crossing, ...]
    samples: int = 1
    shared: tuple[SharedParameters, ...] = ()
    kept_together: tuple[tuple[int, int, float], ...] = ()  # (layer, layer, bytes) of activations that both keep, once
    link: Link = field(default_factory=Link)
    device: str = "cpu"
    overhead: Overhead = field(default_factory=Overhead)

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("costs have no layers: there is nothing to plan")
        check_samples(self.samples)
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"costs have two layers called {twice!r}: give each a name of its own")
        pairs = [(crossing.src, crossing.dst) for crossing in self.crossings]
        for src, dst in pairs:
            self._check_layers((src, dst), "a crossing goes")
        if pairs != sorted(set(pairs)):
            raise PlanError(
                f"crossings must be sorted by source and destination, each pair once, got {_shortened(pairs)}"
            )
        for tie in self.shared:
            self._check_layers(tie.layers, "parameters are shared")
        for first, second, size in self.kept_together:
            self._check_layers((first, second), "activations are kept together")
            check_number(size, f"what layers {first} and {second} keep together: bytes")
        self._check_shares("parameters", [(tie.layers, tie.bytes) for tie in self.shared], "share")
        earlier = [((second,), size) for _, second, size in self.kept_together]
        self._check_shares("activation", earlier, "keep together with layers before it")

    def _check_layers(self, indices: tuple[int, ...], what: str) -> None:
        known = range(len(self.layers))
        if len(indices) < 2 or any(type(i) is not int or i not in known for i in indices):
            raise PlanError(f"{what} between layers {list(indices)}, but the layers are 0 to {len(known) - 1}")
        if list(indices) != sorted(set(indices)):
            raise PlanError(f"{what} between layers {list(indices)}: name the earlier layer first, and each once")

    def _check_shares(self, what: str, shares: Sequence[tuple[Collection[int], float]], how: str) -> None:
        """What layers share with others is a part of what they have."""
        for i, layer in enumerate(self.layers):
            part, whole = sum(size for layers, size in shares if i in layers), getattr(layer, what)
            if part > whole * (1 + 1e-6):
                raise PlanError(
                    f"layer {layer.name!r} has {whole:g} bytes of {what}, but is said to {how} {part:g} of them"
                )

    def between(self, src: Collection[int], dst: Collection[int]) -> float:
        """The bytes that go from the layers of one stage to those of another; a value that several need goes once."""
        total, sent = 0.0, dict[tuple[int, int], float]()
        for crossing in self.crossings:
            if crossing.src in src and crossing.dst in dst:
                total += 0.0 if crossing.values else crossing.bytes
                for number, size in crossing.values:
                    sent[crossing.src, number] = max(size, sent.get((crossing.src, number), 0.0))
        return total + sum(sent.values())

    def scaled(self, samples: int) -> ModelCosts:
        """These costs for micro-batches of another size, as if all were in proportion: a ``Profile`` knows better."""
        from penstock.profile.sizes import Profile

        return Profile((self,)).at(samples)

    def to_json(self) -> str:
        from penstock.profile.costfile import write

        return write([self])

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> ModelCosts:
        """Costs from JSON that ``to_json`` wrote, or somebody by hand; ``origin`` names it in errors."""
        from penstock.profile.costfile import read

        found = read(text, origin)
        if len(found) > 1:
            sizes = [costs.samples for costs in found]
            raise PlanError(f"{origin} has costs for micro-batches of {sizes} samples: read it as a Profile")
        return found[0]

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON, a line for each layer."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ModelCosts:
        """Read costs that were saved, or written by hand."""
        from penstock.profile.costfile import text_of

        return cls.from_json(text_of(path), str(path))


def check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlanError(f"{what} is {value!r}: it must be a number, from 0 up")
    if value > LARGEST:
        raise PlanError(f"{what} is {float(min(value, 10**300)):.3g}: it must be a number up to {LARGEST:g}")


def check_samples(samples: object) -> None:
    if type(samples) is not int or samples < 1:
        raise PlanError(f"samples is {samples!r}: a micro-batch has a whole number of samples, from 1 up")


def _shortened(items: list[tuple[int, int]]) -> str:
    return str(items) if len(items) <= 8 else f"{items[:8]} and {len(items) - 8} more"
