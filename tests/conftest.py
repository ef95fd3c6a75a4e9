"""For all tests, and for the programs that they start."""

from __future__ import annotations

import os

# torch looks up the name of every process that connects to its store. Where names are not known, that takes seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
