"""PopTorch's enumerations, with its names and numbers."""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    *("AnchorMode", "AutoStage", "ConnectionType", "DataLoaderMode", "HalfFloatCastingBehavior", "Liveness"),
    *("MeanReductionStrategy", "OutputMode", "ReductionType", "SharingStrategy", "SyncPattern"),
]


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
