"""Every private torch API that Penstock uses.

Entries are looked up when this module is imported, so that a call on the hot path costs no more than the API itself.
If torch lacks an API, its entry is a fallback on the public API, or raises an error on use that names the torch
version. APIs in modules that are slow to import are looked up on first use.

Private attributes of public classes (``Tensor._version``, ``nn.Module._buffers``) are read where they are needed.
``ATTRIBUTES`` lists them; importing this module checks that they exist.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function, profiler

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

TESTED = ("2.10", "2.11", "2.12", "2.13")


def _error(name: str) -> PenstockError:
    return PenstockError(
        f"Penstock uses {name}, which torch {torch.__version__} does not have: "
        f"install a version that Penstock was tested with ({', '.join(TESTED)})"
    )


def _find(path: str, fallback: Any = None) -> Any:
    """The object at a dotted path in torch. If there is none: ``fallback``, or a callable that raises."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return _raising(f"torch.{path}") if fallback is None else fallback
    return found


def _raising(name: str) -> Any:
    class Missing:
        """Replaces a missing function or class. Calls and the construction of subclasses raise."""

        def __init__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise _error(name)

    return Missing


# ── autograd ─────────────────────────────────────────────────────────────────────────────────────────────────────────

# ``torch.set_grad_enabled`` takes six times as long, because it creates a context manager.
set_grad_enabled: Callable[[bool], Any] = _find("_C._set_grad_enabled", torch.set_grad_enabled)


# Autograd's engine without the argument checks of ``torch.autograd.backward``, which cost as much as a small backward.
run_backward: Callable[..., Any] = _find("autograd.Variable._execution_engine.run_backward")

# Calls a function at the end of the running backward.
queue_callback: Callable[[Callable[[], None]], None] = _find("autograd.Variable._execution_engine.queue_callback")

# The id of the running backward, the same in all autograd threads. The fallback returns a new number for each call, so
# that no two calls seem to be in one backward. Weight gradients that device threads compute are then not deferred.
current_graph_task: Callable[[], int] = _find("_C._current_graph_task_id", itertools.count().__next__)

# Whether the running backward was called with ``retain_graph``. If unknown, graphs are kept.
graph_task_keeps_graph: Callable[[], bool] = _find("_C._autograd._get_current_graph_task_keep_graph", lambda: True)

# The innermost saved-tensor hooks, or None. The fallback always returns hooks: nothing is deferred then.
top_saved_tensors_hooks: Callable[[bool], Any] = _find(
    "_C._autograd._top_saved_tensors_default_hooks", lambda _: (None, None)
)

# The base class of autograd nodes implemented in Python.
PythonNode: Any = _find("_C._FunctionBase", torch.autograd.function.BackwardCFunction)


def unchecked_apply(function: type[Function]) -> Callable[..., Tensor]:
    """``function.apply``, and its ``backward``, without their checks in Python (functorch, ``vjp``)."""
    base = getattr(super(Function, function), "apply", None)
    if base is None or not hasattr(function, "_backward_cls"):
        return function.apply
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]
    return base  # type: ignore[no-any-return]


def raw_saved_tensors(node: Any) -> list[Tensor]:
    """The tensors that an autograd node has saved, without unpack hooks. Empty if torch does not expose them."""
    found: list[Any] = []
    for name in dir(node):
        if name.startswith("_raw_saved"):
            value = getattr(node, name, None)
            found += list(value) if isinstance(value, tuple | list) else [value]
    tensors = [getattr(saved, "data", None) for saved in found]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)]


def saved_value(node: Any, name: str) -> Any:
    """A value that an autograd node has saved for its backward. None if torch does not expose it."""
    return getattr(node, f"_saved_{name}", None)


def output_shape(node: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that an autograd node has made; None where torch does not tell."""
    found: Any = getattr(node, "_input_metadata", ())
    return tuple(found[0].shape) if len(found) == 1 else None


# ── dispatch and modes ───────────────────────────────────────────────────────────────────────────────────────────────

try:  # the base class of modes that intercept every operator
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError:
    TorchDispatchMode = _raising("torch.utils._python_dispatch.TorchDispatchMode")  # type: ignore[misc]

# Disable ``__torch_function__``: of subclasses and modes, and of subclasses only.
DisableTorchFunction: Any = _find("_C.DisableTorchFunction")
DisableTorchFunctionSubclass: Any = _find("_C.DisableTorchFunctionSubclass")

# Both are called for each op of a forward. The fallbacks return True: ops then take the plain path.
functorch_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", lambda: True)
any_autocast_enabled: Callable[[], bool] = _find("_C._is_any_autocast_enabled", lambda: True)

try:  # trees of tuples, lists and dicts
    from torch.utils import _pytree

    pytree = _pytree
except ImportError:
    raise _error("torch.utils._pytree") from None


def profiler_enabled() -> bool:
    """Whether torch's profiler is active. If unknown: False, and its traces lack the names of actions."""
    return bool(getattr(profiler, "_is_profiler_enabled", False))


def profile_all_threads() -> Any:
    """An ``experimental_config`` with which the profiler records all threads; None if torch has no such option."""
    config = _find("_C._profiler._ExperimentalConfig", lambda **_: None)
    return config(profile_all_threads=True)


def fake_tensor_mode() -> FakeTensorMode:
    """A mode whose tensors have a shape but no memory. Unlike meta tensors, they keep their device."""
    try:
        return importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        raise _error("torch._subclasses.fake_tensor.FakeTensorMode") from None


def is_fake_tensor(tensor: Any) -> bool:
    return type(tensor).__name__ == "FakeTensor"


@contextmanager
def unlogged_fake_tensor_errors() -> Iterator[None]:
    """Suppress torch's log of operators that fake tensors cannot compute, for callers that have a fallback."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute if it exists."""
    original = getattr(owner, name, None)
    try:
        if original is not None:
            setattr(owner, name, value)
        yield
    finally:
        if original is not None:
            setattr(owner, name, original)


def unchecked_data() -> AbstractContextManager[None]:
    """Disable ``torch._check_tensor_all``, an assertion about data, which fake tensors do not have."""
    return _replaced(torch, "_check_tensor_all_with", lambda *_: None)


def replaced_checkpoint(around: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Make ``checkpoint(function, …, use_reentrant=False)`` only call its function, within ``around()``.

    If torch lacks the generator that is replaced, checkpoints run unchanged.
    """

    def generator(*_: Any, **__: Any) -> Iterator[None]:
        with around():
            yield

    return _replaced(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", generator)


# ── tensors and operators ────────────────────────────────────────────────────────────────────────────────────────────

# Returns a tensor on the same memory that is not a view: it may be changed in place where a view may not.
unsafe_view: Callable[..., Tensor] = _find("ops.aten._unsafe_view.default")

# The CUDA kernels of RMSNorm; None where its weight gradient is left to autograd.
fused_rms_norm: Any = getattr(getattr(torch.ops.aten, "_fused_rms_norm", None), "default", None)
fused_rms_norm_backward: Any = getattr(getattr(torch.ops.aten, "_fused_rms_norm_backward", None), "default", None)


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, also of a storage without memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except AttributeError:
        raise _error("UntypedStorage._cdata") from None


# One kernel that zeroes many tensors.
foreach_zero_: Callable[[list[Tensor]], Any] = _find("_foreach_zero_", lambda tensors: [t.zero_() for t in tensors])

# One kernel for many gradients: multiplies them, and detects values that are not finite.
foreach_unscale_: Callable[..., None] = _find("_amp_foreach_non_finite_check_and_unscale_")


# ── CUDA graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Frees the workspaces of cuBLAS: its next call in each thread and on each stream allocates a new one.
clear_cublas_workspaces: Callable[[], None] = _find("_C._cuda_clearCublasWorkspaces", lambda: None)


def end_pool_allocation(device: torch.device, pool: Any) -> None:
    """After a failed capture: allocate outside of the pool of the graph again. torch does it in good captures only."""
    end = _find("_C._cuda_endAllocateToPool", lambda *_: None)
    with suppress(RuntimeError):
        end(device.index or 0, pool)


# ── modules ──────────────────────────────────────────────────────────────────────────────────────────────────────────

try:  # the base class of all BatchNorm layers
    from torch.nn.modules.batchnorm import _BatchNorm
except ImportError:
    _BatchNorm = nn.BatchNorm1d.__base__  # type: ignore[assignment,misc]
BatchNorm = _BatchNorm

try:  # the base class of all layers with running statistics
    from torch.nn.modules.batchnorm import _NormBase
except ImportError:
    _NormBase = _BatchNorm  # type: ignore[misc]
NormBase = _NormBase


def has_global_module_hooks() -> bool:
    """Whether hooks are registered that run for every module."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    return any(getattr(nn.modules.module, f"_global_{kind}_hooks", None) for kind in kinds)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile runs this module. Its backward is then compiled too."""
    dynamo = sys.modules.get("torch._dynamo")  # imported only by a program that compiles
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


# ── torch.distributed ────────────────────────────────────────────────────────────────────────────────────────────────


def default_store() -> Any:
    """The store of the default process group."""
    return _find("distributed.distributed_c10d._get_default_store")()


def gloo_options() -> Any:
    """Options of a gloo group: its device, timeout and number of threads."""
    return _find("distributed.ProcessGroupGloo._Options", _find("distributed.ProcessGroupGloo.Options"))()


def abort_gloo_work(work: Any) -> None:
    """Make the wait for a send or a receive of gloo return False, in any thread. No effect on other works.

    torch exposes this method in C++ only. A pybind11 object holds the address of its C++ object, whose first word is
    the address of the virtual table of its class. The virtual table identifies a send or a receive.
    """
    if not isinstance(work, dist.Work):
        return
    address = ctypes.c_void_p.from_address(id(work) + object.__basicsize__).value
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        for kind in ("SendWork", "RecvWork"):
            table = ctypes.c_void_p.in_dll(library, f"_ZTVN4c10d16ProcessGroupGloo8{kind}E")
            abort = getattr(library, f"_ZN4c10d16ProcessGroupGloo8{kind}5abortEv")
            methods = ctypes.addressof(table) + 2 * ctypes.sizeof(table)  # after two words of type information
            if address is not None and ctypes.c_void_p.from_address(address).value == methods:
                abort(ctypes.c_void_p(address))
    except (OSError, AttributeError, ValueError):  # another platform or torch: the wait ends with its own timeout
        return


def process_groups() -> list[tuple[dist.ProcessGroup, str]]:
    """All process groups of this process and the names of their backends. Empty if torch does not expose them."""
    world = getattr(dist.distributed_c10d, "_world", None)
    return [(group, backend) for group, (backend, _) in list(world.pg_map.items())] if world is not None else []


def nccl_backend(group: dist.ProcessGroup) -> Any:
    """The NCCL backend of a process group, which can be aborted."""
    if not hasattr(group, "_get_backend"):
        raise _error("ProcessGroup._get_backend")
    return group._get_backend(torch.device("cuda"))


def stored_chunk(file: str, offset: int, length: int) -> Any:
    """The location of a tensor, or of a chunk of one, in the files of ``torch.distributed.checkpoint``."""
    try:
        from torch.distributed.checkpoint.filesystem import _StorageInfo
    except ImportError:
        raise _error("torch.distributed.checkpoint.filesystem._StorageInfo") from None
    return _StorageInfo(file, offset, length)


def ddp_comm_hooks(wrapper: nn.parallel.DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """The communication hooks of a DDP module, as its own list: a hook that is registered later appears in it."""
    hooks: list[tuple[Callable[..., Any], object]] | None = getattr(wrapper, "_comm_hooks", None)
    if hooks is None:
        raise _error("DistributedDataParallel._comm_hooks")
    return hooks


def ddp_builtin_hook(wrapper: nn.parallel.DistributedDataParallel) -> str | None:
    """The name of the built-in (C++) communication hook of a DDP module, if one is registered."""
    read = getattr(wrapper, "_get_ddp_logging_data", None)
    return read().get("comm_hook") or None if read is not None else None


def composable_registry(module: nn.Module) -> Any:
    """The composable APIs (``replicate``, ``fully_shard``) that were applied to a module. Empty if unknown."""
    try:
        contract = importlib.import_module("torch.distributed._composable.contract")
        return contract._get_registry(module) or ()
    except (ImportError, AttributeError):
        return ()


def fsdp_state(module: Any) -> Any:
    """FSDP2's state of a module that ``fully_shard`` was called on, checked for the parts that Penstock uses."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    for name in ("_lazy_init", "_state_ctx", "_mp_policy", "_root_post_backward_final_callback"):
        if not hasattr(state, name):
            raise _error(f"FSDPState.{name}")
    return state


def fsdp_param_groups(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 state. Before torch 2.12 a state had at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def is_async_collective(tensor: Tensor) -> bool:
    """Whether a tensor is the result of a functional collective that may still be running."""
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    return collectives is not None and isinstance(tensor, collectives.AsyncCollectiveTensor)


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────────

ATTRIBUTES: dict[Any, tuple[str, ...]] = {
    Tensor: ("_version", "_base", "_is_view", "_backward_hooks", "_post_accumulate_grad_hooks"),
    nn.Module(): (
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_compiled_call_impl"),
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
    ),
}


for _owner, _names in ATTRIBUTES.items():
    for _name in _names:
        if not hasattr(_owner, _name):
            raise _error(f"{(_owner if isinstance(_owner, type) else type(_owner)).__name__}.{_name}")
