"""Resume a run from its checkpoints, after a failure or with another number of stages.

python examples/resume.py run --stages 3                        one thread per stage; Ctrl-C, then change the number
penstock run --stages 2 examples/resume.py run                  one process per stage; kill one of them
penstock run --elastic --stages 2 examples/resume.py run        restarts automatically after a failure
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps


def network() -> nn.Module:
    torch.manual_seed(0)  # the same weights on every rank and in every run
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(8)]
    return nn.Sequential(nn.Linear(16, 32), *blocks, nn.Linear(32, 4))


def samples() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=generator)
    return list(zip(x, x[:, :4].argmax(1), strict=True))


def main(folder: str, stages: int, epochs: int, pause: float) -> None:
    mesh = ps.Mesh(pipe=-1) if ps.is_distributed() else None  # all ranks of this start
    plan = ps.split(network(), stages=stages if mesh is None else mesh.pipe)
    with ps.Pipeline(plan, F.cross_entropy, microbatches=4, seed=1, mesh=mesh) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        loader = ps.DataLoader(samples(), batch_size=32, shuffle=True, pipe=pipe)
        checkpoints = ps.Checkpoints(folder, every=5, keep=2)
        step = checkpoints.load(pipe, optimizer, loader=loader)
        ps.print0(f"{plan.num_stages} stages, from step {step}")
        while loader.epoch < epochs:
            for x, y in loader:
                result = pipe.step(x, y)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                ps.print0(f"step {step} loss {result.loss:.6f}")
                checkpoints.save(step, pipe, optimizer, loader=loader, asynchronous=True)
                time.sleep(pause)  # leaves time to kill it
        checkpoints.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.1)
    main(**vars(parser.parse_args()))
