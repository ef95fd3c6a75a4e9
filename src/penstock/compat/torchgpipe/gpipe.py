"""``GPipe``: an ``nn.Sequential`` in partitions, one per device, with skip connections and deferred BatchNorm."""

from __future__ import annotations

import dis
import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import combinations, islice
from typing import Any, ClassVar, NoReturn, Self, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

import penstock as ps
from penstock import hooks
from penstock._torch import BatchNorm

__all__ = [
    *("DeferredBatchNorm", "GPipe", "Namespace", "Skippable", "current_microbatch", "pop"),
    *("skippable", "stash", "verify_module", "verify_skippables"),
]

Tensors: TypeAlias = tuple[Tensor, ...]
TensorOrTensors: TypeAlias = Tensor | Tensors


class GPipe(nn.Module):
    """Trains an ``nn.Sequential`` as a pipeline: ``balance[j]`` of its layers run on ``devices[j]``.

    The default devices are the GPUs in order, or the CPU if there are none. A mini-batch is split into ``chunks``
    micro-batches. ``checkpoint`` selects the micro-batches whose activations are recomputed: ``"always"`` (all),
    ``"except_last"`` or ``"never"``. ``deferred_batch_norm`` tracks running statistics per mini-batch.
    """

    _name = "GPipe"
    _balance_hint = "\n\nMeasure it, see torchgpipe.balance (torchgpipe_balancing in 0.0.2) and its balance_by_time"
    _allows_duplicate_parameters = False

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | int | str] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.chunks, self.checkpoint = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(f"balance is required{self._balance_hint}")
        check_options(self.chunks, self.checkpoint)
        verify_module(module, self._allows_duplicate_parameters)
        verify_skippables(module)
        if deferred_batch_norm:
            module = DeferredBatchNorm.convert_deferred_batch_norm(module, self.chunks)
        self.balance = list(balance)
        if devices is None:
            gpus = torch.cuda.device_count()
            if 0 < gpus < len(self.balance):
                shared = f"{len(self.balance)} partitions share {gpus} GPUs"
                warnings.warn(f"{shared}: name the devices=[…] to say how", stacklevel=2)
            devices = [torch.device("cuda", j % gpus) if gpus else "cpu" for j in range(len(self.balance))]
        self.devices = [*map(torch.device, devices)]
        check_balance(len(module), self.balance, self._balance_hint)
        if len(self.balance) > len(self.devices):
            counts = f"devices: {len(self.devices)}, partitions: {len(self.balance)}"
            raise IndexError(f"too few devices to hold given partitions ({counts})")
        del self.devices[len(self.balance) :]
        layers = iter(module.named_children())
        partitions = (nn.Sequential(OrderedDict(islice(layers, count))) for count in self.balance)
        self.partitions = nn.ModuleList(partitions)
        _refuse_shared_globals(self.partitions)
        for (one, here), (other, there) in combinations(zip(self.partitions, self.devices, strict=True), 2):
            if here != there and set(one.parameters()) & set(other.parameters()):
                raise ValueError("module with duplicate parameters on distinct devices is not supported")
        for partition, device in zip(self.partitions, self.devices, strict=True):
            partition.to(device)
        self._pipelines: dict[tuple[int, str], ps.Pipeline] = {}

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """The module's output for a mini-batch, concatenated, on the last device."""
        check(input)
        if not self.partitions:
            return input
        output: TensorOrTensors = self._pipeline()(input)
        check(output)
        if not self.training or not torch.is_grad_enabled() or self.checkpoint == "never":
            return output
        items = [output] if isinstance(output, Tensor) else list(output)
        marked = next((i for i, item in enumerate(items) if isinstance(item, Tensor) and item.requires_grad), None)
        if marked is not None:
            lengths = [len(leaf) for leaf in hooks.tree_flatten(input)[0] if leaf.dim()]
            for _ in range(min([self.chunks, *lengths]) - (self.checkpoint == "except_last")):
                items[marked] = Checkpoint.apply(items[marked])  # type: ignore[no-untyped-call]
        return items[0] if isinstance(output, Tensor) else tuple(items)

    def _pipeline(self) -> ps.Pipeline:
        """The pipeline of the present mode: nothing is recomputed in evaluation mode."""
        recompute = self.checkpoint if self.training or not torch.is_grad_enabled() else "never"
        config = (self.chunks, recompute)
        if config not in self._pipelines:
            # The partitions are layers of this Sequential, so that hooks on them run.
            whole = nn.Sequential(*self.partitions)
            deferred = any(isinstance(part, DeferredBatchNorm) for part in self.partitions.modules())
            self._pipelines[config] = ps.Pipeline(
                ps.split(whole, balance=[1] * len(self.partitions)),
                microbatches=self.chunks,
                devices=self.devices,
                reduction="mean",  # the loss is the caller's
                recompute=recompute,
                batchnorm="deferred" if deferred else "microbatch",
            )
            self._pipelines[config].lockstep = True
        return self._pipelines[config]

    def __len__(self) -> int:
        return sum(len(list(partition.children())) for partition in self.partitions)

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self.partitions:
            yield from partition.children()

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Cast to a dtype. Moving to a device is refused."""
        moves = bool(args) and isinstance(args[0], (torch.device, int, str, Tensor))
        return self.cpu() if moves or "device" in kwargs or "tensor" in kwargs else super().to(*args, **kwargs)

    def cpu(self, device: Any = None) -> NoReturn:
        raise TypeError(f"denied to move parameters and buffers, because {self._name} should manage device placement")

    cuda = cpu

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pipelines": {}}  # a copy starts its own threads


def check_options(chunks: int, checkpoint: str) -> None:
    if chunks <= 0:
        raise ValueError("number of chunks must be positive integer")
    if checkpoint not in ("always", "except_last", "never"):
        raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")


def check_balance(layers: int, balance: list[int], hint: str = "") -> None:
    if layers != sum(balance):
        lengths = f"module: {layers}, sum of balance: {sum(balance)}"
        raise ValueError(f"module and sum of balance have different length ({lengths}){hint}")
    if any(count <= 0 for count in balance):
        raise ValueError(f"all balance numbers must be positive integer (balance: {balance}){hint}")


def verify_module(module: nn.Sequential, duplicate_parameters: bool = False) -> None:
    """Raise a ``TypeError`` or ``ValueError`` for a module that cannot be partitioned."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            "module must be nn.Sequential to be partitioned (non-sequential module cannot be partitioned): "
            f"this is a {type(module).__name__}. penstock.split takes any module"
        )
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")
    count = sum(len(list(child.parameters())) for child in module.children())
    if not duplicate_parameters and len(list(module.parameters())) != count:
        raise ValueError("module with duplicate parameters in distinct children is not supported")


def check(input: TensorOrTensors) -> None:
    """Raise a ``TypeError`` unless ``input`` is a tensor or a (nested) tuple of tensors."""
    for item in input if isinstance(input, tuple) else (input,):
        if isinstance(item, tuple):
            check(item)
        elif not isinstance(item, Tensor):
            raise TypeError(f"expected Tensor, but got {type(item).__name__}")


class Checkpoint(torch.autograd.Function):
    """An identity. Programs count the nodes of this name in the graph, one per recomputed micro-batch."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def _refuse_shared_globals(partitions: Iterable[nn.Module]) -> None:
    """Raise if a layer's forward sets a global variable that a layer of another partition reads.

    Partitions run several micro-batches at a time, so the value may belong to another one. A variable that a forward
    reads and sets (a counter) is accepted.
    """
    uses = []  # partition, layer, and the variables that it reads and sets
    for j, partition in enumerate(partitions):
        for layer in partition.modules():
            function: Any = inspect.unwrap(type(layer).forward)
            if inspect.isfunction(function):
                found = [(i.opname, (function.__module__, i.argval)) for i in dis.get_instructions(function)]
                read = {variable for operation, variable in found if operation == "LOAD_GLOBAL"}
                written = {variable for operation, variable in found if operation == "STORE_GLOBAL"}
                uses.append((j, type(layer).__name__, read, written - read))
    for i, writer, _, written in uses:
        for j, reader, read, _ in uses:
            if j != i and read & written:
                raise ps.PlanError(
                    f"{reader} in partition {j} reads the global variable {min(read & written)[1]!r}, which {writer} "
                    f"in partition {i} sets: partitions work on several micro-batches at a time, and the value may be "
                    "of another one. Pass it on with torchgpipe.skip: @skippable(stash=[…]), yield stash(…)"
                )


_keys: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


def current_microbatch() -> Tensor | None:
    """A tensor that identifies the current micro-batch, for use as a key; None outside of a pipeline."""
    if hooks.is_checkpointing() or ps.is_recomputing():
        raise RuntimeError(
            "current_microbatch() has no meaning in a forward that runs twice: use GPipe(…, checkpoint='never'), or "
            "pass values on with torchgpipe.skip: @skippable(stash=[…]), yield stash(…)"
        )
    current = ps.current_microbatch()
    return None if current is None else _keys.setdefault(current, torch.empty(0))


# ── skip connections ─────────────────────────────────────────────────────────────────────────────────────────────────

Namespace, pop, stash = ps.Namespace, ps.pop, ps.stash

_USE_ERRORS = {
    "stash not declared": "{} has not been declared as stashable",
    "pop not declared": "{} has not been declared as poppable",
    "left to stash": "{} must be stashed but have not",
    "left to pop": "{} must be popped but have not",
    "not stashed": "{} has not been stashed",
}

_MATCH_ERRORS = {
    "both in one layer": "'{first}' declared '{name}' both as stashable and as poppable",
    "stashed twice": "'{last}' redeclared '{name}' as stashable but not isolated by namespace",
    "popped twice": "'{last}' redeclared '{name}' as poppable but not isolated by namespace",
    "not stashed": "'{last}' declared '{name}' as poppable but it was not stashed",
    "popped before stashed": "'{last}' declared '{name}' as poppable but it was not stashed\n"
    "* no module declared '{name}' as poppable but stashed",
    "not popped": "no module declared '{name}' as poppable but stashed",
}


class Skippable(nn.Module):
    """The base of classes made by ``skippable``: a wrapper around the layer, which is ``self.module``."""

    module_cls: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except hooks.SkipUseError as error:
            if error.fault is None:
                raise
            names = ", ".join(f"'{name}'" for name in error.names)
            raise hooks.SkipUseError(_USE_ERRORS[error.fault].format(names), error.fault, error.names) from error

    def forward(self, input: Any) -> Any:
        return self.module(input)

    def dispatch(self, input: Any, handle_stash: Callable[[str, Any], Any], handle_pop: Callable[[str], Any]) -> Any:
        """Run the layer with the given functions that store and retrieve tensors by name."""
        output, reply = self.module(input), None
        try:
            while isinstance(output, Generator):
                request = output.send(reply)
                reply = handle_pop(request.name) if request.verb == "pop" else handle_stash(request.name, request.value)
        except StopIteration as end:
            return end.value
        return output

    def __repr__(self) -> str:
        return f"@skippable({self.module})"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Class decorator: the layer's ``forward`` is a generator that stashes and pops tensors of these names.

    ``yield stash("name", tensor)`` stores a tensor or None; ``tensor = yield pop("name")`` retrieves it.
    """
    declare = ps.skippable(stash, pop)

    def decorate(module_cls: type[nn.Module]) -> type[Skippable]:
        kept = {name: getattr(module_cls, name) for name in ("__module__", "__qualname__", "__doc__")}
        return declare(type(module_cls.__name__, (Skippable,), {"module_cls": module_cls, **kept}))

    return decorate


def verify_skippables(module: nn.Sequential) -> None:
    """Raise one ``TypeError`` that lists every stash without a pop and every pop without a stash."""
    try:
        hooks.verify_skippables(nn.Sequential(OrderedDict(module.named_children())))
    except hooks.SkipError as error:
        lines = []
        for fault in error.faults:
            first, last = (fault.modules[i].rsplit(" (", 1)[0] for i in (0, -1))
            lines.append(f"* {_MATCH_ERRORS[fault.kind].format(name=fault.name, first=first, last=last)}")
        raise TypeError("one or more pairs of stash and pop do not match:\n\n" + "\n".join(lines)) from None


# ── deferred BatchNorm ───────────────────────────────────────────────────────────────────────────────────────────────


class DeferredBatchNorm(BatchNorm):
    """Normalises micro-batches by their own statistics and updates the running statistics once per ``chunks`` of them.

    In a ``GPipe`` the pipeline updates them at the end of each mini-batch, whatever its number of micro-batches.
    """

    sum: Tensor
    sum_squares: Tensor

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        # Entries of torchgpipe's checkpoints, zero between mini-batches; unused here.
        self.register_buffer("sum", torch.zeros(num_features))
        self.register_buffer("sum_squares", torch.zeros(num_features))
        self.chunks = chunks
        self.tracked = 0
        self._statistics: hooks.DeferredStatistics | None = None  # of the mini-batch that has begun

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        # A pipeline that defers the update, or infers shapes, replaces the buffers by tensor subclasses.
        if not self.training or type(self.running_mean) is not Tensor:
            return super().forward(input)
        if self._statistics is None:
            self._statistics = hooks.DeferredStatistics(self)
        recomputing = ps.is_recomputing()
        with self._statistics.ignoring if recomputing else self._statistics.counting:
            output = super().forward(input)
        self.tracked += not recomputing
        if self.tracked == self.chunks:
            self._statistics.commit()
            self._statistics, self.tracked = None, 0
        return output

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> Any:
        """Replace BatchNorm layers in ``module``; parameters, buffers and modes are kept."""
        converted: dict[nn.Module, DeferredBatchNorm] = {}
        for path, part in list(module.named_modules(remove_duplicate=False)):
            deferred = isinstance(part, DeferredBatchNorm) and part.chunks == chunks
            if not isinstance(part, BatchNorm) or not part.track_running_stats or deferred:
                continue
            if part not in converted:
                new = converted[part] = cls(part.num_features, part.eps, part.momentum, part.affine, chunks)
                new._parameters.update(part._parameters)
                for name in ("sum", "sum_squares"):  # of the layer's device and dtype
                    new._buffers[name] = None if part.running_mean is None else torch.zeros_like(part.running_mean)
                new._buffers.update(part._buffers)
                new.train(part.training)
            if path:
                module.set_submodule(path, converted[part])
        return converted.get(module, module)
