"""The README tells the truth: its programs run, its commands print what it shows, its numbers are the simulator's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.cli import main
from penstock.schedule import Costs, Simulation, build, simulate
from penstock.viz import to_text_lines
from tests.support.programs import run, torchrun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROGRAMS = [code for language, code in BLOCKS if language == "python"]
UNDER_TORCHRUN = [code for code in PROGRAMS if "ps.Mesh(" in code]
IN_PROCESS = [code for code in PROGRAMS if code not in UNDER_TORCHRUN]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def execute(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(code, "README.md", "exec"), names)
    if isinstance(pipe := names.get("pipe"), ps.Pipeline):
        pipe.close()
    return names


def program(word: str) -> dict[str, Any]:
    (code,) = (code for code in IN_PROCESS if word in code)
    return execute(code)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"text", "console", "python"}
    assert len(UNDER_TORCHRUN) == 1
    assert len(IN_PROCESS) == 5


def test_train_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    program("mnist.load()")
    out = capsys.readouterr().out
    assert re.search(r"^epoch 2  50 steps in \S+ s  loss 0\.\d{4}  \S+ samples/s  bubble \S+%$", out, re.MULTILINE)
    (right,) = re.findall(r"^(\S+)% of the test digits are right$", out, re.MULTILINE)
    assert float(right) > 85


def test_split_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    plan = program("ps.cut(")["plan"]
    assert [(edge.src, edge.dst) for edge in plan.edges] == [(0, 1), (0, 2), (1, 2)]
    assert "3 stages compute what the whole model computes" in capsys.readouterr().out


def test_let_it_plan(capsys: pytest.CaptureFixture[str]) -> None:
    planned = program("ps.plan(")["planned"]
    assert planned.configuration.samples * planned.microbatches >= 128
    assert "a step of" in capsys.readouterr().out


def test_the_same_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDER_TORCHRUN[0], encoding="utf-8")
    done = run(torchrun("--standalone", "--nproc-per-node=4", script))
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"rank (\d): loss (\d\.\d{4})", done.stdout))  # unbuffered ranks may share a line
    assert sorted(losses) == ["0", "1", "2", "3"]
    assert len(set(losses.values())) == 1


def test_own_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = program("from_text")["schedule"]
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == ("mine", 2, 3)
    assert capsys.readouterr().out.startswith("bubble 25.0%\ntensor(")


@pytest.mark.parametrize(("name", "reduction"), [("average", None), ("total", "sum"), ("per_token", None)])
def test_losses(name: str, reduction: str | None) -> None:
    """Each gives the loss and the gradients that the plain model has on the whole of an uneven mini-batch."""
    loss_fn: Callable[..., Any] = program("def per_token")[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5)).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    y = torch.tensor([0, 0, 1, 2, 0, 4, 3]) if name == "per_token" else torch.randn(7, 5, dtype=torch.float64)
    expected = loss_fn(model(x), y)
    if isinstance(expected, tuple):
        expected = expected[0] / expected[1]
    grads = torch.autograd.grad(expected, list(model.parameters()))
    plan = ps.split(model, balance=[2, 1])
    with ps.Pipeline(plan, loss_fn, microbatches=3, reduction=reduction, devices=["cpu"] * 2) as pipe:
        torch.testing.assert_close(pipe.step(x, y).loss, expected.detach())
        torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], list(grads))


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``$ penstock`` prints what stands below it. ``$ cat FILE`` makes the file. ``$ make`` has a rule."""
    monkeypatch.chdir(tmp_path)
    console = "".join(code for language, code in BLOCKS if language == "console")
    ran = 0
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", console, re.MULTILINE):
        word, *arguments = command.split()
        if word == "cat":
            Path(arguments[0]).write_text(expected, encoding="utf-8")
        elif word == "make":
            assert f"\n{arguments[0]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")
        else:
            assert word == "penstock"
            main(arguments)
            printed = capsys.readouterr()
            assert printed.out + printed.err == expected
            ran += 1
    assert ran == 1


def simulated(name: str) -> Simulation:
    takes_two = name in ("interleaved", "looped_bfs")
    schedule = build(name, 4, 8, 2 if takes_two else None)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // 4))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_pictures(name: str) -> None:
    simulation = simulated(name)
    drawn = [line for line in to_text_lines(simulation).splitlines() if line.startswith("rank ") and "·" in line]
    assert len(drawn) == 4
    for line in drawn:
        assert f" {line}\n" in README
    assert f"{simulation.bubble:.1%}" in README


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
