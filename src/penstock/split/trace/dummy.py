"""Guess how a model is called, for a model that is split without a sample: from its layers and its signature.

The guess decides where the model is cut, and nothing else: a pipeline records the forward on its own mini-batches.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.split.lazy import Lazy

BATCH, LENGTH = 2, 4  # a table of positions may be short
IMAGE_SIZES = (32, 28, 64, 224)  # the usual ones: a classifier may take the flattened image
MAX_GUESSES = 40


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
