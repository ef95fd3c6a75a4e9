"""Deferring weight gradients changes when they are computed, and nothing else."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.engine.weightgrad import WeightGradQueue, defer_weight_grad, make_recorder, ops

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)][: 1 + torch.cuda.is_available()]


def queue_of(module: nn.Module, shared: list[Tensor] | None = None) -> WeightGradQueue:
    return WeightGradQueue(make_recorder(module, shared or []))


def split_step(module: nn.Module, queue: WeightGradQueue, x: Tensor, grad: Tensor | None = None) -> Tensor:
    """F, I and W of one micro-batch."""
    with queue.recording():
        output = module(x)
    with queue.deferring():
        output.backward(torch.ones_like(output) if grad is None else grad)
    queue.run()
    assert isinstance(output, Tensor)
    return output.detach()


def assert_same(module: nn.Module, plain: nn.Module) -> None:
    for (name, p), q in zip(module.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        torch.testing.assert_close(p.grad, q.grad, msg=lambda text, name=name: f"{name}: {text}")


def check(module: nn.Module, *inputs: Tensor) -> None:
    """The gradients of a few micro-batches are those of the plain module."""
    plain, queue = copy.deepcopy(module), queue_of(module)
    for x in inputs:
        mine = x.clone().requires_grad_(x.is_floating_point())
        theirs = x.clone().requires_grad_(x.is_floating_point())
        output = plain(theirs)
        output.backward(torch.ones_like(output))
        torch.testing.assert_close(split_step(module, queue, mine), output.detach())
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert_same(module, plain)


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()


class Calls(nn.Module):
    """A module whose forward is a function of itself and x."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.add_module(name, part)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


# Parameters used more than once


def test_a_module_called_several_times() -> None:
    module = Calls(lambda m, x: m.a(m.norm(m.a(x)).relu()) + m.a(x), a=nn.Linear(4, 4), norm=nn.LayerNorm(4))
    check(module, double(3, 4), double(3, 4), double(2, 4))


def test_embedding_and_head_tied() -> None:
    module = Calls(lambda m, x: m.head(m.table(x)), table=nn.Embedding(6, 4), head=nn.Linear(4, 6))
    module.head.weight = module.table.weight
    check(module, torch.randint(6, (3, 5)), torch.randint(6, (5,)))


def test_sparse_embedding_tied_to_a_head() -> None:
    """The table's gradient is sparse, and computed in I: the head's is added to it in W."""
    module = Calls(lambda m, x: m.head(m.table(x)), table=nn.Embedding(6, 4, sparse=True), head=nn.Linear(4, 6))
    module.head.weight = module.table.weight
    check(module, torch.randint(6, (3, 5)), torch.randint(6, (5,)))


def test_a_parameter_of_a_deferred_op_and_of_another() -> None:
    module = Calls(lambda m, x: m.a(x) * m.a.weight.sum() + m.a.bias.exp(), a=nn.Linear(4, 4))
    check(module, double(3, 4), double(3, 4))


def test_inputs_changed_in_place_by_the_next_module() -> None:
    check(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)).double(), double(3, 4))


def test_an_output_that_gets_no_gradient_leaves_none() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return None

    module = Calls(lambda m, x: m.b(x) + Nothing.apply(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    check(module, double(3, 4), double(3, 4))


# Gradients left to autograd


def test_hooks_fire_once_per_micro_batch() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        module, calls = mlp(), []
        handles = [getattr(p, register)(calls.append) for p in (module[0].weight, module[2].bias)]
        queue = queue_of(module)
        for count in (2, 4):
            with queue.recording():
                output = module(double(3, 4))
            with queue.deferring():
                output.sum().backward()
            assert len(calls) == count, register
            assert len(queue) == 0
            queue.run()
        for handle in handles:
            handle.remove()
        with queue.recording():
            output = module(double(3, 4))
        with queue.deferring():
            output.sum().backward()
        assert len(queue) == 2, "no hooks any more"


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_a_stage(reentrant: bool) -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        middle = checkpoint(m.block, m.first(x), use_reentrant=reentrant)
        assert isinstance(middle, Tensor)
        out = m.last(middle)
        assert isinstance(out, Tensor)
        return out

    block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    check(Calls(function, first=nn.Linear(4, 4), block=block, last=nn.Linear(4, 4)), double(3, 4), double(3, 4))


def test_saved_tensors_on_the_host() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out = m.a(x)
        assert isinstance(out, Tensor)
        return out

    check(Calls(function, a=nn.Linear(4, 4)), double(3, 4), double(3, 4))


def test_functional_call_and_computed_weights() -> None:
    inner = nn.Linear(4, 4)
    check(
        Calls(lambda m, x: torch.func.functional_call(m.a, {"weight": m.a.weight * 2}, (x,)), a=inner),
        double(3, 4),
        double(3, 4),
    )
    check(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)).double(), double(3, 4), double(3, 4))


def test_function_transforms_inside_a_stage() -> None:
    check(Calls(lambda m, x: torch.func.vmap(m.a)(x), a=nn.Linear(4, 4)), double(3, 4), double(3, 4))


def test_no_grad_defers_nothing_and_touches_nothing() -> None:
    module = mlp()
    queue = queue_of(module)
    with torch.no_grad(), queue.recording():
        assert "forward" not in module[0].__dict__
        assert module(double(3, 4)).grad_fn is None
    with queue.recording():
        with torch.no_grad():
            assert module(double(3, 4)).grad_fn is None
        with torch.inference_mode():
            assert module(double(3, 4)).is_inference()


def test_a_compiled_part_is_left_to_its_compiler() -> None:
    part = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager", fullgraph=True)
    module = Calls(lambda m, x: m.last(m.part(x)), part=part, last=nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    queue = queue_of(module)
    for x in (double(3, 4), double(3, 4)):
        plain(x).sum().backward()
        with queue.recording():
            output = module(x)
        with queue.deferring():
            output.sum().backward()
        assert len(queue) == 1
        queue.run()
    assert_same(module, plain)


def test_a_compiled_function_that_calls_modules() -> None:
    compiled = torch.compile(lambda m, x: m.b(m.a(x).relu()), backend="eager", fullgraph=True)
    check(Calls(compiled, a=nn.Linear(4, 4), b=nn.LayerNorm(4)), double(3, 4), double(3, 4), double(3, 4))


def test_modules_are_as_they_were() -> None:
    module = Calls(lambda m, x: m.b(m.a(x)), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    queue = queue_of(module)
    module.b.forward = lambda x: x * 2  # type: ignore[method-assign]  # somebody's own: stays
    before = [dict(part.__dict__) for part in module.modules()]
    split_step(module, queue, double(3, 4))
    assert [part.__dict__ for part in module.modules()] == before
    with pytest.raises(RuntimeError, match="mat1 and mat2"), queue.recording():
        module(double(3, 5))
    assert [part.__dict__ for part in module.modules()] == before
    assert module.b.weight.grad is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: Calls(lambda m, x: m.a(x)[0], a=nn.LSTM(4, 4, 2)),
        lambda: Calls(lambda m, x: m.a(x, x), a=nn.Bilinear(4, 4, 4)),
        lambda: Calls(lambda m, x: m.a(m.b(x)), a=nn.PReLU(), b=nn.Linear(4, 4)),
        lambda: Calls(lambda m, x: m.a((x > 0).long()), a=nn.EmbeddingBag(2, 4)),
        lambda: Calls(lambda m, x: m.a(x), a=nn.BatchNorm1d(4)),
    ],
    ids=["lstm", "bilinear", "prelu", "bag", "batchnorm"],
)
def test_other_modules(make: Callable[[], nn.Module]) -> None:
    check(make(), double(3, 4), double(3, 4))


def test_unfreezing_a_stage() -> None:
    module = mlp().requires_grad_(False)
    queue = queue_of(module)
    with queue.recording():
        assert module(double(3, 4)).grad_fn is None
    module.requires_grad_(True)
    with queue.recording():
        output = module(double(3, 4))
    with queue.deferring():
        output.sum().backward()
    assert len(queue) == 2


@pytest.fixture
def one_rank() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_modules_that_manage_their_gradients() -> None:
    """DDP and FSDP take a gradient when autograd has it, which would be too early."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    x = double(3, 4)
    mesh = init_device_mesh("cpu", (1,))
    for wrap in (nn.parallel.DistributedDataParallel, lambda m: fully_shard(m, mesh=mesh)):
        plain = mlp()
        module = wrap(copy.deepcopy(plain))
        queue = queue_of(nn.Sequential(module))
        for _ in range(2):
            plain(x).sum().backward()
            with queue.recording():
                output = module(x)
            with queue.deferring():
                output.sum().backward()
            assert len(queue) == 0
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            grad = p.grad
            torch.testing.assert_close(grad.to_local() if hasattr(grad, "to_local") else grad, q.grad)


# Autograd inside a forward


def penalty(m: Any, x: Tensor) -> Tensor:
    """A network and the gradient of its sum: the weights' gradient goes through the gradient, too."""
    x = x.detach().requires_grad_()
    y = m.net(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    out = m.last(y + slope)
    assert isinstance(out, Tensor)
    return out


def test_a_forward_that_differentiates() -> None:
    parts = {"net": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), "last": nn.Linear(4, 4)}
    check(Calls(penalty, **parts), *(double(3, 4) for _ in range(3)))


def test_a_forward_that_differentiates_every_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LARGE", 0)
    net = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4), nn.Tanh(), nn.LayerNorm(3), nn.RMSNorm(3))
    check(Calls(penalty, net=net, last=nn.Linear(3, 3)), double(2, 4, 3), double(2, 4, 3))


def test_a_forward_that_calls_backward() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        m.a(m.table(torch.tensor([1, 2]))).sum().backward()
        out = m.a(x)
        assert isinstance(out, Tensor)
        return out

    check(Calls(function, a=nn.Linear(4, 4), table=nn.Embedding(3, 4)), double(3, 4), double(3, 4))


def test_a_forward_that_begins_to_differentiate_later() -> None:
    module = Calls(lambda m, x: penalty(m, x) if m.late else m.last(m.net(x)), net=mlp(), last=nn.Linear(4, 4))
    queue = queue_of(module)
    module.late = False
    split_step(module, queue, double(3, 4))
    module.late = True
    with pytest.raises(ps.PipelineError, match="autograd ran inside the forward"), queue.recording():
        module(double(3, 4))


# Changing what is saved


def test_an_input_changed_between_f_and_i() -> None:
    module = nn.Linear(4, 4)
    queue = queue_of(module)
    x = torch.randn(3, 4)
    with queue.recording():
        output = module(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), queue.deferring():
        output.sum().backward()


def test_a_weight_changed_between_f_and_i() -> None:
    module = nn.Linear(4, 4)
    queue = queue_of(module)
    with queue.recording():
        output = module(torch.randn(3, 4, requires_grad=True))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"), queue.deferring():
        output.sum().backward()


@pytest.mark.parametrize("which", ["input", "gradient"])
@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(3, 3, 1), lambda: nn.LayerNorm(4), lambda: nn.Embedding(9, 4)]
)
def test_a_tensor_changed_between_i_and_w(
    make: Callable[[], nn.Module], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_LARGE", 0)
    module = make()
    queue = queue_of(module)
    x = torch.ones(3, 4, dtype=torch.long) if isinstance(module, nn.Embedding) else torch.randn(2, 3, 4)
    with queue.recording():
        output = module(x)
    g = torch.randn_like(output)
    with queue.deferring():
        output.backward(g)
    (x if which == "input" else g).add_(1)
    with pytest.raises(RuntimeError, match="modified in place between I and W"):
        queue.run()
    assert len(queue) == 0
    assert all(p.grad is None for p in module.parameters())


# The queue


def test_run_once_clear_and_use_again() -> None:
    module = mlp()
    queue = queue_of(module)
    split_step(module, queue, double(3, 4))
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    queue.run()
    torch.testing.assert_close([p.grad for p in module.parameters()], grads)
    with queue.recording():
        output = module(double(3, 4))
    with queue.deferring():
        output.sum().backward()
    assert len(queue) == 2
    queue.clear()
    queue.run()
    torch.testing.assert_close([p.grad for p in module.parameters()], grads)


def test_an_error_in_the_work_empties_the_queue() -> None:
    module = Calls(lambda m, x: Scale.apply(m.a(x), m.weight), a=nn.Linear(4, 4))
    module.weight = nn.Parameter(double(4))
    queue = queue_of(module)
    with queue.recording():
        output = module(double(3, 4))
    Scale.error = ValueError("no gradient today")
    try:
        with queue.deferring():
            output.sum().backward()
        with pytest.raises(ValueError, match="no gradient today"):
            queue.run()
    finally:
        Scale.error = None
    assert len(queue) == 0
    assert torch.is_grad_enabled()


def test_a_backward_outside_i_is_a_plain_backward() -> None:
    """Only while the recorder is cautious: the stage's first micro-batch."""
    module = mlp()
    plain, queue, x = copy.deepcopy(module), queue_of(module), double(3, 4)
    plain(x).sum().backward()
    with queue.recording():
        output = module(x)
    output.sum().backward()
    assert len(queue) == 0
    assert_same(module, plain)


def test_nothing_is_held_after_w_and_only_inputs_and_gradients_before() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.Tanh())
    queue = queue_of(module)
    split_step(module, queue, torch.randn(3, 4))  # no longer cautious
    refs: dict[str, StorageWeakRef] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(*args: Any) -> None:
            refs[name] = StorageWeakRef(args[-1].untyped_storage())
            if args[-1].requires_grad:
                args[-1].register_hook(lambda g: refs.__setitem__(f"{name}.grad", StorageWeakRef(g.untyped_storage())))

        return hook

    for i, part in enumerate(module):
        part.register_forward_hook(keep(str(i)))
    x = torch.randn(3, 4, requires_grad=True)
    refs["x"] = StorageWeakRef(x.untyped_storage())
    with queue.recording():
        output = module(x * 1)
    with queue.deferring():
        output.sum().backward()
    del x, output
    alive = {name for name, ref in refs.items() if not ref.expired()}
    assert alive == {"1", "0.grad", "2.grad"}, "with x * 1, these are the inputs and gradients of the two linears"
    queue.run()
    assert {name for name, ref in refs.items() if not ref.expired()} == set()


def test_norms_hold_their_statistics_beside_input_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_LARGE", 0)
    module = nn.LayerNorm(4)
    queue = queue_of(module)
    with queue.recording():
        output = module(torch.randn(3, 4, requires_grad=True))
    with queue.deferring():
        output.sum().backward()
    ((_, arguments),) = queue.entries
    flat = [t for a in arguments for t in (a if isinstance(a, tuple) else (a,))]
    assert sorted(t.numel() for t in flat if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)) == [
        3,
        3,
        12,
        12,
    ]


# Threads


def in_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_each_action_in_a_thread_of_its_own() -> None:
    module = mlp()
    plain, queue, outputs = copy.deepcopy(module), queue_of(module), []

    def forward() -> None:
        with queue.recording():
            outputs.append(module(x))

    def backward() -> None:
        with queue.deferring():
            outputs.pop().sum().backward()

    for x in (double(3, 4), double(3, 4)):
        plain(x).sum().backward()
        in_thread(forward)
        in_thread(backward)
        assert len(queue) == 2
        in_thread(queue.run)
    assert_same(module, plain)


@contextmanager
def quick_switches() -> Iterator[None]:
    import sys

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("same", ["module", "weight"])
def test_two_stages_in_two_threads_share(same: str) -> None:
    """One module in both, or one weight: used by a deferred op in one thread and by autograd itself in the other."""
    first = nn.Linear(16, 16).double()
    if same == "module":
        second: nn.Module = Calls(lambda m, x: m.a(x).relu(), a=first)
    else:
        second = Calls(lambda m, x: (m.a(x) * m.a.weight.sum()).relu(), a=nn.Linear(16, 16))
        second.a.weight = first.weight
    inputs = [[double(4, 16) for _ in range(40)] for _ in range(2)]
    stages = [first, second]
    plain = copy.deepcopy(nn.ModuleList(stages))
    for module, xs in zip(plain, inputs, strict=True):
        for x in xs:
            module(x).sum().backward()
    barrier = threading.Barrier(2)
    errors: list[BaseException] = []

    def train(module: nn.Module, xs: list[Tensor]) -> None:
        try:
            queue = queue_of(module, list(first.parameters()))
            barrier.wait()
            for x in xs:
                split_step(module, queue, x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=a) for a in zip(stages, inputs, strict=True)]
    with quick_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert_same(nn.ModuleList(stages), plain)
    assert all("forward" not in part.__dict__ for part in nn.ModuleList(stages).modules())


# A weight gradient of your own


class Scale(torch.autograd.Function):
    """x * w, with the gradient of w handed over."""

    error: Exception | None = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, w = ctx.saved_tensors

        def compute() -> Tensor:
            if Scale.error is not None:
                raise Scale.error
            return (g * x).sum(0)

        return g * w, defer_weight_grad(w, compute)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(double(4))

    def forward(self, x: Tensor) -> Tensor:
        out = Scale.apply(x, self.weight)
        assert isinstance(out, Tensor)
        return out


@pytest.mark.parametrize("device", DEVICES)
def test_defer_weight_grad(device: str) -> None:
    """On CUDA the function's backward runs in a thread of autograd's own."""
    module = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4)).double().to(device)
    plain, queue = copy.deepcopy(module), queue_of(module)
    for x in (double(3, 4).to(device), double(3, 4).to(device)):
        plain(x).sum().backward()
        with queue.recording():
            output = module(x)
        before = module[1].weight.grad
        before = None if before is None else before.clone()
        loss = output.sum()
        with queue.deferring([] if device == "cpu" else [get_gradient_edge(loss)]):
            loss.backward()
        assert len(queue) == 3
        torch.testing.assert_close(module[1].weight.grad, before)
        queue.run()
    assert_same(module, plain)


def test_defer_weight_grad_finds_its_queue_by_the_roots() -> None:
    """As in autograd's threads for devices: as if this thread did not know that it runs an I."""
    module = Scaled()
    queue = queue_of(module)
    output = module(double(3, 4)).sum()
    edge = get_gradient_edge(output)
    with queue.deferring([edge]):
        in_thread(lambda: output.backward(retain_graph=True))
    assert len(queue) == 1
    in_thread(lambda: output.backward(retain_graph=True))
    assert len(queue) == 1, "no I any more"


def test_defer_weight_grad_is_at_once_where_it_must_be() -> None:
    module, calls = Scaled(), []
    queue = queue_of(module)
    handle = module.weight.register_hook(calls.append)
    with queue.recording():
        output = module(double(3, 4))
    with queue.deferring():
        output.sum().backward()
    assert len(calls) == 1
    assert len(queue) == 0
    handle.remove()
    module.weight.grad = None
    module(double(3, 4)).sum().backward()
    assert module.weight.grad is not None


def test_defer_weight_grad_in_a_backward_inside_the_backward() -> None:
    """Checkpoint's: the function runs again in I, and hands over from there."""
    module = Calls(lambda m, x: checkpoint(m.a, x, use_reentrant=True), a=Scaled())
    queue = queue_of(module)
    with queue.recording():
        output = module(double(3, 4).requires_grad_())
    with queue.deferring():
        output.sum().backward()
    assert len(queue) == 1
    assert module.a.weight.grad is None
    queue.run()
    assert module.a.weight.grad is not None


def test_a_gradient_that_is_part_of_something_else_is_copied() -> None:
    class Shift(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, b: Tensor) -> Tensor:
            ctx.b = b
            return x + b

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return g, defer_weight_grad(ctx.b, lambda: g)

    module = Calls(lambda m, x: Shift.apply(x, m.bias))
    module.bias = nn.Parameter(double(4))
    queue, g = queue_of(module), double(4)
    split_step(module, queue, double(4), g)
    split_step(module, queue, double(4), g)
    torch.testing.assert_close(module.bias.grad, 2 * g)


# Whole models


def test_a_transformer_under_many_micro_batches() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.Sequential(
        nn.Embedding(10, 8, padding_idx=0),
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Linear(8, 10),
    )
    check(module.double(), *(torch.randint(10, (3, 5)) for _ in range(4)))


def test_a_convolutional_network() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=4), nn.GroupNorm(2, 8), nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.LazyLinear(5),
    ).double()  # fmt: skip
    module(double(2, 3, 8, 8))
    check(module, double(2, 3, 8, 8), double(4, 3, 8, 8))


def test_cross_entropy_of_a_head() -> None:
    target = torch.randint(10, (12,))
    module = Calls(lambda m, x: F.cross_entropy(m.head(x), target), head=nn.Linear(4, 10))
    check(module, double(12, 4), double(12, 4))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_captured_as_a_cuda_graph() -> None:
    module = nn.Sequential(nn.Embedding(9, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).cuda()
    plain, queue, x = copy.deepcopy(module), queue_of(module), torch.randint(9, (4, 8), device="cuda")

    def step() -> None:
        with queue.recording():
            output = module(x).sum()
        with queue.deferring([get_gradient_edge(output)]):
            output.backward()
        queue.run()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()  # warms up, and makes the gradients
    torch.cuda.current_stream().wait_stream(side)
    module.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    module.zero_grad(set_to_none=False)
    for _ in range(3):
        x.copy_(torch.randint(9, (4, 8)))
        graph.replay()
        plain(x).sum().backward()
    torch.cuda.synchronize()
    assert_same(module, plain)


def test_norms_are_deferred_from_a_larger_size_on_a_gpu() -> None:
    def worth(numel: int, *, is_cuda: bool) -> bool:
        x = SimpleNamespace(numel=lambda: numel, is_cuda=is_cuda, dtype=torch.float32)
        return ops.worth_deferring(x, torch.ones(1))  # type: ignore[arg-type]

    assert (worth((1 << 20) - 1, is_cuda=False), worth(1 << 20, is_cuda=False)) == (False, True)
    assert (worth((1 << 24) - 1, is_cuda=True), worth(1 << 24, is_cuda=True)) == (False, True)
