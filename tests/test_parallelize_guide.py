"""The parallelize guide's program has the same loss in one process and, with each strategy, in four."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

import penstock as ps
from tests.support.ranks import start_ranks

DOCS = Path(__file__).parents[1] / "docs"
(PROGRAM,) = (
    code
    for path in sorted(DOCS.glob("*.md"))
    for code in re.findall(r"^```python\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if "parallelize=" in code
)


def run_program(rank: int, strategy: str | None) -> float:
    before, sys.argv = sys.argv, ["train.py", strategy or ""]
    try:
        names: dict[str, object] = {"__name__": "guide"}
        exec(compile(PROGRAM, "guide", "exec"), names)
    finally:
        sys.argv = before
    pipe, result = names["pipe"], names["result"]
    assert isinstance(pipe, ps.Pipeline)
    assert isinstance(result, ps.StepResult)
    pipe.close()
    return float(result.loss)


def test_all_strategies_give_the_same_loss() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected = run_program(0, None)
    torch.set_num_threads(threads)
    with start_ranks(4) as ranks:
        for strategy in ("ddp", "fsdp", "tensor"):
            for found in ranks.check(run_program, strategy, timeout=120):
                assert found == pytest.approx(expected, abs=1e-4)
