"""Channels between processes: messages arrive as they were sent, or an error says why not."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.channel.base import ChannelError, ChannelOps, Endpoint
from penstock.engine.channel.process import BackwardChannel, ForwardChannel, ProcessChannel
from penstock.engine.message import Message, MessageMeta, TensorMeta, detach_outputs, memory_order, meta_of
from penstock.errors import PlanError

CPU = torch.device("cpu")


class Work:
    """A send or receive that completes in ``wait``."""

    def __init__(self, complete: Callable[[], object]) -> None:
        self.wait = complete


class FakeGroup:
    """Both group of a group of two, which copies the memory of tensors."""

    def __init__(self) -> None:
        self.memory: deque[Tensor] = deque()
        self.broken = False

    def rank(self) -> int:
        return 0

    def name(self) -> str:
        return "gloo"

    def send(self, tensors: list[Tensor], there: int, tag: int) -> Work:
        (tensor,) = tensors
        assert tensor.is_contiguous()
        self._check()
        memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # the bits only
        self.memory.append(memory[tensor.storage_offset() :][: tensor.numel()].clone())
        return Work(self._check)

    def recv(self, tensors: list[Tensor], there: int, tag: int) -> Work:
        (tensor,) = tensors
        self._check()
        return Work(partial(self._fill, tensor))

    def _fill(self, tensor: Tensor) -> None:
        self._check()
        tensor.view(-1).copy_(self.memory.popleft())

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("connection closed by peer")


def transfer(channel: ProcessChannel, payload: Any, k: int = 0) -> Any:
    ops = channel.ops(k)
    assert ops.post_recv is not None
    assert ops.wait_send is not None
    ops.send(payload)
    ops.wait_send()
    ops.post_recv()
    ops.wait_recv()
    return ops.get()


def forward(*messages: Message) -> tuple[ForwardChannel, FakeGroup]:
    group = FakeGroup()
    return ForwardChannel(Endpoint(group, 1, CPU), "stage 0", [meta_of(message) for message in messages]), group


def backward(meta: MessageMeta, present: Sequence[bool]) -> BackwardChannel:
    return BackwardChannel(Endpoint(FakeGroup(), 1, CPU), [meta], [present])


def is_short_path(ops: ChannelOps) -> bool:
    return hasattr(ops.wait_recv, "__self__")  # bound method of the in-flight message: the short path


X = torch.arange(12.0).reshape(3, 4)
Z = torch.complex(X, X + 1)


@pytest.mark.parametrize(
    "tensor",
    [X, X.t(), X[:, ::2], X[1:], torch.tensor(3.0), Z, Z.conj(), Z.conj().imag, Z[:1, :1].conj().imag, X[:0]],
    ids=["plain", "turned", "strided", "part", "number", "complex", "conj", "neg", "one neg", "empty"],
)
def test_tensors_arrive_with_their_values(tensor: Tensor) -> None:
    message, _ = detach_outputs(tensor)
    channel, _ = forward(message)
    assert is_short_path(channel.ops(0)) == (bool(tensor.numel()) and memory_order(tensor) is None)
    found = transfer(channel, message)
    assert memory_order(found.leaves[0]) == memory_order(tensor)
    assert (found.spec, found.wants, found.shared) == (None, (), ())
    assert torch.equal(found.leaves[0], tensor)
    assert not found.leaves[0].is_neg()
    (gradient,) = transfer(backward(_wanted(tensor), [True]), [tensor])
    assert torch.equal(gradient, tensor)


def _wanted(*tensors: Tensor) -> MessageMeta:
    leaves = tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    return MessageMeta(leaves, None, tuple(range(len(leaves))))


@pytest.mark.parametrize("value", [(X,), {"x": X, "n": 3}, (X, Z)], ids=["tuple", "number beside it", "two"])
def test_structures_arrive_complete(value: Any) -> None:
    message, _ = detach_outputs(value)
    channel, _ = forward(message)
    assert not is_short_path(channel.ops(0))
    found = transfer(channel, message)
    assert found.spec == message.spec
    for a, b in zip(found.leaves, message.leaves, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("other", [X[:2], X.double(), (X,), X.clone().requires_grad_()])
def test_output_of_another_format_raises(other: Any) -> None:
    channel, group = forward(detach_outputs(X)[0])
    with pytest.raises(PlanError, match=r"stage 0 gave .* inferred"):
        channel.ops(0).send(detach_outputs(other)[0])
    assert not group.memory


def test_a_missing_gradient_is_sent_as_zeros() -> None:
    assert torch.equal(transfer(backward(_wanted(X), [True]), [None])[0], torch.zeros(3, 4))


def test_only_present_gradients_are_sent() -> None:
    channel = backward(_wanted(X, Z), [False, True])
    assert not is_short_path(channel.ops(0))
    nothing, gradient = transfer(channel, [None, Z])
    assert nothing is None
    assert torch.equal(gradient, Z)


def test_each_microbatch_has_its_message() -> None:
    small, large = detach_outputs(X[:2])[0], detach_outputs(X)[0]
    channel, _ = forward(large, large, small)
    for k in range(3):
        assert channel.ops(k) == channel.ops(k)
    first, second = channel.ops(0), channel.ops(1)
    first.send(large)
    second.send(large._replace(leaves=[X + 1]))
    for ops in (first, second):
        assert ops.wait_send is not None
        ops.wait_send()
        assert ops.post_recv is not None
        ops.post_recv()
    first.wait_recv()
    second.wait_recv()
    assert torch.equal(second.get().leaves[0], X + 1)
    assert torch.equal(first.get().leaves[0], X)


@pytest.mark.parametrize("when", ["send", "wait_send", "post_recv", "wait_recv"])
def test_a_broken_channel_is_named_and_nothing_of_it_is_held(when: str) -> None:
    message, _ = detach_outputs(X)
    channel, group = forward(message)
    ops = channel.ops(0)
    before = {"wait_send": partial(ops.send, message), "wait_recv": ops.post_recv}.get(when)
    if before is not None:
        before()
    work = None if before is None else weakref.ref(channel.in_flight[0].work)
    group.broken = True
    call = partial(ops.send, message) if when == "send" else getattr(ops, when)
    with pytest.raises(ChannelError, match="the channel with rank 1 broke: connection closed by peer") as caught:
        call()
    gc.collect()
    assert work is None or work() is None, "the error's frames hold the connection"
    assert caught.value.peer == 1


def test_a_closed_channel_holds_nothing() -> None:
    message, _ = detach_outputs(X)
    channel, _ = forward(message)
    channel.ops(0).send(message)
    channel.close()
    assert (channel.in_flight[0].work, channel.in_flight[0].tensor) == (None, None)
