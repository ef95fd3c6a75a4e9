"""``Options``: what a PopTorch program says of its models and loaders. Chainable; frozen once it is used."""

from __future__ import annotations

import ast
import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from penstock.compat.poptorch import enums
from penstock.compat.poptorch import option_groups as groups
from penstock.compat.poptorch.enums import OutputMode
from penstock.compat.poptorch.errors import Error, require
from penstock.compat.poptorch.option_groups import Group, TensorLocationSettings, accepted, positive, refused
from penstock.compat.poptorch.strategies import PipelinedExecution, ShardedExecution, Strategy

__all__ = ["Options", "TensorLocationSettings"]

_GROUPS = {
    "Training": groups.Training,
    "TensorLocations": groups.TensorLocations,
    "Precision": groups.Precision,
    "Jit": groups.Jit,
    "Distributed": groups.Distributed,
    "_Popart": groups.Popart,
}


class Options(Group):
    """The options of a model or a loader. One that is in use cannot be changed: ``clone()`` it.

    These change results, memory or speed: ``deviceIterations``, ``replicationFactor``, ``outputMode``,
    ``setExecutionStrategy``, ``randomSeed``, ``enableProfiling``, ``Training.*`` and ``TensorLocations.*``. Those that
    are about the IPU, its compiler and its tools are accepted and do nothing; docs/migrating.md has the list.
    """

    Training: groups.Training
    TensorLocations: groups.TensorLocations
    Precision: groups.Precision
    Jit: groups.Jit
    Distributed: groups.Distributed
    _Popart: groups.Popart

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            device_iterations=1,
            output_mode=OutputMode.Default,
            output_return_period=1,
            execution_strategy=PipelinedExecution(),
            random_seed=None,
            profile_dir=None,
            anchored_tensors={},
            auto_round_num_ipus=False,
            available_memory_proportion={},
            broadcast_buffers=True,
            log_dir=".",
        )
        self.__dict__.update({name: kind() for name, kind in _GROUPS.items()})

    # ── what has an effect ───────────────────────────────────────────────────────────────────────────────────

    def deviceIterations(self, device_iterations: int) -> Self:
        """How many updates (in inference: micro-batches) there are to a call."""
        return self._set(device_iterations=positive("deviceIterations", device_iterations))

    def replicationFactor(self, replication_factor: int) -> Self:
        """How many replicas there are. They take turns on the devices: results are those of replicas."""
        return self._set(replication_factor=positive("replicationFactor", replication_factor))

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which outputs a call returns; with ``EveryN``, of every how many micro-batches."""
        require(isinstance(output_mode, OutputMode), f"an output mode is a poptorch.OutputMode, not {output_mode!r}")
        if output_mode == OutputMode.EveryN:
            valid = isinstance(output_return_period, int) and output_return_period > 0
            require(valid, "EveryN output_mode must have output_return_period set to valid positive integer")
        period = output_return_period if output_mode == OutputMode.EveryN else 1
        return self._set(output_mode=output_mode, output_return_period=period)

    anchorMode = outputMode

    def defaultOutputMode(self) -> bool:
        """Whether ``outputMode`` was left as it is."""
        return bool(self.output_mode == OutputMode.Default)

    def setExecutionStrategy(self, strategy: PipelinedExecution | ShardedExecution) -> Self:
        """``PipelinedExecution`` (by default with stages by the blocks' IPUs) or ``ShardedExecution``."""
        require(isinstance(strategy, Strategy), f"a strategy is a poptorch.PipelinedExecution, not {strategy!r}")
        return self._set(execution_strategy=strategy)

    def randomSeed(self, random_seed: int) -> Self:
        """Random numbers of a model depend on this, the call, the micro-batch and the layer alone."""
        require(isinstance(random_seed, int), f"a seed is a whole number, got {random_seed!r}")
        return self._set(random_seed=random_seed)

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write a trace of each model's first call, ``training.json`` or ``inference.json``, for a trace viewer."""
        return self._set(profile_dir="." if profile_dir is None else str(profile_dir))

    # ── copies and files ─────────────────────────────────────────────────────────────────────────────────────

    def clone(self) -> Self:
        """A copy that can be changed."""
        return copy.deepcopy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)()
        new._values.update(copy.deepcopy(self._values, memo))
        for name in _GROUPS:
            new.__dict__[name]._values.update(copy.deepcopy(self.__dict__[name]._values, memo))
        return new

    def __reduce__(self) -> Any:
        return _restored, (type(self), self._values, {name: self.__dict__[name]._values for name in _GROUPS})

    def _freeze(self, frozen: bool = True) -> None:
        super()._freeze(frozen)
        for name in _GROUPS:
            self.__dict__[name]._freeze(frozen)

    def toDict(self) -> dict[str, Any]:
        """All values by name, those of the groups in dicts of their own."""
        return {**self._values, **{name: self.__dict__[name].toDict() for name in _GROUPS}}

    def loadFromFile(self, filepath: str) -> Self:
        """Each line is a setting as a program would make it, without ``options.``: ``deviceIterations(4)``."""
        from penstock.compat import poptorch

        for number, line in enumerate(Path(filepath).read_text("utf-8").splitlines(), 1):
            text = line.partition("#")[0].strip()
            if text:
                try:
                    _value(ast.parse(f"options.{text}", mode="eval").body, {"options": self, "poptorch": poptorch})
                except Exception as error:
                    raise Error(f"{filepath}, line {number}: {text!r} cannot be set: {error}") from error
        return self

    def from_json(self, string: str) -> Self:
        """Settings from JSON: ``{"deviceIterations": 4, "Training": {"gradientAccumulation": 8}}``."""
        _set_all(self, json.loads(string))
        return self

    def __repr__(self) -> str:
        inner = [f"{name}={value!r}" for name, value in self._values.items()]
        inner += [f"{name}={self.__dict__[name]!r}" for name in _GROUPS]
        return f"Options({', '.join(inner)})"

    # ── what is accepted, and what is refused ────────────────────────────────────────────────────────────────

    autoRoundNumIPUs = accepted("auto_round_num_ipus")
    availableMemoryProportion = accepted("available_memory_proportion")
    setAvailableMemoryProportion = accepted("available_memory_proportion")
    broadcastBuffers = accepted("broadcast_buffers")
    connectionType = accepted("connection_type")
    disableModuleNamescope = accepted("disable_module_namescope")
    enableExecutableCaching = accepted("cache_path")
    enableStableNorm = accepted("enable_stable_norm")
    logCycleCount = accepted("log_cycle_count")
    logDir = accepted("log_dir")
    maxRepeatLogs = accepted("max_repeat_logs")
    modelName = accepted("model_name")
    relaxOptimizerAttributesChecks = accepted("relax_optimizer_attributes_checks")
    showCompilationProgressBar = accepted("show_compilation_progress_bar")
    sourceLocationExcludes = accepted("source_location_excludes")
    appendToLocationExcludes = accepted("source_location_excludes")
    syncPattern = accepted("sync_pattern")
    updatableNamedBuffers = accepted("updatable_named_buffers")
    useIpuId = accepted("ipu_id")
    useIpuModel = accepted("use_model")

    anchorTensor = refused("anchorTensor", "return the value from the forward, or register a hook")
    enableSyntheticData = refused("enableSyntheticData", "a call takes the data that it is given")
    inputReplicaGrouping = refused("inputReplicaGrouping", "replicas have their own samples, and the same weights")
    useOfflineIpuTarget = refused("useOfflineIpuTarget", "there is nothing to compile for an IPU")


def _restored(kind: type[Options], values: dict[str, Any], inside: dict[str, dict[str, Any]]) -> Options:
    options = kind()
    options._values.update(values)
    for name, inner in inside.items():
        options.__dict__[name]._values.update(inner)
    return options


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression of names, attributes, calls, literals: what a line of settings is made of."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr)
    if isinstance(node, ast.Call):
        args = [_value(arg, names) for arg in node.args]
        named = {str(pair.arg): _value(pair.value, names) for pair in node.keywords}
        return _value(node.func, names)(*args, **named)
    return ast.literal_eval(node)


def _set_all(group: Any, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in _GROUPS and isinstance(group, Options):
            _set_all(group.__dict__[name], value)
            continue
        if not callable(getattr(type(group), name, None)) or name.startswith("_"):
            raise Error(f"poptorch.Options.from_json: there is no setting {name!r}")
        args = [_named(item) for item in (value if isinstance(value, list) else [value])]
        getattr(group, name)(*args)


def _named(value: Any) -> Any:
    """An enumeration's member where a string names one: ``"OutputMode.All"``."""
    if isinstance(value, str):
        kind, _, member = value.removeprefix("poptorch.").partition(".")
        found = getattr(enums, kind, None) if kind in enums.__all__ else None
        if found is not None and member in found.__members__:
            return found[member]
    return value
