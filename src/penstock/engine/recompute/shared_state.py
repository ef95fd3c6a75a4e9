"""State that modules of several stages have: a list that one appends to and another reads, a tied codebook.

    stage 0   counter.n += 1        F0  F1  F2           of which micro-batch is it?
    stage 1   x * counter.n             F0  F1  F2       in another process: a copy that nobody changes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from penstock._torch import NormBase
from penstock.engine.forward_context import MicroBatch
from penstock.engine.recompute.buffers import version_of
from penstock.engine.recompute.python_state import MAX_DEPTH, find_in, find_state, is_library
from penstock.errors import PlanError
from penstock.split.module_state import State, containers_in


class SharedStateCheck:
    """An error for a stage whose forward changes state that modules of another stage have, too.

    The first forward in a mode may fill a cache of Python objects: of these the second one is looked at.
    """

    def __init__(self, stage: int, module: nn.Module, others: Iterable[nn.Module]) -> None:
        self.stage, self.module, self.others = stage, module, list(others)
        theirs = {state.key for state in _state_of(self.others)}
        self.states = [state for state in _state_of(module.modules()) if state.key in theirs]
        self._forwards: dict[int, int] = {}  # by mode

    def is_done(self, mode: object) -> bool:
        return self._forwards.get(id(mode), 0) > 1

    @contextmanager
    def checking(self, mode: object, microbatch: MicroBatch | None) -> Iterator[None]:
        before = [state.read() for state in self.states]
        yield
        self._forwards[id(mode)] = count = self._forwards.get(id(mode), 0) + 1
        # A layer that asks for the micro-batch keeps values for it under this key.
        all_states = count > 1 and (microbatch is None or not microbatch.known)
        changed = [
            state
            for state, value in zip(self.states, before, strict=True)
            if (all_states or isinstance(state, _Version)) and state.changed_since(value) is not None
        ]
        if changed:
            own, other = (_name(changed[0], modules) for modules in (self.module.modules(), self.others))
            raise PlanError(
                f"a forward of stage {self.stage} changes {own}, which is {other} of another stage, too, and stages "
                "work on different micro-batches at a time: put the modules that share it into one stage, or pass the "
                "value from layer to layer"
            )


class _Version(State):
    """The number of times that a tensor was changed in place."""

    def read(self) -> int:
        return version_of(self.holder)

    def changed_since(self, value: int) -> State | None:
        return None if self.read() == value else self


def _state_of(modules: Iterable[nn.Module]) -> list[State]:
    """The Python state, parameters and buffers of modules. Running statistics may be those of several stages."""
    every = _with_referenced(modules)
    tensors: list[Tensor | None] = [tensor for part in every for tensor in part._parameters.values()]
    tensors += [tensor for part in every if not isinstance(part, NormBase) for tensor in part._buffers.values()]
    own = find_state([part for part in every if not is_library(type(part))])
    return [
        *(state for state in own if not isinstance(state.holder, ModuleType)),  # the global random generators
        *(_Version(tensor) for tensor in tensors if tensor is not None),
    ]


def _with_referenced(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules, and those that plain containers of the user's own modules hold."""
    found = {id(part): part for part in modules}
    for part in [part for part in found.values() if not is_library(type(part))]:
        own = [value for name, value in vars(part).items() if name != "_modules"]
        for _, items in containers_in(own, closures=False):
            found |= {id(item): item for item in items if isinstance(item, nn.Module)}
    return [*found.values()]


def _name(state: State, modules: Iterable[nn.Module]) -> str:
    """The attribute of a module through which it has this state."""
    for part in _with_referenced(modules):
        if state.holder is vars(part):
            return f"an attribute of {type(part).__name__}"
        for name, value in {**vars(part), **part._parameters, **part._buffers}.items():
            found: dict[Any, State] = {}
            find_in(value, found, MAX_DEPTH)
            if value is state.holder or state.key in {inner.key for inner in found.values()}:
                return f"{type(part).__name__}.{name}"
    return f"a {type(state.holder).__name__}"
