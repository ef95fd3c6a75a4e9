"""PopTorch programs on Penstock: ``import penstock.compat.poptorch as poptorch``.

IPU n is device n, modulo the number of CUDA devices, or the CPU. Models are called with
``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples, and return what the output mode
says, on the host. docs/migrating.md lists the differences.
"""

import logging

from penstock.compat.poptorch import enums as enums
from penstock.compat.poptorch import optim as optim
from penstock.compat.poptorch import options as options
from penstock.compat.poptorch.blocks import *  # noqa: F403
from penstock.compat.poptorch.enums import *  # noqa: F403
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
    """Set the level of the logger ``penstock``, by PopTorch's name or number."""
    levels = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "ERR": 4, "OFF": 6}
    number = levels.get(level) if isinstance(level, str) else level
    enums.require(number in levels.values(), f"Invalid log level: {level!r}. Accepted values are {levels}")
    logging.getLogger("penstock").setLevel(max(1, 10 * int(number or 0)))
