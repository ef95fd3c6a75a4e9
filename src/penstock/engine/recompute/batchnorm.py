"""Running statistics of BatchNorm layers in a pipeline: deferred to the mini-batch, or equal in all replicas.

``DeferredStatistics`` (``batchnorm="deferred"``) updates the running statistics once per step, by those of the whole
mini-batch:

    F0   x₀ ─ batch_norm ─▶ y₀     normalised by the statistics of its micro-batch
              └▶ (n, mean, var)₀ ┐
    F1   x₁ ─ batch_norm ─▶ y₁   │
              └▶ (n, mean, var)₁ ┴▶ merge ─▶ running statistics       commit: once, at the end of the step

During a forward, ``running_mean`` and ``running_var`` of a layer are probes: tensors that look like them and intercept
the call of ``batch_norm``. So the statistics are those of the values that are normalised, whatever a subclass does
before or after that call, and modules are changed for the time of the forward alone.

``RunningStatistics`` (``batchnorm="microbatch"``) gives all replicas the statistics of one process that had run all
their micro-batches, the first replica's first. n updates with momentum μ turn r into (1 - μ)ⁿ r + c, and each
replica's c follows from its statistics before and after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock._torch import BatchNorm, DisableTorchFunctionSubclass
from penstock.engine.recompute.buffers import STATISTICS, ScratchStatistics, clone_buffer, has_torch_forward, version_of
from penstock.errors import PlanError

_CHUNK = 1 << 24  # values per reduction, which needs as much memory again

Gather = Callable[[Any], list[Any]]

Moments = tuple[int, Tensor, Tensor, Tensor]
"""Per channel: the count, one value as origin, the mean minus the origin, the sum of squared deviations from the mean.

A mean alone is rounded relative to its own size: differences of large means would be lost.
"""


def moments_of(x: Tensor) -> Moments | None:
    """The moments of one micro-batch; None if it is empty."""
    if not x.numel():
        return None
    dtype, dims = torch.promote_types(x.dtype, torch.float32), [0, *range(2, x.dim())]
    chunks = []
    for rows in torch.split(x.detach(), max(1, _CHUNK * len(x) // x.numel())):
        origin = (rows[0].flatten(1)[:, 0] if x.dim() > 2 else rows[0]).to(dtype)
        var, shift = torch.var_mean(rows.to(dtype) - origin.view(-1, *[1] * (x.dim() - 2)), dims, correction=0)
        count = rows.numel() // x.shape[1]
        chunks.append((count, origin, shift, var * count))
    return merge_moments(chunks)


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """The moments of the union. No difference of large sums is taken: distances between means are squared directly."""
    if len(parts) == 1:
        return parts[0]
    counts, *tensors = zip(*parts, strict=True)
    origins, shifts, squares = (torch.stack(column) for column in tensors)
    distances = (origins - origins[0]) + shifts  # of each mean from the first origin
    shift = _weighted_sum(distances, counts) / sum(counts)
    return sum(counts), origins[0], shift, squares.sum(0) + _weighted_sum((distances - shift).square_(), counts)


def _weighted_sum(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of ``rows`` times ``counts``. Counts stay on the host; neighbours with the same count take one kernel."""
    total, start = torch.zeros_like(rows[0]), 0
    for count, group in groupby(counts):
        end = start + len(list(group))
        total.add_(rows[start:end].sum(0), alpha=count)
        start = end
    return total


_OPTIONS = ("training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", *_OPTIONS),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_OPTIONS, "cudnn_enabled"),
}
_read_data = Tensor.data.__get__  # type: ignore[attr-defined]


class DeferredStatistics:
    """The BatchNorm layers of one stage. First runs of a forward are within ``counting``, recomputes in ``ignoring``.

    ``begin`` comes before the forwards of a step or a call, ``commit`` after them.
    """

    def __init__(self, module: nn.Module, stage: int | None = None) -> None:
        where = "" if stage is None else f"stage {stage}: "
        self.layers: list[_DeferredLayer] = []
        for name, part in module.named_modules():
            scripted = isinstance(part, torch.jit.ScriptModule) and "BatchNorm" in str(part.original_name)
            if scripted or isinstance(part, nn.SyncBatchNorm):
                kind = f"scripted {part.original_name}" if scripted else "SyncBatchNorm"
                raise PlanError(
                    f"{where}{name} is a {kind}, whose batch statistics cannot be intercepted: with "
                    "batchnorm='deferred' use plain BatchNorm layers, or use batchnorm='microbatch'"
                )
            if isinstance(part, BatchNorm):
                self.layers.append(_DeferredLayer(f"{where}{name}", part))
        self.counting = _InstallProbes(self.layers, True)
        self.ignoring = _InstallProbes(self.layers, False)

    def begin(self) -> None:
        """Drop the moments of a step that failed."""
        for layer in self.layers:
            layer.calls = []

    def commit(self, gather: Gather | None = None) -> None:
        """Update the running statistics as one forward of the whole mini-batch would.

        ``gather`` returns every replica's value, in order: the mini-batch spans all replicas.
        """
        with torch.no_grad():
            if gather is not None and self.layers:
                gathered = gather([layer.summary() for layer in self.layers])
                for layer, *rows in zip(self.layers, *gathered, strict=True):
                    layer.calls = []
                    for row in rows:
                        layer.add(row)
            for layer in self.layers:
                layer.commit()


@contextmanager
def commit_statistics(norms: Sequence[DeferredStatistics], gather: Gather | None = None) -> Iterator[None]:
    """Around a step or a call: commit the stages' statistics in the order of the stages; if it fails, drop them.

    A layer that is used in two stages is thus updated in the order in which the plain model calls it.
    """
    for norm in norms:
        norm.begin()
    try:
        yield
    except BaseException:
        for norm in norms:
            norm.begin()
        raise
    for norm in norms:
        norm.commit(gather)


def deferred_statistics_of(stages: Mapping[int, Any]) -> list[DeferredStatistics]:
    """The deferred statistics of the stages that have them, in the order of the stages."""
    return [norm for s in sorted(stages) if (norm := stages[s].norms) is not None]


class _DeferredLayer:
    """One BatchNorm layer. ``calls[i]`` has the moments of its i-th call in each micro-batch of the step."""

    def __init__(self, name: str, module: BatchNorm) -> None:
        self.name = name
        self.module = module
        self.custom_forward = not has_torch_forward(module)
        self.calls: list[list[Moments]] = []
        self.current: list[Moments | None] = []  # of the calls in this micro-batch
        self.counting = False
        self.real: dict[str, Tensor | None] = {}  # the layer's own buffers, while it has probes
        self.shown: list[Tensor] = []  # the tensors behind the probes, and their versions
        self.versions: list[int] = []
        self.probes: list[_StatisticsProbe] = []
        self.data_read = False  # a custom forward has read ``.data``, through which writes leave no version
        self.outer: list[bool] = []  # ``counting`` of the enclosing contexts
        self.scratch = ScratchStatistics(module)

    def install(self, counting: bool) -> None:
        if self.real:
            self.outer.append(self.counting)
            self.counting = counting
            return
        buffers = self.module._buffers
        mean, var, tracked = (buffers[name] for name in STATISTICS)
        if mean is None or var is None:
            return
        self.counting, self.data_read = counting, False
        self.real = dict(zip(STATISTICS, (mean, var, tracked), strict=True))
        # torch's forward does not write to the probes. A custom one may: it gets copies, so that it can be undone.
        self.shown = [clone_buffer(mean), clone_buffer(var)] if self.custom_forward else [mean, var]
        self.versions = [version_of(tensor) for tensor in self.shown]
        self.probes = [tensor.detach().as_subclass(_StatisticsProbe) for tensor in self.shown]
        for probe in self.probes:
            probe.layer = self
        # A custom forward may use this number; torch's only increments it.
        scratch = self.scratch.current()["num_batches_tracked"]
        number = clone_buffer(tracked) if self.custom_forward and tracked is not None else scratch
        buffers.update(zip(STATISTICS, (*self.probes, number), strict=True))

    def remove(self, completed: bool) -> None:
        if self.outer:
            self.counting = self.outer.pop()
            return
        if not self.real:
            return
        buffers = self.module._buffers
        rebound = buffers["running_mean"] is not self.probes[0] or buffers["running_var"] is not self.probes[1]
        changed = rebound or self.data_read or self.versions != [version_of(tensor) for tensor in self.shown]
        buffers.update(self.real)
        current, self.current = self.current, []
        self.real, self.shown, self.probes = {}, [], []
        if completed and changed:
            raise PlanError(
                f"{self.name}, a {type(self.module).__name__}, changes its running statistics by other means than "
                "batch_norm, so those of the whole mini-batch cannot be computed: use batchnorm='microbatch'"
            )
        if completed:
            self.add(current)

    def add(self, row: Sequence[Moments | None]) -> None:
        """Add the moments of each call in one micro-batch, or in one replica. One without samples has no calls."""
        self.calls += [[] for _ in row[len(self.calls) :]]
        for moments, part in zip(self.calls, row, strict=False):
            if part is not None:
                moments.append(part)

    def summary(self) -> list[Moments | None]:
        """The merged moments of each call, on the host; None for a call that had only empty micro-batches."""
        merged = [merge_moments(moments) if moments else None for moments in self.calls]
        return [None if one is None else (one[0], one[1].cpu(), one[2].cpu(), one[3].cpu()) for one in merged]

    def commit(self) -> None:
        module, calls, self.calls = self.module, self.calls, []
        for moments in calls:
            tracked = module.num_batches_tracked
            if tracked is not None:
                tracked.add_(1)
            if not moments:  # torch counts empty batches, too
                continue
            count, origin, shift, square = merge_moments(moments)
            mean = origin + shift
            factor: float | Tensor = 0.0 if module.momentum is None else module.momentum
            if module.momentum is None and tracked is not None:
                factor = tracked.to(mean.dtype).reciprocal()
            for running, new in ((module.running_mean, mean), (module.running_var, square / (count - 1))):
                assert running is not None
                old = running.to(new.dtype)
                running.copy_(factor * new.to(old.device) + (1 - factor) * old)


@dataclass(frozen=True)
class _InstallProbes:
    """Around a forward: layers have probes, and count their calls or not. Of nested contexts the innermost decides."""

    layers: Sequence[_DeferredLayer]
    counting: bool

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.install(self.counting)

    def __exit__(self, kind: object, *_: object) -> None:
        with ExitStack() as stack:  # all of them, even if one raises
            for layer in self.layers:
                stack.callback(layer.remove, kind is None)


class _StatisticsProbe(Tensor):
    """The running statistics that a forward sees. ``batch_norm`` in training gets scratch ones, and is counted."""

    layer: _DeferredLayer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _ARGUMENTS.get(func)
        if names is not None:
            given = dict(zip(names, args, strict=False)) | dict(kwargs)
            probe = given["running_mean"]
            if given["training"] and isinstance(probe, _StatisticsProbe):
                scratch = probe.layer.scratch.scratch
                output = func(**given | {name: scratch[name] for name in STATISTICS[:2]})
                if probe.layer.counting:  # torch.compile may trace this: nothing depends on earlier micro-batches
                    with torch.no_grad():
                        probe.layer.current.append(moments_of(given["input"]))
                return output
        elif func == _read_data:
            args[0].layer.data_read = args[0].layer.custom_forward
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().clone()


class RunningStatistics:
    """The running statistics of a rank's BatchNorm layers, combined over the replicas after each step."""

    def __init__(self, modules: Iterable[nn.Module], gather: Gather) -> None:
        layers = {id(part): part for module in modules for part in module.modules() if isinstance(part, BatchNorm)}
        self.layers = [layer for layer in layers.values() if layer.num_batches_tracked is not None]
        self.gather = gather

    @contextmanager
    def combining(self) -> Iterator[None]:
        """Around a step: afterwards the statistics have the updates of all replicas."""
        before = [(layer, _read_statistics(layer)) for layer in self.layers if layer.training]
        yield
        with torch.no_grad():
            gathered = self.gather([_read_statistics(layer) for layer, _ in before]) if before else []
            for (layer, old), *new in zip(before, *gathered, strict=True):
                updates, *values = zip(old, *new, strict=True)
                for name, (before_step, *after) in zip(STATISTICS, values, strict=False):
                    running: Any = getattr(layer, name)
                    running.copy_(_combine(layer.momentum, updates, before_step, after))
                tracked: Any = layer.num_batches_tracked
                tracked.fill_(sum(updates) - len(new) * updates[0])


def _read_statistics(layer: Any) -> tuple[int, Tensor, Tensor]:
    """The number of updates, and mean and variance on the host."""
    return int(layer.num_batches_tracked), layer.running_mean.cpu().clone(), layer.running_var.cpu().clone()


def _combine(momentum: float | None, updates: Sequence[int], old: Tensor, new: Sequence[Tensor]) -> Tensor:
    """Apply the updates of all replicas to a statistic, one replica after the other.

    ``updates`` has the number of updates in ``old``, then in ``new``.
    """
    before, total, count = updates[0], old.double(), updates[0]
    for value, number in zip(new, updates[1:], strict=True):
        added = number - before
        if added and momentum is None:  # the statistics are the mean of all updates
            total = (total * count + value.double() * number - old.double() * before) / (count + added)
        elif added and momentum is not None:
            total = value.double() + (1 - momentum) ** added * (total - old.double())
        count += added
    return total
