"""One of several processes that run schedules, given as CSV, in torch's own runtime.

python -m tests.schedule.torch_worker RANK SIZE STORE_FILE MICROBATCHES SCHEDULE.csv...
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from penstock.schedule.text import from_csv

WIDTH, BATCH = 4, 12


def main(rank: int, size: int, store: str, num_microbatches: int, paths: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    try:
        for path in paths:
            compare(rank, num_microbatches, path)
            print(f"{path}: same as the plain model", flush=True)
    finally:
        dist.destroy_process_group()


def compare(rank: int, num_microbatches: int, path: str) -> None:
    """Loss and gradients of one step of torch's runtime are those of the plain model."""
    with open(path) as file:
        placement = from_csv(file.read()).placement
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in placement]
    x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
    expected_loss, expected_grads = plain_step(layers, x, y)

    mine = [s for s, r in enumerate(placement) if r == rank]
    stages = [PipelineStage(layers[s], s, len(placement), torch.device("cpu")) for s in mine]
    runtime = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(path)
    losses: list[Tensor] = []
    last = len(placement) - 1 in mine
    runtime.step(*([x] if 0 in mine else []), target=y if last else None, losses=losses if last else None)

    if last:
        torch.testing.assert_close(torch.stack(losses).mean(), expected_loss)
    for s in mine:
        for parameter, expected in zip(layers[s].parameters(), expected_grads[s], strict=True):
            torch.testing.assert_close(parameter.grad, expected)


def plain_step(layers: list[nn.Sequential], x: Tensor, y: Tensor) -> tuple[Tensor, list[list[Tensor]]]:
    loss = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
    grads = [list(torch.autograd.grad(loss, list(layer.parameters()), retain_graph=True)) for layer in layers]
    return loss.detach(), grads


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:])
