"""Checkpoints with a file for each cut, which a pipeline of any depth can read.

    varuna_ckpt_<step>/opt-fp32-params-<cut>[_<replica>]   parameters and buffers, by the model's names
                       opt-state-<cut>[_<replica>]         the optimizer's state of these parameters
                       opt-common-state                    its options, the loss scale, who writes
                       markers/complete_<rank>.txt         this rank has written its part

A cut is what lies between two marks of the model, active or not. What several cuts use is saved once, with the first.
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import PipelineError, PlanError
from penstock.split.plan import Plan

__all__ = [
    "COMMON",
    "Cuts",
    "Loaded",
    "begin",
    "copy",
    "files",
    "folder_of",
    "options_of",
    "read",
    "restore",
    "states_of",
    "write",
    "write_aside",
]

COMMON = "opt-common-state"
_PREFIX = "varuna_ckpt_"


@dataclass(frozen=True)
class Cuts:
    """With which cut, and under which name, everything is saved: the same at any depth."""

    layers: tuple[str, ...]
    saved_as: Mapping[str, str]
    """The one name for all names of a tensor."""
    home: Mapping[str, int]
    """The number of the first cut that has it."""

    @classmethod
    def of(cls, plan: Plan) -> Cuts:
        line = plan.require_chain()
        first: dict[int, str] = {}
        saved_as: dict[str, str] = {}
        home: dict[str, int] = {}
        for number, layer in enumerate(line.layers):
            for name, tensor in line.members(layer):
                saved_as.setdefault(name, first.setdefault(id(tensor), name))
                home.setdefault(saved_as[name], number)
        for tie in plan.ties:
            one = min((saved_as[name] for name in tie.names), key=lambda name: home[name])
            saved_as.update(dict.fromkeys(tie.names, one))
        return cls(tuple(line.layers), saved_as, home)

    @property
    def count(self) -> int:
        return len(self.layers)

    def of_layers(self, layers: Iterable[str]) -> list[int]:
        """The numbers of the cuts that a stage has."""
        return [self.layers.index(layer) for layer in layers]


@dataclass(frozen=True)
class Loaded:
    """A checkpoint, as far as this rank's stage is concerned."""

    state: dict[str, Tensor]
    optimizer: dict[str, dict[str, Any]]  # by the names that parameters are saved under
    groups: list[dict[str, Any]] | None
    scaler: dict[str, Any]


def folder_of(store: str | Path, step: int) -> Path:
    return Path(store) / f"{_PREFIX}{step}"


# ── what is saved ────────────────────────────────────────────────────────────────────────────────────────────


def files(
    cuts: Cuts,
    own: Sequence[int],
    state: Mapping[str, Tensor],
    states: Mapping[str, dict[str, Any]],
    share: tuple[int, int],
) -> dict[str, Any]:
    """The contents of the files of the cuts ``own``; of several replicas that share the work, this one's part."""
    strange = [name for name in state if name not in cuts.saved_as]
    if strange:
        raise PlanError(f"{strange[0]} is neither a parameter nor a buffer of any cut: it cannot be saved by cuts")
    values: dict[str, Tensor] = {}
    for name, tensor in state.items():
        values.setdefault(cuts.saved_as[name], tensor)
    part, parts = share
    made: dict[str, Any] = {}
    for cut in own:
        names = [name for name in values if cuts.home[name] == cut][part::parts]
        suffix = f"{cut}_{part}" if parts > 1 else str(cut)
        made[f"opt-fp32-params-{suffix}"] = {name: values[name].detach().cpu() for name in names}
        made[f"opt-state-{suffix}"] = {name: _on_host(states[name]) for name in names if name in states}
    return made


def states_of(names: Mapping[int, str], optimizer: Optimizer | None) -> dict[str, dict[str, Any]]:
    """The optimizer's state of each of these parameters."""
    if optimizer is None:
        return {}
    packed = optimizer.state_dict()["state"]
    return {names[key]: packed[i] for i, key in enumerate(_keys(optimizer)) if key in names and i in packed}


def options_of(optimizer: Optimizer | None) -> list[dict[str, Any]] | None:
    """The options of the optimizer's groups."""
    if optimizer is None:
        return None
    skipped = ("params", "param_names")
    return [{k: _plain(v) for k, v in group.items() if k not in skipped} for group in optimizer.param_groups]


def restore(optimizer: Optimizer, names: Mapping[int, str], loaded: Loaded) -> None:
    """Give an optimizer the state and the options that were saved."""
    if loaded.groups is None:
        return
    packed = optimizer.state_dict()
    if len(packed["param_groups"]) != len(loaded.groups):
        raise PlanError(
            f"the optimizer has {len(packed['param_groups'])} groups of parameters, but the checkpoint's had "
            f"{len(loaded.groups)}: make the same groups on every rank, empty ones too"
        )
    for group, options in zip(packed["param_groups"], loaded.groups, strict=True):
        group.update(options)
    packed["state"] = {
        i: loaded.optimizer[names[key]]
        for i, key in enumerate(_keys(optimizer))
        if key in names and names[key] in loaded.optimizer
    }
    optimizer.load_state_dict(packed)


def _keys(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(value) for key, value in state.items()}


def _plain(value: Any) -> Any:
    """Tensors on the host, and numbers as Python's own: NumPy's would not be read back."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return value.item() if callable(getattr(value, "item", None)) else value


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────


def begin(folder: Path) -> None:
    """An earlier checkpoint of the same step is incomplete from now on."""
    shutil.rmtree(folder / "markers", ignore_errors=True)
    (folder / "markers").mkdir(parents=True, exist_ok=True)


def write(folder: Path, contents: Mapping[str, Any], rank: int) -> None:
    """Write files, and say that they are all there."""
    for name, content in contents.items():
        torch.save(content, folder / name)
    if contents:
        _mark(folder, rank)


def write_aside(tempdir: str | Path, contents: Mapping[str, Any]) -> Path:
    """Write files to a folder of their own in ``tempdir``."""
    Path(tempdir).mkdir(parents=True, exist_ok=True)
    there = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=tempdir))
    for name, content in contents.items():
        torch.save(content, there / name)
    return there


def copy(there: Path, folder: Path, rank: int, marks: bool) -> None:
    """Take files from where they were written to where they belong, and say that they are all there."""
    try:
        for file in sorted(there.iterdir()):
            partly = folder / f"{file.name}.part"
            shutil.copyfile(file, partly)
            os.replace(partly, folder / file.name)
        if marks:
            _mark(folder, rank)
    finally:
        shutil.rmtree(there, ignore_errors=True)


def _mark(folder: Path, rank: int) -> None:
    _marker(folder, rank).write_text("complete\n")


def _marker(folder: Path, rank: int) -> Path:
    return folder / "markers" / f"complete_{rank}.txt"


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────


def read(folder: Path, cuts: Cuts, wanted: Mapping[str, Tensor], check_complete: bool) -> Loaded:
    """What a stage that has ``wanted`` needs of a checkpoint."""
    if not folder.is_dir():
        names = [path.name.removeprefix(_PREFIX) for path in folder.parent.glob(f"{_PREFIX}*")]
        steps = sorted(int(name) for name in names if name.isdigit())
        there = f"there are {', '.join(map(str, steps))}" if steps else "there is none at all"
        raise PlanError(f"{folder.parent} has no checkpoint {folder.name}: {there}")
    common = _load(folder / COMMON)
    missing = [rank for rank in common["writers"] if not _marker(folder, rank).exists()]
    if check_complete and missing:
        raise PipelineError(
            f"the checkpoint {folder} is not complete: ranks {missing} have not written all of their part. Take an "
            "earlier one, or wait for the futures that checkpoint(…) gave"
        )
    if common["cuts"] != cuts.count:
        raise PlanError(
            f"the checkpoint {folder} is of a model with {common['cuts']} parts between its cut points, but this one "
            f"has {cuts.count}"
        )
    values: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for cut in sorted({cuts.home[cuts.saved_as[name]] for name in wanted}):
        for part in range(common["shards"]):
            suffix = f"{cut}_{part}" if common["shards"] > 1 else str(cut)
            values.update(_load(folder / f"opt-fp32-params-{suffix}"))
            states.update(_load(folder / f"opt-state-{suffix}"))
    lacking = [name for name in wanted if cuts.saved_as[name] not in values]
    if lacking:
        raise PlanError(f"the checkpoint {folder} has no {lacking[0]}: it is of another model")
    state = {name: values[cuts.saved_as[name]] for name in wanted}
    return Loaded(state, states, common["groups"], common["scaler"])


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PipelineError(
            f"the checkpoint {file.parent} is not complete: {file.name} is not there. Take an earlier one"
        ) from None
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise PipelineError(f"{file} cannot be read, take an earlier checkpoint: {error}") from error
