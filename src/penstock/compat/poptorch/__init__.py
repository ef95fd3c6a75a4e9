"""PopTorch programs on Penstock: ``import penstock.compat.poptorch as poptorch``.

IPU n is device n, modulo the number of CUDA devices; without any, all stages are on the CPU. Models are called with
``micro-batch × gradientAccumulation × deviceIterations × replicationFactor`` samples, and return the outputs that the
output mode selects, on the host. docs/migrating.md lists the differences.
"""

import logging
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from penstock.compat.poptorch import enums as enums
from penstock.compat.poptorch import optim as optim
from penstock.compat.poptorch import options as options
from penstock.compat.poptorch.blocks import *  # noqa: F403
from penstock.compat.poptorch.enums import *  # noqa: F403
from penstock.compat.poptorch.executor import *  # noqa: F403
from penstock.compat.poptorch.loader import *  # noqa: F403
from penstock.compat.poptorch.options import *  # noqa: F403

REFUSED = {
    "for_loop cond custom_op CPU": "it is for compiled code: write Python in the forward",
    "ctc_beam_search_decoder MultiConv nms fps dynamic_slice dynamic_update": "use an operator of torch or torchvision",
    "set_overlap_for_input set_overlap_for_output OverlapMode": "there are no IO tiles: leave it out",
    "CommGroupType VariableRetrievalMode": "all replicas have the same weights: leave it out",
    "IPUContext IPUScope": "wrap a module by trainingModel or inferenceModel",
    "RecoverableError UnrecoverableError": "there is no IPU to reset: catch poptorch.Error",
    "autocast": "use torch.autocast",
    "ipuHardwareVersion profiling": "there is no IPU: Options.enableProfiling writes a trace",
    "PhasedExecution": "use SerialPhasedExecution",
}


def __getattr__(name: str) -> NoReturn:
    remedy = next((remedy for names, remedy in REFUSED.items() if name in names.split()), "see docs/migrating.md")
    raise enums.UnavailableAttribute(f"poptorch.{name} is not available: {remedy}")


def nop(tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the first argument: there is no IPU to print, time or reserve memory on."""
    return tensor


ipu_print_tensor = set_available_memory = nop
NameScope = nullcontext


def serializedMatMul(lhs: Tensor, rhs: Tensor, mode: Any, factor: int = 0, keep_precision: bool = False) -> Tensor:
    """The product of two matrices, without serialization."""
    return torch.matmul(lhs, rhs)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """True: a device always replaces the IPU."""
    return True


def isRunningOnIpu() -> bool:
    """False: code that needs an IPU must not run."""
    return False


def setLogLevel(level: str | int) -> None:
    """Set the level of the logger ``penstock``, by PopTorch's name or number."""
    levels = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "ERR": 4, "OFF": 6}
    number = levels.get(level) if isinstance(level, str) else level
    enums.require(number in levels.values(), f"Invalid log level: {level!r}. Accepted values are {levels}")
    logging.getLogger("penstock").setLevel(max(1, 10 * int(number or 0)))
