"""As in torchgpipe."""

from penstock.compat.torchgpipe.stream import (
    AbstractStream,
    CPUStream,
    CPUStreamType,
    as_cuda,
    current_stream,
    default_stream,
    get_device,
    is_cuda,
    new_stream,
    record_stream,
    use_device,
    use_stream,
    wait_stream,
)

__all__ = [
    "AbstractStream",
    "CPUStream",
    "CPUStreamType",
    "as_cuda",
    "current_stream",
    "default_stream",
    "get_device",
    "is_cuda",
    "new_stream",
    "record_stream",
    "use_device",
    "use_stream",
    "wait_stream",
]
