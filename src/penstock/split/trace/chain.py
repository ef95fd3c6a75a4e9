"""``TraceChain``: the layers of a model whose forward was recorded, and the programs of its stages.

    model, sample ──recorder──▶ Recording ──cut policy──▶ layers ──groups──▶ parts ──▶ one Program per stage

One recording is made per kind of call: per shapes and dtypes of the inputs, other arguments, train/eval flags, grad
mode and autocast, and per answer to the questions that the forward asks about its inputs. The plan is made for the
first ones; later ones keep its layers, and send values from stage to stage where the plan has no edge for them.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from penstock._torch import NormBase, has_global_module_hooks
from penstock.errors import PenstockError, PlanError
from penstock.json_schema import Maybe, check_schema
from penstock.split.lazy import build, members
from penstock.split.marks import Block
from penstock.split.plan import Edge, Groups, LayerChain
from penstock.split.sample import plain_error
from penstock.split.trace.call import call_text, dump, tensors_of
from penstock.split.trace.cut_policy import (
    START,
    Calls,
    CutPolicy,
    blocks_of,
    both_modes,
    policy_for_blocks,
    policy_for_cuts,
    policy_for_marks,
    policy_for_modules,
    unit_paths,
)
from penstock.split.trace.errors import CannotTrace
from penstock.split.trace.program import Part, Program, divide, route
from penstock.split.trace.recorder import hooked_module, user_hooks
from penstock.split.trace.recording import (
    Attribute,
    Recording,
    Ref,
    Step,
    context_now,
    leaves_of,
    parent_paths,
    tensor_of,
)
from penstock.split.trace.stage import TracedStage
from penstock.split.trace.state import place_of

MAX_RECORDINGS = 256

_CALLED = {"call": {str: {}}, "flags": str, "grad": bool, "autocast": [(bool, str)], "answers": Maybe([object])}
_RECIPE = {
    "how": Maybe(str),
    "cuts": Maybe([str]),
    "blocks": Maybe(str),
    "expanded": Maybe([str]),
    "called": Maybe(_CALLED),
}


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
            for kind in both_modes(calls, {**data, "answers": main.answers})[1:]:
                try:
                    self.planned.append(policy.record(kind))
                except PlanError:
                    continue  # a mode that nobody may ever use: the error comes when somebody does
            data = {**{k: v for k, v in data.items() if k != "answers"}, "read": calls.read.digest()}
            self._variants[dump(data)] = [main]
            main.key = dump({**data, "answers": main.answers})
        self.names = self._names() if self.planned else policy.structure
        if policy.how == "modules":
            self._join_dependent_layers()
        self.layers = tuple(dict.fromkeys(self.names.values()))
        self._warned: set[str] = set()  # attributes that the forward sets in vain
        for recording in self.planned:
            self._recordings[recording.key] = recording
            self._warn_of_lost(recording)
        called = {"called": json.loads(self.planned[0].key)} if self.planned else {}
        self.recipe = {"front": "trace", **policy.recipe, **called}
        entered = set(policy.entered).union(*(recording.entered for recording in self.planned)) - calls.whole
        self.entered = sorted(entered | self._leading())
        leading = [(path, calls.modules[path]) for path in self.entered]
        self._leading_modules = [(path, module, [*module._modules.values()]) for path, module in leading]
        self.holds = Members(self)
        if policy.how == "cuts" and self.planned:
            self._check_called()

    def _leading(self) -> set[str]:
        """The modules that lead to others that are called, or to parameters that are read."""
        steps = [step for recording in self.planned for step in recording.steps]
        used = {str(step.target) for step in steps if step.module}
        used |= {ref.name for step in steps for ref in step.refs() if isinstance(ref, Attribute)}
        return {path for name in used for path in parent_paths(name)} & set(self.calls.modules)

    @classmethod
    def from_recipe(cls, model: nn.Module, recipe: Mapping[str, Any]) -> TraceChain:
        """The chain that a saved plan was made of."""
        check_schema(recipe, _RECIPE, "the plan's recipe")
        calls, how, data = Calls(model), recipe.get("how"), recipe.get("called")
        try:
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
        except PenstockError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            problem = f"the call in the plan's recipe cannot be recorded: {type(error).__name__}: {error}"
            raise PlanError(f"{problem}. Split the model again") from error
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

    def _join_dependent_layers(self) -> None:
        """Make one layer of those that a cut may not separate.

        They lie between the origin of a value and its last change in place, or they call a module that has state of its
        own. Layers after the last change get the value from that layer, as any other.
        """
        marks = list(self.names)
        at: dict[str | None, int] = {mark: i for i, mark in enumerate(marks)}
        for recording in self.planned:
            made, changed = dict[int, int](), dict[int, int]()
            for step in recording.steps:
                place = at.get(step.layer, 0)
                made = {recording.storages[n]: place for n in step.outputs if n is not None} | made
                changed |= {storage: place for storage in step.changes if made.get(storage, place) != place}
            spans = [(made[storage], last) for storage, last in changed.items()]
            calls: dict[str, list[int]] = {}
            for step in recording.steps:
                if step.module:
                    calls.setdefault(str(step.target), []).append(at.get(step.layer, 0))
            repeated = {path: places for path, places in calls.items() if len({*places}) > 1}
            spans += [(min(p), max(p)) for path, p in repeated.items() if self._state_of(recording, path)]
            for start, end in spans:
                joined = {self.names[mark] for mark in marks[start : end + 1]}
                first = self.names[marks[start]]
                self.names |= {mark: first for mark, name in self.names.items() if name in joined}

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
        for path, module, children in self._leading_modules:
            if path in self.policy.entered and (user_hooks(module, None, self.model) or has_global_module_hooks()):
                raise hooked_module(path, module)
            if [*module._modules.values()] != children:
                kind = type(module).__name__
                raise PlanError(f"modules of {path or kind} were replaced after the split: split the model again")
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
                cause = None if error.definite else plain_error(self.model, *self.calls.forward_arguments(arguments))
                if cause is None:
                    raise
                called = call_text(self.model, data["call"])
                cause.add_note(f"in the forward's line {place_of(cause)}, called as {called}")
                raise cause from None
            if self.calls.read.digest() != data["read"]:  # it has read values that no recording did before
                data = {**data, "read": self.calls.read.digest()}
                recording.key = dump({**data, "answers": recording.answers})
                known = self._variants.setdefault(dump(data), [])
                self._quick.clear()
            known.append(recording)
            self._keep(recording)
        return recording.key

    def _quick_key(self, arguments: Mapping[str, Any]) -> Any:
        """A key that is quick to make, for arguments that are tensors, numbers and strings."""
        call: list[tuple[Any, ...]] = []
        for name, value in arguments.items():
            if isinstance(value, Tensor):
                stride = () if value.is_sparse else value.stride()
                call.append((name, value.shape, value.dtype, value.requires_grad, stride))
            elif value is None or isinstance(value, (bool, int, float, str)):
                call.append((name, type(value), value))
            else:
                return None
        flags = tuple(map(attrgetter("training"), self.calls.modules.values()))
        return tuple(call), flags, self.calls.weights(), self.calls.read.digest(), context_now()

    def _warn_of_lost(self, recording: Recording) -> None:
        lost = [name for name in recording.lost if name not in self._warned]
        self._warned.update(lost)
        if lost:
            warnings.warn(
                f"{type(self.model).__name__}.forward sets {', '.join(lost)}: in a pipeline these attributes keep the "
                "values that they had before, because cuts lie inside the modules that set them",
                stacklevel=2,
            )

    def _keep(self, recording: Recording) -> None:
        self._recordings[recording.key] = recording
        self._warn_of_lost(recording)
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
                self._check_state(recording, parts)
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

    def _state_of(self, recording: Recording, path: str) -> str | None:
        """The state that a module changes when it is called: running statistics, or attributes such as a counter."""
        if recording.counts.get(path):
            return f"{path} changes {', '.join(recording.counts[path])} when it is called"
        changed = {name for step in recording.steps for name in step.changed_names}
        for name, module in self.model.get_submodule(path).named_modules(prefix=path):
            buffers = any(f"{name}.{buffer}" in changed for buffer in module._buffers)
            if buffers or (isinstance(module, NormBase) and module.track_running_stats):
                return f"{name} ({type(module).__name__}) keeps running statistics"
        return None

    def _check_state(self, recording: Recording, parts: Sequence[Part]) -> None:
        """The state of a module cannot be kept in two stages."""
        used: dict[str, dict[int, str]] = {}
        for stage, part in enumerate(parts):
            for step in part.steps:
                if step.module:
                    used.setdefault(str(step.target), {})[stage] = step.where
        for path, places in used.items():
            state = self._state_of(recording, path) if len(places) > 1 else None
            if state is not None:
                lines = " and ".join(f"stage {stage} ({where})" for stage, where in places.items())
                raise PlanError(
                    f"{state}, and the module is called in {lines}: each stage would have a state of its own. Put the "
                    "calls into one stage, or use a module for each"
                )

    def _check_held(self, groups: Groups, recording: Recording, parts: Sequence[Part]) -> None:
        """A kind of call that the plan was not made for uses its modules in the stages that have them."""
        for stage, part in enumerate(parts):
            held = {name for layer in groups[stage] for name in (*self.holds.modules[layer], *self.holds.of(layer))}
            for step in part.steps:
                used = [str(step.target)] if step.module else []
                used += [ref.name for ref in step.refs() if isinstance(ref, Attribute)]
                for name in used:
                    if name not in held and held.isdisjoint(parent_paths(name)) and not self._is_stateless(name):
                        raise PlanError(
                            f"{step.where}: called as {recording.text}, the model uses {name} in stage {stage}, but "
                            "the plan has it in another stage: pass ps.split(…, sample=…), the arguments of such a call"
                        )

    def _is_stateless(self, name: str) -> bool:
        """Whether any stage may call a module, because it has neither parameters nor buffers."""
        module = self.calls.modules.get(name)
        return module is not None and not any(True for _ in members(module, name))


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
        for path in unit_paths(chain.calls, self.entered | {""}):
            layer = chain.names.get(path, layer)
            module = chain.calls.modules[path]
            for holder in [layer] if next(module.parameters(), None) is not None else layers:
                self.modules[holder][path] = module
        held = {name for one in layers for name in self.of(one)}
        layer = first
        for name, tensor in members(self.model, ""):
            layer = next((chain.names[prefix] for prefix in parent_paths(name) if prefix in chain.names), layer)
            if name not in held:
                for holder in [layer] if isinstance(tensor, nn.Parameter) else layers:
                    self.own[holder][name] = None

    def of(self, layer: str) -> dict[str, Tensor]:
        """The parameters and buffers of a layer as they are now, by every name."""
        found = {name: tensor for path, module in self.modules[layer].items() for name, tensor in members(module, path)}
        own = {name: tensor_of(self.model, name) for name in self.own[layer]}
        return found | {name: tensor for name, tensor in own.items() if tensor is not None}

    def _hold_the_rest(self, layers: Sequence[str]) -> None:
        held = {layer: self.of(layer) for layer in layers}
        names = {name for tensors in held.values() for name in tensors}
        rest = {name: tensor for name, tensor in members(self.model, "") if name not in names}
        called = {path for layer in layers for path in self.modules[layer]}
        for path, module in self.model.named_modules():  # those without parameters follow train() and eval() too
            leaf = next(module.children(), None) is None and not any(True for _ in members(module, path))
            if leaf and path and path not in called and called.isdisjoint(parent_paths(path)):
                self.modules[layers[-1]][path] = module
        if not rest:
            return
        holder = {id(tensor): layer for layer in reversed(layers) for tensor in held[layer].values()}
        entered = {prefix for name in names for prefix in parent_paths(name)} | self.entered
        for name, tensor in rest.items():
            if id(tensor) in holder:  # another name of what is held already
                self.own[holder[id(tensor)]][name] = None
                continue
            own = {*parent_paths(name)}
            likeness = {at: max((len(own & {*parent_paths(n)}) for n in held[at]), default=0) for at in layers}
            layer = max(reversed(layers), key=likeness.__getitem__)
            whole = next((prefix for prefix in parent_paths(name) if prefix not in entered), None)
            if whole is not None:  # a module that no call uses is kept in one piece
                self.modules[layer][whole] = self.model.get_submodule(whole)
            else:
                self.own[layer][name] = None
