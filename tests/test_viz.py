"""Text charts of schedules."""

from __future__ import annotations

import io

import pytest

from penstock import viz
from penstock.schedule.costs import Costs
from penstock.schedule.registry import build
from penstock.schedule.simulate import Simulation, simulate
from tests.schedule.samples import VARIANTS, label, staircase


def simulated(name: str, p: int, m: int, v: int | None = None, **costs: float) -> Simulation:
    schedule = build(name, p, m, v)
    return simulate(schedule, Costs.per_rank(v=schedule.num_stages // p, **costs))


def chart(text: str) -> list[str]:
    """The rows of the chart, without title, axis and legend."""
    lines = text.splitlines()[2:]
    return lines[: lines.index("") - 1]


def test_chart_of_a_schedule() -> None:
    text = viz.to_text_lines(simulated("1f1b", 2, 3), width=80)
    assert text.splitlines() == [
        "1f1b: 2 ranks, 2 stages, 3 micro-batches",
        "",
        "rank 0  F0--F1--········B0------F2--B1------····B2------",
        "rank 1  ····F0--B0------F1--B1------F2--B2------········",
        "        0                   5                   10",
        "",
        "F forward  B backward  · idle",
        "",
        "rank  stages  busy   idle  in flight  activations  deferred W",
        "   0  0          9  25.0%          2            2           0",
        "   1  1          9  25.0%          1            1           0",
        "",
        "bubble 25.0%   simulated time 12",
    ]


def test_microbatch_numbers_below_narrow_actions() -> None:
    assert chart(viz.to_text_lines(simulated("zb_h1", 2, 8), 40)) == [
        "rank 0  FF·IWFIWFIWFIWFIWFIWFIWIW",
        "        01 0021132243354465576677",
        "rank 1  ·FIFIWFIWFIWFIWFIWFIWFIWW",
        "         001102213324435546657767",
    ]


def test_mixed_kinds_of_backward() -> None:
    simulation = simulate(staircase("F0 F1 I0 W0 B1", "F0 I0 W0 F1 B1"))
    assert chart(viz.to_text_lines(simulation, 60)) == [
        "rank 0  F0--F1--····I0--W0--········B1------",
        "rank 1  ····F0--I0--W0--F1--B1------········",
    ]


def test_lower_case_marks_the_second_stage_of_a_rank() -> None:
    rows = chart(viz.to_text_lines(simulated("interleaved", 2, 2, 2), 80))
    assert rows[0].startswith("rank 0  F0--F1--f0--f1--")
    text = viz.to_text_lines(simulated("interleaved", 2, 2, 2), 80)
    assert "lower case: every second stage of a rank" in text
    assert "lower case" not in viz.to_text_lines(simulated("1f1b", 2, 2), 80)


def test_zero_bubble_shows_both_bubbles() -> None:
    assert "without a barrier between steps 0.0%" in viz.to_text_lines(simulated("zb_h2", 4, 8), 80)
    assert "without" not in viz.to_text_lines(simulated("1f1b", 4, 8), 80)


SIZES = [(1, 1), (2, 3), (4, 12), (4, 120), (12, 7), (16, 20)]


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_chart_fits_the_width(name: str, v: int | None) -> None:
    for number, (p, m) in enumerate(SIZES):
        simulation = simulated(name, p, m, v, comm=0.13)
        for width in (60, 80, 133) if (p, m) == (4, 120) else ((60, 80, 133)[number % 3],):
            text = viz.to_text_lines(simulation, width)
            assert max(map(len, text.splitlines())) <= width, (p, m, width)
            assert f"rank {p - 1}" in text


@pytest.mark.parametrize(("name", "v"), VARIANTS, ids=label)
def test_all_actions_are_shown_at_full_width(name: str, v: int | None) -> None:
    simulation = simulated(name, 3, 4, v)
    shown = "".join(viz.to_text_lines(simulation, 1000).splitlines()[2:5]).upper()
    for order in simulation.schedule.orders:
        for action in order:
            assert f"{action.kind}{action.microbatch}-" in shown
    assert sum(shown.count(f"{kind}{k}") for kind in "FBIWR" for k in range(4)) == sum(
        len(order) for order in simulation.schedule.orders
    )


def test_columns_show_the_share_of_each_kind() -> None:
    """1F1B with 1000 micro-batches in 72 columns: a third is forward, as in the schedule."""
    row = chart(viz.to_text_lines(simulated("1f1b", 4, 1000), 80))[3][8:]
    assert len(row) == 72
    assert row.count("F") == pytest.approx(24, abs=1)
    assert row.count("B") == pytest.approx(48, abs=1)


def test_zero_length_actions_take_no_columns() -> None:
    assert chart(viz.to_text_lines(simulated("zb_h1", 1, 2, w=0), 80)) == ["rank 0  F0--I0--F1--I1--"]
    assert "simulated time 0" in viz.to_text_lines(simulated("1f1b", 2, 2, f=0, i=0, w=0), 80)


def test_long_stage_lists_are_wrapped() -> None:
    lines = viz.to_text_lines(simulated("looped_bfs", 4, 2, 24), 80).splitlines()
    assert any(line.startswith("   0  0 4 8 12 ") for line in lines)
    assert any(line.split()[-1:] == ["92"] for line in lines)


def test_colour_is_the_kind_and_shade_the_stage() -> None:
    lines = list(viz._text_chart(simulated("interleaved", 2, 2, 2), 80))
    styles = {str(span.style) for line in lines for span in line.spans}
    assert {"bright_white on #1d4f91", "black on #c3dcf8"} <= styles  # forward: first and second stage
    assert {"bright_white on #226b35", "black on #c6e9cd"} <= styles  # backward


class Terminal(io.StringIO):
    """A file whose ``isatty`` is true."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def test_colours_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated("1f1b", 2, 3)
    plain = viz.to_text_lines(simulation, 80) + "\n"
    terminal, pipe = Terminal(), io.StringIO()
    viz.print_schedule(simulation, terminal)
    viz.print_schedule(simulation, pipe)
    assert "\x1b[" in terminal.getvalue()
    assert pipe.getvalue() == plain
    monkeypatch.setenv("NO_COLOR", "1")
    viz.print_schedule(simulation, terminal := Terminal())
    assert "\x1b[48" not in terminal.getvalue()


def test_coloured_lines_do_not_wrap() -> None:
    simulation = simulated("zbv", 4, 8)
    viz.print_schedule(simulation, terminal := Terminal(), 80)
    assert len(terminal.getvalue().splitlines()) == len(viz.to_text_lines(simulation, 80).splitlines())
