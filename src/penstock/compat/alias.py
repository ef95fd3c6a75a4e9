"""Run an unmodified program that imports another library, on Penstock.

python -m penstock.compat.alias torchgpipe -- train.py --epochs 3
python -m penstock.compat.alias torchgpipe fairscale -- -m pytest tests
torchrun --nproc-per-node=4 -m penstock.compat.alias fairscale -- train.py
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from penstock.compat import SYSTEMS, install
from penstock.errors import PlanError

__all__ = ["main"]

USAGE = f"""usage: python -m penstock.compat.alias SYSTEM … -- program.py [argument …]
       python -m penstock.compat.alias SYSTEM … -- -m module [argument …]
systems: {", ".join(SYSTEMS)}"""

SHIM = """from penstock.compat import install

__penstock_alias__ = True
install({system!r})
"""


def main(arguments: Sequence[str]) -> int:
    """Install the systems named before ``--``, and run the program named after it like Python."""
    separator = arguments.index("--") if "--" in arguments else len(arguments)
    systems, program = list(arguments[:separator]), list(arguments[separator + 1 :])
    if not systems or not program or program == ["-m"]:
        print(USAGE, file=sys.stderr)
        return 2
    try:
        install(*systems)
    except PlanError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="penstock_alias") as folder:
        # Processes that the program starts find modules of the libraries' names through PYTHONPATH.
        for system in systems:
            for name in SYSTEMS[system]:
                (Path(folder) / f"{name}.py").write_text(SHIM.format(system=system))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        if program[0] == "-m":
            sys.argv, sys.path[0] = program[1:], os.getcwd()
            name, module = program[1], sys.modules.get(program[1])
            if module is not None and not hasattr(module, "__path__"):  # a module of the facade is the main program
                del sys.modules[name], sys.modules[module.__name__]
                name = module.__name__
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = program, str(Path(program[0]).resolve().parent)
            runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
