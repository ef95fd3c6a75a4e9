"""From a model to its chain of layers: by a sample of its arguments, or by a guess."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.marks import Block, begin_block_of, cut_points
from penstock.split.plan import bind_arguments
from penstock.split.trace.call import tensors_of
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.cut_policy import (
    Calls,
    automatic_policy,
    blocks_of,
    heavy_modules,
    policy_for_blocks,
    policy_for_cuts,
    policy_for_marks,
    policy_for_modules,
)
from penstock.split.trace.dummy import guessed_arguments
from penstock.split.trace.errors import CannotTrace, mentions_marks

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def trace_chain(
    model: nn.Module,
    *,
    stages: int | None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Sample | None = None,
) -> TraceChain:
    """The chain of a model: between ``blocks``, before the modules ``cuts``, at its marks, or where it balances.

    Without a sample, calls are guessed; if none runs, layers follow from the order in which modules are registered. The
    chain is then ``provisional``.
    """
    _check_sized(model)
    if type(model).forward is nn.Module.forward and "forward" not in vars(model):
        raise PlanError(f"a {type(model).__name__} has no forward and cannot run: split a module that can be called")
    if sample is not None:
        calls = Calls(model)
        return _chain_for(calls, call_of(calls, bind_arguments(model, *sample)), stages, cuts, blocks)
    errors: list[CannotTrace] = []
    short: TraceChain | None = None  # a guess whose call reaches too few layers
    for arguments in guessed_arguments(model):
        try:
            calls = Calls(model)
            chain = _chain_for(calls, call_of(calls, arguments), stages, cuts, blocks)
        except CannotTrace as error:
            errors.append(error)
            continue
        chain.provisional = True
        if stages is None or not isinstance(stages, int) or len(chain.layers) >= stages:
            return chain
        short = short or chain
    definite = [error for error in errors if error.definite]
    if errors and stages == 1 and cuts is None and blocks is None:
        raise definite[0] if definite else errors[0]
    if _may_have_marks(model) and mentions_marks(model):
        if definite:
            raise definite[0]
        raise CannotTrace(
            f"the marks of {type(model).__name__} are found by running its forward, and it is not known how to call "
            "it: pass ps.split(…, sample=…), the arguments of a call",
            marked=True,
        )
    chain = _chain_by_structure(Calls(model), stages, cuts, blocks)
    chain.provisional = True
    return chain if short is None or len(chain.layers) > len(short.layers) else short


def _chain_for(
    calls: Calls, call: KnownCall, stages: int | None, cuts: Sequence[str] | None, blocks: str | None
) -> TraceChain:
    data, tensors = call
    if cuts is not None:
        return TraceChain(policy_for_cuts(calls, cuts), data, tensors)
    if blocks is not None:
        return TraceChain(policy_for_blocks(calls, blocks_of(calls.model, blocks), blocks), data, tensors)
    marks = policy_for_marks(calls, data, tensors, None) if _may_have_marks(calls.model) else None
    if marks is not None:
        return TraceChain(marks, data, tensors)
    policy, recording = automatic_policy(calls, data, tensors, _positive(calls.model, stages))
    return TraceChain(policy, data, tensors, recording)


def _positive(model: nn.Module, stages: int | None) -> int:
    if stages is not None and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        kind = type(model).__name__
        raise PlanError(f"nothing is marked in {kind}: stages must be a positive number, got {stages!r}")
    return stages or 1


def _chain_by_structure(
    calls: Calls, stages: int | None, cuts: Sequence[str] | None, blocks: str | None
) -> TraceChain:
    """Layers in the order in which modules are registered; heavy ones are entered, as for a known call."""
    if cuts is not None:
        return TraceChain(policy_for_cuts(calls, cuts), None)
    if blocks is not None:
        return TraceChain(policy_for_blocks(calls, blocks_of(calls.model, blocks), blocks), None)
    policy, count = policy_for_modules(calls), _positive(calls.model, stages)
    while heavy := heavy_modules(calls, policy, list(policy.structure), count):
        policy.enter(heavy)
    policy.recipe = {"how": "modules", "expanded": sorted(policy.entered)}
    return TraceChain(policy, None)


def marked_chain(model: nn.Module, *, sample: Sample, lead: Block | None = None) -> TraceChain | None:
    """The chain of a model at its marks or blocks; None where there are none.

    ``lead`` is a block for the code that runs before any other, which else belongs to the first one.
    """
    calls = Calls(model)
    data, tensors = call_of(calls, bind_arguments(model, *sample))
    policy = policy_for_marks(calls, data, tensors, lead)
    return None if policy is None else TraceChain(policy, data, tensors)


KnownCall = tuple[dict[str, Any], list[Tensor]]


def call_of(calls: Calls, arguments: Mapping[str, Any]) -> KnownCall:
    data = calls.data(arguments)
    return data, tensors_of(data["call"], {**arguments, **calls.fixed})


def _may_have_marks(model: nn.Module) -> bool:
    """Libraries have no marks in their forwards; the user's own code may."""
    marked = bool(cut_points(model)) or any(begin_block_of(module) is not None for module in model.modules())
    return marked or any("site-packages" not in _file(type(module)) for module in model.modules())


def _file(kind: type) -> str:
    try:
        return inspect.getfile(kind)
    except (TypeError, OSError):
        return ""


def _check_sized(model: nn.Module) -> None:
    state = (*model.named_parameters(), *model.named_buffers())
    unsized = [name for name, tensor in state if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))]
    if unsized:
        raise PlanError(f"{unsized[0]} does not know its size yet: run the model on a batch first")
