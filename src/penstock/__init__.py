"""Penstock: PyTorch models trained as pipelines of stages."""

from penstock.engine.weightgrad import defer_weight_grad as defer_weight_grad
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PipelineError as PipelineError
from penstock.errors import PlanError as PlanError
from penstock.errors import ScheduleError as ScheduleError
from penstock.schedule.action import Action as Action
from penstock.schedule.schedule import Schedule as Schedule
from penstock.split import split as split
from penstock.split.plan import Plan as Plan
from penstock.train.mesh import Mesh as Mesh
from penstock.train.pipeline import Pipeline as Pipeline
from penstock.train.pipeline import StepResult as StepResult
from penstock.version import __version__ as __version__
