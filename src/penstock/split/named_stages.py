"""Stages from blocks: by their names, or by the devices that they were marked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from penstock.errors import PlanError
from penstock.near import did_you_mean
from penstock.split.block import Stage
from penstock.split.line import Line

__all__ = ["devices_of_stages", "groups_by_device", "groups_by_name"]

Named = Sequence["str | Stage | Sequence[str]"]


def groups_by_name(line: Line, stages: Named) -> list[tuple[str, ...]]:
    """The blocks of each stage, checked: each block of the model in one stage, and nothing else."""
    if isinstance(stages, (str, Stage)) or not isinstance(stages, Iterable):
        raise PlanError(f'stages by name are a list, such as [["B1", "B2"], ["B3"]]: got {stages!r}')
    groups = [_blocks(stage) for stage in stages]
    seen: dict[str, int] = {}
    for index, names in enumerate(groups):
        if not names:
            raise PlanError(f"stage {index} has no blocks: {stages!r}")
        for name in names:
            if not isinstance(name, str):
                raise PlanError(f"blocks are named by strings, but stage {index} has {name!r} ({type(name).__name__})")
            if name not in line.layers:
                expected = ", ".join(map(repr, line.layers))
                guess = did_you_mean(name, line.layers, otherwise=".", cutoff=0.4)
                raise PlanError(f"stage {index} has an unknown block {name!r}{guess} The model has {expected}")
            if name in seen:
                raise PlanError(f"block {name!r} is in more than one stage, or twice in one: {seen[name]} and {index}")
            seen[name] = index
    missing = [name for name in line.layers if name not in seen]
    if missing:
        names_missing = ", ".join(map(repr, missing))
        raise PlanError(f"no stage has the block(s) {names_missing}: every block of the model needs a stage")
    line.edges(groups)  # says which value would have to flow back, if one would
    return groups


def _blocks(stage: str | Stage | Sequence[str]) -> tuple[str, ...]:
    if isinstance(stage, Stage):
        return stage.blocks
    if isinstance(stage, str):
        return (stage,)
    if isinstance(stage, (list, tuple)):
        return tuple(stage)
    raise PlanError(f"a stage is a block's name, a list of names or a ps.Stage, got {stage!r}")


def devices_of_stages(stages: Named) -> tuple[str, ...] | None:
    """The devices of ``ps.Stage`` objects; None where none of them names one."""
    devices = [stage.device if isinstance(stage, Stage) else None for stage in stages]
    named = [device for device in devices if device is not None]
    if named and len(named) < len(devices):
        without = [index for index, device in enumerate(devices) if device is None]
        raise PlanError(f"stages {without} name no device, but others do: say .on(device) for all of them or for none")
    return tuple(named) or None


def groups_by_device(line: Line) -> list[tuple[str, ...]]:
    """One stage per run of blocks that are marked for the same device, in the order of the blocks."""
    devices = line.devices()
    without = [layer for layer in line.layers if layer not in devices]
    if without:
        raise PlanError(
            f"stages follow from the blocks' devices only where each block has one, but {', '.join(without)} has none: "
            "give it a device, or say stages=… "
        )
    return [tuple(layers) for _, layers in groupby(line.layers, key=lambda layer: devices[layer])]
