"""Varuna programs on Penstock: ``from penstock.compat.varuna import CutPoint, Varuna``.

Every rank wraps the model, calls ``step`` with its replica's part of the mini-batch, and steps its own optimizer.
docs/migrating.md lists the differences.
"""

import penstock as ps
from penstock.compat import publish
from penstock.compat.varuna.profiler import AutoConfig as AutoConfig
from penstock.compat.varuna.profiler import Profiler as Profiler
from penstock.compat.varuna.utils import get_this_rank_config_varuna as get_this_rank_config_varuna
from penstock.compat.varuna.utils import get_varuna_config as get_varuna_config
from penstock.compat.varuna.varuna import Varuna as Varuna

CutPoint = ps.CutPoint

publish(__name__, globals(), {"auto_config": "AutoConfig"})
