"""What the layers of a model cost, and what lies between devices: plain data, measured, computed or written by hand.

    costs = ModelCosts.load("costs.json")
    costs.layers[3].forward      # seconds for one micro-batch of costs.samples samples

Whatever they come from, costs without a hole or a number that is none are all that there can be: else it is an error
here, which names the layer.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import PlanError
from penstock.suggest import did_you_mean

__all__ = [
    "Crossing",
    "LayerCosts",
    "Link",
    "ModelCosts",
    "Overhead",
    "Profile",
    "SharedParameters",
    "format_costs",
    "parse_costs",
    "read_cost_file",
]


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

        return Profile((self,)).at(samples)

    def to_json(self) -> str:

        return format_costs([self])

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> ModelCosts:
        """Costs from JSON that ``to_json`` wrote, or somebody by hand; ``origin`` names it in errors."""

        found = parse_costs(text, origin)
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

        return cls.from_json(read_cost_file(path), str(path))


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


# Costs at several micro-batch sizes, and between them.
#
# seconds │            ·●      Measured at ●. Between two sizes a straight line; beyond them the line goes on, but it
#         │       ·●·          never falls, and never below zero: a layer has a part that each sample adds (its
#         │   ·●·              slope) and a fixed part (where it starts), and none of the two is negative.
#         │·
#         └─────────────── samples


@dataclass(frozen=True)
class Profile:
    """The costs of one model for micro-batches of one or more sizes, the smallest first.

    Where there is one size only, everything that a sample adds to is in proportion to the samples.
    """

    sizes: tuple[ModelCosts, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise PlanError("a profile needs costs for at least one size of micro-batch")
        samples = [costs.samples for costs in self.sizes]
        if samples != sorted(set(samples)):
            raise PlanError(f"a profile has each size once, the smallest first, got sizes {samples}")
        first = self.sizes[0]
        for other in self.sizes[1:]:
            where = f"the costs for {first.samples} and for {other.samples} samples"
            if [layer.name for layer in other.layers] != [layer.name for layer in first.layers]:
                raise PlanError(f"{where} have other layers: a profile is of one model")
            for one, two in zip(first.layers, other.layers, strict=True):
                if any(getattr(one, what) != getattr(two, what) for what in FIXED):
                    raise PlanError(f"{where} differ in the parameters of layer {one.name!r}: it is another model")
            if [(c.src, c.dst) for c in other.crossings] != [(c.src, c.dst) for c in first.crossings]:
                raise PlanError(f"{where} have other crossings: a profile is of one model")

    def at(self, samples: int) -> ModelCosts:
        """The costs for micro-batches of ``samples`` samples."""
        check_samples(samples)
        for costs in self.sizes:
            if costs.samples == samples:
                return costs
        first = self.sizes[0]
        layers = tuple(self._layer(i, samples) for i in range(len(first.layers)))
        return replace(
            first,
            layers=layers,
            crossings=tuple(self._crossing(i, samples) for i in range(len(first.crossings))),
            samples=samples,
            kept_together=self._kept_together(samples, layers),
        )

    def _line(self, values: Sequence[float], samples: int) -> float:
        """What a quantity comes to, of which ``values`` are those of the sizes."""
        at = [costs.samples for costs in self.sizes]
        if len(at) == 1:
            return values[0] * samples / at[0]
        right = min(max(bisect_left(at, samples), 1), len(at) - 1)
        left = right - 1
        slope = (values[right] - values[left]) / (at[right] - at[left])
        if samples > at[-1]:
            return values[-1] + max(slope, 0.0) * (samples - at[-1])
        if samples < at[0]:
            slope = min(max(slope, 0.0), values[0] / at[0])  # neither part of it is negative
            return values[0] + slope * (samples - at[0])
        return values[left] + slope * (samples - at[left])

    def _layer(self, index: int, samples: int) -> LayerCosts:
        rows = [costs.layers[index] for costs in self.sizes]
        found: dict[str, Any] = {
            what: self._line([getattr(row, what) for row in rows], samples) for what in (*TIMES, "activation")
        }
        whole = [row.full_backward for row in rows]
        backward = None if all(row.backward is None for row in rows) else self._line(whole, samples)
        waits = [row.deferred for row in rows if row.deferred is not None]
        deferred = self._line(waits, samples) if len(waits) == len(rows) else None
        return replace(rows[0], backward=backward, deferred=deferred, **found)

    def _crossing(self, index: int, samples: int) -> Crossing:
        rows = [costs.crossings[index] for costs in self.sizes]
        known = [dict(row.values) for row in rows]
        if not all(known) or any(values.keys() != known[0].keys() for values in known):
            return replace(rows[0], bytes=self._line([row.bytes for row in rows], samples), values=())
        values = tuple((number, self._line([sizes[number] for sizes in known], samples)) for number in known[0])
        return replace(rows[0], bytes=sum(size for _, size in values), values=values)

    def _kept_together(self, samples: int, layers: Sequence[LayerCosts]) -> tuple[tuple[int, int, float], ...]:
        """What layers keep together, which is never more than each of them keeps: lines may cross beyond the sizes."""
        known = [{(a, b): size for a, b, size in costs.kept_together} for costs in self.sizes]
        left, found = [layer.activation for layer in layers], []
        for a, b in sorted(set().union(*known)):
            size = min(left[b], self._line([sizes.get((a, b), 0.0) for sizes in known], samples))
            left[b] -= size
            found.append((a, b, size))
        return tuple(found)

    def over(self, link: Link) -> Profile:
        """The same costs with another link between devices."""
        return Profile(tuple(replace(costs, link=link) for costs in self.sizes))

    def to_json(self) -> str:

        return format_costs(self.sizes)

    @classmethod
    def from_json(cls, text: str, origin: str = "the text") -> Profile:
        """A profile from JSON; ``origin`` names it in errors. Costs for one size are a profile too."""

        return cls(tuple(sorted(parse_costs(text, origin), key=lambda costs: costs.samples)))

    def save(self, path: str | Path) -> None:
        """Write the costs of all sizes as JSON."""
        Path(path).write_text(self.to_json(), "utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Profile:

        return cls.from_json(read_cost_file(path), str(path))


FIXED = ("parameters", "gradients", "optimizer", "buffers")


# Costs as JSON: what a program writes, and what somebody may write by hand.
#
#     {"penstock_costs": 1, "samples": 8, "layers": [
#       {"name": "embed", "forward": 1e-4, "input_gradient": 0, "weight_gradient": 1e-4,
#        "activation": 8192, "parameters": 4000000, "output": 32768},
#       …
#     ]}
#
# ``output`` is what goes to the next layer; ``crossings`` are for skips. ``sizes`` instead of ``samples`` and
# ``layers`` has the costs of several sizes of micro-batches.

FORMAT = 1
T = TypeVar("T")

_LAYER = tuple(one.name for one in fields(LayerCosts))
_NEEDED = ("name", "forward", "input_gradient", "weight_gradient", "activation", "parameters")
_MODEL = tuple(one.name for one in fields(ModelCosts))


def read_cost_file(path: str | Path) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read as costs: {error}") from error


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def parse_costs(text: str, origin: str) -> list[ModelCosts]:
    """The costs in a text, one for each size of micro-batch; errors say what is wrong, and in what."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{origin} is not JSON: {error}") from error
    try:
        return _read(data)
    except PlanError as error:
        raise PlanError(f"{origin}: {error}") from error


def _read(data: Any) -> list[ModelCosts]:
    _check_keys(data, (*_MODEL, "sizes", "penstock_costs"), "costs")
    if data.get("penstock_costs", FORMAT) != FORMAT:
        raise PlanError(f"costs of format {data['penstock_costs']!r} cannot be read here: expected {FORMAT}")
    if "sizes" not in data:
        return [_model(data)]
    for key in ("samples", "layers", "crossings"):
        if key in data:
            raise PlanError(f"costs have both sizes and {key}: {key} belongs into each of the sizes")
    common = {key: value for key, value in data.items() if key not in ("sizes", "penstock_costs")}
    return [_model({**common, **_mapping(size, "a size")}) for size in _list(data["sizes"], "sizes")]


def _model(data: Mapping[str, Any]) -> ModelCosts:
    _check_keys(data, (*_MODEL, "penstock_costs"), "costs")
    rows = _list(_needed(data, "layers", "costs"), "layers")
    layers = [_layer(row, i) for i, row in enumerate(rows)]
    numbers = {layer.name: i for i, layer in enumerate(layers)}
    crossings = [_crossing(one, numbers) for one in _list(data.get("crossings", []), "crossings")]
    given = {(crossing.src, crossing.dst) for crossing in crossings}
    for i, (row, layer) in enumerate(zip(rows, layers, strict=True)):
        if "output" in row and (i, i + 1) in given:
            raise PlanError(
                f"layer {layer.name!r} has an output, and there is a crossing to the next layer: say it once"
            )
        if "output" in row and i < len(rows) - 1:
            crossings.append(Crossing(i, i + 1, row["output"]))
        elif "output" not in row and i < len(rows) - 1 and (i, i + 1) not in given:
            raise PlanError(
                f"layer {layer.name!r} has no output: give the bytes that go to the next layer, 0 if none do"
            )
    shared = []
    for one in _list(data.get("shared", []), "shared"):
        _check_keys(one, ("layers", "bytes"), "shared")
        members = _list(_needed(one, "layers", "shared"), "layers that share parameters")
        shared.append(
            SharedParameters(tuple(_number(who, numbers, "shared") for who in members), _needed(one, "bytes", "shared"))
        )
    kept = []
    for one in _list(data.get("kept_together", []), "kept_together"):
        if not isinstance(one, list) or len(one) != 3:
            raise PlanError(f"kept_together has {one!r}: write [layer, layer, bytes]")
        kept.append((_number(one[0], numbers, "kept_together"), _number(one[1], numbers, "kept_together"), one[2]))
    return ModelCosts(
        layers=tuple(layers),
        crossings=tuple(sorted(crossings, key=lambda crossing: (crossing.src, crossing.dst))),
        samples=data.get("samples", 1),
        shared=tuple(shared),
        kept_together=tuple(kept),
        link=_link(data.get("link", {})),
        device=_device(data.get("device", "cpu")),
        overhead=_overhead(data.get("overhead", {})),
    )


def _layer(row: Any, index: int) -> LayerCosts:
    what = f"layer number {index}"
    if isinstance(row, dict) and isinstance(row.get("name"), str):
        what = f"layer {row['name']!r}"
    _check_keys(row, (*_LAYER, "output"), what)
    values = {key: _needed(row, key, what) for key in _NEEDED}
    own = values["parameters"] if isinstance(values["parameters"], int | float) else 0.0
    values |= {"recompute": values["forward"], "gradients": own, "optimizer": 2 * own}
    values |= {key: value for key, value in row.items() if key in _LAYER}
    return LayerCosts(**values)


def _crossing(one: Any, numbers: Mapping[str, int]) -> Crossing:
    _check_keys(one, ("src", "dst", "bytes", "values"), "a crossing")
    src, dst = (_number(_needed(one, end, "a crossing"), numbers, "a crossing") for end in ("src", "dst"))
    values = _list(one.get("values", []), "values")
    if any(not isinstance(pair, list) or len(pair) != 2 for pair in values):
        raise PlanError(f"a crossing has values {values!r}: write pairs [number, bytes]")
    return Crossing(src, dst, _needed(one, "bytes", "a crossing"), tuple((number, size) for number, size in values))


def _link(data: Any) -> Link:
    _check_keys(data, tuple(one.name for one in fields(Link)), "link")
    return Link(**data)


def _overhead(data: Any) -> Overhead:
    _check_keys(data, tuple(one.name for one in fields(Overhead)), "overhead")
    return Overhead(**data)


def _device(name: Any) -> str:
    if not isinstance(name, str):
        raise PlanError(f"device is {name!r}: write its name")
    return name


def _number(who: Any, numbers: Mapping[str, int], what: str) -> int:
    """A layer's number, from itself or from the layer's name."""
    if isinstance(who, str):
        if who not in numbers:
            raise PlanError(f"{what} names layer {who!r}, which there is none of{did_you_mean(who, numbers)}")
        return numbers[who]
    if type(who) is not int:
        raise PlanError(f"{what} names layer {who!r}: write its name, or its number from 0 on")
    return who


def _needed(data: Mapping[str, Any], key: str, what: str) -> Any:
    if data.get(key) is None:
        raise PlanError(f"{what} has no {key}")
    return data[key]


def _mapping(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise PlanError(f"{what} must be an object {{…}}, got {data!r}")
    return data


def _list(data: Any, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise PlanError(f"{what} must be a list […], got {data!r}")
    return data


def _check_keys(data: Any, known: Sequence[str], what: str) -> None:
    for key in _mapping(data, what):
        if key not in known:
            hint = did_you_mean(key, known, otherwise=f": it has {', '.join(known)}")
            raise PlanError(f"{what} has an unknown key {key!r}{hint}")


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def format_costs(costs: Sequence[ModelCosts]) -> str:
    """Costs of one or several sizes, a line for each layer and crossing."""
    head = f'{{\n  "penstock_costs": {FORMAT},\n'
    if len(costs) == 1:
        return head + _written(costs[0], "  ") + "\n}\n"
    sizes = ",\n".join("    {\n" + _written(one, "      ") + "\n    }" for one in costs)
    return f'{head}  "sizes": [\n{sizes}\n  ]\n}}\n'


def _written(costs: ModelCosts, indent: str) -> str:
    outputs = {c.src: c.bytes for c in costs.crossings if c.dst == c.src + 1 and not c.values}
    rows = [{**_plain(layer), **_output(outputs, i)} for i, layer in enumerate(costs.layers)]
    crossings = [_plain(c) for c in costs.crossings if c.dst != c.src + 1 or c.values]
    lists: dict[str, Iterable[Any]] = {
        "layers": rows,
        "crossings": crossings,
        "shared": map(_plain, costs.shared),
        "kept_together": costs.kept_together,
    }
    link = {key: value for key, value in _plain(costs.link).items() if value != float("inf")}
    lines = [f'"device": {json.dumps(costs.device)}', f'"samples": {costs.samples}', f'"link": {_json(link)}']
    lines.append(f'"overhead": {_json(_plain(costs.overhead))}')
    for name, items in lists.items():
        shown = ",\n".join(f"{indent}  {_json(item)}" for item in items)
        lines.append(f'"{name}": [\n{shown}\n{indent}]' if shown else f'"{name}": []')
    return ",\n".join(indent + line for line in lines)


def _plain(data: Any) -> dict[str, Any]:
    """The fields of a data class, without those that are what they are anyway."""
    found = {}
    for one in fields(data):
        value = getattr(data, one.name)
        if one.default is MISSING or value != one.default:
            found[one.name] = value
    return found


def _output(outputs: Mapping[int, float], layer: int) -> dict[str, float]:
    return {"output": outputs[layer]} if layer in outputs else {}


def _json(value: Any) -> str:
    return json.dumps(_tidy(value), allow_nan=False)


def _tidy(value: Any) -> Any:
    """Whole numbers without a point."""
    if isinstance(value, dict):
        return {key: _tidy(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [_tidy(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
