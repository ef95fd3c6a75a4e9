"""Facades: the public APIs of other pipeline libraries, implemented with Penstock.

    from penstock.compat.torchgpipe import GPipe    # change the import line

    penstock.compat.install("torchgpipe")           # or keep it: after this call
    from torchgpipe import GPipe                    # the same class is imported

``python -m penstock.compat.alias torchgpipe -- train.py`` installs a facade for an unmodified program.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch.distributed as dist

from penstock.errors import PipelineError, PlanError, did_you_mean

__all__ = ["SYSTEMS", "install"]

SYSTEMS: dict[str, tuple[str, ...]] = {
    "torchgpipe": ("torchgpipe", "torchgpipe_balancing"),
    "fairscale": ("fairscale",),
    "poptorch": ("poptorch",),
    "varuna": ("varuna",),
    "torchdistpackage": ("torchdistpackage",),
}
"""The top-level packages of each library; ``penstock.compat`` has a module of the same name for each."""


def install(*systems: str) -> None:
    """Register the facades of ``systems`` in ``sys.modules`` under the libraries' own names.

    Call it before anything imports the library itself.
    """
    for system in systems:
        if system not in SYSTEMS:
            hint = did_you_mean(system, SYSTEMS, otherwise=f": there are {', '.join(SYSTEMS)}")
            raise PlanError(f"there is no compat module for {system!r}{hint}")
    names = [name for system in systems for name in SYSTEMS[system]]
    for name in names:
        module = sys.modules.get(name)
        ours = module is None or module.__name__.startswith(f"{__name__}.") or hasattr(module, "__penstock_alias__")
        if not ours:
            where = getattr(module, "__file__", None) or "built in"
            raise PlanError(f"{name} is imported already ({where}): call install({name!r}) before anything imports it")
    for name in names:
        facade = importlib.import_module(f"{__name__}.{name}")
        for info in pkgutil.walk_packages(getattr(facade, "__path__", ())[:1], f"{facade.__name__}."):
            importlib.import_module(info.name)
        for path, module in list(sys.modules.items()):
            if path == facade.__name__ or path.startswith(f"{facade.__name__}."):
                sys.modules[path.removeprefix(f"{__name__}.")] = module
    if "fairscale" in names:  # other submodules, such as fairscale.optim, are those of the installed library
        for package in ("fairscale", "fairscale.nn", "fairscale.nn.model_parallel"):
            sys.modules[package].__path__ += [os.path.join(entry, *package.split(".")) for entry in sys.path]


def publish(package: str, names: Mapping[str, Any], modules: Mapping[str, str]) -> None:
    """Create submodules of ``package`` from a table such as ``{"nn.pipe": "AsyncPipe Pipe"}``.

    Facades are implemented in few files; the libraries' other module paths exist in ``sys.modules`` only.
    """
    for path, listed in modules.items():
        name = f"{package}.{path}"
        parent, _, child = name.rpartition(".")
        module = ModuleType(name, f"The names of ``{path}``.")
        public = [entry for entry in listed.split() if not entry.startswith("__")]
        module.__dict__.update({entry: names[entry] for entry in listed.split()}, __path__=[], __all__=public)
        sys.modules[name] = module
        sys.modules[parent].__dict__.setdefault(child, module)  # a function of the same name is kept


@contextmanager
def unwrap_local_errors() -> Iterator[None]:
    """Re-raise exceptions of this rank's code unchanged. Failures of other ranks are raised as ``PipelineError``."""
    try:
        yield
    except PipelineError as error:
        cause: BaseException = error
        while isinstance(cause, PipelineError) and cause.__cause__ is not None:
            cause = cause.__cause__
        if error.rank != dist.get_rank() or type(cause).__module__.split(".")[0] == "penstock":
            raise
        raise cause from None
