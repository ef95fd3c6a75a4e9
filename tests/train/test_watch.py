"""Ranks that fail, die or hang while others compute or wait, and how they are reported.

rank 0   F0 F1 ~~~~~~~~~ waits for 0RECV_B0 from rank 1, which has been in 1F1 for 31 s
rank 1      F0 F1 ══════════════════════════════════════════════════ in time.sleep
rank 2         F0 ~~~~~~ waits for 2RECV_F1 from rank 1, which has been in 1F1 for 31 s
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine import connections, distributed
from tests.support.leaks import ProcessResources
from tests.support.models import batch, mlp, penstock_threads, threads_end
from tests.support.ranks import RankExited, Ranks, run_ranks
from tests.train.test_distributed_failures import (
    SOON,
    RaisedError,
    assert_new_pipeline_works,
    assert_works,
    failing_step,
    faulty,
    pipeline,
)

LONG = 120.0  # seconds that no test waits


class Boom(Exception):
    """The user's own kind of error."""


class Busy(nn.Module):
    """An identity whose second real forward takes ``seconds``, or until ``released``; it creates ``begun`` before."""

    def __init__(self, seconds: float, begun: Path | None = None, released: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.seconds, self.calls = seconds, 0
        self.begun, self.released = begun, released

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.calls += 1
            if self.calls == 2:
                if self.begun is not None:
                    self.begun.touch()
                end = time.monotonic() + self.seconds
                while time.monotonic() < end and not self.released():
                    time.sleep(0.02)  # busy
        return x


class Raises(nn.Module):
    """An identity that fails in its second real forward."""

    def __init__(self, fails: bool = True) -> None:
        super().__init__()
        self.calls, self.fails = 0, fails

    def forward(self, x: Tensor) -> Tensor:
        self.calls += type(x) is Tensor
        if self.calls == 2 and self.fails:
            raise Boom("on purpose")
        return x


def layered(**layers: nn.Module) -> nn.Sequential:
    """One linear layer per rank; ``at1=…`` is put after the one of rank 1."""
    torch.manual_seed(0)
    found: list[nn.Module] = [nn.Linear(4, 4) for _ in range(dist.get_world_size())]
    for name, layer in layers.items():
        rank = int(name.removeprefix("at"))
        found[rank] = nn.Sequential(found[rank], layer)
    return nn.Sequential(*found)


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Threads, sockets, children and shared memory are the same afterwards."""
    assert_new_pipeline_works()  # what torch keeps from its first backward on is there then
    before = ProcessResources.now()
    yield
    before.assert_no_leaks()


class Messages(logging.Handler):
    """Collects log messages."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    handler, logger = Messages(), logging.getLogger("penstock")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


# ── busy ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


class FailsWhen(nn.Module):
    """Fails in its first real forward, once a file exists: when another rank is in the middle of its own."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            end = time.monotonic() + LONG
            while not self.file.exists():
                assert time.monotonic() < end, "the other rank does not begin"
                time.sleep(0.02)
            raise Boom("on purpose")
        return x


def fails_while_another_computes(rank: int, folder: Path) -> RaisedError:
    """The last rank fails in its first micro-batch, while the first one is in its second for two minutes."""
    with leaving_nothing():
        begun = folder / "begun"
        error = failing_step(pipeline(layered(at0=Busy(LONG, begun), at2=FailsWhen(begun))))
        assert threading.current_thread() is threading.main_thread()
        time.sleep(0.3)  # for a late interrupt to arrive here
    assert_new_pipeline_works()
    return error


def fails_in_the_background(rank: int, folder: Path) -> RaisedError:
    """The same in programs that ignore SIGINT, as a shell starts those in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        error = fails_while_another_computes(rank, folder)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        return error
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("case", [fails_while_another_computes, fails_in_the_background])
def test_failure_reaches_a_rank_that_computes(three: Ranks, tmp_path: Path, case: Callable[..., RaisedError]) -> None:
    for error in three.check(case, tmp_path):
        assert error.kind == "PipelineError"
        assert error.action == "2F0"
        assert "rank 2, stage 2, micro-batch 0, action 2F0: Boom: on purpose" in error.text
        assert error.seconds < SOON


def fails_while_another_waits(rank: int, folder: Path) -> RaisedError:
    """Rank 0 waits for rank 1, which nothing interrupts until rank 0 has raised; nothing breaks between these two."""
    begun, raised = folder / "begun", folder / "raised"
    before = signal.getsignal(signal.SIGINT)
    if rank == 1:
        signal.signal(signal.SIGINT, lambda *_: None)
    try:
        error = failing_step(pipeline(layered(at1=Busy(LONG, begun, raised.exists), at2=FailsWhen(begun))))
        if rank == 0:
            raised.touch()
        return error
    finally:
        signal.signal(signal.SIGINT, before)


def test_failure_reaches_a_rank_that_waits_for_another_rank(three: Ranks, tmp_path: Path) -> None:
    errors = three.check(fails_while_another_waits, tmp_path)
    for error in errors:
        assert "rank 2, stage 2, micro-batch 0, action 2F0: Boom: on purpose" in error.text
    assert errors[0].seconds < SOON


def fails_in_the_other_replica(rank: int) -> RaisedError:
    """Rank 3 is the last of the second pipeline; the first pipeline has no fault."""
    with leaving_nothing_of(data=2, pipe=2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Raises(fails=rank == 3)))
        pipe = ps.Pipeline(ps.split(model, stages=2), F.mse_loss, microbatches=4, mesh=ps.Mesh(data=2, pipe=2))
        return failing_step(pipe)


@contextmanager
def leaving_nothing_of(**sizes: int) -> Iterator[None]:
    with ps.Pipeline(ps.split(mlp(), stages=sizes["pipe"]), F.mse_loss, mesh=ps.Mesh(**sizes)) as pipe:
        pipe.step(batch(), batch())
    before = ProcessResources.now()
    yield
    before.assert_no_leaks()


def test_a_failure_reaches_the_other_replicas(four: Ranks) -> None:
    for error in four.check(fails_in_the_other_replica):
        assert (error.rank, error.stage, error.microbatch, error.action) == (3, 1, 1, "1F1")
        assert "Boom: on purpose" in error.text
        assert "in forward" in error.text
        assert error.seconds < SOON


def one_of_two(rank: int) -> None:
    """Two pipelines and the user's own process group in one process: one pipeline fails."""
    model = mlp()
    with pipeline(model) as good, leaving_nothing():
        assert_works(good, model)
        bad = pipeline(faulty(1, Raises()))
        assert failing_step(bad).kind == "PipelineError"
        for _ in range(3):
            assert_works(good, model)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()
        assert "has stopped" in failing_step(bad).text


def test_other_pipelines_of_the_process_continue(three: Ranks) -> None:
    three.check(one_of_two)


def closed_at_different_times(rank: int) -> None:
    """Closing is no failure, whoever is first, and however long the others take."""
    with leaving_nothing(), logged() as lines:
        model = mlp()
        pipe = pipeline(model)
        assert_works(pipe, model)
        time.sleep(rank)
        pipe.close()
        time.sleep(0.5)
        assert not lines
    dist.barrier()


def test_ranks_may_close_at_different_times(three: Ranks) -> None:
    three.check(closed_at_different_times)


def forgotten(rank: int) -> None:
    """A pipeline that is dropped and not closed leaves nothing either."""
    with leaving_nothing():
        model = mlp()
        pipe = pipeline(model)
        assert_works(pipe, model)
        dist.barrier()
        del pipe


def test_an_unclosed_pipeline_ends_with_its_last_reference(three: Ranks) -> None:
    three.check(forgotten)


def left_by_an_error(rank: int) -> str:
    """An optimizer that fails on one rank, in a ``with`` block."""

    def train() -> None:
        with pipeline(mlp()) as pipe:
            for step in range(1000):
                pipe.step(batch(), batch())
                if rank == 1 and step == 2:
                    raise Boom("in the optimizer")

    with leaving_nothing(), pytest.raises(Boom if rank == 1 else ps.PipelineError) as caught:
        train()
    return str(caught.value)


def test_error_in_a_with_block_reaches_the_other_ranks(three: Ranks) -> None:
    texts = three.check(left_by_an_error)
    assert texts.pop(1) == "in the optimizer"
    for text in texts:
        assert text.startswith("rank 1: Boom: in the optimizer")
        assert "in train" in text


# ── processes that die ───────────────────────────────────────────────────────────────────────────────────────────


def killed_while_others_compute(rank: int, at: int) -> RaisedError:
    """All ranks but one are in a forward of two minutes when that one is killed."""
    assert_new_pipeline_works()  # a first step takes its time
    layers = {f"at{r}": Busy(LONG) for r in range(3)}
    pipe = pipeline(layered(**layers), microbatches=2)
    if rank == at:
        threading.Timer(3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return failing_step(pipe)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_killed_process_is_named_by_ranks_that_compute(at: int) -> None:
    errors = run_ranks(killed_while_others_compute, 3, at)
    assert isinstance(errors.pop(at), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.rank == at
        assert "gone" in error.text
        assert error.seconds < 3 + SOON


def killed_in_a_message(rank: int) -> RaisedError:
    """Rank 1 is killed when it has sent a part of a large message, which rank 2 reads afterwards: it is stopped before.

    A connection holds a few megabytes. In gloo, its end does not end the wait for a message that has arrived in part.
    """
    assert_new_pipeline_works()  # a first step takes its time
    pipe = pipeline(layered(at1=Slow()), microbatches=2)
    pid = os.getpid()
    if rank == 1:
        threading.Timer(4, os.kill, (pid, signal.SIGKILL)).start()
    if rank == 2:
        fork(lambda: (time.sleep(5), os.kill(pid, signal.SIGCONT)))
        threading.Timer(1, os.kill, (pid, signal.SIGSTOP)).start()
    large = torch.zeros(1 << 22, 4)  # 32 MB per micro-batch
    return failing_step(pipe, large, large)


class Slow(nn.Module):
    """An identity whose real forwards take two seconds."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            time.sleep(2)
        return x


def test_a_process_that_is_killed_in_a_message_is_named() -> None:
    """Rank 2 waited for the rest of the message until the time-out of the pipeline."""
    errors = run_ranks(killed_in_a_message, 3)
    assert isinstance(errors.pop(1), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.rank == 1
        assert "gone" in error.text


class Receives(nn.Module):
    """An identity that communicates with another rank by itself, like a layer that is sharded over ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            dist.recv(torch.zeros(1), self.rank)
        return x


def killed_in_a_collective(rank: int) -> RaisedError:
    assert_new_pipeline_works()  # a first step takes its time
    pipe = pipeline(layered(at0=Receives(2)))
    if rank == 2:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return failing_step(pipe)


def test_a_killed_process_is_named_if_a_collective_of_a_stage_waits_for_it() -> None:
    """The stage fails with an error of torch, which is not the cause."""
    errors = run_ranks(killed_in_a_collective, 3)
    assert isinstance(errors.pop(2), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert "rank 2: its process is gone" in error.text
        assert error.action is None


def fork(work: Callable[[], object]) -> int:
    """A forked child that runs ``work``. The connection to the test is closed in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not need
        child = os.fork()
    if child == 0:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), socket.socket(fileno=int(name)) as sock:
                if sock.family != socket.AF_UNIX:
                    sock.detach()
        work()
        os._exit(0)
    return child


def killed_with_a_child(rank: int, child: str) -> RaisedError:
    """A fork of the killed process lives on, and has all its connections."""
    assert_new_pipeline_works()  # a first step takes its time
    pipe = pipeline(layered(at1=Busy(LONG)))
    if rank == 1:
        Path(child).write_text(str(fork(lambda: time.sleep(60))))
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return failing_step(pipe)


def test_a_killed_process_is_named_while_its_child_lives(tmp_path: Path) -> None:
    errors = run_ranks(killed_with_a_child, 3, str(tmp_path / "child"))
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert isinstance(errors.pop(1), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.rank == 1
        assert error.seconds < 1 + SOON


def dies_building(rank: int, at: int, when: int) -> tuple[str, float]:
    """One rank is killed before its ``when``-th group is opened; 0: before the rendezvous."""
    opened = 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def open_group(*args: Any) -> Any:
        nonlocal opened
        opened += 1
        if opened == when:
            die()
        return real_open(*args)

    real_open = connections.open_group
    if rank == at and when:
        connections.open_group = open_group
    elif rank == at:
        distributed.Rendezvous.compare = lambda *args: die()

    def build_and_run() -> None:
        pipe = pipeline(mlp())
        time.sleep(1)
        pipe.step(batch(), batch())

    start = time.monotonic()
    with leaving_nothing_building(), pytest.raises(ps.PipelineError) as caught:
        build_and_run()
    assert caught.value.rank == at
    return str(caught.value), time.monotonic() - start


@contextmanager
def leaving_nothing_building() -> Iterator[None]:
    before = ProcessResources.now()
    yield
    after = {name for name in ProcessResources.now().python_threads if name.startswith("penstock")}
    assert not after - before.python_threads


@pytest.mark.parametrize(("at", "when"), [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 2), (1, 3)])
def test_a_process_that_dies_while_building_its_pipeline_is_named(at: int, when: int) -> None:
    errors = run_ranks(dies_building, 3, at, when)
    assert isinstance(errors.pop(at), RankExited)
    for error in errors:
        assert isinstance(error, tuple), error
        text, seconds = error
        assert f"rank {at}: its process is gone" in text
        assert seconds < SOON


# ── ranks that hang ──────────────────────────────────────────────────────────────────────────────────────────────


def hangs(rank: int) -> tuple[float, list[str]]:
    with leaving_nothing(), logged() as lines:
        pipe = pipeline(layered(at1=Busy(6.0)), timeout=(1.0, 1800.0))
        result = pipe.step(batch(), batch())
        pipe.close()
        return float(result.loss), lines


def test_long_waits_are_reported_with_the_rank_that_hangs(three: Ranks) -> None:
    results = three.check(hangs)
    place = r"\(at test_watch\.py:\d+, in forward\)"
    assert re.fullmatch(
        rf"rank 0 waits for 0RECV_B0 from rank 1, which has been in 1F1 for \d+ s {place}", results[0][1][-1]
    )
    assert re.fullmatch(
        rf"rank 2 waits for 2RECV_F1 from rank 1, which has been in 1F1 for \d+ s {place}", results[2][1][-1]
    )
    assert not results[1][1]  # it waits for nobody
    assert len({loss for loss, _ in results}) == 1  # and the step completed
    assert 2 <= len(results[0][1]) <= 4  # after 1, 2 and 4 seconds


def never_steps(rank: int) -> list[str]:
    """One rank does something else, once before its first step and once after it."""
    with leaving_nothing(), logged() as lines:
        with pipeline(mlp(), timeout=(0.8, 1800.0)) as pipe:
            for _ in range(2):
                if rank == 0:
                    time.sleep(3)
                pipe.step(batch(), batch())
        return lines


def test_a_rank_that_runs_no_step_is_named(three: Ranks) -> None:
    results = three.check(never_steps)
    for rank in (1, 2):
        waits = rf"rank {rank} waits for the next mini-batch from rank 0, which is not in a step: "
        assert any(re.match(waits + r"it has run none since it built its pipeline \d+ s ago", t) for t in results[rank])
        assert any(re.match(waits + r"its last one ended \d+ s ago \(at test_watch", line) for line in results[rank])


def stopped(rank: int) -> list[str] | str:
    """The process of one rank is stopped, as by Ctrl-Z or a debugger, and continues later."""
    with logged() as lines:
        pipe = pipeline(mlp(), timeout=(1.0, 1800.0))
        if rank == 0:
            time.sleep(1)  # until it has sent a heartbeat
            pid = os.getpid()
            waker = fork(lambda: (time.sleep(6), os.kill(pid, signal.SIGCONT)))
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(waker, 0)
        pipe.step(batch(), batch())
        pipe.close()
        return lines


def test_a_stopped_process_is_reported_and_may_continue() -> None:
    for lines in run_ranks(stopped, 3, timeout=90)[1:]:
        assert isinstance(lines, list), lines
        assert any(
            re.search(r"from rank 0, which has sent no heartbeat for \d+ s \(is its process stopped\?\)", line)
            for line in lines
        ), lines


def times_out(rank: int) -> tuple[RaisedError, float]:
    with leaving_nothing():
        pipe = pipeline(layered(at1=Busy(LONG)), timeout=(None, 3.0))
        start = time.monotonic()
        error = failing_step(pipe)
        seconds = time.monotonic() - start
    assert_new_pipeline_works()
    return error, seconds


def test_timeout_stops_all_ranks_and_shows_the_stack_of_the_one_that_hangs(three: Ranks) -> None:
    for error, seconds in three.check(times_out):
        assert (error.rank, error.stage, error.microbatch, error.action) == (1, 1, 1, "1F1")
        assert re.search(r"timed out: rank \d waits for \dRECV_..? from rank 1, which has been in 1F1 for", error.text)
        assert "longer than timeout=3 s" in error.text
        assert "time.sleep(0.02)  # busy" in error.text
        assert seconds < LONG / 2


def times_out_elsewhere(rank: int) -> tuple[RaisedError, list[str]]:
    """The rank that the others wait for is not in a step: its next one fails."""
    with leaving_nothing(), logged() as lines:
        pipe = pipeline(mlp(), timeout=(None, 2.0))
        pipe.step(batch(), batch())
        if rank == 0:
            time.sleep(6)
        return failing_step(pipe), lines


def test_timeout_of_a_rank_outside_of_a_step(three: Ranks) -> None:
    results = three.check(times_out_elsewhere)
    for error, _ in results:
        assert error.rank == 0
        assert re.search(
            r"rank 0: timed out: rank \d waits for the next mini-batch from rank 0, which is not in a step: "
            r"its last one ended \d+ s ago \(at test_watch\.py:\d+, in times_out_elsewhere\): longer than timeout=2 s",
            error.text,
        )
    assert [len(lines) for _, lines in results] == [1, 0, 0]  # the late rank logs the error itself


def hangs_for_good(rank: int, errors: str) -> str:
    """Nothing interrupts this rank: its own handler ignores SIGINT."""
    if rank == 1:
        signal.signal(signal.SIGINT, lambda *_: None)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    assert_new_pipeline_works()  # a first step takes its time
    pipe = pipeline(layered(at1=Busy(LONG)), timeout=2.0)
    return failing_step(pipe).text


def test_a_process_that_cannot_be_interrupted_exits_with_its_stack(tmp_path: Path) -> None:
    texts = run_ranks(hangs_for_good, 3, str(tmp_path / "errors"))
    gone = texts.pop(1)
    assert isinstance(gone, RankExited)
    assert "exit code 1" in str(gone)
    for text in texts:
        assert "timed out" in text
    errors = (tmp_path / "errors").read_text()
    assert re.search(r"rank 1 has been in 1F1 for \d+ s.*, and exits, because the pipeline has stopped", errors)
    assert "time.sleep(0.02)  # busy" in errors


def no_limits(rank: int) -> list[str]:
    with logged() as lines, pipeline(layered(at1=Busy(3.0)), timeout=(None, None)) as pipe:
        pipe.step(batch(), batch())
    return lines


def test_without_limits_nothing_is_reported(three: Ranks) -> None:
    assert three.check(no_limits) == [[], [], []]


def leaves_early(rank: int) -> RaisedError | None:
    """Rank 2 closes while rank 0 waits for rank 1, which waits for rank 2."""
    pipe = pipeline(mlp())
    pipe.step(batch(), batch())
    if rank == 2:
        pipe.close()
        time.sleep(3)
        return None
    return failing_step(pipe)


def test_a_rank_that_closed_early_is_named_by_all(three: Ranks) -> None:
    for error in three.check(leaves_early)[:2]:
        assert error.rank == 2
        assert "it has closed its pipeline, or ended without an exception, after 1 calls of it, while" in error.text
        assert error.seconds < SOON


# ── threads of one process ───────────────────────────────────────────────────────────────────────────────────────


def local(seconds: float, released: Callable[[], bool] = lambda: False, **options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    busy = Busy(seconds, released=released)
    parts = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), busy), nn.Linear(4, 4)]
    return ps.Pipeline(ps.split(nn.Sequential(*parts), stages=3), F.mse_loss, microbatches=4, **options)


@pytest.mark.slow
def test_long_waits_of_threads_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"), local(3.0, timeout=(0.8, 1800.0)) as pipe:
        pipe.step(batch(), batch())
    for waits in ("rank 0 waits for 0RECV_B0", "rank 2 waits for 2RECV_F1"):
        says = rf"{waits} from rank 1, which has been in 1F1 for \d+ s \(at test_watch\.py:\d+, in forward\)"
        assert any(re.fullmatch(says, line) for line in caplog.messages), caplog.messages


@pytest.mark.slow
def test_in_lockstep_a_thread_waits_until_its_messages_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "penstock"), local(3.0, timeout=(0.8, 1800.0)) as pipe:
        pipe.lockstep = True
        pipe.evaluate(batch(), batch())
    says = r"rank 0 waits until 0SEND_F2 is received by rank 1, which has been in 1F1 for \d+ s .*"
    assert any(re.fullmatch(says, line) for line in caplog.messages), caplog.messages


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "stream"])
def test_timeout_ends_the_wait_for_threads(how: str) -> None:
    """The thread that hangs cannot be ended; it ends with its forward."""
    others = penstock_threads()  # of pipelines that other tests left
    released = threading.Event()
    pipe = local(LONG, released.is_set, timeout=1.0)
    run = {"step": lambda: pipe.step(batch(), batch()), "stream": lambda: list(pipe.stream([batch()] * 3))}
    with pytest.raises(ps.PipelineError, match=r"timed out: rank [02] waits") as caught:
        run[how]()
    assert (caught.value.rank, caught.value.action) == (1, "1F1")
    assert "time.sleep(0.02)  # busy" in str(caught.value)
    with pytest.raises(ps.PipelineError, match="closed"):
        pipe.step(batch(), batch())
    pipe.close()
    released.set()
    assert threads_end(penstock_threads() - others, 20)


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("value", [0, -1.0, "soon", True, float("nan"), (0, 8), (3, "soon"), (1, 2, 3)])
def test_limits_are_positive_numbers_or_none(value: Any) -> None:
    with pytest.raises(ps.PlanError, match="timeout must be seconds, None"):
        ps.Pipeline(ps.split(mlp(), stages=2), F.mse_loss, timeout=value)
