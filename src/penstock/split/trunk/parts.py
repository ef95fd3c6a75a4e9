"""What stands in a stage's copy of a container for modules that other stages run, and for its own blocks."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn

from penstock.errors import PlanError
from penstock.split.trunk.calls import user_line
from penstock.split.trunk.run import Run


class _Like:
    """Something that passes for a module: of its class, with its attributes."""

    __slots__ = ("_penstock_module", "_penstock_name", "_penstock_run")
    _penstock_module: nn.Module
    _penstock_name: str
    _penstock_run: Run

    def __init__(self, run: Run, module: nn.Module, name: str) -> None:
        object.__setattr__(self, "_penstock_run", run)
        object.__setattr__(self, "_penstock_module", module)
        object.__setattr__(self, "_penstock_name", name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._penstock_module)

    def __getattr__(self, name: str) -> Any:
        return self._penstock_seen(getattr(self._penstock_module, name), name)

    def __len__(self) -> int:
        return len(self._penstock_module)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._penstock_module)

    def __iter__(self) -> Iterator[Any]:
        for i, value in enumerate(self._penstock_module):  # type: ignore[arg-type,var-annotated]
            yield self._penstock_seen(value, str(i))

    def __getitem__(self, key: Any) -> Any:
        return self._penstock_seen(self._penstock_module[key], str(key))  # type: ignore[index]

    def _penstock_seen(self, value: Any, name: str) -> Any:
        """What the forward sees of a module's attribute."""
        return value


class Gate(_Like):
    """A block of the trunk: it tells the run that it is called."""

    __slots__ = ("_penstock_index",)
    _penstock_index: int

    def __init__(self, run: Run, module: nn.Module, name: str, index: int) -> None:
        super().__init__(run, module, name)
        object.__setattr__(self, "_penstock_index", index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._penstock_run.block(self._penstock_index, self._penstock_module, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._penstock_module, name, value)


class Part(_Like):
    """A part before the trunk, in the first stage: it notes the shape of what it gives, for the stages after."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._penstock_run.part(self._penstock_name, self._penstock_module, args, kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._penstock_module, name, value)

    def _penstock_seen(self, value: Any, name: str) -> Any:
        full = f"{self._penstock_name}.{name}"
        return Part(self._penstock_run, value, full) if isinstance(value, nn.Module) else value


class StandIn(_Like):
    """A part that is not run on the way to the stage's first block: called, it gives a blank; its tensors are blanks.

    After that it is the module itself where it is the stage's own, and an error where it is not.
    """

    __slots__ = ("_penstock_late", "_penstock_own")
    _penstock_own: bool
    _penstock_late: bool

    def __init__(self, run: Run, module: nn.Module, name: str, own: bool, late: bool) -> None:
        super().__init__(run, module, name)
        object.__setattr__(self, "_penstock_own", own)
        object.__setattr__(self, "_penstock_late", late)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self._penstock_run
        if run.entering:
            return run.part_blank(self._penstock_name)
        if self._penstock_own:
            return self._penstock_module(*args, **kwargs)
        name = self._penstock_name
        if self._penstock_late and run.next < len(run.names):
            raise PlanError(run.unfinished(f"comes to {name}{user_line()}"))
        raise PlanError(
            f"the model's forward runs {name} {run.where()}{user_line()}, in stage {run.stage}, which does not have "
            "its parameters: the forward's source was read to see where its parts are used, and does not show this one "
            f"there. Write it there as self.{name.split('.')[-1]}(...)"
        )

    def _penstock_seen(self, value: Any, name: str) -> Any:
        run = self._penstock_run
        if self._penstock_own and not run.entering:
            return value
        full = f"{self._penstock_name}.{name}"
        if isinstance(value, Tensor):
            return run.blanks.shape_blank(value.shape, value.dtype, full)
        if isinstance(value, nn.Module):
            return StandIn(run, value, full, self._penstock_own, self._penstock_late)
        if isinstance(value, MethodType) and value.__self__ is self._penstock_module:
            return MethodType(value.__func__, self)
        return value
