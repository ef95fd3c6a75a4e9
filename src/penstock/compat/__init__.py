"""Other systems' names on Penstock: their modules, which translate to it, and a way to put these under their old names.

    from penstock.compat.torchgpipe import GPipe# with the import lines changed

    penstock.compat.install("torchgpipe")           # or with none changed: from here on,
    from torchgpipe import GPipe                    # this is the same class

``python -m penstock.compat.alias torchgpipe -- train.py`` does the second for a program that is not to be touched.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

from penstock.errors import PlanError
from penstock.suggest import did_you_mean

__all__ = ["SYSTEMS", "install"]

SYSTEMS: dict[str, tuple[str, ...]] = {
    "torchgpipe": ("torchgpipe", "torchgpipe_balancing"),
    "fairscale": ("fairscale",),
    "poptorch": ("poptorch",),
    "varuna": ("varuna",),
    "torchdistpackage": ("torchdistpackage",),
}
"""The names that each system's users import. The module of that name in here takes their place."""


def install(*systems: str) -> None:
    """Let ``import torchgpipe``, and all of its submodules, find ours; before the real one is imported."""
    for system in systems:
        if system not in SYSTEMS:
            hint = did_you_mean(system, SYSTEMS, otherwise=f": there are {', '.join(SYSTEMS)}")
            raise PlanError(f"there is no compat module for {system!r}{hint}")
    names = [name for system in systems for name in SYSTEMS[system]]
    for name in names:
        found = sys.modules.get(name)
        if found is not None and not _is_ours(found):
            where = getattr(found, "__file__", None) or "built in"
            raise PlanError(f"{name} is imported already ({where}): call install({name!r}) before anything imports it")
    for name in names:
        for ours in _with_submodules(f"{__name__}.{name}"):
            sys.modules[ours.__name__.removeprefix(f"{__name__}.")] = ours


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.startswith(f"{__name__}.") or hasattr(module, "__penstock_alias__")


def _with_submodules(name: str) -> list[ModuleType]:
    """All of a package: what is not there under its alias would be imported a second time, as another module."""
    module = importlib.import_module(name)
    found = [module]
    for info in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}."):
        found.append(importlib.import_module(info.name))
    return found
