"""Where a recorded model may be cut: before modules, between the blocks of a list, or at marks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError, did_you_mean
from penstock.split.lazy import members
from penstock.split.marks import Block, cut_points
from penstock.split.trace.call import describe, dump, forward_arguments
from penstock.split.trace.errors import CannotTrace, cannot_trace, mentions_marks
from penstock.split.trace.python_state import PythonState
from penstock.split.trace.recorder import Recorder, can_enter, user_hooks
from penstock.split.trace.recording import Recording, context_now, parent_paths
from penstock.split.trace.values import Enter, KeepWhole

START = "start"  # the layer before the first mark, where no module gives it a name


class Calls:
    """Makes the recordings of a model: which modules are entered, and which stay whole because they must."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = inspect.signature(model.forward).parameters
        self.whole: set[str] = set()  # they cannot be entered
        self.reasons: dict[str, KeepWhole] = {}
        self.read = PythonState()  # by the recordings so far
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
            "read": self.read.digest(),
            "grad": torch.is_grad_enabled(),
            "autocast": casts,
        }

    def forward_arguments(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return forward_arguments({**arguments, **self.fixed}, self.parameters)

    def weights(self) -> str:
        """The dtype and the type of device of the model."""
        parameter = next(self.model.parameters(), None)
        return "" if parameter is None else f"{parameter.dtype} {parameter.device.type}"


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
        modules = self.calls.modules
        units = [p for p in unit_paths(self.calls, self.entered) if next(modules[p].parameters(), None) is not None]
        return {path: path for path in units} or {START: START}

    def starts(self) -> Any:
        """A function from the path of a module that is called to the layer that begins with the call."""
        counts: dict[str, int] = {}
        modules, targets = self.calls.modules, self.targets
        divided = {path for path in self.entered - self.calls.whole if next(modules[path].children(), None) is not None}

        def of_module(path: str) -> str | None:
            if path not in targets if targets else path in divided:
                return None
            counts[path] = counts.get(path, 0) + 1
            return path if counts[path] == 1 else f"{path}#{counts[path]}"

        return targets.get if self.how == "cuts" else of_module

    def record(self, data: Mapping[str, Any], tensors: Sequence[Tensor] | None = None) -> Recording:
        """Record a kind of call. Modules that cannot be entered stay whole, unless cuts lie inside."""
        calls, modules = self.calls, dict(self.calls.model.named_modules())  # Lazy layers may have been built since
        with _settings(calls.modules, data):
            while True:
                recorder = Recorder(
                    modules, dump(data), data["call"], entered=self.entered, whole=calls.whole - self.required,
                    starts=None if self.how == "marks" else self.starts(), lead=self.lead, tensors=tensors,
                    answers=data.get("answers"), parameters=calls.parameters, signatures=calls.signatures,
                    read=calls.read,
                )  # fmt: skip
                try:
                    found = recorder.record()
                except KeepWhole as again:
                    self._keep_whole(again, recorder)
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

    def _keep_whole(self, again: KeepWhole, recorder: Recorder) -> None:
        calls, error = self.calls, again.error
        if again.path in self.required or again.path in calls.whole:
            if isinstance(error, PlanError) or not isinstance(error, Exception):
                raise error from None
            failure = cannot_trace(calls.modules[again.path], error, recorder.result.text, again.path, again.place)
            failure.marked = bool(again.path) or recorder.has_marks
            raise failure from error
        kind = type(calls.modules[again.path])
        alike = {p for p in self.entered if type(calls.modules[p]) is kind and p not in self.required}
        calls.whole |= alike
        calls.reasons.update(dict.fromkeys(alike, again))


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
    policy.entered |= policy.required
    policy.recipe = {"how": "cuts", "cuts": cuts}
    return policy


def _parents(paths: Iterable[str], modules: Mapping[str, nn.Module]) -> set[str]:
    """The modules that lead to these and that can be called."""
    found = {parent for path in paths for parent in parent_paths(path)}
    return {path for path in found if path in modules and type(modules[path]) not in (nn.ModuleList, nn.ModuleDict)}


def policy_for_blocks(calls: Calls, blocks: Sequence[str], name: str) -> CutPolicy:
    """Cut between the blocks of a list."""
    policy = CutPolicy(calls, "blocks")
    policy.targets = {path: path for path in blocks}
    policy.required |= _parents(policy.targets, calls.modules)
    policy.entered |= policy.required
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
    calls.read = PythonState()  # modules that were entered to look for marks alone are not, later
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
    policy.entered |= set(expanded)
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
        heavy = heavy_modules(calls, policy, recording.order, stages)
        if not heavy:
            policy.recipe = {"how": "modules", "expanded": sorted(policy.entered - calls.whole)}
            return policy, recording
        policy.entered |= heavy
        recording = policy.record(data, tensors)


def heavy_modules(calls: Calls, policy: CutPolicy, order: Sequence[str], stages: int) -> set[str]:
    """The modules to enter next, by their parameters, which stages are balanced by."""
    weights: dict[str, int] = {}
    for layer in order:
        path = layer.partition("#")[0]
        if path == START:
            continue
        tensors = (tensor for _, tensor in members(calls.modules[path], path) if isinstance(tensor, nn.Parameter))
        weights[path] = 1 + sum({id(tensor): tensor.numel() for tensor in tensors}.values())
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


def unit_paths(calls: Calls, entered: set[str]) -> list[str]:
    """The outermost modules that are not entered, in the order in which they are registered."""
    found: list[str] = []
    lists = (nn.ModuleList, nn.ModuleDict)
    for path, module in calls.modules.items():
        inside = any(path.startswith(f"{unit}.") for unit in found[-1:])
        if path not in entered and not inside and not isinstance(module, lists):
            found.append(path)
    return found


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
