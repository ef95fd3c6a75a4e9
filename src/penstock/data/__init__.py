"""MNIST, read from its original file format: the extract in this package, or the full data in a directory."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock.errors import PenstockError

FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
"""The original names of the files with images and labels."""

_MEAN, _DEVIATION = 0.1307, 0.3081  # of all training pixels, scaled to 0 … 1


@dataclass(frozen=True)
class Digits:
    """Images of handwritten digits, and their labels."""

    images: Tensor  # [n, 28, 28], bytes
    labels: Tensor  # [n], bytes from 0 to 9

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, *, shuffle: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Mini-batches of (normalised images, labels), shuffled with the seed ``shuffle`` if it is given.

        The last mini-batch may be smaller.
        """
        order = torch.arange(len(self))
        if shuffle is not None:
            order = torch.randperm(len(self), generator=torch.Generator().manual_seed(shuffle))
        for indices in torch.split(order, size):
            pixels = self.images[indices].unsqueeze(1).float() / 255  # [size, 1, 28, 28], from 0 to 1
            yield (pixels - _MEAN) / _DEVIATION, self.labels[indices].long()


def load_mnist(directory: str | Path | None = None) -> tuple[Digits, Digits]:
    """The training and the test digits: the 4,000 and 1,000 in the package, or all in the files of ``directory``."""
    folder = Path(__file__).parent if directory is None else Path(directory)
    missing = [name for pair in FILES.values() for name in pair if not (folder / name).is_file()]
    if missing:
        raise PenstockError(
            f"{folder} does not have {', '.join(missing)}: download the four files of MNIST, for example from "
            "https://ossci-datasets.s3.amazonaws.com/mnist/"
        )
    halves = []
    for pair in FILES.values():
        images, labels = (read_idx(folder / name) for name in pair)
        if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
            raise PenstockError(
                f"{' and '.join(pair)} in {folder} do not belong together: they have the shapes "
                f"{list(images.shape)} and {list(labels.shape)}"
            )
        halves.append(Digits(images, labels))
    return halves[0], halves[1]


def read_idx(path: str | Path) -> Tensor:
    """Read a gzip-compressed idx file of bytes."""
    try:
        data = gzip.decompress(Path(path).read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise PenstockError(f"{path} cannot be read: {error}") from error
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise PenstockError(f"{path} is not an idx file of bytes: it starts with {data[:4].hex(' ') or 'nothing'}")
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    have, need = len(data) - start, math.prod(shape)
    if have != need:
        raise PenstockError(f"{path} has {have} bytes of data, but its shape {shape} needs {need}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).reshape(shape)
