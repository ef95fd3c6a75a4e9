"""A replacement of torchvision's MNIST and three transforms, which downloads nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from penstock.data import load_mnist

__all__ = ["SHARED", "fake_torchvision", "full_mnist_folder"]

SHARED = Path(os.environ.get("PENSTOCK_SHARED", Path(__file__).parents[3] / "shared"))
"""Where the documents and the whole of MNIST are, if they are at hand: beside the project, unless it is said."""


def full_mnist_folder() -> Path | None:
    """The directory of the full MNIST, if it exists."""
    folder = SHARED / "data" / "mnist"
    return folder if (folder / "train-images-idx3-ubyte.gz").is_file() else None


class MNIST(Dataset[tuple[Any, int]]):
    """The digits of ``folder``, or the extract that comes with Penstock."""

    folder: Path | None = None

    def __init__(
        self, root: str, train: bool = True, download: bool = False, transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.digits = load_mnist(self.folder)[0 if train else 1]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.digits.images[index]
        return image if self.transform is None else self.transform(image), int(self.digits.labels[index])


class Compose:
    def __init__(self, transforms: list[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    """Bytes to floats from 0 to 1, with a channel dimension."""

    def __call__(self, image: Tensor) -> Tensor:
        return image.unsqueeze(0).float().div_(255)


class Normalize:
    def __init__(self, mean: tuple[float], std: tuple[float]) -> None:
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image: Tensor) -> Tensor:
        return image.sub_(self.mean).div_(self.std)


class _SilentProgressBar:
    """A replacement of tqdm's progress bar."""

    def __init__(self, iterable: Any, total: int | None = None) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)

    def set_description(self, text: str) -> None:
        self.description = text


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


@contextmanager
def fake_torchvision(folder: Path | None = None) -> Iterator[None]:
    """Let ``import torchvision`` and ``import tqdm`` find the replacements, with the digits of ``folder``."""
    vision: Any = _module("torchvision")
    vision.datasets, vision.transforms = _module("torchvision.datasets"), _module("torchvision.transforms")
    vision.datasets.MNIST = MNIST
    for kind in (Compose, ToTensor, Normalize):
        setattr(vision.transforms, kind.__name__, kind)
    bars: Any = _module("tqdm")
    bars.tqdm = _SilentProgressBar
    ours = {"torchvision": vision, "tqdm": bars}
    before = {name: sys.modules.get(name) for name in ours}
    try:
        sys.modules.update(ours)
        MNIST.folder = folder
        yield
    finally:
        MNIST.folder = None
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
