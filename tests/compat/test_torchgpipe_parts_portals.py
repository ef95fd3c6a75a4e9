"""Portals, which take skips around autograd's graph."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor

from penstock.compat.torchgpipe.dependency import fork, join
from penstock.compat.torchgpipe.skip.portal import Portal, PortalCopy, PortalOrange
from penstock.compat.torchgpipe.stream import CPUStream, default_stream

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


# ── the life of a tensor ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("life", [0, 1, 2, 3])
def test_a_portal_lets_go_of_its_tensor_with_the_last_use(life: int) -> None:
    tensor = torch.rand(1)
    gone = weakref.ref(tensor)
    portal = Portal(tensor, tensor_life=life)
    for left in range(life, 0, -1):
        portal.check_tensor_life()
        assert (portal.tensor_life, portal.tensor) == (left, tensor)
        assert portal.use_tensor() is tensor
    del tensor
    assert (portal.tensor_life, portal.tensor, gone()) == (0, None, None)
    for use in (portal.check_tensor_life, portal.use_tensor, lambda: portal.orange(torch.zeros(0))):
        with pytest.raises(RuntimeError, match="tensor in portal has been removed"):
            use()


def test_another_tensor_has_a_life_of_its_own() -> None:
    portal = Portal(torch.rand(1), tensor_life=1)
    portal.use_tensor()
    other = torch.rand(1)
    portal.put_tensor(other, tensor_life=1)
    assert portal.use_tensor() is other
    assert portal.tensor is None


def test_a_gradient_is_used_once() -> None:
    portal = Portal(torch.rand(1), tensor_life=1)
    with pytest.raises(RuntimeError, match="grad in portal has been removed or never set"):
        portal.use_grad()
    grad = torch.rand(1)
    portal.put_grad(grad)
    assert portal.use_grad() is grad
    with pytest.raises(RuntimeError, match="grad in portal has been removed or never set"):
        portal.use_grad()


# ── through a portal ─────────────────────────────────────────────────────────────────────────────────────────────


def through(portal: Portal, line: Tensor) -> tuple[Tensor, Tensor | None]:
    """The line after it was tied to the portal where the tensor goes in, is moved and comes out; and the tensor."""
    line = join(line, portal.blue())
    line, phony = fork(line)
    line = join(line, portal.copy(CPUStream, CPUStream, phony))
    line, phony = fork(line)
    return line, portal.orange(phony)


def test_a_tensor_and_its_gradient_go_around_the_graph() -> None:
    skip, line = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    portal = Portal(skip, tensor_life=2)
    out, taken = through(portal, line)
    assert taken is not None
    assert torch.equal(taken, skip)
    assert type(taken.grad_fn) is PortalOrange._backward_cls
    assert portal.tensor is None
    (out + taken * 3).sum().backward()
    assert (skip.grad.tolist(), line.grad.tolist()) == ([3, 3], [1, 1])  # type: ignore[union-attr]
    assert portal.grad is None


@pytest.mark.parametrize(
    "skip", [torch.rand(2), torch.arange(2), None], ids=["without gradient", "integers", "nothing"]
)
def test_what_has_no_gradient_goes_through(skip: Tensor | None) -> None:
    line = torch.rand(2, requires_grad=True)
    out, taken = through(Portal(skip, tensor_life=2), line)
    assert (taken is None) if skip is None else torch.equal(taken, skip)  # type: ignore[arg-type]
    (out * (2 if taken is None else taken)).sum().backward()
    assert line.grad is not None
    assert torch.equal(line.grad, torch.full((2,), 2.0) if taken is None else taken.float())


def test_nothing_makes_no_nodes() -> None:
    portal = Portal(None, tensor_life=2)
    phony = torch.zeros(0, requires_grad=True)
    assert not portal.blue().requires_grad
    assert not portal.copy(CPUStream, CPUStream, phony).requires_grad
    assert portal.orange(phony) is None


def test_of_a_tensor_that_is_not_used_afterwards_there_is_no_gradient() -> None:
    skip, line = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    out, _ = through(Portal(skip * 1, tensor_life=2), line)
    out.sum().backward()
    assert line.grad is not None
    assert skip.grad is None


def test_the_graph_can_be_gone_through_twice() -> None:
    skip, line = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True)
    out, taken = through(Portal(skip, tensor_life=2), line)
    loss = (out * taken).sum()  # type: ignore[operator]
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(skip.grad, 2 * line)  # type: ignore[arg-type]


@pytest.mark.cuda
@NO_GPU
def test_a_portal_takes_its_tensor_to_another_device() -> None:
    cpu, gpu = default_stream(torch.device("cpu")), default_stream(torch.device("cuda"))
    skip, line = torch.rand(2, requires_grad=True), torch.rand(2, requires_grad=True, device="cuda")
    portal = Portal(skip, tensor_life=2)
    blue = portal.blue()
    moved = portal.copy(cpu, gpu, blue)
    assert (blue.device.type, moved.device.type) == ("cpu", "cuda")
    assert type(moved.grad_fn) is PortalCopy._backward_cls
    out, phony = fork(join(line, moved))
    taken = portal.orange(phony)
    assert taken is not None
    assert taken.is_cuda
    (out + taken * 3).sum().backward()
    assert skip.grad is not None
    assert skip.grad.tolist() == [3, 3]
