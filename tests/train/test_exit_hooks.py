"""A program may end anywhere. The other ranks hear of it, and why; and a program that just ends bothers nobody.

rank 0   step  optimizer.step()  step ~~ ✗ rank 1: ValueError: the optimizer failed, with the traceback
rank 1   step  optimizer.step() ✗          the process ends with this exception
rank 2   step  optimizer.step()  step ~~ ✗ the same
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import penstock as ps
from penstock.engine.failure import cause, watch
from tests.support.models import batch, mlp
from tests.support.programs import wait_until
from tests.support.rank_programs import ProgramExit, run_processes, run_programs
from tests.support.ranks import Ranks
from tests.train.test_distributed_failures import pipeline

PROGRAM = """
import sys, time
import torch, torch.nn.functional as F
import penstock as ps
from torch import nn

class Fails(torch.optim.SGD):
    def step(self):
        raise ValueError("the optimizer failed")

def main(how, at):
    global pipe  # which lives until the interpreter ends
    torch.manual_seed(0)
    mesh = ps.Mesh()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    pipe = ps.Pipeline(ps.split(model, stages=3), F.mse_loss, microbatches=4, mesh=mesh)
    fails = how != "end" and mesh.rank == at
    optimizer = (Fails if how == "raise" and fails else torch.optim.SGD)(pipe.parameters(), lr=0.1)
    for step in range(1000 if how != "end" else 3):
        try:
            pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        except ps.PipelineError:
            print(f"heard after {time.time() - float(open(sys.argv[3]).read()):.1f} s", flush=True)
            raise
        if fails:
            open(sys.argv[3], "w").write(str(time.time()))
            if how == "exit":
                sys.exit(3)
            if how == "leave":
                sys.exit(0)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(mesh.rank)
    print("done")

main(sys.argv[1], int(sys.argv[2]))
"""


def run(how: str, at: int, when: Any) -> list[ProgramExit]:
    return run_programs(PROGRAM, 3, how, str(at), str(when))


@pytest.mark.parametrize("at", [0, 2])
def test_an_exception_in_the_optimizer_reaches_every_rank(at: int, tmp_path: Any) -> None:
    """Of the first rank too, which keeps the store, and takes it away with it."""
    ended = run("raise", at, tmp_path / "when")
    own = ended.pop(at)
    assert own.code == 1
    assert own.text.count("ValueError: the optimizer failed") == 1
    for other in ended:
        assert other.code == 1
        assert f"PipelineError: rank {at}: ValueError: the optimizer failed" in other.text
        assert f"On rank {at}:" in other.text
        assert "in step" in other.text
        (heard,) = [line for line in other.text.splitlines() if line.startswith("heard after")]
        assert float(heard.split()[2]) < 10


def test_a_program_that_exits_is_named(tmp_path: Any) -> None:
    ended = run("exit", 1, tmp_path / "when")
    assert ended.pop(1) == ProgramExit(3, "")
    for other in ended:
        assert other.code == 1
        assert (
            "PipelineError: rank 1: it has closed its pipeline, or ended without an exception, after 1 calls"
            in other.text
        )


@pytest.mark.parametrize("at", [0, 1])
def test_a_program_that_ends_early_is_not_reported_as_killed(at: int, tmp_path: Any) -> None:
    """In an interpreter of its own, whose exit hooks run in another order than those of a fork."""
    ended = run_programs(PROGRAM, 3, "leave", str(at), str(tmp_path / "when"), fresh=at)
    assert ended.pop(at).code == 0
    for other in ended:
        assert other.code == 1
        assert (
            f"PipelineError: rank {at}: it has closed its pipeline, or ended without an exception, after 1 calls"
            in other.text
        )
        (heard,) = [line for line in other.text.splitlines() if line.startswith("heard after")]
        assert float(heard.split()[2]) < 10


def test_programs_that_end_without_closing_their_pipelines_succeed() -> None:
    """The first one ends first, and the store with it; the others have nothing to say to that."""
    assert run("end", -1, "") == [ProgramExit(0, "done\n")] * 3


# ── processes of multiprocessing, which handle their exceptions themselves ───────────────────────────────────────


def trains(rank: int, how: str) -> None:
    torch.set_num_threads(1)
    pipe = ps.Pipeline(ps.split(mlp(), stages=3), F.mse_loss, microbatches=4, mesh=ps.Mesh())
    for step in range(1000):
        pipe.step(batch(), batch())
        if rank == 1 and step == 1:
            if how == "raise":
                raise ValueError("in a child")
            if how == "spawn":
                as_spawned()
            return
        time.sleep(0.01)


def as_spawned() -> None:
    """How ``torch.multiprocessing.spawn`` ends a process that has failed."""
    try:
        raise ValueError("in a child")
    except ValueError:
        sys.exit(1)


@pytest.mark.parametrize("how", ["raise", "spawn", "return"])
def test_exit_hooks_of_multiprocessing_children(how: str) -> None:
    ended = run_processes(trains, 3, how)
    own = ended.pop(1)
    assert own.code == (0 if how == "return" else 1)
    says = (
        "ValueError: in a child"
        if how != "return"
        else "it has closed its pipeline, or ended without an exception, after"
    )
    for other in ended:
        assert other.code == 1
        assert f"PipelineError: rank 1: {says}" in other.text
        assert ("On rank 1:\nTraceback" in other.text) == (how != "return")


def ends_before_building(rank: int, how: str, at: int) -> None:
    mesh = ps.Mesh()
    if rank == at:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(0)
    ps.Pipeline(ps.split(mlp(), stages=3), F.mse_loss, microbatches=4, mesh=mesh)


@pytest.mark.parametrize(("how", "at"), [("killed", 0), ("killed", 1), ("exits", 0), ("exits", 2)])
def test_a_process_that_ends_before_it_builds_its_pipeline_is_named(how: str, at: int) -> None:
    """Rank 0 hosts the store."""
    ended = run_processes(ends_before_building, 3, how, at, timeout=60)
    assert ended.pop(at).code == (-signal.SIGKILL if how == "killed" else 0)
    for other in ended:
        assert other.code == 1
        told = re.search(r"PipelineError: rank (\d): its process(.*)", other.text)
        assert told is not None, other.text
        assert int(told[1]) == at
        assert "before it built this pipeline" in told[2] or (at == 0 and "the store with it" in told[2])


def store_stops(rank: int, how: str, folder: str) -> None:
    """Rank 0, which hosts the store, is stopped as by a machine that freezes, and killed once the others have ended."""
    cause.PUBLISH_SECONDS = watch.PUBLISH_SECONDS = 1.0
    torch.set_num_threads(1)
    pids, done = Path(folder) / "pid", Path(folder) / "done"
    pipe = ps.Pipeline(ps.split(mlp(), stages=3), F.mse_loss, microbatches=4, mesh=ps.Mesh(), timeout=2.0)
    pipe.step(batch(), batch())
    if rank == 0:
        pids.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_until(pids.exists, "rank 0 did not stop")
    try:
        if rank == 1 and how == "raise":
            raise ValueError("mine")
        pipe.step(batch(), batch())
    except BaseException as error:
        pipe._executor.exit(error)  # as a with block does
        print(f"{type(error).__name__}: {error}", flush=True)
    if rank == 1:
        done.write_text("")
    else:
        wait_until(done.exists, "rank 1 hangs")
        os.kill(int(pids.read_text()), signal.SIGKILL)
    os._exit(1)


@pytest.mark.parametrize("how", ["wait", "raise"])
def test_a_store_that_does_not_answer_is_named(how: str, tmp_path: Path) -> None:
    """Requests to it have no end of their own: all ranks hung, also one that raised an error and published it."""
    stopped, one, two = run_processes(store_stops, 3, how, str(tmp_path), timeout=60)
    assert stopped.code == -signal.SIGKILL
    silent = "PipelineError: rank 0: the store on 127.0.0.1"
    assert (silent if how == "wait" else "ValueError: mine") in one.text
    assert silent in two.text
    assert "does not answer" in two.text


# ── the hooks ────────────────────────────────────────────────────────────────────────────────────────────────────


def hooks(rank: int) -> None:
    """The hook is in place while there is a pipeline, once for all of them, and gone with the last one."""
    before = sys.excepthook
    with pipeline(mlp()):
        during = sys.excepthook
        assert during is not before
        with pipeline(mlp()):
            assert sys.excepthook is during
        assert sys.excepthook is during
    assert sys.excepthook is before


def hooked_on_top(rank: int) -> None:
    """Somebody else's hook that leads to ours stays, and everything still comes to an end."""
    before, seen = sys.excepthook, []
    with pipeline(mlp()):
        ours = sys.excepthook
        sys.excepthook = theirs = lambda *args: (seen.append(args), ours(*args))
    try:
        assert sys.excepthook is theirs
        with pipeline(mlp()):
            assert sys.excepthook is theirs
    finally:
        sys.excepthook = before
        watch._previous_excepthook = None


def test_excepthook_is_installed_while_there_are_pipelines(two: Ranks) -> None:
    two.check(hooks)
    two.check(hooked_on_top)


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (None, False),
        (ValueError(), True),
        (KeyboardInterrupt(), True),
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(2), True),
        (SystemExit("no"), True),
        (GeneratorExit(), False),
    ],
)
def test_failed_exits(error: BaseException | None, failed: bool) -> None:
    assert watch.is_failed_exit(error) is failed
