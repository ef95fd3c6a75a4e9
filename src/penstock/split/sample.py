"""Running a model to learn something of it: with what it is called, and without leaving a trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.chain import CountedOutput
from penstock.split.flatten import is_plain_sequential
from penstock.split.lazy import Lazy
from penstock.split.module_state import ModuleState

__all__ = [
    "accelerators_of",
    "backward_roots",
    "model_output",
    "named_leaves",
    "preserve_state",
    "sample_arguments",
    "sample_inputs",
    "temporary_copies",
]


def sample_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that a sample stands for."""
    if isinstance(sample, Tensor):
        return (sample,), {}
    if isinstance(sample, tuple):
        return sample, {}
    if isinstance(sample, Mapping) and all(isinstance(key, str) for key in sample):
        return (), dict(sample)
    raise PlanError(
        "sample is what the model is called with: a tensor, a tuple of positional arguments or a dict of keyword "
        f"arguments, not a {type(sample).__name__}"
    )


def sample_inputs(model: nn.Module, sample: Any) -> Any:
    """The sample without its targets, where it is ``(inputs, targets)`` and the model takes one argument.

    A Sequential of the user's own layers may take a pair as its one value; torch's layers take a tensor.
    """
    if type(sample) is not tuple or len(sample) != 2:
        return sample
    if is_plain_sequential(model):
        first = next((part for part in model.modules() if not is_plain_sequential(part)), model)
        alone = type(first).__module__.startswith("torch.nn.")
    else:
        alone = not _accepts(model, sample) and _accepts(model, sample[:1])
    return sample[0] if alone else sample


def _accepts(model: nn.Module, args: tuple[Any, ...]) -> bool:
    try:
        inspect.signature(model.forward).bind(*args)
    except TypeError:
        return False
    return True


def model_output(output: Any) -> Any:
    """What the last stage gives as the model would: without the count that may come with it."""
    return output.output if isinstance(output, CountedOutput) else output


def named_leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What stands in a value, and where: ``output['logits']``, ``output[0].state``."""
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
    """Where backward starts: at the loss, where there is one, else at everything that has a gradient."""
    output = model_output(output)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else [leaf for _, leaf in named_leaves(output, "output")]
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.requires_grad]


def accelerators_of(model: nn.Module, value: Any) -> set[torch.device]:
    """The accelerators that a model and its arguments are on; an error where there is nothing to run yet."""
    for name, module in model.named_modules():
        if isinstance(module, Lazy):
            raise PlanError(
                f"layer {name} is not built yet, and would have to be to run: build it, or do without a sample: "
                "ps.split balances by parameters then, ps.plan by costs="
            )
    devices = set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *named_leaves(value, "sample")):
        if isinstance(tensor, Tensor) and tensor.device.type == "meta":
            raise PlanError(
                f"{name} is on the meta device, where nothing runs: give it values, or do without a sample: "
                "ps.split balances by parameters then, ps.plan by costs="
            )
        if isinstance(tensor, Tensor) and tensor.device.type != "cpu":
            devices.add(tensor.device)
    return devices


@contextmanager
def temporary_copies(tensors: Iterable[Tensor], device: torch.device | None = None) -> Iterator[None]:
    """Let parameters and buffers be copies of themselves, which may change; then what they were, bit for bit."""
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
    """Leave the model as it was, whatever runs: attributes, modes, gradients, and the random number generators.

    Gives a function that does so at once. Inside, parameters have no gradients, and nobody is told of new ones. The
    values of parameters and buffers are for ``on_copies``.
    """
    before = ModuleState(model.modules())
    modules = [(torch.get_device_module(device), device) for device in devices]
    generators = [(module.get_rng_state(device), module, device) for module, device in modules]
    parameters = [(p, p.grad, p.requires_grad, p._post_accumulate_grad_hooks) for p in model.parameters()]
    told = [(hooks, dict(hooks)) for *_, hooks in parameters if hooks]

    def again() -> None:
        before.restore()
        for state, module, device in generators:
            module.set_rng_state(state, device)
        for parameter, _, requires_grad, _ in parameters:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
            parameter.grad = None

    try:
        for hooks, _ in told:
            hooks.clear()
        again()
        yield again
    finally:
        again()
        for parameter, grad, *_ in parameters:
            parameter.grad = grad
        for hooks, those in told:
            hooks.update(those)
