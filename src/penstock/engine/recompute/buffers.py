"""Buffers that a forward changes: a recompute sees the values that the first run saw, and leaves no change.

    F   count 3 ─▶ 4      the value before is saved for this micro-batch: 3
    F   count 4 ─▶ 5      another micro-batch
    R   count 3 ─▶ 4      the first forward again, on a copy of the saved value
        count 5           as before the recompute

The same holds for parameters that a forward changes (codebooks with running means, ``nn.Embedding(max_norm=…)``) and
for tensors that are plain attributes of modules.

BatchNorm layers with torch's own ``forward`` need no copies: their output does not depend on the running statistics.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import BatchNorm, TorchDispatchMode, storage_id
from penstock.engine.recompute.python_state import is_library
from penstock.errors import PlanError

_LARGE = 1 << 20  # bytes: a larger buffer is copied only if it is known to change, or the mode is new

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

_NO_COPY: Any = object()

SavedBuffers = Sequence[tuple[dict[str, Tensor | None], str, Tensor | None]]
"""Buffers and parameters that a forward changed: the module's dictionary, the name in it, the value before."""


class BufferGuard:
    """The buffers and parameters of one stage. A recompute runs within ``batchnorm_freeze`` and ``restored``.

    ``before`` and ``after`` go around a forward that will be recomputed. In a new mode all buffers are copied and
    compared, to learn which of them the forward changes. Parameters are copied only if an operator writes to them.
    FSDP's ``sharded`` parameters are left out: a forward has temporary copies of them. The last stage's forward runs
    ``loss_fn``, too.
    """

    def __init__(self, module: nn.Module, loss_fn: Any = None, *, sharded: bool = False) -> None:
        every: dict[str, Any] = dict(module.named_modules())
        if isinstance(loss_fn, nn.Module):
            every |= dict(loss_fn.named_modules(prefix="loss_fn"))
        self.batchnorm_freeze = BatchNormFreeze(module if loss_fn is None else nn.ModuleList(every.values()))
        self.parts = {path: part for path, part in every.items() if part._buffers and not has_torch_forward(part)}
        self.entries: list[_BufferEntry] = []
        # Parameters, and tensors that are attributes, that no forward has changed. The others are among the entries.
        self.parameters: list[_BufferEntry] = []
        for path, part in every.items():
            prefix = f"{path}." if path else ""
            if path in self.parts:
                self.entries += [_BufferEntry(part._buffers, name, prefix + name) for name in part._buffers]
            if not sharded and not isinstance(part, torch.jit.ScriptModule):
                self.parameters += [_BufferEntry(part._parameters, name, prefix + name) for name in part._parameters]
            if not is_library(type(part)):
                tensors = [name for name, value in vars(part).items() if isinstance(value, Tensor)]
                self.parameters += [_BufferEntry(vars(part), name, prefix + name) for name in tensors]
        self._versions: list[tuple[_BufferEntry, Tensor | None, int]] | None = None  # of these, when the run began
        self._writes = _WriteDetector(())
        self._known: set[object] = set()
        self._mode: object = _NO_COPY
        self._learning = True

    def begin_run(self) -> None:
        self._versions = None

    def before(self, mode: object) -> AbstractContextManager[Any]:
        """A context for the forward, which does something in a new mode.

        ``mode`` is what the forward may depend on, besides the training modes of the modules with buffers.
        """
        mode = mode, *[part.training for part in self.parts.values()]
        if mode != self._mode:
            self._learning = mode not in self._known
            self._mode = mode
        copies: dict[int, Tensor] = {}
        for entry in self.entries:
            entry.save(self._learning, copies)
        if self._versions is None:
            self._versions = [(e, e.members.get(e.name), e.current_version()) for e in self.parameters]
        if not self._learning:
            return nullcontext()
        self._writes = _WriteDetector(self.parameters)
        return self._writes

    def after(self) -> SavedBuffers:
        """The buffers and parameters that the forward changed, for ``restored``."""
        saved = [entry.take() for entry in self.entries if entry.has_changed(self._learning)]
        if self._learning:
            changed = self._writes.changed()
            self._writes = _WriteDetector(())
            self.entries += changed
            self.parameters = [entry for entry in self.parameters if entry not in changed]
            saved += [entry.take() for entry in changed]
            for entry in self.entries:
                if entry.tensor is not None and num_bytes(entry.tensor) > _LARGE:
                    entry.saved = _NO_COPY
            self._known.add(self._mode)
            self._learning = False
        return saved

    @contextmanager
    def restored(self, saved: SavedBuffers) -> Iterator[None]:
        """Around a recompute: the buffers have the values that the first run saw; afterwards their current ones."""
        self._check_versions()
        current = [(members, name, members.get(name)) for members, name, _ in saved]
        copies: dict[int, Tensor] = {}
        for members, name, value in saved:
            # A copy: the recompute changes it as the first run did, and may not be the last.
            if value is not None and id(value) not in copies:
                now = members.get(name)
                trained = isinstance(now, nn.Parameter) and now.requires_grad
                copies[id(value)] = _earlier_value(now, value) if trained else value.clone()
            members[name] = None if value is None else copies[id(value)]
        try:
            yield
        finally:
            for members, name, value in current:
                members[name] = value

    def _check_versions(self) -> None:
        """At the first recompute of a run: an error for a parameter that a forward has changed for the first time."""
        for entry, tensor, version in self._versions or ():
            same = entry.members.get(entry.name) is tensor
            if same and not entry.changes and entry.current_version() != version:
                entry.tensor = tensor
                self.entries.append(entry)
                self.parameters.remove(entry)
                entry.take()
        self._versions = []


class _EarlierValue(torch.autograd.Function):
    """A copy of the value that a parameter had in the first run. Its gradient is that of the parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


_earlier_value: Any = _EarlierValue.apply


class _WriteDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a forward, and copies a parameter before the first one that writes to its memory."""

    def __init__(self, entries: Iterable[_BufferEntry]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries = list(entries)
        self.tensors: dict[int, Tensor] = {}  # by the identity of the parameter: its memory before the forward
        self.of_storage: dict[int, list[Tensor]] = {}
        for entry in self.entries:
            entry.tensor = tensor = entry.members.get(entry.name)
            entry.version = entry.current_version()
            if tensor is not None and tensor.layout is torch.strided and id(tensor) not in self.tensors:
                self.tensors[id(tensor)] = tensor.detach()
                self.of_storage.setdefault(storage_id(tensor), []).append(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            for i, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[i] if i < len(args) else kwargs.get(argument.name)
                    for tensor in given if isinstance(given, (list, tuple)) else [given]:
                        self._copy(tensor)
        return func(*args, **kwargs)

    def _copy(self, written: Any) -> None:
        if isinstance(written, Tensor) and written.layout is torch.strided:
            for tensor in self.of_storage.pop(storage_id(written), ()):
                self.tensors[id(tensor)] = clone_buffer(self.tensors[id(tensor)])

    def changed(self) -> list[_BufferEntry]:
        """The parameters that were written to, or have other memory now, with their values before the forward."""
        changed = []
        for entry in self.entries:
            now, before = entry.members.get(entry.name), self.tensors.get(id(entry.tensor))
            if now is not entry.tensor and not isinstance(entry.tensor, nn.Parameter):
                continue  # an attribute with another value is Python state
            same_memory = before is None
            if before is not None and now is not None and now is entry.tensor:
                same_memory = storage_id(now) == storage_id(before)
            if not same_memory or entry.has_changed(by_value=False):
                entry.saved = _NO_COPY if same_memory else before
                changed.append(entry)
        return changed


def num_bytes(tensor: Tensor) -> int:
    """The size of a tensor, as if it were dense."""
    return tensor.numel() * tensor.element_size()


@dataclass(slots=True, eq=False)
class _BufferEntry:
    members: dict[str, Tensor | None]
    name: str
    path: str
    changes: bool = False  # a forward has changed it
    tensor: Tensor | None = None
    version: int = 0
    saved: Any = _NO_COPY  # a copy of ``tensor`` at ``version``

    def current_version(self) -> int:
        tensor = self.members.get(self.name)
        return 0 if tensor is None else version_of(tensor)

    def save(self, learning: bool, copies: dict[int, Tensor]) -> None:
        tensor = self.members.get(self.name)
        version = self.current_version()
        fresh = tensor is self.tensor and version == self.version
        # Some writes do not raise the version (``.data``, kernels that update statistics): copy what changes each time.
        if fresh and not learning and not self.changes:
            return
        self.tensor, self.version = tensor, version
        if tensor is None:
            self.saved = None
        elif learning or self.changes or num_bytes(tensor) <= _LARGE:
            if id(tensor) not in copies:  # one buffer may be in two modules
                copies[id(tensor)] = clone_buffer(tensor)
            self.saved = copies[id(tensor)]
        else:
            self.saved = _NO_COPY

    def has_changed(self, by_value: bool) -> bool:
        tensor = self.members.get(self.name)
        if self.changes or tensor is not self.tensor or (tensor is not None and version_of(tensor) != self.version):
            return True
        comparable = tensor is not None and tensor.layout is torch.strided
        return by_value and comparable and not torch.equal(tensor, self.saved)  # type: ignore[arg-type]

    def take(self) -> tuple[dict[str, Tensor | None], str, Tensor | None]:
        self.changes = True
        saved, self.saved = self.saved, _NO_COPY
        if saved is _NO_COPY:
            raise PlanError(
                f"the forward changed {self.path} ({0 if self.tensor is None else num_bytes(self.tensor)} bytes), "
                "which no earlier forward did, and its previous value is needed for the recompute: run the step again"
            )
        return self.members, self.name, saved


class BatchNormFreeze:
    """Entered around a recompute: BatchNorm layers normalise by batch statistics and do not update running ones.

    Only layers with torch's ``forward``; the buffers of others are guarded like any buffer.
    """

    def __init__(self, module: nn.Module) -> None:
        self.layers = [(part, ScratchStatistics(part)) for part in module.modules() if has_torch_forward(part)]
        self._replaced: list[list[tuple[dict[str, Any], dict[str, Any]]]] = []

    def __enter__(self) -> None:
        replaced = []
        for part, scratch in self.layers:
            buffers = part._buffers
            if part.training and part.track_running_stats and buffers["running_mean"] is not None:
                replaced.append((buffers, {name: buffers[name] for name in STATISTICS}))
                buffers.update(scratch.current())
        self._replaced.append(replaced)

    def __exit__(self, *error: object) -> None:
        for buffers, values in self._replaced.pop():
            buffers.update(values)


class ScratchStatistics:
    """Buffers for a BatchNorm layer to update instead of its own. Without any, torch may choose another kernel."""

    def __init__(self, module: nn.Module) -> None:
        self.buffers = module._buffers
        self.scratch: dict[str, Tensor | None] = dict.fromkeys(STATISTICS)

    def current(self) -> dict[str, Tensor | None]:
        """Scratch buffers with the dtype, device and shape that the layer's have now."""
        for name, scratch in self.scratch.items():
            real = self.buffers[name]
            formats = [None if t is None else (t.dtype, t.device, t.shape) for t in (scratch, real)]
            if formats[0] != formats[1]:
                self.scratch[name] = None if real is None else clone_buffer(real)
        return self.scratch


def has_torch_forward(module: nn.Module) -> bool:
    """Whether this is a BatchNorm layer whose ``forward`` is torch's."""
    torch_forwards = BatchNorm.forward, nn.SyncBatchNorm.forward
    return isinstance(module, BatchNorm) and type(module).forward in torch_forwards and "forward" not in vars(module)


def clone_buffer(tensor: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():  # inference tensors have no version counter
        return tensor.detach().clone()


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
