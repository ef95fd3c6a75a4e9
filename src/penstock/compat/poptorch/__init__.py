"""PopTorch programs on Penstock: ``import penstock.compat.poptorch as poptorch``.

IPU n is device n, modulo the number of CUDA devices, or the CPU. Models are called with
``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples, and return what the output mode
says, on the host. docs/migrating.md lists the differences.
"""

from penstock.compat import publish
from penstock.compat.poptorch import optim as optim
from penstock.compat.poptorch import options as options
from penstock.compat.poptorch.base import *  # noqa: F403
from penstock.compat.poptorch.blocks import *  # noqa: F403
from penstock.compat.poptorch.executor import *  # noqa: F403
from penstock.compat.poptorch.loader import *  # noqa: F403
from penstock.compat.poptorch.options import *  # noqa: F403


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """True: there is always a device in place of an IPU."""
    return True


def isRunningOnIpu() -> bool:
    """False: code for IPUs only is not run."""
    return False


def setLogLevel(level: str | int) -> None:
    """No effect: there is no compiler that logs."""


publish(
    __name__,
    globals(),
    {
        "enums": "AutoStage ConnectionType DataLoaderMode HalfFloatCastingBehavior Liveness "
        "MeanReductionStrategy OutputMode ReductionType SharingStrategy SyncPattern"
    },
)
