"""The documents tell the truth: their programs run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import penstock as ps

DOCS = Path(__file__).parents[1] / "docs"
PROGRAMS = [
    pytest.param(code, id=f"{path.stem}: {title}")
    for path in sorted(DOCS.glob("*.md"))
    for title, part in re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    for code in re.findall(r"^```python\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("code", PROGRAMS)
def test_program(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it writes its files
    names: dict[str, object] = {"__name__": "docs"}
    exec(compile(code, "docs", "exec"), names)
    if isinstance(pipe := names.get("pipe"), ps.Pipeline):
        pipe.close()


def test_there_are_programs() -> None:
    assert len(PROGRAMS) >= 6
