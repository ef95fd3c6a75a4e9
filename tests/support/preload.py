"""The last import of the forkserver: loads the modules that torch imports for shape inference in a first step.

The garbage collector ignores all objects that exist by now: a collection in a fork would copy their memory pages.
"""

from __future__ import annotations

import gc

import torch
import torch.fx.experimental.symbolic_shapes
from torch._subclasses.fake_tensor import FakeTensorMode

if not torch.backends.cuda.is_built():  # else this would initialise CUDA, and forks could not use the GPU
    with FakeTensorMode():
        torch.empty(2, 2) @ torch.empty(2, 2)

gc.collect()
gc.freeze()
