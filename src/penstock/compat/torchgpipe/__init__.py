"""torchgpipe's API, versions 0.0.7 and 0.0.2, on Penstock: see docs/migrating.md."""

import penstock as ps
from penstock import hooks
from penstock.compat import publish
from penstock.compat.torchgpipe import balance, gpipe

__all__ = ["GPipe", "current_microbatch", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"

GPipe, current_microbatch = gpipe.GPipe, gpipe.current_microbatch
is_checkpointing, is_recomputing = hooks.is_checkpointing, ps.is_recomputing

MODULES = {
    "balance.blockpartition": "solve",
    "balance.profile": "layerwise_sandbox",
    "batchnorm": "DeferredBatchNorm",
    "skip": "Namespace pop skippable stash verify_skippables",
    "skip.namespace": "Namespace",
    "skip.skippable": "Skippable pop skippable stash verify_skippables",
}
_names = {**vars(balance), **vars(gpipe), "__version__": __version__}
publish(__name__, _names, {"__version__": "__version__", **MODULES})
