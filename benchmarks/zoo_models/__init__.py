"""Tiny random models of third-party libraries, for ``python -m benchmarks zoo``.

One module per library or kind of model. Each has ``entries()``, which imports the library and returns its ``Entry``
list. Nothing is downloaded: models are built from configurations, with random weights.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "LIBRARIES", "Entry", "entries_of", "generic_loss", "ids", "mask", "noise"]

BATCH = 4

LIBRARIES = {
    "handwritten": ["handwritten"],
    "torch": ["torch_nn"],
    "transformers": ["transformers_decoders", "transformers_encoders", "transformers_seq2seq", "transformers_vision",
                     "transformers_other"],
    "peft": ["peft_lora"],
    "diffusers": ["diffusers_models"],
    "timm": ["timm_models"],
    "x_transformers": ["x_transformers_models"],
    "vit_pytorch": ["vit_pytorch_models"],
    "torch_geometric": ["geometric"],
    "monai": ["monai_nets"],
    "speechbrain": ["speechbrain_lobes"],
    "open_clip": ["open_clip_models"],
    "segmentation_models_pytorch": ["segmentation_models"],
    "efficientnet_pytorch": ["efficientnet"],
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One model: how to build it, its mini-batch, its loss, and the arguments of ``ps.split`` that help."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    """The mini-batch of four samples: a dict of keywords or a tuple of positional arguments."""
    own_loss: bool = False
    """The model's output has the loss."""
    help: Mapping[str, Any] = field(default_factory=dict)
    """Arguments for ``ps.split`` if one line and ``sample=`` are refused: ``{"blocks": "model.layers"}``."""
    loss_fn: Callable[[Any], Tensor] | None = None
    """A loss of the output other than ``generic_loss``."""
    microbatches_only: bool = False
    """The mini-batch as a whole is no input of the model: the plain model runs on the micro-batches."""
    eval_mode: bool = False
    """Run in eval mode: the model draws random numbers in training even with all dropout at 0."""


def entries_of(module: str) -> list[Entry]:
    """The entries of one module of this package."""
    found: list[Entry] = importlib.import_module(f"benchmarks.zoo_models.{module}").entries()
    return found


def ids(*shape: int, vocab: int = 99, seed: int = 1) -> Tensor:
    """Random token ids of 5 and above: smaller ones are often special tokens."""
    return torch.randint(5, vocab, shape, generator=torch.Generator().manual_seed(seed))


def noise(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask(length: int, padded: int = 3) -> Tensor:
    """An attention mask of four sequences; every second one has padding at its end."""
    rows = torch.ones(BATCH, length, dtype=torch.long)
    rows[1::2, length - padded :] = 0
    return rows


def float_leaves(value: Any) -> list[Tensor]:
    """The floating tensors with a gradient in nested outputs; caches of keys and values are left out."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.requires_grad else []
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() if key != "past_key_values" for leaf in float_leaves(item)]
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in float_leaves(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [leaf for name in value.__dataclass_fields__ for leaf in float_leaves(getattr(value, name, None))]
    for name in ("sample", "latent_dist"):  # outputs of diffusers
        if isinstance(getattr(value, name, None), Tensor):
            return float_leaves(getattr(value, name))
    return []


def generic_loss(output: Any) -> Tensor:
    """A mean over samples of all floating outputs, with fixed weights per element, plus a small mean square."""
    leaves = float_leaves(output)
    if not leaves:
        raise ValueError(f"no floating output with a gradient in a {type(output).__name__}")
    total = leaves[0].new_zeros(())
    for leaf in leaves:
        features = math.prod(leaf.shape[1:])
        weights = torch.cos(torch.arange(features, dtype=leaf.dtype, device=leaf.device) * 1.7).view(leaf.shape[1:])
        total = total + (leaf * weights).mean() + 0.1 * leaf.square().mean()
    return total


class _Stub(types.ModuleType):
    """A module whose every attribute is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (nn.Module,), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


def stub(root: str, names: str = "") -> None:
    """Put empty modules into ``sys.modules``, so that libraries can be imported which only name them."""
    if root in sys.modules:
        return
    for name in ["", *names.split()]:
        full = f"{root}.{name}".rstrip(".")
        module = _Stub(full)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        sys.modules[full] = module
        parent, _, last = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules[root].__version__ = "2.13.0"  # type: ignore[attr-defined]


def stub_torchvision() -> None:
    """A stub of torchvision, which has no CPU build for this torch."""
    stub("torchvision", "transforms transforms.functional transforms._functional_video transforms.v2 ops ops.misc "
         "datasets datasets.folder models models.feature_extraction models.resnet models.densenet models.vgg "
         "models.mobilenetv2 models.mobilenet utils io tv_tensors extension")  # fmt: skip
    for name in ("torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name].InterpolationMode = _Interpolation  # type: ignore[attr-defined]


class _Interpolation:
    """The names of torchvision's enumeration; timm has tables of them."""

    NEAREST, BILINEAR, BICUBIC, BOX, HAMMING, LANCZOS, NEAREST_EXACT = range(7)
