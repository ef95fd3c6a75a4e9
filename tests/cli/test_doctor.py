"""``penstock doctor``: findings from facts, and a real check of this machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

from penstock.cli import doctor, main
from penstock.cli.doctor import Finding, check_link, check_machine, check_network, check_versions
from penstock.profile import links
from tests.support.programs import environment, free_port, run_in_process
from tests.support.ranks import run_ranks

GIB = 1 << 30
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCHRUN, "MASTER_ADDR": "first", "TORCHELASTIC_RUN_ID": "none"}
FIREWALL = check_link("gloo", "two processes", error="no message arrived within 110 s")


def machine(
    cores: int = 8, threads: int = 8, memory_free: int | None = 60 * GIB, shm_free: int = 30 * GIB
) -> Iterator[Finding]:
    return check_machine(cores, threads, memory_free, shm_free)


def network(addresses: tuple[str, ...] = ("10.0.0.1",), seconds: float = 0.001, **environ: str) -> Iterator[Finding]:
    return check_network("host0", addresses, seconds, environ)


def versions(python: str = "3.12.1", torch: str = "2.13.0+cpu") -> Iterator[Finding]:
    return check_versions({"python": python, "torch": torch})


# Findings ----------------------------------------------------------------------------------------


def test_all_is_ok() -> None:
    link = check_link("gloo", "two processes", 100e-6, 2e9)
    found = [*versions(), *machine(), *network(), *network(**TORCHRUN), link]
    assert {finding.status for finding in found} == {"ok"}
    text = {finding.what: finding.text for finding in (*found, *network())}
    assert text["torch"] == "2.13.0+cpu"
    assert text["memory"] == "60.00 GiB free"
    assert text["gloo"] == "100 µs, 2.00 GB/s between two processes"
    assert text["host name"] == "'host0' is 10.0.0.1"
    assert text["launcher"] == "none: 'penstock run' starts processes"
    assert [finding.text for finding in network(**TORCHRUN)][-1] == "rank 1 of 4, connecting to first:29500"


@pytest.mark.parametrize(
    ("found", "status", "what", "words"),
    [
        (machine(threads=9), "warn", "cores", "OMP_NUM_THREADS=8"),
        (machine(memory_free=GIB // 2), "warn", "memory", "end other programs"),
        (machine(shm_free=64 << 20), "warn", "/dev/shm", "--shm-size=8g"),
        (network(("127.0.1.1", "::1")), "warn", "host name", "GLOO_SOCKET_IFNAME"),
        (network(()), "warn", "host name", "/etc/hosts"),
        (network(("127.0.0.1",), **TORCHRUN), "fail", "host name", "/etc/hosts"),
        (network(seconds=5.005), "warn", "name server", "a name server does not answer"),
        (network(seconds=5.005), "warn", "name server", "'::ffff:127.0.0.1 localhost'"),
        (network(**{**TORCHRUN, "MASTER_ADDR": "127.0.0.1"}), "fail", "launcher", "address of the first machine"),
        ([check_link("gloo", "two", 0.05, 1e9)], "warn", "gloo", "slow"),
        ([check_link("gloo", "two", 0.001, 1e6)], "warn", "gloo", "slow"),
        ([FIREWALL], "fail", "gloo", "check the firewall"),
        ([check_link("nccl", "two", error="unhandled")], "fail", "nccl", "NCCL_DEBUG"),
        (versions(python="3.10.14"), "fail", "python", "install python 3.11"),
        (versions(torch="2.9.1"), "fail", "torch", "install torch 2.10"),
    ],
)
def test_warnings_and_failures(found: Iterator[Finding], status: str, what: str, words: str) -> None:
    (finding,) = [finding for finding in found if finding.status != "ok"]
    assert (finding.status, finding.what) == (status, what)
    assert words in finding.remedy


# Facts ------------------------------------------------------------------------------------------


def test_memory_of_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\n")
    assert doctor._memory_free(meminfo, tmp_path) == 2 << 20
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    assert doctor._memory_free(meminfo, tmp_path) == 2 << 20
    (tmp_path / "memory.max").write_text("2097152\n")
    assert doctor._memory_free(meminfo, tmp_path) == 1 << 20


@pytest.mark.parametrize(
    ("program", "error"),
    [("exit 3", "process 0 ended with exit code 3"), ("exec sleep 60", "no message arrived within 1 s")],
)
def test_processes_that_end_early_or_hang(
    program: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container that kills them: it is reported, and nothing waits."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{program}\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    monkeypatch.setattr(doctor, "_EXCHANGE_TIMEOUT", 1.0)
    found = doctor._check_processes("gloo", "cpu")
    assert (found.status, found.text) == ("fail", f"messages between two processes: {error}")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu() -> None:
    assert doctor.check_gpu(0).status != "fail"


# For real ---------------------------------------------------------------------------------------------------


def doctor_with_a_known_link() -> int:
    """All but the measurement between two processes, which tests/profile/test_process_link.py runs."""
    with mock.patch.object(doctor, "process_link", autospec=True, return_value=links.Link(1e-5, 1e9)) as measured:
        code = main(["doctor", "--json"])
    measured.assert_called_once()
    return code


def test_this_machine(tmp_path: Path) -> None:
    done = run_in_process(doctor_with_a_known_link, env=environment(), cwd=tmp_path)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (not found["ok"])
    findings = {finding["what"]: finding for finding in found["findings"]}
    assert {"python", "cores", "devices", "host name", "name server", "launcher"} <= set(findings)
    assert findings["gloo"]["status"] != "fail"


def found_by_ranks(rank: int) -> list[Finding]:
    with mock.patch.object(links, "ROUNDS", 8):  # not as exact as by default
        between = doctor._check_ranks()
    return doctor._gather_findings([*between, Finding("warn" if rank == 2 else "ok", "cores", f"of {rank}")])


def test_between_the_ranks_of_a_launcher() -> None:
    """Each pair is measured once, and rank 0 has all findings, with the warnings of the others."""
    outcomes = run_ranks(found_by_ranks, 3)
    shown = [(finding.what, re.sub(r".* between", "between", finding.text)) for finding in outcomes[0]]
    pairs = [("gloo", f"between ranks {a} and {b}") for a, b in ((0, 1), (1, 2), (2, 0))]
    assert shown == [*pairs, ("cores", "of 0"), ("cores", "rank 2: of 2")]


def test_a_launcher_whose_other_processes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_JOIN_TIMEOUT", 1.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    (outcome,) = doctor._check_ranks()
    assert outcome.status == "fail"
    assert "could not join the others" in outcome.text
    monkeypatch.setenv("RANK", "one")
    (outcome,) = doctor._check_ranks()
    assert "RANK must be a whole number, got 'one'" in outcome.text


def test_a_rank_that_does_not_reach_rank_0_prints_its_own_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    failed = check_link("torch.distributed", "the ranks", error="timed out")
    monkeypatch.setattr(doctor, "examine", lambda: [*versions(), failed])
    assert main(["doctor"]) == 1
    assert "Failed: torch.distributed (no warnings)." in capsys.readouterr().out


def page(findings: list[Finding], width: int) -> list[str]:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        console.print(doctor.table(findings))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_page(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [*versions(python="3.9.1"), *machine(shm_free=3)]
    shown = page(findings, 60)
    assert max(map(len, shown)) <= 60
    assert shown[:2] == ["fail  python    3.9.1", "                -> install python 3.11 or later"]
    monkeypatch.setattr(doctor, "examine", lambda: findings)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "Failed: python (1 warning)."
    monkeypatch.setattr(doctor, "examine", versions)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "No failures (no warnings)."


def test_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs" / "when-it-fails.md").read_text("utf-8")
    found = [*network(("127.0.1.1",), seconds=5.0), FIREWALL]
    assert "\n".join(page([finding for finding in found if finding.status != "ok"], 118)) in document
