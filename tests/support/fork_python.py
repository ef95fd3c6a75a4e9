"""An executable that is used like ``python`` and runs scripts in forks of a process that has imported torch.

    fork_python() train.py …  ──arguments, environment, files──▶  _supervise: fork and wait ──▶ _run_program: train.py
    proxy of the script  ◀──────────────exit status────────────

Importing torch and penstock takes two to three seconds of a core, five times over in a test with four ranks. A script
that runs like this has its own process, environment, files and ``__main__``; this executable is its
``sys.executable``. It ends as under Python: through ``sys.excepthook``, ``atexit`` and interpreter shutdown, with its
exit code. Signals are forwarded to it, and it is killed with its proxy. Only its parent differs, and torch is already
imported when it starts.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import io
import os
import pickle
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import types
import warnings
from collections.abc import Sequence
from multiprocessing import process, spawn
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.support import ranks

__all__ = ["fork_python"]

_MAIN = process.current_process()  # this module is imported before any fork

_FILE = """#!{python} -IS
import os, pickle, select, signal, socket, sys

files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):
            files.append(int(name))
    except OSError:  # the folder itself
        pass
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
order = pickle.dumps((files, [__file__, *sys.argv[1:]], dict(os.environ), os.getcwd()))
socket.send_fds(line, [len(order).to_bytes(8, "big")], files)
signals, noted = os.pipe()  # a signal just before a call that waits would be seen after it
os.set_blocking(noted, False)
signal.set_wakeup_fd(noted)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda *_: None)
line.sendall(order)
for file in files:
    os.close(file)
while line not in select.select([line, signals], [], [])[0]:
    line.sendall(os.read(signals, 16))
status = int.from_bytes(line.recv(8), "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.waitstatus_to_exitcode(status))
"""


@functools.cache
def fork_python() -> str:
    """The path of the executable, which exists until this process ends."""
    place = Path(tempfile.mkdtemp(prefix="penstock_fork_python"))
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(place / "line"))
    server.listen()
    made = ranks.forkserver_context().Process(target=_serve, args=(server,), daemon=True)
    made.start()
    server.close()
    file = place / "python"
    file.write_text(_FILE.format(python=sys.executable, address=str(place / "line")), encoding="utf-8")
    file.chmod(0o755)
    atexit.register(_end, made, place)
    return str(file)


def _end(server: Any, place: Path) -> None:
    server.kill()
    server.join()
    shutil.rmtree(place)


def _serve(server: socket.socket) -> None:
    tests = process.parent_process()
    assert tests is not None
    while tests.sentinel not in select.select([server, tests.sentinel], [], [])[0]:
        line, _ = server.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            server.close()
            _supervise(line)
        line.close()


def _supervise(line: socket.socket) -> NoReturn:
    """Start a program, forward signals to it and report its exit status; kill it when its proxy is gone."""
    size, files, _, _ = socket.recv_fds(line, 8, 250)
    order = b""
    while len(order) < int.from_bytes(size, "big"):
        order += line.recv(1 << 16)
    if (number := os.fork()) == 0:
        line.close()
        numbers, arguments, environment, place = pickle.loads(order)
        _place_files(files, numbers)
        _run_program(arguments, environment, place)
    for file in files:
        os.close(file)
    gone = os.pidfd_open(number)
    while gone not in select.select([gone, line], [], [])[0]:
        for asked in line.recv(16) or bytes([signal.SIGKILL]):
            os.kill(number, asked)
    status = os.waitpid(number, 0)[1]
    with contextlib.suppress(BrokenPipeError):
        line.sendall(status.to_bytes(8, "big"))
    os._exit(0)


def _place_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open files to the given descriptor numbers."""
    above = max(numbers, default=0) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _run_program(arguments: list[str], environment: dict[str, str], place: str) -> NoReturn:
    """Emulate a start of Python with ``arguments``, from the environment to the exit code."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(place)
    tempfile.tempdir = None  # reset the cached directory
    process._parent_process = None  # type: ignore[attr-defined]
    process._current_process = _MAIN  # type: ignore[attr-defined]
    _MAIN.name = "MainProcess"
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.executable = arguments.pop(0)
    spawn.set_executable(sys.executable)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    while arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        option = arguments.pop(0)
        unbuffered |= option == "-u"
        if option.startswith("-W"):
            sys.warnoptions.append(option[2:] or arguments.pop(0))
            warnings._processoptions(sys.warnoptions[-1:])  # type: ignore[attr-defined]
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if number and unbuffered:
            stream = io.TextIOWrapper(open(number, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        else:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            stream.reconfigure(line_buffering=number == 2 or os.isatty(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    status = _run(arguments)
    ctypes.pythonapi.Py_Exit(ctypes.c_int(status))
    raise AssertionError("unreachable: Py_Exit does not return")


def _run(arguments: list[str]) -> int:
    kind, sys.argv = arguments[0], list(arguments)
    sys.path[:0] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    try:
        if kind == "-m":
            sys.argv, sys.path[0] = ["-m", *arguments[2:]], os.getcwd()
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        else:
            sys.path[0] = str(Path(kind).resolve().parent)
            main.__file__ = file = str(Path(kind).absolute())
            exec(compile(Path(kind).read_bytes(), file, "exec"), main.__dict__)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__.tb_next if error.__traceback__ else None  # the script's frames only
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0
