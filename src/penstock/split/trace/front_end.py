"""From a model to its chain of layers: by a sample of its arguments, or by a guess.

A guess decides where the model is cut, and nothing else: a pipeline records the forward on its own mini-batches.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError
from penstock.split.lazy import Lazy
from penstock.split.marks import Block, begin_block_of, cut_points
from penstock.split.plan import bind_arguments
from penstock.split.sample import plain_error
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
from penstock.split.trace.errors import CannotTrace, mentions_marks

Sample = tuple[tuple[Any, ...], dict[str, Any]]

BATCH, LENGTH = 2, 4  # a table of positions may be short
IMAGE_SIZES = (32, 28, 64)  # small: a module that fake tensors cannot follow runs on real ones
MAX_GUESSES = 40


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
        calls, arguments = Calls(model), bind_arguments(model, *sample)
        try:
            return _chain_for(calls, call_of(calls, arguments), stages, cuts, blocks)
        except CannotTrace as error:
            cause = None if error.definite else plain_error(model, *calls.forward_arguments(arguments))
            if cause is None:
                raise
            raise PlanError(f"the model does not run on the sample: {type(cause).__name__}: {cause}") from cause
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
    chain = _chain_for(Calls(model), None, stages, cuts, blocks)
    chain.provisional = True
    return chain if short is None or len(chain.layers) > len(short.layers) else short


def _chain_for(
    calls: Calls, call: KnownCall | None, stages: int | None, cuts: Sequence[str] | None, blocks: str | None
) -> TraceChain:
    """The chain for a call; without one, its layers are in the order in which modules are registered."""
    data, tensors = call or (None, None)
    if cuts is not None:
        return TraceChain(policy_for_cuts(calls, cuts), data, tensors)
    if blocks is not None:
        return TraceChain(policy_for_blocks(calls, blocks_of(calls.model, blocks), blocks), data, tensors)
    if data is None:
        policy, count = policy_for_modules(calls), _positive(calls.model, stages)
        while heavy := heavy_modules(calls, policy, list(policy.structure), count):
            policy.entered |= heavy
        policy.recipe = {"how": "modules", "expanded": sorted(policy.entered)}
        return TraceChain(policy, None)
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
    files = (getattr(sys.modules.get(type(module).__module__), "__file__", None) for module in model.modules())
    return marked or any("site-packages" not in (file or "") for file in files)


def _check_sized(model: nn.Module) -> None:
    state = (*model.named_parameters(), *model.named_buffers())
    unsized = [name for name, tensor in state if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))]
    if unsized:
        raise PlanError(f"{unsized[0]} does not know its size yet: run the model on a batch first")


# ── guesses: how the model may be called, by its layers and its signature ──────────────────────────────────────────


def guessed_arguments(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Arguments by name, the likeliest first."""
    parameters = inspect.signature(model.forward).parameters
    declared = _declared(model, parameters)
    if declared:
        yield declared
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    star = next((n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    candidates = _candidates(model)
    if not required:
        first = next((n for n, p in parameters.items() if p.default is None), None)
        for tensor in candidates[:MAX_GUESSES]:
            if star is not None:
                yield from ({star: (tensor,) * count} for count in (1, 2))
            elif first is not None:
                yield {first: tensor}
        return
    classes, numbers = torch.zeros(BATCH, dtype=torch.long), torch.zeros(BATCH)
    others = itertools.product(("same", "classes", "numbers", "ids"), repeat=min(len(required) - 1, 2))
    kinds = {"classes": classes, "numbers": numbers, "ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}
    rows = itertools.product(list(others), candidates)
    for kind, tensor in itertools.islice(rows, MAX_GUESSES):
        rest = [tensor if name == "same" else kinds[name] for name in kind] + [tensor] * len(required)
        values = dict(zip(required, [tensor, *rest], strict=False))
        yield {name: _as_annotated(parameters[name].annotation, value) for name, value in values.items()}


def _declared(model: nn.Module, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs that a Hugging Face model names itself; of a vision model, from its config."""
    config, name = getattr(model, "config", None), getattr(model, "main_input_name", None)
    if config is None or name is None:
        return None
    if name == "input_ids":
        ids = torch.ones(BATCH, LENGTH, dtype=torch.long)
        more = {"decoder_input_ids": ids} if getattr(config, "is_encoder_decoder", False) else {}
        return {"input_ids": ids, **{key: value for key, value in more.items() if key in parameters}}
    if name == "pixel_values":
        size = getattr(config, "image_size", 64)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        return {"pixel_values": torch.zeros(BATCH, getattr(config, "num_channels", 3), int(height), int(width))}
    return None


def _as_annotated(annotation: Any, value: Tensor) -> Any:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = str(annotation) if "[" in str(annotation) else text
    head, _, inner = text.replace("typing.", "").strip().lower().partition("[")
    if head in ("list", "sequence", "iterable"):
        return [value, value]
    if head == "tuple":
        return (value,) * (2 if "..." in inner or not inner else inner.count(",") + 1)
    return value


def _candidates(model: nn.Module) -> list[Tensor]:
    """Tensors that the first layers could take."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    shapes: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
    parts = [list((part.outline() or part).modules()) if isinstance(part, Lazy) else [part] for part in model.modules()]
    layers = [module for row in parts for module in row if next(module.children(), None) is None]
    for layer in [*layers[:12], *layers[12::7]]:
        for shape, kind in _inputs_of(layer):
            shapes[shape, kind or dtype] = None
    for shape in ((BATCH, 3, 32, 32), (BATCH, 1, 28, 28), (BATCH, LENGTH, 16)):
        shapes[shape, dtype] = None
    shapes[(BATCH, LENGTH), torch.long] = None
    return [torch.zeros(shape, dtype=kind) for shape, kind in shapes]


def _inputs_of(layer: nn.Module) -> Iterator[tuple[tuple[int, ...], torch.dtype | None]]:
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        yield (BATCH, LENGTH), torch.long
    elif isinstance(layer, nn.Linear):
        yield (BATCH, layer.in_features), None
        yield (BATCH, LENGTH, layer.in_features), None
    elif isinstance(layer, (nn.Conv1d, nn.ConvTranspose1d)):
        yield (BATCH, layer.in_channels, 64), None
    elif isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d)):
        yield from (((BATCH, layer.in_channels, size, size), None) for size in IMAGE_SIZES)
    elif isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
        yield (BATCH, layer.in_channels, 32, 32, 32), None
    elif isinstance(layer, nn.RNNBase):
        yield ((BATCH, LENGTH, layer.input_size) if layer.batch_first else (LENGTH, BATCH, layer.input_size)), None
    elif isinstance(layer, nn.LayerNorm):
        yield (BATCH, LENGTH, *layer.normalized_shape), None
        yield (BATCH, *layer.normalized_shape), None
    elif isinstance(layer, nn.BatchNorm1d):
        yield (BATCH, layer.num_features), None
    elif isinstance(layer, nn.BatchNorm2d):
        yield (BATCH, layer.num_features, 32, 32), None
    elif isinstance(layer, nn.GroupNorm):
        yield (BATCH, layer.num_channels, 32, 32), None
