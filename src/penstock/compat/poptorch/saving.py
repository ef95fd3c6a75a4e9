"""Models in files: the model itself, its options, and its optimizer with its state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from penstock.compat.poptorch.errors import Error
from penstock.compat.poptorch.executor import PoplarExecutor
from penstock.compat.poptorch.options import Options

__all__ = ["load", "save"]

_FORMAT = "penstock.compat.poptorch 1"


def save(model: PoplarExecutor, filename: str) -> None:
    """Write a training or inference model to a file."""
    model.copyWeightsToHost()
    optimizer = None if model._updates is None else model._updates.optimizer
    content = {"format": _FORMAT, "model": model.model, "modes": model._modes, "options": model.options}
    torch.save({**content, "training": model._training, "optimizer": optimizer}, filename)


def load(filename: str, edit_opts_fn: Callable[[Options], Any] | None = None) -> PoplarExecutor:
    """The model that ``save`` wrote, with the options that ``edit_opts_fn`` makes of its own.

    The file has Python objects in it: load only what you wrote yourself.
    """
    content = torch.load(filename, map_location="cpu", weights_only=False)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise Error(f"{filename} was not written by a model's save()")
    options = content["options"].clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    loaded = PoplarExecutor(content["model"], options, content["training"], content["optimizer"])
    loaded._modes = content["modes"]
    return loaded
