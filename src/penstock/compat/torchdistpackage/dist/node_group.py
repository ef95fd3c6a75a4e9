"""Groups of processes on one machine."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["setup_node_groups"]


def setup_node_groups(num_per_node: int = 8) -> dist.ProcessGroup:
    """This process's machine, where each has ``num_per_node`` processes of following ranks; all processes call it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = None
    for first in range(0, world, num_per_node):
        ranks = list(range(first, min(first + num_per_node, world)))
        group = dist.new_group(ranks)
        if rank in ranks:
            own = group
    assert isinstance(own, dist.ProcessGroup)
    return own
