"""``Pipeline(…, parallelize=…)``: apply the user's function for DDP, FSDP2 or tensor parallelism to each stage.

    broadcast over data and tensor ─▶ function(stage, mesh) ─▶ unwrap DDP, configure FSDP, check names and ties

The function communicates with other processes. Before it is called, all processes have joined and compared the
configuration of the pipeline, and replicas have the weights of the first replica.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock._torch import fsdp_state
from penstock.engine.message import flatten, unflatten
from penstock.engine.replicas import broadcast_from_first
from penstock.engine.replicas.ddp import unwrap_ddp
from penstock.engine.replicas.dtensor import is_dtensor, keep_edges_plain
from penstock.engine.replicas.fsdp import FsdpStage, fsdp_stage
from penstock.engine.shapes import FakeStage
from penstock.engine.stage import ParallelizedStage
from penstock.errors import PlanError
from penstock.split.plan import Tie
from penstock.train.mesh import Mesh
from penstock.train.state import FqnMap


def parallelize_stages(
    modules: dict[int, nn.Module],
    mesh: Mesh,
    options: Any,
    ties: Sequence[Tie],
    copies: list[list[nn.Parameter]],
    fqn: FqnMap,
) -> dict[int, ParallelizedStage]:
    """Call the user's function for each stage of this process, in order; updates ``modules`` and ``copies``.

    ``fqn`` maps names to the model's. All processes of the mesh call this together.
    """
    assert options.parallelize is not None
    _ = mesh.device_mesh  # create it in any case: the creation is collective, and the function may not use it
    for dimension in ("data", "tensor"):
        if mesh.sizes[dimension] > 1:
            tensors = (t for module in modules.values() for t in (*module.parameters(), *module.buffers()))
            broadcast_from_first(tensors, mesh[dimension].get_group())
    before = {(stage, name): id(parameter) for stage, name, parameter in _members(modules, fqn)}
    parallelized = {}
    for stage, module in modules.items():
        fake = FakeStage(stage, module, mesh.device)
        try:
            result = options.parallelize(module, mesh)
        except Exception as error:
            error.add_note(f"in parallelize of stage {stage}")
            raise
        result = module if result is None else result
        if not isinstance(result, nn.Module):
            raise PlanError(f"parallelize returned a {type(result).__name__} for stage {stage}, not a module or None")
        result, wrapped = unwrap_ddp(result, stage, mesh.ranks("data"))
        sharded = fsdp_stage(result, stage, mesh.ranks("data"))
        for name, parameter in result.named_parameters():
            if is_dtensor(parameter) and (sharded is None or id(parameter) not in sharded.parameters):
                there = parameter.device_mesh.mesh.flatten().tolist()
                if sorted(there) != sorted(mesh.ranks("tensor")):
                    raise PlanError(
                        f"stage {stage}: {name} is distributed over ranks {sorted(there)}, but the processes which "
                        f'hold parts of this stage are ranks {sorted(mesh.ranks("tensor"))}: use mesh["tensor"]'
                    )
        changed = result is not module or sharded is not None or mesh.tensor > 1
        if changed and not fake.pairs and not options.dynamic:
            raise PlanError(f"stage {stage} cannot be copied to infer the shapes on its edges: pass dynamic=True")
        if sharded is not None:
            _apply_mixed_precision(sharded, fake)
        if mesh.tensor > 1:
            keep_edges_plain(result, stage)
        modules[stage] = result
        parallelized[stage] = ParallelizedStage(fake if changed else None, wrapped, sharded)
    _check_parameters(before, {(stage, name): id(p) for stage, name, p in _members(modules, fqn)})
    sharded_name = next((name for _, name, p in _members(modules, fqn) if is_dtensor(p)), None)
    if sharded_name is not None and (options.accumulate is not None or options.offload is not None):
        raise PlanError(
            f"accumulate= and offload= are not supported for sharded parameters ({sharded_name} is one): with "
            "fully_shard use MixedPrecisionPolicy(reduce_dtype=torch.float32) and CPUOffloadPolicy, else keep "
            "parameters in float32 and run steps under torch.autocast"
        )
    for tie, row in zip(ties, copies, strict=True):
        row[:] = {id(p): p for _, name, p in _members(modules, fqn) if name in tie.names}.values()
    return parallelized


def _members(modules: Mapping[int, nn.Module], fqn: FqnMap) -> Iterator[tuple[int, str, nn.Parameter]]:
    for stage, module in modules.items():
        for name, parameter in module.named_parameters(remove_duplicate=False):
            yield stage, fqn(name), parameter


def _check_parameters(before: Mapping[tuple[int, str], int], after: Mapping[tuple[int, str], int]) -> None:
    """Parameters must keep their names, and tied parameters must stay tied."""
    for stage in {stage for stage, _ in (*before, *after)}:
        gone = sorted(name for s, name in before.keys() - after.keys() if s == stage)
        new = sorted(name for s, name in after.keys() - before.keys() if s == stage)
        if gone or new:
            raise PlanError(
                f"parallelize changed the parameters of stage {stage}: it has {', '.join(new) or 'nothing'} in the "
                f"place of {', '.join(gone) or 'nothing'}. Names in checkpoints stay those of the model: change the "
                "stage in place, or use a wrapper that keeps names (DistributedDataParallel, fully_shard, "
                "checkpoint_wrapper, torch.compile)"
            )
    places_of: dict[int, list[tuple[int, str]]] = {}
    for place, key in before.items():
        places_of.setdefault(key, []).append(place)
    for places in places_of.values():
        if len({after[place] for place in places}) > 1:
            names = " and ".join(f"{name} of stage {stage}" for stage, name in places)
            raise PlanError(f"{names} were one parameter, but parallelize has replaced it by several: keep it tied")


def _apply_mixed_precision(sharded: FsdpStage, fake: FakeStage) -> None:
    """Apply FSDP's mixed precision to the fake stage: dtypes of parameters, inputs and outputs."""
    twins = {id(part): twin for part, twin in fake.pairs}
    for group in sharded.groups:
        dtype = group.mp_policy.param_dtype
        for parameter in group.fsdp_params if dtype is not None else ():
            info = parameter._module_info
            places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
            members = [(twins[id(owner)]._parameters, name) for owner, name in places if id(owner) in twins]
            if members and parameter.orig_dtype.is_floating_point:
                old = members[0][0][members[0][1]]
                assert old is not None
                with fake.mode:
                    new = nn.Parameter(old.detach().to(dtype), old.requires_grad)
                for place, name in members:
                    place[name] = new
    for part in sharded.parts:
        policy, twin = fsdp_state(part)._mp_policy, twins.get(id(part))
        if twin is not None and policy.param_dtype is not None and policy.cast_forward_inputs:
            twin.register_forward_pre_hook(lambda _, args, to=policy.param_dtype: _cast(args, to))
        if twin is not None and policy.output_dtype is not None:
            twin.register_forward_hook(lambda _, args, output, to=policy.output_dtype: _cast(output, to))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    leaves, spec = flatten(value)
    cast = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return unflatten(cast, spec)
