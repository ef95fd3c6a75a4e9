"""A set of worker processes that takes one case after the other, so that many cases cost one start."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from tests.support.ranks import forkserver_context, free_port

DEADLINE = 60.0  # seconds for one case


class Ranks:
    """``check(case)`` on every rank of a world; the first complaint is raised here. A case may be a function of a rank.

    With ``backend`` the ranks share the first GPU. They make ``data`` replicas of a pipeline, each of which is given
    the whole of a case's mini-batch: the mean over all of them is the mean over one.
    """

    def __init__(self, count: int, backend: str | None = None, data: int = 1) -> None:
        context = forkserver_context()
        port = free_port()
        self.lines: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, port, theirs, backend, data), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(mine)
            self.processes.append(process)

    def check(self, case: Any) -> None:
        for line in self.lines:
            line.send(case)
        complaints = []
        for rank, line in enumerate(self.lines):
            if not line.poll(DEADLINE):
                raise AssertionError(f"rank {rank} did not finish within {DEADLINE:.0f} s: {case}")
            answer = line.recv()
            if answer is not None:
                complaints.append(f"rank {rank}: {answer}")
        assert not complaints, f"{case}\n" + "\n".join(complaints)

    def close(self) -> None:
        for line in self.lines:
            with contextlib.suppress(OSError):
                line.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def ranks(count: int, backend: str | None = None, data: int = 1) -> Iterator[Ranks]:
    made = Ranks(count, backend, data)
    try:
        yield made
    finally:
        made.close()


def _serve(rank: int, count: int, port: int, line: Connection[Any, Any], backend: str | None, data: int) -> None:
    import penstock as ps
    from tests.equivalence.check import check_step

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    torch.set_num_threads(1)
    if backend is not None:
        # NCCL refuses two ranks on one GPU of one host: let it take every rank for a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        dist.init_process_group(backend)
    mesh = ps.Mesh(data=data, pipe=count // data, device=None if backend is None else "cuda:0")
    while (case := line.recv()) is not None:
        try:
            case(rank) if callable(case) else check_step(case, mesh)
            line.send(None)
        except Exception:
            line.send(traceback.format_exc())
    dist.destroy_process_group()
