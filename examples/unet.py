"""Train a U-Net in four stages. Skips are sent directly from the contracting stages to the expanding stages.

python examples/unet.py                               one thread per stage
torchrun --nproc-per-node=4 examples/unet.py          one process per stage
penstock run --stages 4 examples/unet.py              the same; shows the output of rank 0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps


@ps.skippable(stash=["skip"])
class Down(nn.Module):
    """Halve the resolution, double the channels, and stash the input as a skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, kernel_size=2, stride=2)

    def forward(self, x: Tensor) -> Iterator[Any]:  # [n, c, h, w] -> [n, 2c, h/2, w/2]
        yield ps.stash("skip", x)
        return torch.relu(self.conv(x))


@ps.skippable(pop=["skip"])
class Up(nn.Module):
    """Double the resolution, halve the channels, and concatenate the skip."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(2 * channels, channels, kernel_size=2, stride=2)
        self.mix = nn.Conv2d(2 * channels, channels, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Iterator[Any]:  # [n, 2c, h/2, w/2] -> [n, c, h, w]
        skip = yield ps.pop("skip")
        return torch.relu(self.mix(torch.cat([self.up(x), skip], dim=1)))


def network(channels: int = 8, depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank and in every run
    levels = [(channels * 2**i, ps.Namespace()) for i in range(depth)]  # a namespace for "skip" per level
    widest = channels * 2**depth
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        *(Down(c).isolate(level) for c, level in levels),
        nn.Sequential(nn.Conv2d(widest, widest, kernel_size=3, padding=1), nn.ReLU()),
        *(Up(c).isolate(level) for c, level in reversed(levels)),
        nn.Conv2d(channels, 1, kernel_size=1),
    )


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noisy pictures of discs, and the masks of the discs."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    center = 8 + 16 * torch.rand(n, 2, 1, 1, generator=g)
    disc = ((y - center[:, 0]) ** 2 + (x - center[:, 1]) ** 2 < 36).float().unsqueeze(1)  # [n, 1, 32, 32]
    return disc + 0.5 * torch.randn(disc.shape, generator=g), disc


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a U-Net as a pipeline of four stages.")
    parser.add_argument("--steps", type=int, default=30, help="mini-batches of 16 pictures")
    steps = parser.parse_args().steps

    mesh = ps.Mesh(pipe=4) if ps.is_distributed() else None
    plan = ps.split(network(), balance=[2, 3, 2, 2])
    pipe = ps.Pipeline(plan, loss_fn=nn.BCEWithLogitsLoss(), microbatches=4, schedule="1f1b", mesh=mesh)
    ps.print0(pipe.plan)  # only on rank 0
    for edge in pipe.plan.edges:
        ps.print0(f"stage {edge.src} -> stage {edge.dst}: {', '.join(edge.values) or 'the activation'}")

    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    for step in ps.progress(range(steps), pipe, every=max(1, steps // 10)):
        pipe.step(*pictures(16, seed=step))
        optimizer.step()
        optimizer.zero_grad()
    pipe.close()


if __name__ == "__main__":
    main()
