"""``LayerChain``: a model as a sequence of layers. ``Plan``: its stages, the edges and ties between them. Plain data.

    model ──front end──▶ LayerChain ──balance──▶ groups of layers ──▶ Plan, and one module per stage

A stage module takes one value per incoming edge, ordered by source stage, and returns one value per outgoing edge,
ordered by destination. The first stage takes the value that ``arguments`` builds from the model's arguments; the
last stage returns the model's output. A single value is not wrapped in a tuple:

    first stage    module(value) -> x                    one edge out
    middle stage   module(x, skip) -> (y, other)         two edges in, two edges out
    last stage     module(y, other) -> output
"""

from __future__ import annotations

import copy
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from penstock import _registry
from penstock.errors import PlanError, did_you_mean
from penstock.format import format_table
from penstock.json_schema import Maybe, check_schema, parse_json
from penstock.split.check import CheckReport, check_stages
from penstock.split.flatten import is_plain_sequential
from penstock.split.lazy import build, members, signature
from penstock.split.sample import Arguments as Arguments

FORMAT = 1
UNEVEN = 2.0  # times its even share: a stage with more parameters is mentioned

Groups = Sequence[Sequence[str]]  # the layers of each stage


@dataclass(frozen=True)
class Edge:
    """The values sent from one stage to a later one, by name where they have names."""

    src: int
    dst: int
    values: tuple[str, ...] = ()


class LayerChain(ABC):
    """The layers of a model in execution order. Each front end is a subclass."""

    model: nn.Module
    layers: tuple[str, ...]
    recipe: Mapping[str, Any]
    """JSON data from which the front end ``recipe["front"]`` rebuilds the same chain for the same model."""
    fixed: Mapping[str, Any] = MappingProxyType({})
    """Arguments that the stages always pass to the model."""
    provisional = False
    """Whether the way the model is called was guessed. A pipeline in one process splits it again if that was wrong."""
    split_again: Callable[[Any], Plan]
    """Makes the plan again from a sample, where it is provisional."""
    entered: Collection[str] = ()
    """The modules, besides the model, that no stage calls as a whole."""
    verify = False
    """Whether a pipeline compares the stages with the whole model on the first micro-batch of a new shape."""

    @cached_property
    def signature(self) -> Mapping[str, str]:
        """The model's modules, parameters and buffers, as they were before the first pipeline built its stages."""
        return signature(self.model)

    @abstractmethod
    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        """The parameters and buffers that a layer uses, under every name that they have in the model."""

    @abstractmethod
    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        """The edges between these stages. Each stage has an edge to the next one, even without values."""

    @abstractmethod
    def stage(self, groups: Groups, index: int) -> nn.Module:
        """The module of one stage: it holds the model's own modules under their own names."""

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input of the first stage for a call of the model: by default its arguments by name."""
        return bind_arguments(self.model, args, kwargs)

    def variant(self, value: Any) -> str | None:
        """The kind of call that ``value``, the input of the first stage, is of; None if stages do not distinguish any.

        It may prepare the stages, and must be called before any of them runs.
        """
        return None

    def prepare(self, groups: Groups, variant: str | None) -> None:
        """Make the stages ready for a kind of call; an error if these groups cannot run it."""
        assert variant is None

    def crossing(self, cut: int) -> float:
        """The cost of a cut before layer number ``cut``: the size or the number of the values that cross it."""
        return 1.0

    def devices(self) -> Mapping[str, str]:
        """The devices that the user gave to layers."""
        return {}


def bind_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by parameter name, without defaults.

    ``*args`` stays a tuple under its name; ``**kwargs`` is expanded.
    """
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PlanError(f"{type(model).__name__} takes {signature}: {error}") from error
    arguments = dict(bound.arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


class WholeModelChain(LayerChain):
    """A chain of one layer, the whole model, for models whose forward cannot be traced."""

    layers = ("model",)
    recipe = {"front": "whole"}  # noqa: RUF012

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def members(self, layer: str) -> Iterable[tuple[str, Tensor]]:
        return members(self.model, "")

    def edges(self, groups: Groups) -> tuple[Edge, ...]:
        if len(groups) > 1:
            raise PlanError(f"the model is one layer, which cannot be cut into {len(groups)} stages")
        return ()

    def stage(self, groups: Groups, index: int) -> nn.Module:
        return _WholeModelStage(build(self.model))

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs


class _WholeModelStage(nn.Module):
    """Calls the model, and shares its parameters, buffers and modules under the same names."""

    def __init__(self, model: nn.Module) -> None:
        training = model.training
        self.__dict__["_penstock_model"] = model
        super().__init__()
        model.training = training  # which the line above has set
        for attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[attribute] = getattr(model, attribute)

    @property
    def training(self) -> bool:
        return bool(self.__dict__["_penstock_model"].training)

    @training.setter
    def training(self, value: bool) -> None:
        self.__dict__["_penstock_model"].training = value

    def forward(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = value
        return self.__dict__["_penstock_model"](*args, **kwargs)


FRONT_ENDS: dict[str, Callable[[nn.Module, Mapping[str, Any]], LayerChain]] = {}
"""Makes the chain of a model again from the recipe of a plan, by ``recipe["front"]``. ``penstock.split`` fills it."""


@dataclass(frozen=True)
class StageSpec:
    """The layers of one stage and their size."""

    layers: tuple[str, ...]
    parameters: int
    bytes: int


@dataclass(frozen=True)
class Tie:
    """One parameter that several stages hold, with all its names."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """How a model is cut into stages. ``ranks`` and ``devices`` give the placement of each stage once it is known."""

    stages: tuple[StageSpec, ...]
    edges: tuple[Edge, ...]
    ties: tuple[Tie, ...] = ()
    devices: tuple[str, ...] | None = None
    ranks: tuple[int, ...] | None = None
    recipe: Mapping[str, Any] = field(default_factory=lambda: {"front": "sequential"}, repr=False)
    chain: LayerChain | None = field(default=None, repr=False, compare=False)

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def model(self) -> nn.Module | None:
        """The model; None for a plan that was loaded from a file without one."""
        return None if self.chain is None else self.chain.model

    @property
    def groups(self) -> list[tuple[str, ...]]:
        """The layers of each stage."""
        return [stage.layers for stage in self.stages]

    def sources(self, stage: int) -> list[int]:
        """The stages that send to ``stage``, in the order of its arguments."""
        return sorted(edge.src for edge in self.edges if edge.dst == stage)

    def targets(self, stage: int) -> list[int]:
        """The stages that ``stage`` sends to, in the order of its outputs."""
        return sorted(edge.dst for edge in self.edges if edge.src == stage)

    def require_chain(self) -> LayerChain:
        """The chain of layers; an error for a plan without a model."""
        if self.chain is None:
            raise PlanError("this plan has no model: load it with Plan.load(path, model)")
        return self.chain

    def placed(self, ranks: Sequence[int], devices: Sequence[object] | None) -> Plan:
        """This plan with the rank and device of each stage."""
        names = None if devices is None else tuple(str(device) for device in devices)
        return replace(self, ranks=tuple(ranks), devices=names)

    def stage_module(self, index: int) -> nn.Module:
        """The module of one stage. It holds the model's own modules under their own names."""
        if not 0 <= index < self.num_stages:
            raise PlanError(f"there is no stage {index}: the plan has {self.num_stages} (0..{self.num_stages - 1})")
        return self.require_chain().stage(self.groups, index)

    def stage_modules(self) -> list[nn.Module]:
        return [self.stage_module(s) for s in range(self.num_stages)]

    def check(self, sample: Any, *, rtol: float | None = None, atol: float | None = None) -> CheckReport:
        """Compare the stages with the whole model on ``sample``, the arguments of a call.

        Outputs, buffers and all gradients are compared; the first difference is an error. The model is not changed.
        """
        chain, shared, run = self.require_chain(), self.recipe.get("shared_weights") or (), partial(run_stages, self)

        def whole(*args: Any, **kwargs: Any) -> Any:
            if is_plain_sequential(chain.model):
                return chain.model(chain.arguments(args, kwargs))
            return chain.model(*args, **{**kwargs, **chain.fixed})

        return check_stages(chain.model, whole, self.stage_modules, run, sample, shared, rtol, atol)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON. The model is not part of it."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        data = {k: v for k, v in asdict(replace(self, chain=None)).items() if k != "chain"}
        return json.dumps({"penstock_plan": FORMAT, **data}, indent=2) + "\n"

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> Plan:
        """Load a plan. With ``model``, check that the plan fits it and attach it."""
        data = parse_json(Path(path).read_bytes(), f"{path} is not a saved plan, nor JSON at all")
        try:
            plan = cls._from_data(data)
        except PlanError as error:
            raise PlanError(f"{path} is not a saved plan: {error}") from error
        return plan if model is None else plan.attach(model)

    @classmethod
    def _from_data(cls, data: Any) -> Plan:
        check_schema(data, {"penstock_plan": int}, "the plan")
        if data["penstock_plan"] != FORMAT:
            raise PlanError(f"plan format {data['penstock_plan']} cannot be read here: expected {FORMAT}")
        check_schema(data, _SCHEMA, "the plan")
        placement, count = dict[str, Any](), len(data["stages"])
        for key in ("devices", "ranks"):
            placement[key] = None if data.get(key) is None else tuple(data[key])
            if data.get(key) is not None and len(data[key]) != count:
                raise PlanError(f"the plan has {count} stages, but {len(data[key])} {key}")
        if not all(edge["src"] < edge["dst"] < count for edge in data["edges"]):
            raise PlanError(
                f"each edge must go from a stage to a later one of the {count}, but they are {data['edges']}"
            )
        if not all(stage < count for tie in data["ties"] for stage in tie["stages"]):
            raise PlanError(f"each tie must be of the {count} stages, but they are {data['ties']}")
        if not count or not all(stage["layers"] for stage in data["stages"]):
            raise PlanError(f"the plan must have stages, and each of its {count} stages layers")
        return cls(
            tuple(StageSpec(tuple(s["layers"]), s["parameters"], s["bytes"]) for s in data["stages"]),
            tuple(Edge(e["src"], e["dst"], tuple(e["values"])) for e in data["edges"]),
            tuple(Tie(tuple(t["names"]), tuple(t["stages"])) for t in data["ties"]),
            recipe=data["recipe"],
            **placement,
        )

    def attach(self, model: nn.Module) -> Plan:
        """This plan with ``model``, which must have the same layers, parameter counts, edges and ties."""
        if not isinstance(model, nn.Module):
            raise PlanError(f"a plan is attached to an nn.Module, got {type(model).__name__}")
        front = self.recipe.get("front")
        if front not in FRONT_ENDS:
            raise PlanError(f"the plan was made by a front end {front!r} that is not known here")
        chain = FRONT_ENDS[front](model, self.recipe)
        planned = [layer for layers in self.groups for layer in layers]
        if sorted(planned) != sorted(chain.layers):
            raise PlanError(
                f"the plan is for {len(planned)} layers ({_shorten(planned)}), but the model has {len(chain.layers)} "
                f"({_shorten(chain.layers)}): this is a plan of another model"
            )
        fresh = build_plan(chain, self.groups, self.recipe.get("shared_weights") or ())
        for what, ours, theirs in [
            *((f"stage {i}", *pair) for i, pair in enumerate(zip(self.stages, fresh.stages, strict=True))),
            ("edges", *(sorted((edge.src, edge.dst) for edge in plan.edges) for plan in (self, fresh))),
            ("ties", *(sorted(" = ".join(tie.names) for tie in plan.ties) for plan in (self, fresh))),
        ]:
            if ours != theirs:
                raise PlanError(
                    f"the plan was made of another model, or its forward has changed: {what} of the plan: {ours}, of "
                    f"the model: {theirs}. Split it again"
                )
        return replace(self, chain=chain)

    def __reduce__(self) -> tuple[Any, ...]:
        # The chain is rebuilt from its recipe: it refers to code objects and locks, which cannot be pickled.
        return _restore, (self.to_json(), self.model)

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return _restore(self.to_json(), copy.deepcopy(self.model, memo))

    def __str__(self) -> str:
        """A table with one row per stage."""
        where = ["-"] * self.num_stages
        if self.ranks is not None:
            devices = self.devices or [""] * self.num_stages
            where = [f"{rank} {device}".strip() for rank, device in zip(self.ranks, devices, strict=True)]
        rows = []
        for index, stage in enumerate(self.stages):
            to = " ".join(str(edge.dst) for edge in self.edges if edge.src == index) or "-"
            parameters, size = f"{stage.parameters:,}", f"{stage.bytes:,}"
            rows.append((str(index), where[index], _shorten(stage.layers), parameters, size, to))
        lines = format_table(["stage", "rank", "layers", "parameters", "bytes", "sends to"], rows, right={0, 3, 4})
        lines += [f"tie: {' = '.join(tie.names)} (stages {', '.join(map(str, tie.stages))})" for tie in self.ties]
        sizes = [stage.parameters for stage in self.stages]
        if max(sizes) * self.num_stages > UNEVEN * sum(sizes) > 0:
            heaviest = sizes.index(max(sizes))
            lines.append(
                f"uneven: stage {heaviest} has {max(sizes) / sum(sizes):.0%} of the parameters; fewer stages, or cuts "
                "inside of its largest layer (cuts=…, or marks), would balance better"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return str(_registry.viz().plan_html(self))


_SCHEMA = {
    "stages": [{"layers": [str], "parameters": int, "bytes": int}],
    "edges": [{"src": int, "dst": int, "values": [str]}],
    "ties": [{"names": [str], "stages": [int]}],
    "devices": Maybe([str]),
    "ranks": Maybe([int]),
    "recipe": {"front": Maybe(str), "shared_weights": Maybe([[str]])},  # the front end knows its own entries
}


def _restore(text: str, model: nn.Module | None) -> Plan:
    plan = Plan._from_data(json.loads(text))
    return plan if model is None else plan.attach(model)


def _shorten(layers: Sequence[str]) -> str:
    text = " ".join(layers)
    return text if len(text) <= 40 else f"{layers[0]} … {layers[-1]} ({len(layers)} layers)"


def run_stages(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], modules: Sequence[Callable[..., Any]] | None = None
) -> Any:
    """Run the stages one after the other in this thread, on ``modules`` or new stage modules; the model's output."""
    chain = plan.require_chain()
    modules = modules or plan.stage_modules()
    edge_values: dict[tuple[int, int], Any] = {}
    output: Any = None
    for s, module in enumerate(modules):
        inputs = [edge_values.pop((src, s)) for src in plan.sources(s)]
        output = module(*(inputs or [chain.arguments(args, kwargs)]))
        targets = plan.targets(s)
        values = output if len(targets) > 1 else [output]
        edge_values.update(((s, dst), value) for dst, value in zip(targets, values, strict=False))
    return output


SharedWeights = Sequence[Sequence[str]]  # names of parameters to be tied: [("embed.weight", "head.weight")]


def find_ties(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> tuple[Tie, ...]:
    """One tie per parameter that is used by several stages, or that ``shared`` gives several names."""
    stages: dict[str, set[int]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for stage, layers in enumerate(groups):
        for layer in layers:
            for name, tensor in chain.members(layer):
                if isinstance(tensor, nn.Parameter):
                    parameters[name] = tensor
                    stages.setdefault(name, set()).add(stage)
    identity = {name: id(parameter) for name, parameter in parameters.items()}
    declared: set[int] = set()
    for names in shared:
        if isinstance(names, str) or len(names) < 2:
            raise PlanError(f"shared_weights takes pairs of names, such as ('a.weight', 'b.weight'), got {names!r}")
        for name in names:
            if name not in parameters:
                hint = did_you_mean(name, parameters)
                raise PlanError(f"shared_weights names {name!r}, which is not a parameter of the model{hint}")
            kinds = [(tuple(parameters[n].shape), parameters[n].dtype) for n in (names[0], name)]
            if kinds[0] != kinds[1]:
                raise PlanError(f"shared_weights: {names[0]} is {kinds[0]}, {name} is {kinds[1]}: they cannot be one")
        merged = {identity[name] for name in names}
        first = identity[names[0]]
        declared.add(first)
        identity = {name: first if key in merged else key for name, key in identity.items()}
    names_of: dict[int, list[str]] = {}
    for name, key in identity.items():
        names_of.setdefault(key, []).append(name)
    ties = []
    for key, own_names in names_of.items():
        used_by = tuple(sorted(set().union(*(stages[name] for name in own_names))))
        if len(used_by) > 1 or (key in declared and len(own_names) > 1):
            ties.append(Tie(tuple(own_names), used_by))
    return tuple(ties)


def build_plan(chain: LayerChain, groups: Groups, shared: SharedWeights = ()) -> Plan:
    """The plan whose stage ``i`` has the layers ``groups[i]``, with the ties that ``shared`` declares."""
    specs = []
    for layers in groups:
        tensors = {id(tensor): tensor for layer in layers for _, tensor in chain.members(layer)}.values()
        parameters = sum(tensor.numel() for tensor in tensors if isinstance(tensor, nn.Parameter))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        specs.append(StageSpec(tuple(layers), parameters, size))
    device_of = chain.devices()
    devices = [next((device_of[layer] for layer in layers if layer in device_of), None) for layers in groups]
    known = tuple(device for device in devices if device is not None)
    return Plan(
        tuple(specs),
        chain.edges(groups),
        find_ties(chain, groups, shared),
        devices=known if len(known) == len(groups) else None,
        recipe={**chain.recipe, **({"shared_weights": [list(names) for names in shared]} if shared else {})},
        chain=chain,
    )
