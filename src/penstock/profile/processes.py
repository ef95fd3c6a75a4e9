"""The link between processes of a run that is to come: two are started here, send to each other, and end.

    process_link("cpu", 4)         # of which each would have a fourth of the cores

Between threads nothing is copied, between processes all is: a plan for the one is none for the other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import penstock
from penstock.errors import PlanError
from penstock.profile.costs import Link
from penstock.profile.links import measure_links
from penstock.train.mesh import Mesh

__all__ = ["process_link"]

_PATIENCE = 120.0  # seconds: to import torch takes most of it, on a machine that is busy


def process_link(device: str, ranks: int) -> Link:
    """The link between two of ``ranks`` processes of this machine; over NCCL if they are to have GPUs."""
    # The store is here, on a port that the system gave it: no other program can take it in between.
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    kind, threads = torch.device(device).type, max(1, (os.cpu_count() or 1) // ranks)
    found = os.pathsep.join(filter(None, [str(Path(penstock.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    started: list[subprocess.Popen[str]] = []
    errors = ""
    try:
        for rank in range(2):
            words = [sys.executable, "-m", __name__, str(rank), kind, str(store.port), str(threads)]
            process = subprocess.Popen(
                words, text=True, env={**os.environ, "PYTHONPATH": found}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            started.append(process)
        said, errors = started[0].communicate(timeout=_PATIENCE)
        return Link(**json.loads(said.splitlines()[-1]))
    except subprocess.TimeoutExpired as error:
        raise _unknown(f"two processes have not done so within {_PATIENCE:.0f} s") from error
    except (OSError, ValueError, IndexError) as error:
        raise _unknown((errors.strip() or str(error)).splitlines()[-1]) from error
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _unknown(why: str) -> PlanError:
    return PlanError(
        f"the link between processes could not be measured: {why}. Give link=, its latency and bandwidth, or costs="
    )


def _work(rank: int, kind: str, port: int, threads: int) -> None:
    """One of the two processes: the first says what both have measured."""
    torch.set_num_threads(threads)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    patience = timedelta(seconds=_PATIENCE)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)  # type: ignore[attr-defined]
    backends = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"  # as ps.init has them
    dist.init_process_group(backends, store=store, rank=rank, world_size=2, timeout=patience)
    link = measure_links(Mesh(data=1, pipe=2, tensor=1, device=device)).worst
    if rank == 0:
        print(json.dumps(asdict(link)), flush=True)
    else:
        time.sleep(_PATIENCE)  # the first may still be at it: whoever started this one ends it


if __name__ == "__main__":
    _work(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
