"""Costs, plans and traces: measure or estimate the costs of a model, plan its pipeline, and analyze recorded steps.

Costs are plain data and need no torch. The modules of the other names are imported on first use (PEP 562).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.profile.analytic import Hardware, Transformer, analytic_costs, get_hardware, parse_transformer
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, Overhead, Profile, SharedParameters

if TYPE_CHECKING:
    from penstock.profile.links import Links, local_link, measure_links, process_link
    from penstock.profile.measure import measure_costs
    from penstock.profile.planner.cuts import Ranks, Segments, edges_between, rank_static_bytes, stage_costs
    from penstock.profile.planner.plan import plan, plan_analytic, plan_costs
    from penstock.profile.planner.result import Candidate, Configuration, PlanResult, Rejection
    from penstock.profile.planner.search import device_grids
    from penstock.profile.trace import Trace

__all__ = [
    "Candidate", "Configuration", "Crossing", "Hardware", "LayerCosts", "Link", "Links", "ModelCosts", "Overhead",
    "PlanResult", "Profile", "Ranks", "Rejection", "Segments", "SharedParameters", "Trace", "Transformer",
    "analytic_costs", "device_grids", "edges_between", "get_hardware", "local_link", "measure_costs", "measure_links",
    "parse_transformer", "plan", "plan_analytic", "plan_costs", "process_link", "rank_static_bytes", "stage_costs",
]  # fmt: skip

_LAZY = {
    "links": "Links local_link measure_links process_link",
    "measure": "measure_costs",
    "planner.plan": "plan plan_analytic plan_costs",
    "planner.result": "Candidate Configuration PlanResult Rejection",
    "planner.search": "device_grids",
    "planner.cuts": "Ranks Segments edges_between rank_static_bytes stage_costs",
    "trace": "Trace",
}
_MODULES = {name: f"penstock.profile.{module}" for module, names in _LAZY.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'penstock.profile' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
