"""Checkpoints with one file per cut, readable by a pipeline of any depth.

    varuna_ckpt_<step>/opt-fp32-params-<cut>[_<replica>]   parameters and buffers, by the model's names
                       opt-state-<cut>[_<replica>]         the optimizer state of these parameters
                       opt-common-state                    optimizer options, loss scale, the ranks that write
                       markers/complete_<rank>.txt         this rank has written its files

A cut is the part of the model between two CutPoints, active or not. A tensor that several cuts use is saved once, with
the first of them.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import penstock as ps

__all__ = ["COMMON", "Cuts", "LoadedCheckpoint", "begin", "folder_of", "read", "write"]

COMMON = "opt-common-state"
_PREFIX = "varuna_ckpt_"


@dataclass(frozen=True)
class Cuts:
    """The cut and the name under which each tensor is saved, the same at any depth."""

    layers: tuple[str, ...]
    saved_as: Mapping[str, str]  # one name for all names of a tensor
    cut_of: Mapping[str, int]  # the first cut that has it

    @classmethod
    def of(cls, plan: ps.Plan) -> Cuts:
        chain = plan.require_chain()
        first: dict[int, str] = {}
        saved_as: dict[str, str] = {}
        cut_of: dict[str, int] = {}
        for number, layer in enumerate(chain.layers):
            for name, tensor in chain.members(layer):
                saved_as.setdefault(name, first.setdefault(id(tensor), name))
                cut_of.setdefault(saved_as[name], number)
        for tie in plan.ties:
            one = min((saved_as[name] for name in tie.names), key=lambda name: cut_of[name])
            saved_as.update(dict.fromkeys(tie.names, one))
        return cls(tuple(chain.layers), saved_as, cut_of)

    def contents(
        self,
        layers: Iterable[str],
        state: Mapping[str, Tensor],
        optimizer_states: Mapping[str, dict[str, Any]],
        part: int,
        parts: int,
    ) -> dict[str, Any]:
        """The files of these layers; where ``parts`` replicas share the work, those of replica ``part``."""
        unknown = [name for name in state if name not in self.saved_as]
        if unknown:
            raise ps.PlanError(
                f"{unknown[0]} is neither a parameter nor a buffer of any cut: it cannot be saved by cuts"
            )
        values: dict[str, Tensor] = {}
        for name, tensor in state.items():
            values.setdefault(self.saved_as[name], tensor)
        files: dict[str, Any] = {}
        for cut in map(self.layers.index, layers):
            names = [name for name in values if self.cut_of[name] == cut][part::parts]
            suffix = f"{cut}_{part}" if parts > 1 else str(cut)
            files[f"opt-fp32-params-{suffix}"] = {name: values[name].detach().cpu() for name in names}
            files[f"opt-state-{suffix}"] = {n: optimizer_states[n] for n in names if n in optimizer_states}
        return files


# ── the optimizer ────────────────────────────────────────────────────────────────────────────────────────────


def _indexed(optimizer: Optimizer, names: Mapping[int, str]) -> dict[int, str]:
    """The saved names of an optimizer's parameters by their number in its ``state_dict``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {i: names[id(parameter)] for i, parameter in enumerate(parameters) if id(parameter) in names}


def optimizer_states(optimizer: Optimizer | None, names: Mapping[int, str]) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each parameter, by saved name, on the host."""
    if optimizer is None:
        return {}
    states = optimizer.state_dict()["state"]
    indexed = _indexed(optimizer, names).items()
    return {name: {k: _plain(v) for k, v in states[i].items()} for i, name in indexed if i in states}


def optimizer_options(optimizer: Optimizer | None) -> list[dict[str, Any]] | None:
    """The options of the optimizer's parameter groups."""
    if optimizer is None:
        return None
    skipped = ("params", "param_names")
    return [{k: _plain(v) for k, v in group.items() if k not in skipped} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    """Tensors on the host, NumPy numbers as Python's: the latter would not be loaded with ``weights_only``."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return value.item() if callable(getattr(value, "item", None)) else value


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The parts of a checkpoint that this rank needs."""

    state: dict[str, Tensor]
    states: dict[str, dict[str, Any]]  # of the optimizer, by saved name
    groups: list[dict[str, Any]] | None
    scaler: dict[str, Any]

    def restore(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Load the saved state and options into an optimizer."""
        if self.groups is None:
            return
        packed = optimizer.state_dict()
        if len(packed["param_groups"]) != len(self.groups):
            raise ps.PlanError(
                f"the optimizer has {len(packed['param_groups'])} groups of parameters, but the checkpoint's had "
                f"{len(self.groups)}: make the same groups on every rank, empty ones too"
            )
        for group, options in zip(packed["param_groups"], self.groups, strict=True):
            group.update(options)
        indexed = _indexed(optimizer, names).items()
        packed["state"] = {i: self.states[name] for i, name in indexed if name in self.states}
        optimizer.load_state_dict(packed)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────


def folder_of(store: str | Path, step: int) -> Path:
    return Path(store) / f"{_PREFIX}{step}"


def _marker(folder: Path, rank: int) -> Path:
    return folder / "markers" / f"complete_{rank}.txt"


def begin(folder: Path) -> None:
    """Invalidate an earlier checkpoint of the same step."""
    shutil.rmtree(folder / "markers", ignore_errors=True)
    (folder / "markers").mkdir(parents=True, exist_ok=True)


def write(folder: Path, contents: Mapping[str, Any], rank: int) -> None:
    """Write files, then this rank's marker."""
    for name, content in contents.items():
        torch.save(content, folder / name)
    if contents:
        _marker(folder, rank).write_text("complete\n")


def read(folder: Path, cuts: Cuts, wanted: Sequence[str], check_complete: bool) -> LoadedCheckpoint:
    """Read the tensors named ``wanted``, with their optimizer states, from a checkpoint of any depth."""
    if not folder.is_dir():
        names = [path.name.removeprefix(_PREFIX) for path in folder.parent.glob(f"{_PREFIX}*")]
        steps = sorted(int(name) for name in names if name.isdigit())
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise ps.PlanError(f"{folder.parent} has no checkpoint {folder.name}: {there}")
    common = _load(folder / COMMON)
    missing = [rank for rank in common["writers"] if not _marker(folder, rank).exists()]
    if check_complete and missing:
        raise ps.PipelineError(
            f"the checkpoint {folder} is not complete: ranks {missing} have not written all of their part. Take an "
            "earlier one, or wait for the futures that checkpoint(…) gave"
        )
    if common["cuts"] != len(cuts.layers):
        raise ps.PlanError(
            f"the checkpoint {folder} is of a model with {common['cuts']} parts between its cut points, but this one "
            f"has {len(cuts.layers)}"
        )
    values: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for cut in sorted({cuts.cut_of[cuts.saved_as[name]] for name in wanted}):
        for part in range(common["shards"]):
            suffix = f"{cut}_{part}" if common["shards"] > 1 else str(cut)
            values.update(_load(folder / f"opt-fp32-params-{suffix}"))
            states.update(_load(folder / f"opt-state-{suffix}"))
    lacking = [name for name in wanted if cuts.saved_as[name] not in values]
    if lacking:
        raise ps.PlanError(f"the checkpoint {folder} has no {lacking[0]}: it is of another model")
    state = {name: values[cuts.saved_as[name]] for name in wanted}
    return LoadedCheckpoint(state, states, common["groups"], common["scaler"])


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ps.PipelineError(
            f"the checkpoint {file.parent} is not complete: {file.name} is not there. Take an earlier one"
        ) from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ps.PipelineError(f"{file} cannot be read, take an earlier checkpoint: {error}") from error
