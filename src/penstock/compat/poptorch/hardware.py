"""What PopTorch programs ask about IPUs, and how much PopTorch logs."""

from __future__ import annotations

import logging

from penstock.compat.poptorch.errors import require

__all__ = ["ipuHardwareIsAvailable", "ipuHardwareVersion", "isRunningOnIpu", "setLogLevel"]

_LEVELS = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "ERR": 4, "OFF": 6}
_OURS = {0: logging.DEBUG, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR, 6: logging.CRITICAL}


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """True: there is always a device that stands for an IPU."""
    return True


def ipuHardwareVersion() -> int:
    """0: that of no IPU."""
    return 0


def isRunningOnIpu() -> bool:
    """False: code that is for IPUs alone is not for here."""
    return False


def setLogLevel(level: str | int) -> None:
    """How much this module logs, as "DEBUG", "INFO", … or PopTorch's number; its logger is penstock.compat.poptorch."""
    number = _LEVELS.get(level) if isinstance(level, str) else level
    require(number in _OURS, f"Invalid log level string: {level}. Accepted values are {', '.join(_LEVELS)}")
    assert number is not None
    logger = logging.getLogger("penstock.compat.poptorch")
    logger.setLevel(_OURS[number])
    if not logger.handlers and not logging.getLogger().handlers:
        logger.addHandler(logging.StreamHandler())
