"""What ``run_varuna`` starts for every rank: the training script, with the arguments that Varuna's scripts take.

python -m penstock.compat.varuna.started MAP BATCH_SIZE CHUNK_SIZE train.py …
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Run the script as Python would."""
    stage_to_rank_map, batch_size, chunk_size, script, *others = arguments
    sys.argv = [
        script,
        f"--rank={os.environ['RANK']}",
        f"--local_rank={os.environ['LOCAL_RANK']}",
        f"--stage_to_rank_map={stage_to_rank_map}",
        f"--batch_size={batch_size}",
        f"--chunk_size={chunk_size}",
        *others,
    ]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
