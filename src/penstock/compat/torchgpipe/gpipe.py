"""``GPipe``: an ``nn.Sequential`` in partitions, each on a device of its own."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.compat.torchgpipe import microbatch
from penstock.compat.torchgpipe.batchnorm import DeferredBatchNorm
from penstock.compat.torchgpipe.handover import refuse_handing_over
from penstock.compat.torchgpipe.marks import show_recomputed
from penstock.compat.torchgpipe.microbatch import TensorOrTensors
from penstock.compat.torchgpipe.skip.skippable import verify_skippables
from penstock.engine import forward_context
from penstock.engine.message import flatten, unflatten
from penstock.split import split
from penstock.train.pipeline import Pipeline

__all__ = ["BalanceError", "GPipe", "current_microbatch", "split_module", "verify_module"]

Device = torch.device | int | str


class BalanceError(ValueError):
    """A balance that does not fit the module."""


class GPipe(nn.Module):
    """Trains an ``nn.Sequential`` as a pipeline: ``balance[j]`` of its layers are on ``devices[j]``.

    ``devices`` are the GPUs, in turn, unless they are named; without any GPU all partitions are on the CPU. A
    mini-batch is cut into ``chunks`` micro-batches. ``checkpoint`` says of which forwards nothing is kept, so that they
    run again for their backward: ``"always"``, of all; ``"except_last"``, but the last micro-batch's; ``"never"``.
    With ``deferred_batch_norm`` running statistics are those of mini-batches.
    """

    balance: list[int] = []  # noqa: RUF012
    devices: list[torch.device] = []  # noqa: RUF012
    chunks: int = 1
    checkpoint: str = "except_last"
    _name = "GPipe"

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
        if self.chunks <= 0:
            raise ValueError("number of chunks must be positive integer")
        if self.checkpoint not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        self._verify(module)
        verify_skippables(module)
        balance = list(balance)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        named = _default_devices(len(balance)) if devices is None else [torch.device(device) for device in devices]
        try:
            self.partitions, self.balance, self.devices = split_module(module, balance, named)
        except BalanceError as error:
            raise ValueError(self._recommend(str(error))) from error
        self._verify_partitions()
        refuse_handing_over(self.partitions)
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._pipelines: dict[bool, tuple[tuple[int, str], Pipeline]] = {}

    # ── what a subclass of another name has other words for ──────────────────────────────────────────────────

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)

    def _verify_partitions(self) -> None:
        """Nothing that ``_verify`` has not seen."""

    @staticmethod
    def _recommend(message: str) -> str:
        return recommend_auto_balance(message)

    def _deny_moving(self) -> NoReturn:
        raise TypeError(f"denied to move parameters and buffers, because {self._name} should manage device placement")

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """The module's output for a mini-batch, a tensor or a tuple of tensors: joined, on the last device."""
        microbatch.check(input)
        if not self.partitions:
            return input
        sizes = microbatch.sizes(input, self.chunks)
        if not any(sizes):
            return self._alone(input)
        output: TensorOrTensors = self._pipeline()(input)
        microbatch.check(output)
        if not self.training or not torch.is_grad_enabled() or self.checkpoint == "never":
            return output
        return show_recomputed(output, len(sizes) - (self.checkpoint == "except_last"))

    def _alone(self, value: TensorOrTensors) -> TensorOrTensors:
        """A mini-batch without samples, of which no micro-batches can be made."""
        for partition, device in zip(self.partitions, self.devices, strict=True):
            leaves, spec = flatten(value)
            value = partition(unflatten([leaf.to(device) for leaf in leaves], spec))
        return value

    def _pipeline(self) -> Pipeline:
        """The pipeline for the present mode: in evaluation no forward is run again."""
        training = self.training or not torch.is_grad_enabled()
        how = (self.chunks, self.checkpoint if training else "never")
        built, pipeline = self._pipelines.get(training, (None, None))
        if built != how or pipeline is None:
            # The partitions are the layers of this Sequential, so that hooks on them run.
            whole = nn.Sequential(OrderedDict((str(j), part) for j, part in enumerate(self.partitions)))
            deferred = any(isinstance(part, DeferredBatchNorm) for part in self.partitions.modules())
            pipeline = Pipeline(
                split(whole, balance=[1] * len(self.partitions)),
                microbatches=self.chunks,
                devices=self.devices,
                recompute=how[1],
                batchnorm="deferred" if deferred else "microbatch",
            )
            pipeline.lockstep = True
            self._pipelines[training] = (how, pipeline)
        return pipeline

    # ── as a Sequential ──────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        """The number of layers."""
        return sum(map(len, self._rows()))

    def __iter__(self) -> Iterator[nn.Module]:
        for row in self._rows():
            yield from row

    def __getitem__(self, index: int) -> nn.Module:
        """A layer by its number."""
        return list(self)[index]

    def _rows(self) -> list[list[nn.Module]]:
        return [list(partition.children()) for partition in self.partitions]

    # ── what it must not be ──────────────────────────────────────────────────────────────────────────────────

    def cuda(self, device: Any = None) -> Self:
        self._deny_moving()

    def cpu(self) -> Self:
        self._deny_moving()

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast; with a device, or a tensor to follow, refuse."""
        moves = bool(args) and isinstance(args[0], (torch.device, int, str, Tensor))
        if moves or "device" in kwargs or "tensor" in kwargs:
            self._deny_moving()
        return super().to(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy has threads of its own.
        return {**self.__dict__, "_pipelines": {}}


def recommend_auto_balance(message: str) -> str:
    """A message about a wrong balance, and how to get a right one."""
    return f"""{message}

A balance can be measured, for as long as the model changes: see torchgpipe.balance (torchgpipe_balancing once):

  from torchgpipe.balance import balance_by_time

  balance = balance_by_time(partitions, model, sample)
  model = GPipe(model, balance, ...)
"""


def verify_module(module: nn.Sequential) -> None:
    """A TypeError or ValueError for what cannot be partitioned."""
    verify_children(module)
    if len(list(module.parameters())) != sum(len(list(child.parameters())) for child in module.children()):
        raise ValueError("module with duplicate parameters in distinct children is not supported")


def verify_children(module: nn.Sequential) -> None:
    """The module is a Sequential, and each of its layers stands there once."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned (non-sequential module cannot be partitioned): "
            f"this is a {type(module).__name__}. penstock.split takes any module"
        )
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")


def split_module(
    module: nn.Sequential, balance: Iterable[int], devices: list[torch.device]
) -> tuple[nn.ModuleList, list[int], list[torch.device]]:
    """The partitions, still to be moved, with the balance and the devices that are used."""
    balance = list(balance)
    if len(module) != sum(balance):
        raise BalanceError(
            f"module and sum of balance have different length (module: {len(module)}, sum of balance: {sum(balance)})"
        )
    if any(count <= 0 for count in balance):
        raise BalanceError(f"all balance numbers must be positive integer (balance: {balance})")
    if len(balance) > len(devices):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(balance)})"
        )
    layers = iter(module.named_children())
    partitions = [nn.Sequential(OrderedDict(islice(layers, count))) for count in balance]
    return nn.ModuleList(partitions), balance, devices[: len(balance)]


def _default_devices(partitions: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    if 0 < gpus < partitions:
        warnings.warn(
            f"{partitions} partitions share {gpus} GPU{'s' * (gpus > 1)}: name the devices=[…] to say how",
            stacklevel=3,
        )
    return [torch.device("cuda", j % gpus) if gpus else torch.device("cpu") for j in range(partitions)]


# ── which micro-batch this is ────────────────────────────────────────────────────────────────────────────────────

_keys: WeakKeyDictionary[forward_context.MicroBatch, Tensor] = WeakKeyDictionary()


def current_microbatch() -> Tensor | None:
    """A tensor that stands for the micro-batch of the layer that runs, as a key; None outside of a pipeline."""
    if forward_context.is_checkpointing() or forward_context.is_recomputing():
        raise RuntimeError(
            "current_microbatch() has no meaning in a forward that runs twice: what is kept under it in the first run "
            "is gone in the second. Use GPipe(…, checkpoint='never'), or pass values on with torchgpipe.skip: "
            "@skippable(stash=[…]), yield stash(…)"
        )
    microbatch = forward_context.current_microbatch()
    return None if microbatch is None else _keys.setdefault(microbatch, torch.empty(0))
