"""TorchDistPackage's topology, pipelines and NaiveDDP on Penstock, at the import paths of both its generations."""

import random
import sys
from typing import NoReturn

import torch

from penstock.compat import publish
from penstock.compat.torchdistpackage.gradients import NaiveDDP, NativeScalerPP, clip_grad_norm_
from penstock.compat.torchdistpackage.pipeline import (
    CallableModule,
    flat_and_partition,
    flatten_model,
    forward_backward,
    forward_eval,
    partition_balanced,
    partition_uniform,
)
from penstock.compat.torchdistpackage.topology import (
    ProcessTopology,
    get_mp_ckpt_suffix,
    is_using_pp,
    setup_distributed,
    setup_node_groups,
    test_comm,
    torch_parallel_context,
    tpc,
)

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


def fix_rand(rank: int = 0, seed: int = 1024) -> None:
    """Seed all generators, differently on each rank, and make cuDNN deterministic."""
    random.seed(seed + rank)
    torch.manual_seed(seed + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed + rank)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(
        "penstock.compat.torchdistpackage has TorchDistPackage's topology, pipelines and NaiveDDP, and nothing else of "
        f"it: no {name}. docs/migrating.md says what to use instead"
    )


_clip = {"NativeScalerPP": NativeScalerPP, "clip_grad_norm_": clip_grad_norm_}
_schedule = {"forward_backward": forward_backward, "forward_eval": forward_eval}
_helper = {
    "CallableModule": CallableModule,
    "flat_and_partition": flat_and_partition,
    "flatten_model": flatten_model,
    "partition_balanced": partition_balanced,
    "partition_uniform": partition_uniform,
}
_topology = {
    "is_using_pp": is_using_pp,
    "test_comm": test_comm,
    "torch_parallel_context": torch_parallel_context,
    "tpc": tpc,
}
_dist = {
    "launch_from_slurm": {"setup_distributed": setup_distributed},
    "model_parallel_ckpt": {"get_mp_ckpt_suffix": get_mp_ckpt_suffix},
    "node_group": {"setup_node_groups": setup_node_groups},
    "process_topo": {"ProcessTopology": ProcessTopology, **_topology},
}
_pipeline = {"clip_grad_parallel": _clip, "pipeline_helper": _helper, "pipeline_sched": _schedule}

publish(
    __name__,
    {
        "utils": {"fix_rand": fix_rand},
        "ddp": {"NaiveDDP": NaiveDDP},
        "ddp.naive_ddp": {"NaiveDDP": NaiveDDP},
        "dist": {**_topology, **{name: entry for names in _dist.values() for name, entry in names.items()}},
        **{f"dist.{path}": names for path, names in _dist.items()},
        "parallel": {**_clip, **_helper, **_schedule},
        **{f"parallel.{path}": names for path, names in _pipeline.items()},
        "parallel.pipeline_parallel": {**_clip, **_helper, **_schedule},
        **{f"parallel.pipeline_parallel.{path}": names for path, names in _pipeline.items()},
    },
)
