"""``fork_python``, which tests use to start programs, behaves like Python."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.programs import environment, forked_python, python, wait_until

PROGRAM = """
import atexit, multiprocessing, os, sys, threading, time
import beside

class Late:
    def __del__(self):
        print("gone")

print(__name__, sys.argv, sys.path[0], input()[::-1], os.environ["WORD"], os.getcwd())
os.system("echo $WORD")
print(multiprocessing.parent_process(), multiprocessing.current_process().name, file=sys.stderr)
atexit.register(lambda: print("bye", sys.exc_info()))
threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
late = Late()
"""
EXITS = {
    "by itself": PROGRAM,
    "an error": f"{PROGRAM}\ndef f():\n    raise ValueError('no')\n\n"
    "try:\n    1 / 0\nexcept ZeroDivisionError:\n    f()",
    "a hook": f"{PROGRAM}\nsys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_lineno)\n1 / 0",
    "a warning": f"{PROGRAM}\nimport warnings\nwarnings.warn('careful')\nprint('still here')",
    "no Python": "1 +",
    "exit": f"{PROGRAM}\nsys.exit()",
    "a code": f"{PROGRAM}\nsys.exit(7)",
    "a message": f"{PROGRAM}\nsys.exit('no')",
    "a signal": f"{PROGRAM}\nprint('lost?', end='')\nos.abort()",
}
COMMAND_LINES = (
    ["-c", "CODE", "a"],
    ["-u", "script.py", "-c"],
    ["-W", "error", "-c", "CODE"],
    ["-m", "script", "--", "b"],
)


def run_to_end(command: list[str], place: Path) -> tuple[int, str, str]:
    env = environment(WORD="hello", PYTHONPATH=str(place), PYTHONUNBUFFERED="")
    done = subprocess.run(command, env=env, cwd=place, input="drawer\n", capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("exit_kind", EXITS)
def test_output_and_exit_status_match_python(exit_kind: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(EXITS[exit_kind])
    (tmp_path / "beside.py").write_text("print(__name__)")
    line = COMMAND_LINES[list(EXITS).index(exit_kind) % 4]
    command = [word.replace("CODE", EXITS[exit_kind]) for word in line]
    with ThreadPoolExecutor() as pool:
        starts = [start(*command) for start in (python, forked_python)]
        expected, found = pool.map(lambda command: run_to_end(command, tmp_path), starts)
    if "-m" in line:  # the traceback contains runpy's frames
        assert found[2].splitlines()[-1:] == expected[2].splitlines()[-1:]
        assert found[:2] == expected[:2]
    else:
        assert found == expected


def test_child_processes_have_torch_imported() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import sys; print(*sys.modules)'])"
    names = subprocess.run(forked_python("-c", code), capture_output=True, text=True, timeout=120).stdout.split()
    assert {"torch", "penstock"} <= set(names)


def alive(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_signals_are_forwarded_and_orphans_are_killed() -> None:
    sleeps = "import os, signal, time; print(os.getpid(), flush=True); time.sleep(600)"
    for code, expected in ((sleeps, -15), (f"import signal; signal.signal(15, lambda *_: exit(3)); {sleeps}", 3)):
        with subprocess.Popen(forked_python("-c", code), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.terminate()
            assert process.wait(120) == expected
    with subprocess.Popen(forked_python("-c", sleeps), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        number = int(process.stdout.readline())
        process.kill()
        wait_until(lambda: not alive(number), "the program outlives its proxy")
