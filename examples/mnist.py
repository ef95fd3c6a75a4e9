"""Train a convolutional network in four stages on the MNIST digits of the package.

python examples/mnist.py                               one thread per stage
torchrun --nproc-per-node=4 examples/mnist.py          one process per stage
penstock run --stages 4 examples/mnist.py              the same; shows the output of rank 0
"""

from __future__ import annotations

import argparse
from itertools import count

import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.data import load_mnist


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank and in every run
    return nn.Sequential(
        nn.Conv2d(1, 10, kernel_size=5),  # stage 0: [n, 1, 28, 28] -> [n, 10, 12, 12]
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, kernel_size=5),  # stage 1: -> [n, 20, 4, 4]
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),  # stage 2: -> [n, 256]
        nn.Linear(320, 256),
        nn.ReLU(),
        nn.Linear(256, 10),  # stage 3: -> [n, 10]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a pipeline of four stages to read digits.")
    parser.add_argument("--steps", type=int, default=150, help="mini-batches of 80 digits (default 150: three epochs)")
    steps = parser.parse_args().steps

    train, test = load_mnist()
    mesh = ps.Mesh(pipe=4) if ps.is_distributed() else None
    plan = ps.split(network(), balance=[3, 3, 3, 1])
    pipe = ps.Pipeline(plan, loss_fn=F.cross_entropy, microbatches=8, schedule="1f1b", mesh=mesh)
    ps.print0(pipe.plan)  # only on rank 0

    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
    batches = (batch for epoch in count() for batch in train.batches(80, shuffle=epoch))
    for _ in ps.progress(range(steps), pipe, every=max(1, steps // 10)):
        pipe.step(*next(batches))  # forward and backward of all micro-batches
        pipe.clip_grad_norm_(1.0)  # the norm is over all stages
        optimizer.step()
        optimizer.zero_grad()

    pipe.eval()
    right = 0
    with torch.no_grad():
        for x, y in test.batches(100):
            logits = pipe(x)  # None on ranks without the last stage
            right += 0 if logits is None else int((logits.argmax(1).cpu() == y).sum())
    right = int(pipe.max_over_ranks(right))  # the maximum over all ranks, on every rank
    pipe.close()
    ps.print0(f"{right / len(test):.1%} of the test digits are right")


if __name__ == "__main__":
    main()
