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


def compare(printed: str, command: str) -> None:
    """Compare the first epoch, except times; a slow machine also prints progress within it."""
    first, *epochs = (line for line in printed.splitlines() if "  step " not in line)
    shown, *expected = CONSOLE[command].splitlines()
    assert first == shown
    found = [EPOCH.fullmatch(line) for line in epochs]
    wanted = [EPOCH.fullmatch(line) for line in expected]
    assert None not in wanted
    assert None not in found, printed
    for ours, its in zip(found, wanted[:1], strict=True):
        assert ours[1] == its[1]
        assert abs(float(ours[2]) - float(its[2])) < 0.02  # rounding differs from machine to machine


def start(command: str, tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The output of a documented command, with changes to the program."""
    assert command in COMMANDS
    launcher, *arguments = command.split()
    launch = {"torchrun": torchrun, "penstock": partial(forked_python, "-m", "penstock")}[launcher]
    program = PROGRAM
    for old, new in (("range(1, 4)", "range(1, 2)"), *changes):
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run(launch(*arguments), environment(OMP_NUM_THREADS="1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_epoch_under_penstock_run(tmp_path: Path) -> None:
    """All commands print the same; here for one epoch. test_docs runs threads, and other tests run two machines."""
    assert len(COMMANDS) == 4
    printed = start("penstock run --stages 4 train.py", tmp_path)
    for same in COMMANDS:
        compare(printed, same)


def test_some_steps_under_torchrun(tmp_path: Path) -> None:
    few = ("train.batches(80, shuffle=epoch)", "list(train.batches(80, shuffle=epoch))[:5]")
    command = "torchrun --nproc-per-node=4 train.py"
    first, *_, epoch = start(command, tmp_path, few).splitlines()
    assert first == CONSOLE[command].splitlines()[0]
    assert epoch.startswith("epoch 1  5 steps in ")


def test_documented_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    options = capsys.readouterr().out
    named = set(re.findall(r"`(?:penstock run )?(--[a-z-]+)", DOCUMENT)) - {"--rdzv-backend", "--cpus-per-task"}
    for option in named - {"--master-addr", "--master-port"}:
        assert option in options, option
