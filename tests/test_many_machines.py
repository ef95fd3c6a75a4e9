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
EPOCH = re.compile(r"(epoch \d)  (\d+) steps in \d+\.\d s  loss (\d\.\d{4})  [\d,]+ samples/s  bubble \d+\.\d%")


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
        assert (ours[1], ours[2]) == (its[1], its[2])
        assert abs(float(ours[3]) - float(its[3])) < 0.02  # rounding differs from machine to machine


def start(command: str, tmp_path: Path, *changes: tuple[str, str]) -> str:
    """The output of a documented command, with changes to the program."""
    assert command in COMMANDS
    launcher, *arguments = command.split()
    penstock = partial(forked_python, "-m", "penstock")
    launch = {"python": forked_python, "torchrun": torchrun, "penstock": penstock}[launcher]
    program = PROGRAM
    for old, new in (("range(1, 4)", "range(1, 2)"), *changes):
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "train.py").write_text(program, encoding="utf-8")
    done = run(launch(*arguments), environment(OMP_NUM_THREADS="1"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_epoch_in_threads(tmp_path: Path) -> None:
    """All commands print the same; here for one epoch, where it is fastest. Other tests run two machines."""
    assert len(COMMANDS) == 4
    printed = start("python train.py", tmp_path)
    for same in COMMANDS:
        compare(printed, same)


def test_some_steps_under_both_launchers(tmp_path: Path) -> None:
    """The first line is the documented one, and the loss is that of threads."""
    few = ("train.batches(80, shuffle=epoch)", "list(train.batches(80, shuffle=epoch))[:5]")
    losses = []
    for command in ("python train.py", "torchrun --nproc-per-node=4 train.py", "penstock run --stages 4 train.py"):
        first, *_, epoch = start(command, tmp_path, few).splitlines()
        assert first == CONSOLE[command].splitlines()[0]
        found = EPOCH.fullmatch(epoch)
        assert found is not None, epoch
        assert found[2] == "5"
        losses.append(float(found[3]))
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-4)


def test_documented_options_exist(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    options = capsys.readouterr().out
    named = set(re.findall(r"`(?:penstock run )?(--[a-z-]+)", DOCUMENT)) - {"--rdzv-backend", "--cpus-per-task"}
    for option in named - {"--master-addr", "--master-port"}:
        assert option in options, option
