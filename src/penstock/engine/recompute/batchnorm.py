"""Running statistics of BatchNorm layers, the same in all replicas.

Every replica updates its own, micro-batch by micro-batch. After a step, each gets what one process would have that had
run the micro-batches of all of them, the first replica's first: n updates with momentum μ turn r into (1 - μ)ⁿ r + c,
and what each replica's c is, follows from what it had before and has now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock._torch import BatchNorm, DisableTorchFunctionSubclass
from penstock.engine.recompute.buffers import (
    STATISTICS,
    ScratchStatistics,
    clone_buffer,
    has_torch_forward,
    version_of,
)
from penstock.errors import PlanError

__all__ = [
    "DeferredStatistics",
    "Moments",
    "RunningStatistics",
    "commit_statistics",
    "deferred_statistics_of",
    "merge_moments",
    "moments_of",
    "moments_per_call",
]


# Means and variances of values that come in parts: of each part, and of all together.

_CHUNK = 1 << 24  # so many values are looked at in one go: looking takes as much memory again

Moments = tuple[int, Tensor, Tensor, Tensor]
"""Of some values per channel: how many, one of them, how far their mean is from that one, the sum of squares about it.

The mean alone would be rounded to its own size, and a large one says nothing then of how means differ.
"""


def moments_of(x: Tensor) -> Moments | None:
    """The statistics of one micro-batch; None where there is nothing in it."""
    if not x.numel():
        return None
    dtype, dims = torch.promote_types(x.dtype, torch.float32), [0, *range(2, x.dim())]
    parts = []
    for rows in torch.split(x.detach(), max(1, _CHUNK * len(x) // x.numel())):
        one = (rows[0].flatten(1)[:, 0] if x.dim() > 2 else rows[0]).to(dtype)
        var, shift = torch.var_mean(rows.to(dtype) - one.view(-1, *[1] * (x.dim() - 2)), dims, correction=0)
        count = rows.numel() // x.shape[1]
        parts.append((count, one, shift, var * count))
    return merge_moments(parts)


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """The statistics of all of them. Never a difference of large sums: distances between means are squared as such."""
    if len(parts) == 1:
        return parts[0]
    counts, *tensors = zip(*parts, strict=True)
    ones, shifts, squares = (torch.stack(column) for column in tensors)
    away = (ones - ones[0]) + shifts  # of each mean, from one value of the first
    shift = _weighted_sum(away, counts) / sum(counts)
    return sum(counts), ones[0], shift, squares.sum(0) + _weighted_sum((away - shift).square_(), counts)


def _weighted_sum(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The sum of the rows, each times its count. Counts stay on the host; rows that share one are taken together."""
    total, start = torch.zeros_like(rows[0]), 0
    for count, group in groupby(counts):
        end = start + len(list(group))
        total.add_(rows[start:end].sum(0), alpha=count)
        start = end
    return total


def moments_per_call(rows: Sequence[Sequence[Moments | None]], like: Tensor | None) -> list[list[Moments]]:
    """The parts of each call, from all replicas; one that had no samples has seen no call."""
    calls: list[list[Moments]] = [[] for _ in range(max(map(len, rows)))]
    for row in rows:
        for parts, part in zip(calls, row, strict=False):
            if part is not None and like is not None:
                count, one, shift, square = part
                parts.append((count, one.to(like.device), shift.to(like.device), square.to(like.device)))
    return calls


# Deferred BatchNorm: the running statistics of the whole mini-batch, committed once per step.
#
#     F0   x₀ ─ batch_norm ─▶ y₀     normalised by the statistics of its micro-batch
#               └▶ (n, mean, var)₀ ┐
#     F1   x₁ ─ batch_norm ─▶ y₁   │
#               └▶ (n, mean, var)₁ ┴▶ merged ─▶ running statistics      commit: once, when the step is over
#
# During a forward that counts, ``running_mean`` and ``running_var`` of a layer are probes: tensors that look like
# them, and that see the call of ``batch_norm`` which they are given to. So the statistics are those of the very values
# that are normalised, whatever a subclass does before or after, and nothing is put on the modules but for that time.

_MERGE_EVERY = (
    16  # statistics of so many micro-batches wait to be merged: few kernels, and memory that does not grow with m
)

_OPTIONS = ("training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", *_OPTIONS),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_OPTIONS, "cudnn_enabled"),
}
Gather = Callable[[Any], list[Any]]
_take_data = Tensor.data.__get__  # type: ignore[attr-defined]


class DeferredStatistics:
    """The BatchNorm layers of one stage. Forwards run within ``counting``; all that run again, within ``quiet``.

    ``begin`` goes before the forwards of a step or a call, ``commit`` or ``abort`` after them.
    """

    def __init__(self, module: nn.Module, stage: int | None = None) -> None:
        where = "" if stage is None else f"stage {stage}: "
        self.layers: list[_DeferredLayer] = []
        for name, part in module.named_modules():
            if isinstance(part, nn.SyncBatchNorm):
                raise PlanError(
                    f"{where}{name} is a SyncBatchNorm, whose statistics are of several processes at once: with "
                    "batchnorm='deferred' use BatchNorm layers, or batchnorm='microbatch'"
                )
            if isinstance(part, torch.jit.ScriptModule) and "BatchNorm" in str(part.original_name):
                raise PlanError(
                    f"{where}{name} is a scripted {part.original_name}, whose forward cannot be watched: with "
                    "batchnorm='deferred' do not script it, or use batchnorm='microbatch'"
                )
            if isinstance(part, BatchNorm):
                self.layers.append(_DeferredLayer(f"{where}{name}", part))
        self.counting = _ProbesInPlace(self.layers, True)
        self.quiet = _ProbesInPlace(self.layers, False)

    def begin(self) -> None:
        """Forget what an earlier step may have left."""
        for layer in self.layers:
            layer.calls = []

    abort = begin

    def commit(self, gather: Gather | None = None) -> None:
        """Update the running statistics as one forward of the whole mini-batch would have.

        ``gather`` gives every replica's value, in order: the mini-batch is all of theirs.
        """
        with torch.no_grad():
            if gather is not None and self.layers:
                everyone = gather([layer.summary() for layer in self.layers])
                for layer, *rows in zip(self.layers, *everyone, strict=True):
                    layer.calls = moments_per_call(rows, layer.module.running_mean)
            for layer in self.layers:
                layer.commit()


@contextmanager
def commit_statistics(norms: Iterable[DeferredStatistics], gather: Gather | None = None) -> Iterator[None]:
    """Around a step or a call: commit what the stages' forwards counted if all goes well, in the order of the stages.

    So a layer that stands in two stages is updated in the order in which the plain model calls it. ``gather`` is as for
    ``commit``.
    """
    norms = list(norms)
    for norm in norms:
        norm.begin()
    try:
        yield
    except BaseException:
        for norm in norms:
            norm.abort()
        raise
    for norm in norms:
        norm.commit(gather)


def deferred_statistics_of(stages: Mapping[int, Any]) -> list[DeferredStatistics]:
    """Those of stages that have them, in the order of the stages."""
    return [norm for s in sorted(stages) if (norm := stages[s].norms) is not None]


class _DeferredLayer:
    """One BatchNorm layer, and the statistics of its calls in a step: the first of each micro-batch, the second, …"""

    def __init__(self, name: str, module: BatchNorm) -> None:
        self.name = name
        self.module = module
        self.own_forward = not has_torch_forward(module)
        self.calls: list[list[Moments]] = []
        self.fresh: list[Moments | None] = []  # of this micro-batch's calls: empty when a forward begins
        self.counts = False
        self.real: dict[str, Tensor | None] = {}  # the buffers, while the layer has others
        self.seen: list[Tensor] = []  # what the probes show, and its versions
        self.versions: list[int] = []
        self.probes: list[Tensor] = []
        self.exposed = False
        self.outer: list[bool] = []  # ``counts`` of the runs around this one
        self.spares = ScratchStatistics(module)

    def open(self, counts: bool) -> None:
        if self.real:
            self.outer.append(self.counts)
            self.counts = counts
            return
        buffers = self.module._buffers
        mean, var, tracked = (buffers[name] for name in STATISTICS)
        if mean is None or var is None:
            return
        self.counts, self.exposed = counts, False
        self.real = dict(zip(STATISTICS, (mean, var, tracked), strict=True))
        # torch's own forward does not write to them; where another one does, the statistics must be as before.
        self.seen = [clone_buffer(mean), clone_buffer(var)] if self.own_forward else [mean, var]
        self.versions = [version_of(tensor) for tensor in self.seen]
        self.probes = [_probe(tensor, self) for tensor in self.seen]
        # What torch's forward makes of this number is not used; what another one makes of it may be.
        spare = self.spares.of_now()["num_batches_tracked"]
        number = clone_buffer(tracked) if self.own_forward and tracked is not None else spare
        buffers.update(zip(STATISTICS, (*self.probes, number), strict=True))

    def close(self, completed: bool) -> None:
        if self.outer:
            self.counts = self.outer.pop()
            return
        if not self.real:
            return
        buffers = self.module._buffers
        rebound = buffers["running_mean"] is not self.probes[0] or buffers["running_var"] is not self.probes[1]
        changed = rebound or self.exposed or self.versions != [version_of(tensor) for tensor in self.seen]
        buffers.update(self.real)
        fresh, self.fresh = self.fresh, []
        self.real, self.seen, self.probes = {}, [], []
        if completed and changed:
            raise PlanError(
                f"{self.name}, a {type(self.module).__name__}, changes its running statistics by other means than "
                "batch_norm, and those of a whole mini-batch cannot be told from that: use batchnorm='microbatch'"
            )
        if completed:
            self._take(fresh)

    def saw(self, x: Tensor) -> None:
        """One call, on the values ``x``. A compiler may read this: nothing here depends on earlier micro-batches."""
        if self.counts:
            with torch.no_grad():
                self.fresh.append(moments_of(x))

    def _take(self, fresh: Sequence[Moments | None]) -> None:
        self.calls += [[] for _ in fresh[len(self.calls) :]]
        for parts, part in zip(self.calls, fresh, strict=False):
            if part is not None:
                parts.append(part)
            if len(parts) == _MERGE_EVERY:
                parts[:] = [merge_moments(parts)]

    def summary(self) -> list[Moments | None]:
        """What the calls saw, each in one part, on the host; None for a call that saw nothing."""
        whole = [merge_moments(parts) if parts else None for parts in self.calls]
        return [None if part is None else (part[0], part[1].cpu(), part[2].cpu(), part[3].cpu()) for part in whole]

    def commit(self) -> None:
        module, calls, self.calls = self.module, self.calls, []
        for parts in calls:
            tracked = module.num_batches_tracked
            if tracked is not None:
                tracked.add_(1)
            if not parts:  # nothing but empty micro-batches: torch counts them, too
                continue
            count, one, shift, square = merge_moments(parts)
            mean = one + shift
            factor: float | Tensor = 0.0 if module.momentum is None else module.momentum
            if module.momentum is None and tracked is not None:
                factor = tracked.to(mean.dtype).reciprocal()
            for running, new in ((module.running_mean, mean), (module.running_var, square / (count - 1))):
                assert running is not None
                running.copy_(factor * new + (1 - factor) * running.to(new.dtype))


class _ProbesInPlace:
    """The probes of a stage in place: for a forward that is counted, or for one that is not.

    Of those within one another, the innermost says which.
    """

    def __init__(self, layers: Sequence[_DeferredLayer], counts: bool) -> None:
        self.layers = layers
        self.counts = counts

    def __enter__(self) -> None:
        for layer in self.layers:
            layer.open(self.counts)

    def __exit__(self, kind: object, *_: object) -> None:
        complaint: PlanError | None = None
        for layer in self.layers:
            try:
                layer.close(kind is None)
            except PlanError as error:
                complaint = error
        if complaint is not None:
            raise complaint


class _StatisticsProbe(Tensor):
    """Running statistics as a forward sees them: ``batch_norm`` in training is given spare ones, and is seen."""

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
                spares = probe.layer.spares.spares
                output = func(**given | {name: spares[name] for name in STATISTICS[:2]})
                probe.layer.saw(given["input"])
                return output
        elif func == _take_data:  # what is written to that leaves no trace
            args[0].layer.exposed = args[0].layer.own_forward
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with DisableTorchFunctionSubclass():
            return self.detach().clone()


def _probe(real: Tensor, layer: _DeferredLayer) -> Tensor:
    probe = real.detach().as_subclass(_StatisticsProbe)
    probe.layer = layer
    return probe


class _Statistics(NamedTuple):
    """How many updates, and the statistics after them."""

    updates: int
    mean: Tensor
    var: Tensor


class RunningStatistics:
    """The statistics of a rank's layers, brought together after each step."""

    def __init__(self, modules: Iterable[nn.Module], gather: Gather) -> None:
        layers = {id(part): part for module in modules for part in module.modules() if isinstance(part, BatchNorm)}
        self.layers = [layer for layer in layers.values() if layer.num_batches_tracked is not None]
        self.gather = gather
        self._before: list[tuple[BatchNorm, _Statistics]] = []

    def begin(self) -> None:
        """Before the forwards of a step."""
        self._before = [(layer, _read_statistics(layer)) for layer in self.layers if layer.training]

    @torch.no_grad()
    def commit(self) -> None:
        """After them."""
        before, self._before = self._before, []
        if not before:
            return
        everyone = self.gather([_statistics_to_cpu(_read_statistics(layer)) for layer, _ in before])
        for (layer, old), *new in zip(before, *everyone, strict=True):
            mean, var = (_combined(layer.momentum, old, new, which) for which in ("mean", "var"))
            assert layer.running_mean is not None
            assert layer.running_var is not None
            assert layer.num_batches_tracked is not None
            layer.running_mean.copy_(mean)
            layer.running_var.copy_(var)
            layer.num_batches_tracked.fill_(old.updates + sum(seen.updates - old.updates for seen in new))


def _read_statistics(layer: BatchNorm) -> _Statistics:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    assert layer.num_batches_tracked is not None
    return _Statistics(int(layer.num_batches_tracked), layer.running_mean.clone(), layer.running_var.clone())


def _statistics_to_cpu(seen: _Statistics) -> _Statistics:
    return _Statistics(seen.updates, seen.mean.cpu(), seen.var.cpu())


def _combined(momentum: float | None, old: _Statistics, new: list[_Statistics], which: str) -> Tensor:
    start: Tensor = getattr(old, which)
    total, count = start.double(), old.updates
    for seen in new:
        updates = seen.updates - old.updates
        if updates:
            # With momentum None, statistics are the mean of all updates so far: what is kept of them is their share.
            share = old.updates / seen.updates if momentum is None else (1 - momentum) ** updates
            keep = count / (count + updates) if momentum is None else share
            there: Tensor = getattr(seen, which).to(start.device)
            added = there.double() - share * start.double()
            if momentum is None:
                added *= seen.updates / (count + updates)
            total = keep * total + added
            count += updates
    return total.to(start.dtype)
