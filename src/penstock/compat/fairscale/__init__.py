"""fairscale's pipelines, version 0.4.13, on Penstock: ``fairscale.nn.Pipe`` and ``AsyncPipe``."""

from functools import partial
from typing import NoReturn

from penstock.compat import publish, torchgpipe
from penstock.compat.fairscale import pipe
from penstock.compat.torchgpipe import balance, gpipe

__version__ = "0.4.13"


def _no_attribute(name: str) -> NoReturn:
    remedy = f"no nn.{name}. If fairscale is installed, import it from its subpackage, such as nn.data_parallel"
    raise AttributeError(f"the facade has fairscale's Pipe and AsyncPipe, and nothing else of it: {remedy}")


_modules = (torchgpipe, balance, gpipe, pipe)
_names = {name: entry for module in _modules for name, entry in vars(module).items()}
_names |= {**pipe.MODEL_PARALLEL, "__getattr__": _no_attribute}
_names["verify_module"] = partial(gpipe.verify_module, duplicate_parameters=True)
_parallel = " ".join(pipe.MODEL_PARALLEL)

publish(
    __name__,
    _names,
    {
        "nn": "Pipe __getattr__",
        "nn.model_parallel": _parallel,
        "nn.model_parallel.initialize": _parallel,
        "nn.pipe": "AsyncPipe LazyModule Pipe is_checkpointing is_recomputing",
        "nn.pipe.async_pipe": "AsyncPipe",
        "nn.pipe.balance": "balance_by_size balance_by_time balance_cost",
        "nn.pipe.pipe": "Pipe verify_module",
        "nn.pipe.types": "InputDevice LazyModule TensorOrTensors Tensors",
        **{f"nn.pipe.{path}": names for path, names in torchgpipe.MODULES.items()},
    },
)
