"""CUDA streams, with one object that stands for the CPU's, so that code for both is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor

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


class CPUStreamType:
    """The type of ``CPUStream``."""

    def __repr__(self) -> str:
        return "CPUStream"


CPUStream = CPUStreamType()
"""In the place of a stream: what is done on the CPU is done when the call returns."""

AbstractStream: TypeAlias = torch.cuda.Stream | CPUStreamType


def new_stream(device: torch.device) -> AbstractStream:
    """A stream of its own."""
    return torch.cuda.Stream(device) if device.type == "cuda" else CPUStream  # type: ignore[no-untyped-call]


def current_stream(device: torch.device) -> AbstractStream:
    """The stream that work on this device goes to now."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPUStream


def default_stream(device: torch.device) -> AbstractStream:
    """The stream that work on this device goes to where none was chosen."""
    return torch.cuda.default_stream(device) if device.type == "cuda" else CPUStream


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """A GPU is the current one meanwhile."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            yield
    else:
        yield


@contextmanager
def use_stream(stream: AbstractStream | None) -> Iterator[None]:
    """A stream is the current one of its device meanwhile, and its device the current one; None leaves them."""
    if stream is not None and is_cuda(stream):
        with torch.cuda.stream(stream):
            yield
    else:
        yield


def get_device(stream: AbstractStream) -> torch.device:
    """The device that a stream is of."""
    return stream.device if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """What is given to ``source`` from now on waits for what ``target`` has by now. The CPU waits at once."""
    if not is_cuda(target):
        return
    if is_cuda(source):
        source.wait_stream(target)
    else:
        target.synchronize()


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """The tensor's memory is given to nobody else before ``stream`` has done what it has by then."""
    if is_cuda(stream):
        tensor.record_stream(stream)


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether this is a stream, and not the CPU's placeholder."""
    return stream is not CPUStream


def as_cuda(stream: AbstractStream) -> torch.cuda.Stream:
    """The same stream, which is known to be one of a GPU."""
    assert is_cuda(stream), "the CPU has no stream"
    return stream
