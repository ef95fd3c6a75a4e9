"""Cutting a model at marks, at blocks, before named modules, or wherever it balances: by tracing its forward.

One recording is made per kind of call and per train/eval state, when it is needed; the first few when the line is made,
so that its edges are those of all of them.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.lazy import build
from penstock.split.marks import Block
from penstock.split.plan import Edge, Groups, LayerChain, bind_arguments
from penstock.split.trace.automatic import automatic
from penstock.split.trace.call import Call, Parameters, key_of
from penstock.split.trace.cut_policy import CutPolicy, Cuts, Marks, Modules
from penstock.split.trace.marks import Recording
from penstock.split.trace.members import Members
from penstock.split.trace.program import Program, compiled
from penstock.split.trace.segments import Part, flow, label, layer_of, route, small
from penstock.split.trace.stage import TracedStage

Flags = tuple[bool, ...]
Sample = tuple[tuple[Any, ...], dict[str, Any]]


def trace_chain(
    model: nn.Module, *, stages: int | None, cuts: Sequence[str] | None, sample: Sample | None = None
) -> TraceChain:
    """The line of a model: before the modules ``cuts``, at its marks or blocks, or, with none, where it balances.

    ``sample``, the arguments of a call, says how the model is called; without it, that is guessed from its signature.
    """
    _check_sized(model)
    if cuts is not None:
        return TraceChain(model, Cuts(model, cuts, _key(model, sample)))
    line = marked_chain(model, sample=sample)
    if line is not None:
        return line
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        kind = type(model).__name__
        raise PlanError(f"nothing is marked in {kind}: stages must be a positive number, got {stages!r}")
    return TraceChain(model, automatic(model, stages or 1, _key(model, sample)))


def marked_chain(model: nn.Module, *, sample: Sample | None = None, lead: Block | None = None) -> TraceChain | None:
    """The line of a model at its marks or blocks; None where there are none.

    ``lead`` is a block for what runs before any other, which is else part of the first one.
    """
    marks = Marks.found(model, _key(model, sample), lead)
    return None if marks is None else TraceChain(model, marks)


def _key(model: nn.Module, sample: Sample | None) -> str | None:
    return None if sample is None else key_of(_parameters(model), bind_arguments(model, *sample))[0]


def _parameters(model: nn.Module) -> Parameters:
    return inspect.signature(model.forward).parameters


def _check_sized(model: nn.Module) -> None:
    state = (*model.named_parameters(), *model.named_buffers())
    unsized = [name for name, tensor in state if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))]
    if unsized:
        raise PlanError(f"{unsized[0]} does not know its size yet: run the model on a batch first")


class TraceChain(LayerChain):
    """The layers of a model whose forward was traced."""

    verify = True

    def __init__(self, model: nn.Module, how: CutPolicy) -> None:
        self.model = model
        self.how = how
        self.recipe = {"front": "trace", **how.recipe()}
        self.entered = sorted(set().union(*(recording.entered for recording in how.first.values())))
        """The modules whose code was traced: their modes decide which recording runs."""
        self.paths = [tuple(path.split(".")) if path else () for path in self.entered]
        self.parameters = _parameters(model)
        self._keys: dict[tuple[str, ...], str] = {}
        self._lock = threading.RLock()
        self._recordings: dict[tuple[str, Flags], Recording] = {}
        self._parts: dict[tuple[Any, str, Flags], list[Part]] = {}
        self._programs: dict[tuple[Any, int, str, Flags], Program] = {}
        self._edges: dict[Any, tuple[Edge, ...]] = {}
        for (key, flags), recording in how.first.items():
            self._recordings.setdefault((key, tuple(map(flags, self.entered))), recording)
        self.known = list(self._recordings)
        """The kinds of call that the edges were made for, the one that names the layers first."""
        self.usual = how.usual
        self.layers = how.layers()
        self.holds = Members(model, self._recordings.values(), self.layers)

    @classmethod
    def from_recipe(cls, model: nn.Module, recipe: Mapping[str, Any]) -> TraceChain:
        """The line that a saved plan was made of."""
        kind, called = recipe.get("how"), recipe.get("called")
        if kind == "cuts":
            return cls(model, Cuts(model, recipe["cuts"], called))
        if kind == "modules":
            return cls(model, Modules(model, recipe["expanded"], called))
        if kind == "marks":
            marks = Marks.found(model, called, Block(*recipe["lead"]) if recipe.get("lead") else None)
            if marks is None:
                raise PlanError(f"the plan was made at marks, but {type(model).__name__} has none")
            return cls(model, marks)
        raise PlanError(f"the plan's recipe for a traced model is not known here: {dict(recipe)!r}")

    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        return self.holds.of(layer).items()

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        cuts = tuple(tuple(layers) for layers in groups)
        if cuts not in self._edges:
            values: dict[tuple[int, int], dict[str, None]] = {(s, s + 1): {} for s in range(len(cuts) - 1)}
            for number, (key, flags) in enumerate(self.known):
                try:
                    parts = self.parts(cuts, key, flags)
                except PlanError:
                    if number == 0 or key == self.usual:
                        raise
                    continue  # a kind of call that nobody may ever use: the error comes when somebody does
                for src, part in enumerate(parts):
                    for dst, nodes in part.sent.items():
                        values.setdefault((src, dst), {}).update(dict.fromkeys(map(label, nodes)))
            self._edges[cuts] = tuple(Edge(src, dst, tuple(values[src, dst])) for src, dst in sorted(values))
        return self._edges[cuts]

    def stage(self, groups: Groups, index: int) -> nn.Module:
        modules: dict[str, nn.Module] = {}
        tensors: dict[str, Tensor] = {}
        for layer in groups[index]:
            for path, module in self.holds.modules[layer].items():
                modules[path] = build(module)
            tensors.update(self.holds.of(layer))
        return TracedStage(self, groups, index, modules, tensors.items())

    def crossing(self, cut: int) -> float:
        """How many values are made before a cut and used after it."""
        return float(self._crossings[cut])

    @cached_property
    def _crossings(self) -> list[int]:
        recording = self._recordings[self.known[0]]
        number = {layer: index for index, layer in enumerate(self.layers)}

        def place(node: fx.Node) -> int:
            if node.op in ("placeholder", "output"):
                return 0 if node.op == "placeholder" else len(self.layers) - 1
            return number[layer_of(recording, node)]

        counts = [0] * (len(self.layers) + 1)
        for node in recording.graph.nodes:
            if node.users and node.op not in ("get_attr", "output") and not small(node):
                for cut in range(place(node) + 1, max(map(place, node.users)) + 1):
                    counts[cut] += 1
        return counts

    def devices(self) -> Mapping[str, str]:
        return self.how.devices()

    # -- what stages ask ---------------------------------------------------------------------------------------

    def key(self, arguments: Mapping[str, Any]) -> tuple[str, list[Any]]:
        """The kind of a call, and its open values."""
        tensors = all(isinstance(value, Tensor) for value in arguments.values())
        names = tuple(arguments) if tensors else ()
        if names in self._keys:
            return self._keys[names], list(arguments.values())
        key, values = key_of(self.parameters, arguments)
        if names and len(values) == len(names) and all(a is arguments[b] for a, b in zip(values, names, strict=True)):
            self._keys[names] = key
        return key, values

    def recording(self, key: str, flags: Flags) -> Recording:
        with self._lock:
            if (key, flags) not in self._recordings:
                modes = dict(zip(self.entered, flags, strict=True))
                self._recordings[key, flags] = self.how.record(Call(self.model, key), modes, self.entered)
            return self._recordings[key, flags]

    def parts(self, groups: tuple[tuple[str, ...], ...], key: str, flags: Flags) -> list[Part]:
        with self._lock:
            at = (groups, key, flags)
            if at not in self._parts:
                self._parts[at] = flow(self.model, self.recording(key, flags), groups)
            return self._parts[at]

    def program(self, groups: tuple[tuple[str, ...], ...], index: int, key: str, flags: Flags) -> Program:
        """What a stage runs for one kind of call."""
        at = (groups, index, key, flags)
        program = self._programs.get(at)
        if program is None:
            with self._lock:
                recording, parts = self.recording(key, flags), self.parts(groups, key, flags)
                self._check(groups, key, parts, recording.constants)
                route(parts, {(edge.src, edge.dst) for edge in self.edges(groups)})
                program = self._programs[at] = self._compiled(groups, index, recording, parts[index])
        return program

    def _compiled(self, groups: Groups, index: int, recording: Recording, part: Part) -> Program:
        edges = self.edges(groups)
        sources = sorted(edge.src for edge in edges if edge.dst == index)
        targets = sorted(edge.dst for edge in edges if edge.src == index)
        received = [part.received.get(source, []) for source in sources]
        if index == 0:
            received = [[node for node in recording.graph.nodes if node.op == "placeholder"]]
        sent = [part.sent.get(target, []) for target in targets]
        return compiled(part, received, sent, recording.constants, self.model)

    def _check(self, groups: Groups, key: str, parts: Sequence[Part], constants: Iterable[str]) -> None:
        """A kind of call that the plan was not made for uses its modules in the stages that have them."""
        for src, part in enumerate(parts):
            held = {path for layer in groups[src] for path in self.holds.modules[layer]}
            held |= {name for layer in groups[src] for name in self.holds.of(layer)} | set(constants)
            for node in part.steps:
                read = node.op == "get_attr" and not all(map(small, node.users))
                if (read or node.op == "call_module") and node.target not in held:
                    raise PlanError(
                        f"{node.meta['where']}: called as {Call(self.model, key)}, the model uses {node.target} in "
                        f"stage {src}, but the plan, made for other kinds of call, has it in another stage"
                    )
