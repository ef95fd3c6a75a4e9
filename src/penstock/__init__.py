"""Penstock: PyTorch models trained as pipelines of stages."""

from penstock.engine.forward_context import current_microbatch as current_microbatch
from penstock.engine.forward_context import is_checkpointing as is_checkpointing
from penstock.engine.forward_context import is_recomputing as is_recomputing
from penstock.engine.microbatch import Broadcast as Broadcast
from penstock.engine.recompute.keep import keep as keep
from penstock.engine.weightgrad import defer_weight_grad as defer_weight_grad
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PipelineError as PipelineError
from penstock.errors import PlanError as PlanError
from penstock.errors import ScheduleError as ScheduleError
from penstock.profile.planner.plan import plan as plan
from penstock.profile.planner.result import PlanResult as PlanResult
from penstock.profile.trace import Trace as Trace
from penstock.schedule.schedule import Action as Action
from penstock.schedule.schedule import Schedule as Schedule
from penstock.split import split as split
from penstock.split.balance import balance_by_size as balance_by_size
from penstock.split.balance import balance_by_time as balance_by_time
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
from penstock.split.skip import SkipError as SkipError
from penstock.split.skip import SkipUseError as SkipUseError
from penstock.split.skip import pop as pop
from penstock.split.skip import skippable as skippable
from penstock.split.skip import stash as stash
from penstock.split.skip import verify_skippables as verify_skippables
from penstock.train.launch import init as init
from penstock.train.launch import is_distributed as is_distributed
from penstock.train.launch import print0 as print0
from penstock.train.loader import DataLoader as DataLoader
from penstock.train.mesh import Mesh as Mesh
from penstock.train.optimizer_offload import Offload as Offload
from penstock.train.pipeline import Pipeline as Pipeline
from penstock.train.pipeline import register_trace as _register_trace
from penstock.train.progress import progress as progress
from penstock.train.result import StepResult as StepResult
from penstock.train.scaler import GradScaler as GradScaler
from penstock.version import __version__ as __version__


def _trace(*arguments: object) -> object:
    """The context manager of ``Pipeline.trace``; the profiler loads when it is first used."""
    from penstock.profile.trace.recording import TraceRecording

    return TraceRecording(*arguments)  # type: ignore[arg-type]


_register_trace(_trace)
