"""Assign layers to stages: by given sizes, or so that the weight of the heaviest stage is minimal."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NoReturn

from torch import nn

from penstock.errors import PlanError
from penstock.format import format_size_exact, parse_bytes
from penstock.split.chain import Groups, LayerChain
from penstock.split.measure import Measurement, measure, tensor_bytes
from penstock.split.partition import MemoryLimitError, WeightPieces, partition

BALANCE_CRITERIA = ("uniform", "parameters", "time", "memory")

TRAINING_FACTOR = 4.0
"""Bytes per byte of a trained parameter: the parameter, its gradient and two optimizer states."""


def balance_stages(
    chain: LayerChain,
    *,
    balance: Sequence[int] | str | None,
    stages: int | None,
    sample: Any = None,
    memory: Any = None,
) -> list[tuple[str, ...]]:
    """The layers of each stage: ``balance[i]`` layers in stage ``i``, or ``stages`` stages of even weight.

    The weight is ``balance``: ``"uniform"`` counts layers, ``"parameters"`` (the default without a sample) parameters,
    ``"time"`` (the default with one) seconds of forward and backward, ``"memory"`` bytes.

    ``memory`` limits the bytes of a stage (a number, ``"16GiB"``, or a list with one limit per stage): parameters,
    their gradients, two optimizer states each, and with a sample the tensors that one forward saves for backward.
    """
    if isinstance(balance, str) and balance not in BALANCE_CRITERIA:
        _invalid_balance(balance)
    criterion = balance if isinstance(balance, str) else None
    if criterion is not None and stages is None:
        raise PlanError(f"balance={criterion!r} says what to balance, but not over how many stages: give stages=n too")
    if criterion is None and (balance is None) == (stages is None):
        raise PlanError("say how to cut: either balance=[2, 2] (layers per stage) or stages=2, not both")
    if criterion is None and balance is not None:
        sizes = _check_sizes(chain, balance)
    else:
        count = check_stage_count(chain, stages)
        criterion = criterion or ("parameters" if sample is None else "time")
        if sample is None and criterion in ("time", "memory"):
            raise PlanError(f"balance={criterion!r} is measured: give sample=, the arguments of a call")
        limits = None if memory is None else _memory_limits(memory, count)
        measured = _measure_if_sample(chain, sample) if limits is not None or criterion in ("time", "memory") else None
        sizes = partition_layers(chain, count, criterion, measured, limits=limits)
    ends = list(accumulate(sizes))
    groups = [chain.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    if memory is not None and criterion is None:
        check_limits(chain, groups, memory, sample)
    return groups


def _measure_if_sample(chain: LayerChain, sample: Any) -> Measurement | None:
    return None if sample is None else measure(chain, sample)


def partition_layers(
    chain: LayerChain,
    stages: int,
    criterion: str,
    measured: Measurement | None,
    *,
    limits: list[int] | None = None,
    scale: float = TRAINING_FACTOR,
    chunks: int = 1,
) -> list[int]:
    pieces: list[dict[Hashable, float]] = []
    if criterion == "memory" or limits is not None:
        pieces = _layer_memory(chain, measured, scale=scale, chunks=chunks)
    weights: Sequence[float | WeightPieces]
    if criterion == "uniform":
        weights = [1] * len(chain.layers)
    elif criterion == "memory":
        weights = pieces
    elif criterion == "time" and measured is not None:
        weights = [layer.forward + layer.backward for layer in measured.layers]
    else:
        weights = _parameter_counts(chain)
    if measured is not None:
        crossing: Sequence[float] = measured.crossing
    else:
        crossing = [0.0, *(chain.crossing(cut) for cut in range(1, len(chain.layers)))]
    try:
        return partition(weights, stages, crossing=crossing, memory=pieces, limits=limits)
    except MemoryLimitError as error:
        what = "parameters, gradients and optimizer states" + ("" if measured is None else " and activations")
        size, short = format_size_exact(error.limit), format_size_exact(error.short)
        if error.item is None:
            remedy = "use more stages, or raise the limit"
        else:
            alone = format_size_exact(error.needs)
            remedy = f"layer {chain.layers[error.item]} alone needs {alone}: divide it into smaller layers"
        raise PlanError(
            f"{len(chain.layers)} layers do not fit into {stages} stages with their {what}: the limit of a stage (at "
            f"most {size}) must grow by {short}; {remedy}"
        ) from None


def _parameter_counts(chain: LayerChain) -> list[int]:
    """The number of parameters of each layer plus one.

    A layer without parameters is not free: the one keeps such layers from all going to one stage. A parameter of two
    layers counts in both, since both compute with it.
    """
    counts = []
    for layer in chain.layers:
        own = {id(tensor): tensor.numel() for _, tensor in chain.members(layer) if isinstance(tensor, nn.Parameter)}
        counts.append(1 + sum(own.values()))
    return counts


def _layer_memory(
    chain: LayerChain, measured: Measurement | None, *, scale: float = TRAINING_FACTOR, chunks: int = 1
) -> list[dict[Hashable, float]]:
    """The bytes of each layer by tensor, so that a stage counts tensors that its layers share once.

    Trained parameters count ``scale`` times, frozen ones and buffers once. With a measurement, tensors saved for
    backward count too: those of one micro-batch, if the sample is ``chunks`` micro-batches.
    """
    pieces: list[dict[Hashable, float]] = []
    for i, layer in enumerate(chain.layers):
        sizes: dict[Hashable, float] = {}
        for _, tensor in chain.members(layer):
            trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
            sizes["member", id(tensor)] = tensor_bytes(tensor) * (scale if trained else 1)
        if measured is not None:
            sizes.update((("kept", key), size / chunks) for key, size in measured.kept[i].items())
        pieces.append(sizes)
    return pieces


def _memory_limits(memory: Any, stages: int) -> list[int]:
    """The limit of each stage in bytes, from one limit for all stages or a list."""
    if isinstance(memory, (str, int, float)) or not isinstance(memory, Iterable):
        return [parse_bytes(memory)] * stages
    limits = [parse_bytes(limit) for limit in memory]
    if len(limits) != stages:
        raise PlanError(f"memory has {len(limits)} limits, but there are {stages} stages: give one for each, or one")
    return limits


def check_limits(chain: LayerChain, groups: Groups, memory: Any, sample: Any) -> None:
    """Raise an error if a stage that the user chose exceeds its memory limit."""
    pieces = dict(zip(chain.layers, _layer_memory(chain, _measure_if_sample(chain, sample)), strict=True))
    for stage, (layers, limit) in enumerate(zip(groups, _memory_limits(memory, len(groups)), strict=True)):
        needs = sum({key: value for layer in layers for key, value in pieces[layer].items()}.values())
        if needs > limit:
            raise PlanError(
                f"stage {stage} has layers that need {format_size_exact(needs)}, but its limit is "
                f"{format_size_exact(limit)}: give it fewer layers"
            )


def _invalid_balance(balance: object) -> NoReturn:
    raise PlanError(
        "balance must be a list with the number of layers of each stage, "
        f"or with stages=n one of {', '.join(map(repr, BALANCE_CRITERIA))}; got {balance!r}"
    )


def _check_sizes(chain: LayerChain, balance: Sequence[int] | str) -> list[int]:
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        _invalid_balance(balance)
    sizes = list(balance)
    if not sizes or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in sizes):
        raise PlanError(f"every stage needs at least one layer: balance={sizes}")
    if sum(sizes) != len(chain.layers):
        raise PlanError(
            f"balance={sizes} is for {sum(sizes)} layers, but the model has {len(chain.layers)}: "
            f"make the numbers add up to {len(chain.layers)}"
        )
    return sizes


def check_stage_count(chain: LayerChain, stages: int | None) -> int:
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise PlanError(f"stages must be a positive number, got {stages!r}")
    if stages > len(chain.layers):
        raise PlanError(f"{stages} stages asked for, but the model has only {len(chain.layers)} layers to divide")
    return stages
