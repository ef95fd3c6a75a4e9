"""Move the parameters and buffers of stages to their devices, or create those that are on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from penstock.engine.offload.weights import HostWeights
from penstock.errors import PlanError

Init = Callable[[nn.Module], object]
"""Fills the parameters and buffers of a stage that was on the meta device."""


def materialise(
    modules: Mapping[int, nn.Module],
    devices: Sequence[torch.device],
    init: Init | None,
    copies: list[list[nn.Parameter]],
    weights: HostWeights | None = None,
) -> None:
    """Move stages to their devices. Tensors on the meta device are allocated there and initialised by ``init``.

    A parameter with several names on a device stays one; ``copies`` (see ``place_ties``) is updated. With ``weights``,
    which are in host memory, only one stage's parameters are on the device at a time.
    """
    on_meta = {
        stage: [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
        for stage, module in modules.items()
    }
    for stage, names in on_meta.items():
        if names and init is None:
            raise PlanError(
                f"stage {stage} has {len(names)} tensors on the meta device, without data ({names[0]} is one): pass "
                "Pipeline(…, init=…), a function that is given the stage's module and fills its parameters and buffers"
            )
    made: dict[int, Tensor] = {}
    for stage, module in modules.items():
        if on_meta[stage]:
            _allocate(module, devices[stage], made)
        module.to(devices[stage])
        if weights is not None:
            weights.offload_stage(stage)
    for row in copies:
        row[:] = [made.get(id(parameter), parameter) for parameter in row]  # type: ignore[misc]
    for stage, module in modules.items():
        if on_meta[stage] and init is not None:
            try:
                with torch.no_grad(), nullcontext() if weights is None else weights.initializing(stage):
                    init(module)
            except Exception as error:
                error.add_note(f"in init of stage {stage}")
                raise
            _check_initialised(stage, module, on_meta[stage])


def _check_initialised(stage: int, module: nn.Module, names: Sequence[str]) -> None:
    """Raise an error for new tensors that still hold the NaN they were created with."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    left = [name for name in names if _is_float(state[name]) and bool(state[name].isnan().all())]
    if left:
        raise PlanError(
            f"init left {len(left)} tensors of stage {stage} without values ({left[0]} is one): it must fill all "
            "parameters and buffers, including those that are not in the state dict"
        )


def _is_float(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _allocate(module: nn.Module, device: torch.device, made: dict[int, Tensor]) -> None:
    for part in module.modules():
        for members in (part._parameters, part._buffers):
            for name, tensor in members.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    if _is_float(empty):
                        empty.fill_(torch.nan)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
                members[name] = made[id(tensor)]  # type: ignore[assignment]
