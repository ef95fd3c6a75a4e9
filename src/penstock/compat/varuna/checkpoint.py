"""Checkpoints with one file per cut, readable by a pipeline of any depth.

    varuna_ckpt_<step>/opt-fp32-params-<cut>    parameters and buffers, by the model's names
                       opt-state-<cut>          the optimizer state of these parameters
                       opt-common-state         optimizer options, loss scale, the ranks that write
                       markers/complete_<rank>.txt

A cut is the part of the model between two CutPoints, active or not. A tensor that several cuts use is saved once, with
the first of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import penstock as ps
from penstock import hooks

COMMON = "opt-common-state"


class Cuts:
    """The cut and the name under which each tensor is saved, the same at any depth."""

    def __init__(self, plan: ps.Plan) -> None:
        chain = plan.require_chain()
        self.layers = list(chain.layers)
        self.saved_as: dict[str, str] = {}  # one name for all names of a tensor
        self.cut_of: dict[str, int] = {}  # the first cut that has it
        first: dict[int, str] = {}
        for number, layer in enumerate(self.layers):
            for name, tensor in chain.members(layer):
                self.saved_as.setdefault(name, first.setdefault(id(tensor), name))
                self.cut_of.setdefault(self.saved_as[name], number)
        for tie in plan.ties:
            one = min((self.saved_as[name] for name in tie.names), key=self.cut_of.__getitem__)
            self.saved_as.update(dict.fromkeys(tie.names, one))

    def contents(
        self, layers: Iterable[str], state: Mapping[str, Tensor], optimizer_states: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The files of these layers."""
        unknown = [name for name in state if name not in self.saved_as]
        if unknown:
            raise ps.PlanError(f"{unknown[0]} is neither a parameter nor a buffer of any cut: it cannot be saved")
        values: dict[str, Tensor] = {}
        for name, tensor in state.items():
            values.setdefault(self.saved_as[name], tensor)
        files: dict[str, Any] = {}
        for cut in map(self.layers.index, layers):
            names = [name for name in values if self.cut_of[name] == cut]
            files[f"opt-fp32-params-{cut}"] = _plain({name: values[name] for name in names})
            files[f"opt-state-{cut}"] = {n: optimizer_states[n] for n in names if n in optimizer_states}
        return files

    def read(self, folder: Path, wanted: Iterable[str], check_complete: bool) -> dict[str, Any]:
        """The common state of a checkpoint of any depth, with the tensors named ``wanted`` as ``"state"``.

        ``"optimizer"`` has the optimizer's state of these tensors, by the names under which they are saved.
        """
        if not folder.is_dir():
            there = sorted(path.name for path in folder.parent.glob("varuna_ckpt_*"))
            raise ps.PlanError(f"{folder.parent} has no checkpoint {folder.name}: there are {there}")
        common: dict[str, Any] = _load(folder / COMMON)
        missing = [rank for rank in common["writers"] if not marker(folder, rank).exists()]
        if check_complete and missing:
            raise ps.PipelineError(
                f"the checkpoint {folder} is not complete: ranks {missing} have not written all of their part. Take an "
                "earlier one, or wait for the futures that checkpoint(…) gave"
            )
        if common["cuts"] != len(self.layers):
            raise ps.PlanError(
                f"the checkpoint {folder} is of a model with {common['cuts']} parts between its cut points, but this "
                f"one has {len(self.layers)}"
            )
        saved = {name: self.saved_as[name] for name in wanted}
        values: dict[str, Tensor] = {}
        states: dict[str, Any] = {}
        for cut in sorted({self.cut_of[name] for name in saved.values()}):
            values |= _load(folder / f"opt-fp32-params-{cut}")
            states |= _load(folder / f"opt-state-{cut}")
        lacking = [name for name in saved.values() if name not in values]
        if lacking:
            raise ps.PlanError(f"the checkpoint {folder} has no {lacking[0]}: it is of another model")
        return {**common, "state": {name: values[one] for name, one in saved.items()}, "optimizer": states}


def marker(folder: Path, rank: int) -> Path:
    return folder / "markers" / f"complete_{rank}.txt"


def write(folder: Path, contents: Mapping[str, Any], rank: int) -> None:
    """Write files, then this rank's marker."""
    for name, content in contents.items():
        torch.save(content, folder / name)
    if contents:
        marker(folder, rank).write_text("complete\n")


def _load(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        raise ps.PipelineError(f"{file} cannot be read, take an earlier checkpoint: {error}") from error


def _plain(value: Any) -> Any:
    """Tensors on the host, NumPy numbers as Python's: the latter would not be loaded with ``weights_only``."""
    leaves, spec = hooks.tree_flatten(value)
    tensors = [leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    plain = [leaf.item() if type(leaf).__module__ == "numpy" else leaf for leaf in tensors]
    return hooks.tree_unflatten(plain, spec)


def save_optimizer(optimizer: Optimizer | None, names: Mapping[int, str]) -> tuple[dict[str, Any], Any]:
    """The state of each parameter by its saved name (``names`` has it by id), and the options of the groups."""
    if optimizer is None:
        return {}, None
    packed = optimizer.state_dict()
    states = {name: _plain(packed["state"][i]) for i, name in _numbered(optimizer, names) if i in packed["state"]}
    skipped = ("params", "param_names")
    return states, [_plain({k: v for k, v in group.items() if k not in skipped}) for group in packed["param_groups"]]


def load_optimizer(optimizer: Optimizer, names: Mapping[int, str], states: Mapping[str, Any], groups: Any) -> None:
    """Load the saved state and options into an optimizer."""
    packed = optimizer.state_dict()
    if len(packed["param_groups"]) != len(groups):
        raise ps.PlanError(
            f"the optimizer has {len(packed['param_groups'])} groups of parameters, but the checkpoint's had "
            f"{len(groups)}: make the same groups on every rank, empty ones too"
        )
    for group, options in zip(packed["param_groups"], groups, strict=True):
        group.update(options)
    packed["state"] = {i: states[name] for i, name in _numbered(optimizer, names) if name in states}
    optimizer.load_state_dict(packed)


def _numbered(optimizer: Optimizer, names: Mapping[int, str]) -> list[tuple[int, str]]:
    """The saved names of an optimizer's parameters with their numbers in its ``state_dict``."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(i, names[id(parameter)]) for i, parameter in enumerate(parameters) if id(parameter) in names]
