"""Preemption, killed ranks, and machines that leave and come: the losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.train.checkpoint import PREEMPTED
from tests.support.programs import DEADLINE, environment, forked_python, free_port, run, wait_until
from tests.support.programs import _start_all as start_all

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume.py"


def penstock(*arguments: object) -> list[str]:
    return forked_python("-m", "penstock", "run", *arguments)


def ranks_of(folder: Path) -> list[int]:
    """The processes that ``penstock run`` has started for the example with this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(folder).encode() in words and any(word.endswith(b"run_worker.py") for word in words):
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    done = run(forked_python(EXAMPLE, folder, "--stages", 3, "--pause", 0), alone())
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def alone() -> dict[str, str]:
    """Without ``penstock run``, which sets the number of threads: those of OpenMP spin while they wait."""
    return environment(OMP_NUM_THREADS="1")


@contextmanager
def started(folder: Path, *commands: list[str]) -> Iterator[list[Any]]:
    """Programs that write their output to files, to be read while they run."""
    programs = []
    for command in commands:
        name = f"{len(list(folder.glob('*.out')))}"
        (folder / f"{name}.out").touch()
        line = " ".join(f"'{word}'" for word in command)
        programs.append((["sh", "-c", f"exec {line} > {folder}/{name}.out 2> {folder}/{name}.err"], alone()))
    with start_all(programs, None) as processes:
        yield processes


def lines(folder: Path) -> list[str]:
    return [line for file in sorted(folder.glob("*.out")) for line in file.read_text().splitlines()]


def has(folder: Path, text: str) -> bool:
    return any(text in line for line in lines(folder))


def errors(folder: Path) -> str:
    return "\n".join(file.read_text()[-2000:] for file in folder.glob("*.err"))


def assert_same_losses(folder: Path, undisturbed: list[str]) -> None:
    """Every step has the loss of the run that was never stopped; steps that ran twice had it twice."""
    steps = {line for line in lines(folder) if line.startswith("step")}
    assert sorted(steps) == sorted(undisturbed)


def test_a_killed_and_a_preempted_run_are_resumed_on_other_stages(tmp_path: Path, undisturbed: list[str]) -> None:
    run_folder = tmp_path / "run"
    # Half a second for a step: from the eighth on there is a second to kill it before it saves the tenth.
    with started(tmp_path, forked_python(EXAMPLE, run_folder, "--stages", 3, "--pause", 0.5)) as (process,):
        wait_until(lambda: has(tmp_path, "step 8 "), "the first run does not start")
        process.kill()
    with started(tmp_path, penstock("--stages", 2, EXAMPLE, run_folder)) as (process,):
        wait_until(lambda: has(tmp_path, "step 13 "), "the second run does not start")
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == PREEMPTED
        assert "preempted: the checkpoint of step" in errors(tmp_path)
    done = run(forked_python(EXAMPLE, run_folder, "--stages", 5, "--pause", 0), alone())
    (tmp_path / "last.out").write_text(done.stdout)
    assert has(tmp_path, "2 stages, from step 5")
    assert done.stdout.startswith("5 stages, from step 1")
    assert_same_losses(tmp_path, undisturbed)


def test_ranks_are_started_again_after_a_failure(tmp_path: Path, undisturbed: list[str]) -> None:
    command = penstock("--elastic", "--stages", 2, "--max-restarts", 3, EXAMPLE, tmp_path / "run", "--pause", 0.2)
    with started(tmp_path, command) as (process,):
        wait_until(lambda: has(tmp_path, "step 12 "), "the run does not start")
        os.kill(ranks_of(tmp_path / "run")[-1], signal.SIGKILL)
        assert process.wait(DEADLINE) == 0, errors(tmp_path)
    assert has(tmp_path, "2 stages, from step 10")
    assert_same_losses(tmp_path, undisturbed)


def test_machines_leave_and_come(tmp_path: Path, undisturbed: list[str]) -> None:
    """Agents with a rank each. The first hosts the rendezvous, and stays."""
    run_folder, where = tmp_path / "run", f"127.0.0.1:{free_port()}"
    options = ("--elastic", "--stages", 1, "--nnodes", "1:2", "--rdzv-endpoint", where, "--all-ranks")
    command = penstock(*options, EXAMPLE, run_folder, "--pause", 0.7)
    with started(tmp_path, command) as (first,):
        wait_until(lambda: has(tmp_path, "1 stages, from step 0"), "the first machine does not start")
        with started(tmp_path, command) as (second,):
            wait_until(lambda: has(tmp_path, "2 stages, from step"), "the second machine does not join")
            os.killpg(second.pid, signal.SIGKILL)
            wait_until(lambda: sum("1 stages" in line for line in lines(tmp_path)) == 2, "the first does not go on")
        assert first.wait(DEADLINE) == 0, errors(tmp_path)
    assert_same_losses(tmp_path, undisturbed)
