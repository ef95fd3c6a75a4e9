"""Varuna programs on Penstock: ``from penstock.compat.varuna import CutPoint, Varuna``.

Every rank wraps the model, calls ``step`` with its replica's share of the mini-batch, and steps its own optimizer. What
is different, and what is not there, docs/migrating.md tells.
"""

from penstock.compat.varuna.auto_config import AutoConfig as AutoConfig
from penstock.compat.varuna.profiler import Profiler as Profiler
from penstock.compat.varuna.utils import get_this_rank_config_varuna as get_this_rank_config_varuna
from penstock.compat.varuna.utils import get_varuna_config as get_varuna_config
from penstock.compat.varuna.varuna import Varuna as Varuna
from penstock.split.marks import CutPoint as CutPoint
