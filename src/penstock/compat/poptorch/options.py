"""``Options``: the settings of PopTorch models and loaders. Chainable; frozen once they are used.

A setting is a method that takes the value and returns the group; the value is an attribute under its own name:
``options.Training.gradientAccumulation(4)``, ``options.Training.gradient_accumulation``.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from penstock.compat.poptorch import base
from penstock.compat.poptorch.base import (
    Error,
    FrozenOptions,
    OutputMode,
    ReductionType,
    UnmetRequirement,
    positive,
    require,
)
from penstock.compat.poptorch.blocks import PipelinedExecution, Strategy

__all__ = ["Options", "TensorLocationSettings"]


# ── groups of settings ───────────────────────────────────────────────────────────────────────────────────────────

_warned: set[str] = set()


class Group:
    """Settings that can be changed until they are frozen.

    ``_ignored`` names the settings that have no effect here; ``_refused`` maps settings that would change results, and
    are not supported, to a remedy.
    """

    _title = "Options"
    _ignored = ""
    _refused: ClassVar[Mapping[str, str]] = {}

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(_values=values, _is_frozen=False)

    def _set(self, **values: Any) -> Self:
        if self._is_frozen:
            raise FrozenOptions
        self._values.update(values)
        return self

    def _freeze(self) -> None:
        self.__dict__["_is_frozen"] = True

    def toDict(self) -> dict[str, Any]:
        """All values by name."""
        return dict(self._values)

    def _setting(self, name: str) -> Callable[..., Any] | None:
        """The method that makes a setting."""
        own = getattr(type(self), name, None)
        if callable(own) and not name.startswith("_"):
            return own.__get__(self)  # type: ignore[no-any-return]
        return partial(self._ignore_or_refuse, name) if name in (*self._ignored.split(), *self._refused) else None

    def _ignore_or_refuse(self, name: str, *args: Any, **kwargs: Any) -> Self:
        values = [*args, *kwargs.values()]
        full = f"{self._title}.{name}".removeprefix("Options.")
        if name in self._refused and values not in ([False], [None]):  # switching it off is no error
            raise Error(f"poptorch.Options: {full} is not supported: {self._refused[name]}")
        if name not in self._refused and full not in _warned:
            _warned.add(full)
            warnings.warn(f"poptorch.Options: {full} has no effect here", stacklevel=2)
        return self._set(**{name: values[0] if len(values) == 1 else tuple(values) or True})

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        setting = None if name.startswith("__") else self._setting(name)
        if setting is None and name not in values:
            raise AttributeError(f"poptorch.Options has no {self._title}.{name}, or it has no meaning here")
        return values[name] if setting is None else setting

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenOptions if self._is_frozen else AttributeError(f"values are set by methods: {self._title}.…(…)")

    def __repr__(self) -> str:
        return f"_{self._title}Options({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


class TensorLocationSettings:
    """Where tensors are stored: ``TensorLocationSettings().useOnChipStorage(False)`` means in host memory.

    PopTorch's other settings (``minElementsForOffChip``, ``useReplicatedTensorSharding``, …) have no effect.
    """

    def __init__(self) -> None:
        self._content: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., TensorLocationSettings]:
        if not name.startswith(("use", "minElements")):
            raise AttributeError(f"poptorch.TensorLocationSettings has no {name}")

        def set_value(value: int = True) -> TensorLocationSettings:
            self._content["onChip" if name == "useOnChipStorage" else name] = int(value)
            return self

        return set_value

    @property
    def off_chip(self) -> bool:
        return self._content.get("onChip") == 0

    def __repr__(self) -> str:
        return repr(self._content)


class TensorLocations(Group):
    """``options.TensorLocations``: ``setActivationLocation``, ``setWeightLocation``, ``setOptimizerLocation``."""

    _title = "TensorLocation"
    _ignored = "numIOTiles"

    def _setting(self, name: str) -> Callable[..., Any] | None:
        kinds = {f"set{kind}Location": kind for kind in ("Activation", "Weight", "Optimizer", "Accumulator")}
        return partial(self._locate, kinds[name]) if name in kinds else super()._setting(name)

    def _locate(self, kind: str, location: object) -> Self:
        if not isinstance(location, TensorLocationSettings):
            raise UnmetRequirement(f"a location is a poptorch.TensorLocationSettings, got {type(location).__name__}")
        if kind == "Accumulator" and location.off_chip:
            raise Error("gradients cannot be stored in host memory: leave out setAccumulatorLocation")
        return self._set(**{f"location_{kind.lower()}": location})

    def off_chip(self, kind: str) -> bool:
        location = self._values.get(f"location_{kind}")
        return location is not None and location.off_chip


class Training(Group):
    """``options.Training``."""

    _title = "Training"
    _ignored = "setMeanAccumulationAndReplicationReductionStrategy setConvolutionDithering"

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            automatic_loss_scaling=False,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """The number of micro-batches per update."""
        return self._set(gradient_accumulation=positive("gradientAccumulation", gradient_accumulation))

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """Average (the default) or sum the gradients of micro-batches and replicas."""
        kinds = (ReductionType.Mean, ReductionType.Sum)
        require(reduction_type in kinds, f"the reduction type must be Mean or Sum, not {reduction_type!r}")
        return self._set(accumulation_and_replication_reduction_type=ReductionType(reduction_type))

    accumulationReductionType = accumulationAndReplicationReductionType

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Scale the loss by ``penstock.GradScaler``; updates with an inf or nan are skipped."""
        return self._set(automatic_loss_scaling=bool(enabled))


class Precision(Group):
    """``options.Precision``: torch's own rules apply; ``model.half()`` and autocast work."""

    _title = "Precision"
    _ignored = (
        "autocastEnabled halfFloatCasting runningStatisticsAlwaysFloat runningVarianceAlwaysFloat "
        "enableStochasticRounding setPartialsType"
    )
    _refused: ClassVar[Mapping[str, str]] = {
        "enableFloatingPointExceptions": "use torch.autograd.set_detect_anomaly(True)"
    }


class Jit(Group):
    """``options.Jit``."""

    _title = "Jit"
    _ignored = "traceModel"


class Distributed(Group):
    """``options.Distributed``: a PopTorch program is one process here."""

    _title = "Distributed"
    _ignored = "IPUoFConfigFiles setEnvVarNames disable"
    processId, numProcesses = 0, 1

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        if (process_id, num_processes) != (0, 1):
            raise Error(
                f"poptorch.Options.Distributed for {num_processes} processes is not supported: replicas in several "
                "processes are penstock.Mesh(data=…), see docs/migrating.md"
            )
        return self._set()


class Popart(Group):
    """``options._Popart``: of PopART's settings, ``autoRecomputation`` has an effect here."""

    _title = "Popart"
    _ignored = "setPatterns"

    def set(self, key: str, value: Any) -> Self:
        """``autoRecomputation``: 0 keeps all activations (the default here), any other number recomputes them."""
        if key != "autoRecomputation":
            warnings.warn(f"_Popart.set({key!r}, …) has no effect here", stacklevel=2)
        return self._set(**{key: value})


_GROUPS: dict[str, type[Group]] = {
    "Training": Training,
    "TensorLocations": TensorLocations,
    "Precision": Precision,
    "Jit": Jit,
    "Distributed": Distributed,
    "_Popart": Popart,
}


class Options(Group):
    """The options of a model or a loader. Options that are in use cannot be changed: ``clone()`` them."""

    Training: Training
    TensorLocations: TensorLocations
    _ignored = (
        "autoRoundNumIPUs availableMemoryProportion setAvailableMemoryProportion broadcastBuffers connectionType "
        "disableModuleNamescope enableExecutableCaching enableStableNorm logCycleCount logDir maxRepeatLogs modelName "
        "relaxOptimizerAttributesChecks showCompilationProgressBar sourceLocationExcludes appendToLocationExcludes "
        "syncPattern updatableNamedBuffers useIpuId useIpuModel"
    )
    _refused: ClassVar[Mapping[str, str]] = {
        "anchorTensor": "return the value from the forward, or register a hook",
        "enableSyntheticData": "a call takes the data that it is given",
        "inputReplicaGrouping": "replicas have their own samples, and the same weights",
        "useOfflineIpuTarget": "there is nothing to compile for an IPU",
    }

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            device_iterations=1,
            output_mode=OutputMode.Default,
            output_return_period=1,
            execution_strategy=PipelinedExecution(),
            random_seed=None,
            profile_dir=None,
        )
        self.__dict__.update({name: kind() for name, kind in _GROUPS.items()})

    def deviceIterations(self, device_iterations: int) -> Self:
        """The number of updates (in inference: micro-batches) per call."""
        return self._set(device_iterations=positive("deviceIterations", device_iterations))

    def replicationFactor(self, replication_factor: int) -> Self:
        """The number of replicas. They take turns on the devices; results are those of replicas."""
        return self._set(replication_factor=positive("replicationFactor", replication_factor))

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """The outputs that a call returns; ``EveryN`` returns every ``output_return_period``-th."""
        require(isinstance(output_mode, OutputMode), f"an output mode is a poptorch.OutputMode, not {output_mode!r}")
        if output_mode == OutputMode.EveryN:
            valid = isinstance(output_return_period, int) and output_return_period > 0
            require(valid, "EveryN output_mode must have output_return_period set to valid positive integer")
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        return self._set(output_mode=output_mode, output_return_period=period)

    anchorMode = outputMode

    def defaultOutputMode(self) -> bool:
        """Whether ``outputMode`` was not set."""
        return bool(self.output_mode == OutputMode.Default)

    def setExecutionStrategy(self, strategy: Any) -> Self:
        """``PipelinedExecution`` (by default with stages by the blocks' IPUs) or ``ShardedExecution``."""
        require(isinstance(strategy, Strategy), f"a strategy is a poptorch.PipelinedExecution, not {strategy!r}")
        return self._set(execution_strategy=strategy)

    def randomSeed(self, random_seed: int) -> Self:
        """Random numbers depend on the seed, the call, the micro-batch and the layer only."""
        require(isinstance(random_seed, int), f"a seed is a whole number, got {random_seed!r}")
        return self._set(random_seed=random_seed)

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write a Chrome trace of each model's first call, ``training.json`` or ``inference.json``."""
        return self._set(profile_dir="." if profile_dir is None else str(profile_dir))

    def clone(self) -> Self:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        restored: Self = _restore(type(self), copy.deepcopy(self._state(), memo))
        return restored

    def __reduce__(self) -> Any:
        return _restore, (type(self), self._state())

    def _state(self) -> dict[str, dict[str, Any]]:
        return {"": self._values, **{name: self.__dict__[name]._values for name in _GROUPS}}

    def _freeze(self) -> None:
        super()._freeze()
        for name in _GROUPS:
            self.__dict__[name]._freeze()

    def toDict(self) -> dict[str, Any]:
        """All values by name, those of the groups in dicts of their own."""
        return {**self._values, **{name: self.__dict__[name].toDict() for name in _GROUPS}}

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
        """Read settings from JSON: ``{"deviceIterations": 4, "Training": {"gradientAccumulation": 8}}``."""
        _set_all(self, json.loads(string))
        return self

    def __repr__(self) -> str:
        inner = [f"{name}={value!r}" for name, value in self._values.items()]
        inner += [f"{name}={self.__dict__[name]!r}" for name in _GROUPS]
        return f"Options({', '.join(inner)})"


def _restore(kind: type[Any], state: dict[str, dict[str, Any]]) -> Any:
    options = kind()
    for name, values in state.items():
        (options.__dict__[name] if name else options)._values.update(values)
    return options


def _set_all(group: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _GROUPS and isinstance(group, Options):
            _set_all(group.__dict__[name], value)
            continue
        setting = group._setting(name)
        if setting is None:
            raise Error(f"poptorch.Options.from_json: there is no setting {name!r}")
        setting(*map(_enum_member, value if isinstance(value, list) else [value]))


def _enum_member(value: Any) -> Any:
    """The enumeration member that a string names, as in ``"OutputMode.All"``; other values as they are."""
    kind, _, member = value.removeprefix("poptorch.").partition(".") if isinstance(value, str) else ("", "", "")
    members = getattr(getattr(base, kind, None), "__members__", {})
    return members.get(member, value)
