"""Varuna programs on Penstock: ``from penstock.compat.varuna import CutPoint, Varuna``.

Every rank wraps the model, calls ``step`` with its replica's part of the mini-batch, and steps its own optimizer.
docs/migrating.md lists the differences.
"""

import penstock as ps
from penstock.compat import publish
from penstock.compat.varuna.profiler import *  # noqa: F403
from penstock.compat.varuna.varuna import *  # noqa: F403

CutPoint = ps.CutPoint

publish(__name__, globals(), {"auto_config": "AutoConfig", "utils": "get_this_rank_config_varuna get_varuna_config"})
