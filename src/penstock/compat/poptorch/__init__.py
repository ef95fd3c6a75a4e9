"""PopTorch programs on Penstock: ``import penstock.compat.poptorch as poptorch``.

IPU n is device n, modulo the number of CUDA devices, or the CPU. Models are called with
``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples, and return what the output mode
says, on the host. docs/migrating.md lists the differences.
"""

import logging

from penstock.compat import publish
from penstock.compat.poptorch import optim as optim
from penstock.compat.poptorch import options as options
from penstock.compat.poptorch.base import *  # noqa: F403
from penstock.compat.poptorch.base import require as _require
from penstock.compat.poptorch.blocks import *  # noqa: F403
from penstock.compat.poptorch.executor import *  # noqa: F403
from penstock.compat.poptorch.loader import *  # noqa: F403
from penstock.compat.poptorch.options import *  # noqa: F403

_LOG_LEVELS = {"TRACE": 10, "DEBUG": 10, "INFO": 20, "WARN": 30, "ERR": 40, "OFF": 50}


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """True: there is always a device in place of an IPU."""
    return True


def isRunningOnIpu() -> bool:
    """False: code for IPUs only is not run."""
    return False


def setLogLevel(level: str | int) -> None:
    """Set the level of the logger ``penstock.compat.poptorch``: "DEBUG", "INFO", … or PopTorch's number."""
    name = level if isinstance(level, str) else {**dict(enumerate(_LOG_LEVELS)), 6: "OFF"}.get(level, "")
    _require(name in _LOG_LEVELS, f"Invalid log level string: {level}. Accepted values are {', '.join(_LOG_LEVELS)}")
    logging.getLogger("penstock.compat.poptorch").setLevel(_LOG_LEVELS[name])


publish(
    __name__,
    globals(),
    {
        "enums": "AutoStage ConnectionType DataLoaderMode HalfFloatCastingBehavior Liveness "
        "MeanReductionStrategy OutputMode ReductionType SharingStrategy SyncPattern"
    },
)
