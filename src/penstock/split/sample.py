"""Samples: the arguments that a model is called with, and the values that a call returns."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.chain import CountedOutput
from penstock.split.flatten import is_plain_sequential
from penstock.split.lazy import Lazy


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the call that ``sample`` describes."""
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, Mapping) and all(isinstance(key, str) for key in sample):
        return (), dict(sample)
    raise PlanError(
        "sample is the arguments of a call: a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments, not a {type(sample).__name__}"
    )


def sample_inputs(model: nn.Module, sample: Any) -> Any:
    """The inputs of a sample that is ``(inputs, targets)``, for a model with one argument; else the sample.

    A Sequential of user-defined layers may take a pair as its one value; torch's layers take a tensor.
    """
    if type(sample) is not tuple or len(sample) != 2:
        return sample
    if is_plain_sequential(model):
        first = next((part for part in model.modules() if not is_plain_sequential(part)), model)
        has_targets = type(first).__module__.startswith("torch.nn.")
    else:
        has_targets = not _accepts(model, sample) and _accepts(model, sample[:1])
    return sample[0] if has_targets else sample


def _accepts(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError:
        return False
    return True


def model_output(output: Any) -> Any:
    """The model's output from the last stage's output, which may come with a loss count."""
    return output.output if isinstance(output, CountedOutput) else output


def named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a nested value with their paths: ``output['logits']``, ``output[0].state``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_leaves(item, f"{path}[{key!r}]")
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from named_leaves(item, f"{path}.{names[i]}" if names else f"{path}[{i}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from named_leaves(getattr(value, one.name), f"{path}.{one.name}")
    else:
        yield path, value


def backward_roots(output: Any) -> list[Tensor]:
    """The tensors that backward starts from: the loss if the output has one, else all that require a gradient."""
    output = model_output(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    candidates = [loss] if isinstance(loss, Tensor) else [leaf for _, leaf in named_leaves(output, "output")]
    return [leaf for leaf in candidates if isinstance(leaf, Tensor) and leaf.requires_grad]


def accelerators_of(model: nn.Module, value: Any) -> set[torch.device]:
    """The accelerators that a model and its arguments are on; an error if tensors have no data yet."""
    values = (*model.named_parameters(), *model.named_buffers(), *named_leaves(value, "sample"))
    tensors = {name: tensor for name, tensor in values if isinstance(tensor, Tensor)}
    empty = [f"layer {name} is not built yet" for name, part in model.named_modules() if isinstance(part, Lazy)]
    empty += [f"{name} is on the meta device" for name, tensor in tensors.items() if tensor.is_meta]
    if empty:
        raise PlanError(
            f"{empty[0]}, so it cannot run: give it values, or do without a sample: ps.split balances by parameters "
            "then, ps.plan by costs="
        )
    return {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
