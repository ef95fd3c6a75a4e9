"""Programs and commands of the documents run and print the output that the documents show.

The Python blocks of a page are independent programs, except on the pages of ``IN_ORDER``, where each block continues
the one before. The text after a block and the line "It prints:" is its output. A comment before a block for several
processes gives their number, and ``BEFORE`` has the code that precedes such a block. Commands of ``penstock schedule``
and ``penstock plan`` are run, too; ``SHOWN`` lists the other commands.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import penstock as ps
from penstock.cli import main
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {path.stem: path.read_text("utf-8") for path in sorted(DOCS.glob("*.md"))}
IN_ORDER = ["two-hundred-lines"]
SHOWN = (
    *("penstock run ", "torchrun ", "python train.py", "python -m penstock.compat.alias "),
    *("make ", "pip install ."),
)
"""Commands that start whole programs: in tests of their own, or the reader's."""


_IMPORTS = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\nimport penstock as ps\n\n"
BEFORE = {
    "AsyncPipe(": """
from penstock.compat.fairscale.nn import model_parallel
from penstock.compat.fairscale.nn.pipe import AsyncPipe, LazyModule
model_parallel.initialize_model_parallel(1, 2)
x, y = torch.randn(8, 10), torch.randint(5, (8,))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
""",
    "ps.Lazy(make)": """
x, y = torch.randn(8, 10), torch.randint(5, (8,))
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
""",
    "ps.plan(": """
from functools import partial
from penstock.profile import links
ps.plan = partial(ps.plan, seconds=0.3, measure_seconds=0.1)  # not as long as by default
links.ROUNDS = 8
model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
x, loss_fn = torch.randn(16, 8), F.mse_loss
""",
    "torchdistpackage": """
from torch.nn.parallel import DistributedDataParallel
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(1, 2, 3), nn.Linear(72, 4)
        self.blocks = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU())
model = Model()
optimizer = torch.optim.SGD(model.parameters())
loader = [(torch.randn(8, 1, 8, 8), torch.randint(4, (8,))) for _ in range(2)]
""",
    "varuna": """
import argparse
from tests.compat.varuna_models import Words as Net, tokens
dry_run_input, batches, global_batch_size = tokens(2), [tokens(4), tokens(4)], 4
args = argparse.Namespace(stage_to_rank_map="0;1", chunk_size=2, fp16=False, local_rank="cpu")
""",
}
"""Code to run before the blocks for several processes, by a keyword that they contain."""


class Block(NamedTuple):
    language: str
    text: str
    heading: str
    prints: str | None
    ranks: int | None


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    end, heading = 0, "top"
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        between = page[end : match.start()]
        heading = (re.findall(r"^## (.+)$", between, re.MULTILINE) or [heading])[-1]
        if between.strip() == "It prints:":
            found[-1] = found[-1]._replace(prints=match[2])
        else:
            ranks = re.search(r"^<!-- (\d+) ranks -->\n\Z", between, re.MULTILINE)
            found.append(Block(match[1], match[2], heading, None, None if ranks is None else int(ranks[1])))
        end = match.end()
    return found


PROGRAMS = [
    pytest.param(block.text, block.prints, id=f"{name}: {block.heading}")
    for name, page in PAGES.items()
    if name not in IN_ORDER
    for block in blocks(page)
    if block.language == "python" and block.ranks is None
]
ON_RANKS = [
    pytest.param(block.text, block.ranks, id=f"{name}: {block.heading} {number}")
    for name, page in PAGES.items()
    for number, block in enumerate(blocks(page))
    if block.ranks is not None
]
COMMANDS = {
    name: "".join(block.text for block in blocks(page) if block.language == "console") for name, page in PAGES.items()
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def execute(code: str, prints: str | None, names: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs", "exec"), names)
    if prints is not None:
        assert printed.getvalue() == prints


@pytest.mark.slow
@pytest.mark.parametrize(("code", "prints"), PROGRAMS)
def test_program(code: str, prints: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the program's working directory
    names: dict[str, Any] = {"__name__": "docs"}
    code = code.replace("seconds=2, measure_seconds=1", "seconds=0.3, measure_seconds=0.1")  # not as long as shown
    try:
        execute(code, prints, names)
    finally:
        if isinstance(pipe := names.get("pipe"), ps.Pipeline):
            pipe.close()


def on_rank(rank: int, code: str, folder: Path) -> None:
    os.chdir(folder)
    exec(compile(code, "docs", "exec"), {"__name__": "docs"})


@pytest.mark.parametrize(("code", "ranks"), ON_RANKS)
def test_program_on_ranks(code: str, ranks: int, tmp_path: Path) -> None:
    (before,) = (text for keyword, text in BEFORE.items() if keyword in code)
    assert run_ranks(on_rank, ranks, f"{_IMPORTS}{before}\n{code}", tmp_path) == [None] * ranks


@pytest.mark.parametrize("name", IN_ORDER)
def test_program_in_blocks(name: str) -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    for block in blocks(PAGES[name]):
        if block.language == "python":
            execute(block.text, block.prints, names)


def test_pages_contain_programs() -> None:
    assert len(PROGRAMS) >= 30
    assert len(ON_RANKS) >= 5
    assert sum(prints is not None for _, prints in (param.values for param in PROGRAMS)) >= 9


def test_all_code_blocks_are_tested() -> None:
    for name, page in PAGES.items():
        assert page.count("\n```") == 2 * len(re.findall(r"^```\w+\n.*?^```$", page, re.MULTILINE | re.DOTALL)), name
        assert {block.language for block in blocks(page)} <= {"python", "console", "text", "bash"}, name
        for block in blocks(page):
            if block.language == "text":
                with pytest.raises(SyntaxError):  # no program is marked as text
                    compile(block.text, name, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, console in COMMANDS.items() if console])
def test_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``$ penstock schedule`` prints the text below it. ``$ cat FILE`` creates the file. ``$ make`` has a rule."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for command, expected in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", COMMANDS[name], re.MULTILINE):
        if command.startswith("cat "):
            Path(command.split()[1]).write_text(expected, encoding="utf-8")
        elif command.startswith("penstock schedule "):
            main(command.split()[1:])
            printed = capsys.readouterr()
            assert printed.out + printed.err == expected
        elif command.startswith("penstock plan --layers "):
            assert main([*command.split()[1:], "--seconds", "0.2"]) == 0
        else:
            assert command.startswith(SHOWN), command
        if command.startswith("make "):
            assert f"\n{command.split()[1]}: " in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_tutorial_length() -> None:
    code = [block.text for block in blocks(PAGES["two-hundred-lines"]) if block.language == "python"]
    assert len("".join(code).splitlines()) <= 200


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def test_figures_match_benchmark_results() -> None:
    rows = re.findall(r"^\| (.+) \|$", PAGES["memory"], re.MULTILINE)

    alive = {(row["variant"], row["alive"]): f"{row['m=4']} | {row['m=64']}" for row in results("memory")["rows"]}
    for what in ("receive buffers", "sent outputs", "input gradients"):
        assert f"1F1B: {what} | {alive['ours 1f1b', what]}" in rows
    assert f"`zb_h1`: receive buffers | {alive['ours zb_h1', 'receive buffers']}" in rows

    (model,) = (model for model in results("recompute")["models"] if model["model"] == "transformer")
    measured = {row["variant"]: row for row in model["rows"]}
    assert f"{measured['plain, whole mini-batch']['MiB']:.1f} MiB" in PAGES["memory"]
    for mode in ("never", "except_last", "always"):
        cells = [f'`"{mode}"`']
        for name in ("1f1b", "gpipe"):
            row = measured[f"ours {name}, {mode}"]
            cells += [f"{row['MiB']:.1f} MiB", "1" if mode == "never" else f"{row['over never']:.2f}"]
        assert " | ".join(cells) in rows

    offloaded = results("offload_h200")["rows"]
    shown = [row.split(" | ")[1:] for row in rows if "GiB | " in row]
    (cost,) = (row for row in results("host_cost")["rows"] if row["variant"] == "ours 1f1b")
    assert f"about {cost['µs per action']:.0f} µs" in PAGES["choosing"]
    assert cost["beyond the module"] / cost["µs per action"] == pytest.approx(0.5, abs=0.05)  # "half of it"
    assert shown == [[f"{row['peak GiB']:.1f} GiB", f"{row['seconds']:.2f} s"] for row in offloaded]


def test_contributing_names_existing_targets_and_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 70  # a page
    rules = (ROOT / "Makefile").read_text(encoding="utf-8")
    for rule in re.findall(r"\bmake (\w+)`?$", text, re.MULTILINE):
        assert f"\n{rule}: " in rules
    for path in re.findall(r"`((?:src|tests|tools|docs)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`((?:split|schedule|compat|registry)[/.][\w/]+(?:\.py|/))`", text):
        places = [ROOT / "src" / "penstock" / place / path for place in (".", "schedule")]
        assert any(place.exists() for place in places), path
