"""torchgpipe's ``microbatch``: ``Batch``, ``check``, ``scatter``, ``gather``."""

from __future__ import annotations

import pytest
import torch

from penstock.compat.torchgpipe.microbatch import Batch, check, gather, scatter
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
