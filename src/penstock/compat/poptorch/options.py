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
from typing import Any, Self

from penstock.compat.poptorch.blocks import PipelinedExecution, Strategy
from penstock.compat.poptorch.enums import Error, OutputMode, ReductionType, UnavailableAttribute, positive, require

__all__ = ["Options", "TensorLocationSettings"]

_warned: set[str] = set()


class TensorLocationSettings(dict[str, int]):
    """Where tensors are stored: ``TensorLocationSettings().useOnChipStorage(False)`` means in host memory.

    PopTorch's other settings (``minElementsForOffChip``, ``useReplicatedTensorSharding``, …) have no effect.
    """

    def __getattr__(self, name: str) -> Callable[..., TensorLocationSettings]:
        if not name.startswith(("use", "minElements")):
            raise AttributeError(f"poptorch.TensorLocationSettings has no {name}")
        return partial(self._set, "onChip" if name == "useOnChipStorage" else name)

    def _set(self, name: str, value: int = True) -> TensorLocationSettings:
        self[name] = int(value)
        return self


def _location(name: str, location: Any) -> TensorLocationSettings:
    valid = isinstance(location, TensorLocationSettings)
    require(valid, f"a location is a poptorch.TensorLocationSettings, got {type(location).__name__}")
    if name.endswith("setAccumulatorLocation") and location.get("onChip") == 0:
        raise Error("gradients cannot be stored in host memory: leave out setAccumulatorLocation")
    return location  # type: ignore[no-any-return]


def _checked(valid: Callable[[Any], bool], wanted: str) -> Callable[[str, Any], Any]:
    def check(name: str, value: Any) -> Any:
        require(valid(value), f"{wanted}, got {value!r}")
        return value

    return check


_UNSET = object()
_reduction = "accumulation_and_replication_reduction_type"
_seed = _checked(lambda value: isinstance(value, int), "a seed is a whole number")
_strategy = _checked(lambda value: isinstance(value, Strategy), "a strategy is a poptorch.PipelinedExecution")
_mean_or_sum = _checked((ReductionType.Mean, ReductionType.Sum).__contains__, "the reduction type must be Mean or Sum")

# Settings with an effect: the name, default and check of the value.
VALUES: dict[str, tuple[str, Any, Callable[..., Any]]] = {
    "deviceIterations": ("device_iterations", 1, positive),
    "replicationFactor": ("replication_factor", 1, positive),
    "setExecutionStrategy": ("execution_strategy", _UNSET, _strategy),
    "randomSeed": ("random_seed", None, _seed),
    "enableProfiling": ("profile_dir", None, lambda name, directory=".": str(directory)),
    "Training.gradientAccumulation": ("gradient_accumulation", 1, positive),
    "Training.accumulationAndReplicationReductionType": (_reduction, ReductionType.Mean, _mean_or_sum),
    "Training.setAutomaticLossScaling": ("automatic_loss_scaling", False, lambda name, enabled: bool(enabled)),
    "TensorLocation.setActivationLocation": ("location_activation", _UNSET, _location),
    "TensorLocation.setWeightLocation": ("location_weight", _UNSET, _location),
    "TensorLocation.setOptimizerLocation": ("location_optimizer", _UNSET, _location),
    "TensorLocation.setAccumulatorLocation": ("location_accumulator", _UNSET, _location),
}

# Settings without an effect. Torch's own precision rules apply: model.half() and autocast work.
IGNORED = (
    "autoRoundNumIPUs availableMemoryProportion setAvailableMemoryProportion broadcastBuffers connectionType "
    "disableModuleNamescope enableExecutableCaching enableStableNorm logCycleCount logDir maxRepeatLogs modelName "
    "relaxOptimizerAttributesChecks showCompilationProgressBar sourceLocationExcludes appendToLocationExcludes "
    "syncPattern updatableNamedBuffers useIpuId useIpuModel Training.setConvolutionDithering TensorLocation.numIOTiles "
    "Training.setMeanAccumulationAndReplicationReductionStrategy Precision.autocastEnabled Precision.halfFloatCasting "
    "Precision.runningStatisticsAlwaysFloat Precision.runningVarianceAlwaysFloat Precision.enableStochasticRounding "
    "Precision.setPartialsType Jit.traceModel Distributed.IPUoFConfigFiles Distributed.setEnvVarNames "
    "Distributed.disable Popart.setPatterns"
)

# Settings that are not supported, with a remedy. A PopTorch program is one process here.
REFUSED = {
    "anchorTensor": "return the value from the forward, or register a hook",
    "enableSyntheticData": "a call takes the data that it is given",
    "inputReplicaGrouping": "replicas have their own samples, and the same weights",
    "useOfflineIpuTarget": "there is nothing to compile for an IPU",
    "Precision.enableFloatingPointExceptions": "use torch.autograd.set_detect_anomaly(True)",
    "Distributed.configureProcessId": "replicas in several processes are penstock.Mesh(data=…), see docs/migrating.md",
}


class Group:
    """Settings that can be changed until they are frozen. ``title`` is the group's name, "" for ``Options``."""

    def __init__(self, title: str) -> None:
        known = [value for setting, value in VALUES.items() if setting.rpartition(".")[0] == title]
        values = {name: default for name, default, _ in known if default is not _UNSET}
        self.__dict__.update(_title=title, _values=values, _is_frozen=False)

    def _set(self, **values: Any) -> Self:
        if self._is_frozen:
            raise UnavailableAttribute("Can't modify frozen Options: change a copy of them, options.clone()")
        self._values.update(values)
        return self

    def _apply(self, setting: str, *args: Any, **kwargs: Any) -> Self:
        values = [*args, *kwargs.values()]
        if setting in VALUES:
            name, _, check = VALUES[setting]
            return self._set(**{name: check(setting, *values)})
        if setting in REFUSED and values not in ([False], [None], [0, 1]):  # switched off, or one process
            raise Error(f"poptorch.Options: {setting} is not supported: {REFUSED[setting]}")
        if setting not in {*_warned, *REFUSED}:
            _warned.add(setting)
            warnings.warn(f"poptorch.Options: {setting} has no effect here", stacklevel=2)
        return self._set(**{setting.rpartition(".")[2]: values[0] if len(values) == 1 else tuple(values) or True})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        setting = f"{self._title}.{name}".removeprefix(".")
        if setting in VALUES or setting in REFUSED or setting in IGNORED.split():
            return partial(self._apply, setting)
        if name not in self._values:
            raise AttributeError(f"poptorch.Options has no {setting}, or it has no meaning here")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._set()  # an error if they are frozen
        raise AttributeError(f"values are set by methods: {self._title or 'Options'}.…(…)")

    def _groups(self) -> dict[str, Group]:
        return {name: value for name, value in self.__dict__.items() if isinstance(value, Group)}

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True
        for group in self._groups().values():
            group._freeze()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_is_frozen": False}  # a copy can be changed

    def toDict(self) -> dict[str, Any]:
        """All values by name, with a nested dict for each group."""
        return {**self._values, **{name: group.toDict() for name, group in self._groups().items()}}

    def __repr__(self) -> str:
        name = f"_{self._title}Options" if self._title else "Options"
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in {**self._values, **self._groups()}.items())})"


class Popart(Group):
    """``options._Popart``: of PopART's settings, ``autoRecomputation`` has an effect here."""

    def set(self, key: str, value: Any) -> Self:
        """``autoRecomputation``: 0 keeps all activations (the default here), any other number recomputes them."""
        if key != "autoRecomputation":
            warnings.warn(f"_Popart.set({key!r}, …) has no effect here", stacklevel=2)
        return self._set(**{key: value})


class Options(Group):
    """The options of a model or a loader. Options in use cannot be changed: ``clone()`` them.

    - ``deviceIterations(n)``: the number of updates (in inference: micro-batches) per call;
    - ``replicationFactor(n)``: replicas, which run one after the other on the devices, with the results of replicas;
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
        super().__init__("")
        self._set(execution_strategy=PipelinedExecution(), output_mode=OutputMode.Default, output_return_period=1)
        groups = {name: Group(name) for name in ("Training", "Precision", "Jit", "Distributed")}
        groups["Distributed"]._set(processId=0, numProcesses=1)
        self.__dict__.update(groups, TensorLocations=Group("TensorLocation"), _Popart=Popart("Popart"))

    def _off_chip(self, kind: str) -> bool:
        location = self.TensorLocations._values.get(f"location_{kind}")
        return location is not None and location.get("onChip") == 0

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """The outputs that a call returns; ``EveryN`` returns every ``output_return_period``-th."""
        require(output_mode in list(OutputMode), f"an output mode is a poptorch.OutputMode, not {output_mode!r}")
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        valid = isinstance(period, int) and period > 0
        require(valid, "EveryN output_mode must have output_return_period set to valid positive integer")
        return self._set(output_mode=OutputMode(output_mode), output_return_period=period)

    def clone(self) -> Self:
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
