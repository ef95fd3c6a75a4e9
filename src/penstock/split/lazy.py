"""``ps.Lazy``: layers that only the rank that runs them builds: ``ps.Lazy(lambda: nn.Linear(1024, 1024))``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import PlanError

_build_lock = threading.RLock()  # one build at a time: builds share the random generator
_NOT_YET = object()


class Lazy(nn.Module):
    """A layer that ``fn()`` builds when its stage is made, or when it is first called.

    A built layer replaces this object's class and attributes, so parameters have the names that they would have without
    ``Lazy``. Before that it has no parameters (make the optimizer after the pipeline, or after ``build``), and its
    ``state_dict()`` has tensors on the meta device. Loading a state, ``to(…)`` and ``apply(…)`` build it.

    To learn its size, ``fn`` is also called once under ``torch.device("meta")``, with the random generators restored
    afterwards. If that fails, the layer counts as one without parameters, and its skips are not seen.

    A build draws from the default generator, so ranks that build different layers get different values. With ``seed``
    the layer is built under that seed on every rank, and the generators are restored.
    """

    def __init__(self, fn: Callable[[], nn.Module], seed: int | None = None) -> None:
        super().__init__()
        if not callable(fn) or isinstance(fn, nn.Module):
            raise PlanError(f"Lazy takes a function that builds a layer, got {type(fn).__name__}: say Lazy(lambda: …)")
        self._fn = fn
        self._seed = seed
        self._mode: bool | None = None  # set by train() or eval()
        self._outline: Any = _NOT_YET

    def build(self) -> nn.Module:
        """Build the layer if necessary. Returns this object, which has become the layer."""
        with _build_lock:
            if not isinstance(self, Lazy):  # another thread has built it
                return self
            try:
                with torch.inference_mode(False), _generators(self._seed):
                    built = self._fn()
                    if not isinstance(built, nn.Module):
                        raise PlanError(f"a Lazy layer's function must return an nn.Module, not {type(built).__name__}")
                    build(built)
            except Exception as error:
                error.add_note(f"while building the layer of {self!r}")
                raise
            if self._mode is not None:
                built.train(self._mode)
            self._become(built)
        return self

    def _become(self, built: nn.Module) -> None:
        if isinstance(built, torch.jit.ScriptModule):  # compiled code is bound to the original object
            raise PlanError("a Lazy layer cannot be a ScriptModule: build it before, and do without Lazy")
        before = self.__dict__
        if any("_hooks" in name and mine for name, mine in before.items()):
            raise PlanError(f"hooks were registered on {self!r} before it was built: call build() first")
        object.__setattr__(self, "__dict__", built.__dict__)  # shared, so references to the built object stay valid
        try:
            self.__class__ = type(built)  # type: ignore[assignment]
        except TypeError as error:
            object.__setattr__(self, "__dict__", before)
            raise PlanError(f"a Lazy layer cannot be a {type(built).__name__}: {error}") from error

    def outline(self) -> nn.Module | None:
        """The layer on the meta device, without data; None if ``fn`` cannot be run there."""
        with _build_lock:
            if not isinstance(self, Lazy):
                return self
            if self._outline is _NOT_YET:
                try:
                    with torch.inference_mode(False), _generators(None, restore=True), torch.device("meta"):
                        outline: nn.Module | None = _without_data(self._fn())
                except Exception:  # that of the build will say more
                    outline = None
                self.__dict__["_outline"] = outline  # not by __setattr__, which would register a submodule
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
    """Build every lazy layer in a module; returns the module."""
    while lazy := [part for part in module.modules() if isinstance(part, Lazy)]:
        for part in lazy:
            part.build()
    return module


def members(module: nn.Module, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a module under every name; of a lazy layer, those that it will have."""
    for path, part in _modules(module, prefix):
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                yield f"{path}.{name}" if path else name, tensor


def signature(model: nn.Module) -> dict[str, str]:
    """The class of each module, and dtype and shape of each parameter and buffer: the same before and after a build."""
    parts = {f"module {path!r}": f"{type(part).__module__}.{type(part).__qualname__}" for path, part in _modules(model)}
    return parts | {f"{name!r}": f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in members(model, "")}


def _modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and its submodules under every name; a lazy layer as on the meta device, if it can be built there."""
    for path, part in module.named_modules(prefix=prefix, remove_duplicate=False):
        if not isinstance(part, Lazy):
            yield path, part
        elif (outline := part.outline()) is not None:
            yield from _modules(outline, path)


@contextmanager
def _generators(seed: int | None, *, restore: bool = False) -> Iterator[None]:
    """Set ``seed``, if given. The generators are restored afterwards if there is a seed or ``restore`` is set."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = list(range(torch.cuda.device_count())) if in_use else []
    with torch.random.fork_rng(devices, enabled=restore or seed is not None):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed_all(seed)
        yield


def _without_data(module: nn.Module) -> nn.Module:
    """The module on the meta device; a copy if it has tensors elsewhere."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else tensor.to("meta")
        for tensor in (*module.parameters(), *module.buffers())
        if not is_lazy(tensor) and not tensor.is_meta
    }
    return copy.deepcopy(module, memo) if memo else module
