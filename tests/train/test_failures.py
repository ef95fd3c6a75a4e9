"""User code that raises inside a stage: its own error comes out, everything ends, and the pipeline goes on.

stage 0   F0 F1 F2 ...          F2 raises: stage 1 and 2, which wait for what never comes,
stage 1      F0 F1 .  ←waits    are woken and end; nothing of the step is left behind
stage 2         F0 .  ←waits
"""

from __future__ import annotations

import _thread
import gc
import os
import re
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.faults import call_in_backward
from tests.support.models import (
    assert_same,
    batch,
    gradients,
    mlp,
    penstock_threads,
    plain_step,
    snapshot,
    threads_end,
)


class Boom(Exception):
    """The user's own kind of error."""


class Rude(BaseException):
    """Like KeyboardInterrupt and SystemExit, no ``Exception``."""


class Fault(nn.Module):
    """An identity that raises on its ``call``-th forward or backward, once armed."""

    def __init__(self, where: str, call: int = 2, kind: type[BaseException] = Boom) -> None:
        super().__init__()
        self.where, self.call, self.kind = where, call, kind
        self.armed, self.calls = False, 0

    def arm(self) -> None:
        self.armed, self.calls = True, 0

    def hit(self, where: str) -> None:
        if self.armed and where == self.where:
            self.calls += 1
            if self.calls == self.call:
                raise self.kind(f"on purpose, in {where}")

    def forward(self, x: Tensor) -> Tensor:
        self.hit("forward")
        return call_in_backward(x, lambda grad: self.hit("backward"))


def faulty(stage: int, fault: Fault) -> nn.Sequential:
    """Three layers, one per stage, with the fault in one of them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(3)]
    layers[stage] = nn.Sequential(layers[stage], fault)
    return nn.Sequential(*layers)


@pytest.fixture(autouse=True)
def _threads_of_closed_pipelines_end() -> Iterator[None]:
    before = penstock_threads()
    yield
    assert threads_end(penstock_threads() - before)


def pipeline(model: nn.Sequential, loss_fn: Any = F.mse_loss, **options: Any) -> ps.Pipeline:
    options.setdefault("microbatches", 4)
    return ps.Pipeline(ps.split(model, stages=3), loss_fn, **options)


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


# ── the error that comes out ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_error_names_the_place_and_the_next_step_is_right(stage: int, where: str, schedule: str) -> None:
    fault = Fault(where)
    model = faulty(stage, fault)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model, schedule=schedule) as pipe:
        fault.arm()
        with pytest.raises(Boom, match=f"on purpose, in {where}") as caught:
            pipe.step(batch(seed=8), batch(seed=9))
        kind = "F" if where == "forward" else "[BI]"
        assert re.search(rf"stage {stage}, micro-batch 1, action {stage}{kind}1", notes(caught.value))
        assert all(grad is None for grad in gradients(model).values())
        for _ in range(2):
            result = pipe.step(batch(), batch(seed=5))
            assert_same(result.loss, expected.loss)
            assert_same(gradients(model), expected.gradients)
            pipe.zero_grad()


def test_an_error_in_the_loss_names_the_last_stage() -> None:
    calls = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise Boom("bad loss")
        return F.mse_loss(output, target)

    model = mlp(2)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model, loss_fn) as pipe:
        with pytest.raises(Boom, match="bad loss") as caught:
            pipe.step(batch(), batch())
        assert "stage 2, micro-batch 2, action 2F2" in notes(caught.value)
        assert_same(pipe.step(batch(), batch(seed=5)).loss, expected.loss)
        assert_same(gradients(model), expected.gradients)


def test_the_traceback_leads_to_the_users_line() -> None:
    fault = Fault("forward")
    with pipeline(faulty(1, fault)) as pipe:
        fault.arm()
        with pytest.raises(Boom) as caught:
            pipe.step(batch(), batch())
    assert "hit" in [entry.name for entry in caught.traceback]


def test_shape_mismatch_is_torchs_error_with_the_stage() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
            pipe.step(batch(), batch())
        assert "stage 1, micro-batch 0, action 1F0" in notes(caught.value)


@pytest.mark.parametrize("kind", [Rude, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_base_exception_is_raised_and_the_pipeline_works_afterwards(where: str, kind: type[BaseException]) -> None:
    fault = Fault(where, kind=kind)
    model = faulty(1, fault)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        fault.arm()
        with pytest.raises(kind):
            pipe.step(batch(), batch())
        pipe.step(batch(), batch(seed=5))
    assert_same(gradients(model), expected.gradients)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Interrupts, though these tests may run in the background, where they are ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# A real signal breaks off the wait for the next outcome. The interrupt that a notebook makes comes right after one
# was taken, which must be counted nevertheless: else the caller waits for it for ever.
@pytest.mark.parametrize("interrupt", ["signal", "notebook"])
@pytest.mark.timeout(20)
def test_ctrl_c_while_the_caller_waits_ends_the_step(interrupt: str, ctrl_c: None) -> None:
    class Slow(nn.Module):
        slow = False

        def forward(self, x: Tensor) -> Tensor:
            if self.slow:
                threading.Event().wait(0.3)
            return x

    slow = Slow()
    model = nn.Sequential(nn.Linear(4, 4), slow, nn.Linear(4, 4))
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        slow.slow = True
        raises = _thread.interrupt_main if interrupt == "notebook" else lambda: os.kill(os.getpid(), signal.SIGINT)
        timer = threading.Timer(0.2, raises)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            pipe.step(batch(), batch())
        timer.join()
        slow.slow = False
        pipe.step(batch(), batch(seed=5))
    assert_same(gradients(model), expected.gradients)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_no_gradients_where_there_were_none(where: str) -> None:
    fault = Fault(where)
    model = faulty(0, fault)
    with pipeline(model) as pipe:
        for _ in range(2):
            pipe.step(batch(), batch(seed=5))
            pipe.zero_grad()
            before = snapshot(model)
            fault.arm()
            with pytest.raises(Boom):
                pipe.step(batch(seed=8), batch(seed=9))
            fault.armed = False
            assert_same(snapshot(model), before)


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("grad", [True, False])
def test_error_of_a_call_names_the_place_and_the_next_call_is_right(grad: bool) -> None:
    fault = Fault("forward")
    model = faulty(1, fault)
    with pipeline(model) as pipe, torch.set_grad_enabled(grad):
        fault.arm()
        with pytest.raises(Boom) as caught:
            pipe(batch())
        assert "stage 1, micro-batch 1, action 1F1" in notes(caught.value)
        assert_same(pipe(batch()), model(batch()))


def test_error_of_a_backward_names_the_place_and_the_next_call_is_right() -> None:
    fault = Fault("backward")
    model = faulty(1, fault)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        fault.arm()
        with pytest.raises(Boom) as caught:
            pipe(batch()).sum().backward()
        assert "stage 1" in notes(caught.value)
        assert all(grad is None for grad in gradients(model).values())
        F.mse_loss(pipe(batch()), batch(seed=5)).backward()
    assert_same(gradients(model), expected.gradients)


# ── what is left behind ──────────────────────────────────────────────────────────────────────────────────────────


class Watch(nn.Module):
    """Remembers its activations, and its outputs' memory, weakly."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        self.seen.append(weakref.ref(y.untyped_storage()))
        return y


def alive(watches: list[Watch]) -> list[int]:
    gc.collect()
    return [sum(ref() is not None for ref in watch.seen) for watch in watches]


def watched(fault: nn.Module) -> tuple[nn.Sequential, list[Watch]]:
    watches = [Watch() for _ in range(3)]
    layers = [nn.Sequential(nn.Linear(4, 4), watch) for watch in watches]
    layers[1].append(fault)
    return nn.Sequential(*layers), watches


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failed_step_leaves_no_activations_alive(where: str, schedule: str) -> None:
    fault = Fault(where, call=3)
    model, watches = watched(fault)
    with pipeline(model, schedule=schedule) as pipe:
        fault.arm()
        with pytest.raises(Boom):
            pipe.step(batch(), batch())
        assert alive(watches) == [0, 0, 0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_a_step_leaves_no_activations_alive(schedule: str) -> None:
    model, watches = watched(nn.Identity())
    with pipeline(model, schedule=schedule, outputs=None) as pipe:
        pipe.step(batch(), batch())
        assert alive(watches) == [0, 0, 0]


def test_a_call_leaves_no_activations_alive_when_its_output_is_gone() -> None:
    model, watches = watched(nn.Identity())
    with pipeline(model) as pipe:
        output = pipe(batch())
        output.sum().backward()
        del output
        assert alive(watches) == [0, 0, 0]
        pipe(batch())  # nobody asks for its backward
        assert alive(watches) == [0, 0, 0]


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_close_ends_the_threads_and_may_be_called_twice() -> None:
    before = penstock_threads()
    pipe = pipeline(mlp(2))
    mine = penstock_threads() - before
    assert len(mine) == 3
    pipe.close()
    pipe.close()
    assert threads_end(mine)


@pytest.mark.parametrize("use", ["step", "call", "no_grad", "clip"])
def test_a_closed_pipeline_raises(use: str) -> None:
    pipe = pipeline(mlp(2))
    pipe.close()
    with torch.set_grad_enabled(use != "no_grad"), pytest.raises(ps.PipelineError, match="closed"):
        {"step": lambda: pipe.step(batch(), batch()), "clip": lambda: pipe.clip_grad_norm_(1.0)}.get(
            use, lambda: pipe(batch())
        )()


@pytest.mark.parametrize("use", ["step", "call", "backward"])
def test_a_fork_of_the_process_is_told_to_build_its_own_pipeline(use: str) -> None:
    """As a worker of a data loader is: the threads are not in it, and a step would wait for them for ever."""
    pipe = pipeline(mlp(2))
    output = pipe(batch()).sum()
    uses = {"step": lambda: pipe.step(batch(), batch()), "call": lambda: pipe(batch()), "backward": output.backward}
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads
        child = os.fork()
    if not child:
        signal.alarm(10)  # it is killed if it hangs
        try:
            uses[use]()
        except ps.PipelineError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as told:
        assert re.match(rf"this pipeline was built in process {os.getpid()}.*: build the pipeline in", told.read())
    os.waitpid(child, 0)
    pipe.step(batch(), batch())


@pytest.mark.timeout(20)
def test_backward_after_close_raises() -> None:
    pipe = pipeline(mlp(2))
    output = pipe(batch())
    pipe.close()
    with pytest.raises(ps.PipelineError, match="closed"):
        output.sum().backward()


def test_closing_leaves_the_model_usable() -> None:
    model = mlp(2)
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
    model(batch()).sum().backward()
    assert set(pipe.state_dict()) == set(model.state_dict())


def test_the_with_block_closes_even_when_it_fails() -> None:
    fault, before = Fault("forward"), penstock_threads()
    fault.arm()
    with pytest.raises(Boom), pipeline(faulty(1, fault)) as pipe:
        pipe.step(batch(), batch())
    assert threads_end(penstock_threads() - before)


@pytest.mark.parametrize("used", [False, True])
def test_threads_end_with_the_last_reference(used: bool) -> None:
    before = penstock_threads()
    pipe = pipeline(mlp(2))
    mine = penstock_threads() - before
    if used:
        pipe.step(batch(), batch())
        pipe(batch()).sum().backward()
    del pipe
    assert threads_end(mine)


def test_threads_of_a_failed_pipeline_end_with_the_last_reference() -> None:
    before = penstock_threads()
    fault = Fault("forward")
    pipe = pipeline(faulty(1, fault))
    mine = penstock_threads() - before
    fault.arm()
    with pytest.raises(Boom):
        pipe.step(batch(), batch())
    del pipe
    assert threads_end(mine)


def test_two_pipelines_of_one_model_may_live_side_by_side() -> None:
    model = mlp(2)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss, steps=2)
    with pipeline(model) as one, pipeline(model, schedule="zb_h1") as two:
        one.step(batch(), batch(seed=5))
        two.step(batch(), batch(seed=5))
    assert_same(gradients(model), expected.gradients)


def test_the_number_of_torchs_threads_is_left_alone() -> None:
    before = torch.get_num_threads()
    with pipeline(mlp(2)) as pipe:
        pipe.step(batch(), batch())
        assert torch.get_num_threads() == before
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert found == [before]


def test_stages_before_the_one_that_failed_stop_at_their_next_micro_batch() -> None:
    """Their messages are there already: they must not be worked off."""
    calls: list[int] = []
    failed, going = threading.Event(), threading.Event()

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 2:
                going.set()
                failed.wait(10)
                time.sleep(0.2)  # until the failure has gone round
            return x

    class Raise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            going.wait(10)
            failed.set()
            raise Boom

    model = nn.Sequential(nn.Linear(4, 4), Count(), Raise())
    with ps.Pipeline(ps.split(model, balance=[1, 1, 1]), microbatches=8, devices="cpu") as pipe:
        with pytest.raises(Boom):
            pipe(batch(8))
        assert len(calls) == 2
