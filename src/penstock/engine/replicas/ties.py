"""Tied parameters: one parameter of several stages, with equal copies in several places.

    place A   stage 0 ──┐ one tensor for both        each step sums the gradients over the places, and every copy
              stage 1 ──┘                            gets the sum: with the same optimizer, the copies stay
    place B   stage 3 ─── a copy                     bitwise equal

A place is a device of this process, or a process.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.channel.base import Group
from penstock.engine.failure.status import RankStatus
from penstock.engine.replicas import channel_errors
from penstock.engine.replicas.dtensor import is_dtensor, to_local
from penstock.engine.replicas.fp32_accumulate import fp32_sums, set_grad
from penstock.errors import PlanError
from penstock.split.plan import Plan, Tie


class Ties:
    """Copies of tied parameters."""

    copies: list[list[nn.Parameter]]  # per tie, the copies in this process

    def align(self) -> None:
        raise PlanError("under a mesh each rank's optimizer has that rank's own parameters: use pipe.parameters()")

    def sum_grads(self) -> None:
        """Sum the gradients of a step over all copies. Those of earlier steps are sums already: see `GradStash`."""
        raise NotImplementedError

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        """Whether gradient norms include this parameter: only the first of several tied copies."""
        raise NotImplementedError


class LocalTies(Ties):
    """Ties over several devices of this process."""

    def __init__(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        self.copies = [list(row) for row in copies if len(row) > 1]
        self.align()

    def align(self) -> None:
        """Copy the value of the first copy to the others."""
        for first, *others in self.copies:
            for other in others:
                other.data.copy_(first.data)

    def sum_grads(self) -> None:
        for copies in self.copies:
            total = self.total([parameter.grad for parameter in copies])
            if total is not None:
                for parameter in copies:
                    set_grad(parameter, total.to(parameter.device, copy=True))

    @staticmethod
    def total(grads: Sequence[Tensor | None]) -> Tensor | None:
        """The sum of the gradients that exist, on the device of the first."""
        existing = [grad for grad in grads if grad is not None]
        return sum((grad.to(existing[0].device) for grad in existing[1:]), existing[0]) if existing else None

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        return all(parameter is not other for copies in self.copies for other in copies[1:])


class ProcessTies(Ties):
    """Ties over several processes, each with a process group of its ranks."""

    def __init__(
        self,
        plan: Plan,
        copies: Sequence[Sequence[nn.Parameter]],
        placement: Sequence[int],
        rank: int,
        new_group: Callable[[str, Sequence[int]], Group],
        device: torch.device,
        status: RankStatus,
    ) -> None:
        self.copies = []
        self.device = device
        self.groups: list[Group] = []
        self.status = status
        self.others: list[list[int]] = []  # per tie: the other world ranks
        for tie, local_copies in zip(plan.ties, copies, strict=True):
            ranks = sorted({placement[stage] for stage in tie.stages})
            if len(ranks) > 1 and rank in ranks:
                (parameter,) = local_copies
                self.groups.append(new_group(f"tie {tie.names[0]}", ranks))
                self.others.append([status.stage_ranks[placement.index(r)] for r in ranks if r != rank])
                self._compare_layouts(tie, parameter)
                self._collective(-1, to_local(parameter).detach(), lambda group, tensor: group.broadcast(tensor, 0))
                self.copies.append([parameter])

    def sum_grads(self) -> None:
        for number, (parameter,) in enumerate(self.copies):
            if parameter.requires_grad:
                self._sum_grads(number, parameter)

    def _sum_grads(self, number: int, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        dense = grad is not None and not grad.is_sparse
        counts = torch.tensor([grad is not None, dense], dtype=torch.float32, device=self.device)
        counting = self.groups[number].allreduce(counts)
        if not dense:  # whether the sum is sparse depends on the other ranks' gradients
            self._wait(number, lambda _: counting)
            num_grads, num_dense = counts.tolist()
            if not num_grads:
                return
            dtype = torch.float32 if id(parameter) in fp32_sums else parameter.dtype
            if grad is None and num_dense:
                set_grad(parameter, torch.zeros_like(parameter, dtype=dtype))
            elif grad is None:  # no rows
                values = torch.zeros((0, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
                indices = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
                rows = torch.sparse_coo_tensor(indices, values, parameter.shape, check_invariants=False)
                set_grad(parameter, rows)
            elif num_dense:
                set_grad(parameter, grad.to_dense())
        assert parameter.grad is not None
        self._collective(number, to_local(parameter.grad), lambda group, tensor: group.allreduce(tensor))
        if dense:
            self._wait(number, lambda _: counting)

    def _collective(self, number: int, tensor: Tensor, start: Callable[[Group, Tensor], Any]) -> None:
        """Run a collective on the device of the groups. Offloaded tensors are copied there and back."""
        on_device = tensor.to(self.device)
        self._wait(number, lambda group: start(group, on_device))
        if on_device is not tensor:
            tensor.copy_(on_device)

    def _wait(self, number: int, start: Callable[[Group], Any]) -> None:
        others = self.others[number]
        waiting = self.status.waiting(others, "for the other copies of a tied parameter from")
        with channel_errors(others[0] if len(others) == 1 else None), waiting:
            start(self.groups[number]).wait()

    def _compare_layouts(self, tie: Tie, parameter: nn.Parameter) -> None:
        """Sharded copies must have equal placements: their local parts are summed."""
        placements = repr(parameter.placements) if is_dtensor(parameter) else "whole"
        layout = f"{placements} {tuple(to_local(parameter).shape)}"
        checksum = float(zlib.crc32(layout.encode()))
        extremes = torch.tensor([checksum, -checksum], dtype=torch.float64, device=self.device)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX  # type: ignore[assignment]
        self._wait(-1, lambda group: group.allreduce([extremes], options))
        if extremes.tolist() != [checksum, -checksum]:
            raise PlanError(
                f"{' = '.join(tie.names)} is one parameter of several stages, but parallelize has given it different "
                f"layouts there (here {layout}): give it the same one in all of them"
            )

    def counts_in_norm(self, parameter: nn.Parameter) -> bool:
        pairs = zip(self.copies, self.groups, strict=True)
        return all(parameter is not copies[0] or group.rank() == 0 for copies, group in pairs)

    def close(self) -> None:
        self.copies.clear()
        self.groups.clear()


def place_tied_parameters(
    ties: Sequence[Tie], modules: Mapping[int, nn.Module], places: Mapping[int, Hashable]
) -> list[list[nn.Parameter]]:
    """Create a copy of each tied parameter for every place, shared by the stages there; return the copies of each tie.

    ``modules`` and ``places`` have the stages of this process.
    """
    _separate_modules(modules, places)
    all_copies: list[list[nn.Parameter]] = []
    for tie in ties:
        copies: dict[Hashable, nn.Parameter] = {}
        for stage in sorted(modules):
            for name, parameter in list(modules[stage].named_parameters(remove_duplicate=False)):
                if name not in tie.names:
                    continue
                place = places[stage]
                if place not in copies:
                    if any(parameter is other for other in copies.values()):
                        copies[place] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    else:
                        copies[place] = parameter
                if copies[place] is not parameter:
                    owner, _, leaf = name.rpartition(".")
                    modules[stage].get_submodule(owner)._parameters[leaf] = copies[place]
        all_copies.append(list(copies.values()))
    return all_copies


def _separate_modules(modules: Mapping[int, nn.Module], places: Mapping[int, Hashable]) -> None:
    """Replace a module that is used in several places by a shallow copy, except in the first place."""
    first_place: dict[int, Hashable] = {}
    for stage in sorted(modules):
        place, copies = places[stage], dict[int, nn.Module]()
        for path, module in list(modules[stage].named_modules(remove_duplicate=False)):
            stateless = next(chain(module.parameters(), module.buffers()), None) is None
            if stateless or first_place.setdefault(id(module), place) == place:
                continue
            if id(module) not in copies:
                copied = copies[id(module)] = copy.copy(module)
                for name in ("_parameters", "_buffers", "_modules"):  # copied, because members are replaced
                    copied.__dict__[name] = dict(vars(module)[name])
            owner, _, leaf = path.rpartition(".")
            modules[stage].get_submodule(owner)._modules[leaf] = copies[id(module)]
