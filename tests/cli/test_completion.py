"""Shell completion by Typer: the candidates after a partial command line."""

from __future__ import annotations

import pytest

from penstock.cli import main


@pytest.mark.parametrize(
    ("line", "candidates"),
    [
        ("sch", ["schedule"]),
        ("d", ["demo", "doctor"]),
        ("--ver", ["--version"]),
        ("schedule zb", ["zb_h1", "zb_h2", "zbv"]),
        ("schedule -p 4 au", ["auto"]),
        ("schedule 1f1b --me", ["--memory"]),
        ("schedule auto --shape ", ["loop", "v"]),
        ("demo --strategy ", ["pipelined", "sharded"]),
        ("demo --schedule v", ["v_half", "v_min"]),
        ("run --stages 4 --l", ["--log-dir"]),
    ],
)
def test_candidates(
    line: str, candidates: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"penstock {line}".split(" ")
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "\n".join(words))
    monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
    assert main([]) == 0
    assert capsys.readouterr().out.split() == candidates
