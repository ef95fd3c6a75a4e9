"""The MNIST network of Graphcore's tutorial on pipelining, as four layers one after the other."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

__all__ = ["ConvLayer", "network"]


class ConvLayer(nn.Module):
    """Convolution, pooling, ReLU."""

    def __init__(self, channels: int, filters: int, kernel_size: int, pool_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel_size)
        self.pool = nn.MaxPool2d(pool_size)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.pool(self.conv(x)))


def network(seed: int = 0) -> nn.Sequential:
    """The network with the weights that ``seed`` gives: the same each time, and torch's own RNG as it was.

    Weights are in double precision, in which two runs that compute the same stay the same. In single precision they
    part after a few hundred steps: rounding turns a ReLU here and there, and training amplifies it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: dict[str, nn.Module] = {
            "conv1": ConvLayer(1, 10, kernel_size=5, pool_size=2),  # [n, 1, 28, 28] -> [n, 10, 12, 12]
            "conv2": ConvLayer(10, 20, kernel_size=5, pool_size=2),  # -> [n, 20, 4, 4]
            "hidden": nn.Sequential(nn.Flatten(), nn.Linear(320, 256), nn.ReLU()),  # -> [n, 256]
            "digit": nn.Linear(256, 10),  # -> [n, 10]
        }
    return nn.Sequential(OrderedDict(layers)).double()
