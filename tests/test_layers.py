"""Layers import only lower layers, also for types: schedule <- split <- engine <- train <- profile, compat, cli."""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
LAYERS = ["schedule", "split", "engine", "train"]
ALLOWED = {
    **{layer: set(LAYERS[: i + 1]) for i, layer in enumerate(LAYERS)},
    "profile": {*LAYERS, "profile"},
    "cli": {*LAYERS, "profile", "cli"},
    "compat": {"schedule", "profile", "cli", "compat"},  # public names, and ``penstock.hooks``
}


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        name = ".".join(("penstock", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = path
    return found


@cache
def import_nodes(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports: at run time, inside functions, or for types."""
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif (node.module or "").split(".")[0] == "penstock":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module or ""


def package(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_layers_import_only_lower_layers() -> None:
    known = modules()
    wrong = [
        f"{module} imports {other}"
        for module, path in known.items()
        if package(module) in ALLOWED
        for other in imports(path, known)
        if package(other) in ALLOWED and package(other) not in ALLOWED[package(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_cycles() -> None:
    known = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        if module != "penstock":  # penstock/__init__.py imports the types of all public names
            graph[module] = set(imports(path, known)) - {"penstock"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError("imports form a cycle: " + " -> ".join(error.args[1])) from None


def test_schedule_does_not_import_torch() -> None:
    for module, path in modules().items():
        if package(module) == "schedule":
            assert "import torch" not in path.read_text(), module
