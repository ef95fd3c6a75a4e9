"""Streams, with the CPU's placeholder, and the functions of autograd that copy between them and wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from penstock.compat.torchgpipe.copy import Copy, Wait
from penstock.compat.torchgpipe.stream import (
    AbstractStream,
    CPUStream,
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

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cpu_has_one_stream() -> None:
    for make in (new_stream, current_stream, default_stream):
        assert make(CPU) is CPUStream
        assert make(torch.device("cpu", 0)) is CPUStream
    assert get_device(CPUStream) == CPU
    assert not is_cuda(CPUStream)
    with pytest.raises(AssertionError, match="the CPU has no stream"):
        as_cuda(CPUStream)


def test_on_the_cpu_nothing_is_to_be_done() -> None:
    tensor = torch.rand(3)
    before = tensor.clone()
    with use_device(CPU), use_stream(CPUStream):
        assert current_stream(CPU) is CPUStream
        wait_stream(CPUStream, CPUStream)
        record_stream(tensor, CPUStream)
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("use", [use_device(CPU), use_stream(CPUStream)], ids=["device", "stream"])
def test_an_exception_comes_out_of_the_contexts(use: Iterator[None]) -> None:
    with pytest.raises(ZeroDivisionError), use:  # type: ignore[attr-defined]
        _ = 1 / 0


class Told:
    """In the place of a GPU's stream: tells what it was asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Told) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def synchronize(self) -> None:
        self.log.append(f"the CPU waits for {self.name}")


@pytest.mark.parametrize(
    ("source", "target", "forward", "backward"),
    [
        ("a", "b", ["a waits for b"], ["b waits for a"]),
        ("CPU", "b", ["the CPU waits for b"], []),
        ("a", "CPU", [], ["the CPU waits for a"]),
        ("CPU", "CPU", [], []),
    ],
)
def test_who_waits_for_whom(source: str, target: str, forward: list[str], backward: list[str]) -> None:
    log: list[str] = []
    streams: Any = {"a": Told("a", log), "b": Told("b", log), "CPU": CPUStream}
    wait_stream(streams[source], streams[target])
    assert log == forward
    x = torch.rand(2, requires_grad=True)
    log.clear()
    (y,) = Wait.apply(streams[target], streams[source], x)  # type: ignore[no-untyped-call]
    assert log == forward
    log.clear()
    y.sum().backward()
    assert log == backward


@pytest.mark.cuda
@NO_GPU
def test_a_gpu_has_streams() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    stream = new_stream(gpu)
    assert is_cuda(stream)
    assert as_cuda(stream) is stream
    assert get_device(stream) == gpu
    assert stream != default_stream(gpu)
    assert current_stream(gpu) == torch.cuda.current_stream(gpu)
    with use_device(gpu), use_stream(stream):
        assert current_stream(gpu) == stream
    assert current_stream(gpu) != stream


def slow(stream: AbstractStream) -> torch.Tensor:
    """Ones that are zeros until the stream has worked for a while."""
    with use_stream(stream):
        tensor = torch.zeros(100, device=get_device(stream))
        if is_cuda(stream):
            torch.cuda._sleep(100_000_000)
        return tensor.add_(1)


@pytest.mark.cuda
@NO_GPU
def test_the_cpu_and_streams_wait_for_streams() -> None:
    gpu = torch.device("cuda")
    source, target = new_stream(gpu), new_stream(gpu)
    tensor = slow(target)
    wait_stream(source, target)
    with use_stream(source):
        assert tensor.sum().item() == 100
    tensor = slow(target)
    wait_stream(CPUStream, target)
    assert as_cuda(target).query()
    wait_stream(target, CPUStream)


@pytest.mark.cuda
@NO_GPU
@pytest.mark.parametrize("shift", [0, 3])
def test_memory_that_a_stream_has_yet_to_use_is_not_given_away(shift: int) -> None:
    gpu = torch.device("cuda")
    stream = new_stream(gpu)
    whole = torch.ones(1 << 20, device=gpu)
    view = whole[shift:]
    wait_stream(stream, current_stream(gpu))
    with use_stream(stream):
        torch.cuda._sleep(100_000_000)
        total = view.sum()
    record_stream(view, stream)
    address, size = whole.data_ptr(), view.numel()
    del view, whole
    others = [torch.zeros(1 << 20, device=gpu) for _ in range(3)]
    assert address not in [other.data_ptr() for other in others]
    wait_stream(CPUStream, stream)
    assert total.item() == size


# ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────


PAIRS = [
    ("cpu", "cpu"),
    *(
        pytest.param(*pair, marks=[pytest.mark.cuda, NO_GPU])
        for pair in [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")]
    ),
]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_copy_that_is_waited_for_has_the_data_and_its_gradient_comes_back(source: str, target: str) -> None:
    before, after = new_stream(torch.device(source)), new_stream(torch.device(target))
    x = slow(before).requires_grad_()
    (y,) = Copy.apply(before, after, x)  # type: ignore[no-untyped-call]
    (y,) = Wait.apply(before, after, y)  # type: ignore[no-untyped-call]
    assert y.device == get_device(after)
    with use_stream(after):
        assert y.sum().item() == 100
        (y * 3).norm().backward()
    wait_stream(CPUStream, before)
    assert x.grad is not None
    assert x.grad.device == x.device
    assert torch.allclose(x.grad.cpu(), torch.full((100,), 0.3))


def test_several_tensors_go_through_one_node() -> None:
    for function in (Copy, Wait):
        a, b = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
        c, d = function.apply(CPUStream, CPUStream, a, b)  # type: ignore[no-untyped-call]
        assert c.grad_fn is d.grad_fn
        assert type(c.grad_fn) is function._backward_cls  # type: ignore[attr-defined]
        (c * 2 + d * 3).sum().backward()
        assert (a.grad.tolist(), b.grad.tolist()) == ([2, 2], [3, 3])  # type: ignore[union-attr]


def test_integers_go_along_without_a_gradient() -> None:
    for function in (Copy, Wait):
        x = torch.rand(3, requires_grad=True)
        ids, y = function.apply(CPUStream, CPUStream, torch.arange(3), x)  # type: ignore[no-untyped-call]
        assert not ids.requires_grad
        assert ids.tolist() == [0, 1, 2]
        (y * ids).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_copy_may_be_changed_in_place(count: int) -> None:
    """A layer such as ``nn.ReLU(inplace=True)`` may come first in a partition."""
    for function in (Copy, Wait):
        x = torch.randn(8, requires_grad=True)
        y, *_ = function.apply(CPUStream, CPUStream, *[x * 1] * count)  # type: ignore[no-untyped-call]
        y.relu_().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, (x > 0).float())


def test_a_change_in_place_after_a_copy_is_seen_by_autograd() -> None:
    """On one device a copy shares its memory: what was saved before must not be changed behind autograd's back."""
    x = torch.rand(3, requires_grad=True)
    saved = x.exp()  # whose backward needs what it returns
    (y,) = Copy.apply(CPUStream, CPUStream, saved)  # type: ignore[no-untyped-call]
    (y,) = Wait.apply(CPUStream, CPUStream, y)  # type: ignore[no-untyped-call]
    y.relu_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
