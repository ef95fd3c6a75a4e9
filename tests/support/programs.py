"""Run scripts and commands in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.cli import main
from tests.support.fork_python import fork_python
from tests.support.rank_programs import without_hostname_warnings
from tests.support.ranks import forkserver_context, free_port

__all__ = [
    "DEADLINE",
    "environment",
    "forked_python",
    "free_port",
    "python",
    "run",
    "run_all",
    "run_commands",
    "run_in_process",
    "start_command",
    "torchrun",
    "wait_until",
]

DEADLINE = 150.0  # seconds, far more than a run takes

_LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without a launcher's variables and without GPUs, with a free port for torchrun."""
    kept = {k: v for k, v in os.environ.items() if k not in _LAUNCHED and not k.startswith(("SLURM_", "PENSTOCK_"))}
    paths = kept.get("PYTHONPATH", "").split(os.pathsep)
    kept["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "PET_MASTER_PORT": str(free_port()), **variables}


def python(*arguments: object) -> list[str]:
    return [sys.executable, *map(str, arguments)]


def forked_python(*arguments: object) -> list[str]:
    """Like ``python``, but the process, like its children, starts with torch imported."""
    return [fork_python(), *map(str, arguments)]


def torchrun(*arguments: object) -> list[str]:
    return forked_python("-m", "torch.distributed.run", *arguments)


def run(
    command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one program to its end."""
    (done,) = run_all([(command, env or environment())], cwd)
    return done


def run_all(
    programs: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """Run several programs concurrently; their outputs and exit codes."""
    end = time.monotonic() + DEADLINE
    with _start_all(programs, cwd) as processes:
        done = []
        for process in processes:
            out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
            done.append(
                subprocess.CompletedProcess(process.args, process.returncode, out, without_hostname_warnings(err))
            )
        return done


@contextmanager
def _start_all(
    programs: Sequence[tuple[Sequence[str], Mapping[str, str]]], cwd: Path | None
) -> Iterator[list[subprocess.Popen[str]]]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes: list[subprocess.Popen[str]] = []
    try:
        for command, env in programs:
            made = subprocess.Popen(command, env=env, cwd=cwd, text=True, start_new_session=True, **pipes)
            processes.append(made)
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def run_commands(
    argvs: Sequence[Sequence[object]], env: Mapping[str, str], cwd: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Run ``penstock`` command lines concurrently, in processes that have imported torch already: half the time."""
    return _processes([(main, ([str(word) for word in argv],)) for argv in argvs], env, cwd)


def start_command(argv: Sequence[object], env: Mapping[str, str], cwd: Path) -> Any:
    """Start a ``penstock`` command line in a process that has imported torch, without output; its ``Process``."""
    null, words = Path(os.devnull), [str(word) for word in argv]
    process = forkserver_context().Process(target=_call, args=(main, (words,), dict(env), cwd, null, null))
    process.start()
    return process


def run_in_process(
    function: Callable[..., object], *args: object, env: Mapping[str, str], cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Run a function in a process that has imported torch; its output, and exit code 1 if it raises."""
    (done,) = _processes([(function, args)], env, cwd)
    return done


def _processes(
    calls: Sequence[tuple[Callable[..., object], tuple[object, ...]]], env: Mapping[str, str], cwd: Path
) -> list[subprocess.CompletedProcess[str]]:
    with tempfile.TemporaryDirectory() as place:
        files = [(Path(place, f"{i}.out"), Path(place, f"{i}.err")) for i in range(len(calls))]
        processes = [
            forkserver_context().Process(target=_call, args=(function, args, dict(env), cwd, *streams))
            for (function, args), streams in zip(calls, files, strict=True)
        ]
        end = time.monotonic() + DEADLINE
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(1.0, end - time.monotonic()))
                assert process.exitcode is not None, f"one of {calls} did not end within {DEADLINE:g} s"
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(
                args, process.exitcode, out.read_text(), without_hostname_warnings(err.read_text())
            )
            for (_, args), process, (out, err) in zip(calls, processes, files, strict=True)
        ]


def _call(
    function: Callable[..., object], args: tuple[object, ...], env: dict[str, str], cwd: Path, out: Path, err: Path
) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    tempfile.tempdir = None  # reset the cached directory
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # torch has been imported already
    try:
        code = function(*args)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def wait_until(condition: Callable[[], object], error: str) -> None:
    """Poll ``condition`` until it is true."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, error
        time.sleep(0.05)
