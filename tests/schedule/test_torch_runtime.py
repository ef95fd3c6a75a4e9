"""Our schedules run in torch's own runtime, on two gloo processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch

from penstock.schedule.registry import build
from penstock.schedule.text import to_csv
from tests.support.fork_python import fork_python

NAMES = ["gpipe", "1f1b", "interleaved", "zb_h1"]
if torch.__version__ >= "2.12":  # before, torch does not connect the ranks of a V over gloo
    NAMES += ["zbv", "v_min"]
RANKS, MICROBATCHES = 2, 4
DEADLINE = 120  # seconds; it takes a few


def test_torch_runs_our_csv(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.csv" for name in NAMES]
    for name, path in zip(NAMES, paths, strict=True):
        path.write_text(to_csv(build(name, RANKS, MICROBATCHES)))

    # A store in a file: no port to find, none to lose to another process.
    command = [fork_python(), "-m", "tests.schedule.torch_worker"]
    arguments = [str(RANKS), str(tmp_path / "store"), str(MICROBATCHES), *map(str, paths)]
    loopback = "lo" if sys.platform == "linux" else "lo0"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    logs = [tmp_path / f"rank{rank}.log" for rank in range(RANKS)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                workers.append(
                    subprocess.Popen(
                        [*command, str(rank), *arguments],
                        cwd=Path(__file__).parents[2],
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        end = time.monotonic() + DEADLINE
        while any(worker.poll() is None for worker in workers) and time.monotonic() < end:
            time.sleep(0.05)
        codes = [worker.poll() for worker in workers]  # None: not done within the deadline
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    said = "\n".join(log.read_text() for log in logs)
    assert codes == [0] * RANKS, said
    assert said.count("same as the plain model") == RANKS * len(NAMES)
