"""PopTorch's enumerations, with its names and numbers, and its errors. Each error is also a ``penstock.PlanError``."""

from __future__ import annotations

from enum import Enum, IntEnum

import penstock as ps

__all__ = [
    *("AnchorMode", "AutoStage", "ConnectionType", "DataLoaderMode", "Error", "HalfFloatCastingBehavior", "Liveness"),
    *("MeanReductionStrategy", "OutputMode", "ReductionType", "SharingStrategy", "SyncPattern"),
]


class Error(ps.PlanError, RuntimeError):
    """``poptorch.Error``."""


class UnmetRequirement(ps.PlanError, AssertionError):
    """An assertion of PopTorch about its arguments that does not hold."""


class FrozenOptions(ps.PlanError, AttributeError):
    """Options that a model or a loader uses already were to be changed."""

    def __init__(self) -> None:
        super().__init__("Can't modify frozen Options: change a copy of them, options.clone()")


def require(condition: object, message: str) -> None:
    """PopTorch's ``assert``, which ``python -O`` does not remove."""
    if not condition:
        raise UnmetRequirement(message)


def positive(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnmetRequirement(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


class OutputMode(IntEnum):
    """The micro-batches whose outputs a call returns. ``Default``: ``Final`` in training, ``All`` in inference."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode


class AutoStage(IntEnum):
    """How blocks become stages where no stages are named: by their IPUs, or one stage per block."""

    SameAsIpu = 0
    AutoIncrement = 1


class DataLoaderMode(IntEnum):
    """Load in the calling thread, ahead in a thread, or ahead in smaller batches that are joined."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class ReductionType(IntEnum):
    """The reduction of gradients over micro-batches and replicas."""

    Sum = 0
    Mean = 1
    NoReduction = 2


# The following have no effect here.
MeanReductionStrategy = IntEnum("MeanReductionStrategy", [("Running", 0), ("Post", 1)])
Liveness = IntEnum(
    "Liveness",
    [("AlwaysLive", 0), ("OffChipAfterFwd", 1), ("OffChipAfterFwdNoOverlap", 2), ("OffChipAfterEachPhase", 3)],
)
ConnectionType = IntEnum("ConnectionType", [("Always", 0), ("OnDemand", 1), ("Never", 2)])
SyncPattern = IntEnum("SyncPattern", [("Full", 0), ("SinglePipeline", 1), ("ReplicaAndLadder", 2)])
HalfFloatCastingBehavior = IntEnum(
    "HalfFloatCastingBehavior", [("FloatDowncastToHalf", 0), ("HalfUpcastToFloat", 1), ("Default", 2)]
)
SharingStrategy = Enum(
    "SharingStrategy",
    [("FileSystem", "file_system"), ("SharedMemory", "shared_memory"), ("Fork", "fork"), ("ForkServer", "forkserver")],
)
