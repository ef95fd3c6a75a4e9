"""Odds and ends."""

from __future__ import annotations

import random
import sys

import torch

__all__ = ["fix_rand"]


def fix_rand(rank: int = 0, seed: int = 1024) -> None:
    """Seed all generators, differently on each rank, and let cuDNN choose the same algorithms each time."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + rank)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
