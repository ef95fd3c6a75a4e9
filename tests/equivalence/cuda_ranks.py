"""Rank processes that share one GPU and run one case after the other."""

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


class CudaRanks:
    """``check(case)`` on every rank of a world; a case may be a function of the rank. Failures are raised here.

    The ranks form ``data`` replicas of a pipeline. Each replica gets the whole mini-batch of a case: the mean over all
    replicas is the mean over one.
    """

    def __init__(self, count: int, backend: str, data: int = 1) -> None:
        context = forkserver_context()
        port = free_port()
        self.pipes: list[Connection[Any, Any]] = []
        self.processes = []
        for rank in range(count):
            pipe, remote = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, count, port, remote, backend, data), daemon=True)
            process.start()
            remote.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def check(self, case: Any) -> None:
        for pipe in self.pipes:
            pipe.send(case)
        errors = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(DEADLINE):
                raise AssertionError(f"rank {rank} did not finish within {DEADLINE:.0f} s: {case}")
            answer = pipe.recv()
            if answer is not None:
                errors.append(f"rank {rank}: {answer}")
        assert not errors, f"{case}\n" + "\n".join(errors)

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


@contextlib.contextmanager
def cuda_ranks(count: int, backend: str, data: int = 1) -> Iterator[CudaRanks]:
    ranks = CudaRanks(count, backend, data)
    try:
        yield ranks
    finally:
        ranks.close()


def _rank_main(rank: int, count: int, port: int, pipe: Connection[Any, Any], backend: str, data: int) -> None:
    import penstock as ps
    from tests.equivalence.check import check_step

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(count))
    # NCCL refuses two ranks on one GPU of one host: a host name for each rank gets around this.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    mesh = ps.Mesh(data=data, pipe=count // data, device="cuda:0")
    while (case := pipe.recv()) is not None:
        try:
            case(rank) if callable(case) else check_step(case, mesh)
            pipe.send(None)
        except Exception:
            pipe.send(traceback.format_exc())
    dist.destroy_process_group()
