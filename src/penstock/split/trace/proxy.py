"""The values that flow through a forward while it is traced, and what records operations that have none of them."""

from __future__ import annotations

import dis
import inspect
import operator
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, fx
from torch.fx.proxy import TraceError
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from penstock.split.lazy import Lazy
from penstock.split.trace.state import LIBRARY

FACTORIES: tuple[Callable[..., Any], ...] = tuple(_device_constructors())
"""Functions that make tensors of nothing: run at each call, not once at the trace."""


def require(condition: Any) -> None:
    """An ``assert`` of the user's forward, run at each call."""
    assert condition


def spread(value: Any) -> Any:
    """A value that a call unpacks with ``*``: its items take its place in the call's arguments."""
    return value


class Unknown(TraceError, TypeError):
    """A question about a value that has an answer only when the model runs.

    It is a TypeError, too: Python asks values for their lengths, and goes on without where it gets one.
    """


def _instruction(frame: Any) -> tuple[str, str, int]:
    """The operation that a frame is at, the one after it, and the first one's argument."""
    steps = list(dis.get_instructions(frame.f_code))
    at = bisect_left(steps, frame.f_lasti, key=lambda step: step.offset)
    after = steps[at + 1].opname if at + 1 < len(steps) else ""
    return steps[at].opname, after, steps[at].argval


_READ_AT_ONCE = {"shape", "device", "dtype", "ndim", "is_cuda", "requires_grad", "T", "mT", "H", "mH", "data"}


class Value(fx.Proxy):
    """A value of the forward that is being traced."""

    def __getattr__(self, name: str) -> Attribute:
        attribute = Attribute(self, name)
        if name in _READ_AT_ONCE:
            _ = attribute.node  # recorded where it is read: used after a cut, it must not pull the tensor along
        return attribute

    def __bool__(self) -> bool:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        operation, after, _ = _instruction(frame.f_back)
        if "JUMP" in operation and "IF_TRUE" in operation and after == "LOAD_ASSERTION_ERROR":
            self.tracer.create_proxy("call_function", require, (self,), {})
            return True
        return self.tracer.to_bool(self)

    def __iter__(self) -> Iterator[Any]:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        operation, _, count = _instruction(frame.f_back)
        if operation == "UNPACK_SEQUENCE":
            items: Any = self
            return iter([items[i] for i in range(count)])
        if operation in ("LIST_EXTEND", "CALL_FUNCTION_EX"):
            return iter([Spread(self)])
        raise Unknown("how many items there are is known only when the model runs")

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})

    def __len__(self) -> int:
        raise Unknown("len() of it is known only when the model runs")

    def __int__(self) -> int:
        raise Unknown("its value as a number is known only when the model runs")

    __index__ = __float__ = __int__

    def __contains__(self, item: object) -> bool:
        raise Unknown("what is in it is known only when the model runs")

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Asked by ``isinstance``: a tensor where that is known; else, in the user's code, there is no answer."""
        if sys._getframe(1).f_code.co_filename.startswith(LIBRARY):
            return type(self)
        if self.node.op in ("placeholder", "get_attr"):
            return Tensor
        raise Unknown("what kind of value it is, is known only when the model runs")

    def __hash__(self) -> int:
        return id(self)


def _in_place(name: str) -> None:
    target = getattr(operator, name)

    def apply(self: Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(Value, f"__{name}__", apply)


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"):
    _in_place(_name)


class Attribute(Value, fx.proxy.Attribute):
    """An attribute of a value: a method that is called, or something to be read when the model runs."""

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        # What was recorded in a part that was given up is recorded anew.
        if self._node is None or self._node._erased:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


class Member(Value):
    """A parameter: its shape is known."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, tensor: Tensor) -> None:
        super().__init__(node, tracer)
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.tensor.size() if dim is None else self.tensor.size(dim)

    def dim(self) -> int:
        return self.tensor.dim()

    def numel(self) -> int:
        return self.tensor.numel()


class Spread:
    """What ``*value`` unpacks to: known only when the model runs, it can only stand in a call's arguments."""

    def __init__(self, value: Value) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        raise Unknown("how many items *value unpacks to is known only when the model runs")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own: Spread = _first((args, kwargs or {}), cls)
        return own.value.tracer.create_proxy("call_function", func, args, kwargs or {})

    def __fx_create_arg__(self, tracer: fx.Tracer) -> fx.Node:
        return tracer.create_proxy("call_function", spread, (self.value,), {}).node


def _first(value: Any, kind: type | tuple[type, ...]) -> Any:
    """Something of this kind in a tree, or None."""
    if isinstance(value, kind):
        return value
    if isinstance(value, dict):
        value = list(value.values())
    elif isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        return next((found for found in (_first(item, kind) for item in value) if found is not None), None)
    return None


def holds(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether there is something of this kind in a tree."""
    return _first(value, kind) is not None


_NOW = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__len__", "__index__", "__repr__", "__format__"}
"""What is asked of a tensor that is not part of the flow at the time of the trace."""
_NOW |= {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "stride"}


class RecordAll(TorchFunctionMode):
    """Records operations on tensors that are there already, and those that make tensors: nothing is computed."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        read: Any = getattr(func, "__self__", None)
        asked = "device" if read is torch.Tensor.device else "dtype" if read is torch.Tensor.dtype else None
        if asked is not None and id(args[0]) in self.tracer.members:
            # Of a parameter, as in next(self.parameters()).device: it may be moved after the trace.
            return self.tracer.create_proxy("call_function", getattr, (args[0], asked), {})
        if func in FACTORIES:
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        if name not in _NOW and not holds((args, kwargs), fx.Proxy) and holds((args, kwargs), Tensor):
            return self.tracer.create_proxy("call_function", func, args, kwargs)
        return func(*args, **kwargs)


@contextmanager
def recorded_calls(tracer: Any, thread: int) -> Iterator[None]:
    """Autograd functions of the user's are recorded whole: traced through, they would lose their own backward.

    Lazy layers are recorded, too, and not built.
    """
    original: Any = vars(torch.autograd.Function)["apply"]
    called: Any = Lazy.__call__

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        own = original.__get__(None, cls)
        if threading.get_ident() != thread or not holds((args, kwargs), fx.Proxy):
            return own(*args, **kwargs)
        if cls is torch.utils.checkpoint.CheckpointFunction:  # its backward is that of what it runs, without a graph
            function, _, *inputs = args
            return function(*inputs)
        return tracer.create_proxy("call_function", own, args, kwargs, name=cls.__name__)

    def call(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        return tracer.call_module(self, partial(called, self), args, kwargs)

    functions, lazy = cast(Any, torch.autograd.Function), cast(Any, Lazy)
    functions.apply, lazy.__call__ = classmethod(apply), call
    try:
        yield
    finally:
        functions.apply, lazy.__call__ = original, called
