"""The ranks of one pipeline are given the same mini-batch, or None for what their stages do not use.

A DistributedSampler over all processes gives each of them other samples, and so does transformers.Trainer. The first
rank's inputs were then trained with the last rank's targets, without a word: the loss fell, to nothing of use.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import penstock as ps
from penstock.engine.microbatch import sample_values
from penstock.engine.step_protocol import COMPARE_EVERY
from tests.support.models import assert_same, batch, mlp, plain_step
from tests.support.ranks import Ranks

# ── one pipeline ─────────────────────────────────────────────────────────────────────────────────────────────────


def refused(rank: int, what: str, dynamic: bool) -> str:
    """The error of a step on different mini-batches; the next one, on the same, is right."""
    x, y = batch(), batch(seed=5)
    if rank == 1:
        x = {"inputs": batch(seed=2), "samples": batch(6), "dtype": x.double()}.get(what, x)
        y = batch(seed=6) if what == "targets" else y
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with ps.Pipeline(ps.split(model, stages=2), F.mse_loss, microbatches=4, mesh=ps.Mesh(), dynamic=dynamic) as pipe:
        with pytest.raises(ps.PlanError) as error:
            pipe.step(x, y)
        assert_same(pipe.step(batch(), batch(seed=5)).loss, expected.loss)
    return str(error.value)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("inputs", "element 0 of value 0 of the inputs is"),
        ("targets", "element 0 of value 0 of the targets is"),
        ("samples", r"value 0 of the inputs is float32\[8, 4\] on rank 0, but float32\[6, 4\] on rank 1"),
        ("dtype", r"value 0 of the inputs is float32\[8, 4\] on rank 0, but float64\[8, 4\] on rank 1"),
    ],
)
def test_different_mini_batches_are_refused_on_all_ranks(two: Ranks, what: str, named: str, dynamic: bool) -> None:
    first, second = two.check(refused, what, dynamic)
    assert first == second
    assert re.search(named, first)
    for cause in ("ranks 0 and 1", "DistributedSampler", "transformers.Trainer", "ps.DataLoader", "mesh.data_rank"):
        assert cause in first


def later(rank: int, since: int, call: str) -> int:
    """The ranks' data differ from some mini-batch on; returns the number of the one that is refused."""
    with ps.Pipeline(ps.split(mlp(), stages=2), F.mse_loss, microbatches=2, mesh=ps.Mesh()) as pipe:
        for number in range(1, 3 * COMPARE_EVERY):
            x = batch(4, seed=number + 1000 * rank * (number >= since))
            try:
                if call == "step":
                    pipe.step(x, batch(4))
                elif call == "evaluate":
                    pipe.evaluate(x, batch(4))
                else:
                    outputs = pipe.forward(x)
                    if outputs is not None:
                        outputs.sum().backward()
            except ps.PlanError:
                return number
    raise AssertionError("no mini-batch was refused")


@pytest.mark.parametrize(
    ("call", "since", "seen"),
    [("step", 2, 2), ("step", 5, 8), ("step", 33, 64), ("step", 65, 128), ("evaluate", 3, 4), ("forward", 3, 4)],
)
def test_known_shapes_are_compared_more_rarely(two: Ranks, call: str, since: int, seen: int) -> None:
    assert two.check(later, since, call) == [seen, seen]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x * mask))
        return out


def in_parts(rank: int) -> None:
    """Each rank is given what its stages use, or more of the same."""
    torch.manual_seed(0)
    model, mask, y = Masked(), batch(1, seed=3), batch(seed=5)
    whole: dict[str, Any] = {"x": batch(), "mask": ps.Broadcast(mask)}
    expected = F.mse_loss(model(batch(), mask), y).detach()
    with ps.Pipeline(ps.split(model, cuts=["second"]), F.mse_loss, microbatches=4, mesh=ps.Mesh()) as pipe:
        for others in (whole, None, {"x": None, "mask": None}, {**whole, "x": None}):
            for targets in (y, None):
                inputs = whole if rank == 0 else others
                assert_same(pipe.step(inputs, y if rank == 1 else targets).loss, expected)


def test_a_rank_may_be_given_what_its_stages_use_alone(two: Ranks) -> None:
    two.check(in_parts)


# ── replicas ─────────────────────────────────────────────────────────────────────────────────────────────────────


def sampled(rank: int, over: str) -> str | None:
    """Batches of torch's own loader, with a sampler over all processes or over the replicas."""
    mesh = ps.Mesh(data=2, pipe=2)
    dataset = TensorDataset(batch(32), batch(32, seed=5))
    replicas = (mesh.data, mesh.data_rank) if over == "replicas" else (4, rank)
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, *replicas, shuffle=False))
    with ps.Pipeline(ps.split(mlp(), stages=2), F.mse_loss, microbatches=2, mesh=mesh) as pipe:
        try:
            for x, y in loader:
                pipe.step(x, y)
        except ps.PipelineError as error:
            return str(error)
    return None


def test_replicas_have_different_data_and_their_ranks_the_same(four: Ranks) -> None:
    assert four.check(sampled, "replicas") == [None] * 4
    errors = four.check(sampled, "processes")
    assert len(set(errors)) == 1, "one cause, on the ranks of both pipelines"
    assert "of one pipeline were given different mini-batches" in errors[0]


# ── samples of values ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sample_sees_data_between_padding() -> None:
    images = torch.zeros(2, 16, 28, 28)
    images[:, :, 8:20, 8:20] = torch.rand(2, 16, 12, 12)
    text = torch.zeros(2, 64, 128, dtype=torch.long)
    text[:, :, 1:20] = torch.randint(50, 1000, (2, 64, 19))
    for one, other in (images, text):
        assert sample_values(one, "inputs") == sample_values(one.clone(), "inputs")
        assert sample_values(one, "inputs") != sample_values(other, "inputs")


class Image(Tensor):
    """As torchvision's ``tv_tensors`` are."""


def test_any_value_has_a_sample() -> None:
    wide = torch.arange(10_000.0).view(100, 100)
    assert sample_values(wide.t(), "inputs") == sample_values(wide.t().contiguous(), "inputs"), "strides do not matter"
    assert sample_values(wide.as_subclass(Image), "inputs") == sample_values(wide, "inputs"), "nor do subclasses"
    nan = torch.tensor([float("nan")])
    values = [nan, nan.bfloat16(), nan.cfloat(), torch.tensor(3), torch.ones(0, 2), torch.eye(2).to_sparse(), True, "a"]
    values += [torch.ones(2, device="meta"), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), object()]
    sample = sample_values(values, "targets")
    assert sample == sample_values(values, "targets")
    assert {f"value {i} of the targets" for i in range(len(values))} < sample.keys()
    assert sample_values(None, "inputs") == sample_values((None, [None]), "inputs") == {}, "nothing was given"
