"""``penstock doctor``: lines from facts, and a real look at this machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli import doctor, main
from penstock.doctor import exchange, look
from penstock.doctor.facts import Exchange, Facts, Gpu, Launch, Machine, Network, Versions
from penstock.doctor.judge import Line, judge
from tests.support.programs import environment, free_port, run, warm
from tests.support.ranks import run_ranks

GIB = 1 << 30
GPU = Gpu("H100", 80 * GIB, (9, 0), supported=True, memory_free=79 * GIB)
WELL = Facts(
    Versions("0.1.0", "3.12.1", "2.13.0+cpu", rich="14.0", transformers="5.0"),
    Machine(8, 8, 8, 64 * GIB, 60 * GIB, 30 * GIB, 65536, None, interfaces=("lo", "eth0")),
    Network("here", ("10.0.0.1",), None, (0.001, 0.002)),
    exchanges=(Exchange("gloo", None, 100e-6, 2e9),),
)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCHRUN, "MASTER_ADDR": "first", "TORCHELASTIC_RUN_ID": "none"}


def facts(base: Facts = WELL, **changes: Any) -> Facts:
    """``facts(machine_cores=2)``: all is well, but for that."""
    for name, value in changes.items():
        part, _, field = name.partition("_")
        if hasattr(base, name):
            base = replace(base, **{name: value})
        else:
            base = replace(base, **{part: replace(getattr(base, part), **{field: value})})
    return base


def launched(master: str = "10.0.0.1", **variables: str | None) -> Facts:
    told = {k: v for k, v in {**TORCHRUN, **variables}.items() if v is not None}
    return facts(launch=Launch(told, (master,)))


def lines(status: str, found: Facts) -> list[Line]:
    return [line for line in judge(found) if line.status == status]


# From facts to lines ----------------------------------------------------------------------------------------


def test_all_is_well() -> None:
    found = judge(WELL)
    assert {line.status for line in found} == {"ok"}
    text = {line.what: line.text for line in found}
    assert text["torch"] == "2.13.0+cpu"
    assert text["memory"] == "60.0 GiB free of 64.0 GiB"
    assert text["gloo"] == "100 µs, 2.00 GB/s between two processes"
    assert text["host name"] == "'here' is 10.0.0.1"
    assert text["launcher"] == "none: 'penstock run' starts processes by itself"
    assert text["locked memory"] == "no limit"


def test_gpus_that_are_well() -> None:
    found = facts(
        gpus=(GPU, GPU), peers=((0, 1), (1, 0)), versions_cuda="13.0", versions_nccl="2.28.9",
        exchanges=(*WELL.exchanges, Exchange("nccl", None, 10e-6, 150e9)),
    )  # fmt: skip
    assert {line.status for line in judge(found)} == {"ok"}
    text = {line.what: line.text for line in judge(found)}
    assert text["cuda:1"] == "H100, 80.0 GiB, compute capability 9.0 (CUDA 13.0)"
    assert text["peer access"] == "between all 2 GPUs"
    assert text["nccl"] == "10 µs, 150.00 GB/s between two processes"
    alone = {line.what: line.text for line in judge(facts(gpus=(GPU,), versions_nccl="2.28.9"))}
    assert alone["nccl"] == "2.28.9, not tried: it needs two GPUs, and there is 1"


@pytest.mark.parametrize(
    ("found", "what", "words"),
    [
        (facts(machine_threads=9), "cores", "OMP_NUM_THREADS=8"),
        (facts(machine_memory_free=GIB // 2), "memory", "end other programs"),
        (facts(machine_shm_free=64 << 20), "/dev/shm", "--shm-size=8g"),
        (facts(machine_shm_free=None), "/dev/shm", "mount it"),
        (facts(machine_open_files=256), "open files", "ulimit -n 65536"),
        (facts(machine_locked_memory=64 << 10, machine_infiniband=True), "locked memory", "ulimit -l unlimited"),
        (facts(machine_driver=True), "devices", "install torch built with CUDA"),
        (facts(machine_driver=True, versions_cuda="13.0"), "devices", "nvidia-smi"),
        (facts(machine_driver=True, launch=Launch({"CUDA_VISIBLE_DEVICES": ""})), "devices", "unset it"),
        (facts(gpus=(replace(GPU, memory_free=GIB),)), "cuda:0", "other programs use it"),
        (facts(gpus=(GPU, GPU), peers=((0, 1),), versions_nccl="2"), "peer access", "through the host"),
        (facts(gpus=(GPU, GPU), peers=((0, 1), (1, 0))), "nccl", "built with NCCL"),
        (facts(network_addresses=("127.0.1.1", "::1")), "host name", "GLOO_SOCKET_IFNAME"),
        (facts(network_addresses=(), network_error="Name or service not known"), "host name", "/etc/hosts"),
        (facts(network_reverse=(0.001, 5.005, 0.001)), "name server", "a name server does not answer"),
        (facts(exchanges=(Exchange("gloo", None, 0.05, None),)), "gloo", "slow"),
        (facts(exchanges=(Exchange("gloo", None, 0.001, 1e6),)), "gloo", "slow"),
        (launched(OMP_NUM_THREADS="8"), "threads", "OMP_NUM_THREADS=4"),
        (replace(launched(), gpus=(GPU,)), "launcher", "talk through gloo"),
    ],
)  # fmt: skip
def test_what_may_go_wrong(found: Facts, what: str, words: str) -> None:
    (line,) = lines("warn", found)
    assert line.what == what
    assert words in line.do
    assert lines("fail", found) == []


@pytest.mark.parametrize(
    ("found", "what", "words"),
    [
        (facts(versions_python="3.10.14"), "python", "install python 3.11"),
        (facts(versions_torch="2.9.1"), "torch", "install torch 2.10"),
        (facts(gpus=(replace(GPU, supported=False),)), "cuda:0", "code for 9.0"),
        (facts(gpus=(replace(GPU, error="busy"),)), "cuda:0", "nvidia-smi"),
        (facts(exchanges=()), "gloo", "install a torch built with it"),
        (facts(exchanges=(Exchange("gloo", error="timed out"),)), "gloo", "a firewall"),
        (facts(exchanges=(*WELL.exchanges, Exchange("nccl", error="unhandled"))), "nccl", "NCCL_DEBUG"),
        (launched(RANK="4"), "launcher", "torchrun"),
        (launched(RANK="one"), "launcher", "torchrun"),
        (launched(LOCAL_RANK="2"), "launcher", "torchrun"),
        (launched(MASTER_PORT="70000"), "launcher", "choose one"),
        (launched(MASTER_PORT=None), "launcher", "unset them"),
        (launched(master="127.0.0.1"), "launcher", "first machine's address"),
        (launched(PENSTOCK_PIPE="3", PENSTOCK_DATA="2"), "mesh", "unset them"),
        (launched(TORCHELASTIC_RUN_ID=None, SLURM_PROCID="2"), "launcher", "srun says"),
        (launched(GLOO_SOCKET_IFNAME="eth1"), "GLOO_SOCKET_IFNAME", "there are lo, eth0"),
        (facts(launch=Launch(TORCHRUN, error="MASTER_ADDR 'first' is not known")), "launcher", "/etc/hosts"),
        (facts(launch=Launch({"SLURM_PROCID": "3"}, error="SLURM_PROCID is 3")), "launcher", "srun"),
        (replace(launched(), network=Network("here", ("127.0.0.1",))), "host name", "/etc/hosts"),
    ],
)
def test_what_would_fail(found: Facts, what: str, words: str) -> None:
    (line,) = lines("fail", found)
    assert line.what == what
    assert words in line.do


def test_launchers_that_are_well() -> None:
    for more in ({}, {"SLURM_PROCID": "0"}, {"GLOO_SOCKET_IFNAME": "eth0"}, {"PENSTOCK_PIPE": "4"}):
        assert {line.status for line in judge(launched(**more))} == {"ok"}
    (line,) = [line for line in judge(launched()) if line.what == "launcher"]
    assert line.text == "rank 1 of 4, 2 on this machine, that meet at first:29500"


# What is looked at ------------------------------------------------------------------------------------------


def test_code_for_a_gpu() -> None:
    built = ["sm_75", "sm_80", "sm_90a", "compute_90"]
    fits = {(7, 0): False, (7, 5): True, (8, 6): True, (9, 0): True, (12, 0): True}
    assert {capability: look._has_code(capability, built) for capability in fits} == fits
    assert not look._has_code((12, 0), built[:3])


def test_memory_of_a_container(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  4096 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\n")
    assert look._memory(meminfo, tmp_path) == (4 << 20, 2 << 20)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1048576\n")
    assert look._memory(meminfo, tmp_path) == (4 << 20, 2 << 20)
    (tmp_path / "memory.max").write_text("2097152\n")
    assert look._memory(meminfo, tmp_path) == (2 << 20, 1 << 20)


def test_variables_of_slurm() -> None:
    task = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SECRET": "x"}
    told = look._launch(task).variables
    assert (told["RANK"], told["WORLD_SIZE"], "SECRET" in told) == ("1", "2", False)
    error = look._launch({**task, "SLURM_PROCID": "x"}).error
    assert error is not None
    assert "SLURM_PROCID must be a whole number" in error
    error = look._launch({"MASTER_ADDR": "no.invalid"}).error
    assert error is not None
    assert "'no.invalid' is not known" in error


def test_processes_that_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that kills them: it is told, and nothing waits."""

    class Ended:
        exitcode = -9

        def join(self) -> None: ...

    class Pipe:
        def poll(self, seconds: float) -> bool:
            return True

        def recv(self) -> object:
            raise EOFError

    class Silent(Pipe):
        def poll(self, seconds: float) -> bool:
            return False

    outcome = exchange._outcome
    assert outcome("gloo", [(Ended(), Pipe())]).error == "process 0 ended with exit code -9"  # type: ignore[list-item]
    assert outcome("gloo", [(Ended(), Silent())]).error == "process 0 did not start within 90 s"  # type: ignore[list-item]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu() -> None:
    found = look._gpu(0)
    assert (found.supported, found.error) == (True, None)
    assert found.memory_free is not None
    assert 0 < found.memory_free <= found.memory


# For real ---------------------------------------------------------------------------------------------------


def test_this_machine(tmp_path: Path) -> None:
    done = run(warm("-m", "penstock", "doctor", "--json"), environment(), cwd=tmp_path)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert done.returncode == (not found["ok"])
    (gloo,) = [exchange for exchange in found["facts"]["exchanges"] if exchange["backend"] == "gloo"]
    assert gloo["error"] is None
    assert gloo["latency"] > 0
    assert {"python", "cores", "host name", "name server", "gloo", "nccl"} <= {line["what"] for line in found["lines"]}


def found_by_ranks(rank: int) -> tuple[tuple[Exchange, ...], list[Line]]:
    mine = exchange.between_ranks()
    lines = [line for line in judge(facts(exchanges=mine)) if line.what == "gloo"]
    return mine, doctor._of_all_ranks([*lines, Line("warn" if rank == 2 else "ok", "cores", f"of {rank}")])


def test_between_the_ranks_of_a_launcher() -> None:
    """Each pair is measured once, and rank 0 has it all to tell, with what is not well on others."""
    outcomes = run_ranks(found_by_ranks, 3)
    for mine, _ in outcomes:
        assert mine == outcomes[0][0]
    told = [(line.what, re.sub(r".* between", "between", line.text)) for line in outcomes[0][1]]
    pairs = [("gloo", f"between ranks {a} and {b}") for a, b in ((0, 1), (1, 2), (2, 0))]
    assert told == [*pairs, ("cores", "of 0"), ("cores", "rank 2: of 2")]


def test_a_launcher_whose_other_processes_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_DEADLINE", 1.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}.items():
        monkeypatch.setenv(name, str(value))
    (outcome,) = exchange.between_ranks()
    assert outcome.error is not None
    assert "could not join the others" in outcome.error


def test_a_rank_that_does_not_reach_rank_0_speaks_for_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(doctor, "look", lambda: facts(exchanges=(Exchange("torch.distributed", error="timed out"),)))
    assert main(["doctor"]) == 1
    assert "What would fail: torch.distributed (no warnings)." in capsys.readouterr().out


def test_page() -> None:
    found = facts(versions_python="3.9.1", machine_open_files=3)
    page = doctor._page(judge(found), 60)
    assert max(map(len, page)) <= 60
    assert page[0] == "fail  python         3.9.1"
    assert page[1] == "                     -> install python 3.11 or later"
    assert page[-1] == "What would fail: python (1 warning)."
    assert doctor._page(judge(WELL), 60)[-1] == "Nothing would fail (no warnings)."


def test_the_document() -> None:
    document = (Path(__file__).parents[2] / "docs" / "when-it-fails.md").read_text("utf-8")
    error = "process 0 did not exchange a message within 20 s"
    network = Network("host0", ("127.0.1.1",), None, (5.0,))
    found = judge(facts(network=network, exchanges=(Exchange("gloo", error=error),)))
    page = doctor._page([line for line in found if line.status != "ok"], 118)[:-2]
    assert "\n".join(page) in document
