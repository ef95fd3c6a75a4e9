"""``ps.progress``: the items of the loop, and the lines and bars that rank 0 shows."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.train import progress as module
from penstock.train.pipeline import StepTotals
from tests.support.ranks import Ranks

LINE = re.compile(r"(?:(\S+)  )?step (\d+)(?:/(\d+))?  loss (\S+)  (\S+) samples/s  bubble (\S+)%")
LAST = re.compile(r"(?:(\S+)  )?(\d+) steps? in \S+ s  loss (\S+)  (\S+) samples/s  bubble (\S+)%")


def pipeline(**options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2))
    if "mesh" not in options:
        options["devices"] = "cpu"
    return ps.Pipeline(ps.split(model, balance=[2, 1]), nn.MSELoss(), microbatches=2, **options)


def data(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(4, 2), torch.zeros(4, 2))] * count


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_a_line_at_every_so_many_steps_and_one_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pipeline() as pipe:
        for x, y in ps.progress(data(5), pipe, every=2, label="epoch1"):
            loss = pipe.step(x, y).loss
        assert pipe.step_totals.steps == 5
    second, fourth, last = lines(capsys)
    shown = f"{float(loss):.4f}"
    assert LINE.fullmatch(second).groups()[:4] == ("epoch1", "2", "5", shown)
    assert LINE.fullmatch(fourth).groups()[:4] == ("epoch1", "4", "5", shown)
    assert LAST.fullmatch(last).groups()[:3] == ("epoch1", "5", shown)
    assert 0 <= float(LAST.fullmatch(last)[5]) <= 100


def test_lines_every_few_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pipeline() as pipe:
        for number, (x, y) in enumerate(ps.progress(iter(data(4)), pipe)):
            pipe.step(x, y)
            monkeypatch.setattr(module, "_LINE_INTERVAL", -1.0 if number == 2 else 1e9)
    line, last = lines(capsys)
    assert LAST.fullmatch(last)
    assert "step 3  loss" in line  # of an unknown number


def test_steps_per_second_without_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(ps.progress(range(3), total=7, every=3)) == [0, 1, 2]
    line, last = lines(capsys)
    assert re.fullmatch(r"step 3/7  \S+ steps/s", line)
    assert re.fullmatch(r"3 steps in \S+ s  \S+ steps/s", last)
    assert list(ps.progress([])) == []
    assert lines(capsys) == []


def test_several_steps_of_the_pipeline_in_a_step_of_the_loop() -> None:
    """As where gradients of several mini-batches are added up: all samples count."""
    with pipeline() as pipe:
        loop = module._Loop(pipe, None, "")
        for _ in range(3):
            for x, y in data(2):
                pipe.step(x, y)
            loop.step()
        assert loop.measured(pipe)[0].samples == 16  # of the second and third: the first is slow
        loop.first_step_end = time.monotonic() - 8
        assert "  2 samples/s" in loop.text("")
        pipe.evaluate(torch.ones(4, 2))
        assert loop.measured(pipe)[0].samples == 16


def test_summary_of_a_loop_that_is_left_or_fails(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Iterator[Any]:
        yield data(1)[0]
        raise RuntimeError("no more")

    with pipeline() as pipe:
        for x, y in ps.progress(data(5), pipe):
            pipe.step(x, y)
            if pipe.step_totals.steps == 2:
                break
        assert [LAST.fullmatch(line)[2] for line in lines(capsys)] == ["2"]
        for x, y in ps.progress(data(5), pipe):
            if pipe.step_totals.steps == 3:
                break
            pipe.step(x, y)
        assert [LAST.fullmatch(line)[2] for line in lines(capsys)] == ["1"]
        loop = ps.progress(broken(), pipe)
        pipe.step(*next(loop))
        with pytest.raises(RuntimeError, match="no more"):
            next(loop)
        assert [LAST.fullmatch(line)[2] for line in lines(capsys)] == ["1"]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    with pipeline() as pipe:
        for x, y in ps.progress(data(3), pipe, label="epoch"):
            pipe.step(x, y)
            for _ in ps.progress([1], label="inner"):  # a second bar would spoil the first
                ps.print0("something")
    text = terminal.getvalue()
    assert "━" in text
    assert "something" in text
    assert "inner  1 step in" in text
    assert re.search(r"epoch  3 steps in .* bubble", text)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is back


def test_tally() -> None:
    result = ps.StepResult(None, None, samples=3, microbatches=1, seconds=2.0, bubble=0.25)
    totals = StepTotals()
    assert totals.bubble is None
    totals.add(result)
    before = StepTotals(totals.steps, totals.samples, totals.measured, totals.idle)
    totals.add(ps.StepResult(None, None, samples=3, microbatches=1, seconds=6.0, bubble=0.75))
    totals.add(ps.StepResult(None, None, samples=3, microbatches=1, seconds=9.0))  # bubble unknown
    assert (totals.steps, totals.samples, totals.bubble) == (3, 9, (0.5 + 4.5) / 8)
    assert totals.since(before) == StepTotals(2, 6, 6.0, 4.5)


# Under a mesh -----------------------------------------------------------------------------------------------


def shown_by(rank: int, how: str) -> tuple[list[str], float]:
    """The output of a rank, and its bubble."""
    out = io.StringIO()
    with redirect_stdout(out), pipeline(mesh=ps.Mesh()) as pipe:
        shows = how != "rank 0 alone" or rank == 0
        for number, (x, y) in enumerate(ps.progress(data(6), pipe, every=3) if shows else data(6)):
            pipe.step(x, y)
            if number == 0:
                forked_python = StepTotals(**vars(pipe.step_totals))
            if how == "left" and number == 4:
                break
        ps.print0("done")
    bubble = pipe.step_totals.since(forked_python).bubble
    assert bubble is not None
    return out.getvalue().splitlines(), bubble


@pytest.mark.parametrize("how", ["to the end", "left", "rank 0 alone"])
def test_rank_0_shows_the_average_bubble(two: Ranks, how: str) -> None:
    (first, one), (second, other) = two.check(shown_by, how, timeout=30)
    assert second == []
    assert first[-1] == "done"
    third, *_, last = first[:-1]
    assert LINE.fullmatch(third)[2] == "3"
    found = LAST.fullmatch(last)
    if how == "to the end":
        assert found[2] == "6"
        assert abs(float(found[5]) / 100 - (one + other) / 2) < 0.001
    elif how == "rank 0 alone":
        assert abs(float(found[5]) / 100 - one) < 0.001
    else:
        assert found[2] == "5"


def test_every_must_be_positive() -> None:
    with pytest.raises(ps.PlanError, match="every must be a number of steps, got 0"):
        list(ps.progress([1], every=0))
