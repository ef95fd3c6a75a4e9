"""Compare training with parallelized stages with the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.equivalence.parallel_models import CLASSES, MODELS, UNEVEN

_meshes: dict[str, ps.Mesh] = {}


def mesh_of(sizes: dict[str, int], device: str = "cpu") -> ps.Mesh:
    """One mesh per process and shape, shared by all cases."""
    if str(sizes) not in _meshes:
        _meshes[str(sizes)] = ps.Mesh(**sizes, device=device)
    return _meshes[str(sizes)]


def batch(step: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, 6, generator=generator).to(dtype)
    return x, torch.randint(0, CLASSES, (size,), generator=generator)


def replica_samples(mesh: ps.Mesh, shards: Sequence[int], *tensors: Tensor) -> list[Tensor]:
    """This replica's samples; ranks along ``tensor`` have the same."""
    start = sum(shards[: mesh.data_rank])
    return [tensor[start : start + shards[mesh.data_rank]] for tensor in tensors]


def full(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check_equal(ours: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (ours is None) == (theirs is None), f"{name}: {'missing' if ours is None else 'not expected'}"
    whole = full(ours)
    torch.testing.assert_close(None if whole is None else whole.cpu(), theirs, msg=lambda text: f"{name}: {text}")


def check_gradients(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        check_equal(parameter.grad, expected[name].grad, f"gradient of {name}")
        if parameter.grad is not None and hasattr(parameter, "placements"):
            assert parameter.grad.placements == parameter.placements, name


def cross_entropy_ignoring_0(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


def train(
    rank: int,
    parallelize: Callable[..., Any],
    sizes: dict[str, int],
    options: dict[str, Any] | None = None,
    *,
    name: str = "blocks",
    shards: Sequence[int] = UNEVEN,
    stages: int | None = None,
    norm: float = 2.0,
    device: str = "cpu",
) -> None:
    """Compare steps, accumulation, clipping, an optimizer, evaluation and state with the plain model."""
    mesh = mesh_of(sizes, device)
    shards = shards if mesh.data > 1 else (sum(shards),)
    torch.manual_seed(rank)  # ranks start with different weights and must take those of the first one
    model = MODELS[name]().double()
    torch.manual_seed(0)
    plain = MODELS[name]().double()
    if mesh.data_rank == mesh.tensor_rank == 0:
        model.load_state_dict(plain.state_dict())
    plan = ps.split(model, stages=mesh.pipe if stages is None else stages)
    options = {"microbatches": 3, "mesh": mesh, "parallelize": parallelize, **(options or {})}
    with ps.Pipeline(plan, nn.CrossEntropyLoss(ignore_index=0), **options) as pipe:
        trainable = [p for p in pipe.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=0.01, foreach=False) if trainable else None
        reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
        for step in range(3):
            x, y = batch(step, sum(shards), torch.float64)
            result = pipe.step(*replica_samples(mesh, shards, x, y))
            expected = cross_entropy_ignoring_0(plain(x), y)
            expected.backward()
            check_equal(result.loss, expected.detach(), "loss")
            check_gradients(pipe, plain)
            if step == 1:  # the next step accumulates into its gradients
                continue
            clipped = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm)
            check_equal(pipe.clip_grad_norm_(0.5, norm), clipped, "norm")
            check_gradients(pipe, plain)
            if step == 0:
                check_evaluation(pipe, plain, mesh, shards)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            reference.step()
            reference.zero_grad()
        check_state_and_loading(pipe, plain)
        pipe.eval()
        plain.eval()
        check_evaluation(pipe, plain, mesh, shards)


@torch.no_grad()
def check_evaluation(pipe: ps.Pipeline, plain: nn.Module, mesh: ps.Mesh, shards: Sequence[int]) -> None:
    x, y = batch(9, sum(shards), torch.float64)
    mine, wanted = replica_samples(mesh, shards, x, y)
    found = pipe.evaluate(mine, wanted)
    check_equal(found.loss, cross_entropy_ignoring_0(plain(x), y), "loss of an evaluation")
    outputs = pipe(mine) if min(shards) else found.outputs
    if pipe.has_last_stage and len(mine):
        check_equal(found.outputs, plain(mine), "outputs")
        check_equal(outputs, plain(mine), "outputs of a call")


def check_state(pipe: ps.Pipeline, plain: nn.Module) -> None:
    expected = plain.state_dict()
    found = pipe.state_dict(full=True)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        check_equal(tensor, expected[name], name)
    for name, tensor in pipe.state_dict().items():
        check_equal(tensor, expected[name], name)
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in pipe.named_parameters()} <= names


def check_state_and_loading(pipe: ps.Pipeline, plain: nn.Module) -> None:
    """Load a state dict of the plain model, then the pipeline's own, sharded as its parameters are."""
    own = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    before = copy.deepcopy(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        tensor.add_(len(name))
    pipe.load_state_dict(plain.state_dict())
    check_state(pipe, plain)
    pipe.load_state_dict(own)
    plain.load_state_dict(before)
    check_state(pipe, plain)


def sum_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.sum(1) - target).square().sum()


def train_case(rank: int, parallelize: Callable[..., Any], sizes: dict[str, int], more: dict[str, Any]) -> None:
    train(rank, parallelize, sizes, **more)
