"""A stage of a recorded model: the model's own modules under their own names, and the steps between them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.plan import Groups
from penstock.split.trace.call import tensors_of


class _Mode:
    """Train or eval: that of a module of the model, or, in a copy of the stage, its own."""

    def __init__(self, module: nn.Module | None, training: bool = True) -> None:
        self.module = module
        self.own = training

    @property
    def training(self) -> bool:
        return self.own if self.module is None else self.module.training

    def set(self, training: bool) -> None:
        if self.module is None:
            self.own = training
        else:
            self.module.training = training

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mode:
        return _Mode(None, self.training)


class EnteredModule(nn.Module):
    """Stands in a stage for a module whose forward is recorded; it holds the parts of it that the stage has."""

    def __init__(self, module: nn.Module | None) -> None:
        self.__dict__["_mode"] = None
        super().__init__()
        self.__dict__["_mode"] = _Mode(module)

    @property
    def training(self) -> bool:
        mode: _Mode | None = self.__dict__["_mode"]
        return True if mode is None else mode.training

    @training.setter
    def training(self, value: bool) -> None:
        mode: _Mode | None = self.__dict__["_mode"]
        if mode is not None:
            mode.set(value)


class _OwnTensor:
    """A parameter or buffer of an entered module: in the model, and in the stage that holds it."""

    def __init__(self, name: str, model: Mapping[str, Any], stage: Mapping[str, Any], key: str) -> None:
        self.name, self.model, self.stage, self.key = name, model, stage, key
        self.seen = weakref.ref(model[key]) if model.get(key) is not None else None
        self.held = weakref.ref(stage[key])

    def check(self) -> None:
        """Raise an error if the model has another one, and the stage does not: it would train the old one."""
        now, held = self.model.get(self.key), self.stage.get(self.key)
        if (None if self.seen is None else self.seen()) is now:
            return
        if held is self.held() and held is not now:
            raise PlanError(
                f"{self.name} was replaced after the split, and the stages still have the one before: change it in "
                "place (copy_), or split the model again"
            )
        self.seen, self.held = None if now is None else weakref.ref(now), weakref.ref(held)


class _Code:
    """The steps and places of a stage; shared by its copies."""

    def __init__(self, chain: Any, groups: Groups, index: int) -> None:
        self.chain = chain
        self.groups = tuple(tuple(layers) for layers in groups)
        self.index = index
        edges = chain.edges(self.groups)
        self.targets = sorted(edge.dst for edge in edges if edge.src == index)
        self.own: list[_OwnTensor] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Code:
        return self


class TracedStage(EnteredModule):
    """The steps of one stage, with the modules that they call.

    ``current_variant()`` is the kind of call of the micro-batch that this thread works on; None outside of a pipeline,
    where it is that of the call that the first stage ran last.
    """

    current_variant: Callable[[], str | None] = staticmethod(lambda: None)

    def __init__(
        self,
        chain: Any,
        groups: Groups,
        index: int,
        modules: Mapping[str, nn.Module],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        super().__init__(chain.model)
        self._code = _Code(chain, groups, index)
        for path in chain.entered:
            if path:
                self._owner(chain.model, path.split("."))
        for path in sorted(modules, key=lambda path: path.count(".")):
            parents, _, name = path.rpartition(".")
            owner = self._owner(chain.model, parents.split(".") if parents else [])
            if isinstance(owner, EnteredModule):
                owner._modules[name] = modules[path]
        for full, tensor in tensors:
            parents, _, name = full.rpartition(".")
            owner = self._owner(chain.model, parents.split(".") if parents else [])
            if not isinstance(owner, EnteredModule):
                continue  # within a module that is held whole
            module = chain.model.get_submodule(parents)
            if isinstance(tensor, nn.Parameter):
                owner._parameters[name] = tensor
                self._code.own.append(_OwnTensor(full, module._parameters, owner._parameters, name))
            else:
                owner.register_buffer(name, tensor, persistent=name not in module._non_persistent_buffers_set)
                self._code.own.append(_OwnTensor(full, module._buffers, owner._buffers, name))

    def _owner(self, model: nn.Module, path: list[str]) -> nn.Module:
        """The module at a path, with stand-ins made on the way to it."""
        here: nn.Module = self
        for depth, name in enumerate(path):
            if not isinstance(here, EnteredModule):
                return here
            inner = here._modules.get(name)
            if inner is None:
                inner = here._modules[name] = EnteredModule(model.get_submodule(".".join(path[: depth + 1])))
            here = inner
        return here

    def forward(self, *values: Any) -> Any:
        code = self._code
        chain = code.chain
        for tensor in code.own:
            tensor.check()
        key = self.current_variant()
        if code.index == 0:
            if key is None:
                key = chain.variant(values[0])
            chain.last.key = key
            inputs: list[Any] = [tensors_of(chain.recording(key).call, values[0])]
        else:
            key = chain.last.key if key is None else key
            inputs = list(values)
        program = chain.program(code.groups, code.index, key)
        if code.index > 0:
            inputs = [
                (value,) if len(numbers) == 1 else value
                for value, numbers in zip(inputs, program.received, strict=True)
            ]
        made = program(self, inputs)
        if not code.targets:
            return made
        sent = [row[0] if len(row) == 1 else tuple(row) for row in made]
        return sent[0] if len(sent) == 1 else tuple(sent)
