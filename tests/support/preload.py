"""The last import of the forkserver: loads modules that are otherwise imported when they are used, once in every fork.

The garbage collector ignores all objects that exist by now: a collection in a fork would copy their memory pages.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import torch.fx.experimental.symbolic_shapes
from torch._subclasses.fake_tensor import FakeTensorMode

import penstock

for package in ("engine", "train", "split", "schedule", "profile"):  # the others are also started with ``python -m``
    for module in pkgutil.walk_packages([f"{penstock.__path__[0]}/{package}"], f"penstock.{package}."):
        importlib.import_module(module.name)

if not torch.backends.cuda.is_built():  # else this would initialise CUDA, and forks could not use the GPU
    with FakeTensorMode():
        torch.empty(2, 2) @ torch.empty(2, 2)

gc.collect()
gc.freeze()
