"""``ps.init``: what joins the processes of torchrun, of SLURM, and of two machines; device, backend and threads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.train.launch import (
    is_slurm,
    omp_threads_set_by_user,
    slurm_first_host,
    slurm_tasks_per_node,
    slurm_variables,
    threads_per_process,
    usable_cores,
)
from tests.support.programs import environment, forked_python, free_port, run, run_all, torchrun

WHO = """
import json, os, warnings
warnings.simplefilter("error")
import torch, torch.distributed as dist
import penstock as ps

device = ps.init(timeout=60)
assert ps.init() == device
mesh = ps.Mesh(data=2)
ps.print0("hello")
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
report = {
    "device": str(device),
    "backend": dist.get_backend(),
    "threads": torch.get_num_threads(),
    "place": [mesh.data_rank, mesh.pipe_rank],
    "environment": {name: os.environ.get(name) for name in names},
}
text = json.dumps(report) + "\\n"
os.write(1, text.encode())  # one write: lines of several processes do not mix
"""


def who(text: str) -> list[dict[str, Any]]:
    report = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(report, key=lambda one: int(one["environment"]["RANK"]))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "who.py"
    file.write_text(WHO)
    return file


# Under torchrun ---------------------------------------------------------------------------------------------


def test_torchrun(script: Path) -> None:
    done = run(torchrun("--nproc-per-node=4", script))
    assert done.returncode == 0, done.stderr
    everyone = who(done.stdout)
    assert [one["place"] for one in everyone] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert {one["device"] for one in everyone} == {"cpu"}
    assert {one["backend"] for one in everyone} == {"gloo"}
    # torchrun has set OMP_NUM_THREADS to 1, because nobody else has
    assert {one["threads"] for one in everyone} == {max(1, usable_cores() // 4)}
    assert done.stdout.count("hello") == 1
    assert "Error" not in done.stderr


TRAIN = """
import torch, torch.nn.functional as F
from torch import nn
import penstock as ps

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()
pipe = ps.Pipeline(ps.split(model, stages=4), F.mse_loss, microbatches=4, schedule="zb_h1", mesh=ps.Mesh(pipe=4))
optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
data = [(torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)) for _ in range(5)]
for x, y in ps.progress(data, pipe):
    result = pipe.step(x, y)
    optimizer.step()
    optimizer.zero_grad()
    ps.print0(f"{float(result.loss):.12f}")
"""


def test_two_agents_on_one_host_stand_in_for_two_machines(tmp_path: Path) -> None:
    """Each starts two ranks of a pipeline of four, which trains to the plain model's losses."""
    file = tmp_path / "train.py"
    file.write_text(TRAIN)
    meet = ("--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    machine = torchrun(*meet, "--rdzv-id=test", "--local-addr=127.0.0.1", file)
    first, second = run_all([(machine, environment(OMP_NUM_THREADS="1"))] * 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    if not first.stdout:  # who came first is rank 0
        first, second = second, first
    *losses, conclusion = first.stdout.splitlines()
    assert losses == [f"{loss:.12f}" for loss in plain_losses()]
    assert conclusion.startswith("5 steps in ")
    assert "samples/s  bubble " in conclusion
    assert second.stdout == ""


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)) for _ in range(5)]
    losses = []
    for x, y in data:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# Under SLURM ------------------------------------------------------------------------------------------------


LATE = """
import time
if mesh.rank == 1:
    time.sleep(1.5)
    dist.distributed_c10d._get_default_store().check(["late"])
"""


def test_slurm(script: Path) -> None:
    """Two tasks as srun would start them. The job's number is a free port's, so that no other test meets them there.

    The store lives in rank 0, which must not end before rank 1 is done with it.
    """
    script.write_text(WHO + LATE)
    port = 12_000 + free_port() % 20_000
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(port - 12_000), "SLURM_JOB_NODELIST": "localhost"}
    tasks = [
        (forked_python(script), environment(**step, SLURM_PROCID=str(r), SLURM_LOCALID=str(r), SLURM_CPUS_PER_TASK="1"))
        for r in range(2)
    ]
    done = run_all(tasks)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    assert [one.stderr for one in done] == ["", ""]
    everyone = who("".join(one.stdout for one in done))
    assert [one["place"] for one in everyone] == [[0, 0], [1, 0]]
    assert [one["environment"] for one in everyone] == [
        {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    ]
    assert {one["threads"] for one in everyone} == {1}


def test_lists_of_nodes() -> None:
    for nodelist, expected in [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("node[003-005,7],gpu1", "node003 node004 node005 node7 gpu1"),
        ("node[8-11]", "node8 node9 node10 node11"),
        ("a-b[098-101]-c", "a-b098-c a-b099-c a-b100-c a-b101-c"),
        ("rack[1-2]n[1,3]", "rack1n1 rack1n3 rack2n1 rack2n3"),
        ("x[1], y[2] ,z", "x1 y2 z"),
        ("host.example.org", "host.example.org"),
    ]:
        assert slurm_first_host(nodelist) == expected.split()[0]


def test_lists_of_nodes_that_are_none() -> None:
    for nodelist in ["", ",", "n[1", "n1]", "n[[1]]", "n[]", "n[a]"]:
        with pytest.raises(ps.PlanError, match="SLURM's list of nodes"):
            slurm_first_host(nodelist)


def test_tasks_of_each_node() -> None:
    assert slurm_tasks_per_node("4") == [4]
    assert slurm_tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    for text in ("", "x", "2(3)", "0", "1,"):
        with pytest.raises(ps.PlanError, match=r"tasks per node.*'2\(x3\),1'"):
            slurm_tasks_per_node(text)


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "99",  # of the job; the step has
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_JOB_NODELIST": "other[1-9]",
    "SLURM_STEP_NODELIST": "node[07-10]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "3",
}


def test_variables_of_a_step() -> None:
    assert is_slurm(SLURM)
    assert slurm_variables(SLURM) == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(12_000 + (123_456 + 3) % 20_000),
    }
    last = slurm_variables({**SLURM, "SLURM_PROCID": "6", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
    assert (last["RANK"], last["LOCAL_WORLD_SIZE"]) == ("6", "1")
    assert slurm_variables({**SLURM, "SLURM_STEP_ID": "4"})["MASTER_PORT"] != slurm_variables(SLURM)["MASTER_PORT"]


def test_the_least_that_slurm_may_say() -> None:
    least = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}
    assert slurm_variables(least)["LOCAL_WORLD_SIZE"] == "4"
    assert slurm_variables(least)["LOCAL_RANK"] == "3"
    assert slurm_variables(least)["MASTER_ADDR"] == "127.0.0.1"
    spread = slurm_variables({**least, "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert (spread["LOCAL_RANK"], spread["LOCAL_WORLD_SIZE"], spread["MASTER_ADDR"]) == ("1", "2", "n1")
    assert not is_slurm({})
    assert not is_slurm({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"})  # a shell of salloc
    with pytest.raises(ps.PlanError, match=r"SLURM_PROCID is 4, but.*4 tasks"):
        slurm_variables({**least, "SLURM_PROCID": "4"})
    with pytest.raises(ps.PlanError, match=r"SLURM_PROCID must be a whole number, got 'x'.*srun"):
        slurm_variables({**least, "SLURM_PROCID": "x"})


# Threads ----------------------------------------------------------------------------------------------------


def test_threads_of_a_process() -> None:
    assert [threads_per_process(n, 8, {}) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    task = {"SLURM_PROCID": "0", "SLURM_CPUS_PER_TASK": "3"}
    assert threads_per_process(4, 8, task) == 3  # set aside for this task alone
    assert threads_per_process(4, 2, task) == 2
    assert (
        threads_per_process(4, 8, {**task, "TORCHELASTIC_RUN_ID": "x"}) == 2
    )  # set aside for torchrun, which starts four


def test_who_has_set_the_threads() -> None:
    under_torchrun = {"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}
    assert not omp_threads_set_by_user({})
    assert omp_threads_set_by_user({"OMP_NUM_THREADS": "1"})
    assert omp_threads_set_by_user({**under_torchrun, "OMP_NUM_THREADS": "2"})
    assert not omp_threads_set_by_user(under_torchrun)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1),
        ("0::/\n", {"cpu.max": "10000 100000"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000", "cpu.max": "max 100000"}, 1),
        ("3:cpu:/y\n0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("3:cpu:/y\n", {}, None),
        ("0::/\n", {"cpu.max": "what is this"}, None),
        ("0::/\n", {"cpu.max": "9900000 100000"}, None),
    ],
)
def test_cores_that_a_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: Mapping[str, str], expected: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5}, raising=False)
    (tmp_path / "cgroup").write_text(lines)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path / "cgroup", tmp_path) == (expected or 6)


def test_cores_without_control_groups(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "none", tmp_path) == len(os.sched_getaffinity(0))


# Errors --------------------------------------------------------------------------------------------


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
    return monkeypatch


def test_without_a_launcher_it_says_how_to_start(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ps.PlanError, match=r": RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set.*torchrun.*penstock"):
        ps.init()
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    with pytest.raises(ps.PlanError, match=r": MASTER_ADDR, MASTER_PORT not set"):
        ps.init()


def test_wrong_arguments_and_variables(bare: pytest.MonkeyPatch) -> None:
    wrong: Any
    for wrong in (0, -1, timedelta(0)):
        with pytest.raises(ps.PlanError, match="timeout must be a number of seconds above 0"):
            ps.init(timeout=wrong)
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in place.items():
        bare.setenv(name, value)
    for device, message in (("cuda:99", "cuda:99 is not there"), ("meta", "meta cannot run a stage"), ("gpu", "'gpu'")):
        with pytest.raises(ps.PlanError, match=message):
            ps.init(device)
    bare.setenv("RANK", "1")
    with pytest.raises(ps.PlanError, match="RANK is 1, but WORLD_SIZE is 1"):
        ps.init()


def test_ranks_that_do_not_come(bare: pytest.MonkeyPatch) -> None:
    port = str(free_port())
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in place.items():
        bare.setenv(name, value)
    with pytest.raises(ps.PipelineError, match=rf"rank 0 of 2 could not join .* at 127.0.0.1:{port}: Timed out") as it:
        ps.init(timeout=0.5)
    assert it.value.rank == 0
    assert not torch.distributed.is_initialized()


# One process ------------------------------------------------------------------------------------------------

ALONE = """
import os, torch, torch.distributed as dist
from datetime import timedelta
import penstock as ps
from penstock.train.launch import is_rank0

assert is_rank0() == (os.environ["RANK"] == "0")
torch.set_num_threads(3)  # somebody has chosen
assert ps.init("cpu", timeout=timedelta(seconds=30)) == torch.device("cpu")
assert torch.get_num_threads() == 3
ps.init(threads=2)
assert torch.get_num_threads() == 2
assert ps.Mesh().device == torch.device("cpu")
dist.destroy_process_group()  # the script's own business
ps.init(backend="gloo", threads=1)
assert torch.get_num_threads() == 1
dist.destroy_process_group()
dist.init_process_group("gloo")  # theirs, which is left as it is
assert ps.Mesh().pipe == 1
ps.print0("a", 1, sep="-", end="!")
"""


def test_one_process_again_and_again() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = run(forked_python("-W", "error", "-c", ALONE), environment(**place))
    assert (done.returncode, done.stdout, done.stderr) == (0, "a-1!", "")


def test_say_without_a_process_group(capsys: pytest.CaptureFixture[str], bare: pytest.MonkeyPatch) -> None:
    ps.print0("loss", 0.5)
    bare.setenv("SLURM_PROCID", "1")
    ps.print0("nothing")
    bare.setenv("RANK", "0")
    ps.print0("again")
    assert capsys.readouterr().out == "loss 0.5\nagain\n"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_of_its_own_speaks_nccl_and_a_shared_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "who.py"
    file.write_text(WHO.replace("ps.Mesh(data=2)", "ps.Mesh()"))
    env = {**environment(), "CUDA_VISIBLE_DEVICES": "0"}
    one = run(torchrun("--nproc-per-node=1", file), env)
    assert one.returncode == 0, one.stderr
    assert [(w["device"], w["backend"]) for w in who(one.stdout)] == [("cuda:0", "cpu:gloo,cuda:nccl")]
    assert "destroy" not in one.stderr
    two = run(torchrun("--nproc-per-node=2", file), env)
    assert two.returncode == 0, two.stderr
    assert [(w["device"], w["backend"]) for w in who(two.stdout)] == [("cuda:0", "gloo")] * 2
