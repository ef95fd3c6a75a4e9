"""Activations on the host: the same gradients bit for bit, with copies as late as possible."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from penstock.engine.offload.activations import ActivationOffload, activation_offload, prefetch_points
from penstock.engine.offload.copies import HostBuffer, HostBufferPool
from penstock.engine.weightgrad import WeightGradQueue, make_recorder
from penstock.errors import PipelineError
from penstock.schedule.lower import Instruction
from tests.support.copies import LateCopies

CPU = torch.device("cpu")


class Attention(nn.Module):
    """Three views of one storage, a mask of booleans, and a softmax that saves its output."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)
        return scores.softmax(-1) @ v


class Parts(nn.Module):
    """Parts of one storage with version counters of their own, each changed in place once before it is saved."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.unsafe_chunk(x * 2, 2, dim=-1)
        return torch.cat([a.sigmoid_() * 3, b.tanh_() * 5], -1)


class Piece(nn.Module):
    """A small piece of something big, and a value that is spread without memory."""

    def forward(self, x: Tensor) -> Tensor:
        big = torch.cat([x] * 64)
        piece = big[len(big) // 2 :][: len(x)]
        return piece.sin() * x.mean().expand_as(x).cos() * piece


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x.exp().sin(), use_reentrant=self.reentrant)
        return y * y


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.GELU()),
    "chain": lambda: nn.Sequential(*[nn.Tanh(), nn.Sigmoid()] * 12),  # memory and names of what is gone come again
    "in place": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8), nn.Tanh()),
    "attention": lambda: nn.Sequential(nn.LayerNorm(8), Attention()),
    "dropout": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()),
    "parts": lambda: nn.Sequential(nn.Linear(8, 8), Parts(), nn.Linear(8, 8)),
    "piece": lambda: nn.Sequential(nn.Linear(8, 8), Piece()),
    "batch norm": lambda: nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.Conv1d(6, 4, 1)),
    "recurrent": lambda: nn.Sequential(nn.LSTM(8, 8, batch_first=True), _First(), nn.Tanh()),
    "checkpoint": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed(False)),
    "reentrant checkpoint": lambda: nn.Sequential(nn.Linear(8, 8), Checkpointed(True)),
}


class _First(nn.Module):
    def forward(self, pair: tuple[Tensor, Any]) -> Tensor:
        return pair[0]


def offload_for(
    module: nn.Module | None = None, budget: int | None = None, smallest: int = 1, window: int = 1 << 30
) -> tuple[ActivationOffload, LateCopies]:
    copies = LateCopies()
    resident = [] if module is None else [*module.parameters(), *module.buffers()]
    return ActivationOffload(CPU, copies, HostBufferPool(budget), resident, smallest=smallest, window=window), copies


def inputs(count: int = 4, rows: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(3, rows, 8) for _ in range(count)]


def run(module: nn.Module, offload: ActivationOffload | None, xs: list[Tensor], ahead: int = 3) -> list[Tensor]:
    """Forwards with up to ``ahead`` micro-batches waiting, each backward as its turn comes: gradients of it all."""
    torch.manual_seed(2)
    waiting: list[tuple[int, Tensor, Tensor]] = []
    grads = []

    def backward() -> None:
        key, x, loss = waiting.pop(0)
        if offload is not None:
            offload.prefetch(key)
        loss.backward()
        assert x.grad is not None
        grads.append(x.grad)

    for key, x in enumerate(xs):
        x = x.clone().requires_grad_()
        if offload is None:
            loss = module(x).square().mean()
        else:
            with offload.saving(key, [x]):
                loss = module(x).square().mean()
        waiting.append((key, x, loss))
        del loss
        if len(waiting) > ahead:
            backward()
    while waiting:
        backward()
    return [*grads, *(p.grad for p in module.parameters() if p.grad is not None), *module.state_dict().values()]


def check_equal(ours: list[Tensor], plain: list[Tensor]) -> None:
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("window", [0, 300, 1 << 30], ids=["no window", "small window", "wide window"])
@pytest.mark.parametrize("budget", [None, 2000, 1], ids=["all", "some", "nothing fits"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_plain_ones(name: str, budget: int | None, window: int) -> None:
    torch.manual_seed(0)
    module = MODELS[name]()
    plain = copy.deepcopy(module)
    offload, copies = offload_for(module, budget, window=window)
    check_equal(run(module, offload, inputs()), run(plain, None, inputs()))
    assert (copies.bytes_to_host > 0) == (budget != 1)
    assert budget is None or offload.pool.bytes <= budget


# ── what goes, and how often ─────────────────────────────────────────────────────────────────────────────────────


def bytes_of(module: nn.Module, x: Tensor) -> int:
    offload, copies = offload_for(module)
    with offload.saving(0, [x]):
        kept = module(x)
    del kept
    return copies.bytes_to_host


def test_a_tensor_saved_by_two_ops_is_copied_once() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    assert bytes_of(module, x) == 4 * 16 * 4  # the ReLU's output, which the second linear saves as well


def test_views_of_one_storage_are_copied_once() -> None:
    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a, b, c = (x * 2).chunk(3, dim=1)
            return a * b * c

    # (x * 2) with its three views, and a * b.
    assert bytes_of(Views(), torch.randn(4, 9, requires_grad=True)) == 4 * 9 * 4 + 4 * 3 * 4


def test_of_a_large_storage_only_the_view_is_copied() -> None:
    class Row(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 2)[3].sin()

    x = torch.randn(1000, 256, requires_grad=True)
    assert bytes_of(Row(), x) == 256 * 4


def test_parameters_their_views_buffers_and_inputs_stay() -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))
            self.register_buffer("scale", torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight.t()) * self.get_buffer("scale")

    module, x = Uses(), torch.randn(4, 8, requires_grad=True)
    assert bytes_of(module, x) == 0
    module.weight.requires_grad_(False)
    assert bytes_of(module, x) == 0


def test_small_tensors_stay() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    offload, copies = offload_for(module, smallest=4 * 16 * 4)
    with offload.saving(0):
        out = module(torch.randn(4, 8))
    assert copies.bytes_to_host == 4 * 16 * 4
    out.sum().backward()


def test_other_kinds_of_tensors_stay() -> None:
    offload, copies = offload_for()
    indices = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (2, 2), check_invariants=False)
    x = torch.randn(2, 2, requires_grad=True)
    with offload.saving(0, [x]):
        out = torch.sparse.mm(sparse, x) * torch.randn(2, 2, dtype=torch.complex64).conj()
    out.abs().sum().backward()
    assert x.grad is not None
    assert copies.bytes_to_host == 0  # a sparse one, and a conjugated view


# ── when ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prefetch_starts_with_the_last_saved_tensor() -> None:
    module = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.Tanh())
    offload, copies = offload_for(module)
    x = torch.randn(4, 8, requires_grad=True)
    with offload.saving("k", [x]):
        out = module(x)
    assert copies.log == ["to host"] * 3
    offload.prefetch("k")
    assert copies.log == ["to host"] * 3 + ["wait"] * 3 + ["to device"] * 3
    last = copies.queues[1][0][0]  # the source of the first copy back
    assert isinstance(last, Tensor)
    copies._show(3)
    assert torch.equal(last.view(torch.float32).view_as(out), out.detach())
    out.sum().backward()
    assert copies.log[9:] == ["wait"] * 3


def test_a_backward_without_a_prefetch_fetches_what_it_needs() -> None:
    module = nn.Sequential(nn.Tanh(), nn.Sigmoid())
    offload, copies = offload_for(module)
    x = torch.randn(4, 8, requires_grad=True)
    with offload.saving(0, [x]):
        out = module(x)
    out.sum().backward()
    assert copies.log == ["to host", "to host", "to device", "wait", "to device", "wait"]
    offload.prefetch(0)  # too late, and harmless
    assert copies.log.count("to device") == 2


def test_other_micro_batches_stay_on_the_host() -> None:
    module = nn.Tanh()
    offload, copies = offload_for(module)
    outs = []
    for key in range(3):
        with offload.saving(key):
            outs.append(module(torch.randn(4, 8, requires_grad=True)))
    offload.prefetch(1)
    assert copies.bytes_to_device == 4 * 8 * 4


def test_prefetched_bytes_that_are_not_used_are_discarded() -> None:
    offload, copies = offload_for()
    with offload.saving(0):
        out = torch.randn(4, 8, requires_grad=True).tanh()
    offload.prefetch(0)
    del out
    assert copies.log[-1] == "discard"


@pytest.mark.parametrize("window", [0, 128, 256])
def test_copies_under_way_hold_no_more_than_the_window(window: int) -> None:
    offload, copies = offload_for(window=window)
    x = torch.randn(32, requires_grad=True)  # 128 bytes
    with offload.saving(0, [x]):
        out = x.sin().tanh().sigmoid().tanh().sigmoid()  # all but the sine save what they give
    assert copies.log.count("wait") == 4 - max(1, window // 128)
    out.sum().backward()


def test_device_memory_is_freed_after_its_copy() -> None:
    offload, _ = offload_for()
    x = torch.randn(64, requires_grad=True)
    with offload.saving(0, [x]):
        middle = x.tanh()
        memory = StorageWeakRef(middle.untyped_storage())
        out = middle.sigmoid().sum()
        del middle
    assert not memory.expired()  # its copy is under way
    offload.prefetch("another key")
    assert memory.expired()
    out.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.tanh().sigmoid().sum(), x)[0])


# ── host memory ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_host_buffers_are_reused() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    offload, copies = offload_for(module)
    run(module, offload, inputs(4))
    made, size = copies.made, offload.pool.bytes
    run(module, offload, inputs(20))
    assert (copies.made, offload.pool.bytes) == (made, size)


def test_idle_buffers_of_other_sizes_are_evicted() -> None:
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
    plain = copy.deepcopy(module)
    budget = 4 * 4 * 3 * 64 * 24
    offload, copies = offload_for(module, budget)
    for rows in (2, 40, 3, 23, 11, 64):
        before = copies.bytes_to_host
        check_equal(run(module, offload, inputs(4, rows)), run(plain, None, inputs(4, rows)))
        assert copies.bytes_to_host > before
        assert offload.pool.bytes <= budget


def test_idle_buffers_are_evicted_only_if_that_is_enough() -> None:
    pool = HostBufferPool(1024)

    def take(size: int) -> HostBuffer | None:
        return pool.acquire(size, lambda n: torch.empty(n, dtype=torch.uint8))

    a, b = take(300), take(512)
    assert a is not None
    assert b is not None
    assert a.tensor.nbytes == 512  # a power of two, as pinned memory comes
    pool.release(a)
    assert take(600) is None
    assert take(500) is a  # it was not let go for nothing
    pool.release(a)
    pool.release(b)
    assert take(600) is not None
    assert pool.bytes == 1024


def test_buffers_are_released_during_the_backward() -> None:
    offload, _ = offload_for()
    x = torch.randn(64, requires_grad=True)
    returned = []
    with offload.saving(0, [x]):
        a = x.tanh()
        a.register_hook(lambda grad: returned.append(len(offload.pool._released)))
        out = a.sigmoid().tanh().sum()
    out.backward()
    assert returned == [2]  # the outer tanh's and the sigmoid's; the inner tanh still has its own
    assert len(offload.pool._released) == 3


@pytest.mark.parametrize("budget", [None, 1], ids=["packed", "kept"])
def test_a_graph_that_is_dropped_leaves_nothing_behind(budget: int | None) -> None:
    """A node that held its own output would keep itself alive: no collector sees that."""
    offload, _ = offload_for(budget=budget)
    alive = weakref.WeakSet[Any]()

    class Witness(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            alive.add(ctx)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    with offload.saving(0):
        out = Witness.apply(torch.randn(8, requires_grad=True)).tanh()  # type: ignore[no-untyped-call]
    del out
    gc.collect()
    assert not alive


def test_a_buffer_that_another_device_used_is_written_after_it() -> None:
    """The first device's copy is still to come when its graph is dropped; the second one is given the same buffer."""
    first, _ = offload_for()
    second, _ = offload_for()
    second.pool = first.pool
    with first.saving(0):
        out = torch.randn(8, requires_grad=True).tanh()
    del out
    x = torch.randn(8, requires_grad=True)
    with second.saving(0):
        out = x.tanh()
    assert first.pool.bytes == 32
    second.prefetch(0)
    first.prefetch(0)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.autograd.grad(x.tanh().sum(), x)[0])


def test_a_failed_allocation_is_not_counted() -> None:
    pool = HostBufferPool(1 << 20)

    def fail(size: int) -> Tensor:
        raise RuntimeError("no pinned memory")

    with pytest.raises(RuntimeError, match="no pinned memory"):
        pool.acquire(1000, fail)
    assert pool.bytes == 0


# ── what autograd promises ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("budget", [None, 1], ids=["packed", "kept"])
def test_a_saved_tensor_that_is_changed_is_an_error(budget: int | None) -> None:
    def forward() -> tuple[Tensor, Tensor]:
        middle = torch.randn(8, requires_grad=True).tanh()
        return middle, middle.sigmoid()

    offload, _ = offload_for(budget=budget)
    with offload.saving(0):
        middle, out = forward()
    with torch.no_grad():
        middle.detach()[1:3].mul_(2)  # through any view
    with pytest.raises(PipelineError, match=r"shape \(8,\).*modified by an inplace operation.*version 1, saved.* 0"):
        out.sum().backward()
    middle, out = forward()
    with torch.no_grad():
        middle.detach()[1:3].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_one_storage_at_two_versions_is_copied_twice() -> None:
    offload, copies = offload_for()
    x = torch.randn(8, requires_grad=True)
    plain = x.detach().clone().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        buffer = torch.ones(8)
        same = buffer.view(8)  # one root, one storage
        first = (x * 2) * buffer  # needs the buffer only for the gradient of x * 2
        del first
        buffer.mul_(3)
        return (x * 2) * same

    with offload.saving(0, [x]):
        out = forward(x)
    out.sum().backward()
    forward(plain).sum().backward()
    assert x.grad is not None
    assert plain.grad is not None
    assert torch.equal(x.grad, plain.grad)
    assert copies.bytes_to_host == 2 * 32


def test_a_graph_may_be_used_twice_and_differentiated() -> None:
    def twice(offload: ActivationOffload | None) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 8, requires_grad=True)
        module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
        if offload is None:
            out = module(x).sum()
        else:
            with offload.saving(0, [x]):
                out = module(x).sum()
            offload.prefetch(0)
        first = torch.autograd.grad(out, [x, *module.parameters()], retain_graph=True)
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        second = torch.autograd.grad(slope.square().sum(), [x, *module.parameters()], allow_unused=True)
        return [*first, slope.detach(), *(t for t in second if t is not None)]

    offload, copies = offload_for()
    check_equal(twice(offload), twice(None))
    assert copies.bytes_to_device == copies.bytes_to_host  # the second time everything was still there


# ── with weight gradients put off ────────────────────────────────────────────────────────────────────────────────


def test_weight_gradients_are_still_deferred() -> None:
    """The inputs that W needs go out with F, come back for I, and stay on the device until W."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 8))
    plain = copy.deepcopy(module)
    offload, copies = offload_for(module)
    queue = WeightGradQueue(make_recorder(module))
    for _ in range(3):
        x = torch.randn(4, 8, requires_grad=True)
        with offload.saving(0, [x]), queue.recording():
            out = module(x)
        offload.prefetch(0)
        with queue.deferring():
            torch.autograd.backward(out, torch.ones_like(out))
        assert len(queue.entries) == 3
        queue.run()
        y = x.detach().requires_grad_()
        plain(y).backward(torch.ones(4, 8))
        assert x.grad is not None
        assert y.grad is not None
        torch.testing.assert_close(x.grad, y.grad)
        for p, q in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    assert copies.bytes_to_host > 0


# ── which micro-batches ──────────────────────────────────────────────────────────────────────────────────────────


def program(text: str) -> list[Instruction]:
    return [Instruction(word[1:-1], int(word[0]), int(word[-1])) for word in text.split()]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("0F0 0B0 0F1 0B1", {}),  # nothing waits
        ("0F0 0F1 0B0 0B1", {}),  # one action between: out and back cannot both hide behind it
        ("0F0 0F1 0F2 0B0 0B1 0B2", {2: [(0, 0)], 3: [(0, 1)], 4: [(0, 2)]}),
        ("0F0 0F1 0F2 0I0 0W0 0I1", {2: [(0, 0)], 4: [(0, 1)]}),
        ("0F0 1F0 1B0 0B0", {2: [(0, 0)]}),  # two stages on one rank
        ("0F0 0F1 0F2 0R0 0B0", {}),  # made anew just before
        ("0F0 0R0 0F1 0F2 0F3 0B0", {}),
        ("0B0 0B1", {}),  # half a program
    ],
)
def test_which_micro_batches_are_offloaded(order: str, expected: dict[int, list[tuple[int, int]]]) -> None:
    assert prefetch_points(program(order)) == expected


def test_communication_does_not_count() -> None:
    order = [Instruction("F", 0, 0), Instruction("SEND_F", 0, 0, 1), Instruction("F", 0, 1), Instruction("F", 0, 2)]
    order += [Instruction("RECV_B", 0, 0, 1), Instruction("B", 0, 0), Instruction("B", 0, 1)]
    assert prefetch_points(order) == {3: [(0, 0)], 5: [(0, 1)]}


def test_nothing_is_made_on_the_cpu() -> None:
    assert activation_offload(CPU, HostBufferPool(), nn.Linear(2, 2)) is None


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("window", [0, 1 << 27])
def test_on_a_gpu(window: int) -> None:
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.ReLU(inplace=True)]
    module = nn.Sequential(*layers).to(device)
    plain = copy.deepcopy(module)
    xs = [torch.randn(512, 512, device=device) for _ in range(8)]
    offload = activation_offload(device, HostBufferPool(), module)
    assert offload is not None
    offload.window = window

    def peak(work: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = work()
        torch.cuda.synchronize()
        return found, torch.cuda.max_memory_allocated() - before

    run(plain, None, xs, ahead=7)  # cuBLAS makes its workspace
    plain.zero_grad()
    for _ in range(3):  # buffers are used again
        ours, less = peak(lambda: run(module, offload, xs, ahead=7))
        theirs, more = peak(lambda: run(plain, None, xs, ahead=7))
        check_equal(ours, theirs)
        assert window or less < more / 2
        module.zero_grad()
        plain.zero_grad()
