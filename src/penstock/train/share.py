"""Which part of every mini-batch a process gets, and where it goes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from penstock.errors import PlanError
from penstock.train.mesh import Mesh
from penstock.train.pipeline import Pipeline

__all__ = ["CollateShare", "Place", "Share", "emptied", "hollow", "mapped", "place_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """The part of replica ``rank``, one of ``count``: parts are as even as can be, larger ones first.

    10 samples for 4 replicas:   0 1 2 | 3 4 5 | 6 7 | 8 9
    """

    count: int = 1
    rank: int = 0

    def of(self, samples: Sequence[T]) -> Sequence[T]:
        small, larger = divmod(len(samples), self.count)
        start = self.rank * small + min(self.rank, larger)
        return samples[start : start + small + (self.rank < larger)]


@dataclass(frozen=True)
class Place:
    """A process as a loader sees it: its share, whether a stage of its own needs data, and the devices of these."""

    share: Share = Share()
    loads: bool = True
    inputs: torch.device | None = None
    targets: torch.device | None = None


def place_of(mesh: Mesh | None, pipe: Pipeline | None, everywhere: bool) -> Place:
    """A mesh alone does not know where the stages are: the last one is at the pipeline's end, or at its beginning."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise PlanError(f"mesh must be ps.Mesh(data=…, pipe=…), got {type(mesh).__name__}")
    if pipe is not None and not isinstance(pipe, Pipeline):
        raise PlanError(f"pipe must be a ps.Pipeline, got {type(pipe).__name__}")
    if mesh is not None and pipe is not None and (pipe.mesh is None or _grid(mesh) != _grid(pipe.mesh)):
        raise PlanError(f"mesh and pipe disagree: {mesh!r}, but the pipeline is on {pipe.mesh!r}. Pass pipe alone")
    grid = mesh if pipe is None else pipe.mesh
    share = Share() if grid is None else Share(grid.data, grid.data_rank)
    if grid is not None and (everywhere or pipe is None):
        loads = everywhere or grid.is_first or grid.is_last
        return Place(share, loads, grid.device if loads else None, grid.device if loads else None)
    if pipe is None:
        return Place(share)
    devices = pipe.plan.devices
    assert devices is not None
    return Place(
        share,
        pipe.has_first_stage or pipe.has_last_stage,
        torch.device(devices[0]) if pipe.has_first_stage else None,
        torch.device(devices[-1]) if pipe.has_last_stage else None,
    )


def _grid(mesh: Mesh) -> tuple[Any, ...]:
    return mesh.sizes, mesh.world_ranks, mesh.device


# ── the parts of a batch ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class CollateShare:
    """A ``collate_fn`` that is given all samples of a mini-batch and keeps a share of them."""

    collate: Callable[[list[Any]], Any]
    share: Share

    def __call__(self, samples: list[Any]) -> Any:
        own = list(self.share.of(samples))
        return self.collate(own) if own else emptied(self.collate(samples[:1]))


def mapped(change: Callable[[Any], Any], batch: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """The same structure with every leaf changed; mappings that pytrees do not know are walked into as well."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return change(value)
        inside = {key: mapped(change, item, is_leaf) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return inside
        made = copy.copy(value)
        made.update(inside)
        return made

    return pytree.tree_map(leaf, batch, is_leaf=is_leaf)


def emptied(batch: Any) -> Any:
    """The same structure and dtypes without samples."""
    return mapped(_without_samples, batch, is_leaf=_is_texts)


def hollow(batch: Any) -> Any:
    """The same structure with None everywhere."""
    return mapped(lambda leaf: None, batch)


def _is_texts(value: Any) -> bool:
    """Whether this is one text per sample, which the default ``collate_fn`` leaves in a list."""
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(text, (str, bytes)) for text in value)


def _without_samples(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf[:0] if leaf.dim() else leaf
    if _is_texts(leaf):
        return type(leaf)()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes)):
        return leaf
    raise PlanError(
        f"this replica gets no samples of the last mini-batch, and of a {type(leaf).__name__} in it the loader cannot "
        "make one without samples: let collate_fn give tensors, or pass drop_last=True"
    )
