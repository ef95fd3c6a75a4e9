"""Costs of the layers of a model and of the links between devices: measured, estimated or written by hand.

    profile = Profile.load("costs.json")
    profile.at(8).layers[3].forward      # seconds for one micro-batch of 8 samples

Invalid costs (missing, negative, infinite or inconsistent numbers) raise a ``PlanError`` that names the layer.

As JSON:

    {"penstock_costs": 1, "samples": 8, "layers": [
      {"name": "embed", "forward": 1e-4, "input_gradient": 0, "weight_gradient": 1e-4,
       "activation": 8192, "parameters": 4000000, "output": 32768},
      …
    ]}

``output`` is the number of bytes sent to the next layer. ``crossings`` are skips to later layers. For several
micro-batch sizes, ``sizes`` is a list of costs and replaces ``samples`` and ``layers``.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import PlanError, did_you_mean
from penstock.json_schema import parse_json


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer for one micro-batch, in seconds and bytes."""

    name: str
    forward: float
    input_gradient: float
    weight_gradient: float
    recompute: float  # seconds of the repeated forward
    activation: float  # bytes saved for the backward, from F to W
    parameters: float
    gradients: float
    optimizer: float  # optimizer state
    buffers: float = 0.0
    backward: float | None = None  # seconds of an unsplit backward; None: input_gradient + weight_gradient
    deferred: float | None = None  # bytes kept from I to W for the weight gradient; None: activation

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise PlanError(f"a layer's name must be a text, got {self.name!r}")
        optional = [name for name in ("backward", "deferred") if getattr(self, name) is not None]
        for name in (*TIMES, *BYTES, *optional):
            check_number(getattr(self, name), f"layer {self.name!r}: {name}")

    @property
    def full_backward(self) -> float:
        """Seconds of an unsplit backward."""
        return self.input_gradient + self.weight_gradient if self.backward is None else self.backward

    @property
    def static_bytes(self) -> float:
        """Bytes of parameters, gradients, optimizer state and buffers."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def deferred_bytes(self) -> float:
        """Bytes kept from I to W for the weight gradient."""
        return self.activation if self.deferred is None else self.deferred


LARGEST = 1e30  # seconds or bytes; larger numbers are errors, and their sums might overflow
TIMES = ("forward", "input_gradient", "weight_gradient", "recompute")
BYTES = ("activation", "parameters", "gradients", "optimizer", "buffers")


@dataclass(frozen=True)
class Crossing:
    """Bytes sent from one layer to a later one: the activation for the next layer, or a skip.

    ``values`` has the number and bytes of each value, where known. A value with several destinations has the same
    number in each crossing, and is sent to each stage once.
    """

    src: int
    dst: int
    bytes: float
    values: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_number(self.bytes, f"the crossing from layer {self.src} to layer {self.dst}: bytes")
        for number, size in self.values:
            check_number(size, f"the crossing from layer {self.src} to layer {self.dst}: bytes of value {number}")
        total = sum(size for _, size in self.values)
        if self.values and not math.isclose(total, self.bytes, abs_tol=0.5):
            raise PlanError(
                f"the crossing from layer {self.src} to layer {self.dst} has {self.bytes} bytes, but its values "
                f"have {total} together"
            )


@dataclass(frozen=True)
class SharedParameters:
    """Bytes of parameters shared by several layers (a tie). A stage with several of these layers holds them once."""

    layers: tuple[int, ...]
    bytes: float

    def __post_init__(self) -> None:
        check_number(self.bytes, f"the parameters that layers {list(self.layers)} share: bytes")


@dataclass(frozen=True)
class Link:
    """A link between two devices: a message of n bytes arrives after ``latency + n / bandwidth`` seconds.

    On a CPU, sending and receiving also take compute time of both ranks: ``host + n / host_bandwidth`` seconds each.
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
                raise PlanError(f"link: {what} is 0: it must be above 0")

    def seconds(self, size: float) -> float:
        """Seconds until a message of ``size`` bytes arrives."""
        return self.latency + size / self.bandwidth

    def host_seconds(self, size: float) -> float:
        """Compute time of a message of ``size`` bytes on the sender; the receiver needs the same time."""
        return self.host + size / self.host_bandwidth

    def all_reduce_seconds(self, size: float, devices: int) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes over ``devices`` devices."""
        return 2 * (devices - 1) * self.seconds(size / devices)


@dataclass(frozen=True)
class Overhead:
    """Seconds per action of a stage, in addition to the times of its layers."""

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
    """The costs of all layers of a model, for micro-batches of ``samples`` samples."""

    layers: tuple[LayerCosts, ...]
    crossings: tuple[Crossing, ...]
    samples: int = 1
    shared: tuple[SharedParameters, ...] = ()
    kept_together: tuple[tuple[int, int, float], ...] = ()  # (layer, layer, bytes): activations that both save
    link: Link = field(default_factory=Link)
    device: str = "cpu"
    overhead: Overhead = field(default_factory=Overhead)

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("costs have no layers: there is nothing to plan")
        check_counts(samples=self.samples)
        names = [layer.name for layer in self.layers]
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"costs have two layers called {duplicate!r}: give each layer a unique name")
        pairs = [(crossing.src, crossing.dst) for crossing in self.crossings]
        for src, dst in pairs:
            self._check_layers((src, dst), "a crossing is")
        if pairs != sorted(set(pairs)):
            shown = str(pairs) if len(pairs) <= 8 else f"{pairs[:8]} and {len(pairs) - 8} more"
            raise PlanError(f"crossings must be sorted by source and destination, each pair once, got {shown}")
        for tie in self.shared:
            self._check_layers(tie.layers, "parameters are shared")
        for first, second, size in self.kept_together:
            self._check_layers((first, second), "activations are kept together")
            check_number(size, f"activations saved by layers {first} and {second}: bytes")
        self._check_shares("parameters", [(tie.layers, tie.bytes) for tie in self.shared], "shared")
        earlier = [((second,), size) for _, second, size in self.kept_together]
        self._check_shares("activation", earlier, "kept together with earlier layers")

    def _check_layers(self, indices: tuple[int, ...], what: str) -> None:
        known = range(len(self.layers))
        exist = len(indices) > 1 and all(type(i) is int and i in known for i in indices)
        if not exist or list(indices) != sorted(set(indices)):
            raise PlanError(
                f"{what} between layers {list(indices)}, but the layers are 0 to {len(known) - 1}: name two or more "
                "different layers, the earlier layer first"
            )

    def _check_shares(self, what: str, shares: Sequence[tuple[Collection[int], float]], how: str) -> None:
        """Raise an error if a layer shares more bytes with other layers than it has."""
        for i, layer in enumerate(self.layers):
            part, whole = sum(size for layers, size in shares if i in layers), getattr(layer, what)
            if part > whole * (1 + 1e-6):
                raise PlanError(f"layer {layer.name!r} has {whole:g} bytes of {what}, but {part:g} bytes are {how}")

    def bytes_between(self, src: Collection[int], dst: Collection[int]) -> float:
        """Bytes sent from the layers of one stage to those of another; a value with several targets counts once."""
        total, sent = 0.0, dict[tuple[int, int], float]()
        for crossing in self.crossings:
            if crossing.src in src and crossing.dst in dst:
                total += 0.0 if crossing.values else crossing.bytes
                for number, size in crossing.values:
                    sent[crossing.src, number] = max(size, sent.get((crossing.src, number), 0.0))
        return total + sum(sent.values())


def check_number(value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise PlanError(f"{what} is {value!r}: it must be a number, from 0 up")
    if value > LARGEST:
        raise PlanError(f"{what} is {float(min(value, 10**300)):.3g}: it must be a number up to {LARGEST:g}")


def check_counts(**counts: object) -> None:
    for name, number in counts.items():
        if type(number) is not int or number < 1:
            raise PlanError(f"{name}={number!r} must be a whole number, from 1 up")


# ── several micro-batch sizes ────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Profile:
    """The costs of one model for one or more micro-batch sizes, smallest first.

    seconds │            ·●      Costs are interpolated linearly between measured sizes ●, and extrapolated beyond
            │       ·●·          them. Neither the slope (the cost per sample) nor the intercept (the fixed cost)
            │   ·●·              is negative. Costs of a single size are proportional to the samples.
            │·
            └─────────────── samples
    """

    sizes: tuple[ModelCosts, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PlanError("a profile needs costs for at least one micro-batch size")
        samples = [costs.samples for costs in self.sizes]
        if samples != sorted(set(samples)):
            raise PlanError(f"the sizes of a profile must be different and ascending, got {samples}")
        first = self.sizes[0]
        for other in self.sizes[1:]:
            where = f"the costs for {first.samples} and for {other.samples} samples"
            if [layer.name for layer in other.layers] != [layer.name for layer in first.layers]:
                raise PlanError(f"{where} have different layers: a profile is of one model")
            for one, two in zip(first.layers, other.layers, strict=True):
                if any(getattr(one, what) != getattr(two, what) for what in BYTES[1:]):  # all but the activation
                    raise PlanError(f"{where} differ in the parameters of layer {one.name!r}: they are of two models")
            if [(c.src, c.dst) for c in other.crossings] != [(c.src, c.dst) for c in first.crossings]:
                raise PlanError(f"{where} have different crossings: a profile is of one model")

    def at(self, samples: int) -> ModelCosts:
        """The costs for micro-batches of ``samples`` samples."""
        check_counts(samples=samples)
        for costs in self.sizes:
            if costs.samples == samples:
                return costs
        first = self.sizes[0]
        layers = tuple(self._layer(i, samples) for i in range(len(first.layers)))
        crossings = tuple(self._crossing(i, samples) for i in range(len(first.crossings)))
        known = [{(a, b): size for a, b, size in costs.kept_together} for costs in self.sizes]
        left, kept = [layer.activation for layer in layers], []
        for a, b in sorted(set().union(*known)):
            # The limit is the activation of each layer, which an extrapolation may exceed.
            size = min(left[b], self._interpolate([sizes.get((a, b), 0.0) for sizes in known], samples))
            left[b] -= size
            kept.append((a, b, size))
        return replace(first, layers=layers, crossings=crossings, samples=samples, kept_together=tuple(kept))

    def _interpolate(self, values: Sequence[float], samples: int) -> float:
        """Interpolate a quantity at ``samples`` from its values at the measured sizes."""
        at = [costs.samples for costs in self.sizes]
        if len(at) == 1:
            return values[0] * samples / at[0]
        right = min(max(bisect_left(at, samples), 1), len(at) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (at[right] - at[left])
        if samples > at[-1]:
            return values[-1] + max(slope, 0.0) * (samples - at[-1])
        if samples < at[0]:
            slope = min(max(slope, 0.0), values[0] / at[0])  # no negative slope or intercept
            return values[0] + slope * (samples - at[0])
        return values[left] + slope * (samples - at[left])

    def _layer(self, index: int, samples: int) -> LayerCosts:
        rows = [costs.layers[index] for costs in self.sizes]
        found: dict[str, Any] = {
            what: self._interpolate([getattr(row, what) for row in rows], samples) for what in (*TIMES, "activation")
        }
        full = [row.full_backward for row in rows]
        backward = None if all(row.backward is None for row in rows) else self._interpolate(full, samples)
        known = [row.deferred for row in rows if row.deferred is not None]
        deferred = self._interpolate(known, samples) if len(known) == len(rows) else None
        return replace(rows[0], backward=backward, deferred=deferred, **found)

    def _crossing(self, index: int, samples: int) -> Crossing:
        rows = [costs.crossings[index] for costs in self.sizes]
        known = [dict(row.values) for row in rows]
        if not all(known) or any(values.keys() != known[0].keys() for values in known):
            return replace(rows[0], bytes=self._interpolate([row.bytes for row in rows], samples), values=())
        values = tuple((number, self._interpolate([sizes[number] for sizes in known], samples)) for number in known[0])
        return replace(rows[0], bytes=sum(size for _, size in values), values=values)

    def with_link(self, link: Link) -> Profile:
        """These costs with another link between devices."""
        return Profile(tuple(replace(costs, link=link) for costs in self.sizes))

    def to_json(self) -> str:
        sizes = [_to_data(costs) for costs in self.sizes]
        data = sizes[0] if len(sizes) == 1 else {"sizes": sizes}
        return json.dumps({"penstock_costs": FORMAT, **data}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Profile:
        """Parse JSON with one or several sizes; ``origin`` names it in errors."""
        model_keys = [one.name for one in fields(ModelCosts)]
        given = parse_json(text, f"{origin} is not JSON")
        try:
            data = dict(_entries(given, "costs", (*model_keys, "sizes", "penstock_costs")))
            version = data.pop("penstock_costs", FORMAT)
            if version != FORMAT:
                raise PlanError(f"costs of format {version!r} cannot be read here: expected {FORMAT}")
            if "sizes" not in data:
                return cls((_parse_model(data),))
            if len(data) > 1:
                others = ", ".join(data.keys() - {"sizes"})
                raise PlanError(f"costs have both sizes and {others}: move the latter into each size")
            sizes = [_parse_model(_entries(size, "a size", model_keys)) for size in _list(data, "sizes")]
            return cls(tuple(sorted(sizes, key=lambda costs: costs.samples)))
        except PlanError as error:
            raise PlanError(f"{origin}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a JSON file."""
        try:
            text = Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} cannot be read as costs: {error}") from error
        return cls.from_json(text, str(path))


# ── JSON ─────────────────────────────────────────────────────────────────────────────────────────────────────────

FORMAT = 1


def _to_data(value: Any) -> Any:
    """Dataclasses as dicts, without the fields that have their default value."""
    if is_dataclass(value):
        given = {one.name: getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default}
        return {name: _to_data(one) for name, one in given.items()}
    return [_to_data(one) for one in value] if isinstance(value, tuple) else value


def _parse_model(data: Mapping[str, Any]) -> ModelCosts:
    _entries(data, "costs", data, ["layers"])
    rows, layers = _list(data, "layers"), []
    keys = [one.name for one in fields(LayerCosts)]
    required = ["name", "forward", "input_gradient", "weight_gradient", "activation", "parameters"]
    for i, row in enumerate(rows):
        named = isinstance(row, dict) and isinstance(row.get("name"), str)
        where = f"layer {row['name']!r}" if named else f"layer number {i}"
        values_of_layer = dict(_entries(row, where, (*keys, "output"), required))
        values_of_layer.pop("output", None)
        own = values_of_layer["parameters"]
        check_number(own, f"{where}: parameters")
        defaults = {"recompute": row["forward"], "gradients": own, "optimizer": 2 * own}
        layers.append(LayerCosts(**{**defaults, **values_of_layer}))
    numbers = {layer.name: i for i, layer in enumerate(layers)}
    crossings = []
    for one in _list(data, "crossings"):
        _entries(one, "a crossing", ["src", "dst", "bytes", "values"], ["src", "dst", "bytes"])
        src, dst = (_layer_index(one[end], numbers, "a crossing") for end in ("src", "dst"))
        values = _list(one, "values")
        if any(not isinstance(pair, list) or len(pair) != 2 for pair in values):
            raise PlanError(f"a crossing has values {values!r}: write pairs [number, bytes]")
        crossings.append(Crossing(src, dst, one["bytes"], tuple((number, size) for number, size in values)))
    given = {(crossing.src, crossing.dst) for crossing in crossings}
    for i, row in enumerate(rows[:-1]):
        if ("output" in row) == ((i, i + 1) in given):
            problem = "no output: give the bytes that it sends to the next layer, or 0"
            if "output" in row:
                problem = "an output and a crossing to the next layer: remove one of them"
            raise PlanError(f"layer {row['name']!r} has {problem}")
        if "output" in row:
            crossings.append(Crossing(i, i + 1, row["output"]))
    shared = []
    for one in _list(data, "shared"):
        _entries(one, "shared", ["layers", "bytes"], ["layers", "bytes"])
        indices = tuple(_layer_index(layer, numbers, "shared") for layer in _list(one, "layers"))
        shared.append(SharedParameters(indices, one["bytes"]))
    kept = []
    for one in _list(data, "kept_together"):
        if not isinstance(one, list) or len(one) != 3:
            raise PlanError(f"kept_together has {one!r}: write [layer, layer, bytes]")
        first, second = (_layer_index(layer, numbers, "kept_together") for layer in one[:2])
        kept.append((first, second, one[2]))
    device = data.get("device", "cpu")
    if not isinstance(device, str):
        raise PlanError(f"device is {device!r}: write its name")
    return ModelCosts(
        tuple(layers),
        tuple(sorted(crossings, key=lambda crossing: (crossing.src, crossing.dst))),
        data.get("samples", 1),
        tuple(shared),
        tuple(kept),
        Link(**_entries(data.get("link", {}), "link", [one.name for one in fields(Link)])),
        device,
        Overhead(**_entries(data.get("overhead", {}), "overhead", [one.name for one in fields(Overhead)])),
    )


def _layer_index(layer: Any, numbers: Mapping[str, int], where: str) -> int:
    """The index of a layer given by its index or name."""
    if isinstance(layer, str) and layer in numbers:
        return numbers[layer]
    if type(layer) is not int:
        raise PlanError(f"{where} names layer {layer!r}, which does not exist: write its name, or its number from 0 on")
    return layer


def _entries(data: Any, where: str, known: Collection[str], required: Collection[str] = ()) -> Mapping[str, Any]:
    """Check that ``data`` is a JSON object with known keys only, and with all required keys."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} must be an object {{…}}, got {data!r}")
    for key in data:
        if key not in known:
            hint = did_you_mean(key, known, otherwise=f": it has {', '.join(known)}")
            raise PlanError(f"{where} has an unknown key {key!r}{hint}")
    for key in required:
        if data.get(key) is None:
            raise PlanError(f"{where} has no {key}")
    return data


def _list(data: Mapping[str, Any], key: str) -> list[Any]:
    value = data.get(key, [])
    if not isinstance(value, list):
        raise PlanError(f"{key} must be a list […], got {value!r}")
    return value
