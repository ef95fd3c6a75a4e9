"""Imported last by the process that ranks are forks of: what torch imports in a first step, to learn shapes, is there
then. No fork looks through all of that for garbage, which would also give it a copy of its own of all that memory.
"""

from __future__ import annotations

import gc

import torch
import torch.fx.experimental.symbolic_shapes
from torch._subclasses.fake_tensor import FakeTensorMode

if not torch.backends.cuda.is_built():  # or it would take hold of a GPU, which its forks could not use any more
    with FakeTensorMode():
        torch.empty(2, 2) @ torch.empty(2, 2)

gc.collect()
gc.freeze()
