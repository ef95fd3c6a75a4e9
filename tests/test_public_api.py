"""The names at the top of the package, and the modules that they load."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import penstock

NAMES = """
    split Plan flatten cut CutPoint Block BeginBlock BlockFunction Stage Lazy balance_by_size balance_by_time
    skippable stash pop Namespace
    Pipeline StepResult Mesh Offload DataLoader GradScaler init progress print0 is_distributed Broadcast
    current_microbatch is_recomputing keep save load Checkpoints
    Schedule Action plan PlanResult Trace
    PenstockError PlanError ScheduleError PipelineError CheckpointError __version__
"""


def test_names() -> None:
    """The list for type checkers, the table for ``__getattr__`` and this one are the same."""
    assert penstock.__file__ is not None
    tree = ast.parse(Path(penstock.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    exported = {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names if alias.asname}
    assert set(exported) == set(NAMES.split())
    for name, module in penstock._MODULES.items():
        assert exported[name] == f"{module}.{name}"
    for name in exported:
        assert getattr(getattr(penstock, name), "__name__", name) == name
    assert set(exported) <= set(dir(penstock))
    assert not hasattr(penstock, "no_such_name")


def test_benchmarks_and_examples_use_names_that_exist() -> None:
    root = Path(__file__).parents[1]
    for file in (*root.glob("benchmarks/*.py"), *root.glob("examples/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "penstock":
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), (file, node.lineno)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ps":
                assert hasattr(penstock, node.attr), (file, node.lineno)


def test_imports_are_lazy() -> None:
    """Neither the package nor its command line loads torch, and training loads neither planner nor command line.

    ``ps.split`` stays the function, although the subpackage of the same name is imported.
    """
    program = """
import sys
import penstock as ps
assert ps.schedule.build("1f1b", 2, 4).num_ranks == 2
import penstock.cli
assert "torch" not in sys.modules
assert not [name for name in sys.modules if name.startswith("penstock.cli.")]
for name in [name for name in sys.modules if name.split(".")[0] in ("typer", "rich") or name == "penstock.cli"]:
    del sys.modules[name]
import penstock.split.plan
assert callable(ps.split)
ps.Pipeline, ps.Mesh, ps.DataLoader, ps.progress, ps.init, ps.GradScaler, ps.Offload
print(*[name for name in sys.modules if name.startswith(("penstock.profile", "penstock.cli", "typer", "rich"))])
ps.Trace, ps.PlanResult, ps.profile.LayerCosts, ps.compat.install, ps.hooks.partition
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("\n", "")
