"""The enumerations of PopTorch, with its names and numbers."""

from __future__ import annotations

from enum import Enum, IntEnum

__all__ = [
    "AnchorMode",
    "AutoStage",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MeanReductionStrategy",
    "OutputMode",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
]


class OutputMode(IntEnum):
    """Which micro-batches' outputs a call returns. ``Default``: ``Final`` in training, ``All`` in inference."""

    Final = 0
    EveryN = 1
    All = 2
    Sum = 3
    Default = 4


AnchorMode = OutputMode


class AutoStage(IntEnum):
    """How blocks become stages where no stages are named: by their IPUs, or one stage for each block."""

    SameAsIpu = 0
    AutoIncrement = 1


class DataLoaderMode(IntEnum):
    """Where a loader loads: in the calling thread, ahead of it, or ahead of it in smaller batches that are joined."""

    Sync = 0
    Async = 1
    AsyncRebatched = 2


class ReductionType(IntEnum):
    """What gradients of micro-batches and replicas become."""

    Sum = 0
    Mean = 1
    NoReduction = 2


class MeanReductionStrategy(IntEnum):
    """When a mean is divided by its count. The result is the same."""

    Running = 0
    Post = 1


class Liveness(IntEnum):
    """Of phased execution."""

    AlwaysLive = 0
    OffChipAfterFwd = 1
    OffChipAfterFwdNoOverlap = 2
    OffChipAfterEachPhase = 3


class ConnectionType(IntEnum):
    """When PopTorch attaches to an IPU. Of no effect here."""

    Always = 0
    OnDemand = 1
    Never = 2


class SyncPattern(IntEnum):
    """How IPUs wait for each other. Of no effect here."""

    Full = 0
    SinglePipeline = 1
    ReplicaAndLadder = 2


class HalfFloatCastingBehavior(IntEnum):
    """What PopTorch's compiler did with operators of mixed precision. Of no effect here: torch's rules hold."""

    FloatDowncastToHalf = 0
    HalfUpcastToFloat = 1
    Default = 2


class SharingStrategy(Enum):
    """How PopTorch's loader process handed batches over. Of no effect here: a thread loads."""

    FileSystem = "file_system"
    SharedMemory = "shared_memory"
    Fork = "fork"
    ForkServer = "forkserver"
