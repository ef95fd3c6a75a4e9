"""The script of docs/when-it-fails.md fails as documented, with the documented messages."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.programs import environment, forked_python, run

DOCUMENT = (Path(__file__).parents[1] / "docs" / "when-it-fails.md").read_text(encoding="utf-8")
(PROGRAM,) = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
CONSOLE = dict(re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE))


slow = pytest.mark.skipif("PENSTOCK_SLOW" not in os.environ, reason="half a minute: set PENSTOCK_SLOW=1")


# tests/train/test_watch.py tests the other two failures, too.
@pytest.mark.parametrize(
    ("failure", "code"), [("raise", 1), pytest.param("kill", 137, marks=slow), pytest.param("hang", 1, marks=slow)]
)
def test_commands(failure: str, code: int, tmp_path: Path) -> None:
    command = f"penstock run --stages 4 train.py {failure}"
    timeout = "timeout=(6, 16)" if failure == "hang" else "timeout=None"  # for slow process starts
    (tmp_path / "train.py").write_text(PROGRAM.replace("timeout=(3, 8)", timeout), encoding="utf-8")
    done = run(forked_python("-m", *command.split()), environment(OMP_NUM_THREADS="1"), cwd=tmp_path)
    assert done.returncode == code, done.stderr
    steps, messages = CONSOLE[command].split("\n\n", 1) if failure != "hang" else CONSOLE[command].split("\nrank 0 ", 1)
    assert done.stdout.splitlines() == steps.splitlines()
    written = [normalize(line) for line in done.stderr.splitlines()]
    for line in messages.splitlines():
        if "[…]" not in line:
            assert any(line_there.endswith(normalize(line)) for line_there in written), (line, done.stderr)


def normalize(line: str) -> str:
    """Drop durations, and the rank that timed out first."""
    return re.sub(r"timed out: .*, which has been", "timed out: ", re.sub(r"\b\d+ s\b", "some s", line))


def test_every_command_is_run() -> None:
    assert {command.split()[-1] for command in CONSOLE} == {"raise", "kill", "hang"}
