"""Run a program that imports another system, on Penstock.

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
       python -m penstock.compat.alias SYSTEM … -- -c code [argument …]
systems: {", ".join(SYSTEMS)}"""

SHIM = """from penstock.compat import install

__penstock_alias__ = True
install({system!r})
"""


def main(arguments: Sequence[str]) -> int:
    """Install the systems named before ``--``, and run what comes after it as Python would."""
    before, dashes, after = _parted(list(arguments))
    if not before or not dashes or not after or (after[0] in ("-m", "-c") and len(after) == 1):
        print(USAGE, file=sys.stderr)
        return 2
    try:
        install(*before)
    except PlanError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="penstock_alias") as folder:
        _shims(Path(folder), before)
        if after[0] == "-m":
            sys.argv = after[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(_afresh(after[1]), run_name="__main__", alter_sys=True)
        elif after[0] == "-c":
            sys.argv = ["-c", *after[2:]]
            sys.path[0] = ""
            exec(compile(after[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        else:
            sys.argv = after
            sys.path[0] = str(Path(after[0]).resolve().parent)
            runpy.run_path(after[0], run_name="__main__")
    return 0


def _afresh(module: str) -> str:
    """The module's name, where it is one of ours its own; it is to run for the first time."""
    found = sys.modules.get(module)
    if found is None or hasattr(found, "__path__"):
        return module
    del sys.modules[module], sys.modules[found.__name__]
    return found.__name__


def _parted(arguments: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in arguments:
        return arguments, False, []
    at = arguments.index("--")
    return arguments[:at], True, arguments[at + 1 :]


def _shims(folder: Path, systems: Sequence[str]) -> None:
    """Modules of the old names for the processes that the program starts: they find them by ``PYTHONPATH``."""
    for system in systems:
        for name in SYSTEMS[system]:
            (folder / f"{name}.py").write_text(SHIM.format(system=system))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
