"""Runs of a model on a sample: its arguments, the values that it returns, and the state to restore afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.flatten import is_plain_sequential
from penstock.split.lazy import Lazy
from penstock.split.module_state import ModuleState


class Arguments(NamedTuple):
    """The arguments of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Broadcast:
    """``ps.Broadcast(mask)`` among the inputs or targets: a tensor that every micro-batch gets whole."""

    tensor: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tensor, Tensor):
            raise PlanError(
                f"Broadcast takes a tensor, got a {type(self.tensor).__name__}: anything else goes to "
                "every micro-batch as it is"
            )


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of the call that ``sample`` describes."""
    sample = pytree.tree_map(lambda leaf: leaf.tensor if isinstance(leaf, Broadcast) else leaf, sample)
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, Arguments):
        return sample
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, Mapping) and all(isinstance(key, str) for key in sample):
        return (), dict(sample)
    raise PlanError(f"sample is the arguments of a call: a tensor, a tuple or a dict, not a {type(sample).__name__}")


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
        raise PlanError(f"{empty[0]}, so it cannot run: give it values, or leave the sample out")
    return {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}


def only_device(model: nn.Module) -> torch.device | None:
    """The device of a model; None if it is on several, or without data."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())} or {torch.device("cpu")}
    return None if len(devices) > 1 or torch.device("meta") in devices else devices.pop()


def plain_error(model: nn.Module, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Exception | None:
    """The error that the model raises for these arguments; None if it runs, or cannot be run here."""
    device = only_device(model)
    if device is None:
        return None
    with preserve_state(model, {device} - {torch.device("cpu")}), temporary_copies(model.buffers()):
        try:
            model(*args, **kwargs)
        except Exception as error:
            return error
    return None


@contextmanager
def temporary_copies(tensors: Iterable[Tensor], device: torch.device | None = None) -> Iterator[None]:
    """Let parameters and buffers hold copies of their data, on ``device`` if given; restores the original data."""
    data = {id(tensor): (tensor, tensor.data) for tensor in tensors}
    try:
        for tensor, values in data.values():
            tensor.data = values.to(device or values.device, copy=True)
        yield
    finally:
        for tensor, values in data.values():
            tensor.data = values


@contextmanager
def preserve_state(model: nn.Module, devices: set[torch.device]) -> Iterator[Callable[[], None]]:
    """Restore a model's attributes, modes and gradients and the random generators, whatever runs inside.

    Yields a function that restores them at once. Inside, parameters have no gradients and their post-accumulate hooks
    are removed. The values of parameters and buffers are protected by ``temporary_copies``.
    """
    before = ModuleState(model.modules())
    modules = [(torch.get_device_module(device), device) for device in devices]
    generators = [(module.get_rng_state(device), module, device) for module, device in modules]
    parameters = [(p, p.grad, p.requires_grad, p._post_accumulate_grad_hooks) for p in model.parameters()]
    hook_dicts = [(hooks, dict(hooks)) for *_, hooks in parameters if hooks]

    def reset() -> None:
        before.restore()
        for state, module, device in generators:
            module.set_rng_state(state, device)
        for parameter, _, requires_grad, _ in parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = None

    try:
        for hooks, _ in hook_dicts:
            hooks.clear()
        reset()
        yield reset
    finally:
        reset()
        for parameter, grad, *_ in parameters:
            parameter.grad = grad
        for hooks, original in hook_dicts:
            hooks.update(original)
