"""``TraceChain``: the layers of a model whose forward was recorded, and the programs of its stages.

    model, sample ──recorder──▶ Recording ──cut policy──▶ layers ──groups──▶ parts ──▶ one Program per stage

One recording is made per kind of call: per shapes and dtypes of the inputs, other arguments, train/eval flags, grad
mode and autocast, and per answer to the questions that the forward asks about its inputs. The plan is made for the
first ones; later ones keep its layers, and send values from stage to stage where the plan has no edge for them.
"""

from __future__ import annotations

import inspect
import json
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock._torch import NormBase
from penstock.errors import PlanError, did_you_mean
from penstock.split.lazy import build, members
from penstock.split.marks import Block, begin_block_of, cut_points
from penstock.split.plan import Edge, Groups, LayerChain, bind_arguments
from penstock.split.trace.call import call_text, describe, dump, tensors_of
from penstock.split.trace.dummy import guessed_arguments
from penstock.split.trace.errors import CannotTrace, cannot_trace, mentions_marks
from penstock.split.trace.recorder import Enter, KeepWhole, Recorder, can_enter, hooked_module, user_hooks
from penstock.split.trace.recording import (
    Attribute,
    Part,
    Program,
    Recording,
    Ref,
    Step,
    context_now,
    divide,
    leaves_of,
    route,
)
from penstock.split.trace.stage import TracedStage
from penstock.split.trace.state import place_of

START = "start"  # the layer before the first mark, where no module gives it a name
MAX_RECORDINGS = 256
_PLAIN_ATTRIBUTES = (bool, int, float, str, tuple, list, torch.dtype)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, _PLAIN_ATTRIBUTES)

Sample = tuple[tuple[Any, ...], dict[str, Any]]


class Calls:
    """Makes the recordings of a model: which modules are entered, and which stay whole because they must."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = inspect.signature(model.forward).parameters
        self.whole: set[str] = set()  # they cannot be entered
        self.reasons: dict[str, KeepWhole] = {}
        self.attributes = Attributes(())
        self.signatures: dict[str, Any] = {}  # of modules: those that are alike run once in a recording
        self.fixed = _fixed_arguments(model, self.parameters)

    def data(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All that a recording of this call depends on, but for the answers to its questions."""
        flags = sum(module.training << i for i, module in enumerate(self.modules.values()))
        casts = [[enabled, str(dtype).removeprefix("torch.")] for enabled, dtype in context_now()[1:]]
        called = describe({**arguments, **self.fixed}, self.parameters)
        return {
            "call": called,
            "weights": self.weights(),
            "flags": f"{flags:x}",
            "attributes": self.attributes.digest(),
            "grad": torch.is_grad_enabled(),
            "autocast": casts,
        }

    def weights(self) -> str:
        """The dtype and the type of device of the model."""
        parameter = next(self.model.parameters(), None)
        return "" if parameter is None else f"{parameter.dtype} {parameter.device.type}"


class Attributes:
    """The plain attributes of modules, and of objects such as a config among them: a forward may depend on them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.dicts = [vars(module) for module in modules]
        entries = [(name, value) for d in self.dicts for name, value in d.items() if not name.startswith("_")]
        self.containers = [value for _, value in entries if isinstance(value, (dict, list, set))]
        objects = {id(v): v for d in self.dicts for v in d.values() if hasattr(v, "__dict__") and not callable(v)}
        self.dicts += [vars(v) for v in objects.values() if not isinstance(v, (nn.Module, Tensor))]
        self._values: list[Any] = []
        self._digest = ""

    def digest(self) -> str:
        """A number that is another one when an attribute was changed, and the same on all ranks."""
        values = [value for entries in self.dicts for value in entries.values()]
        values += [item for c in self.containers for item in (c.values() if isinstance(c, dict) else c)]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            self._values = values
            plain = [
                (name, value)
                for entries in self.dicts
                for name, value in entries.items()
                if name != "training" and _is_plain(value)
            ]
            dicts = [container for container in self.containers if isinstance(container, dict)]
            plain += [(str(name), value) for d in dicts for name, value in d.items() if _is_plain(value)]
            self._digest = f"{zlib.crc32(repr(plain).encode()):x}"
        return self._digest


def _fixed_arguments(model: nn.Module, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values for later calls (Hugging Face: ``use_cache``) are of no use in training."""
    if "use_cache" in parameters:
        return {"use_cache": False}
    spread = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return {"use_cache": False} if spread and bool(getattr(getattr(model, "config", None), "use_cache", False)) else {}


@contextmanager
def _settings(modules: Mapping[str, nn.Module], data: Mapping[str, Any]) -> Iterator[None]:
    """Train/eval flags, grad mode and autocast of a kind of call, for the time of a recording."""
    flags, before = int(data["flags"], 16), [module.training for module in modules.values()]
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    try:
        for i, module in enumerate(modules.values()):
            if module.training != bool(flags >> i & 1):
                module.training = bool(flags >> i & 1)
        for (kind, *_), (enabled, dtype) in zip(casts, data["autocast"], strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, getattr(torch, dtype))
        with torch.inference_mode(False), torch.set_grad_enabled(data["grad"]):
            yield
    finally:
        for module, training in zip(modules.values(), before, strict=True):
            if module.training != training:
                module.training = training
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


class CutPolicy:
    """Where a recorded model may be cut: before ``entered`` modules' own modules, at named modules, or at marks."""

    def __init__(self, calls: Calls, how: str, lead: Block | None = None) -> None:
        self.calls, self.how, self.lead = calls, how, lead
        self.entered: set[str] = {""}
        self.required: set[str] = {""}
        self.targets: dict[str, str] = {}  # modules before which to cut, by path, with the layers' names
        self.recipe: dict[str, Any] = {}

    @property
    def structure(self) -> dict[str, str]:
        """The layers by the order in which modules are registered, where no call of the model is known."""
        if self.how != "modules":
            first = [] if self.how == "blocks" else [START]
            return {mark: mark for mark in [*first, *self.targets]}
        calls = self.calls
        units = [path for path in _units(calls, self.entered) if any(True for _ in calls.modules[path].parameters())]
        return {path: path for path in units} or {START: START}

    def starts(self) -> Any:
        """A function from the path of a module that is called to the layer that begins with the call."""
        counts: dict[str, int] = {}
        entered, whole, targets = self.entered, self.calls.whole, self.targets

        def of_module(path: str) -> str | None:
            if path not in targets if targets else path in entered and path not in whole:
                return None
            counts[path] = counts.get(path, 0) + 1
            return path if counts[path] == 1 else f"{path}#{counts[path]}"

        return targets.get if self.how == "cuts" else of_module

    def record(self, data: Mapping[str, Any], tensors: Sequence[Tensor] | None = None) -> Recording:
        """Record a kind of call. Modules that cannot be entered stay whole, unless cuts lie inside."""
        calls, starts = self.calls, None if self.how == "marks" else self.starts
        with _settings(calls.modules, data):
            while True:
                recorder = Recorder(
                    calls.model, dump(data), data["call"], entered=self.entered, whole=calls.whole - self.required,
                    starts=None if starts is None else starts(), lead=self.lead, tensors=tensors,
                    answers=data.get("answers"), parameters=calls.parameters, signatures=calls.signatures,
                )  # fmt: skip
                try:
                    found = recorder.record()
                except KeepWhole as again:
                    self._keep_whole(again, recorder.result.text)
                except Enter as again:
                    if again.path in self.entered:
                        message = f"{again.path} returns an object that cannot cross to another stage"
                        raise CannotTrace(message, definite=True) from None
                    kind = type(calls.modules[again.path])
                    self.entered |= {path for path, module in calls.modules.items() if type(module) is kind}
                else:
                    if "answers" not in data:
                        found.key = dump({**data, "answers": found.answers})
                    return found

    def _keep_whole(self, again: KeepWhole, call: str) -> None:
        calls, error = self.calls, again.error
        if again.path in self.required or again.path in calls.whole:
            if isinstance(error, PlanError) or not isinstance(error, Exception):
                raise error from None
            failure = cannot_trace(calls.modules[again.path], error, call, again.path, again.place)
            failure.marked = True
            raise failure from error
        kind = type(calls.modules[again.path])
        alike = {p for p in self.entered if type(calls.modules[p]) is kind and p not in self.required}
        calls.whole |= alike
        calls.reasons.update(dict.fromkeys(alike, again))

    def enter(self, paths: Iterable[str]) -> None:
        self.entered |= set(paths)


def both_modes(calls: Calls, data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The kind of call as it is, and with the whole model in train and in eval mode."""
    every = [f"{(1 << len(calls.modules)) - 1:x}", "0"]
    return [dict(data), *({**data, "flags": flags} for flags in every if flags != data["flags"])]


def policy_for_cuts(calls: Calls, cuts: Sequence[str]) -> CutPolicy:
    """Cut before the calls of named modules."""
    model, policy = calls.model, CutPolicy(calls, "cuts")
    if isinstance(cuts, str) or not isinstance(cuts, Iterable) or not all(isinstance(cut, str) for cut in cuts):
        raise PlanError(f"cuts is a list of names of modules, got {cuts!r}")
    cuts = list(cuts)
    modules = dict(model.named_modules(remove_duplicate=False))
    canonical = {id(module): path for path, module in model.named_modules()}
    for name in cuts:
        if name not in modules or not name:
            hint = did_you_mean(name, filter(None, modules))
            raise PlanError(f"{type(model).__name__} has no module {name!r} to cut before{hint}")
        path = canonical[id(modules[name])]
        if path in policy.targets:
            raise PlanError(f"cuts names the module {name!r} twice: {cuts}")
        policy.targets[path] = path
    if not policy.targets:
        raise PlanError("cuts is empty: name the modules before which to cut")
    policy.required |= _parents(policy.targets, calls.modules)
    policy.enter(policy.required)
    policy.recipe = {"how": "cuts", "cuts": cuts}
    return policy


def _parents(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """The modules that lead to these and that can be called."""
    split = [path.split(".") for path in paths]
    found = {".".join(parts[:i]) for parts in split for i in range(1, len(parts))}
    return {path for path in found if path in modules and type(modules[path]) not in (nn.ModuleList, nn.ModuleDict)}


def policy_for_blocks(calls: Calls, blocks: Sequence[str], name: str) -> CutPolicy:
    """Cut between the blocks of a list."""
    policy = CutPolicy(calls, "blocks")
    policy.targets = {path: path for path in blocks}
    policy.required |= _parents(policy.targets, calls.modules)
    policy.enter(policy.required)
    policy.recipe = {"how": "blocks", "blocks": name}
    return policy


def policy_for_marks(
    calls: Calls, data: Mapping[str, Any], tensors: Sequence[Tensor] | None, lead: Block | None
) -> CutPolicy | None:
    """Cut at the cut points and blocks of the forward; None if it has none."""
    policy = CutPolicy(calls, "marks", lead)
    able = {path for path, module in calls.modules.items() if can_enter(module)}
    policy.entered = {p for p in able if not p or not user_hooks(calls.modules[p], None, calls.model)} | {
        p for p in able if mentions_marks(calls.modules[p])
    }
    surveys, errors = [], list[Exception]()
    for kind in both_modes(calls, data):
        try:
            surveys.append(policy.record(kind, tensors if kind == data else None))
        except PlanError as error:
            errors.append(error)
    if not surveys:
        raise errors[0]
    lost = [path for path in calls.whole if mentions_marks(calls.modules[path])]
    if lost:
        reason = calls.reasons[lost[0]]
        cause = reason.error if isinstance(reason.error, Exception) else RuntimeError(str(reason.error))
        raise cannot_trace(calls.modules[lost[0]], cause, None, lost[0], reason.place)
    reached = set().union(*(survey.points for survey in surveys))
    missed = [name for point, name in cut_points(calls.model).items() if point not in reached]
    if missed:
        raise PlanError(
            f"the forward of {type(calls.model).__name__} never reaches the CutPoint(s) {', '.join(missed)}: call "
            "each on an activation, or take them out"
        )
    if not any(survey.order for survey in surveys):
        return None
    policy.required = {""}.union(*(survey.marked for survey in surveys)) - {
        path for path in calls.modules if type(calls.modules[path]) in (nn.ModuleList, nn.ModuleDict)
    }
    policy.entered = set(policy.required)
    block = {} if lead is None else {"lead": [lead.name, lead.device]}
    policy.recipe = {"how": "marks", **block}
    return policy


def policy_for_modules(calls: Calls, expanded: Iterable[str] = ()) -> CutPolicy:
    """Cut before every call of a module that is not entered."""
    policy = CutPolicy(calls, "modules")
    unknown = set(expanded) - set(calls.modules)
    if unknown:
        kind = type(calls.model).__name__
        raise PlanError(f"{kind} has no module {min(unknown)!r}: this is a plan of another model")
    policy.enter(expanded)
    for path, module in calls.modules.items():
        plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if plain and "forward" not in vars(module) and not user_hooks(module, None, calls.model) and len(module):
            policy.entered.add(path)
    policy.recipe = {"how": "modules", "expanded": sorted(policy.entered)}
    return policy


def automatic_policy(
    calls: Calls, data: Mapping[str, Any], tensors: Sequence[Tensor] | None, stages: int
) -> tuple[CutPolicy, Recording]:
    """Enter modules while one of them outweighs a stage's even share, or while there are too few layers."""
    policy = policy_for_modules(calls)
    recording = policy.record(data, tensors)
    while True:
        heavy = _heavy_modules(calls, policy, recording.order, stages)
        if not heavy:
            policy.recipe = {"how": "modules", "expanded": sorted(policy.entered - calls.whole)}
            return policy, recording
        policy.enter(heavy)
        recording = policy.record(data, tensors)


def _heavy_modules(calls: Calls, policy: CutPolicy, order: Sequence[str], stages: int) -> set[str]:
    """The modules to enter next."""
    weights: dict[str, int] = {}
    for layer in order:
        path = layer.partition("#")[0]
        if path == START:
            continue
        own = {id(tensor): tensor.numel() for _, tensor in members(calls.modules[path], path)}
        weights[path] = 1 + sum(own.values())
    able = {
        path
        for path in weights
        if path not in calls.whole
        and path not in policy.entered
        and next(calls.modules[path].children(), None) is not None
        and can_enter(calls.modules[path])
        and not user_hooks(calls.modules[path], None, calls.model)
    }
    heavy = {path for path in able if weights[path] * stages > sum(weights.values())}
    if not heavy and len(order) < stages and able:
        heavy = {max(able, key=weights.__getitem__)}
    return heavy


class TraceChain(LayerChain):
    """The layers of a model whose forward was recorded."""

    verify = True
    provisional = False  # whether the kinds of call that it was made for are guesses

    def __init__(
        self,
        policy: CutPolicy,
        data: Mapping[str, Any] | None,
        tensors: Sequence[Tensor] | None = None,
        first: Recording | None = None,
    ) -> None:
        """``data`` is the kind of call that the plan is made for; None: layers follow from the model's structure."""
        calls = policy.calls
        self.model, self.calls, self.policy = calls.model, calls, policy
        self.fixed = calls.fixed
        self._lock = threading.RLock()
        self._recordings: dict[str, Recording] = {}
        self._variants: dict[str, list[Recording]] = {}  # of one kind of call, with different answers
        self._quick: dict[Any, tuple[dict[str, Any], list[Recording]]] = {}  # the same, by a key that is quick to make
        self._parts: dict[Any, list[Part]] = {}
        self._programs: dict[Any, Program] = {}
        self._edges: dict[Any, tuple[Edge, ...]] = {}
        self.last = threading.local()  # the key of the call that this thread's first stage ran last
        self.planned: list[Recording] = []  # recordings that the plan was made for
        if data is not None:
            main = first or policy.record(data, tensors)
            self.planned.append(main)
            calls.attributes = Attributes(calls.modules[path] for path in sorted(main.entered))
            data = {**{k: v for k, v in data.items() if k != "answers"}, "attributes": calls.attributes.digest()}
            self._variants[dump(data)] = [main]
            main.key = dump({**data, "answers": main.answers})
            for kind in both_modes(calls, {**data, "answers": main.answers})[1:]:
                try:
                    self.planned.append(policy.record(kind))
                except PlanError:
                    continue  # a mode that nobody may ever use: the error comes when somebody does
        self.names = self._names() if self.planned else policy.structure
        self.layers = tuple(dict.fromkeys(self.names.values()))
        for recording in self.planned:
            self._recordings[recording.key] = recording
        called = {"called": json.loads(self.planned[0].key)} if self.planned else {}
        self.recipe = {"front": "trace", **policy.recipe, **called}
        entered = set(policy.entered).union(*(recording.entered for recording in self.planned)) - calls.whole
        self.entered = sorted(entered | self._leading())
        self._entered_modules = [(path, calls.modules[path]) for path in self.entered if path in policy.entered]
        self.holds = Members(self)
        if policy.how == "cuts" and self.planned:
            self._check_called()

    def _leading(self) -> set[str]:
        """The modules that lead to others that are called, or to parameters that are read."""
        steps = [step for recording in self.planned for step in recording.steps]
        used = {str(step.target) for step in steps if step.module}
        used |= {ref.name for step in steps for ref in step.refs() if isinstance(ref, Attribute)}
        parts = [name.split(".") for name in used]
        return {".".join(names[:i]) for names in parts for i in range(1, len(names))} & set(self.calls.modules)

    @classmethod
    def from_recipe(cls, model: nn.Module, recipe: Mapping[str, Any]) -> TraceChain:
        """The chain that a saved plan was made of."""
        calls, how, data = Calls(model), recipe.get("how"), recipe.get("called")
        if how == "cuts":
            return cls(policy_for_cuts(calls, recipe["cuts"]), data)
        if how == "blocks":
            return cls(policy_for_blocks(calls, blocks_of(model, recipe["blocks"]), recipe["blocks"]), data)
        if how == "modules":
            return cls(policy_for_modules(calls, recipe["expanded"]), data)
        if how == "marks" and data is not None:
            lead = Block(*recipe["lead"]) if recipe.get("lead") else None
            policy = policy_for_marks(calls, data, None, lead)
            if policy is None:
                raise PlanError(f"the plan was made at marks, but {type(model).__name__} has none")
            return cls(policy, data)
        raise PlanError(f"the plan's recipe for a recorded model is not known here: {dict(recipe)!r}")

    # ── layers ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _marks(self) -> dict[str, list[str]]:
        """All marks in the order in which they are met, each with the modules that are called after it."""
        marks: dict[str, list[str]] = {}
        for recording in self.planned:
            inside: dict[str, list[str]] = {mark: [] for mark in [START, *recording.order]}
            for step in recording.steps:
                if step.module:
                    inside[step.layer or START].append(str(step.target))
            before: list[str] = []
            for mark, modules in inside.items():
                if mark not in marks:  # it comes after those that it followed here
                    items = list(marks.items())
                    at = max((i + 1 for i, (other, _) in enumerate(items) if other in before), default=0)
                    marks = dict([*items[:at], (mark, modules), *items[at:]])
                before.append(mark)
        return marks

    def _names(self) -> dict[str, str]:
        """The layers, by the marks that begin them: named after the modules in them, or else after their marks."""
        marks = self._marks()
        if self.policy.how in ("modules", "blocks") or any(r.kind == "blocks" for r in self.planned):
            return {mark: mark for mark in marks if mark != START} or {START: START}
        names: dict[str, str] = {}
        for index, (mark, inside) in enumerate(marks.items()):
            plain = f"cut {index}" if mark.startswith("cut at ") else mark
            name = plain if not inside else inside[0] if len(set(inside)) == 1 else f"{inside[0]}…{inside[-1]}"
            taken = sum(other.partition("#")[0] == name for other in names.values())
            names[mark] = f"{name}#{taken + 1}" if taken else name
        return names

    def layer_of(self, recording: Recording, step: Step) -> str:
        placed: dict[str | None, str] = recording.__dict__.setdefault("placed", {})
        if not placed:
            placed.update(self._placed(recording))
        if step.layer not in placed:
            raise PlanError(
                f"{step.where}: called as {recording.text}, the forward reaches {step.layer!r}, which it did not in "
                f"the kinds of call that the plan was made for ({', '.join(dict.fromkeys(placed.values()))})"
            )
        return placed[step.layer]

    def _placed(self, recording: Recording) -> dict[str | None, str]:
        """The layers that a recording's marks begin. A cut that no planned call met is as if it were not there."""
        here, placed = next(iter(self.names.values())), dict[str | None, str]()
        if recording.kind == "blocks":
            placed.update({mark: self.names[mark] for mark in recording.order if mark in self.names})
            placed[None] = next(iter(placed.values()), here)
            return placed
        placed[None] = here
        for mark in recording.order:
            here = self.names.get(mark, here)
            placed[mark] = here
        return placed

    def _check_called(self) -> None:
        kind, main = type(self.model).__name__, self.planned[0]
        for name in self.policy.targets:
            counts = {recording.order.count(name) for recording in self.planned}
            if counts == {0}:
                raise PlanError(f"the forward of {kind} never calls {name}: it cannot be cut before it")
            if max(counts) > 1:
                raise PlanError(f"the forward calls {name} {max(counts)} times: a cut lies before one call")
        begun = {step.layer for step in main.steps}
        if None not in begun:
            raise PlanError(f"nothing runs before {main.order[0]}: a cut there would leave an empty stage")
        for mark, following in zip(main.order, main.order[1:], strict=False):
            if mark not in begun:
                raise PlanError(f"nothing runs between {mark} and {following}: name one of them, not both")

    @property
    def has_leading_modules(self) -> bool:
        """Whether modules are called before the first mark."""
        return any(step.module and step.layer is None for step in self.planned[0].steps)

    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        return self.holds.of(layer).items()

    def devices(self) -> Mapping[str, str]:
        return {block: device for recording in self.planned for block, device in recording.devices.items()}

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        cuts = tuple(tuple(layers) for layers in groups)
        if cuts not in self._edges:
            values: dict[tuple[int, int], dict[str, None]] = {(s, s + 1): {} for s in range(len(cuts) - 1)}
            for number, recording in enumerate(self.planned):
                try:
                    parts = self.parts(cuts, recording)
                except PlanError:
                    if number == 0:
                        raise
                    continue
                for src, part in enumerate(parts):
                    for dst, numbers in part.sent.items():
                        labels = (recording.labels[n] for n in numbers)
                        values.setdefault((src, dst), {}).update(dict.fromkeys(labels))
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
        """The number of values that are made before a cut and used after it."""
        return float(self._crossings[cut])

    @cached_property
    def _crossings(self) -> list[int]:
        if not self.planned:
            return [1] * (len(self.layers) + 1)
        recording, count = self.planned[0], len(self.layers)
        number = {layer: index for index, layer in enumerate(self.layers)}
        first = dict.fromkeys(recording.inputs, 0)
        last: dict[int, int] = {}
        for step in recording.steps:
            place = number[self.layer_of(recording, step)]
            last.update({ref.number: place for ref in step.refs() if isinstance(ref, Ref)})
            first.update({n: place for n in step.outputs if n is not None and n not in first})
        last.update({leaf.number: count - 1 for leaf in leaves_of(recording.output) if isinstance(leaf, Ref)})
        counts = [0] * (count + 1)
        for value, place in last.items():
            for cut in range(first[value] + 1, place + 1):
                counts[cut] += 1
        return counts

    # ── kinds of call ────────────────────────────────────────────────────────────────────────────────────────────

    def variant(self, arguments: Mapping[str, Any]) -> str:
        """The key of the recording that runs for these arguments, which is made if there is none yet."""
        for path, module in self._entered_modules:
            if user_hooks(module, None, self.model):
                raise hooked_module(path, module)
        quick = self._quick_key(arguments)
        found = self._quick.get(quick) if quick is not None else None
        if found is None:
            data = self.calls.data(arguments)
            found = data, self._variants.setdefault(dump(data), [])
            if quick is not None:
                self._quick[quick] = found
        data, known = found
        tensors = tensors_of(data["call"], arguments)
        for recording in known:
            if recording.holds_for(tensors, self.model):
                return recording.key
        with self._lock:
            try:
                recording = self.policy.record(data, tensors)
            except CannotTrace as error:
                cause = error.__cause__
                if error.definite or not isinstance(cause, Exception):
                    raise
                called = call_text(self.model, data["call"])
                cause.add_note(f"in the forward's line {place_of(cause)}, called as {called}")
                raise cause from None
            known.append(recording)
            self._keep(recording)
        return recording.key

    def _quick_key(self, arguments: Mapping[str, Any]) -> Any:
        """A key that is quick to make, for arguments that are tensors, numbers and strings."""
        call: list[tuple[Any, ...]] = []
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                call.append((name, value.shape, value.dtype, value.requires_grad))
            elif value is None or isinstance(value, (bool, int, float, str)):
                call.append((name, type(value), value))
            else:
                return None
        flags = tuple(map(attrgetter("training"), self.calls.modules.values()))
        return tuple(call), flags, self.calls.weights(), self.calls.attributes.digest(), context_now()

    def _keep(self, recording: Recording) -> None:
        self._recordings[recording.key] = recording
        if len(self._recordings) > MAX_RECORDINGS:  # of ever new shapes
            oldest = next(key for key, one in self._recordings.items() if one not in self.planned)
            del self._recordings[oldest]
            for row in self._variants.values():
                row[:] = [one for one in row if one.key != oldest]
            self._variants = {at: row for at, row in self._variants.items() if row}
            self._quick.clear()
            for cache in (self._parts, self._programs):
                for at in [at for at in cache if at[-1] == oldest]:
                    del cache[at]

    def recording(self, key: str) -> Recording:
        found = self._recordings.get(key)
        if found is None:
            with self._lock:
                if key not in self._recordings:
                    self._keep(self.policy.record(json.loads(key)))
                found = self._recordings[key]
        return found

    def parts(self, groups: tuple[tuple[str, ...], ...], recording: Recording) -> list[Part]:
        with self._lock:
            at = (groups, recording.key)
            if at not in self._parts:
                stage_of = {layer: index for index, layers in enumerate(groups) for layer in layers}
                parts = divide(recording, lambda step: stage_of[self.layer_of(recording, step)], len(groups))
                self._check_statistics(parts)
                self._parts[at] = parts
            return self._parts[at]

    def program(self, groups: tuple[tuple[str, ...], ...], index: int, key: str) -> Program:
        """The steps of a stage for one kind of call."""
        at = (groups, index, key)
        program = self._programs.get(at)
        if program is None:
            with self._lock:
                recording, edges = self.recording(key), self.edges(groups)
                parts = self.parts(groups, recording)
                self._check_held(groups, recording, parts)
                route(parts, {(edge.src, edge.dst) for edge in edges})
                part = parts[index]
                received = [part.received.get(edge.src, []) for edge in edges if edge.dst == index]
                sent = [part.sent.get(edge.dst, []) for edge in edges if edge.src == index]
                last = index == len(groups) - 1
                program = Program(self.model, recording, part, received if index else [recording.inputs], sent, last)
                self._programs[at] = program
        return program

    def prepare(self, groups: Groups, variant: str | None) -> None:
        assert variant is not None
        cuts = tuple(tuple(layers) for layers in groups)
        for index in range(len(cuts)):
            self.program(cuts, index, variant)

    def _check_statistics(self, parts: Sequence[Part]) -> None:
        """Running statistics cannot be kept in two stages."""
        used: dict[str, dict[int, str]] = {}
        for stage, part in enumerate(parts):
            for step in part.steps:
                if step.module:
                    used.setdefault(str(step.target), {})[stage] = step.where
        for path, places in used.items():
            if len(places) > 1:
                for name, module in self.model.get_submodule(path).named_modules(prefix=path):
                    if isinstance(module, NormBase) and module.track_running_stats:
                        lines = " and ".join(f"stage {stage} ({where})" for stage, where in places.items())
                        raise PlanError(
                            f"{name} ({type(module).__name__}) keeps running statistics and is called in {lines}: they "
                            "would be duplicated. Put the calls into one stage, or use a module for each"
                        )

    def _check_held(self, groups: Groups, recording: Recording, parts: Sequence[Part]) -> None:
        """A kind of call that the plan was not made for uses its modules in the stages that have them."""
        for stage, part in enumerate(parts):
            held = {name for layer in groups[stage] for name in (*self.holds.modules[layer], *self.holds.of(layer))}
            for step in part.steps:
                used = [str(step.target)] if step.module else []
                used += [ref.name for ref in step.refs() if isinstance(ref, Attribute)]
                for name in used:
                    if name not in held and held.isdisjoint(_prefixes(name)) and not self._is_stateless(name):
                        raise PlanError(
                            f"{step.where}: called as {recording.text}, the model uses {name} in stage {stage}, but "
                            "the plan has it in another stage: pass ps.split(…, sample=…), the arguments of such a call"
                        )

    def _is_stateless(self, name: str) -> bool:
        """Whether any stage may call a module, because it has neither parameters nor buffers."""
        module = self.calls.modules.get(name)
        return module is not None and not any(True for _ in members(module, name))


def _units(calls: Calls, entered: set[str]) -> list[str]:
    """The outermost modules that are not entered, in the order in which they are registered."""
    found: list[str] = []
    lists = (nn.ModuleList, nn.ModuleDict)
    for path, module in calls.modules.items():
        inside = any(path.startswith(f"{unit}.") for unit in found[-1:])
        if path not in entered and not inside and not isinstance(module, lists):
            found.append(path)
    return found


class Members:
    """The modules, parameters and buffers that each layer of a recorded model holds.

    A layer holds the modules that it calls and the parameters that it reads, in any of the planned kinds of call. The
    layer whose own names are most alike holds all else, so that no state is lost.
    """

    def __init__(self, chain: TraceChain) -> None:
        self.model, layers = chain.model, chain.layers
        aliases: dict[int, list[str]] = {}
        for path, module in self.model.named_modules(remove_duplicate=False):
            aliases.setdefault(id(module), []).append(path)
        self.modules: dict[str, dict[str, nn.Module]] = {layer: {} for layer in layers}  # by every path
        self.own: dict[str, dict[str, None]] = {layer: {} for layer in layers}  # parameters and buffers apart from them
        self.entered = set(chain.entered)
        for recording in chain.planned:
            for step in recording.steps:
                layer = chain.layer_of(recording, step)
                if step.module:
                    module = self.model.get_submodule(str(step.target))
                    self.modules[layer].update(dict.fromkeys(aliases[id(module)], module))
                for ref in step.refs():
                    if isinstance(ref, Attribute):
                        self.own[layer][ref.name] = None
            for leaf in leaves_of(recording.output):
                if isinstance(leaf, Attribute):
                    self.own[layers[-1]][leaf.name] = None
        if chain.planned:
            self._hold_the_rest(layers)
        else:
            self._hold_by_structure(chain)

    def _hold_by_structure(self, chain: TraceChain) -> None:
        """Hold modules in the order in which they are registered; those without parameters in every layer."""
        layers, first = chain.layers, chain.layers[0]
        layer = first
        for path in _units(chain.calls, self.entered | {""}):
            layer = chain.names.get(path, layer)
            module = chain.calls.modules[path]
            for holder in [layer] if next(module.parameters(), None) is not None else layers:
                self.modules[holder][path] = module
        held = {name for one in layers for name in self.of(one)}
        layer = first
        for name, tensor in members(self.model, ""):
            layer = next((chain.names[prefix] for prefix in _prefixes(name) if prefix in chain.names), layer)
            if name not in held:
                for holder in [layer] if isinstance(tensor, nn.Parameter) else layers:
                    self.own[holder][name] = None

    def of(self, layer: str) -> dict[str, Tensor]:
        """The parameters and buffers of a layer as they are now, by every name."""
        found = {name: tensor for path, module in self.modules[layer].items() for name, tensor in members(module, path)}
        for name in self.own[layer]:
            parents, _, last = name.rpartition(".")
            owner = self.model.get_submodule(parents)
            tensor = owner._parameters.get(last, owner._buffers.get(last))
            if tensor is not None:
                found[name] = tensor
        return found

    def _hold_the_rest(self, layers: Sequence[str]) -> None:
        held = {layer: self.of(layer) for layer in layers}
        names = {name for tensors in held.values() for name in tensors}
        rest = {name: tensor for name, tensor in members(self.model, "") if name not in names}
        called = {path for layer in layers for path in self.modules[layer]}
        for path, module in self.model.named_modules():  # those without parameters follow train() and eval() too
            leaf = next(module.children(), None) is None and not any(True for _ in members(module, path))
            if leaf and path and path not in called and called.isdisjoint(_prefixes(path)):
                self.modules[layers[-1]][path] = module
        if not rest:
            return
        holder = {id(tensor): layer for layer in reversed(layers) for tensor in held[layer].values()}
        entered = {prefix for name in names for prefix in _prefixes(name)} | self.entered
        for name, tensor in rest.items():
            if id(tensor) in holder:  # another name of what is held already
                self.own[holder[id(tensor)]][name] = None
                continue
            likeness = {layer: max((_common(other, name) for other in held[layer]), default=0) for layer in layers}
            layer = max(reversed(layers), key=likeness.__getitem__)
            whole = next((prefix for prefix in _prefixes(name) if prefix not in entered), None)
            if whole is not None:  # a module that no call uses is kept in one piece
                self.modules[layer][whole] = self.model.get_submodule(whole)
            else:
                self.own[layer][name] = None


def _prefixes(name: str) -> list[str]:
    """The paths of the modules that a name leads through, the outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _common(a: str, b: str) -> int:
    """How many parts at the beginning of two names are the same."""
    count = 0
    for one, other in zip(a.split("."), b.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count


def blocks_of(model: nn.Module, name: str) -> list[str]:
    """The paths of the blocks in the list called ``name``."""
    kind = type(model).__name__
    if not isinstance(name, str):
        raise PlanError(f"blocks must be the name of a list of modules, such as 'model.layers', got {name!r}")
    lists = (nn.ModuleList, nn.Sequential)
    try:
        found = model.get_submodule(name) if name else model
    except AttributeError:
        every = [path for path, _ in model.named_modules() if path]
        known = [path for path, module in model.named_modules() if path and isinstance(module, lists)]
        none_near = f", whose lists are {known}"
        hint = did_you_mean(name, known, cutoff=0.4) or did_you_mean(name, every, otherwise=none_near)
        raise PlanError(f"there is no {name!r} in {kind}{hint}") from None
    if not name or not isinstance(found, lists):
        raise PlanError(
            f"blocks={name!r} of {kind} is a {type(found).__name__}, not an nn.ModuleList or nn.Sequential of blocks"
        )
    blocks = list(found._modules.values())
    if not blocks or any(block is None for block in blocks):
        raise PlanError(f"blocks={name!r} of {kind} has no blocks in it, or gaps: there is nothing to split")
    if len({id(block) for block in blocks}) != len(blocks):
        raise PlanError(f"one block stands in {name} of {kind} more than once: make each block a module of its own")
    return [f"{name}.{key}" for key in found._modules]


def trace_chain(
    model: nn.Module,
    *,
    stages: int | None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Sample | None = None,
) -> TraceChain:
    """The chain of a model: between ``blocks``, before the modules ``cuts``, at its marks, or where it balances.

    Without a sample, calls are guessed; if none runs, layers follow from the order in which modules are registered. The
    chain is then ``provisional``.
    """
    _check_sized(model)
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise PlanError(f"a {type(model).__name__} has no forward and cannot run: split a module that can be called")
    if sample is not None:
        calls = Calls(model)
        return _chain_for(calls, call_of(calls, bind_arguments(model, *sample)), stages, cuts, blocks)
    errors: list[CannotTrace] = []
    for arguments in guessed_arguments(model):
        try:
            calls = Calls(model)
            chain = _chain_for(calls, call_of(calls, arguments), stages, cuts, blocks)
        except CannotTrace as error:
            errors.append(error)
            continue
        chain.provisional = True
        return chain
    definite = [error for error in errors if error.definite]
    if errors and stages == 1 and cuts is None and blocks is None:
        raise definite[0] if definite else errors[0]
    if _may_have_marks(model) and mentions_marks(model):
        if definite:
            raise definite[0]
        raise CannotTrace(
            f"the marks of {type(model).__name__} are found by running its forward, and it is not known how to call "
            "it: pass ps.split(…, sample=…), the arguments of a call",
            marked=True,
        )
    chain = _chain_by_structure(Calls(model), stages, cuts, blocks)
    chain.provisional = True
    return chain


def _chain_for(
    calls: Calls, call: KnownCall, stages: int | None, cuts: Sequence[str] | None, blocks: str | None
) -> TraceChain:
    data, tensors = call
    if cuts is not None:
        return TraceChain(policy_for_cuts(calls, cuts), data, tensors)
    if blocks is not None:
        return TraceChain(policy_for_blocks(calls, blocks_of(calls.model, blocks), blocks), data, tensors)
    marks = policy_for_marks(calls, data, tensors, None) if _may_have_marks(calls.model) else None
    if marks is not None:
        return TraceChain(marks, data, tensors)
    policy, recording = automatic_policy(calls, data, tensors, _positive(calls.model, stages))
    return TraceChain(policy, data, tensors, recording)


def _positive(model: nn.Module, stages: int | None) -> int:
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        kind = type(model).__name__
        raise PlanError(f"nothing is marked in {kind}: stages must be a positive number, got {stages!r}")
    return stages or 1


def _chain_by_structure(
    calls: Calls, stages: int | None, cuts: Sequence[str] | None, blocks: str | None
) -> TraceChain:
    """Layers in the order in which modules are registered; heavy ones are entered, as for a known call."""
    if cuts is not None:
        return TraceChain(policy_for_cuts(calls, cuts), None)
    if blocks is not None:
        return TraceChain(policy_for_blocks(calls, blocks_of(calls.model, blocks), blocks), None)
    policy, count = policy_for_modules(calls), _positive(calls.model, stages)
    while heavy := _heavy_modules(calls, policy, list(policy.structure), count):
        policy.enter(heavy)
    policy.recipe = {"how": "modules", "expanded": sorted(policy.entered)}
    return TraceChain(policy, None)


def marked_chain(model: nn.Module, *, sample: Sample, lead: Block | None = None) -> TraceChain | None:
    """The chain of a model at its marks or blocks; None where there are none.

    ``lead`` is a block for the code that runs before any other, which else belongs to the first one.
    """
    calls = Calls(model)
    data, tensors = call_of(calls, bind_arguments(model, *sample))
    policy = policy_for_marks(calls, data, tensors, lead)
    return None if policy is None else TraceChain(policy, data, tensors)


KnownCall = tuple[dict[str, Any], list[Tensor]]


def call_of(calls: Calls, arguments: Mapping[str, Any]) -> KnownCall:
    data = calls.data(arguments)
    return data, tensors_of(data["call"], {**arguments, **calls.fixed})


def _may_have_marks(model: nn.Module) -> bool:
    """Libraries have no marks in their forwards; the user's own code may."""
    marked = bool(cut_points(model)) or any(begin_block_of(module) is not None for module in model.modules())
    return marked or any("site-packages" not in _file(type(module)) for module in model.modules())


def _file(kind: type) -> str:
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):
        return ""


def _check_sized(model: nn.Module) -> None:
    state = (*model.named_parameters(), *model.named_buffers())
    unsized = [name for name, tensor in state if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))]
    if unsized:
        raise PlanError(f"{unsized[0]} does not know its size yet: run the model on a batch first")
