"""TorchDistPackage's topology, pipelines and NaiveDDP on Penstock, at the import paths of both its generations."""

from typing import NoReturn

from penstock.compat import publish
from penstock.compat.torchdistpackage.pipeline import *  # noqa: F403
from penstock.compat.torchdistpackage.topology import *  # noqa: F403


def __getattr__(name: str) -> NoReturn:
    remedy = "docs/migrating.md says what is included, and what to use instead"
    raise AttributeError(f"penstock.compat.torchdistpackage has no {name}. {remedy}")


_clip = "NativeScalerPP clip_grad_norm_"
_helper = "CallableModule flat_and_partition flatten_model partition_balanced partition_uniform"
_schedule = "forward_backward forward_eval"
_topology = "is_using_pp test_comm torch_parallel_context tpc"

_pipeline = {
    "": f"{_clip} {_helper} {_schedule}",
    ".clip_grad_parallel": _clip,
    ".pipeline_helper": _helper,
    ".pipeline_sched": _schedule,
}

publish(
    __name__,
    globals(),
    {
        "utils": "fix_rand",
        "ddp": "NaiveDDP",
        "ddp.naive_ddp": "NaiveDDP",
        "dist": f"{_topology} setup_distributed get_mp_ckpt_suffix setup_node_groups",
        "dist.launch_from_slurm": "setup_distributed",
        "dist.model_parallel_ckpt": "get_mp_ckpt_suffix",
        "dist.node_group": "setup_node_groups",
        "dist.process_topo": f"ProcessTopology {_topology}",
        **{f"parallel{path}": names for path, names in _pipeline.items()},
        **{f"parallel.pipeline_parallel{path}": names for path, names in _pipeline.items()},
    },
)
