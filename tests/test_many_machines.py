"""The program of docs/many-machines.md runs with the documented commands and prints the documented output."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from penstock.cli import main
from tests.support.programs import environment, forked_python, run, torchrun

DOCUMENT = (Path(__file__).parents[1] / "docs" / "many-machines.md").read_text(encoding="utf-8")
PROGRAM, *_ = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
CONSOLE = dict(re.findall(r"^```console\n\$ (.*)\n((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE))
COMMANDS = [command for command in CONSOLE if command.endswith(" train.py")]
EPOCH = re.compile(r"(epoch \d)  50 steps in \d+\.\d s  loss (\d\.\d{4})  [\d,]+ samples/s  bubble \d+\.\d%")


def compare(printed: str, command: str, number: int) -> None:
    """Compare line by line, except times; a slow machine also prints progress within an epoch."""
    first, *epochs = (line for line in printed.splitlines() if "  step " not in line)
    shown, *expected = CONSOLE[command].splitlines()
    assert first == shown
    found = [EPOCH.fullmatch(line) for line in epochs]
    wanted = [EPOCH.fullmatch(line) for line in expected]
    assert None not in wanted
    assert None not in found, printed
    for ours, its in zip(found, wanted[:number], strict=True):
        assert ours[1] == its[1]
        assert abs(float(ours[2]) - float(its[2])) < 0.02  # rounding differs from machine to machine


@pytest.mark.parametrize(
    ("command", "epochs"), [("torchrun --nproc-per-node=4 train.py", 3), ("penstock run --stages 4 train.py", 1)]
)
def test_commands(tmp_path: Path, command: str, epochs: int) -> None:
    """All commands print the same; test_docs runs threads, and other tests run two machines."""
    assert command in COMMANDS
    assert len(COMMANDS) == 4
    launcher, *arguments = command.split()
    start = {"torchrun": torchrun, "penstock": partial(forked_python, "-m", "penstock")}[launcher]
    assert "range(1, 4)" in PROGRAM
    program = PROGRAM.replace("range(1, 4)", f"range(1, {epochs + 1})")
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run(start(*arguments), environment(OMP_NUM_THREADS="1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for same in COMMANDS:
        compare(done.stdout, same, epochs)


def test_documented_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    options = capsys.readouterr().out
    named = set(re.findall(r"`(?:penstock run )?(--[a-z-]+)", DOCUMENT)) - {"--rdzv-backend", "--cpus-per-task"}
    for option in named - {"--master-addr", "--master-port"}:
        assert option in options, option
