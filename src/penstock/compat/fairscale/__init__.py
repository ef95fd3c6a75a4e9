"""fairscale's pipelines, version 0.4.13, on Penstock: ``fairscale.nn.Pipe`` and ``AsyncPipe``."""

from typing import NoReturn

from penstock.compat import publish, torchgpipe
from penstock.compat.fairscale import model_parallel, pipe
from penstock.compat.torchgpipe import balance, batchnorm, microbatch, skip

__version__ = "0.4.13"


def _no_attribute(name: str) -> NoReturn:
    raise AttributeError(
        f"penstock.compat.fairscale has fairscale's pipelines, Pipe and AsyncPipe, and nothing else of it: no nn.{name}"
    )


def _names(module: object) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}  # type: ignore[attr-defined]


_flags = {"is_checkpointing": torchgpipe.is_checkpointing, "is_recomputing": torchgpipe.is_recomputing}
_types = {name: getattr(pipe, name) for name in ("InputDevice", "LazyModule", "TensorOrTensors", "Tensors")}

publish(
    __name__,
    {
        "nn": {"Pipe": pipe.Pipe, "__getattr__": _no_attribute},
        "nn.model_parallel": _names(model_parallel),
        "nn.model_parallel.initialize": _names(model_parallel),
        "nn.pipe": {"AsyncPipe": pipe.AsyncPipe, "LazyModule": pipe.LazyModule, "Pipe": pipe.Pipe, **_flags},
        "nn.pipe.async_pipe": {"AsyncPipe": pipe.AsyncPipe},
        "nn.pipe.balance": _names(balance),
        "nn.pipe.balance.blockpartition": {"solve": balance.solve},
        "nn.pipe.balance.profile": {"layerwise_sandbox": balance.layerwise_sandbox},
        "nn.pipe.batchnorm": _names(batchnorm),
        "nn.pipe.microbatch": _names(microbatch),
        "nn.pipe.pipe": {"Pipe": pipe.Pipe, "verify_module": pipe.verify_children},
        "nn.pipe.skip": _names(skip),
        "nn.pipe.skip.namespace": {"Namespace": skip.Namespace},
        "nn.pipe.skip.skippable": torchgpipe.SKIPPABLE,
        "nn.pipe.types": _types,
    },
)
