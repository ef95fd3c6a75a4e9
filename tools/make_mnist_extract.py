"""Makes the extract of MNIST that the package ships, from a directory of the four original files.

    python tools/make_mnist_extract.py DIRECTORY [OUTPUT]

The same number of each digit, drawn and ordered by a fixed seed: the same input gives the same files.
"""

from __future__ import annotations

import gzip
import random
import sys
from pathlib import Path

import torch
from torch import Tensor

from penstock import data
from penstock.data import FILES, Digits, load_mnist

COUNTS = {"train": 400, "test": 100}  # of each of the ten digits
SEED = 1998  # the year of MNIST


def extract(digits: Digits, count: int) -> Digits:
    """``count`` of each digit, in mixed order."""
    chance = random.Random(SEED)
    chosen: list[int] = []
    for digit in range(10):
        chosen += chance.sample((digits.labels == digit).nonzero().flatten().tolist(), count)
    chance.shuffle(chosen)
    indices = torch.tensor(chosen)
    return Digits(digits.images[indices], digits.labels[indices])


def write_idx(path: Path, values: Tensor) -> None:
    """The inverse of ``read_idx``."""
    header = bytes([0, 0, 8, values.dim()]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(gzip.compress(header + bytes(values.flatten().tolist()), mtime=0))


def main(source: str, target: str | Path = Path(data.__file__).parent) -> None:
    for half, digits in zip(FILES, load_mnist(source), strict=True):
        few = extract(digits, COUNTS[half])
        for name, values in zip(FILES[half], (few.images, few.labels), strict=True):
            path = Path(target) / name
            write_idx(path, values)
            print(f"{path}: {list(values.shape)}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(*sys.argv[1:])
