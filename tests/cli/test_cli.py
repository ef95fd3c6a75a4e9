"""The command line and ``penstock schedule``: output, errors and exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.schedule.registry import build
from penstock.schedule.text import from_csv, from_text, to_text
from tests.support.fork_python import fork_python


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    assert main(argv) == code
    return capsys.readouterr()


# Draw -------------------------------------------------------------------------------------------------------


def test_draw(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output(capsys, "schedule", "1f1b", "-p", "2", "-m", "3")
    assert out.startswith("1f1b: 2 ranks, 2 stages, 3 micro-batches\n\nrank 0  F0--F1--····")
    assert "bubble 25.0%   simulated time 12\n" in out
    assert err == ""


def test_draw_with_costs(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output(capsys, "schedule", "gpipe", "-p", "2", "-m", "1", "--costs", "f=2, b=5,comm=0.5")
    assert "simulated time 15" in out  # 2 + 0.5 + 2 + 5 + 0.5 + 5


def test_costs_are_those_of_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    for name, v in (("1f1b", "1"), ("interleaved", "2")):
        out, _ = output(capsys, "schedule", name, "-p", "1", "-m", "4", *(["-v", v] if v == "2" else []))
        assert "simulated time 12" in out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = output(capsys, "schedule", "--list")
    names = [line.split()[0] for line in out.splitlines()]
    assert {"gpipe", "1f1b", "zbv", "forward_only"} <= set(names)
    for name in names:
        output(capsys, "schedule", name, "-p", "2", "-m", "3")


@pytest.mark.slow
def test_auto(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = output(capsys, "schedule", "auto", "-p", "2", "-m", "4")
    assert out.startswith("auto: 2 ranks, 2 stages, 4 micro-batches\n")
    assert out.endswith(
        "makespan 13, lower bound 13: no order is faster\npeak memory 2 on rank 0, with a cap of 2\n"
    )
    assert err == ""
    for shape, stages in (("loop", "0 2"), ("v", "0 3")):
        options = ["--shape", shape, "--memory", "1.5", "--costs", "w=2"]
        out, _ = output(capsys, "schedule", "Auto", "-p", "2", "-m", "4", "-v", "2", *options)
        assert f"   0  {stages} " in out
        assert "with a cap of 1.5" in out
    out, _ = output(capsys, "schedule", "auto", "-p", "2", "-m", "4", "--memory", "1", "--recompute")
    assert "R recompute" in out


# Write and verify -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["--text", "--csv"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved", "forward_only"])
def test_written_files_are_verified(capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, name: str) -> None:
    file = tmp_path / "schedule.any"
    shown, _ = output(capsys, "schedule", name, "-p", "3", "-m", "5", form)
    nothing, _ = output(capsys, "schedule", name, "-p", "3", "-m", "5", form, str(file))
    assert nothing == ""
    assert file.read_text() == shown
    read = (from_csv if form == "--csv" else from_text)(shown)
    assert read.orders == build(name, 3, 5).orders
    out, _ = output(capsys, "schedule", "--verify", str(file))
    assert "3 ranks" in out
    assert "5 micro-batches: complete, in order, free of deadlock" in out
    assert "deferred W" in out


def test_verify_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(to_text(build("1f1b", 2, 2)).encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    out, _ = output(capsys, "schedule", "--verify", "-")
    assert "free of deadlock" in out


def test_verify_explains_a_fault(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    out, err = output(capsys, "schedule", "--verify", str(file), code=1)
    assert out == ""
    assert "deadlock: rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0" in err
    assert "<-- here: waits for 1B0" in err


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  \n\n",
        b"\x89PNG\r\n\x1a\n\x00\xff",
        b"F\x000",
        b"hello",
        b"hello, world",
        b"0F0,0B0\nwhat,\n",
        b'"0F0\n',
        b"\xef\xbb\xbf",
        b"0F99999999999999999999\n",
        b"0F0\n5F0\n",
        b"999999999F0,\n",
        b"0F0,\r0B0\r",
        b'"' + b"0F0," * 50_000,
    ],
)
def test_files_that_hold_no_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    out, err = output(capsys, "schedule", "--verify", str(file), code=1)
    assert out == ""
    assert err.startswith("penstock: ")


def test_files_that_cannot_be_read_or_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "file")
    for argv in (["--verify", missing], ["1f1b", "--csv", missing]):
        assert "No such file or directory" in output(capsys, "schedule", *argv, code=2)[1]
    for argv in (["--verify", str(tmp_path)], ["1f1b", "--text", str(tmp_path)]):
        assert "Is a directory" in output(capsys, "schedule", *argv, code=2)[1]
    assert "null" in output(capsys, "schedule", "--verify", "a\0b", code=2)[1]


# Usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "Missing command"),
        (["schedul"], "No such command 'schedul'. Did you mean 'schedule'?"),
        (["schedule"], "no schedule: give a name"),
        (["schedule", "1f1"], "1f1b"),
        (["schedule", "1f1b", "-p", "0"], "Invalid value for '-p'"),
        (["schedule", "1f1b", "-m", "x"], "Invalid value for '-m'"),
        (["schedule", "1f1b", "-m", "1.5"], "Invalid value for '-m'"),
        (["schedule", "1f1b", "-v", "2"], "1f1b"),
        (["schedule", "1f1b", "--costs", "f"], "'f' is not a cost: expected NAME=NUMBER"),
        (["schedule", "1f1b", "--costs", ""], "'' is not a cost"),
        (
            ["schedule", "1f1b", "--costs", "g=1"],
            "'g=1' is not a cost: expected NAME=NUMBER, a number from 0, with each NAME once and one of f, i,",
        ),
        (["schedule", "1f1b", "--costs", "f=fast"], "'f=fast' is not a cost: expected NAME=NUMBER, a number from 0"),
        (["schedule", "1f1b", "--costs", "f=-1"], "'f=-1' is not a cost: expected NAME=NUMBER, a number from 0"),
        (["schedule", "1f1b", "--costs", "f=inf"], "'f=inf' is not a cost: expected NAME=NUMBER, a number from 0"),
        (["schedule", "1f1b", "--costs", "f=nan"], "'f=nan' is not a cost: expected NAME=NUMBER, a number from 0"),
        (
            ["schedule", "1f1b", "--costs", "f=1,f=2"],
            "'f=2' is not a cost: expected NAME=NUMBER, a number from 0, with each NAME once",
        ),
        (["schedule", "1f1b", "--csv", "--text"], "--csv and --text exclude each other"),
        (["schedule", "1f1b", "--verify", "file"], "leave out '1f1b'"),
        (["schedule", "1f1b", "--memory", "2"], "--memory, --shape and --recompute are for the schedule 'auto'"),
        (["schedule", "1f1b", "--recompute"], "--memory, --shape and --recompute are for the schedule 'auto'"),
        (["schedule", "auto", "--memory", "x"], "Invalid value for '--memory'"),
        (["schedule", "auto", "--memory", "0.5"], "no order fits: rank 0 needs at least 1"),
        (["schedule", "auto", "--shape", "v", "-v", "3"], "--shape v has 2 stages on each rank, not 3"),
        (["schedule", "auto", "--shape", "w"], "'w' is not one of 'loop', 'v'"),
        (["schedule", "1f1b", "--what"], "No such option: --what"),
    ],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    out, err = output(capsys, *argv, code=2)
    assert out == ""
    assert message in err
    assert err.startswith("penstock: ")
    assert err.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert "penstock schedule zbv -p 4 -m 8" in output(capsys, "--help")[0]
    out, _ = output(capsys, "schedule", "--help")
    assert "penstock schedule --verify order.csv" in out
    assert "comm latency between ranks" in " ".join(out.replace("│", "").split())


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "--version")[0].startswith("penstock ")


# As a process -----------------------------------------------------------------------------------------------


def test_python_dash_m() -> None:
    command = [sys.executable, "-m", "penstock", "schedule", "1f1b", "-p", "2", "-m", "2", "--text"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == to_text(build("1f1b", 2, 2)).rstrip("\n") + "\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """As in ``penstock schedule zbv ... --csv | head -1``: the rest of the output has nowhere to go."""
    command = [fork_python(), "-m", "penstock", "schedule", "zbv", "-p", "16", "-m", "200", "--csv"]
    read, write = os.pipe()
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, text=True) as process:
        os.close(write)
        os.read(read, 10)
        os.close(read)
        _, err = process.communicate(timeout=60)
    assert err == ""


def test_a_terminal_without_unicode() -> None:
    command = [sys.executable, "-m", "penstock", "schedule", "1f1b", "-p", "2", "-m", "2"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "? idle" in done.stdout
