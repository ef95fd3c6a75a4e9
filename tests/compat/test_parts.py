"""The smaller modules of torchgpipe: micro-batches, checkpoints by themselves, dependencies, clocks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe import is_checkpointing, is_recomputing
from penstock.compat.torchgpipe.checkpoint import Checkpointing, checkpoint, enable_checkpointing, enable_recomputing
from penstock.compat.torchgpipe.dependency import fork, join
from penstock.compat.torchgpipe.microbatch import Batch, check, gather, scatter
from penstock.compat.torchgpipe.phony import get_phony
from penstock.compat.torchgpipe.pipeline import clock_cycles
from penstock.errors import PlanError

X, Y, Z = torch.tensor(42), torch.tensor(21), torch.tensor(7)


def test_a_batch_of_one_tensor() -> None:
    batch = Batch(X)
    assert batch.atomic
    assert batch.tensor is X
    assert batch.tensor_or_tensors is X
    assert (list(batch), len(batch), batch[0]) == ([X], 1, X)
    assert batch.call(lambda x: x).atomic
    batch[0] = Y
    assert batch.tensor is Y
    batch[:] = (Z,)
    assert batch.tensor is Z
    with pytest.raises(AttributeError, match="batch is atomic"):
        _ = batch.tensors
    for index in (1, -1):
        with pytest.raises(IndexError, match="atomic batch allows index 0 only"):
            batch[index]
    with pytest.raises(IndexError, match="atomic batch cannot be replaced with multiple tensors"):
        batch[:] = (X, Y)


def test_a_batch_of_several_tensors() -> None:
    batch = Batch((X, Y), 3)
    assert not batch.atomic
    assert batch.tensors == (X, Y)
    assert (list(batch), len(batch), batch[0], batch[1]) == ([X, Y], 2, X, Y)
    assert not batch.call(lambda x: x).atomic
    assert batch.call(lambda x: x[0]).index == 3
    batch[1] = Z
    assert batch.tensors == (X, Z)
    batch[:] = (Z, Y)
    assert batch.tensors == (Z, Y)
    with pytest.raises(AttributeError, match="not atomic batch"):
        _ = batch.tensor
    with pytest.raises(NotImplementedError, match=r"only slice \[:\] supported"):
        batch[1:] = (X,)


def test_check_takes_tensors_and_tuples_of_them() -> None:
    check(X)
    check((X, (Y, Z)))
    for value in (42, "str", (X, "str"), [X], ((X, 1),)):
        with pytest.raises(TypeError, match="expected Tensor, but got"):
            check(value)  # type: ignore[arg-type]


def test_scatter_and_gather_are_inverse() -> None:
    one, other = torch.arange(14.0).view(7, 2), torch.arange(7)
    parts = scatter((one, other), chunks=3)
    assert [len(part[0]) for part in parts] == [3, 2, 2]
    assert [part.index for part in parts] == [0, 1, 2]
    joined = gather(parts)
    assert torch.equal(joined[0], one)
    assert torch.equal(joined[1], other)
    assert [part.tensor.shape for part in scatter(one, chunks=8)] == [(1, 2)] * 7
    assert torch.equal(gather(scatter(one, 4)), one)  # type: ignore[arg-type]


def test_tensors_of_a_tuple_may_differ_in_size_if_they_have_as_many_parts() -> None:
    parts = scatter((torch.zeros(2, 1), torch.zeros(5, 2)), chunks=2)
    assert [[tuple(tensor.shape) for tensor in part] for part in parts] == [[(1, 1), (3, 2)], [(1, 1), (2, 2)]]
    one, other = gather(parts)
    assert (one.shape, other.shape) == ((2, 1), (5, 2))
    with pytest.raises(PlanError, match=r"their first dimensions are \[1, 5\]"):
        scatter((torch.zeros(1), torch.zeros(5)), chunks=2)


def test_what_has_no_samples_goes_to_every_part() -> None:
    scale = torch.tensor(2.0)
    parts = scatter((scale, torch.zeros(4)), chunks=2)
    assert [(part[0].item(), len(part[1])) for part in parts] == [(2, 2), (2, 2)]
    assert [len(part) for part in scatter((), chunks=2)] == [0]
    assert [part.tensor.shape for part in scatter(torch.zeros(0, 3), chunks=2)] == [(0, 3)]


def test_a_batch_is_tied_to_others_by_a_tensor_with_a_gradient() -> None:
    a, b = torch.rand(1), torch.rand(1, requires_grad=True)
    assert Batch(X).anchor == Batch(b).anchor == Batch((b, a)).anchor == Batch((X, Y)).anchor == Batch(()).anchor == 0
    assert Batch((X, a)).anchor == Batch((a, b)).anchor == 1
    assert Batch((X, a, b)).anchor == 2


def test_clocks() -> None:
    assert list(clock_cycles(1, 3)) == [[(0, 0)], [(0, 1)], [(0, 2)]]
    assert list(clock_cycles(3, 1)) == [[(0, 0)], [(1, 0)], [(2, 0)]]
    assert list(clock_cycles(3, 3)) == [
        [(0, 0)],
        [(1, 0), (0, 1)],
        [(2, 0), (1, 1), (0, 2)],
        [(2, 1), (1, 2)],
        [(2, 2)],
    ]


# ── checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────────


class Log(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, log: list[str], x: Tensor) -> Tensor:
        ctx.name, ctx.log = name, log
        log.append(f"{name}:forward")
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor]:
        ctx.log.append(f"{ctx.name}:backward")
        return None, None, grad


def test_a_dependency_puts_one_checkpoint_before_another() -> None:
    log: list[str] = []
    a, b = torch.rand(1, requires_grad=True), torch.rand(1, requires_grad=True)
    a = checkpoint(partial(Log.apply, "a", log), a)  # type: ignore[assignment]
    a, phony = fork(a)
    b = checkpoint(partial(Log.apply, "b", log), join(b, phony))  # type: ignore[assignment]
    torch.cat((a, b)).sum().backward()
    assert log == ["a:forward", "b:forward", "b:forward", "b:backward", "a:forward", "a:backward"]


def test_the_result_of_a_checkpoint_is_that_of_the_function() -> None:
    layer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x, y = torch.rand(3, 4, requires_grad=True), torch.ones(3, 4)
    for function in (layer, partial(checkpoint, layer)):
        torch.manual_seed(0)
        (function(x) * y).sum().backward()
    once = x.grad / 2 if x.grad is not None else None
    x.grad = None
    torch.manual_seed(0)
    (layer(x) * y).sum().backward()
    assert torch.allclose(x.grad, once)  # type: ignore[arg-type]


def test_without_an_input_that_wants_a_gradient_the_parameters_get_theirs() -> None:
    a = torch.rand(1, requires_grad=True)
    checkpoint(lambda x: x * a, torch.ones(1)).backward()  # type: ignore[union-attr]
    assert a.grad == 1
    batch = Batch(torch.rand(1))
    checkpointing = Checkpointing(lambda x: x * 2, batch)
    batch = checkpointing.checkpoint()
    assert batch[0].requires_grad
    checkpointing.recompute(batch)
    batch.tensor.backward()


def test_autocast_holds_in_the_second_run() -> None:
    layer, x = nn.Linear(4, 4, bias=False), torch.rand(2, 4, requires_grad=True)
    kinds: list[torch.dtype] = []

    def run(x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        kinds.append(y.dtype)
        return y

    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(run, x)
    y.sum().backward()  # type: ignore[union-attr]
    assert kinds == [torch.bfloat16] * 2


def test_outputs_without_gradient_and_a_second_backward() -> None:
    x = torch.rand(1, requires_grad=True)
    doubled, _ = checkpoint(lambda x: (x * 2, torch.rand(1)), x)
    doubled.backward(retain_graph=True)
    doubled.backward()
    assert x.grad == 4


def test_a_function_can_tell_the_first_run_from_the_second() -> None:
    log: list[tuple[bool, bool]] = []

    def look(x: Tensor) -> Tensor:
        log.append((is_checkpointing(), is_recomputing()))
        return x

    look(checkpoint(look, torch.rand(1, requires_grad=True))).backward()  # type: ignore[arg-type]
    assert log == [(True, False), (False, False), (False, True)]
    with enable_checkpointing(), enable_recomputing():
        assert is_checkpointing()
        assert is_recomputing()
    assert not is_checkpointing()


# ── dependencies ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_fork_and_join_change_nothing() -> None:
    a, b = torch.rand(2, requires_grad=True), torch.rand(2)
    value, phony = fork(a)
    assert torch.equal(value, a)
    assert phony.shape == (0,)
    joined = join(b, phony)
    assert joined.requires_grad
    (value * 2 + joined).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [2, 2]
    with torch.no_grad():
        assert not fork(a)[1].requires_grad
        assert join(b, phony) is b
    assert fork(b)[0] is b


def test_phonies_are_kept() -> None:
    cpu = torch.device("cpu")
    assert get_phony(cpu, requires_grad=True) is get_phony(cpu, requires_grad=True)
    assert get_phony(cpu, requires_grad=True) is not get_phony(cpu, requires_grad=False)
