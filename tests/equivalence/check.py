"""Compare pipelined steps with the plain model: losses, outputs, gradients, updates and state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.microbatch import microbatch_sizes
from tests.equivalence.dynamic_models import DynamicShapesCase
from tests.equivalence.front_end_models import FrontEndCase
from tests.equivalence.models import Case, stages_per_rank
from tests.equivalence.skip_models import SkipCase

AnyCase = Case | SkipCase | FrontEndCase | DynamicShapesCase


def _pair(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(output, target, reduction="sum"), (target != -100).sum()


LOSSES: dict[str, Callable[..., Any]] = {
    "mean": lambda output, target: F.mse_loss(output, F.one_hot(target, output.shape[1]).to(output)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "ignore": F.cross_entropy,
    "pair": _pair,
}


def plain_step(model: nn.Module, case: AnyCase) -> tuple[Tensor, Tensor]:
    """Loss and outputs of the plain model, whose parameters get the gradients.

    The forward runs micro-batch by micro-batch, because a layer may depend on its batch; the loss is computed over the
    whole mini-batch.
    """
    loss, outputs = _plain_loss(model, case)
    loss.backward()
    return loss.detach(), outputs.detach()


def _plain_loss(model: nn.Module, case: AnyCase) -> tuple[Tensor, Tensor]:
    x, y = case.data()
    outputs = torch.cat([model(part) for part in x.split(list(microbatch_sizes(case.batch, case.microbatches)))])
    return F.cross_entropy(outputs, y) if case.loss == "pair" else LOSSES[case.loss](outputs, y), outputs


def check_step(
    case: AnyCase, mesh: ps.Mesh | None = None, devices: Sequence[str] = ("cpu",), steps: int = 2, **extra: Any
) -> None:
    """Compare steps with an optimizer between them, plain and pipelined. Rank r uses ``devices[r % len]``.

    ``extra`` are further options of the pipeline.
    """
    model = case.build()
    plain = copy.deepcopy(model)
    ranks = case.stages // stages_per_rank(case.schedule)
    where: dict[str, Any] = {"devices": [devices[r % len(devices)] for r in range(ranks)]} if mesh is None else {}
    plan = case.plan(model)
    options: dict[str, Any] = {"microbatches": case.microbatches, "schedule": case.schedule, "mesh": mesh, **where}
    options |= {"recompute": case.recompute, **extra}
    options["dynamic"] = dynamic = getattr(case, "dynamic", False)
    if isinstance(case, Case) and case.weights:
        options["offload"] = ps.Offload(weights=True)
    with ps.Pipeline(plan, LOSSES[case.loss], **options) as pipe:
        expected = dict(plain.named_parameters(remove_duplicate=False))
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1) if list(pipe.parameters()) else None
        if optimizer is not None and "offload" in options:
            pipe.offload_optimizer(optimizer)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        x, y = case.data()
        for _ in range(steps):
            loss, outputs = plain_step(plain, case)
            result = pipe.step(x, y)
            _equal(result.loss, loss, "loss")
            if result.outputs is not None:
                _equal(result.outputs, outputs, "outputs")
            for name, parameter in pipe.named_parameters():
                _equal(parameter.grad, expected[name].grad, f"gradient of {name}")
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        state = plain.state_dict()
        for name, tensor in pipe.state_dict().items():
            _equal(tensor, state[name], name)
        if mesh is None:
            assert list(pipe.state_dict()) == list(state)
            check_call(pipe, plain, case)
        elif dynamic:
            check_evaluation(pipe, plain, case)


def check_in_threads(case: AnyCase) -> None:
    """``check_step`` in this process, for tests of several cases; a failure names the case."""
    _check_named(case, None)


def check_on_rank(rank: int, case: AnyCase) -> None:
    """``check_step`` in one of the processes of a pipeline; a failure names the case."""
    _check_named(case, ps.Mesh())


def _check_named(case: AnyCase, mesh: ps.Mesh | None) -> None:
    try:
        check_step(case, mesh)
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise


def check_evaluation(pipe: ps.Pipeline, plain: nn.Module, case: AnyCase) -> None:
    """Under a mesh: outputs of a call without grad, and the loss of ``evaluate``."""
    x, y = case.data()
    with torch.no_grad():
        loss, outputs = _plain_loss(plain, case)
        found = pipe(x)
    if found is not None:
        _equal(found, outputs, "outputs without grad")
    _equal(pipe.evaluate(x, y).loss, loss, "loss of an evaluation")


def check_call(pipe: ps.Pipeline, plain: nn.Module, case: AnyCase) -> None:
    """A call ``pipe(x)``: outputs, parameter and input gradients."""
    x, _ = case.data()
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    parts = theirs.split(list(microbatch_sizes(case.batch, case.microbatches)))
    output = pipe(ours)
    expected = torch.cat([plain(part) for part in parts])
    _equal(output.detach(), expected.detach(), "outputs of a call")
    output.square().sum().backward()
    expected.square().sum().backward()
    _equal(ours.grad, theirs.grad, "gradient of the input")
    gradients = dict(plain.named_parameters(remove_duplicate=False))
    for name, parameter in pipe.named_parameters():
        _equal(parameter.grad, gradients[name].grad, f"gradient of {name} after a call")
    with torch.no_grad():
        _equal(pipe(x), expected.detach(), "outputs without grad")


def _equal(ours: Tensor | None, theirs: Tensor | None, name: str) -> None:
    assert (ours is None) == (theirs is None), f"{name}: {'missing' if ours is None else 'not expected'}"
    if ours is not None and theirs is not None:
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")
