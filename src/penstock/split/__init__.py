"""``ps.split``: cut a model into the stages of a ``Plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.errors import PlanError
from penstock.split.balance import balance_stages, check_limits, check_stage_count, partition_layers
from penstock.split.flatten import is_plain_sequential
from penstock.split.marks import Stage, begin_block_of, cut_points, devices_of_stages, groups_by_device, groups_by_name
from penstock.split.measure import measure as measure_layers
from penstock.split.plan import FRONT_ENDS, LayerChain, SharedWeights, WholeModelChain, build_plan
from penstock.split.plan import Edge as Edge
from penstock.split.plan import Plan as Plan
from penstock.split.plan import StageSpec as StageSpec
from penstock.split.plan import Tie as Tie
from penstock.split.sample import sample_arguments, sample_inputs
from penstock.split.sequential import SequentialChain
from penstock.split.trace.chain import TraceChain
from penstock.split.trace.errors import CannotTrace, mentions_marks
from penstock.split.trace.front_end import trace_chain

__all__ = ["Edge", "Plan", "StageSpec", "Tie", "balance_by_size", "balance_by_time", "chain_of", "split"]


def chain_of(
    model: nn.Module,
    *,
    stages: int | None = None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Any = None,
) -> LayerChain:
    """The layers of a model, found by the front end that the arguments ask for or that fits the model.

    A Sequential without marks is cut between its layers; the forward of another model is recorded. A model whose
    forward cannot be recorded can still be one stage.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"expected an nn.Module to split, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule) or getattr(model, "_orig_mod", None) is not None:
        kind = "compiled" if hasattr(model, "_orig_mod") else "scripted"
        raise PlanError(f"a {kind} model cannot be cut: split the model it was made of, and compile its blocks")
    if blocks is not None and cuts is not None:
        raise PlanError("say where to cut once: either cuts=[…] (before these modules) or blocks=… (a list of blocks)")
    # Marks on modules; those inside a forward are seen when it is recorded.
    marked = bool(cut_points(model)) or any(begin_block_of(module) is not None for module in model.modules())
    if cuts is None and blocks is None and not marked and is_plain_sequential(model):
        return SequentialChain(model)
    call = None if sample is None else sample_arguments(sample)
    try:
        return trace_chain(model, stages=stages, cuts=cuts, blocks=blocks, sample=call)
    except CannotTrace as error:
        where = cuts is not None or blocks is not None
        if stages != 1 or where or error.marked or mentions_marks(model) or begin_block_of(model):
            raise
        if type(model).forward is nn.Module.forward:  # a container such as ModuleList, which cannot be called
            raise
    return WholeModelChain(model)


FRONT_ENDS.update(
    sequential=lambda model, recipe: chain_of(model),
    trace=TraceChain.from_recipe,
    whole=lambda model, recipe: WholeModelChain(model),
)


def split(
    model: nn.Module,
    *,
    stages: int | Sequence[str | Stage | Sequence[str]] | None = None,
    balance: Sequence[int] | str | None = None,
    cuts: Sequence[str] | None = None,
    blocks: str | None = None,
    sample: Any = None,
    memory: Any = None,
    shared_weights: SharedWeights | None = None,
    verify: bool = True,
) -> Plan:
    """Cut ``model`` into stages. The model is not changed: stages hold its own modules under their own names.

    Possible cuts: an ``nn.Sequential`` can be cut between its layers. Other models can be cut at ``ps.CutPoint()``,
    ``ps.cut(x)`` and ``ps.Block`` marks, before the modules in ``cuts=["layer2", "layer3.1"]``, or between the blocks
    of the module list ``blocks="model.layers"`` (Hugging Face models name theirs). Without any of these, the forward is
    traced and can be cut wherever that is possible.

    Chosen cuts: ``stages=4`` makes four stages of even weight. ``balance`` is the weight (``"parameters"``,
    ``"uniform"``, ``"time"``, ``"memory"``) or the number of layers per stage (``[2, 2]``). With ``sample``, the
    arguments of a call, layers are measured and the default weight is time; for a model with one argument it may be
    ``(inputs, targets)``. ``memory`` limits the bytes of a stage (``"16GiB"``, or one limit per stage).
    ``stages=[["B1", "B2"], ["B3"]]`` assigns blocks by name. With ``cuts``, or if every block has a device, ``stages``
    and ``balance`` can be left out.

    ``shared_weights=[("a.weight", "b.weight")]`` ties separate parameters.

    Stages of a traced model are compared with the whole model, by two forwards of the first micro-batch of each shape,
    where the process with the first stage has all of it on one device, and no module has hooks, which would run more
    often. ``verify=False`` saves the time.
    """
    given = {name: value for name, value in locals().items() if name not in ("model", "sample")}
    sample = sample_inputs(model, sample)
    named = stages if isinstance(stages, (list, tuple)) else None
    number: Any = stages if named is None else None
    chain = chain_of(model, stages=number, cuts=cuts, blocks=blocks, sample=sample)
    if not verify:
        chain.verify = False
    if chain.provisional:  # the sample of a pipeline's first mini-batch is not there to be measured
        if balance is None and isinstance(stages, int):
            given["balance"] = "parameters"
        chain.split_again = lambda sample: split(model, **given, sample=sample)
    devices = None
    if named is not None:
        if balance is not None:
            raise PlanError(f"stages={named} says which blocks each stage has: balance={balance!r} cannot change it")
        groups, devices = groups_by_name(chain, named), devices_of_stages(named)
    elif stages is None and balance is None and cuts is not None:
        groups = [(layer,) for layer in chain.layers]
    elif stages is None and balance is None and chain.devices():
        groups = groups_by_device(chain)
    else:
        groups = balance_stages(chain, balance=balance, stages=number, sample=sample, memory=memory)
        memory = None  # it was observed
    if memory is not None:
        check_limits(chain, groups, memory, sample)
    plan = build_plan(chain, groups, shared_weights or ())
    return plan if devices is None else replace(plan, devices=devices)


def balance_by_time(
    model: nn.Module, sample: Any, stages: int, *, timeout: float = 1.0, device: str | torch.device | None = None
) -> list[int]:
    """Layers per stage that minimise the forward and backward time of the slowest stage on ``sample``.

    Layers are measured for about ``timeout`` seconds, on ``device`` or where they are. The model is not changed.
    """
    chain = chain_of(model)
    check_stage_count(chain, stages)
    return partition_layers(chain, stages, "time", measure_layers(chain, sample, timeout=timeout, device=device))


def balance_by_size(
    model: nn.Module,
    sample: Any,
    stages: int,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: str | torch.device | None = None,
) -> list[int]:
    """Layers per stage that minimise the memory of the largest stage.

    Counted are the parameters, ``param_scale`` times if they are trained (2: with gradients; 3 for SGD with momentum, 4
    for Adam), and the tensors that one of the ``chunks`` micro-batches of ``sample`` saves for backward.
    """
    chain = chain_of(model)
    check_stage_count(chain, stages)
    if chunks < 1 or param_scale < 0:
        raise PlanError(f"chunks must be 1 or more and param_scale 0 or more, got {chunks!r} and {param_scale!r}")
    measured = measure_layers(chain, sample, timeout=0.0, device=device)
    return partition_layers(chain, stages, "memory", measured, scale=param_scale, chunks=chunks)
