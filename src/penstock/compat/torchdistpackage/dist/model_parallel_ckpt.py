"""Names of files that each hold one rank's part of a model."""

from __future__ import annotations

from penstock.compat.torchdistpackage.dist.process_topo import tpc

__all__ = ["get_mp_ckpt_suffix"]


def get_mp_ckpt_suffix() -> str:
    """``_tp_0_pp_1.pth``, of what there is of the two."""
    parts = [("tp", "tensor"), ("pp", "pipe")]
    named = [f"_{short}_{tpc.get_group_rank(mode)}" for short, mode in parts if tpc.is_mode_inited(mode)]
    return "".join(named) + ".pth"
