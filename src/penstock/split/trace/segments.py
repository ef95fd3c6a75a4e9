"""From a recorded forward and its stages to what each stage runs, receives and sends.

    stage 0          stage 1            stage 2
    x ── conv ── a ──▶ block ── b ──▶ ─┐
         └─ skip ─────────────────▶ add ── head ── out      a value goes straight from its producer to each consumer

Parameters are read where they are used. Sizes are read again from a tensor that crosses anyway; where none does, the
number crosses. A device is that of the stage.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import PlanError
from penstock.split.plan import Groups
from penstock.split.trace.inplace import changed_by, roots
from penstock.split.trace.marks import Recording


@dataclass
class Part:
    """One stage of a recorded forward."""

    received: dict[int, list[fx.Node]] = field(default_factory=dict)
    """What comes from each stage before."""
    steps: list[fx.Node] = field(default_factory=list)
    sent: dict[int, list[fx.Node]] = field(default_factory=dict)
    """What goes to each stage after."""
    own_device: set[fx.Node] = field(default_factory=set)
    """Devices that were asked of tensors that are not here."""


def layer_of(recording: Recording, node: fx.Node) -> str:
    """The layer of an operation."""
    mark: str | None = node.meta["layer"]
    if mark not in recording.placed:
        raise PlanError(
            f"{node.meta['where']}: called as {recording.call}, the forward reaches {mark!r}, which it did not in the "
            f"kinds of call that the plan was made for ({', '.join(dict.fromkeys(recording.placed.values()))})"
        )
    return recording.placed[mark]


def label(node: fx.Node) -> str:
    """A value's name, for people."""
    if node.target is getattr and isinstance(node.args[0], fx.Node):
        return f"{label(node.args[0])}.{node.args[1]}"
    return str(node.target) if node.op in ("call_module", "placeholder") else node.name


def flow(model: nn.Module, recording: Recording, groups: Groups) -> list[Part]:
    """The parts of a forward."""
    stage_of_layer = {layer: index for index, layers in enumerate(groups) for layer in layers}
    places: dict[fx.Node, int] = {}
    for node in recording.graph.nodes:
        if node.op == "placeholder":
            places[node] = 0
        elif node.op == "output":
            places[node] = len(groups) - 1
        elif node.op != "get_attr" and not _dead(node) and not small(node):
            places[node] = stage_of_layer[layer_of(recording, node)]
    _read_at_source(places)
    _check_shared(model, places)
    _check_in_place(recording, places)
    return _Flow(recording, places, groups).parts()


def _read_at_source(places: dict[fx.Node, int]) -> None:
    """An attribute of a value from before is read before the cut, unless the value itself is needed after it, too."""
    for node, place in places.items():
        if node.op == "call_function" and node.target is getattr:
            (value,) = node.all_input_nodes
            needed = (user for user in value.users if user.target is not getattr and places.get(user) == place)
            if places.get(value, place) < place and next(needed, None) is None:
                places[node] = places[value]


def _dead(node: fx.Node) -> bool:
    """An attribute that was read and not used."""
    return node.op == "call_function" and node.target is getattr and not node.users


class _Flow:
    """What each stage runs and needs, worked out."""

    def __init__(self, recording: Recording, places: Mapping[fx.Node, int], groups: Groups) -> None:
        self.recording = recording
        self.places = dict(places)
        self.groups = groups
        self.order = {node: i for i, node in enumerate(recording.graph.nodes)}
        self.steps: list[set[fx.Node]] = [set() for _ in groups]
        self.here: list[set[fx.Node]] = [set() for _ in groups]
        self.devices: list[set[fx.Node]] = [set() for _ in groups]
        for node, place in places.items():
            if node.op != "placeholder":
                self.steps[place].add(node)

    def parts(self) -> list[Part]:
        wanted: list[set[fx.Node]] = [set() for _ in self.groups]
        for stage, steps in enumerate(self.steps):
            for node in self._sorted(steps):
                for value in node.all_input_nodes:
                    if small(value):
                        wanted[stage].add(value)
                    else:
                        self._need(stage, value, node)
        for stage, values in enumerate(wanted):
            for value in self._sorted(values):
                self._need_small(stage, value)
        parts = [Part(steps=self._sorted(self.steps[s]), own_device=self.devices[s]) for s in range(len(self.groups))]
        for stage, values in enumerate(self.here):
            for value in self._sorted(values):
                parts[stage].received.setdefault(self.places[value], []).append(value)
                parts[self.places[value]].sent.setdefault(stage, []).append(value)
        return parts

    def _sorted(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def _need(self, stage: int, value: fx.Node, user: fx.Node) -> None:
        if value.op == "get_attr":
            self.steps[stage].add(value)
        elif self.places[value] > stage:
            raise _backwards(self.recording, user, value, stage, self.places[value])
        elif self.places[value] < stage:
            self.here[stage].add(value)

    def _need_small(self, stage: int, value: fx.Node) -> None:
        chain = _chain(value)
        bases = _bases(chain)
        missing = {base for base in bases if base.op == "get_attr" or not self._is_here(stage, base)}
        devices = {node for node in chain if _asks_device(node) and missing & set(node.all_input_nodes)}
        others = {base for node in chain - devices if _is_root(node) for base in node.all_input_nodes} & missing
        others = {base for base in others if base.op != "get_attr"}
        sources = {self.places[base] for base in bases if base.op != "get_attr"}
        if others and len(sources) == 1 and min(sources) < stage:
            source = min(sources)
            self._run(source, chain)
            self.places[value] = source
            self.here[stage].add(value)
            return
        self.devices[stage] |= devices
        self._run(stage, chain)
        for base in others:
            self._need(stage, base, value)

    def _is_here(self, stage: int, value: fx.Node) -> bool:
        return value in self.here[stage] or self.places[value] == stage

    def _run(self, stage: int, chain: set[fx.Node]) -> None:
        self.steps[stage] |= chain | {base for base in _bases(chain) if base.op == "get_attr"}


def route(parts: Sequence[Part], planned: Container[tuple[int, int]]) -> None:
    """Let values go from stage to stage where no edge is for them: in a kind of call that the plan did not know of."""
    for src, part in enumerate(parts):
        for dst in [dst for dst in part.sent if (src, dst) not in planned]:
            values = part.sent.pop(dst)
            del parts[dst].received[src]
            for stage in range(src, dst):
                sent = parts[stage].sent.setdefault(stage + 1, [])
                sent.extend(value for value in values if value not in sent)
                parts[stage + 1].received[stage] = list(sent)


def _backwards(recording: Recording, node: fx.Node, value: fx.Node, stage: int, source: int) -> PlanError:
    def block(of: fx.Node) -> str:
        return "the model's output" if of.op == "output" else repr(layer_of(recording, of))

    return PlanError(
        f"{block(node)} ({node.meta['where']}) is in stage {stage} but needs the value {label(value)!r} of "
        f"{block(value)} ({value.meta['where']}), which is in stage {source}: values flow from earlier stages to later "
        "ones only. Put the two into one stage, or change the stages' order"
    )


# -- small values: sizes, dtypes, devices, and arithmetic on them ----------------------------------------------

_READS = {"shape", "ndim", "dtype", "device", "is_cuda", "type", "index"}
_ASKS = {"size", "dim", "ndimension", "numel", "nelement"}
_ARITHMETIC = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.mod,
    operator.neg, operator.pow, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
}  # fmt: skip


def small(node: fx.Node) -> bool:
    """Whether a value is a size or a dtype, or computed from such."""
    if node.op == "call_method":
        return node.target in _ASKS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _READS
    return node.target in _ARITHMETIC and all(small(value) for value in node.all_input_nodes)


def _is_root(node: fx.Node) -> bool:
    """Whether a small value is read from a tensor itself."""
    return small(node) and not any(small(value) for value in node.all_input_nodes)


def _chain(value: fx.Node) -> set[fx.Node]:
    """A small value and the small values that it is made of."""
    return {value}.union(*(_chain(inner) for inner in value.all_input_nodes if small(inner)))


def _bases(chain: Iterable[fx.Node]) -> set[fx.Node]:
    """The tensors that small values are read from."""
    return {value for node in chain if _is_root(node) for value in node.all_input_nodes}


def _asks_device(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] == "device" and _is_root(node)


# -- what may not be cut ---------------------------------------------------------------------------------------


def _check_shared(model: nn.Module, places: Mapping[fx.Node, int]) -> None:
    """Running statistics cannot be kept in two stages."""
    stages: dict[str, dict[int, str]] = {}
    for node, place in places.items():
        if node.op == "call_module":
            stages.setdefault(str(node.target), {})[place] = node.meta["where"]
    for path, used in stages.items():
        if len(used) > 1:
            for name, module in model.get_submodule(path).named_modules(prefix=path):
                if isinstance(module, _NormBase) and module.track_running_stats:
                    lines = " and ".join(f"stage {stage} ({where})" for stage, where in used.items())
                    raise PlanError(
                        f"{name} ({type(module).__name__}) keeps running statistics and is called in {lines}: they "
                        "would be duplicated. Put the calls into one stage, or use a module for each"
                    )


def _check_in_place(recording: Recording, places: Mapping[fx.Node, int]) -> None:
    """A value that is changed in place in one stage is not used, as changed, in another that has its own copy."""
    order = {node: i for i, node in enumerate(recording.graph.nodes)}
    for node, place in places.items():
        changed = changed_by(node)
        if changed is None or small(changed):
            continue
        for value in roots(changed):
            for user in value.users:
                if places.get(user, place) == place or places.get(value) == place:
                    continue  # the same tensor, or sent as it is after the change
                if order[user] > order[node] or value.op == "get_attr":
                    raise PlanError(
                        f"{node.meta['where']}: {label(value)!r} is changed in place in stage {place}, but stage "
                        f"{places[user]} uses it too ({user.meta['where']}) and would not see the change: compute a "
                        "new value instead, or put the two into one stage"
                    )
