"""``penstock.compat.varuna``: every rank's loop gives the plain model's training."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from tests.compat.varuna_models import (
    TIES,
    Tower,
    Words,
    adam,
    data,
    plain_run,
    share,
    tied,
    tokens,
    wrapped,
)
from tests.support.models import assert_same
from tests.support.ranks import Ranks


def in_map(rank: int, stages: str) -> bool:
    return str(rank) in stages.replace(";", ",").split(",")


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────


def trains(rank: int, stages: str, samples: int, clip: float | None, options: dict[str, Any]) -> Any:
    if not in_map(rank, stages):
        return None
    plain = Tower(norm=options.pop("norm", False))
    batches = [data(samples, seed) for seed in range(3)]
    losses, norms, state = plain_run(plain, batches, clip)
    with wrapped(plain, stages, **options) as model:
        optimizer = adam(model)
        model.set_optimizer(optimizer)
        assert (model.partitions, model.data_depth) == (stages.count(";"), stages.split(";")[0].count(",") + 1)
        for batch, loss, norm in zip(batches, losses, norms, strict=True):
            mine = share(batch, model.rank_within_stage, model.data_depth)
            found = model.step(mine, clip_grad_max_norm=clip)
            assert model.pipeline.last is not None
            assert model.pipeline.last.microbatches == math.ceil(len(mine["x"]) / model.micro_batch_size)
            assert isinstance(found[0], float)
            assert found[1] is False
            assert found[0] == pytest.approx(loss, rel=1e-5)
            assert found[2] == pytest.approx(norm, rel=1e-5)
            optimizer.step()
            model.zero_grad()
            assert all(parameter.grad is None for parameter in model.parameters())
        own = model.state_dict()
        assert_same(own, {name: state[name] for name in own})
        evaluated = model.eval().evaluate(share(data(7, 9), model.rank_within_stage, model.data_depth))
    plain.load_state_dict(state)
    assert evaluated == pytest.approx(plain.eval()(**data(7, 9)).item(), rel=1e-5)
    return list(own), (*found, evaluated)


@pytest.mark.parametrize(
    ("stages", "samples", "clip", "options"),
    [
        ("0;1;2;", 10, None, {}),
        ("2;0;1;", 10, 0.1, {"chunk_size": 4}),  # ranks in any order; micro-batches of 4, 3 and 3
        ("0,2;1,3;", 10, None, {}),
        ("3,0;1,2;", 11, 0.1, {}),  # replicas of 6 and 5 samples
        ("1;", 10, None, {"norm": True, "chunk_size": 10}),  # one stage, one micro-batch: with running statistics
        ("2,1,3;", 7, None, {"chunk_size": 1}),
        ("0;2;", 25, None, {"batch_size": 10}),  # larger than it was said to be: micro-batches stay small
    ],
)
def test_training_is_the_plain_models(
    four: Ranks, stages: str, samples: int, clip: float | None, options: dict[str, Any]
) -> None:
    found = [row for row in four.check(trains, stages, samples, clip, options) if row is not None]
    assert len({numbers for _, numbers in found}) == 1  # the same on every rank
    names = {name for row, _ in found for name in row}
    assert names == set(Tower(norm=options.get("norm", False)).state_dict())


def sizes_seen(rank: int, stages: str) -> Any:
    """How many samples, and of the mask, each forward of the first and the last stage gets."""
    model = Tower()
    seen: list[int] = []
    model.blocks[0].register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    with wrapped(model, stages, chunk_size=4) as wrapped_model:
        plain = Tower()
        batch = {**data(10), "mask": torch.rand(1, 6)}
        loss, _, _ = wrapped_model.step(batch)
        expected = plain(**batch)
        expected.backward()
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert_same(
            {n: p.grad for n, p in wrapped_model.named_parameters()},
            {n: gradients[n] for n, _ in wrapped_model.named_parameters()},
        )
        first, _, _ = wrapped_model.step({**data(10), "mask": None})
        assert first == pytest.approx(plain(**data(10)).item(), rel=1e-5)
    return seen


def test_masks_of_one_sample_and_none_go_to_every_micro_batch_and_forwards_run_again(four: Ranks) -> None:
    seen = four.check(sizes_seen, "0;3;2;1;")
    # Three micro-batches, each forward once more for its backward, in two steps.
    assert sorted(seen[0]) == sorted([4, 3, 3] * 2 * 2)


def accumulates(rank: int, fp16: bool) -> None:
    plain = Tower(3)
    with wrapped(copy.deepcopy(plain), "1;0;2;", fp16=fp16) as model:
        model.set_optimizer(adam(model), loss_scale=64.0)
        for seed in range(3):
            model.step(data(6, seed))
            plain(**data(6, seed)).backward()
        gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, gradients[name], rtol=2e-2 if fp16 else 1e-5, atol=2e-3 if fp16 else 1e-6
            )


@pytest.mark.parametrize("fp16", [False, True])
def test_a_step_adds_to_the_gradients_that_are_there(three: Ranks, fp16: bool) -> None:
    three.check(accumulates, fp16)


# ── ties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def ties(rank: int, stages: str) -> Any:
    """Trap 9: seven cut points over three stages, two ties, twenty steps of Adam."""
    if not in_map(rank, stages):
        return None
    torch.manual_seed(5)
    batches = [tokens(6, seed) for seed in range(20)]
    losses, norms, state = plain_run(tied(Words()), batches)
    plain = Words()
    with torch.no_grad():
        plain.lm_head_weight.add_(1.0)  # what counts is the first of a pair
    with wrapped(plain, stages, batch_size=6, chunk_size=4, shared_weights=TIES) as model:
        optimizer = adam(model)
        model.set_optimizer(optimizer)
        for batch, loss, norm in zip(batches, losses, norms, strict=True):
            found = model.step(share(batch, model.rank_within_stage, model.data_depth))
            assert found == (pytest.approx(loss, rel=1e-4), False, pytest.approx(norm, rel=1e-3))
            optimizer.step()
            model.zero_grad()
    own = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in own.items():
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-4)
    return own


@pytest.mark.parametrize("stages", ["0;1;2;", "2,0;3,1;"])
def test_copies_of_a_shared_weight_stay_bit_equal(four: Ranks, stages: str) -> None:
    found = [own for own in four.check(ties, stages) if own is not None]
    for names in TIES:
        copies = [own[name] for own in found for name in names if name in own]
        assert len(copies) >= 2
        assert all(torch.equal(value, copies[0]) for value in copies)


# ── half precision ───────────────────────────────────────────────────────────────────────────────────────────────


class Trip(nn.Module):
    """Overflows where a sample begins with a large number, in the backward alone."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (float("inf") if self.trips else 1.0))
        return x

    trips = False


def overflows(rank: int, stages: str, where: int, scale: Any) -> Any:
    torch.manual_seed(0)
    plain = Tower(7)
    trip = Trip()
    plain.blocks[where] = nn.Sequential(plain.blocks[where], trip)
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    with wrapped(plain, stages, fp16=True) as model:
        optimizer = adam(model)
        with pytest.raises(ps.PlanError, match="call set_optimizer"):
            model.step(data())
        model.set_optimizer(optimizer, loss_scale=scale, init_loss_scale=2.0**10, min_loss_scale=2.0**8)
        results = []
        for step in range(6):
            trip.trips = step in (1, 2, 3) and model.rank_within_stage == model.data_depth - 1
            loss, overflow, norm = model.step(share(data(), model.rank_within_stage, model.data_depth))
            if step != 2:  # on overflow, there is nothing to step with
                optimizer.step()
            if step == 0:
                after_one = {name: value.clone() for name, value in model.state_dict().items()}
            if step == 3:
                assert_same(model.state_dict(), after_one)
            model.zero_grad()
            results.append((loss, overflow, None if math.isnan(norm) else norm, model.get_loss_scale()))
            assert math.isnan(norm) == overflow
        assert any(not torch.equal(value, start[name]) for name, value in after_one.items())
    return results


@pytest.mark.parametrize(
    ("stages", "where", "scale"),
    [("0,1;3,2;", 0, "dynamic"), ("1;0;2;3;", 5, "dynamic"), ("1;0;2;3;", 5, 512.0)],
)
def test_overflow_on_one_stage_is_all_ranks(four: Ranks, stages: str, where: int, scale: Any) -> None:
    found = four.check(overflows, stages, where, scale)
    assert all(row == found[0] for row in found)
    assert [overflow for _, overflow, _, _ in found[0]] == [False, True, True, True, False, False]
    scales = [2.0**10, 2.0**9, 2.0**8, 2.0**8, 2.0**8, 2.0**8] if scale == "dynamic" else [512.0] * 6
    assert [now for *_, now in found[0]] == scales


def in_half(rank: int) -> None:
    seen: list[torch.dtype] = []
    plain = Tower(3)
    with wrapped(copy.deepcopy(plain), "0;1;2;", fp16=True) as model:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        model.set_optimizer(torch.optim.Adam(list(model.parameters())[:1]))  # of few: gradients are right for all
        assert model.get_loss_scale() == 2.0**20
        overflow = True
        while overflow:  # until the scale fits
            model.zero_grad()
            loss, overflow, norm = model.step(data())
        assert 1.0 < model.get_loss_scale() < 2.0**20
        expected = plain(**data())
        expected.backward()
        whole = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        assert loss == pytest.approx(expected.item(), rel=1e-2)
        assert norm == pytest.approx(float(whole), rel=2e-2)
        assert set(seen) == {torch.float16}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        seen.clear()
        assert model.evaluate(data()) == pytest.approx(expected.item(), rel=1e-2)
        assert set(seen) == {torch.float16}


def test_half_precision_computes_in_float16_and_keeps_float32(three: Ranks) -> None:
    three.check(in_half)
