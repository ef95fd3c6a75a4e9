"""As in torchgpipe."""

from penstock.compat.torchgpipe.microbatch import Batch, TensorOrTensors, Tensors, check, gather, scatter

__all__ = ["Batch", "TensorOrTensors", "Tensors", "check", "gather", "scatter"]
