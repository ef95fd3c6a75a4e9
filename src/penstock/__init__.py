"""Penstock: PyTorch models trained as pipelines of stages.

The module of a public name is imported when the name is first used (PEP 562). So ``import penstock`` and
``penstock --help`` do not import torch, and a training loop does not import the planner.
"""

import importlib as _importlib
import sys as _sys
import types as _types
from typing import TYPE_CHECKING

from penstock import _registry
from penstock.errors import CheckpointError as CheckpointError
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PipelineError as PipelineError
from penstock.errors import PlanError as PlanError
from penstock.errors import ScheduleError as ScheduleError
from penstock.version import __version__ as __version__

if TYPE_CHECKING:
    from penstock.engine.forward_context import current_microbatch as current_microbatch
    from penstock.engine.forward_context import is_recomputing as is_recomputing
    from penstock.engine.microbatch import Broadcast as Broadcast
    from penstock.engine.recompute.keep import keep as keep
    from penstock.profile.planner.plan import plan as plan
    from penstock.profile.planner.result import PlanResult as PlanResult
    from penstock.profile.trace import Trace as Trace
    from penstock.schedule.schedule import Action as Action
    from penstock.schedule.schedule import Schedule as Schedule
    from penstock.split import balance_by_size as balance_by_size
    from penstock.split import balance_by_time as balance_by_time
    from penstock.split import split as split
    from penstock.split.flatten import flatten as flatten
    from penstock.split.lazy import Lazy as Lazy
    from penstock.split.marks import BeginBlock as BeginBlock
    from penstock.split.marks import Block as Block
    from penstock.split.marks import BlockFunction as BlockFunction
    from penstock.split.marks import CutPoint as CutPoint
    from penstock.split.marks import Stage as Stage
    from penstock.split.marks import cut as cut
    from penstock.split.plan import Plan as Plan
    from penstock.split.skip import Namespace as Namespace
    from penstock.split.skip import pop as pop
    from penstock.split.skip import skippable as skippable
    from penstock.split.skip import stash as stash
    from penstock.train.checkpoint import Checkpoints as Checkpoints
    from penstock.train.checkpoint import load as load
    from penstock.train.checkpoint import save as save
    from penstock.train.launch import init as init
    from penstock.train.launch import is_distributed as is_distributed
    from penstock.train.launch import print0 as print0
    from penstock.train.loader import DataLoader as DataLoader
    from penstock.train.mesh import Mesh as Mesh
    from penstock.train.optimizer_offload import Offload as Offload
    from penstock.train.pipeline import Pipeline as Pipeline
    from penstock.train.pipeline import StepResult as StepResult
    from penstock.train.progress import progress as progress
    from penstock.train.scaler import GradScaler as GradScaler

# The same names as above, by module. A test compares the two lists.
_NAMES = {
    "engine.forward_context": "current_microbatch is_recomputing",
    "engine.microbatch": "Broadcast",
    "engine.recompute.keep": "keep",
    "profile.planner.plan": "plan",
    "profile.planner.result": "PlanResult",
    "profile.trace": "Trace",
    "schedule.schedule": "Action Schedule",
    "split": "balance_by_size balance_by_time split",
    "split.flatten": "flatten",
    "split.lazy": "Lazy",
    "split.marks": "BeginBlock Block BlockFunction CutPoint Stage cut",
    "split.plan": "Plan",
    "split.skip": "Namespace pop skippable stash",
    "train.checkpoint": "Checkpoints load save",
    "train.launch": "init is_distributed print0",
    "train.loader": "DataLoader",
    "train.mesh": "Mesh",
    "train.optimizer_offload": "Offload",
    "train.pipeline": "Pipeline StepResult",
    "train.progress": "progress",
    "train.scaler": "GradScaler",
}
_MODULES = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names.split()}
_SUBPACKAGES = ("compat", "hooks", "profile", "schedule")  # ``ps.schedule.build`` works without another import

_registry.viz = lambda: _importlib.import_module("penstock.viz")
_registry.trace_recording = lambda *arguments: _importlib.import_module(
    "penstock.profile.trace.recording"
).TraceRecording(*arguments)

if not TYPE_CHECKING:  # type checkers use the imports above

    def __getattr__(name):
        if name in _SUBPACKAGES:
            return _importlib.import_module(f"penstock.{name}")
        if name not in _MODULES:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = getattr(_importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_SUBPACKAGES} - {"TYPE_CHECKING"})


class _Package(_types.ModuleType):
    """Keeps the function ``penstock.split`` when the subpackage of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _MODULES or not isinstance(value, _types.ModuleType):
            super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package
