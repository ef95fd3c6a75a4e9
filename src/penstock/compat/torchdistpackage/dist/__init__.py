"""Processes and their groups."""

from penstock.compat.torchdistpackage.dist.launch_from_slurm import setup_distributed
from penstock.compat.torchdistpackage.dist.model_parallel_ckpt import get_mp_ckpt_suffix
from penstock.compat.torchdistpackage.dist.node_group import setup_node_groups
from penstock.compat.torchdistpackage.dist.process_topo import is_using_pp, test_comm, torch_parallel_context, tpc

__all__ = [
    "get_mp_ckpt_suffix",
    "is_using_pp",
    "setup_distributed",
    "setup_node_groups",
    "test_comm",
    "torch_parallel_context",
    "tpc",
]
