"""Imported by the process that ranks are forks of: what torch imports when a first step learns shapes is there then."""

from __future__ import annotations

import torch
import torch.fx.experimental.symbolic_shapes
from torch._subclasses.fake_tensor import FakeTensorMode

if not torch.backends.cuda.is_built():  # or it would take hold of a GPU, which its forks could not use any more
    with FakeTensorMode():
        torch.empty(2, 2) @ torch.empty(2, 2)
