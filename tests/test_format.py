"""Formatting of sizes, times and tables."""

from __future__ import annotations

import pytest

from penstock.format import format_size, format_size_exact, format_table, format_time


@pytest.mark.parametrize(
    ("size", "text", "exact"),
    [
        (0, "0 bytes", "0 bytes"),
        (1023, "1023 bytes", "1023 bytes"),
        (1024, "1.00 KiB", "1.00 KiB (1,024 bytes)"),
        (1.5 * 1024**3, "1.50 GiB", "1.50 GiB (1,610,612,736 bytes)"),
        (3e15, "2728.48 TiB", "2728.48 TiB (3,000,000,000,000,000 bytes)"),
    ],
)
def test_sizes(size: float, text: str, exact: str) -> None:
    assert (format_size(size), format_size_exact(size)) == (text, exact)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 s"), (2.5e-7, "2.5e-07 s"), (4.2e-5, "42 µs"), (0.0458, "45.8 ms"), (1.0, "1 s"), (4321.9, "4322 s")],
)
def test_times(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_tables() -> None:
    assert format_table(["rank", "layers"], [["0", "a … c (3)"], ["11", "d"]], right={0}) == [
        "rank  layers",
        "────  ─────────",
        "   0  a … c (3)",
        "  11  d",
    ]
