"""fairscale's pipelines on Penstock, of its version 0.4.13: ``fairscale.nn.Pipe`` and ``AsyncPipe``."""

from penstock.compat.fairscale import nn as nn

__version__ = "0.4.13"
