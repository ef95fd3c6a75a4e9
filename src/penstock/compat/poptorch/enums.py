"""PopTorch's enumerations, with its names and numbers, and its errors. Each error is also a ``penstock.PlanError``."""

from __future__ import annotations

from enum import Enum, IntEnum

import penstock as ps

__all__ = [
    *("AutoStage", "ConnectionType", "DataLoaderMode", "Error", "HalfFloatCastingBehavior", "Liveness", "OutputMode"),
    *("MatMulSerializationMode", "MeanReductionStrategy", "ReductionType", "SharingStrategy", "SyncPattern"),
]


class Error(ps.PlanError, RuntimeError):
    """``poptorch.Error``."""


class UnmetRequirement(ps.PlanError, AssertionError):
    """An assertion of PopTorch about its arguments that does not hold."""


class UnavailableAttribute(Error, AttributeError):
    """A name that the facade does not have, or an option that cannot be changed any more."""


def require(condition: object, message: str) -> None:
    """PopTorch's ``assert``, which ``python -O`` does not remove."""
    if not condition:
        raise UnmetRequirement(message)


def positive(name: str, value: int) -> int:
    valid = isinstance(value, int) and not isinstance(value, bool) and value > 0
    require(valid, f"{name} must be a whole number of at least 1, got {value!r}")
    return value


# The micro-batches whose outputs a call returns. Default: Final in training, All in inference.
OutputMode = IntEnum("OutputMode", "Final EveryN All Sum Default", start=0)
# The grouping of blocks into stages if no stages are named: by IPU, or one stage per block.
AutoStage = IntEnum("AutoStage", "SameAsIpu AutoIncrement", start=0)
# Load in the calling thread, or ahead in another thread. AsyncRebatched keeps all samples of iterable datasets.
DataLoaderMode = IntEnum("DataLoaderMode", "Sync Async AsyncRebatched", start=0)
# The reduction of gradients over micro-batches and replicas.
ReductionType = IntEnum("ReductionType", "Sum Mean NoReduction", start=0)

# The following have no effect here.
MatMulSerializationMode = Enum("MatMulSerializationMode", "InputChannels ReducingDim OutputChannels Disabled")
MeanReductionStrategy = IntEnum("MeanReductionStrategy", "Running Post", start=0)
Liveness = IntEnum("Liveness", "AlwaysLive OffChipAfterFwd OffChipAfterFwdNoOverlap OffChipAfterEachPhase", start=0)
ConnectionType = IntEnum("ConnectionType", "Always OnDemand Never", start=0)
SyncPattern = IntEnum("SyncPattern", "Full SinglePipeline ReplicaAndLadder", start=0)
HalfFloatCastingBehavior = IntEnum("HalfFloatCastingBehavior", "FloatDowncastToHalf HalfUpcastToFloat Default", start=0)
SharingStrategy = Enum(
    "SharingStrategy",
    [("FileSystem", "file_system"), ("SharedMemory", "shared_memory"), ("Fork", "fork"), ("ForkServer", "forkserver")],
)
