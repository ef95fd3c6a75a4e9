"""``GPipe``: an ``nn.Sequential`` in partitions, one per device."""

from __future__ import annotations

import dis
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import penstock as ps
from penstock import hooks
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from penstock.compat.torchgpipe.skip import verify_skippables

__all__ = ["GPipe", "current_microbatch", "verify_module"]

Device = torch.device | int | str
Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors


class GPipe(nn.Module):
    """Trains an ``nn.Sequential`` as a pipeline: ``balance[j]`` of its layers run on ``devices[j]``.

    The default devices are the GPUs in order, or the CPU if there are none. A mini-batch is split into ``chunks``
    micro-batches. ``checkpoint`` selects the micro-batches whose activations are recomputed: ``"always"`` (all),
    ``"except_last"`` or ``"never"``. ``deferred_batch_norm`` tracks running statistics per mini-batch.
    """

    balance: list[int] = []  # noqa: RUF012
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"

    # Texts that a subclass of another name replaces.
    _name = "GPipe"
    _balance_module = "torchgpipe.balance (torchgpipe_balancing in 0.0.2)"

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: int = chunks,
        checkpoint: str = checkpoint,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(self._recommend("balance is required"))
        check_options(self.chunks, self.checkpoint)
        self._verify(module)
        verify_skippables(module)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self.balance = list(balance)
        self.devices = _default_devices(len(self.balance)) if devices is None else [*map(torch.device, devices)]
        try:
            check_balance(len(module), self.balance)
        except ValueError as error:
            raise ValueError(self._recommend(str(error))) from None
        if len(self.balance) > len(self.devices):
            counts = f"devices: {len(self.devices)}, partitions: {len(self.balance)}"
            raise IndexError(f"too few devices to hold given partitions ({counts})")
        del self.devices[len(self.balance) :]
        layers = iter(module.named_children())
        partitions = (nn.Sequential(OrderedDict(islice(layers, count))) for count in self.balance)
        self.partitions = nn.ModuleList(partitions)
        self._verify_partitions()
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._pipelines: dict[bool, tuple[tuple[int, str], ps.Pipeline]] = {}

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)

    def _verify_partitions(self) -> None:
        _refuse_shared_globals(self.partitions)

    def _recommend(self, message: str) -> str:
        path = self._balance_module.split(" ")[0]
        return f"""{message}

A balance can be measured, see {self._balance_module}:

  from {path} import balance_by_time

  balance = balance_by_time(partitions, model, sample)
  model = {self._name}(model, balance, ...)
"""

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """The module's output for a mini-batch, concatenated, on the last device."""
        check(input)
        if not self.partitions:
            return input
        output: TensorOrTensors = self._pipeline()(input)
        check(output)
        if not self.training or not torch.is_grad_enabled() or self.checkpoint == "never":
            return output
        lengths = [len(leaf) for leaf in hooks.tree_flatten(input)[0] if leaf.dim()]
        return _mark_recomputed(output, min([self.chunks, *lengths]) - (self.checkpoint == "except_last"))

    def _pipeline(self) -> ps.Pipeline:
        """The pipeline of the present mode: nothing is recomputed in evaluation mode."""
        training = self.training or not torch.is_grad_enabled()
        config = (self.chunks, self.checkpoint if training else "never")
        built, pipeline = self._pipelines.get(training, (None, None))
        if built != config or pipeline is None:
            # The partitions are layers of this Sequential, so that hooks on them run.
            whole = nn.Sequential(OrderedDict((str(j), part) for j, part in enumerate(self.partitions)))
            deferred = any(isinstance(part, DeferredBatchNorm) for part in self.partitions.modules())
            pipeline = ps.Pipeline(
                ps.split(whole, balance=[1] * len(self.partitions)),
                microbatches=self.chunks,
                devices=self.devices,
                recompute=config[1],
                batchnorm="deferred" if deferred else "microbatch",
            )
            pipeline.lockstep = True
            self._pipelines[training] = (config, pipeline)
        return pipeline

    def __len__(self) -> int:
        return sum(len(list(partition.children())) for partition in self.partitions)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def cuda(self, device: Any = None) -> Self:
        self._deny_moving()

    def cpu(self) -> Self:
        self._deny_moving()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast to a dtype. Moving to a device is refused."""
        moves = bool(args) and isinstance(args[0], (torch.device, int, str, Tensor))
        if moves or "device" in kwargs or "tensor" in kwargs:
            self._deny_moving()
        return super().to(*args, **kwargs)

    def _deny_moving(self) -> NoReturn:
        raise TypeError(f"denied to move parameters and buffers, because {self._name} should manage device placement")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipelines": {}}  # a copy starts its own threads


def check_options(chunks: int, checkpoint: str) -> None:
    if chunks <= 0:
        raise ValueError("number of chunks must be positive integer")
    if checkpoint not in ("always", "except_last", "never"):
        raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")


def check_balance(layers: int, balance: list[int]) -> None:
    total = sum(balance)
    if layers != total:
        lengths = f"module: {layers}, sum of balance: {total}"
        raise ValueError(f"module and sum of balance have different length ({lengths})")
    if any(count <= 0 for count in balance):
        raise ValueError(f"all balance numbers must be positive integer (balance: {balance})")


def verify_module(module: nn.Sequential) -> None:
    """Raise a ``TypeError`` or ``ValueError`` for a module that cannot be partitioned."""
    verify_children(module)
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in module.children()):
        raise ValueError("module with duplicate parameters in distinct children is not supported")


def verify_children(module: nn.Sequential) -> None:
    """Check that the module is a Sequential without repeated layers."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned (non-sequential module cannot be partitioned): "
            f"this is a {type(module).__name__}. penstock.split takes any module"
        )
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")


def _default_devices(partitions: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    if 0 < gpus < partitions:
        warnings.warn(
            f"{partitions} partitions share {gpus} GPU{'s' * (gpus > 1)}: name the devices=[…] to say how",
            stacklevel=3,
        )
    return [torch.device("cuda", j % gpus) if gpus else torch.device("cpu") for j in range(partitions)]


def check(input: TensorOrTensors) -> None:
    """Raise a ``TypeError`` unless ``input`` is a tensor or a (nested) tuple of tensors."""
    for item in input if isinstance(input, tuple) else (input,):
        if isinstance(item, tuple):
            check(item)
        elif not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")


# ── marks in autograd's graph ────────────────────────────────────────────────────────────────────────────────────


class Checkpoint(torch.autograd.Function):
    """An identity. Programs count nodes of this name, one per recomputed micro-batch, in torchgpipe's graphs."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _mark_recomputed(output: TensorOrTensors, count: int) -> TensorOrTensors:
    """The output, with ``count`` Checkpoint nodes in its graph."""
    items = [output] if isinstance(output, Tensor) else list(output)
    marked = next((i for i, item in enumerate(items) if isinstance(item, Tensor) and item.requires_grad), None)
    for _ in range(count if marked is not None else 0):
        items[marked] = Checkpoint.apply(items[marked])  # type: ignore[no-untyped-call, index]
    return items[0] if isinstance(output, Tensor) else tuple(items)


# ── global variables between partitions ──────────────────────────────────────────────────────────────────────────


def _refuse_shared_globals(partitions: Iterable[nn.Module]) -> None:
    """Raise if a layer's forward sets a global variable that a layer of another partition reads.

    Partitions work on several micro-batches at a time, so the value may belong to another one. A variable that a
    forward reads before it sets it (a counter) is accepted.
    """
    uses = []  # partition, layer, and the variables that it reads and sets
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            function: Any = inspect.unwrap(type(layer).forward)
            found = [(i.opname, i.argval) for i in dis.get_instructions(getattr(function, "__code__", ""))]
            read, written = (
                {(function.__module__, name) for operation, name in found if operation == kind}
                for kind in ("LOAD_GLOBAL", "STORE_GLOBAL")
            )
            uses.append((j, type(layer).__name__, read, written - read))
    for i, writer, _, written in uses:
        for j, reader, read, _ in uses:
            if j != i and read & written:
                raise ps.PlanError(
                    f"{reader} in partition {j} reads the global variable {min(read & written)[1]!r}, which {writer} "
                    f"in partition {i} sets: partitions work on several micro-batches at a time, and the value may be "
                    "of another one. Pass it on with torchgpipe.skip: @skippable(stash=[…]), yield stash(…)"
                )


# ── current_microbatch ───────────────────────────────────────────────────────────────────────────────────────────

_keys: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def current_microbatch() -> Tensor | None:
    """A tensor that identifies the current micro-batch, for use as a key; None outside of a pipeline."""
    if ps.is_checkpointing() or ps.is_recomputing():
        raise RuntimeError(
            "current_microbatch() has no meaning in a forward that runs twice: what is kept under it in the first run "
            "is gone in the second. Use GPipe(…, checkpoint='never'), or pass values on with torchgpipe.skip: "
            "@skippable(stash=[…]), yield stash(…)"
        )
    current = ps.current_microbatch()
    return None if current is None else _keys.setdefault(current, torch.empty(0))
