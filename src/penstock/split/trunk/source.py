"""Where a model's forward mentions its parts: before its trunk, between its blocks, or after them.

No stage runs the whole forward when a model is split, so its source says which end of the trunk a part belongs to:

    def forward(self, ids, mask, labels=None):
        x = self.embed(ids) + self.pos          # embed, pos, ids: before
        for block in self.blocks:               # the trunk
            x = block(x, mask, self.bias)       # mask, bias: during
        x = self.norm(x)                        # norm: after
        return self.loss(x, labels)             # loss, labels: after

The forwards of the containers on the way to the trunk, and methods of ``self``, are read in their place.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

BEFORE, DURING, AFTER = "before", "during", "after"
_SHAPE = {"shape", "size", "dim", "ndim", "device", "dtype", "is_cuda", "new_zeros", "new_ones", "new_empty"}
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp)
_TRUNK = "trunk"


@dataclass
class Mentions:
    """Where each part (by its name in the model) and each argument of the model's forward is mentioned."""

    parts: dict[str, set[str]] = field(default_factory=dict)
    arguments: dict[str, set[str]] = field(default_factory=dict)
    loops: list[tuple[str, int, int]] = field(default_factory=list)
    """The loops over the blocks: file, first and last line."""
    embedded: dict[str, set[str]] = field(default_factory=dict)
    """Arguments that are the hidden state, or are given to these parts before the trunk and to nothing else."""


@dataclass
class _Event:
    kind: str
    """``part``, ``argument``, ``bound`` (an argument's name gets another value), or ``trunk``."""
    name: str
    runs: bool = False
    """A mention of the trunk that runs it, and does not only look at it."""
    looped: bool = False
    given: str | None = None
    """Of an argument: the part that it is given to, or ``""`` where only its shape is looked at."""
    perhaps: bool = False
    """In a branch."""


def mentions(model: nn.Module, path: str) -> Mentions:
    """Where the forward of ``model`` mentions what it has, with the blocks at ``path``."""
    reader = _Reader(model, path)
    reader.read(model, "", "forward", arguments=True)
    events = reader.events
    running = [i for i, event in enumerate(events) if event.kind == _TRUNK and (event.runs or event.looped)]
    found = Mentions(loops=reader.loops)
    if not running:
        return found
    for i, event in enumerate(events):
        if event.kind in (_TRUNK, "bound"):
            continue
        place = BEFORE if i < running[0] else AFTER if i > running[-1] else DURING
        places = DURING if event.looped else place
        (found.parts if event.kind == "part" else found.arguments).setdefault(event.name, set()).add(places)
    for name in found.arguments:
        parts = _given_to([event for event in events if event.name == name and event.kind in ("argument", "bound")])
        if parts is not None and all(part == path or found.parts.get(part) == {BEFORE} for part in parts):
            found.embedded[name] = parts - {path}
    return found


def _given_to(events: list[_Event]) -> set[str] | None:
    """The parts that an argument is given to before its name gets another value; None where it is used otherwise."""
    parts: set[str] = set()
    for event, following in zip(events, [*events[1:], None], strict=True):
        if event.kind == "bound":
            if event.looped or not event.perhaps:
                break
        elif event.given is not None:
            parts.add(event.given)
        elif not (event.looped and following is not None and following.kind == "bound"):  # unless x = block(x)
            return None
    return parts - {""}


class _Reader:
    """Reads functions in the order in which they are run, as far as that can be read."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.model = model
        self.path = path
        self.containers = containers(path)
        self.events: list[_Event] = []
        self.loops: list[tuple[str, int, int]] = []
        self.reading: list[tuple[str, str]] = []
        self.prefix = ""
        self.itself = "self"
        self.names: set[str] = set()
        self.file, self.line = "", 0
        self.branches = 0

    def read(self, container: nn.Module, prefix: str, method: str, arguments: bool = False) -> None:
        """Read one function of a container, unless it is being read already or has no source."""
        function = getattr(type(container), method, None)
        bound = container.__dict__.get(method)
        function = getattr(bound, "__func__", function)
        if (prefix, method) in self.reading or function is None:
            return
        parsed = _parse(inspect.unwrap(function))
        if parsed is None:
            return
        definition, file, line = parsed
        names = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
        if not names:
            return
        before = self.prefix, self.itself, self.names, self.file, self.line
        self.prefix, self.itself, self.file, self.line = prefix, names[0], file, line
        self.names = {*names[1:], *(a.arg for a in definition.args.kwonlyargs)} if arguments else set()
        self.reading.append((prefix, method))
        for statement in definition.body:
            self.visit(statement)
        self.reading.pop()
        self.prefix, self.itself, self.names, self.file, self.line = before

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _LOOPS):
            start = len(self.events)
            self.children(node)
            if any(event.kind == _TRUNK for event in self.events[start:]):
                for event in self.events[start:]:
                    event.looped = True
                self.loops.append((self.file, self.line + node.lineno - 1, self.line + (node.end_lineno or 0) - 1))
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            self.visit(node.value)  # a name is bound after its value was computed
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self.visit(target)
        elif isinstance(node, ast.Call):
            given = self.part(node.func)
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):  # before the call
                if isinstance(argument, ast.Name) and argument.id in self.names:
                    self.events.append(_Event("argument", argument.id, given=given))
                else:
                    self.visit(argument)
            self.mention(node.func, called=True)
        elif isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            self.glance(node.left)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in _SHAPE:
            self.glance(node.value)
        elif isinstance(node, (ast.If, ast.IfExp, ast.Try)):
            self.branches += 1
            self.children(node)
            self.branches -= 1
        elif isinstance(node, (ast.Attribute, ast.Subscript)):
            self.mention(node, called=False)
        elif isinstance(node, ast.Name) and node.id in self.names:
            kind = "argument" if isinstance(node.ctx, ast.Load) else "bound"
            self.events.append(_Event(kind, node.id, perhaps=self.branches > 0))
        else:
            self.children(node)

    def children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.visit(child)

    def glance(self, node: ast.expr) -> None:
        """What is not used, but only looked at from outside."""
        if isinstance(node, ast.Name) and node.id in self.names:
            self.events.append(_Event("argument", node.id, given=""))
        else:
            self.visit(node)

    def part(self, node: ast.expr) -> str | None:
        """The full name of what ``self.name`` is in a call of it."""
        dotted, rest = self.dotted(node)
        if not dotted or rest:
            return None
        return join(self.prefix, dotted)

    def mention(self, node: ast.expr, called: bool) -> None:
        """``self.a.b["c"]``, seen from the model; anything else is looked into."""
        dotted, rest = self.dotted(node)
        for other in rest:
            self.visit(other)
        if dotted is None:
            return
        full = join(self.prefix, dotted)
        if full == self.path or full.startswith(f"{self.path}."):
            self.events.append(_Event(_TRUNK, full, runs=called))
            return
        home = max((c for c in self.containers if not c or full == c or full.startswith(f"{c}.")), key=len)
        container = self.model.get_submodule(home)
        if full == home:
            if called and home != self.prefix:
                self.read(container, home, "forward")
            return
        member = full[len(home) + 1 if home else 0 :].split(".")[0]
        if member in container._modules or member in container._parameters or member in container._buffers:
            self.events.append(_Event("part", join(home, member)))
        elif inspect.isroutine(getattr(type(container), member, None)) and not hasattr(nn.Module, member):
            self.read(container, home, member)  # called, or handed to what calls it: checkpoint(self.run, x)

    def dotted(self, node: ast.expr) -> tuple[str | None, list[ast.expr]]:
        """The name after ``self``, None where the expression does not start there; and what else is in it."""
        parts: list[str] = []
        rest: list[ast.expr] = []
        while True:
            if isinstance(node, ast.Attribute):
                parts.append(node.attr)
                node = node.value
            elif isinstance(node, ast.Subscript):
                key = node.slice
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    parts.append(key.value)
                else:
                    parts.clear()  # an element: the list itself is what is mentioned
                    rest.append(key)
                node = node.value
            elif isinstance(node, ast.Call) and (name := self.looked_up(node)) is not None:
                parts.append(name)
                node = node.args[0]
            else:
                break
        if isinstance(node, ast.Name):
            if node.id == self.itself:
                return ".".join(reversed(parts)), rest
            return None, [node, *rest]
        return None, [node, *rest]

    def looked_up(self, call: ast.Call) -> str | None:
        """The name in ``getattr(self, "name")`` or ``getattr(self, self.name_of_it)``."""
        if not (isinstance(call.func, ast.Name) and call.func.id == "getattr" and len(call.args) >= 2):
            return None
        key = call.args[1]
        value: Any = None
        if isinstance(key, ast.Constant):
            value = key.value
        elif isinstance(key, ast.Attribute) and isinstance(key.value, ast.Name) and key.value.id == self.itself:
            value = getattr(self.model.get_submodule(self.prefix), key.attr, None)
        return value if isinstance(value, str) else None


def join(prefix: str, name: str) -> str:
    """The name in the model of what a container calls ``name``."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def containers(path: str) -> list[str]:
    """The modules that hold the list of blocks, from the model (``""``) inwards."""
    parts = path.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def _parse(function: Callable[..., Any]) -> tuple[ast.FunctionDef, str, int] | None:
    """A function's definition, its file and its first line; None where there is no source."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(function) or ""
    except (OSError, TypeError, SyntaxError):
        return None
    found = tree.body[0] if tree.body else None
    if not isinstance(found, ast.FunctionDef) or found.name != function.__name__:  # a file changed since it was read
        return None
    return found, file, first
