"""Pipelines of a program's own, made of torchgpipe's parts, or fairscale's: the same as the plain model."""

from __future__ import annotations

import copy
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.compat.fairscale.nn.pipe import pipeline as fairscale
from penstock.compat.torchgpipe import is_recomputing
from penstock.compat.torchgpipe import pipeline as torchgpipe
from penstock.compat.torchgpipe.microbatch import Batch, gather, scatter
from penstock.compat.torchgpipe.skip import pop, skippable, stash
from penstock.compat.torchgpipe.skip.layout import inspect_skip_layout
from penstock.compat.torchgpipe.skip.tracker import SkipTrackerThroughPotals, current_skip_tracker
from penstock.compat.torchgpipe.stream import new_stream

CPU = torch.device("cpu")
Partitions = list[nn.Sequential]
Run = Callable[[list[Batch], Partitions, int], None]


def of_torchgpipe(batches: list[Batch], partitions: Partitions, checkpoint_stop: int) -> None:
    torchgpipe.Pipeline(batches, partitions, checkpoint_stop=checkpoint_stop).run()


def of_fairscale(batches: list[Batch], partitions: Partitions, checkpoint_stop: int) -> None:
    devices = [CPU] * len(partitions)
    streams = [[new_stream(device) for _ in batches] for device in devices]
    layout = inspect_skip_layout(partitions)
    fairscale.Pipeline(partitions, devices, streams, layout, checkpoint_stop).run(batches)


both = pytest.mark.parametrize("run", [of_torchgpipe, of_fairscale])


@skippable(stash=["early", "none"])
class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        yield stash("early", x)
        yield stash("none", None)
        return self.layer(x)


@skippable(pop=["early", "none"])
class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        early = yield pop("early")
        none = yield pop("none")
        assert none is None
        return self.layer(x) * early


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Down(), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 4), Up(), nn.Linear(4, 2))


def cut(layers: nn.Sequential, balance: list[int]) -> Partitions:
    found, at = [], 0
    for count in balance:
        found.append(nn.Sequential(*list(layers)[at : at + count]))
        at += count
    return found


@both
@pytest.mark.parametrize("balance", [[7], [3, 4], [2, 3, 2], [1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("checkpoint_stop", [0, 2, 4])
@pytest.mark.parametrize("wants", [True, False])
def test_it_is_the_plain_model(run: Run, balance: list[int], checkpoint_stop: int, wants: bool) -> None:
    plain = model()
    parts = cut(copy.deepcopy(plain), balance)
    x = torch.randn(8, 4, requires_grad=wants)
    expected = plain(x)
    expected.square().sum().backward()
    expected_grad, x.grad = x.grad, None
    batches = scatter(x, chunks=4)
    run(batches, parts, checkpoint_stop)
    output = gather(batches)
    assert isinstance(output, Tensor)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for mine, its in zip(nn.ModuleList(parts).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    if wants:
        torch.testing.assert_close(x.grad, expected_grad)


@both
def test_micro_batches_go_back_one_after_another_and_run_again_just_before(run: Run) -> None:
    log: list[str] = []

    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.name = int(x)
            log.append(f"{'R' if is_recomputing() else 'F'}{ctx.name}")
            return x.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            log.append(f"B{ctx.name}")
            return grads[0]

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Log.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    batches = scatter(torch.arange(4.0, requires_grad=True), chunks=4)
    run(batches, [nn.Sequential(Layer())], 3)
    torch.cat([batch.tensor for batch in batches]).sum().backward()
    assert " ".join(log) == "F0 F1 F2 F3 B3 R2 B2 R1 B1 R0 B0"


@both
def test_skips_are_copied_between_partitions_and_not_within_one(run: Run) -> None:
    for balance, copied in (([3, 4], True), ([1, 6], False)):
        batches = scatter(torch.rand(2, 4), chunks=2)
        run(batches, cut(model(), balance), 0)
        for batch in batches:
            assert ("PortalCopyBackward" in {type(node).__name__ for node in _nodes(batch.tensor)}) == copied


class Second:
    """A device that is the CPU by another name, and has a worker of its own."""

    type = "second"


@pytest.mark.parametrize("system", [torchgpipe, fairscale])
def test_clocks_are_in_step(system: Any) -> None:
    timeline: list[tuple[int, int]] = []

    class Log(nn.Module):
        def __init__(self, j: int, seconds: float) -> None:
            super().__init__()
            self.i, self.j, self.seconds = 0, j, seconds

        def forward(self, x: Tensor) -> Tensor:
            time.sleep(self.seconds)
            timeline.append((self.i, self.j))
            self.i += 1
            return x

    batches = scatter(torch.rand(3, 1), chunks=3)
    parts = [nn.Sequential(Log(0, 0)), nn.Sequential(Log(1, 0.3))]
    how = (parts, [CPU, Second()], [[new_stream(CPU)] * 3] * 2, inspect_skip_layout(parts), 0)
    if system is torchgpipe:
        torchgpipe.Pipeline(batches, *how).run()  # type: ignore[arg-type]
    else:
        fairscale.Pipeline(*how).run(batches)  # type: ignore[arg-type]
    assert timeline == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


@both
@pytest.mark.parametrize("checkpoint_stop", [0, 3])
def test_an_exception_stops_it_at_the_end_of_its_clock(run: Run, checkpoint_stop: int) -> None:
    ran: list[int] = []

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(1)
            return x

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("told")

    parts = [nn.Sequential(layer) for layer in (nn.Identity(), Count(), Fail())]
    with pytest.raises(ZeroDivisionError, match="told"):
        run(scatter(torch.rand(5, 1), chunks=5), parts, checkpoint_stop)
    assert len(ran) == 2


@both
def test_of_several_exceptions_in_a_clock_the_first_comes_out(run: Run) -> None:
    class Fail(nn.Module):
        def __init__(self, told: str, at: int) -> None:
            super().__init__()
            self.told, self.at = told, at

        def forward(self, x: Tensor) -> Tensor:
            if x.item() == self.at:
                raise ZeroDivisionError(self.told)
            return x

    parts = [nn.Sequential(Fail("one", 1)), nn.Sequential(Fail("two", 0))]
    with pytest.raises(ZeroDivisionError, match="one"):
        run(scatter(torch.arange(2.0), chunks=2), parts, 0)


@both
@pytest.mark.parametrize("checkpoint_stop", [0, 2])
def test_tuples_with_integers_first(run: Run, checkpoint_stop: int) -> None:
    class Ids(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return torch.arange(len(x)), x * 2

    class Keep(nn.Module):
        def forward(self, x: Any) -> Any:
            return x[0] + 1, x[1] * 3

    class Use(nn.Module):
        def forward(self, x: Any) -> Tensor:
            return x[1] * x[0][:, None]  # type: ignore[no-any-return]

    x = torch.rand(4, 1, requires_grad=True)
    batches = scatter(x, chunks=2)
    run(batches, [nn.Sequential(Ids()), nn.Sequential(Keep()), nn.Sequential(Use())], checkpoint_stop)
    torch.cat([batch.tensor for batch in batches]).sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [6, 12, 6, 12]


@both
@pytest.mark.parametrize("checkpoint_stop", [0, 2])
def test_autocast_and_random_numbers_follow_the_work(run: Run, checkpoint_stop: int) -> None:
    kinds: list[torch.dtype] = []

    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            kinds.append(y.dtype)
            return y

    x = torch.rand(4, 4, requires_grad=True)
    batches = scatter(x, chunks=2)
    with torch.autocast("cpu", torch.bfloat16):
        run(batches, [nn.Sequential(Look())], checkpoint_stop)
    torch.cat([batch.tensor for batch in batches]).sum().backward()
    assert kinds == [torch.bfloat16] * (2 + checkpoint_stop)

    x = torch.rand(100, 4, requires_grad=True)
    batches = scatter(x, chunks=2)
    run(batches, [nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5))], checkpoint_stop)
    output = torch.cat([batch.tensor for batch in batches])
    output.sum().backward()
    assert x.grad is not None
    assert torch.equal(output != 0, x.grad != 0)


@both
@pytest.mark.parametrize("checkpoint_stop", [0, 2])
def test_without_gradients_there_is_no_graph(run: Run, checkpoint_stop: int) -> None:
    parts = cut(model(), [3, 4])
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            batches = scatter(torch.rand(4, 4), chunks=2)
            run(batches, parts, checkpoint_stop)
        assert not any(batch[0].requires_grad for batch in batches)
        assert all(batch[0].is_inference() == (mode is torch.inference_mode) for batch in batches)


@both
def test_no_partitions_and_no_micro_batches(run: Run) -> None:
    batches = scatter(torch.rand(4, 4), chunks=2)
    run(batches, [], 0)
    assert [len(batch.tensor) for batch in batches] == [2, 2]
    run([], cut(model(), [3, 4]), 0)


@both
@pytest.mark.parametrize("checkpoint_stop", [0, 2])
def test_a_skip_lives_no_longer_than_it_is_needed(run: Run, checkpoint_stop: int) -> None:
    """Two uses without checkpointing, three with it: and when the first layer goes back, all portals are empty."""
    trackers: list[SkipTrackerThroughPotals] = []
    seen: list[bool] = []

    class First(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.tracker = current_skip_tracker()
            trackers.append(ctx.tracker)
            return x.detach()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            seen.append(all(portal.tensor is None for portal in ctx.tracker.portals.values()))
            return grads[0]

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return First.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    parts = [nn.Sequential(Layer(), Down()), nn.Sequential(Up())]
    batches = scatter(torch.rand(2, 4, requires_grad=True), chunks=2)
    run(batches, parts, checkpoint_stop)
    lives = [tracker.portals[None, "early"].tensor_life for tracker in trackers]
    assert lives == [1 if i < checkpoint_stop else 0 for i in range(2)]
    torch.cat([batch.tensor for batch in batches]).sum().backward()
    assert seen == [True, True]


@both
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays(run: Run, fails: bool) -> None:
    """Neither threads nor tensors, nor cycles that only a collection would find."""

    class Fail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fails:
                raise ZeroDivisionError
            return x * 1

    def once() -> weakref.ref[Tensor]:
        x = torch.rand(2, 4, requires_grad=True) * 1
        batches = scatter(x, chunks=2)
        try:
            run(batches, [nn.Sequential(nn.Linear(4, 4)), nn.Sequential(Fail())], 1)
        except ZeroDivisionError:
            assert fails
        else:
            torch.cat([batch.tensor for batch in batches]).sum().backward()
        return weakref.ref(x)

    before = threading.active_count()
    gc.collect()
    gc.disable()
    try:
        gone = once()
        deadline = time.monotonic() + 10
        while (gone() is not None or threading.active_count() > before) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert gone() is None
        assert threading.active_count() <= before
    finally:
        gc.enable()


def test_fairscales_runs_many_times_with_the_same_threads() -> None:
    parts = cut(model(), [3, 4])
    layout = inspect_skip_layout(parts)
    pipeline = fairscale.Pipeline(parts, [CPU, CPU], [[new_stream(CPU)] * 4] * 2, layout, 4)
    threads = set(threading.enumerate())
    for training in (True, False):
        nn.ModuleList(parts).train(training)
        for chunks in (1, 4):
            x = torch.rand(4, 4)
            batches = scatter(x, chunks)
            pipeline.run(batches)
            names = {type(node).__name__ for node in _nodes(batches[0].tensor)}
            assert ("CheckpointBackward" in names) == training
    assert set(threading.enumerate()) <= threads


def _nodes(tensor: Tensor) -> list[Any]:
    found, left = [], [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.append(node)
            left += [other for other, _ in node.next_functions]
    return found


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("checkpoint_stop", [0, 2, 4])
def test_between_a_gpu_and_the_cpu(checkpoint_stop: int) -> None:
    plain = model().double()
    devices = [torch.device("cuda"), CPU, torch.device("cuda")]
    parts = [part.to(device) for part, device in zip(cut(copy.deepcopy(plain), [2, 3, 2]), devices, strict=True)]
    x = torch.randn(8, 4, dtype=torch.float64)
    plain(x).square().sum().backward()
    batches = scatter(x.cuda(), chunks=4)
    streams = [[new_stream(device) for _ in batches] for device in devices]
    torchgpipe.Pipeline(batches, parts, devices, streams, checkpoint_stop=checkpoint_stop).run()
    torch.cat([batch.tensor for batch in batches]).square().sum().backward()
    torch.cuda.synchronize()
    for mine, its in zip(nn.ModuleList(parts).parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad)  # type: ignore[union-attr]
