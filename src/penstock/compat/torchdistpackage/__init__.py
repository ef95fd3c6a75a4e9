"""TorchDistPackage's topology and pipelines on Penstock, at the import paths of both its generations."""

from __future__ import annotations

from typing import NoReturn

from penstock.compat.torchdistpackage.ddp import NaiveDDP
from penstock.compat.torchdistpackage.dist import (
    get_mp_ckpt_suffix,
    is_using_pp,
    setup_distributed,
    setup_node_groups,
    test_comm,
    torch_parallel_context,
    tpc,
)
from penstock.compat.torchdistpackage.parallel import (
    CallableModule,
    NativeScalerPP,
    clip_grad_norm_,
    flat_and_partition,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_balanced,
    partition_uniform,
)
from penstock.compat.torchdistpackage.utils import fix_rand

__all__ = [
    "CallableModule",
    "NaiveDDP",
    "NativeScalerPP",
    "clip_grad_norm_",
    "fix_rand",
    "flat_and_partition",
    "flatten_model",
    "forward_backward",
    "forward_eval",
    "get_mp_ckpt_suffix",
    "is_using_pp",
    "partition_balanced",
    "partition_uniform",
    "setup_distributed",
    "setup_node_groups",
    "test_comm",
    "torch_parallel_context",
    "tpc",
]


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        "penstock.compat.torchdistpackage has TorchDistPackage's topology, pipelines and NaiveDDP, and nothing else of "
        f"it: no {name}. docs/migrating.md says what to use instead"
    )
