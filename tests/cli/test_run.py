"""``penstock run``: processes, output, failures, and that no process or file is left."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from penstock.cli import main, run_worker
from penstock.cli.run import first_failure
from penstock.train.launch import usable_cores
from tests.support.programs import (
    DEADLINE,
    environment,
    forked_python,
    free_port,
    python,
    run,
    run_commands,
    start_command,
    wait_until,
)
from tests.support.rank_programs import without_hostname_warnings

PLACE = """
import sys, torch, torch.distributed as dist
import penstock as ps

mesh = ps.Mesh()
print(f"{mesh.rank} {mesh.data_rank} {mesh.pipe_rank} {torch.get_num_threads()} {sys.argv[1:]}")
print(f"err {mesh.rank}", file=sys.stderr)
dist.barrier()
"""

# The addresses on which a rank and its launcher accept connections.
LISTENING = """
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import penstock as ps

pipe = ps.Pipeline(ps.split(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), stages=2), nn.MSELoss(), mesh=ps.Mesh())
pipe.step(torch.ones(4, 2), torch.ones(4, 2))
own = set()
for process in ("self", str(os.getppid())):
    for file in Path("/proc", process, "fd").iterdir():
        with suppress(OSError):  # closed since
            own.add(os.readlink(file))
addresses = set()
for kind in ("tcp", "tcp6"):
    for row in Path("/proc/net", kind).read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = row.split()[:10]
        if state == "0A" and f"socket:[{inode}]" in own:
            addresses.add(local.partition(":")[0])
print(*addresses)
"""

# Without torch: it starts in no time.
SCRIPT = """
import os, signal, sys, time
from pathlib import Path

assert __name__ == "__main__"
assert "torch" not in sys.modules
what, *more = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.write(1, f"out {rank} {more}\\n".encode())
os.write(2, f"err {rank}\\n".encode())
Path(f"{__file__}.{rank}").touch()
while not all(Path(f"{__file__}.{other}").exists() for other in range(world)):
    time.sleep(0.01)
if rank == world - 1:
    if what == "raise":
        raise ValueError("all is lost")
    if what == "exit":
        sys.exit(3)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
if what == "sleep":
    Path(more[0], str(os.getpid())).touch()
if what != "go":
    time.sleep(600)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return file


def penstock(*arguments: object) -> list[str]:
    return forked_python("-m", "penstock", "run", *arguments)


def temporary(tmp_path: Path) -> dict[str, str]:
    """An environment with a place of its own for temporary files, to see what is left there."""
    (tmp_path / "tmp").mkdir()
    return environment(TMPDIR=str(tmp_path / "tmp"))


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "tmp").glob("penstock*"))


# Output -----------------------------------------------------------------------------------------------------


def test_output_of_rank_0_and_files_for_the_others(tmp_path: Path) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    options = ("--stages", 2, "--data", 2, "--cpu", "--log-dir", tmp_path / "logs")
    done = run(penstock(*options, tmp_path / "place.py", "--data", "9"), temporary(tmp_path))
    threads = max(1, usable_cores() // 4)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"0 0 0 {threads} ['--data', '9']\n", "err 0\n")
    files = {path.name: without_hostname_warnings(path.read_text()) for path in (tmp_path / "logs").iterdir()}
    assert files == {
        **{f"rank{r}.out": f"{r} {r // 2} {r % 2} {threads} ['--data', '9']\n" for r in (1, 2, 3)},
        **{f"rank{r}.err": f"err {r}\n" for r in (1, 2, 3)},
    }
    assert left(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_on_one_machine_nothing_listens_for_other_machines(tmp_path: Path) -> None:
    (tmp_path / "listening.py").write_text(LISTENING)
    done = run(penstock("--stages", 2, "--cpu", tmp_path / "listening.py"), temporary(tmp_path))
    assert (done.returncode, done.stdout) == (0, "0100007F\n"), done.stderr  # 127.0.0.1 in hexadecimal, reversed


def test_all_ranks_of_a_module(tmp_path: Path) -> None:
    """Modules are found in the current directory, and find others there."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(f"from package import beside\n{SCRIPT}")
    (tmp_path / "package" / "beside.py").touch()
    command = ["run", "--stages", 2, "--all-ranks", "-m", "package.train", "go", "--", "-m"]
    (done,) = run_commands([command], temporary(tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 1] out 1 ['--', '-m']", "out 0 ['--', '-m']"]
    assert sorted(done.stderr.splitlines()) == ["[rank 1] err 1", "err 0"]
    assert left(tmp_path) == []


@pytest.mark.parametrize("numbered", [True, False])
def test_two_machines(script: Path, tmp_path: Path, numbered: bool) -> None:
    """Two agents on this machine. One of them has rank 0, and only that is shown.

    An agent's stderr may also have a warning of torch's TCPStore: the agent that hosts the store can leave torch's exit
    barrier, and close the store, before it has answered the other one.
    """
    where = f"127.0.0.1:{free_port()}"
    ways = [["--master", where, "--node-rank", k] for k in (0, 1)] if numbered else [["--rdzv-endpoint", where]] * 2
    machines = [["run", "--stages", 4, "--nnodes", 2, *way, script, "go"] for way in ways]
    first, second = run_commands(machines, temporary(tmp_path), tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    if not numbered and not first.stdout:  # the first to connect has rank 0
        first, second = second, first
    assert (first.stdout, second.stdout) == ("out 0 []\n", "")
    of_ranks = [[line for line in agent.stderr.splitlines() if "err " in line] for agent in (first, second)]
    assert of_ranks == [["err 0"], []]
    assert left(tmp_path) == []


# Failures ---------------------------------------------------------------------------------------------------


def test_only_the_error_of_the_first_failed_rank_is_shown(script: Path, tmp_path: Path) -> None:
    (done,) = run_commands([["run", "--stages", 2, script, "raise"]], temporary(tmp_path), tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    beginning, _, shown = done.stderr.partition("\npenstock: rank 1 failed, with exit code 1:\n\n")
    assert beginning == "err 0\n"
    traceback, _, more = shown.partition("\n\npenstock: ")
    first, *_, last = traceback.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", "ValueError: all is lost")
    assert f'File "{script}", line ' in traceback.splitlines()[1]  # and not how the script was started
    assert more.startswith("the output of ranks other than 0 is in ")
    directory = Path(more.split()[-1])
    assert without_hostname_warnings((directory / "rank1.err").read_text()) == "err 1\n"
    assert sorted(path.name for path in directory.iterdir()) == ["rank1.err", "rank1.out"]


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [("exit", 3, "rank 1 failed, with exit code 3\n"), ("kill", 137, "rank 1 was killed by SIGKILL:\n\nerr 1\n")],
)
def test_exit_codes(script: Path, tmp_path: Path, what: str, code: int, message: str) -> None:
    (done,) = run_commands([["run", "--stages", 2, script, what]], temporary(tmp_path), tmp_path)
    assert (done.returncode, done.stdout.count("\n")) == (code, 1)
    assert f"\npenstock: {message}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_failure_in_a_stage_is_the_pipelines_own_error(tmp_path: Path) -> None:
    """It is the same on both ranks, and names the place of the failure."""
    file = tmp_path / "train.py"
    file.write_text(
        "import torch, penstock as ps\n"
        "from torch import nn\n"
        "class Bad(nn.Module):\n"
        "    def forward(self, x):\n"
        "        if type(x) is torch.Tensor: raise ValueError('not this one')\n"
        "        return x\n"
        "plan = ps.split(nn.Sequential(nn.Linear(2, 2), Bad(), nn.Linear(2, 2)), balance=[1, 2])\n"
        "pipe = ps.Pipeline(plan, nn.MSELoss(), microbatches=2, mesh=ps.Mesh())\n"
        "pipe.step(torch.zeros(4, 2), torch.zeros(4, 2))\n"
    )
    done = run(penstock("--stages", 2, file), temporary(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(
        "\npenstock: rank 1 failed, with exit code 1:\n\n"
        "penstock.errors.PipelineError: rank 1, stage 1, micro-batch 0, action 1F0: ValueError: not this one\n"
    )
    assert done.stderr.count("Traceback") == 1
    assert left(tmp_path) == []


def failures(directory: Path, **ranks: tuple[int, float | None]) -> tuple[str, str, int]:
    """The failure of ranks that ended with a code, and wrote down why at some time, or did not."""
    found = {}
    for name, (code, at) in ranks.items():
        rank = int(name[1:])
        file = directory / f"error{rank}.json"
        if at is not None:
            message = {"message": "", "extraInfo": {"py_callstack": f"why {rank}", "timestamp": int(at)}}
            file.write_text(json.dumps({"message": message, "time": at}))
        found[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
    return first_failure(found, directory, shown=False)


def test_which_failure_the_others_followed_from(tmp_path: Path) -> None:
    kill, abort, term = -signal.SIGKILL, -signal.SIGABRT, -signal.SIGTERM
    assert failures(tmp_path, r0=(1, 5.3), r1=(1, 5.1), r2=(1, 5.2))[1] == "why 1"
    assert failures(tmp_path, r0=(term, None), r1=(1, 5.1))[1] == "why 1"
    assert failures(tmp_path, r0=(1, 5.2), r1=(term, 5.1))[1] == "why 1"  # asked to end while it failed by itself
    assert failures(tmp_path, r0=(1, 5.0), r1=(kill, None)) == ("rank 1 was killed by SIGKILL", "", 137)
    assert failures(tmp_path, r0=(1, 5.0), r1=(abort, None))[1] == "why 0"  # as NCCL does when others have gone
    assert failures(tmp_path, r0=(term, None), r1=(abort, None))[2] == 134
    assert failures(tmp_path, r0=(7, None)) == ("rank 0 failed, with exit code 7", "", 7)
    assert list(tmp_path.iterdir()) == []


# The end ----------------------------------------------------------------------------------------------------


@contextmanager
def sleeping(script: Path, tmp_path: Path) -> Iterator[tuple[Any, list[int]]]:
    """A run whose ranks sleep, and their process numbers."""
    (tmp_path / "pids").mkdir()
    command = ["run", "--stages", 2, script, "sleep", tmp_path / "pids"]
    launcher = start_command(command, temporary(tmp_path), tmp_path)
    pids: list[int] = []
    try:
        wait_until(
            lambda: len(list((tmp_path / "pids").iterdir())) == 2 or not launcher.is_alive(), "the ranks do not start"
        )
        pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        assert len(pids) == 2
        yield launcher, pids
    finally:
        launcher.kill()
        launcher.join()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ctrl_c_ends_all_processes(script: Path, tmp_path: Path) -> None:
    with sleeping(script, tmp_path) as (launcher, pids):
        os.kill(launcher.pid, signal.SIGINT)
        launcher.join(DEADLINE)
        assert launcher.exitcode == 130
        assert [pid for pid in pids if alive(pid)] == []
    assert left(tmp_path) == []


def test_processes_do_not_outlive_a_launcher_that_was_killed(script: Path, tmp_path: Path) -> None:
    with sleeping(script, tmp_path) as (launcher, pids):
        launcher.kill()
        launcher.join()
        wait_until(lambda: not any(map(alive, pids)), "the ranks live on")


# Usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing argument 'train.py'"),
        (["SCRIPT"], "Missing option '--stages'"),
        (["--stages", "2"], "Missing argument 'train.py'"),
        (["--stages", "0", "SCRIPT"], "Invalid value for '--stages'"),
        (["--stages", "x", "SCRIPT"], "Invalid value for '--stages'"),
        (["--stages", "2", "none.py"], "there is no file 'none.py'"),
        (["--stages", "2", "."], "there is no file '.'"),
        (["--stages", "2", "-m", "no_such.module"], "there is no module 'no_such.module': 'no_such' is neither"),
        (["--stages", "3", "--nnodes", "2", "--rdzv-endpoint", "h:1", "SCRIPT"], "3 processes cannot be divided"),
        (["--stages", "2", "--nnodes", "2", "SCRIPT"], "2 machines need one address to connect to"),
        (["--stages", "2", "--nnodes", "2", "--master", "h:1", "SCRIPT"], "--master needs --node-rank"),
        (["--stages", "2", "--master", "h:1", "SCRIPT"], "are for several machines"),
        (["--stages", "2", "--node-rank", "0", "SCRIPT"], "are for several machines"),
        (["--stages", "2", "--nnodes", "2", "--master", "h:1", "--node-rank", "2", "SCRIPT"], "2 is too high"),
        (["--stages", "2", "--nnodes", "2", "--master", "h:1", "--rdzv-endpoint", "h:1", "SCRIPT"], "need one address"),
        (
            ["--stages", "2", "--nnodes", "2", "--rdzv-endpoint", "h:1", "--node-rank", "1", "SCRIPT"],
            "--rdzv-endpoint does not",
        ),
        (["--stages", "2", "--nnodes", "2", "--rdzv-endpoint", "h", "SCRIPT"], "'h' is not HOST:PORT"),
        (["--stages", "2", "--nnodes", "2", "--master", ":5", "SCRIPT"], "':5' is not HOST:PORT"),
        (["--stages", "2", "--nnodes", "2", "--master", "h:70000", "SCRIPT"], "'h:70000' is not HOST:PORT"),
        (["--stages", "2", "--nnodes", "2", "--rdzv-endpoint", "no.invalid:1", "SCRIPT"], "'no.invalid' cannot be"),
        (["--stages", "2", "--log-dir", "SCRIPT", "SCRIPT"], "cannot write to --log-dir"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], script: Path, argv: list[str], message: str) -> None:
    assert main(["run", *(str(script) if word == "SCRIPT" else word for word in argv)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "The output of rank 0 is shown" in out
    assert "penstock run --stages 4 train.py --epochs 3" in out
    assert "the first error is shown, and the command returns its exit code" in out


def test_a_rank_that_starts_after_its_launcher_was_killed_ends(tmp_path: Path) -> None:
    """The launcher may be killed while a rank's interpreter starts: its parent is then another process already."""
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    gone = run(python("-c", "import os; print(os.getpid())"), environment()).stdout.strip()
    done = run(python(Path(run_worker.__file__), script), environment(PENSTOCK_LAUNCHER=gone))
    assert done.returncode == 1


def test_the_time_of_a_lookup_is_set_before_the_first_one(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The resolver reads RES_OPTIONS once. With its default, a lost query stalled all ranks for five seconds."""
    found = []

    def look_up(*_: Any) -> None:
        found.append(os.environ["RES_OPTIONS"])
        raise OSError

    monkeypatch.setenv("RES_OPTIONS", "")
    monkeypatch.delenv("RES_OPTIONS")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert main(["run", "--stages", "2", "--nnodes", "2", "--rdzv-endpoint", "host0:29500", "train.py"]) == 2
    assert found == ["timeout:1"]
    assert "the host name 'host0' cannot be resolved" in capsys.readouterr().err
