"""CUDA graphs on the CPU: a capture records the operators that run, and a replay runs them on the same memory again.

Like a CUDA graph, a replay runs no Python code of the stage, and sees other data only where a recorded tensor was
written to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.engine.cuda_graphs import CudaGraphs


class RecordedOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # tensors that the capture writes, with their values

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs or {})
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for tensor in tree_leaves([named.get(name) for name in (*written, "running_mean", "running_var")]):
            if isinstance(tensor, Tensor):
                self.before.setdefault(id(tensor), (tensor, tensor.detach().clone()))
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if any(x.untyped_storage().data_ptr() not in given for x in made) or func._schema.is_mutable:
            self.calls.append((func, args, kwargs or {}, made))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                result = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for old, new in zip(made, result, strict=True):
                    if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                        old.data.copy_(new)


class CpuGraphDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def generators(self, count: int) -> list[torch.Generator]:
        raise RuntimeError("random streams of a capture need a GPU")

    shared_pool: object = None

    def new_pool(self) -> object:
        return object()

    def capture(
        self, action: Callable[[], None], pool: object, generators: Sequence[torch.Generator] = ()
    ) -> Callable[[], None]:
        self.captures += 1
        recorded = RecordedOperators()
        try:
            with recorded:
                action()
        finally:
            for tensor, value in recorded.before.values():  # a capture computes nothing
                tensor.data.copy_(value)
        return recorded.replay


def replay_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pipelines with ``cuda_graphs=True`` capture stages on the CPU."""
    monkeypatch.setattr(CudaGraphs, "supports", staticmethod(lambda device: True))
    monkeypatch.setattr(CudaGraphs, "new_device", staticmethod(CpuGraphDevice))
