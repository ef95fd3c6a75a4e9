"""Steps of Hugging Face models equal the plain model's, in threads and over processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.split.test_transformers import MODELS, cut, gpt2, inputs, llama, mixtral, seeded, t5_encoder
from tests.support.ranks import Ranks

pytestmark = pytest.mark.slow

TOLERANCE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-6}
with_a_loss = [build for build in MODELS if build is not t5_encoder]


def mini_batch(build: Callable[..., nn.Module]) -> dict[str, torch.Tensor]:
    """Seven samples, with different numbers of labels."""
    parts = [inputs(build, seed) for seed in (3, 4, 5)]
    return {name: torch.cat([part[name] for part in parts])[:7] for name in parts[0]}


def assert_steps(pipe: ps.Pipeline, plain: nn.Module, batch: dict[str, Any]) -> None:
    """Compare losses, gradients and parameters over three optimizer steps with the model's own loss."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    own = dict(plain.named_parameters(remove_duplicate=False))
    for _ in range(3):
        expected = plain(**batch).loss
        expected.backward()
        torch.testing.assert_close(pipe.step(batch).loss, expected.detach(), **TOLERANCE)
        for name, parameter in pipe.named_parameters():
            assert (parameter.grad is None) == (own[name].grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, own[name].grad, **TOLERANCE)
        optimizer.step(), plain_optimizer.step()
        optimizer.zero_grad(), plain_optimizer.zero_grad()
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter, own[name], **TOLERANCE)


@pytest.mark.parametrize("build", with_a_loss, ids=lambda build: build.__name__)
def test_steps_with_the_models_own_loss(build: Callable[..., nn.Module]) -> None:
    model = seeded(build).eval()
    plain = copy.deepcopy(model)
    with ps.Pipeline(cut(model, 3, **inputs(build)), microbatches=3, schedule="1f1b") as pipe:
        assert_steps(pipe, plain, mini_batch(build))


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 4), ("interleaved", 2), ("zb-h1", 4)])
def test_tied_embeddings_under_other_schedules(schedule: str, ranks: int) -> None:
    model = seeded(llama, tie_word_embeddings=True).eval()
    plain = copy.deepcopy(model)
    plan = cut(model, 4, **inputs(llama))
    with ps.Pipeline(plan, microbatches=4, schedule=schedule, devices=["cpu"] * ranks) as pipe:
        assert_steps(pipe, plain, mini_batch(llama))
        assert set(pipe.state_dict()) == set(plain.state_dict())


def test_microbatch_without_labels() -> None:
    model = seeded(gpt2).eval()
    plain = copy.deepcopy(model)
    batch = mini_batch(gpt2)
    batch["labels"][0] = -100
    with ps.Pipeline(cut(model, 2), microbatches=7, schedule="gpipe") as pipe:
        assert_steps(pipe, plain, batch)


def test_num_items_in_batch_given_by_the_user() -> None:
    model = seeded(llama).eval()
    plain = copy.deepcopy(model)
    batch = mini_batch(llama)
    number = int((batch["labels"][:, 1:] != -100).sum())
    with ps.Pipeline(cut(model, 2), microbatches=3, schedule="gpipe") as pipe:
        assert_steps(pipe, plain, {**batch, "num_items_in_batch": number})


def test_evaluation_returns_the_model_outputs() -> None:
    model = seeded(llama).eval()
    batch = {name: value for name, value in mini_batch(llama).items() if name != "labels"}
    with ps.Pipeline(cut(model, 3), microbatches=2, schedule="gpipe") as pipe, torch.no_grad():
        torch.testing.assert_close(pipe(**batch)["logits"], model(**batch).logits, **TOLERANCE)


# ── over processes ─────────────────────────────────────────────────────────────────────────────────────────────────


def steps_on_rank(rank: int, build: Callable[..., nn.Module], more: dict[str, Any], stages: int) -> None:
    model = seeded(build, **more).eval()
    plain = copy.deepcopy(model)
    schedule = "1f1b" if stages == 2 else "interleaved"
    with ps.Pipeline(cut(model, stages, **inputs(build)), microbatches=4, schedule=schedule, mesh=ps.Mesh()) as pipe:
        assert_steps(pipe, plain, mini_batch(build))


@pytest.mark.parametrize(("build", "stages"), [(llama, 2), (llama, 4), (gpt2, 2), (mixtral, 4)])
def test_steps_over_two_ranks(two: Ranks, build: Callable[..., nn.Module], stages: int) -> None:
    two.check(steps_on_rank, build, {"tie_word_embeddings": True} if build is llama else {}, stages)
