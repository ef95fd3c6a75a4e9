"""``penstock completion``: what shells make of it, as far as they are here."""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from penstock.cli import main, parser
from penstock.completion.bash import bash
from penstock.completion.fish import fish
from penstock.completion.words import words_of
from penstock.completion.zsh import zsh
from penstock.schedule.registry import SCHEDULES

PROGRAM, COMMANDS = words_of(parser())

# What is typed after "penstock ", and what is offered then in a directory with the files of ``place``.
LINES = [
    ("sch", ["schedule"]),
    ("d", ["demo", "doctor"]),
    ("--ver", ["--version"]),
    ("schedule zb", ["zb_h1", "zb_h2", "zbv"]),
    ("schedule au", ["auto"]),
    ("schedule --memory=4 au", ["auto"]),
    ("schedule -p 4 1f", ["1f1b"]),
    ("schedule 1f1b --me", ["--memory"]),
    ("schedule auto --shape ", ["loop", "v"]),
    ("schedule 1f1b -p ", []),  # a number
    ("schedule 1f1b --csv t", ["train.py", "two words.csv"]),
    ("schedule 1f1b --csv --l", ["--list"]),
    ("schedule --verify=t", ["train.py", "two words.csv"]),
    ("demo --strategy ", ["pipelined", "sharded"]),
    ("demo --strategy=", ["pipelined", "sharded"]),
    ("demo --strategy=s", ["sharded"]),
    ("demo --strategy=sharded --see", ["--seed"]),
    ("demo --schedule v", ["v_half", "v_min"]),
    ("plan --costs t", ["train.py", "two words.csv"]),
    ("demo --data d", ["data"]),
    ("demo --data t", []),  # a directory
    ("demo --data=d", ["data"]),
    ("report t", ["train.py", "two words.csv"]),
    ("run --stages 4 tr", ["train.py"]),
    ("run --stages=4 tr", ["train.py"]),
    ("run --cpu --log-dir d", ["data"]),
    ("run --stages 4 train.py --data t", ["train.py", "two words.csv"]),  # not our --data
    ("run --stages 4 train.py --", []),
    ("completion z", ["zsh"]),
    ("unknown ", []),
    ("run --stages 4 train.py demo --", []),
]


def shell(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def complete(line: str, place: Path, script: str | None = None) -> list[str]:
    """What bash offers for ``penstock <line>`` with the cursor at its end; readline takes '=' for a word, too."""
    (place / "penstock.bash").write_text(script or bash(PROGRAM, COMMANDS))
    words = ["penstock", *re.sub("=", " = ", line).split(), *([""] if not line or line.endswith((" ", "=")) else [])]
    if words[-2:] == ["=", ""]:
        del words[-1]
    quoted = " ".join(f"'{word}'" for word in words)
    ask = f"source penstock.bash; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _penstock; "
    return shell("bash", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"', cwd=place).splitlines()


# bash -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    (tmp_path / "two words.csv").touch()
    (tmp_path / "data").mkdir()
    return tmp_path


@pytest.mark.parametrize(("line", "offered"), LINES)
def test_bash(place: Path, line: str, offered: list[str]) -> None:
    assert sorted(filter(None, complete(line, place))) == offered


def test_bash_offers_every_command_and_option(place: Path) -> None:
    assert set(complete("", place)) == {command.name for command in COMMANDS} | set(PROGRAM.flags)
    for command in COMMANDS:
        assert set(complete(f"{command.name} -", place)) == set(command.flags)
    assert {*SCHEDULES, "auto"} == set(complete("schedule ", place))


def test_a_new_command_is_there_by_itself(place: Path) -> None:
    grown = parser()
    (commands,) = (action for action in grown._actions if isinstance(action, argparse._SubParsersAction))
    new = commands.add_parser("invent", help="it's [new]: 100%% so")
    new.add_argument("--colour", choices=("red", "green"), help="what's it")
    new.add_argument("--secret", help=argparse.SUPPRESS)
    words = words_of(grown)
    assert complete("invent --colour ", place, bash(*words)) == ["red", "green"]
    assert "--secret" not in bash(*words)
    assert r"'invent:it'\''s [new]\: 100% so'" in zsh(*words)
    assert r"-a invent -d 'it\'s [new]: 100% so'" in fish(*words)


# zsh and fish -----------------------------------------------------------------------------------------------


def test_zsh(tmp_path: Path) -> None:
    script = zsh(PROGRAM, COMMANDS)
    lines = script.splitlines()
    assert lines[0] == "#compdef penstock"
    for command in COMMANDS:
        begin = lines.index(f"                {command.name})")
        block = lines[begin : lines.index("                    ;;", begin)]
        assert block[1].split()[0] == "_arguments"
        specs = [line.strip().removesuffix(" \\") for line in block[2:]]
        assert all(re.fullmatch(r"'([^']|'\\'')*'", spec) for spec in specs)  # one word each, to the shell
        found = {flag for spec in specs for flag in re.findall(r"^'(?:\([^)]*\))?(-[-\w]+)", spec)}
        assert found == set(command.flags)
    assert "'--strategy=[" in script
    assert ":strategy:(pipelined sharded)'" in script
    assert "--csv=[write it as CSV, one row per rank]::FILE:_files'" in script  # which may be left out
    assert "_arguments -A '-*'" in script
    assert script.count("{") == script.count("}")
    if shutil.which("zsh"):
        (tmp_path / "_penstock").write_text(script)
        shell("zsh", "-n", str(tmp_path / "_penstock"))


def test_fish(tmp_path: Path) -> None:
    script = fish(PROGRAM, COMMANDS)
    for line in script[script.index("complete -c") :].splitlines():
        assert line.startswith("complete -c penstock")
        assert len(re.findall(r"(?<!\\)'", line)) % 2 == 0
    for command in COMMANDS:
        when = f"__penstock_command {command.name}'", f"__penstock_{command.name}_itself "
        its = [line for line in script.splitlines() if any(word in line for word in when)]
        found = {f"--{name}" for line in its for name in re.findall(r" -l ([-\w]+)", line)}
        assert found == {flag for flag in command.flags if flag.startswith("--")}
    assert "_command demo' -l strategy -x -a 'pipelined sharded' -d" in script
    if shutil.which("fish"):
        (tmp_path / "penstock.fish").write_text(script)
        shell("fish", "--no-execute", str(tmp_path / "penstock.fish"))


ZSHRC = """\
PROMPT= PS2=
fpath=($ZDOTDIR $fpath)
autoload -Uz compinit && compinit -u -D
compadd() {  # what is added to those that are offered is written down; -A, -O and -D add nothing
    local -a offered
    if (( ! ${argv[(I)-[AOD]]} )); then
        builtin compadd -A offered "$@"
        print -rl -- $offered >> $OFFERED
    fi
    builtin compadd "$@"
}
zle -C offer list-choices _main_complete
zle-line-init() { BUFFER="penstock $TYPED"; CURSOR=$#BUFFER; zle offer; exit }
zle -N zle-line-init
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="no zsh here: apt-get install zsh")
@pytest.mark.parametrize(("line", "offered"), LINES)
def test_what_zsh_offers(place: Path, tmp_path_factory: pytest.TempPathFactory, line: str, offered: list[str]) -> None:
    """As on a terminal: only there zsh has a line to complete."""
    home = tmp_path_factory.mktemp("home")
    (home / "_penstock").write_text(zsh(PROGRAM, COMMANDS))
    (home / ".zshrc").write_text(ZSHRC)
    (home / "offered").touch()
    names = {"HOME": home, "ZDOTDIR": home, "OFFERED": home / "offered", "TYPED": line, "TERM": "xterm"}
    environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
    ours, its = pty.openpty()
    try:
        command = ["zsh", "--no-globalrcs", "-i"]
        with subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=place, env=environment) as shell:
            os.close(its)
            said = said_until_end(ours, shell)
    finally:
        os.close(ours)
    found = (home / "offered").read_text().replace("\\ ", " ").splitlines()
    assert sorted({*filter(None, found)}) == offered, said


def said_until_end(terminal: int, shell: subprocess.Popen[bytes]) -> bytes:
    said, end = b"", time.monotonic() + 60
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):  # Linux tells so that the other end is closed
                if data := os.read(terminal, 4096):
                    said += data
                    continue
        if shell.poll() is not None:
            return said
    shell.kill()
    pytest.fail(f"zsh did not end; it said {said!r}")


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish here: apt-get install fish")
@pytest.mark.parametrize(("line", "offered"), LINES)
def test_what_fish_offers(place: Path, line: str, offered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(place / "data"))
    (place / "penstock.fish").write_text(fish(PROGRAM, COMMANDS))
    found = shell("fish", "--no-config", "-c", f"source penstock.fish; complete -C 'penstock {line}'", cwd=place)
    words = [row.partition("\t")[0].rstrip("/") for row in found.splitlines()]
    before, equals, _ = line.split(" ")[-1].partition("=")  # of --option=value fish offers the whole
    assert sorted(word.removeprefix(before + "=") if equals else word for word in words) == offered


# The command ------------------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name, make in (("bash", bash), ("zsh", zsh), ("fish", fish)):
        assert main(["completion", name]) == 0
        assert capsys.readouterr().out == make(PROGRAM, COMMANDS)
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
