"""Deferred BatchNorm: the running statistics of the whole mini-batch, committed once per step.

    F0   x₀ ─ batch_norm ─▶ y₀     normalised by the statistics of its micro-batch
              └▶ (n, mean, var)₀ ┐
    F1   x₁ ─ batch_norm ─▶ y₁   │
              └▶ (n, mean, var)₁ ┴▶ merged ─▶ running statistics      commit: once, when the step is over

During a forward that counts, ``running_mean`` and ``running_var`` of a layer are probes: tensors that look like
them, and that see the call of ``batch_norm`` which they are given to. So the statistics are those of the very values
that are normalised, whatever a subclass does before or after, and nothing is put on the modules but for that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from penstock.engine.batchstatistics import Part, measured, merged, together
from penstock.engine.buffers import STATISTICS, Spares, copy_of, keeps_torch_forward, version_of
from penstock.errors import PlanError

__all__ = ["DeferredBatchNorm", "committing", "norms_of"]

_FOLD = 16  # statistics of so many micro-batches wait to be merged: few kernels, and memory that does not grow with m

_HOW = ("training", "momentum", "eps")
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", *_HOW),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", *_HOW, "cudnn_enabled"),
}
Gather = Callable[[Any], list[Any]]
_take_data = Tensor.data.__get__  # type: ignore[attr-defined]


class DeferredBatchNorm:
    """The BatchNorm layers of one stage. Forwards run within ``counting``; all that run again, within ``quiet``.

    ``begin`` goes before the forwards of a step or a call, ``commit`` or ``abort`` after them.
    """

    def __init__(self, module: nn.Module, stage: int | None = None) -> None:
        where = "" if stage is None else f"stage {stage}: "
        self.layers: list[_Layer] = []
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
            if isinstance(part, _BatchNorm):
                self.layers.append(_Layer(f"{where}{name}", part))
        self.counting = _Probing(self.layers, True)
        self.quiet = _Probing(self.layers, False)

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
                    layer.calls = together(rows, layer.module.running_mean)
            for layer in self.layers:
                layer.commit()


@contextmanager
def committing(norms: Iterable[DeferredBatchNorm], gather: Gather | None = None) -> Iterator[None]:
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


def norms_of(stages: Mapping[int, Any]) -> list[DeferredBatchNorm]:
    """Those of stages that have them, in the order of the stages."""
    return [norm for s in sorted(stages) if (norm := stages[s].norms) is not None]


class _Layer:
    """One BatchNorm layer, and the statistics of its calls in a step: the first of each micro-batch, the second, …"""

    def __init__(self, name: str, module: _BatchNorm) -> None:
        self.name = name
        self.module = module
        self.own_forward = not keeps_torch_forward(module)
        self.calls: list[list[Part]] = []
        self.fresh: list[Part | None] = []  # of this micro-batch's calls: empty when a forward begins
        self.counts = False
        self.real: dict[str, Tensor | None] = {}  # the buffers, while the layer has others
        self.seen: list[Tensor] = []  # what the probes show, and its versions
        self.versions: list[int] = []
        self.probes: list[Tensor] = []
        self.exposed = False
        self.outer: list[bool] = []  # ``counts`` of the runs around this one
        self.spares = Spares(module)

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
        self.seen = [copy_of(mean), copy_of(var)] if self.own_forward else [mean, var]
        self.versions = [version_of(tensor) for tensor in self.seen]
        self.probes = [_probe(tensor, self) for tensor in self.seen]
        # What torch's forward makes of this number is not used; what another one makes of it may be.
        spare = self.spares.of_now()["num_batches_tracked"]
        number = copy_of(tracked) if self.own_forward and tracked is not None else spare
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
                self.fresh.append(measured(x))

    def _take(self, fresh: Sequence[Part | None]) -> None:
        self.calls += [[] for _ in fresh[len(self.calls) :]]
        for parts, part in zip(self.calls, fresh, strict=False):
            if part is not None:
                parts.append(part)
            if len(parts) == _FOLD:
                parts[:] = [merged(parts)]

    def summary(self) -> list[Part | None]:
        """What the calls saw, each in one part, on the host; None for a call that saw nothing."""
        whole = [merged(parts) if parts else None for parts in self.calls]
        return [None if part is None else (part[0], part[1].cpu(), part[2].cpu(), part[3].cpu()) for part in whole]

    def commit(self) -> None:
        module, calls, self.calls = self.module, self.calls, []
        for parts in calls:
            tracked = module.num_batches_tracked
            if tracked is not None:
                tracked.add_(1)
            if not parts:  # nothing but empty micro-batches: torch counts them, too
                continue
            count, one, shift, square = merged(parts)
            mean = one + shift
            factor: float | Tensor = 0.0 if module.momentum is None else module.momentum
            if module.momentum is None and tracked is not None:
                factor = tracked.to(mean.dtype).reciprocal()
            for running, new in ((module.running_mean, mean), (module.running_var, square / (count - 1))):
                assert running is not None
                running.copy_(factor * new + (1 - factor) * running.to(new.dtype))


class _Probing:
    """The probes of a stage in place: for a forward that is counted, or for one that is not.

    Of those within one another, the innermost says which.
    """

    def __init__(self, layers: Sequence[_Layer], counts: bool) -> None:
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


class _Probe(Tensor):
    """Running statistics as a forward sees them: ``batch_norm`` in training is given spare ones, and is seen."""

    layer: _Layer

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = _ARGUMENTS.get(func)
        if names is not None:
            given = dict(zip(names, args, strict=False)) | dict(kwargs)
            probe = given["running_mean"]
            if given["training"] and isinstance(probe, _Probe):
                spares = probe.layer.spares.spares
                output = func(**given | {name: spares[name] for name in STATISTICS[:2]})
                probe.layer.saw(given["input"])
                return output
        elif func == _take_data:  # what is written to that leaves no trace
            args[0].layer.exposed = args[0].layer.own_forward
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.detach().clone()


def _probe(real: Tensor, layer: _Layer) -> Tensor:
    probe = real.detach().as_subclass(_Probe)
    probe.layer = layer
    return probe
