"""The groups of ``Options``: ``options.Training``, ``.TensorLocations``, ``.Precision``, ``.Jit``, ``.Distributed``.

A setting is a method that takes the value and gives the group back; the value is an attribute, under its own name:
``options.Training.gradientAccumulation(4)``, ``options.Training.gradient_accumulation``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NoReturn, Self

from penstock.compat.poptorch.enums import HalfFloatCastingBehavior, MeanReductionStrategy, ReductionType
from penstock.compat.poptorch.errors import Error, Frozen, Unmet, require

__all__ = [
    "Distributed",
    "Group",
    "Jit",
    "Popart",
    "Precision",
    "TensorLocationSettings",
    "TensorLocations",
    "Training",
    "accepted",
    "positive",
    "refused",
]


class Group:
    """Settings that can be changed until they are frozen."""

    _title = "Options"

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = values
        self.__dict__["_is_frozen"] = False

    def _set(self, **values: Any) -> Self:
        if self._is_frozen:
            raise Frozen
        self._values.update(values)
        return self

    def _freeze(self, frozen: bool = True) -> None:
        self.__dict__["_is_frozen"] = frozen

    def toDict(self) -> dict[str, Any]:
        """All values by name."""
        return dict(self._values)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name in values:
            return values[name]
        raise AttributeError(f"poptorch.Options has no {self._title}.{name}, or it has no meaning here")

    def __setattr__(self, name: str, value: Any) -> None:
        raise Frozen if self._is_frozen else AttributeError(f"values are set by methods, such as {self._title}.…(…)")

    def __repr__(self) -> str:
        return f"_{self._title}Options({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


def positive(name: str, value: object) -> int:
    """A number of times."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise Unmet(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def accepted(name: str) -> Callable[..., Any]:
    """A setting that PopTorch programs make, and that has no effect here: results do not depend on it."""

    def method(self: Any, *value: Any, **named: Any) -> Any:
        given = [*value, *named.values()]
        return self._set(**{name: given[0] if len(given) == 1 else tuple(given) or True})

    method.__doc__ = "Accepted; it has no effect here."
    return method


def refused(name: str, why: str) -> Callable[..., Any]:
    """A setting that results depend on, and that cannot be had here; to switch it off is no error."""

    def method(self: Any, *value: Any, **named: Any) -> Any:
        given = [*value, *named.values()]
        if given in ([False], [None]):
            return self._set()
        raise Error(f"poptorch.Options: {name} is not there: {why}")

    method.__doc__ = f"Refused: {why}."
    return method


class TensorLocationSettings:
    """Where tensors are kept: ``TensorLocationSettings().useOnChipStorage(False)`` means in the host's memory."""

    def __init__(self) -> None:
        self._content: dict[str, int] = {}

    def useOnChipStorage(self, use_on_chip: bool = True) -> TensorLocationSettings:
        """On the device (True), or in the host's memory while the device has no use for them (False)."""
        self._content["onChip"] = int(use_on_chip)
        return self

    def minElementsForOffChip(self, min_elements: int) -> TensorLocationSettings:
        """Accepted; Penstock has a limit of its own, below which copies are not worth it."""
        self._content["minElementsForOffChip"] = positive("minElementsForOffChip", min_elements)
        return self

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> TensorLocationSettings:
        """Accepted; it has no effect here."""
        self._content["minElementsForReplicatedTensorSharding"] = min_elements
        return self

    def useReplicatedTensorSharding(self, use_rts: bool = True) -> TensorLocationSettings:
        """Accepted; it has no effect here."""
        self._content["useReplicatedTensorSharding"] = int(use_rts)
        return self

    def useIOTilesToLoad(self, use_io_tiles: bool = True) -> TensorLocationSettings:
        """Accepted; it has no effect here."""
        self._content["useIOTilesToLoad"] = int(use_io_tiles)
        return self

    def useIOTilesToStore(self, use_io_tiles: bool = True) -> TensorLocationSettings:
        """Accepted; it has no effect here."""
        self._content["useIOTilesToStore"] = int(use_io_tiles)
        return self

    @property
    def off_chip(self) -> bool:
        return self._content.get("onChip") == 0

    def __repr__(self) -> str:
        return repr(self._content)


class TensorLocations(Group):
    """``options.TensorLocations``: what is kept in the host's memory."""

    _title = "TensorLocation"

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """What forwards save for their backwards."""
        return self._locate("location_activation", location)

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """The parameters."""
        return self._locate("location_weight", location)

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """The optimizer's state."""
        return self._locate("location_optimizer", location)

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """The sums of gradients: these stay on the device."""
        if isinstance(location, TensorLocationSettings) and location.off_chip:
            raise Error("gradients cannot be kept in the host's memory here: leave out setAccumulatorLocation")
        return self._locate("location_accumulator", location)

    def numIOTiles(self, num_tiles: int) -> Self:
        """Accepted; it has no effect here."""
        return self._set(numIOTiles=num_tiles)

    def _locate(self, name: str, location: object) -> Self:
        is_one = isinstance(location, TensorLocationSettings)
        require(is_one, f"a location is a poptorch.TensorLocationSettings, got {type(location).__name__}")
        return self._set(**{name: location})

    def off_chip(self, what: str) -> bool:
        location = self._values.get(f"location_{what}")
        return location is not None and location.off_chip


class Training(Group):
    """``options.Training``."""

    _title = "Training"

    def __init__(self) -> None:
        super().__init__(
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=MeanReductionStrategy.Post,
            automatic_loss_scaling=False,
        )

    def gradientAccumulation(self, gradient_accumulation: int) -> Self:
        """How many micro-batches there are to each update; their gradients are averaged."""
        return self._set(gradient_accumulation=positive("gradientAccumulation", gradient_accumulation))

    def accumulationAndReplicationReductionType(self, reduction_type: ReductionType) -> Self:
        """What the gradients of micro-batches and replicas become: their mean (the default) or their sum."""
        kinds = (ReductionType.Mean, ReductionType.Sum)
        require(reduction_type in kinds, f"gradients become their Mean or their Sum, not {reduction_type!r}")
        return self._set(accumulation_and_replication_reduction_type=ReductionType(reduction_type))

    accumulationReductionType = accumulationAndReplicationReductionType

    def setAutomaticLossScaling(self, enabled: bool) -> Self:
        """Scale the loss for half precision, by ``penstock.GradScaler``: updates with an inf or nan are left out."""
        return self._set(automatic_loss_scaling=bool(enabled))

    setMeanAccumulationAndReplicationReductionStrategy = accepted("meanAccumulationAndReplicationReductionStrategy")
    setConvolutionDithering = accepted("convolution_dithering")


class Precision(Group):
    """``options.Precision``: torch's rules hold for tensors and operators, and ``model.half()`` and autocast work."""

    _title = "Precision"

    def __init__(self) -> None:
        super().__init__(autocast_enabled=True, half_float_casting=HalfFloatCastingBehavior.Default)

    autocastEnabled = accepted("autocast_enabled")
    halfFloatCasting = accepted("half_float_casting")
    runningStatisticsAlwaysFloat = accepted("running_statistics_always_float")
    runningVarianceAlwaysFloat = accepted("running_variance_always_float")
    enableStochasticRounding = accepted("enable_stochastic_rounding")
    setPartialsType = accepted("partials_type")
    enableFloatingPointExceptions = refused(
        "Precision.enableFloatingPointExceptions", "use torch.autograd.set_detect_anomaly(True)"
    )


class Jit(Group):
    """``options.Jit``."""

    _title = "Jit"

    def __init__(self) -> None:
        super().__init__(trace_model=False)

    traceModel = accepted("trace_model")


class Distributed(Group):
    """``options.Distributed``: a PopTorch program is one process here."""

    _title = "Distributed"

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0)

    def configureProcessId(self, process_id: int, num_processes: int) -> Self:
        """One process is all there is."""
        if (process_id, num_processes) != (0, 1):
            _several(num_processes)
        return self._set()

    def disable(self) -> Self:
        """It is never enabled."""
        return self._set()

    @property
    def processId(self) -> int:
        return 0

    @property
    def numProcesses(self) -> int:
        return 1

    IPUoFConfigFiles = accepted("ipuof_configs")
    setEnvVarNames = accepted("env_var_names")


def _several(count: int) -> NoReturn:
    raise Error(
        f"poptorch.Options.Distributed for {count} processes is not there: replicas in several processes are "
        "penstock.Mesh(data=…), see docs/migrating.md"
    )


class Popart(Group):
    """``options._Popart``: of PopART's settings, the one for recomputation has a meaning here."""

    _title = "Popart"

    def set(self, key: str, value: Any) -> Self:
        """``autoRecomputation``: 0 keeps all activations (the default here), any other number recomputes them."""
        if key != "autoRecomputation":
            warnings.warn(f"_Popart.set({key!r}, …) has no effect here", stacklevel=2)
        return self._set(**{key: value})

    setPatterns = accepted("patterns")
