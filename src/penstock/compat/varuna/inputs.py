"""What a program gives to ``Varuna``, as Penstock takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.loss import find_loss
from penstock.engine.message import flatten, unflatten
from penstock.engine.microbatch import Broadcast
from penstock.errors import PlanError

__all__ = ["arguments_of", "check_model", "device_of", "loss_of", "positive", "sample_of"]


def positive(name: str, number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise PlanError(f"{name} must be a whole number of samples from 1, got {number!r}")
    return number


def check_model(model: Any, fp16: bool) -> None:
    """A model on the CPU, whose parameters a loss scale can be used with."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"Varuna takes an nn.Module, got {type(model).__name__}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu":
            raise AssertionError(f"the model must be on the CPU, where it is cut, but {name} is on {tensor.device}")
        if fp16 and isinstance(tensor, nn.Parameter) and tensor.dtype is torch.float16:
            raise PlanError(f"fp16=True computes in float16 from parameters in float32, but {name} is in float16")


def device_of(device: int | str | torch.device, local_rank: int) -> torch.device | str:
    """A number is that of a GPU; without GPUs, it is the CPU."""
    if not isinstance(device, int):
        return device
    if not torch.cuda.is_available():
        return "cpu"
    number = device if device >= 0 else local_rank
    return f"cuda:{number}" if number >= 0 else "cuda"


def sample_of(get_batch_fn: Any, dry_run_input: Any) -> Any:
    """What the model would be called with: of a function, a batch of one sample."""
    if (get_batch_fn is None) == (dry_run_input is None):
        raise PlanError("say how the model is called: by dry_run_input, a dict, or by get_batch_fn(size, device)")
    given = dry_run_input if get_batch_fn is None else get_batch_fn
    return given(1, device="cpu") if callable(given) else given


def arguments_of(inputs: Any) -> dict[str, Any]:
    """The keyword arguments of the model; tensors of one sample among others go to every micro-batch."""
    if not isinstance(inputs, Mapping):
        raise PlanError(f"inputs must be a dict of the model's keyword arguments, got {type(inputs).__name__}")
    leaves, spec = flatten(dict(inputs))
    sizes = {i: leaf.shape[0] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()}
    if any(size != 1 for size in sizes.values()):
        leaves = [Broadcast(leaf) if sizes.get(i) == 1 else leaf for i, leaf in enumerate(leaves)]
    arguments: dict[str, Any] = unflatten(leaves, spec)
    return arguments


def loss_of(output: Any) -> Any:
    """The loss in the model's output: the output itself, the first of several, or what is called so."""
    return output[0] if isinstance(output, (tuple, list)) and output else find_loss(output)
