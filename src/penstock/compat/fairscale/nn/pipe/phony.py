"""As in torchgpipe, with a size."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

__all__ = ["get_phony"]


@cache
def get_phony(device: torch.device, *, requires_grad: bool) -> Tensor:
    """A tensor of size 1; the same one each time. A function of autograd's returns ``get_phony(…).detach()``."""
    return torch.empty(1, device=device, requires_grad=requires_grad)
