"""As in torchgpipe."""

from penstock.compat.torchgpipe.checkpoint import (
    Checkpointing,
    Function,
    TensorOrTensors,
    checkpoint,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
)

__all__ = [
    "Checkpointing",
    "Function",
    "TensorOrTensors",
    "checkpoint",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]
