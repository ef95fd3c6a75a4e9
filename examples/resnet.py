"""Train a ResNet, split by a list of its layers, on the MNIST digits of the package.

python examples/resnet.py                              one thread per stage
torchrun --nproc-per-node=2 examples/resnet.py         one process per stage
penstock run --stages 2 examples/resnet.py             the same; shows the output of rank 0
"""

from __future__ import annotations

import argparse
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.data import load_mnist


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(ins, outs, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outs)
        self.conv2, self.bn2 = nn.Conv2d(outs, outs, 3, padding=1, bias=False), nn.BatchNorm2d(outs)
        self.shortcut = nn.Identity() if ins == outs else nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [n, ins, h, w] -> [n, outs, h/stride, w/stride]
        inside = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.bn2(self.conv2(inside)))


class ResNet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:  # [n, 1, 28, 28] -> [n, classes]
        return self.fc(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


def network() -> ResNet:
    torch.manual_seed(0)  # the same weights on every rank and in every run
    return ResNet()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a ResNet as a pipeline.")
    parser.add_argument("--stages", type=int, default=4, help="threads; a mesh has a stage for each process")
    parser.add_argument("--steps", type=int, default=60, help="mini-batches of 64 digits")
    args = parser.parse_args()

    mesh = ps.Mesh() if ps.is_distributed() else None
    stages = args.stages if mesh is None else mesh.pipe
    model = network()
    # The forward as a list of names, modules and functions. The name of a Sequential stands for its members.
    flat = ps.flatten(model, [model.stem, "layer1", "layer2", "layer3", lambda x: x.mean((2, 3)), "fc"])
    # All blocks cost about the same: later ones have half the resolution and twice the channels. Count layers.
    plan = ps.split(flat, stages=stages, balance="uniform")
    # BatchNorm normalises each micro-batch; its running statistics are those of the whole mini-batch.
    pipe = ps.Pipeline(plan, F.cross_entropy, microbatches=4, batchnorm="deferred", mesh=mesh)
    ps.print0(pipe.plan)

    train, test = load_mnist()
    optimizer = torch.optim.Adam(pipe.parameters(), lr=3e-3)
    batches = (batch for epoch in count() for batch in train.batches(64, shuffle=epoch))
    for _ in ps.progress(range(args.steps), pipe, every=max(1, args.steps // 10)):
        pipe.step(*next(batches))
        optimizer.step()
        optimizer.zero_grad()

    plain = network().eval()
    plain.load_state_dict(pipe.state_dict(full=True))  # with the original parameter names
    pipe.close()
    x, y = next(test.batches(len(test)))
    with torch.no_grad():
        right = (plain(x).argmax(1) == y).float().mean()
    ps.print0(f"{right:.1%} of the test digits are right")


if __name__ == "__main__":
    main()
