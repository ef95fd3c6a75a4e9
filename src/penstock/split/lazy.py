"""Layers that are built only where they are needed: ``ps.Lazy(lambda: nn.Linear(1024, 1024))``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from penstock.errors import PlanError

__all__ = ["Lazy", "build", "members"]

_building = threading.RLock()  # one build at a time: they draw from one generator, and a layer is built once
_NOT_YET = object()


class Lazy(nn.Module):
    """A layer that ``fn()`` builds: in the stage that has it, or when it is first called.

    When it is built, this object *becomes* the layer, class and all, so that parameters have the names that they would
    have without ``Lazy``, and nothing stands between. Until then it has no parameters (make an optimizer after
    ``pipe``, or after ``build``), and its ``state_dict()`` has the names with tensors on the meta device; loading a
    state, ``to(…)`` and ``apply(…)`` build it.

    ``fn`` is called once more before that, under ``torch.device("meta")`` and apart from all generators, to learn the
    sizes that a plan balances. An ``fn`` that cannot be called so is a layer of unknown size: it counts as one
    without parameters, and its skips are not seen.

    A build draws from the default generator when it happens, so a rank that builds other layers gets other numbers.
    With ``seed`` the layer is built under that seed, and the generators are put back: the same on every rank.
    """

    def __init__(self, fn: Callable[[], nn.Module], seed: int | None = None) -> None:
        super().__init__()
        if not callable(fn) or isinstance(fn, nn.Module):
            raise PlanError(f"Lazy takes a function that builds a layer, got {type(fn).__name__}: say Lazy(lambda: …)")
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise PlanError(f"the seed of a Lazy layer must be a whole number, got {seed!r}")
        self._fn = fn
        self._seed = seed
        self._mode: bool | None = None  # what train() or eval() said, if they did
        self._outline: Any = _NOT_YET

    def build(self) -> nn.Module:
        """The layer, built if it was not. It is this same object, which is no ``Lazy`` any more."""
        with _building:
            if not isinstance(self, Lazy):  # another thread was quicker
                return self
            try:
                with torch.inference_mode(False), _generators(self._seed):
                    built = build(_made_by(self._fn))
            except Exception as error:
                error.add_note(f"while building the layer of {self!r}")
                raise
            if self._mode is not None:
                built.train(self._mode)
            self._become(built)
        return self

    def _become(self, built: nn.Module) -> None:
        if isinstance(built, torch.jit.ScriptModule):  # what is compiled is bound to the object that was made
            raise PlanError("a Lazy layer cannot be a ScriptModule: build it before, and do without Lazy")
        before = self.__dict__
        for name, mine in before.items():  # hooks that were registered while it was not built: handles know the dicts
            if "_hooks" in name and mine:
                theirs = built.__dict__[name]
                both = {**theirs, **mine}
                mine.clear()
                mine.update(both)
                built.__dict__[name] = mine
        if built._is_full_backward_hook is None:
            built._is_full_backward_hook = self._is_full_backward_hook
        object.__setattr__(self, "__dict__", built.__dict__)  # shared: what knows the object that was built stays right
        try:
            self.__class__ = type(built)  # type: ignore[assignment]
        except TypeError as error:
            object.__setattr__(self, "__dict__", before)
            raise PlanError(f"a Lazy layer cannot be a {type(built).__name__}: {error}") from error

    def outline(self) -> nn.Module | None:
        """The layer without its data, built once on the meta device; None where ``fn`` cannot do that."""
        with _building:
            if not isinstance(self, Lazy):
                return self
            if self._outline is _NOT_YET:
                try:
                    with torch.inference_mode(False), _generators(None, put_back=True), torch.device("meta"):
                        found: nn.Module | None = _without_data(_made_by(self._fn))
                except PlanError:
                    raise
                except Exception:
                    found = None
                self.__dict__["_outline"] = found  # past __setattr__, which would make it a child
            known: nn.Module | None = self._outline
        return known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.build()(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.build().forward(*args, **kwargs)

    def train(self, mode: bool = True) -> Self:
        self._mode = mode
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        outline = self.outline()
        return (nn.Module() if outline is None else outline).state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.build()._load_from_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.build()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        self.build().apply(fn)
        return self

    def extra_repr(self) -> str:
        name = getattr(self._fn, "__name__", type(self._fn).__name__)
        return name if self._seed is None else f"{name}, seed={self._seed}"


def build(module: nn.Module) -> nn.Module:
    """The module, with every lazy layer in it built."""
    while lazy := [part for part in module.modules() if isinstance(part, Lazy)]:
        for part in lazy:
            part.build()
    return module


def members(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module, under every name they have; of a lazy layer, those it will have."""
    for path, part in module.named_modules(prefix=prefix, remove_duplicate=False):
        if isinstance(part, Lazy):
            outline = part.outline()
            if outline is not None:
                yield from members(outline, path)
            continue
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def _made_by(fn: Callable[[], Any]) -> nn.Module:
    made = fn()
    if not isinstance(made, nn.Module):
        raise PlanError(f"the function of a Lazy layer must return an nn.Module, but returned {type(made).__name__}")
    return made


@contextmanager
def _generators(seed: int | None, *, put_back: bool = False) -> Iterator[None]:
    """Under ``seed``, if there is one; then, or if asked, the generators are afterwards as they were."""
    if seed is None and not put_back:
        yield
        return
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
        yield


def _without_data(module: nn.Module) -> nn.Module:
    """A module whose tensors are on the meta device; a copy where ``fn`` made, or only handed out, others."""
    found = (*module.parameters(), *module.buffers())
    uninitialized = (UninitializedParameter, UninitializedBuffer)
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in found
        if not isinstance(tensor, uninitialized) and not tensor.is_meta
    }
    return copy.deepcopy(module, memo) if memo else module
