"""The README's programs run, its figures match the simulator and the benchmarks, and its links exist."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.schedule import Costs, build, simulate
from tests.support.programs import run, torchrun

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
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


def test_all_code_blocks_are_tested() -> None:
    assert {language for language, _ in BLOCKS} == {"diff", "console", "python"}
    assert len(UNDER_TORCHRUN) == 1
    assert len(IN_PROCESS) == 2
    assert README.count("\n") < 200


def test_training_loops_before_and_after() -> None:
    """Both sides of the diff end with the same weights."""
    (diff,) = (code for language, code in BLOCKS if language == "diff")
    preamble = """
import torch
import torch.nn.functional as F
from torch import nn
import penstock as ps

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).double()
batches = [(torch.randn(16, 8, dtype=torch.float64), torch.randint(8, (16,))) for _ in range(5)]
"""
    before, after = (
        execute(preamble + "".join(f"{line[1:]}\n" for line in diff.splitlines() if line[0] != sign)) for sign in "+-"
    )
    torch.testing.assert_close(after["model"].state_dict(), before["model"].state_dict())
    torch.testing.assert_close(after["loss"], before["loss"].detach())


def test_split_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    plan = program("ps.cut(")["plan"]
    assert [(edge.src, edge.dst) for edge in plan.edges] == [(0, 1), (0, 2), (1, 2)]
    assert "3 stages compute what the whole model computes" in capsys.readouterr().out


def test_a_hugging_face_model() -> None:
    assert program("LlamaForCausalLM(config)")["result"].loss > 0


def test_training_loop_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(UNDER_TORCHRUN[0], encoding="utf-8")
    done = run(torchrun("--standalone", "--nproc-per-node=4", script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = dict(re.findall(r"rank (\d): loss (\d\.\d{4})", done.stdout))  # unbuffered ranks may share a line
    assert sorted(losses) == ["0", "1", "2", "3"]
    assert len(set(losses.values())) == 1
    assert (tmp_path / "run" / "penstock.json").exists()  # in the program's working directory, not in the checkout


@pytest.mark.parametrize(("name", "reduction"), [("average", None), ("total", "sum"), ("per_token", None)])
def test_losses(name: str, reduction: str | None) -> None:
    """Each loss gives the plain model's loss and gradients on a whole, uneven mini-batch."""
    (code,) = re.findall(r"^```python\n([^`]*def per_token.*?)^```$", TRAINING, re.MULTILINE | re.DOTALL)
    loss_fn: Callable[..., Any] = execute(code)[name]
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


def test_commands() -> None:
    """``$ make`` has a rule."""
    commands = "".join(code for language, code in BLOCKS if language == "console").splitlines()
    assert commands[0] == "$ pip install ."
    for command in commands[1:]:
        _, word, rule = command.split()
        assert word == "make"
        assert f"\n{rule}: " in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_bubble_figures(name: str) -> None:
    simulation = simulate(build(name, 4, 8), Costs.per_rank(v=1))
    assert f"docs/pictures/{name}.svg" in README
    assert f"{simulation.bubble:.1%}" in README.partition("## Split")[0]


def test_figures_match_benchmark_results() -> None:
    guide = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / "benchmarks/results/one_gpu_h200.json").read_text())["rows"]:
        assert re.search(rf"[|/] {row['ms']:.1f} [|/]", README)
        assert re.search(rf"[|/] {row['ms']:.1f} [|/]", guide)
    for row in json.loads((ROOT / "benchmarks/results/transformer.json").read_text())["rows"]:
        if row["variant"] in ("ours 1f1b", "torch 1F1B"):
            assert f"{row['speed-up']:.2f}×" in README


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
