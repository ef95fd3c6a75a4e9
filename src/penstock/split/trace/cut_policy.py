"""The three ways to say where a traced model may be cut: marks in its forward, names of modules, every module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.errors import PlanError, did_you_mean
from penstock.split.marks import Block, cut_points
from penstock.split.trace.call import Call, candidates
from penstock.split.trace.errors import CannotTrace
from penstock.split.trace.marks import Recording
from penstock.split.trace.tracer import SegmentTracer, has_hooks

START = "start"
"""The layer before the first mark, where no module gives it a name."""

FlagsOf = Callable[[str], bool]


@contextmanager
def switched(model: nn.Module, modes: Mapping[str, bool]) -> Iterator[None]:
    """The model with modules of these paths in train or eval mode, for the time of a trace."""
    before = {path: model.get_submodule(path).training for path in modes}
    changed = [path for path in modes if modes[path] != before[path]]
    try:
        for path in changed:
            model.get_submodule(path).training = modes[path]
        yield
    finally:
        for path in changed:
            model.get_submodule(path).training = before[path]


class CutPolicy(ABC):
    """Where a model may be cut, with the recordings of the kinds of call that its signature suggests."""

    def __init__(self, model: nn.Module, sample: str | None) -> None:
        self.model = model
        self.sample = sample
        """The kind of call that the user says is the usual one."""
        self.expanded: set[str] = {""}
        self.first: dict[tuple[str, FlagsOf], Recording] = {}
        self.names: dict[str, str] = {}
        """The layers, by the marks that begin them."""
        self.usual = sample or candidates(model)[:2][-1]

    @abstractmethod
    def tracer(self) -> SegmentTracer: ...

    @abstractmethod
    def recipe(self) -> dict[str, Any]: ...

    @property
    def main(self) -> Recording:
        """The recording that names the layers."""
        return next(iter(self.first.values()))

    def record(self, call: Call, modes: Mapping[str, bool], touched: Iterable[str] | None = None) -> Recording:
        """One more kind of call, with modules in these modes."""
        with switched(self.model, modes):
            recording = self.tracer().record(call, touched)
        self._place(recording)
        return recording

    def record_first(self) -> None:
        """Record what the signature suggests. Kinds of call that cannot be traced are left out, as long as one can."""
        self.first = {}
        errors: list[CannotTrace] = []
        for key in candidates(self.model, self.sample):
            for modes in self._modes():
                try:
                    recording = self.record(Call(self.model, key), modes)
                except CannotTrace as error:
                    if key == self.sample:
                        raise
                    errors.append(error)
                else:
                    self.first[key, modes.__getitem__] = recording
        if not self.first:
            raise errors[0]
        # The recording that meets most marks names the layers.
        most = max(self.first, key=lambda at: len(self.first[at].order))
        self.first = {most: self.first[most]} | self.first
        self.names = self._names()
        for recording in self.first.values():
            self._place(recording)

    def _modes(self) -> list[dict[str, bool]]:
        """The model as it is, all of it in train mode, and all of it in eval mode."""
        now = {path: module.training for path, module in self.model.named_modules()}
        both = [dict.fromkeys(now, mode) for mode in (True, False)]
        return [now, *(modes for modes in both if modes != now)]

    def layers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.names.values()))

    def _place(self, recording: Recording) -> None:
        """Say which layers a recording's marks begin. A cut that no planned call met is as if it were not there."""
        here = next(iter(self.names.values()), START)
        if recording.kind == "blocks":
            recording.placed = {mark: self.names[mark] for mark in recording.order if mark in self.names}
            recording.placed[None] = next(iter(recording.placed.values()), here)
            return
        recording.placed = {None: here}
        for mark in recording.order:
            here = self.names.get(mark, here)
            recording.placed[mark] = here

    def _marks(self) -> dict[str, list[str]]:
        """All marks in the order in which they are met, each with the modules that are called after it."""
        marks: dict[str, list[str]] = {}
        for recording in self.first.values():
            calls: dict[str, list[str]] = {mark: [] for mark in [START, *recording.order]}
            for node in recording.graph.nodes:
                if node.op == "call_module":
                    calls[node.meta["layer"] or START].append(str(node.target))
            before: list[str] = []
            for mark, inside in calls.items():
                if mark not in marks:  # it comes after those that it followed here
                    items = list(marks.items())
                    at = max((i + 1 for i, (other, _) in enumerate(items) if other in before), default=0)
                    marks = dict([*items[:at], (mark, inside), *items[at:]])
                before.append(mark)
        return marks

    def _names(self) -> dict[str, str]:
        """What the layers are called: after the modules in them, or else after their marks."""
        names: dict[str, str] = {}
        for index, (mark, inside) in enumerate(self._marks().items()):
            plain = f"cut {index}" if mark.startswith("cut at ") else mark
            name = plain if not inside else inside[0] if len(set(inside)) == 1 else f"{inside[0]}…{inside[-1]}"
            taken = sum(other.partition("#")[0] == name for other in names.values())
            names[mark] = f"{name}#{taken + 1}" if taken else name
        return names

    def devices(self) -> dict[str, str]:
        return {}


class Marks(CutPolicy):
    """At the cut points and blocks of the forward."""

    lead: Block | None = None
    """The block of what runs before any other, where it is one."""

    @classmethod
    def found(cls, model: nn.Module, sample: str | None = None, lead: Block | None = None) -> Marks | None:
        """The marks of a model; None where there are none."""
        how = cls(model, sample)
        how.lead = lead
        surveys: list[Recording] = []
        errors: list[CannotTrace] = []
        for key in candidates(model, sample):
            for modes in how._modes():
                try:
                    with switched(model, modes):
                        surveys.append(SegmentTracer(model, None, lead=lead).record(Call(model, key)))
                except CannotTrace as error:
                    if key == sample:
                        raise
                    errors.append(error)
        if not surveys:
            raise errors[0]
        points = cut_points(model)
        how._check_reached(points, surveys)
        if not any(survey.order for survey in surveys):
            return None
        how.expanded = set().union(*(survey.expanded for survey in surveys))
        how.record_first()
        return how

    def _check_reached(self, points: Mapping[int, str], surveys: Sequence[Recording]) -> None:
        reached = set().union(*(survey.used for survey in surveys))
        missed = [name for point, name in points.items() if point not in reached]
        if missed:
            raise PlanError(
                f"the forward of {type(self.model).__name__} never reaches the CutPoint(s) {', '.join(missed)}: call "
                "each on an activation, or take them out"
            )

    def tracer(self) -> SegmentTracer:
        return SegmentTracer(self.model, self.expanded, lead=self.lead)

    def recipe(self) -> dict[str, Any]:
        lead = {} if self.lead is None else {"lead": [self.lead.name, self.lead.device]}
        return {"how": "marks", "called": self.sample, **lead}

    def _names(self) -> dict[str, str]:
        if self.main.kind == "blocks":
            return {mark: mark for mark in self._marks() if mark != START}
        return super()._names()

    def devices(self) -> dict[str, str]:
        return {block: device for recording in self.first.values() for block, device in recording.devices.items()}


class Cuts(CutPolicy):
    """Before the calls of named modules."""

    def __init__(self, model: nn.Module, cuts: Sequence[str], sample: str | None = None) -> None:
        super().__init__(model, sample)
        if isinstance(cuts, str) or not isinstance(cuts, Iterable) or not all(isinstance(cut, str) for cut in cuts):
            raise PlanError(f"cuts is a list of names of modules, got {cuts!r}")
        self.cuts = list(cuts)
        modules = dict(model.named_modules(remove_duplicate=False))
        canonical = {id(module): path for path, module in model.named_modules()}
        self.targets: dict[str, str] = {}
        for name in self.cuts:
            if name not in modules or not name:
                hint = did_you_mean(name, filter(None, modules))
                raise PlanError(f"{type(model).__name__} has no module {name!r} to cut before{hint}")
            path = canonical[id(modules[name])]
            if path in self.targets:
                raise PlanError(f"cuts names the module {name!r} twice: {self.cuts}")
            self.targets[path] = name
            parts = path.split(".")
            self.expanded |= {".".join(parts[:i]) for i in range(1, len(parts))}
        if not self.targets:
            raise PlanError("cuts is empty: name the modules before which to cut")
        self.expanded = {p for p in self.expanded if not p or type(modules[p]) not in (nn.ModuleList, nn.ModuleDict)}
        self.record_first()
        self._check_called()

    def _check_called(self) -> None:
        kind = type(self.model).__name__
        for path, name in self.targets.items():
            counts = {recording.order.count(path) for recording in self.first.values()}
            if counts == {0}:
                raise PlanError(f"the forward of {kind} never calls {name}: it cannot be cut before it")
            if max(counts) > 1:
                raise PlanError(f"the forward calls {name} {max(counts)} times: a cut lies before one call")
        begun = {node.meta["layer"] for node in self.main.graph.nodes if node.op.startswith("call")}
        if None not in begun:
            raise PlanError(f"nothing runs before {self.main.order[0]}: a cut there would leave an empty stage")
        for mark, following in zip(self.main.order, self.main.order[1:], strict=False):
            if mark not in begun:
                raise PlanError(f"nothing runs between {mark} and {following}: name one of them, not both")

    def tracer(self) -> SegmentTracer:
        return SegmentTracer(self.model, self.expanded, lambda path: path if path in self.targets else None)

    def recipe(self) -> dict[str, Any]:
        return {"how": "cuts", "called": self.sample, "cuts": self.cuts}


class Modules(CutPolicy):
    """Before every module that is not traced through: the automatic way."""

    def __init__(self, model: nn.Module, expanded: Iterable[str], sample: str | None = None) -> None:
        super().__init__(model, sample)
        modules = dict(model.named_modules())
        self.expanded |= set(expanded)
        unknown = self.expanded - set(modules)
        if unknown:
            raise PlanError(f"{type(model).__name__} has no module {min(unknown)!r}: this is a plan of another model")
        for path, module in modules.items():
            plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
            if plain and "forward" not in vars(module) and not has_hooks(module) and len(module):
                self.expanded.add(path)
        self.record_first()

    def tracer(self) -> SegmentTracer:
        counts: dict[str, int] = {}

        def starts(path: str) -> str | None:
            if path in self.expanded:
                return None
            counts[path] = counts.get(path, 0) + 1
            return path if counts[path] == 1 else f"{path}#{counts[path]}"

        return SegmentTracer(self.model, self.expanded, starts)

    def recipe(self) -> dict[str, Any]:
        return {"how": "modules", "called": self.sample, "expanded": sorted(self.expanded)}

    def _names(self) -> dict[str, str]:
        marks = [mark for mark in self._marks() if mark != START]
        return {mark: mark for mark in marks or [START]}
