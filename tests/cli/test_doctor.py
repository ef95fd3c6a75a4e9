"""``penstock doctor``: findings from facts, and a real check of this machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import doctor, main
from penstock.cli.doctor import Exchange, Facts, Finding, Gpu, diagnose
from tests.support.programs import environment, forked_python, free_port, run
from tests.support.ranks import run_ranks

GIB = 1 << 30
GPU = Gpu("H100", 80 * GIB, (9, 0), supported=True, memory_free=79 * GIB)
GOOD = Facts(
    versions={"penstock": "0.1.0", "python": "3.12.1", "torch": "2.13.0+cpu", "rich": "14.0", "transformers": "5.0"},
    cpus=8, cores=8, threads=8, memory=64 * GIB, memory_free=60 * GIB, shm_free=30 * GIB, open_files=65536,
    interfaces=("lo", "eth0"), host="host0", addresses=("10.0.0.1",), reverse_seconds=(0.001, 0.002),
    exchanges=(Exchange("gloo", None, 100e-6, 2e9),),
)  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCHRUN, "MASTER_ADDR": "first", "TORCHELASTIC_RUN_ID": "none"}


def facts(versions: dict[str, str] | None = None, **changes: Any) -> Facts:
    """``facts(cores=2)``: all is well, but for that."""
    return replace(GOOD, versions={**GOOD.versions, **(versions or {})}, **changes)


def launched(master: str = "10.0.0.1", gpus: tuple[Gpu, ...] = (), **variables: str | None) -> Facts:
    environ = {k: v for k, v in {**TORCHRUN, **variables}.items() if v is not None}
    return facts(environ=environ, master=(master,), gpus=gpus)


def findings(status: str, found: Facts) -> list[Finding]:
    return [finding for finding in diagnose(found) if finding.status == status]


# Findings ----------------------------------------------------------------------------------------


def test_all_is_ok() -> None:
    found = list(diagnose(GOOD))
    assert {finding.status for finding in found} == {"ok"}
    text = {finding.what: finding.text for finding in found}
    assert text["torch"] == "2.13.0+cpu"
    assert text["memory"] == "60.00 GiB free of 64.00 GiB"
    assert text["gloo"] == "100 µs, 2.00 GB/s between two processes"
    assert text["host name"] == "'host0' is 10.0.0.1"
    assert text["launcher"] == "none: 'penstock run' starts processes by itself"
    assert text["locked memory"] == "no limit"


def test_gpus_that_are_ok() -> None:
    found = facts(
        gpus=(GPU, GPU), peers=((0, 1), (1, 0)), versions={"cuda": "13.0", "nccl": "2.28.9"},
        exchanges=(*GOOD.exchanges, Exchange("nccl", None, 10e-6, 150e9)),
    )  # fmt: skip
    assert {finding.status for finding in diagnose(found)} == {"ok"}
    text = {finding.what: finding.text for finding in diagnose(found)}
    assert text["cuda:1"] == "H100, 80.00 GiB, compute capability 9.0 (CUDA 13.0)"
    assert text["peer access"] == "between all 2 GPUs"
    assert text["nccl"] == "10 µs, 150.00 GB/s between two processes"
    alone = {finding.what: finding.text for finding in diagnose(facts(gpus=(GPU,), versions={"nccl": "2.28.9"}))}
    assert alone["nccl"] == "2.28.9, not tried: it needs two GPUs, and there is 1"


@pytest.mark.parametrize(
    ("found", "what", "words"),
    [
        (facts(threads=9), "cores", "OMP_NUM_THREADS=8"),
        (facts(memory_free=GIB // 2), "memory", "end other programs"),
        (facts(shm_free=64 << 20), "/dev/shm", "--shm-size=8g"),
        (facts(shm_free=None), "/dev/shm", "mount it"),
        (facts(open_files=256), "open files", "ulimit -n 65536"),
        (facts(locked_memory=64 << 10, infiniband=True), "locked memory", "ulimit -l unlimited"),
        (facts(driver=True), "devices", "install torch built with CUDA"),
        (facts(driver=True, versions={"cuda": "13.0"}), "devices", "nvidia-smi"),
        (facts(driver=True, environ={"CUDA_VISIBLE_DEVICES": ""}), "devices", "unset it"),
        (facts(gpus=(replace(GPU, memory_free=GIB),)), "cuda:0", "other programs use it"),
        (facts(gpus=(GPU, GPU), peers=((0, 1),), versions={"nccl": "2"}), "peer access", "through the host"),
        (facts(gpus=(GPU, GPU), peers=((0, 1), (1, 0))), "nccl", "built with NCCL"),
        (facts(addresses=("127.0.1.1", "::1")), "host name", "GLOO_SOCKET_IFNAME"),
        (facts(addresses=(), host_error="Name or service not known"), "host name", "/etc/hosts"),
        (facts(reverse_seconds=(0.001, 5.005, 0.001)), "name server", "a name server does not answer"),
        (facts(exchanges=(Exchange("gloo", None, 0.05, None),)), "gloo", "slow"),
        (facts(exchanges=(Exchange("gloo", None, 0.001, 1e6),)), "gloo", "slow"),
        (launched(OMP_NUM_THREADS="8"), "threads", "OMP_NUM_THREADS=4"),
        (launched(gpus=(GPU,)), "launcher", "communicate by gloo"),
    ],
)  # fmt: skip
def test_warnings(found: Facts, what: str, words: str) -> None:
    (finding,) = findings("warn", found)
    assert finding.what == what
    assert words in finding.remedy
    assert findings("fail", found) == []


@pytest.mark.parametrize(
    ("found", "what", "words"),
    [
        (facts(versions={"python": "3.10.14"}), "python", "install python 3.11"),
        (facts(versions={"torch": "2.9.1"}), "torch", "install torch 2.10"),
        (facts(gpus=(replace(GPU, supported=False),)), "cuda:0", "code for 9.0"),
        (facts(gpus=(replace(GPU, error="busy"),)), "cuda:0", "nvidia-smi"),
        (facts(exchanges=()), "gloo", "install a torch built with it"),
        (facts(exchanges=(Exchange("gloo", error="timed out"),)), "gloo", "a firewall"),
        (facts(exchanges=(*GOOD.exchanges, Exchange("nccl", error="unhandled"))), "nccl", "NCCL_DEBUG"),
        (launched(RANK="4"), "launcher", "torchrun"),
        (launched(RANK="one"), "launcher", "torchrun"),
        (launched(LOCAL_RANK="2"), "launcher", "torchrun"),
        (launched(MASTER_PORT="70000"), "launcher", "choose one"),
        (launched(MASTER_PORT=None), "launcher", "unset them"),
        (launched(master="127.0.0.1"), "launcher", "first machine's address"),
        (launched(PENSTOCK_PIPE="3", PENSTOCK_DATA="2"), "mesh", "unset them"),
        (launched(TORCHELASTIC_RUN_ID=None, SLURM_PROCID="2"), "launcher", "srun sets"),
        (launched(GLOO_SOCKET_IFNAME="eth1"), "GLOO_SOCKET_IFNAME", "there are lo, eth0"),
        (facts(environ=TORCHRUN, launcher_error="MASTER_ADDR 'first' is not known"), "launcher", "/etc/hosts"),
        (facts(environ={"SLURM_PROCID": "3"}, launcher_error="SLURM_PROCID is 3"), "launcher", "srun"),
        (replace(launched(), addresses=("127.0.0.1",)), "host name", "/etc/hosts"),
    ],
)
def test_failures(found: Facts, what: str, words: str) -> None:
    (finding,) = findings("fail", found)
    assert finding.what == what
    assert words in finding.remedy


def test_launchers_that_are_ok() -> None:
    for more in ({}, {"SLURM_PROCID": "0"}, {"GLOO_SOCKET_IFNAME": "eth0"}, {"PENSTOCK_PIPE": "4"}):
        assert {finding.status for finding in diagnose(launched(**more))} == {"ok"}
    (finding,) = [finding for finding in diagnose(launched()) if finding.what == "launcher"]
    assert finding.text == "rank 1 of 4, 2 on this machine, connecting to first:29500"


# Facts ------------------------------------------------------------------------------------------


def test_code_for_a_gpu() -> None:
    built = ["sm_75", "sm_80", "sm_90a", "compute_90"]
    fits = {(7, 0): False, (7, 5): True, (8, 6): True, (9, 0): True, (12, 0): True}
    assert {capability: doctor._has_code(capability, built) for capability in fits} == fits
    assert not doctor._has_code((12, 0), built[:3])


def test_memory_of_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\n")
    assert doctor._memory(meminfo, tmp_path) == (4 << 20, 2 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    assert doctor._memory(meminfo, tmp_path) == (4 << 20, 2 << 20)
    (tmp_path / "memory.max").write_text("2097152\n")
    assert doctor._memory(meminfo, tmp_path) == (2 << 20, 1 << 20)


def test_variables_of_slurm() -> None:
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SECRET": "x"}
    environ, _, _ = doctor._launcher_environ(task)
    assert (environ["RANK"], environ["WORLD_SIZE"], "SECRET" in environ) == ("1", "2", False)
    for wrong, expected in (
        ({**task, "SLURM_PROCID": "x"}, "SLURM_PROCID must be a whole number"),
        ({"MASTER_ADDR": "no.invalid"}, "'no.invalid' is not known"),
    ):
        error = doctor._launcher_environ(wrong)[2]
        assert error is not None
        assert expected in error


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
    assert doctor._between_two("gloo", "cpu") == Exchange("gloo", error=error)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu() -> None:
    found = doctor._gpu(0)
    assert (found.supported, found.error) == (True, None)
    assert found.memory_free is not None
    assert 0 < found.memory_free <= found.memory


# For real ---------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    done = run(forked_python("-m", "penstock", "doctor", "--json"), environment(), cwd=tmp_path)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (not found["ok"])
    (gloo,) = [exchange for exchange in found["facts"]["exchanges"] if exchange["backend"] == "gloo"]
    assert gloo["error"] is None
    assert gloo["latency"] > 0
    whats = {finding["what"] for finding in found["findings"]}
    assert {"python", "cores", "host name", "name server", "gloo", "nccl"} <= whats


def found_by_ranks(rank: int) -> tuple[tuple[Exchange, ...], list[Finding]]:
    mine = doctor._between_ranks()
    lines = [finding for finding in diagnose(facts(exchanges=mine)) if finding.what == "gloo"]
    return mine, doctor._of_all_ranks([*lines, Finding("warn" if rank == 2 else "ok", "cores", f"of {rank}")])


def test_between_the_ranks_of_a_launcher() -> None:
    """Each pair is measured once, and rank 0 has all findings, with the warnings of the others."""
    outcomes = run_ranks(found_by_ranks, 3)
    for mine, _ in outcomes:
        assert mine == outcomes[0][0]
    shown = [(finding.what, re.sub(r".* between", "between", finding.text)) for finding in outcomes[0][1]]
    pairs = [("gloo", f"between ranks {a} and {b}") for a, b in ((0, 1), (1, 2), (2, 0))]
    assert shown == [*pairs, ("cores", "of 0"), ("cores", "rank 2: of 2")]


def test_a_launcher_whose_other_processes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_JOIN_TIMEOUT", 1.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    (outcome,) = doctor._between_ranks()
    assert outcome.error is not None
    assert "could not join the others" in outcome.error


def test_a_rank_that_does_not_reach_rank_0_prints_its_own_findings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    failed = (Exchange("torch.distributed", error="timed out"),)
    monkeypatch.setattr(doctor, "collect", lambda: facts(exchanges=failed))
    assert main(["doctor"]) == 1
    assert "What would fail: torch.distributed (no warnings)." in capsys.readouterr().out


def test_page() -> None:
    found = facts(versions={"python": "3.9.1"}, open_files=3)
    page = doctor._page(list(diagnose(found)), 60)
    assert max(map(len, page)) <= 60
    assert page[0] == "fail  python         3.9.1"
    assert page[1] == "                     -> install python 3.11 or later"
    assert page[-1] == "What would fail: python (1 warning)."
    assert doctor._page(list(diagnose(GOOD)), 60)[-1] == "Nothing would fail (no warnings)."


def test_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs" / "when-it-fails.md").read_text("utf-8")
    error = "no message arrived within 110 s"
    failed = (Exchange("gloo", error=error),)
    found = diagnose(facts(addresses=("127.0.1.1",), reverse_seconds=(5.0,), exchanges=failed))
    page = doctor._page([finding for finding in found if finding.status != "ok"], 118)[:-2]
    assert "\n".join(page) in document
