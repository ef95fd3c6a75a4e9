"""``penstock._torch``: each private torch API exists, and its fallback or error works where it does not."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import re
import sys
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock import _torch
from penstock.errors import PenstockError


def load() -> ModuleType:
    """A second copy of the module, initialised from the current state of torch."""
    spec = importlib.util.spec_from_file_location("torch_private_copy", _torch.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without(path: str) -> ModuleType:
    """``penstock._torch`` as it is imported on a torch that lacks ``path``."""
    above: Any = torch
    *parts, owner, last = ["torch", *path.split(".")]
    for part in parts[1:]:
        above = getattr(above, part)
    with pytest.MonkeyPatch.context() as patch:
        if owner == "torch":
            patch.delattr(torch, last)
        elif isinstance(getattr(above, owner), ModuleType) and owner != "aten":
            patch.delattr(getattr(above, owner), last)
        else:  # attributes of C++ objects cannot be deleted: an empty object replaces them
            patch.setattr(above, owner, SimpleNamespace())
        return load()


def missing(path: str) -> Any:
    """The error for a missing API: its path, and the torch version."""
    return pytest.raises(PenstockError, match=rf"{path}, which torch {torch.__version__.split('+')[0]}")


def test_saved_values_of_autograd_nodes() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    loss = torch.nn.functional.nll_loss(x, torch.tensor([0, 1, -100, 2])).grad_fn
    assert _torch.saved_value(loss, "target").tolist() == [0, 1, -100, 2]
    assert (_torch.saved_value(loss, "reduction"), _torch.saved_value(loss, "weight")) == (1, None)
    assert tuple(_torch.saved_value(x.mean().grad_fn, "self_sym_sizes")) == (4, 3)
    assert _torch.saved_value((x.sum() / 2).grad_fn, "other") == 2
    assert _torch.saved_value(x.mean().grad_fn, "no such value") is None
    assert _torch.output_shape((x @ x.T).grad_fn) == (4, 4)
    assert _torch.output_shape(SimpleNamespace()) is None


def test_only_this_module_uses_private_apis_of_torch() -> None:
    root = Path(_torch.__file__).parent
    private = re.compile(
        r"torch\._[a-zC]|_execution_engine|_backward_cls|_get_default_store|_get_fsdp_state|_is_profiler_enabled"
        r"|torch\.[\w.]*\b_(pytree|python_dispatch|BatchNorm|composable|functional_collectives)\b|aten\._|\._Options\b"
        r"|from torch[\w.]* import .*\b_[a-zA-Z]|\._cdata\b|\._comm_hooks\b|_get_ddp_logging_data|_get_backend\("
    )
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        if path.name != "_torch.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if private.search(line)
    ]
    assert not found, "\n".join(found)


def test_set_grad_enabled() -> None:
    for module in (_torch, without("_C._set_grad_enabled")):
        module.set_grad_enabled(False)
        off = torch.is_grad_enabled()
        module.set_grad_enabled(True)
        assert (off, torch.is_grad_enabled()) == (False, True)


def test_run_backward() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    edge = torch.autograd.graph.get_gradient_edge(x * 2)
    _torch.run_backward((edge,), (torch.full((3,), 5.0),), True, False, (), True, True)
    assert x.grad is not None
    assert x.grad.tolist() == [10.0] * 3
    found = list(_torch.run_backward((edge,), (torch.ones(3),), False, False, (x, y), True, False))
    assert found[0].tolist() == [2.0] * 3
    assert found[1] is None
    assert x.grad.tolist() == [10.0] * 3
    with missing("run_backward"):
        without("autograd.Variable._execution_engine.run_backward").run_backward(())


class Calls(Function):
    """An identity whose backward calls a given function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Any) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        ctx.call()
        return g, None


def test_queue_callback() -> None:
    order: list[str] = []

    def within() -> None:
        _torch.queue_callback(lambda: order.append("end"))
        order.append("within")

    Calls.apply(torch.ones(1, requires_grad=True), within).sum().backward()
    assert order == ["within", "end"]
    fallback = without("autograd.Variable._execution_engine.run_backward")
    with missing("queue_callback"):
        fallback.queue_callback(within)


def test_current_graph_task() -> None:
    seen: list[int] = []
    record = lambda: seen.extend([_torch.current_graph_task(), _torch.current_graph_task()])  # noqa: E731
    Calls.apply(torch.ones(1, requires_grad=True), record).sum().backward()
    assert seen[0] == seen[1] >= 0
    fallback = without("_C._current_graph_task_id")
    assert fallback.current_graph_task() != fallback.current_graph_task()


def test_graph_task_keeps_graph() -> None:
    seen: list[bool] = []
    y = Calls.apply(torch.ones(1, requires_grad=True), lambda: seen.append(_torch.graph_task_keeps_graph())).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert seen == [True, False]
    assert without("_C._autograd._get_current_graph_task_keep_graph").graph_task_keeps_graph()


def test_top_saved_tensors_hooks() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    assert _torch.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert _torch.top_saved_tensors_hooks(True)[0] is pack
    fallback = without("_C._autograd._top_saved_tensors_default_hooks")
    assert fallback.top_saved_tensors_hooks(True) is not None  # there may be other hooks


def test_python_node() -> None:
    x = torch.ones(1, requires_grad=True)
    for module in (_torch, without("_C._FunctionBase")):
        assert isinstance(Calls.apply(x, None).grad_fn, module.PythonNode)
        assert not isinstance((x * 2).grad_fn, module.PythonNode)


def test_unchecked_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    class Double(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g * 2

    class Plain:
        """A function of a torch without generated backward classes."""

        apply = "its own"

    x = torch.ones(2, requires_grad=True)
    _torch.unchecked_apply(Double)(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    monkeypatch.setattr(_torch, "Function", Plain)
    assert _torch.unchecked_apply(Plain) == "its own"  # type: ignore[arg-type]


def test_raw_saved_tensors() -> None:
    x = torch.ones(3, requires_grad=True)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or 0, lambda _: pytest.fail("unpacked")):
        hooked = x * x
    assert _torch.raw_saved_tensors(hooked.grad_fn) == []
    assert [t.data_ptr() for t in _torch.raw_saved_tensors((x * x).grad_fn)] == [x.data_ptr()] * 2
    assert _torch.raw_saved_tensors(object()) == []


def test_torch_dispatch_mode() -> None:
    seen: list[Any] = []

    def counter(module: Any) -> Any:
        class Counter(module.TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        return Counter

    with counter(_torch)():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen
    fallback = without("utils._python_dispatch.TorchDispatchMode")
    with missing("TorchDispatchMode"):
        counter(fallback)()


@pytest.mark.parametrize("name", ["DisableTorchFunction", "DisableTorchFunctionSubclass"])
def test_disable_torch_function(name: str) -> None:
    class Watched(Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.seen += 1
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(2).as_subclass(Watched)
    before = Watched.seen
    with getattr(_torch, name)():
        x + 1
    assert Watched.seen == before
    x + 1
    assert Watched.seen > before
    with missing(name):
        getattr(without(f"_C.{name}"), name)()


def test_functorch_active() -> None:
    seen: list[bool] = []
    torch.func.grad(lambda x: seen.append(_torch.functorch_active()) or x.sum())(torch.ones(2))
    assert [*seen, _torch.functorch_active()] == [True, False]
    assert without("_C._are_functorch_transforms_active").functorch_active()


def test_any_autocast_enabled() -> None:
    assert not _torch.any_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.any_autocast_enabled()
    assert without("_C._is_any_autocast_enabled").any_autocast_enabled()


def test_pytree(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, spec = _torch.pytree.tree_flatten({"a": [1, (2,)]})
    assert leaves == [1, 2]
    assert _torch.pytree.tree_unflatten(leaves, spec) == {"a": [1, (2,)]}
    monkeypatch.setitem(sys.modules, "torch.utils._pytree", None)
    monkeypatch.delattr(torch.utils, "_pytree")
    with missing("torch.utils._pytree"):
        load()


def test_profiler_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not _torch.profiler_enabled()
    with torch.profiler.profile(experimental_config=_torch.profile_all_threads()):
        assert _torch.profiler_enabled()
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert not _torch.profiler_enabled()
    monkeypatch.delattr(torch._C._profiler, "_ExperimentalConfig")
    assert _torch.profile_all_threads() is None


def test_fake_tensor_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with _torch.fake_tensor_mode() as mode:
        fake = mode.from_tensor(torch.ones(2, 3)) @ torch.ones(3, 4)
    assert fake.shape == (2, 4)
    assert fake.device.type == "cpu"
    monkeypatch.setitem(sys.modules, "torch._subclasses.fake_tensor", None)
    with missing("FakeTensorMode"):
        _torch.fake_tensor_mode()


def test_unsafe_view() -> None:
    x = torch.arange(4.0)
    y = _torch.unsafe_view(x, x.shape)
    assert y.data_ptr() == x.data_ptr()
    assert not y._is_view()
    fallback = without("ops.aten._unsafe_view")
    with missing("_unsafe_view.default"):
        fallback.unsafe_view(x, x.shape)


def test_fused_rms_norm() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    out, scale = _torch.fused_rms_norm(x, [8], weight, 1e-5)
    assert torch.allclose(out, nn.functional.rms_norm(x, [8], weight, 1e-5))
    x, weight, scale = x.to("meta"), weight.to("meta"), scale.to("meta")  # the kernel is CUDA's
    grads = _torch.fused_rms_norm_backward(torch.empty_like(x), x, [8], scale, weight, [True, True])
    assert [tuple(g.shape) for g in grads] == [(2, 8), (8,)]
    fallback = without("ops.aten._fused_rms_norm")
    assert fallback.fused_rms_norm is None
    assert fallback.fused_rms_norm_backward is None


def test_storage_id() -> None:
    a, b = torch.empty(0), torch.empty(0)
    assert a.data_ptr() == b.data_ptr()
    assert _torch.storage_id(a) == _torch.storage_id(a.view(0, 1)) != _torch.storage_id(b)
    with missing("_cdata"):
        _torch.storage_id(SimpleNamespace(untyped_storage=SimpleNamespace))  # type: ignore[arg-type]


def test_foreach_unscale() -> None:
    for bad in (1.0, float("inf"), float("nan")):
        grads, found = [torch.full((2,), 6.0), torch.tensor([bad])], torch.zeros(())
        _torch.foreach_unscale_(grads, found, torch.tensor(0.5))
        assert grads[0].tolist() == [3.0, 3.0]
        assert bool(found) is (bad != 1.0)
    with missing("_amp_foreach_non_finite_check_and_unscale_"):
        without("_amp_foreach_non_finite_check_and_unscale_").foreach_unscale_([])


def test_foreach_zero() -> None:
    for zero_ in (_torch.foreach_zero_, without("_foreach_zero_").foreach_zero_):
        tensors = [torch.ones(2), torch.ones(3)]
        zero_(tensors)
        assert not any(tensor.any() for tensor in tensors)


def test_workspaces_and_pools_without_cuda_graphs() -> None:
    _torch.clear_cublas_workspaces()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch._C, "_cuda_endAllocateToPool", raising=False)
        _torch.end_pool_allocation(torch.device("cuda"), (0, 1))


def test_batch_norm() -> None:
    for module in (_torch, without("nn.modules.batchnorm._BatchNorm")):
        assert isinstance(nn.SyncBatchNorm(2), module.BatchNorm)
        assert not isinstance(nn.InstanceNorm1d(2), module.BatchNorm)


def test_layers_with_running_statistics() -> None:
    for module in (_torch, without("nn.modules.batchnorm._NormBase")):
        assert isinstance(nn.BatchNorm1d(2), module.NormBase)
    assert isinstance(nn.InstanceNorm1d(2), _torch.NormBase)


def test_fake_tensors() -> None:
    with _torch.fake_tensor_mode():
        x = torch.empty(2)
    assert _torch.is_fake_tensor(x)
    assert not _torch.is_fake_tensor(torch.empty(2))


def test_errors_of_fake_tensors_are_not_logged() -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.level
    with _torch.unlogged_fake_tensor_errors():
        assert not logger.isEnabledFor(logging.ERROR)
    assert logger.level == before


def test_assertions_about_data_are_left_out() -> None:
    failing = torch.tensor([True, False])
    with _torch.unchecked_data():
        torch._check_tensor_all(failing)
    with pytest.raises(RuntimeError):
        torch._check_tensor_all(failing)


def test_replaced_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[bool] = []

    @contextmanager
    def around() -> Iterator[None]:
        inside.append(True)
        yield
        inside.append(False)

    def run(x: Tensor) -> Tensor:
        calls.append(list(inside))
        return x.exp()

    calls: list[list[bool]] = []
    x = torch.ones(2, requires_grad=True)
    with _torch.replaced_checkpoint(around):
        checkpoint(run, x, use_reentrant=False).sum().backward()
    assert (calls, inside) == ([[True]], [True, False])
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert len(calls) == 3, "torch's own again: once forward, once in backward"
    monkeypatch.delattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
    with _torch.replaced_checkpoint(around):
        assert not hasattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")


def test_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    assert not _torch.is_compiled(module)
    module._compiled_call_impl = module.forward
    assert _torch.is_compiled(module)
    monkeypatch.setitem(sys.modules, "torch._dynamo", SimpleNamespace(OptimizedModule=nn.ReLU))
    assert _torch.is_compiled(nn.ReLU())


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_default_store_and_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch.default_store().set("key", "value")
    assert _torch.default_store().get("key") == b"value"
    assert [(g is dist.group.WORLD, backend) for g, backend in _torch.process_groups()] == [(True, "gloo")]
    monkeypatch.delattr(dist.distributed_c10d, "_get_default_store")
    with missing("_get_default_store"):
        _torch.default_store()
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "dist", SimpleNamespace(distributed_c10d=SimpleNamespace()))
        assert _torch.process_groups() == []


def test_nccl_backend() -> None:
    asked: list[torch.device] = []
    assert _torch.nccl_backend(SimpleNamespace(_get_backend=asked.append)) is None  # type: ignore[arg-type]
    assert asked == [torch.device("cuda")]
    with missing("_get_backend"):
        _torch.nccl_backend(SimpleNamespace())  # type: ignore[arg-type]


def test_gloo_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = _torch.gloo_options()
    assert {"_devices", "_threads", "_timeout"} <= set(dir(options))
    monkeypatch.setattr(dist, "ProcessGroupGloo", SimpleNamespace(Options=lambda: "public"))
    assert _torch.gloo_options() == "public"
    monkeypatch.setattr(dist, "ProcessGroupGloo", SimpleNamespace())
    with missing("ProcessGroupGloo.Options"):
        _torch.gloo_options()


def test_abort_gloo_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks in one process, the first waits for messages that the other neither sends nor receives."""
    store, groups = dist.HashStore(), {}

    def connect(rank: int) -> None:
        options = _torch.gloo_options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_default_device()], timedelta(seconds=60)
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, options)

    with ThreadPoolExecutor() as pool:
        list(pool.map(connect, range(2)))
        for start in (groups[0].send, groups[0].recv):
            work = start([torch.ones(2)], 1, 0)
            waiting = pool.submit(work.wait)
            with monkeypatch.context() as patch:
                patch.setattr(ctypes, "CDLL", lambda path: ctypes.pythonapi)  # without these symbols
                _torch.abort_gloo_work(work)
            assert not waiting.done()
            _torch.abort_gloo_work(work)
            assert waiting.result() is False
        sums = [pool.submit(lambda group: group.allreduce([torch.ones(2)]), group) for group in groups.values()]
        for future in sums:
            _torch.abort_gloo_work(future.result())  # is left alone
            future.result().wait()
    _torch.abort_gloo_work(None)


@pytest.mark.usefixtures("group")
def test_ddp_hooks() -> None:
    wrapper = DistributedDataParallel(nn.Linear(2, 2))
    assert _torch.ddp_comm_hooks(wrapper) == []
    assert _torch.ddp_builtin_hook(wrapper) is None
    wrapper._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[no-untyped-call]
    assert "16" in str(_torch.ddp_builtin_hook(wrapper))
    assert _torch.ddp_builtin_hook(SimpleNamespace()) is None  # type: ignore[arg-type]
    with missing("_comm_hooks"):
        _torch.ddp_comm_hooks(SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.usefixtures("group")
def test_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    assert "fully_shard" in _torch.composable_registry(module)
    assert _torch.composable_registry(nn.Linear(2, 2)) == ()
    (one,) = _torch.fsdp_param_groups(_torch.fsdp_state(module))
    assert len(one.fsdp_params) == 2
    assert _torch.fsdp_param_groups(SimpleNamespace(_fsdp_param_group=None)) == []
    assert _torch.fsdp_param_groups(SimpleNamespace(_fsdp_param_group=one)) == [one]
    with missing("FSDPState._lazy_init"):
        _torch.fsdp_state(nn.Linear(2, 2))
    monkeypatch.setitem(sys.modules, "torch.distributed._composable.contract", None)
    assert _torch.composable_registry(module) == ()


def test_is_async_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._functional_collectives as collectives

    waiting = collectives.AsyncCollectiveTensor(torch.ones(2))
    assert _torch.is_async_collective(waiting)
    assert not _torch.is_async_collective(torch.ones(2))
    monkeypatch.delitem(sys.modules, "torch.distributed._functional_collectives")
    assert not _torch.is_async_collective(waiting)


def test_attributes_are_checked_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__init__", lambda self: None)
    with missing("Module._parameters"):
        load()


def test_pyproject_torch_versions() -> None:
    pyproject = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    first, last = _torch.TESTED[0], _torch.TESTED[-1]
    major, minor = last.split(".")
    assert f"torch>={first},<{major}.{int(minor) + 1}" in pyproject["project"]["dependencies"]


# ── CUDA graphs ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_workspaces_of_cublas_are_freed() -> None:
    x = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    _torch.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    x @ x
    assert torch.cuda.memory_allocated() > before
    _torch.clear_cublas_workspaces()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_is_allocated_outside_of_the_pool_after_a_failed_capture() -> None:
    graph, pool, stream = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        with pytest.raises(RuntimeError):
            torch.ones(2, device="cuda").tolist()
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        _torch.end_pool_allocation(torch.device("cuda"), pool)
        made = torch.ones(1 << 20, device="cuda")
    segments = [
        s for s in torch.cuda.memory_snapshot() if s["address"] <= made.data_ptr() < s["address"] + s["total_size"]
    ]
    assert [s["segment_pool_id"] for s in segments] == [(0, 0)]
