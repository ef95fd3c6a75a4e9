"""``Options``: the settings of PopTorch models and loaders. Chainable; frozen once they are used.

A setting is a method that takes the value and returns the group; the value is an attribute under its own name:
``options.Training.gradientAccumulation(4)``, ``options.Training.gradient_accumulation``.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

from penstock.compat.poptorch.base import Error, FrozenOptions, OutputMode, ReductionType, positive, require
from penstock.compat.poptorch.blocks import PipelinedExecution, Strategy

__all__ = ["Options", "TensorLocationSettings"]

_warned: set[str] = set()


class TensorLocationSettings:
    """Where tensors are stored: ``TensorLocationSettings().useOnChipStorage(False)`` means in host memory.

    PopTorch's other settings (``minElementsForOffChip``, ``useReplicatedTensorSharding``, …) have no effect.
    """

    def __init__(self) -> None:
        self._content: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., TensorLocationSettings]:
        if not name.startswith(("use", "minElements")):
            raise AttributeError(f"poptorch.TensorLocationSettings has no {name}")
        return partial(self._set, "onChip" if name == "useOnChipStorage" else name)

    def _set(self, name: str, value: int = True) -> TensorLocationSettings:
        self._content[name] = int(value)
        return self

    def __repr__(self) -> str:
        return repr(self._content)


def _location(name: str, location: Any) -> TensorLocationSettings:
    valid = isinstance(location, TensorLocationSettings)
    require(valid, f"a location is a poptorch.TensorLocationSettings, got {type(location).__name__}")
    if name == "setAccumulatorLocation" and location._content.get("onChip") == 0:
        raise Error("gradients cannot be stored in host memory: leave out setAccumulatorLocation")
    return location  # type: ignore[no-any-return]


def _reduction_type(name: str, value: Any) -> ReductionType:
    kinds = (ReductionType.Mean, ReductionType.Sum)
    require(value in kinds, f"the reduction type must be Mean or Sum, not {value!r}")
    return ReductionType(value)


def _strategy(name: str, value: Any) -> Any:
    require(isinstance(value, Strategy), f"a strategy is a poptorch.PipelinedExecution, not {value!r}")
    return value


def _seed(name: str, value: Any) -> Any:
    require(isinstance(value, int), f"a seed is a whole number, got {value!r}")
    return value


_UNSET = object()


class Settings(NamedTuple):
    """The settings of a group: those with an effect, those without, and unsupported ones with a remedy."""

    values: dict[str, tuple[str, Any, Callable[..., Any]]] = {}  # noqa: RUF012  # name, default and check of the value
    ignored: str = ""
    refused: dict[str, str] = {}  # noqa: RUF012


_reduction = "accumulation_and_replication_reduction_type"

SETTINGS = {
    "Options": Settings(
        {
            "deviceIterations": ("device_iterations", 1, positive),
            "replicationFactor": ("replication_factor", 1, positive),
            "setExecutionStrategy": ("execution_strategy", _UNSET, _strategy),
            "randomSeed": ("random_seed", None, _seed),
            "enableProfiling": ("profile_dir", None, lambda name, directory=".": str(directory)),
        },
        "autoRoundNumIPUs availableMemoryProportion setAvailableMemoryProportion broadcastBuffers connectionType "
        "disableModuleNamescope enableExecutableCaching enableStableNorm logCycleCount logDir maxRepeatLogs modelName "
        "relaxOptimizerAttributesChecks showCompilationProgressBar sourceLocationExcludes appendToLocationExcludes "
        "syncPattern updatableNamedBuffers useIpuId useIpuModel",
        {
            "anchorTensor": "return the value from the forward, or register a hook",
            "enableSyntheticData": "a call takes the data that it is given",
            "inputReplicaGrouping": "replicas have their own samples, and the same weights",
            "useOfflineIpuTarget": "there is nothing to compile for an IPU",
        },
    ),
    "Training": Settings(
        {
            "gradientAccumulation": ("gradient_accumulation", 1, positive),
            "accumulationAndReplicationReductionType": (_reduction, ReductionType.Mean, _reduction_type),
            "setAutomaticLossScaling": ("automatic_loss_scaling", False, lambda name, enabled: bool(enabled)),
        },
        "setMeanAccumulationAndReplicationReductionStrategy setConvolutionDithering",
    ),
    "TensorLocation": Settings(
        {
            f"set{kind}Location": (f"location_{kind.lower()}", _UNSET, _location)
            for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
        },
        "numIOTiles",
    ),
    "Precision": Settings(  # torch's own rules apply; model.half() and autocast work
        {},
        "autocastEnabled halfFloatCasting runningStatisticsAlwaysFloat runningVarianceAlwaysFloat "
        "enableStochasticRounding setPartialsType",
        {"enableFloatingPointExceptions": "use torch.autograd.set_detect_anomaly(True)"},
    ),
    "Jit": Settings(ignored="traceModel"),
    "Distributed": Settings(  # a PopTorch program is one process here
        {},
        "IPUoFConfigFiles setEnvVarNames disable",
        {"configureProcessId": "replicas in several processes are penstock.Mesh(data=…), see docs/migrating.md"},
    ),
    "Popart": Settings(ignored="setPatterns"),
}


class Group:
    """Settings that can be changed until they are frozen."""

    def __init__(self, title: str) -> None:
        known = SETTINGS[title].values.values()
        values = {name: default for name, default, _ in known if default is not _UNSET}
        self.__dict__.update(_title=title, _values=values, _is_frozen=False)

    def _set(self, **values: Any) -> Self:
        if self._is_frozen:
            raise FrozenOptions("Can't modify frozen Options: change a copy of them, options.clone()")
        self._values.update(values)
        return self

    def _apply(self, name: str, *args: Any, **kwargs: Any) -> Self:
        value, _, check = SETTINGS[self._title].values[name]
        return self._set(**{value: check(name, *args, *kwargs.values())})

    def _ignore(self, name: str, *args: Any, **kwargs: Any) -> Self:
        values, refused = [*args, *kwargs.values()], SETTINGS[self._title].refused
        full = f"{self._title}.{name}".removeprefix("Options.")
        if name in refused and values not in ([False], [None], [0, 1]):  # switched off, or one process
            raise Error(f"poptorch.Options: {full} is not supported: {refused[name]}")
        if name not in refused and full not in _warned:
            _warned.add(full)
            warnings.warn(f"poptorch.Options: {full} has no effect here", stacklevel=2)
        return self._set(**{name: values[0] if len(values) == 1 else tuple(values) or True})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = SETTINGS[self._title]
        if name in known.values:
            return partial(self._apply, name)
        if name in known.refused or name in known.ignored.split():
            return partial(self._ignore, name)
        if name not in self._values:
            raise AttributeError(f"poptorch.Options has no {self._title}.{name}, or it has no meaning here")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._set()  # an error if they are frozen
        raise AttributeError(f"values are set by methods: {self._title}.…(…)")

    def _groups(self) -> dict[str, Group]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, Group)}

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True
        for group in self._groups().values():
            group._freeze()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_frozen": False}  # a copy can be changed

    def toDict(self) -> dict[str, Any]:
        """All values by name, those of groups in dicts of their own."""
        return {**self._values, **{name: group.toDict() for name, group in self._groups().items()}}

    def __repr__(self) -> str:
        name = "Options" if self._title == "Options" else f"_{self._title}Options"
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in {**self._values, **self._groups()}.items())})"


class Popart(Group):
    """``options._Popart``: of PopART's settings, ``autoRecomputation`` has an effect here."""

    def set(self, key: str, value: Any) -> Self:
        """``autoRecomputation``: 0 keeps all activations (the default here), any other number recomputes them."""
        if key != "autoRecomputation":
            warnings.warn(f"_Popart.set({key!r}, …) has no effect here", stacklevel=2)
        return self._set(**{key: value})


class Options(Group):
    """The options of a model or a loader. Options that are in use cannot be changed: ``clone()`` them.

    - ``deviceIterations(n)``: the number of updates (in inference: micro-batches) per call;
    - ``replicationFactor(n)``: replicas. They take turns on the devices; results are those of replicas;
    - ``outputMode(mode, output_return_period)``: the outputs that a call returns;
    - ``setExecutionStrategy(strategy)``: ``PipelinedExecution`` (by default with stages by the blocks' IPUs) or
      ``ShardedExecution``;
    - ``randomSeed(seed)``: random numbers depend on the seed, the call, the micro-batch and the layer only;
    - ``enableProfiling(directory)``: write a Chrome trace of each model's first call, ``training.json`` or
      ``inference.json``;
    - ``Training.gradientAccumulation(n)``: the number of micro-batches per update. Their gradients are averaged, or
      summed by ``Training.accumulationAndReplicationReductionType``;
    - ``Training.setAutomaticLossScaling(enabled)``: scale the loss by ``penstock.GradScaler``;
    - ``TensorLocations.setActivationLocation(location)`` and others: keep tensors in host memory.
    """

    def __init__(self) -> None:
        super().__init__("Options")
        self._set(execution_strategy=PipelinedExecution(), output_mode=OutputMode.Default, output_return_period=1)
        groups = {name: Group(name) for name in ("Training", "Precision", "Jit", "Distributed")}
        groups["Distributed"]._set(processId=0, numProcesses=1)
        self.__dict__.update(groups, TensorLocations=Group("TensorLocation"), _Popart=Popart("Popart"))

    def _off_chip(self, kind: str) -> bool:
        location = self.TensorLocations._values.get(f"location_{kind}")
        return location is not None and location._content.get("onChip") == 0

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """The outputs that a call returns; ``EveryN`` returns every ``output_return_period``-th."""
        require(output_mode in list(OutputMode), f"an output mode is a poptorch.OutputMode, not {output_mode!r}")
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        valid = isinstance(period, int) and period > 0
        require(valid, "EveryN output_mode must have output_return_period set to valid positive integer")
        return self._set(output_mode=OutputMode(output_mode), output_return_period=period)

    def clone(self) -> Self:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def loadFromFile(self, filepath: str) -> Self:
        """Read settings, one per line, written as in a program without ``options.``: ``deviceIterations(4)``."""
        names = {"__builtins__": {}, "options": self, "poptorch": sys.modules[__package__]}
        for number, line in enumerate(Path(filepath).read_text("utf-8").splitlines(), 1):
            text = line.partition("#")[0].strip()
            if text:
                try:
                    eval(f"options.{text}", names)
                except Exception as error:
                    raise Error(f"{filepath}, line {number}: {text!r} cannot be set: {error}") from error
        return self

    def from_json(self, string: str) -> Self:
        """Read settings from JSON: ``{"deviceIterations": 4, "Training.gradientAccumulation": 8}``."""
        for path, value in json.loads(string).items():
            try:
                attrgetter(path)(self)(*(value if isinstance(value, list) else [value]))
            except (AttributeError, TypeError) as error:
                raise Error(f"poptorch.Options.from_json: there is no setting {path!r}") from error
        return self
