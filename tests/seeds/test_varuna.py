"""The programs of Varuna's document on cut points, with changed imports and the ellipses filled in."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.compat.varuna import CutPoint, Varuna
from tests.support.models import assert_same
from tests.support.ranks import Ranks


class SampleModel(nn.Module):
    def __init__(self, num_cutpoints: int, width: int = 8):
        super().__init__()
        self.some_operation = nn.Linear(width, width)
        self.some_other_operation = nn.Linear(width, width)
        self.sub_modules = nn.ModuleList(nn.Linear(width, width) for i in range(num_cutpoints - 1))
        self.cutpoints = [CutPoint() for i in range(num_cutpoints)]
        self.classes = nn.Linear(width, 4)

    def forward(self, input, target):
        input = self.some_operation(input)
        input = self.cutpoints[0](input)  # marked as a potential stage boundary
        input = self.some_other_operation(input)
        x = torch.relu(input)
        for i, sub_module_i in enumerate(self.sub_modules):
            x = torch.relu(sub_module_i(x))
            x = self.cutpoints[i + 1](x)  # each cutpoint instance should be used only once in a model
        return F.cross_entropy(self.classes(x), target)


class Embedding(nn.Module):
    def __init__(self, words: int, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(words, width)


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int, num_cutpoints: int):
        super().__init__()
        self.embedding = Embedding(words, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for i in range(num_cutpoints))
        self.cutpoints = nn.ModuleList(CutPoint() for i in range(num_cutpoints))

    def forward(self, tokens):
        x = self.embedding.word_embeddings(tokens)
        for layer, cutpoint in zip(self.layers, self.cutpoints, strict=True):
            x = cutpoint(x + torch.tanh(layer(x)))
        return x


class PretrainedModel(nn.Module):
    """The word embedding is used at the beginning and at the end, as two parameters."""

    def __init__(self, words: int = 13, width: int = 8):
        super().__init__()
        self.language_model = LanguageModel(words, width, num_cutpoints=3)
        self.lm_head_weight = nn.Parameter(self.language_model.embedding.word_embeddings.weight.detach().clone())

    def forward(self, tokens, labels):
        logits = F.linear(self.language_model(tokens), self.lm_head_weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def arguments(rank: int, device_type: str, fp16: bool) -> Namespace:
    local_rank = rank % torch.cuda.device_count() if device_type == "cuda" else rank
    return Namespace(local_rank=local_rank, stage_to_rank_map="1;0;", chunk_size=2, fp16=fp16)


def patch_cuda(device_type: str) -> Any:
    """Hide CUDA, unless ``device_type`` is "cuda"."""
    return (
        contextlib.nullcontext() if device_type == "cuda" else mock.patch("torch.cuda.is_available", return_value=False)
    )


def sample_model(rank: int, device_type: str) -> int:
    args = arguments(rank, device_type, False)
    torch.manual_seed(0)
    model = SampleModel(num_cutpoints=5)
    torch.manual_seed(0)
    plain = SampleModel(num_cutpoints=5)
    dry_run_input = {"input": torch.randn(7, 8), "target": torch.randint(4, (7,))}
    with patch_cuda(device_type):
        model = Varuna(
            model, args.stage_to_rank_map, dry_run_input, 7, args.chunk_size, args.fp16, device=args.local_rank
        )
    with model.pipeline:
        loss, overflow, grad_norm = model.step(dry_run_input)
        expected = plain(**dry_run_input)
        expected.backward()
        assert_same(torch.tensor(loss), expected.detach())
        theirs = {name: parameter.grad for name, parameter in plain.named_parameters()}
        mine = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        assert_same(mine, {name: theirs[name] for name in mine})
        assert {parameter.device.type for parameter in model.parameters()} == {device_type}
        assert overflow is False
        assert grad_norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), 1e9)), rel=1e-5)
        return len(model.pipeline.plan.groups[model.stage])


def language_model(rank: int, device_type: str, fp16: bool) -> None:
    args = arguments(rank, device_type, fp16)
    torch.manual_seed(0)
    model = PretrainedModel()
    torch.manual_seed(0)
    plain = PretrainedModel()
    plain.lm_head_weight = plain.language_model.embedding.word_embeddings.weight
    dry_run_input = {"tokens": torch.randint(13, (6, 5)), "labels": torch.randint(13, (6, 5))}
    global_batch_size = 6

    with patch_cuda(device_type):
        # list of 2-tuples with parameter names
        shared_weights = [("language_model.embedding.word_embeddings.weight", "lm_head_weight")]
        model = Varuna(
            model,
            args.stage_to_rank_map,
            dry_run_input,
            global_batch_size,
            args.chunk_size,
            args.fp16,
            local_rank=args.local_rank,
            device=args.local_rank,
            shared_weights=shared_weights,
        )  # passed to varuna init

    with model.pipeline:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        model.set_optimizer(optimizer, init_loss_scale=2.0**10)
        theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
        for _ in range(5):
            loss, overflow, _ = model.step(dry_run_input)
            if not overflow:
                optimizer.step()
            model.zero_grad()
            expected = plain(**dry_run_input)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            assert loss == pytest.approx(expected.item(), rel=1e-2 if fp16 else 1e-4)
            assert overflow is False
        state = {name: value.cpu() for name, value in model.state_dict().items()}
        if not fp16:
            assert_same(state, {name: plain.state_dict()[name] for name in state}, rtol=1e-3, atol=1e-4)
        copies = model.pipeline.state_dict(full=True)
        assert torch.equal(copies["lm_head_weight"], copies["language_model.embedding.word_embeddings.weight"])


def test_sample_model(device_type: str, two: Ranks) -> None:
    assert two.check(sample_model, device_type) == [3, 3]  # five cut points, of which one is active


@pytest.mark.parametrize("fp16", [False, True])
def test_shared_weights(device_type: str, two: Ranks, fp16: bool) -> None:
    two.check(language_model, device_type, fp16)
