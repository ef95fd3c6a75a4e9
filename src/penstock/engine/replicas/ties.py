"""One parameter in several stages: one tensor in one place, copies in others that stay equal.

    place A   stage 0 ──┐ one tensor for both        gradients of a step are summed over the places, and
              stage 1 ──┘                            every copy gets the sum: with the same optimizer the
    place B   stage 3 ─── a copy of it               copies stay equal, bit for bit

A place is a device of this process, or a process.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.channel.base import ChannelError
from penstock.engine.channel.groups import Group
from penstock.engine.failure.status import RankStatus
from penstock.engine.replicas.dtensor import is_dtensor, to_local
from penstock.engine.replicas.fp32_accumulate import fp32_sums, set_grad
from penstock.errors import PlanError
from penstock.split.plan import Plan, Tie

__all__ = ["LocalTies", "ProcessTies", "Ties", "place_tied_parameters"]


class Ties:
    """Copies of parameters that are kept equal. ``sum_up`` makes the gradients of one tie's copies their sum."""

    def __init__(self) -> None:
        self.copies: list[list[nn.Parameter]] = []  # for each tie, those that live in this process

    def sum_up(self, number: int) -> None:
        raise NotImplementedError

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this copy is the one that is counted in norms."""
        raise NotImplementedError

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Around a step: every copy gets the sum of the gradients that the step gave to the copies.

        What earlier steps left in ``.grad`` has been summed already, and is kept apart meanwhile.
        """
        mine = [parameter for copies in self.copies for parameter in copies]
        before = [parameter.grad for parameter in mine]
        try:
            for parameter in mine:
                parameter.grad = None
            yield
            for number in range(len(self.copies)):
                self.sum_up(number)
        finally:
            for parameter, old in zip(mine, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def close(self) -> None:
        self.copies.clear()


class LocalTies(Ties):
    """Ties over several devices of this process."""

    def __init__(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        super().__init__()
        self.copies = [list(row) for row in copies if len(row) > 1]
        self.align()

    def align(self) -> None:
        """Give all copies the value of the first."""
        for first, *others in self.copies:
            for other in others:
                other.data.copy_(first.data)

    def sum_up(self, number: int) -> None:
        copies = self.copies[number]
        total = self.total([parameter.grad for parameter in copies])
        if total is not None:
            for parameter in copies:
                set_grad(parameter, total.to(parameter.device, copy=True))

    @staticmethod
    def total(grads: Sequence[Tensor | None]) -> Tensor | None:
        """The sum of those that are there, on the device of the first."""
        there = [grad for grad in grads if grad is not None]
        return sum((grad.to(there[0].device) for grad in there[1:]), there[0]) if there else None

    def counts(self, parameter: nn.Parameter) -> bool:
        return all(parameter is not other for copies in self.copies for other in copies[1:])


class ProcessTies(Ties):
    """Ties over several processes, each with the group of its ranks."""

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
        super().__init__()
        self.device = device
        self.groups: list[Group] = []
        self.status = status
        self.others: list[list[int]] = []  # the ranks, in the world, that each group is with
        for tie, mine in zip(plan.ties, copies, strict=True):
            ranks = sorted({placement[stage] for stage in tie.stages})
            if len(ranks) > 1 and rank in ranks:
                (parameter,) = mine
                self.groups.append(new_group(f"tie {tie.names[0]}", ranks))
                self.others.append([status.stage_ranks[placement.index(r)] for r in ranks if r != rank])
                self._compare_layouts(tie, parameter)
                self._share(-1, to_local(parameter).detach(), lambda group, there: group.broadcast(there, 0))
                self.copies.append([parameter])

    def sum_up(self, number: int) -> None:
        (parameter,) = self.copies[number]
        if not parameter.requires_grad:
            return
        grad = parameter.grad
        dense = grad is not None and not grad.is_sparse
        found = torch.tensor([grad is not None, dense], dtype=torch.float32, device=self.device)
        counting = self.groups[number].allreduce(found)
        if not dense:  # then what the others have decides
            self._wait(number, lambda _: counting)
            anyone, anyone_dense = found.tolist()
            if not anyone:
                return
            if grad is None:
                wide = torch.float32 if id(parameter) in fp32_sums else parameter.dtype
                set_grad(parameter, _zeros(parameter, wide, sparse=not anyone_dense))
            elif anyone_dense:
                set_grad(parameter, grad.to_dense())
        assert parameter.grad is not None
        self._share(number, to_local(parameter.grad), lambda group, there: group.allreduce(there))
        if dense:
            self._wait(number, lambda _: counting)

    def _share(self, number: int, tensor: Tensor, start: Callable[[Group, Tensor], Any]) -> None:
        """Do it where ranks talk: weights that live on the host have their gradients there, too."""
        there = tensor.to(self.device)
        self._wait(number, lambda group: start(group, there))
        if there is not tensor:
            tensor.copy_(there)

    def _wait(self, number: int, start: Callable[[Group], Any]) -> None:
        others = self.others[number]
        try:
            with self.status.waiting(others, "for the other copies of a tied parameter from"):
                start(self.groups[number]).wait()
        except RuntimeError as error:
            raise ChannelError(others[0] if len(others) == 1 else None, str(error)) from None

    def _compare_layouts(self, tie: Tie, parameter: nn.Parameter) -> None:
        """Copies in parts must be in the same parts, which are what is summed."""
        layout = repr(parameter.placements) if is_dtensor(parameter) else "whole"
        word = f"{layout} {tuple(to_local(parameter).shape)}"
        mine = float(zlib.crc32(word.encode()))
        everyone = torch.tensor([mine, -mine], dtype=torch.float64, device=self.device)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = torch.distributed.ReduceOp.MAX  # type: ignore[assignment]
        self._wait(-1, lambda group: group.allreduce([everyone], options))
        if everyone.tolist() != [mine, -mine]:
            raise PlanError(
                f"{' = '.join(tie.names)} is one parameter of several stages, but parallelize has laid it out in "
                f"different ways there (here as {word}): treat it alike in all of them"
            )

    def counts(self, parameter: nn.Parameter) -> bool:
        pairs = zip(self.copies, self.groups, strict=True)
        return all(parameter is not copies[0] or group.rank() == 0 for copies, group in pairs)

    def close(self) -> None:
        super().close()
        self.groups.clear()


def place_tied_parameters(
    ties: Sequence[Tie], modules: Mapping[int, nn.Module], places: Mapping[int, Hashable]
) -> list[list[nn.Parameter]]:
    """Give every place its own copy of each tied parameter, shared by all of the place's stages.

    ``modules`` and ``places`` are of the stages of this process. Returned are each tie's copies, one per place.
    """
    _separate_modules(modules, places)
    found: list[list[nn.Parameter]] = []
    for tie in ties:
        copies: dict[Hashable, nn.Parameter] = {}
        for stage in sorted(modules):
            for name, parameter in list(modules[stage].named_parameters(remove_duplicate=False)):
                if name not in tie.names:
                    continue
                place = places[stage]
                if place not in copies:
                    alone = not any(parameter is other for other in copies.values())
                    copies[place] = parameter if alone else _copy(parameter)
                if copies[place] is not parameter:
                    owner, _, leaf = name.rpartition(".")
                    modules[stage].get_submodule(owner)._parameters[leaf] = copies[place]
        found.append(list(copies.values()))
    return found


def _zeros(parameter: nn.Parameter, dtype: torch.dtype, *, sparse: bool) -> Tensor:
    """A gradient of nothing, in the layout of the others: rows of a table, where they are sparse."""
    if not sparse:
        return torch.zeros_like(parameter, dtype=dtype)
    values = torch.zeros((0, *parameter.shape[1:]), dtype=dtype, device=parameter.device)
    nowhere = torch.zeros((1, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(nowhere, values, parameter.shape, check_invariants=False)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)


def _separate_modules(modules: Mapping[int, nn.Module], places: Mapping[int, Hashable]) -> None:
    """A module that stands in stages of several places gets a twin in each but the first."""
    home: dict[int, Hashable] = {}
    for stage in sorted(modules):
        place, twins = places[stage], dict[int, nn.Module]()
        for path, module in list(modules[stage].named_modules(remove_duplicate=False)):
            stateless = next(chain(module.parameters(), module.buffers()), None) is None
            if stateless or home.setdefault(id(module), place) == place:
                continue
            twins.setdefault(id(module), _shallow_copy(module))
            owner, _, leaf = path.rpartition(".")
            modules[stage].get_submodule(owner)._modules[leaf] = twins[id(module)]


def _shallow_copy(module: nn.Module) -> nn.Module:
    """The same module with members of its own dictionaries, so that one can be placed apart from the other."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = dict(module._parameters)
    twin.__dict__["_buffers"] = dict(module._buffers)
    twin.__dict__["_modules"] = dict(module._modules)
    return twin
