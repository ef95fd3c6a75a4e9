"""torchgpipe's API, versions 0.0.7 and 0.0.2, on Penstock: see docs/migrating.md."""

import penstock as ps
from penstock.compat import publish
from penstock.compat.torchgpipe import balance, skip
from penstock.compat.torchgpipe.gpipe import GPipe, current_microbatch
from penstock.compat.torchgpipe.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables

__all__ = ["GPipe", "current_microbatch", "is_checkpointing", "is_recomputing"]

__version__ = "0.0.7"

is_checkpointing = ps.is_checkpointing
is_recomputing = ps.is_recomputing

SKIPPABLE = {
    "Skippable": Skippable,
    "pop": pop,
    "skippable": skippable,
    "stash": stash,
    "verify_skippables": verify_skippables,
}

publish(
    __name__,
    {
        "__version__": {"__version__": __version__},
        "balance.blockpartition": {"solve": balance.solve},
        "balance.profile": {"layerwise_sandbox": balance.layerwise_sandbox},
        "skip.namespace": {"Namespace": Namespace},
        "skip.skippable": SKIPPABLE,
    },
)
