"""torchgpipe's API on Penstock, of its versions 0.0.7 and 0.0.2: see docs/migrating.md."""

from penstock.compat.torchgpipe.__version__ import __version__ as __version__
from penstock.compat.torchgpipe.checkpoint import is_checkpointing, is_recomputing
from penstock.compat.torchgpipe.gpipe import GPipe, current_microbatch

__all__ = ["GPipe", "current_microbatch", "is_checkpointing", "is_recomputing"]
