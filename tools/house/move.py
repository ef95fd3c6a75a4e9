"""Moves, merges and renames modules and names of the package by a map (TOML): see BRIEF.md. Run in the repository's root.

move.py --check MAP...   reports collisions, writes nothing
move.py MAP...           rewrites the tree
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

SRC = Path("src")
PKG = "penstock"


class Map:
    def __init__(self, paths):
        self.modules, self.names, self.words, self.files = {}, {}, {}, {}
        for path in paths:
            data = tomllib.loads(Path(path).read_text())
            for key, value in data.get("modules", {}).items():
                self._put(self.modules, f"{PKG}.{key}" if key != "__init__" else PKG, f"{PKG}.{value}", path)
            for key, value in data.get("names", {}).items():
                module, name = key.split(":")
                module = PKG if module in ("", "__init__") else f"{PKG}.{module}"
                self._put(self.names, (module, name), value, path)
            for key, value in data.get("words", {}).items():
                self._put(self.words, key, value, path)
            for key, value in data.get("files", {}).items():
                self._put(self.files, key, value, path)

    def _put(self, table, key, value, path):
        if table.get(key, value) != value:
            print(f"!! {path}: {key} is mapped to {value!r} and to {table[key]!r}")
        table[key] = value


class Module:
    def __init__(self, name, path):
        self.name, self.path = name, path
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.is_package = path.name == "__init__.py"
        self.defined = set()
        self.imported = {}  # name -> (module, name) of package imports at top level
        for node in self.tree.body:
            for inner in [node, *([*node.body, *node.orelse] if isinstance(node, ast.If) else [])]:
                if isinstance(inner, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                    self.defined.add(inner.name)
                elif isinstance(inner, ast.Assign):
                    for target in inner.targets:
                        self.defined |= {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
                elif isinstance(inner, (ast.AnnAssign, ast.AugAssign)) and isinstance(inner.target, ast.Name):
                    self.defined.add(inner.target.id)
                elif isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == PKG:
                    for alias in inner.names:
                        self.imported[alias.asname or alias.name] = (inner.module, alias.name)
                elif isinstance(inner, (ast.Try,)):
                    for sub in ast.walk(inner):
                        if isinstance(sub, (ast.FunctionDef, ast.ClassDef)):
                            self.defined.add(sub.name)
        self.defined.discard("__all__")


def load():
    modules = {}
    for path in sorted((SRC / PKG).rglob("*.py")):
        parts = list(path.relative_to(SRC).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        modules[".".join(parts)] = Module(".".join(parts), path)
    return modules


class World:
    def __init__(self, mapping):
        self.map = mapping
        self.modules = load()
        for key in mapping.modules:
            if key not in self.modules:
                print(f"!! no such module: {key}")
        for module, name in mapping.names:
            if module not in self.modules:
                print(f"!! names: no such module: {module}")
            elif name not in self.modules[module].defined:
                print(f"!! names: {module} does not define {name}")

    def new_module(self, module):
        """Where a module's contents are afterwards."""
        return self.map.modules.get(module, module).removesuffix(".__init__")

    def origin(self, module, name, depth=0):
        """(module, name) that a name imported from a module really is; None as the name where it is a module."""
        if module not in self.modules or depth > 20:
            return module, name
        own = self.modules[module]
        if name in own.defined:
            return module, name
        if name in own.imported:
            there, real = own.imported[name]
            if there == module and f"{there}.{real}" in self.modules:
                return f"{there}.{real}", None
            if f"{there}.{real}" in self.modules and real not in self.modules.get(there, own).defined | set(
                self.modules[there].imported if there in self.modules else ()
            ):
                return f"{there}.{real}", None
            return self.origin(there, real, depth + 1)
        if f"{module}.{name}" in self.modules:
            return f"{module}.{name}", None
        return module, name

    def new_name(self, module, name):
        there, real = self.origin(module, name)
        if real is None:
            return name
        return self.map.names.get((there, real), name if real == name else name)

    def target(self, module, name):
        """Where to import a name from afterwards."""
        return self.new_module(module)


class Scopes(ast.NodeVisitor):
    """Positions of Name nodes that refer to module-level names."""

    def __init__(self, world_names):
        self.wanted = world_names
        self.stack = []
        self.found = []  # (node, name)
        self.fstrings = []  # (JoinedStr node, names)
        self.fdepth = None

    def is_global(self, name):
        for i, (kind, names) in enumerate(reversed(self.stack)):
            if kind == "class" and i > 0:
                continue
            if name in names:
                return False
        return True

    def visit_Name(self, node):
        if node.id in self.wanted and self.is_global(node.id):
            if self.fdepth is not None:
                self.fdepth[1].add(node.id)
            else:
                self.found.append((node, node.id))

    def visit_JoinedStr(self, node):
        if self.fdepth is not None:
            self.generic_visit(node)
            return
        self.fdepth = (node, set())
        self.generic_visit(node)
        if self.fdepth[1]:
            self.fstrings.append(self.fdepth)
        self.fdepth = None

    def _bound(self, body, args=None):
        names, outer = set(), set()
        if args is not None:
            for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
                if a is not None:
                    names.add(a.arg)

        def walk(node):
            for child in ast.iter_child_nodes(node):
                handle(child)

        def handle(child):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                names.add(child.name)
                return
            if isinstance(child, ast.Lambda):
                return
            if isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                for sub in ast.walk(child):
                    if isinstance(sub, ast.NamedExpr):
                        names.add(sub.target.id)
                return
            if isinstance(child, ast.Name) and isinstance(child.ctx, (ast.Store, ast.Del)):
                names.add(child.id)
            elif isinstance(child, (ast.Import, ast.ImportFrom)):
                for alias in child.names:
                    # imports of ours are renamed with the references: not a binding that hides
                    if not (isinstance(child, ast.ImportFrom) and (child.module or "").startswith(PKG)):
                        names.add((alias.asname or alias.name).split(".")[0])
            elif (isinstance(child, ast.ExceptHandler) and child.name) or (isinstance(child, (ast.MatchAs, ast.MatchStar)) and child.name):
                names.add(child.name)
            elif isinstance(child, (ast.Global, ast.Nonlocal)):
                outer.update(child.names)
            walk(child)

        for node in body:
            handle(node)
        return names - outer

    def visit_FunctionDef(self, node):
        for d in node.decorator_list:
            self.visit(d)
        self._args(node.args)
        if node.returns:
            self.visit(node.returns)
        self.stack.append(("function", self._bound(node.body, node.args)))
        for child in node.body:
            self.visit(child)
        self.stack.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def _args(self, args):
        for a in [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]:
            if a is not None and a.annotation is not None:
                self.visit(a.annotation)
        for d in [*args.defaults, *args.kw_defaults]:
            if d is not None:
                self.visit(d)

    def visit_Lambda(self, node):
        self._args(node.args)
        self.stack.append(("function", self._bound([], node.args)))
        self.visit(node.body)
        self.stack.pop()

    def visit_ClassDef(self, node):
        for d in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(d)
        self.stack.append(("class", self._bound(node.body)))
        for child in node.body:
            self.visit(child)
        self.stack.pop()

    def _comp(self, node):
        names = set()
        for gen in node.generators:
            names |= {n.id for n in ast.walk(gen.target) if isinstance(n, ast.Name)}
        self.visit(node.generators[0].iter)
        self.stack.append(("function", names))
        for i, gen in enumerate(node.generators):
            self.visit(gen.target)
            if i:
                self.visit(gen.iter)
            for cond in gen.ifs:
                self.visit(cond)
        if isinstance(node, ast.DictComp):
            self.visit(node.key)
            self.visit(node.value)
        else:
            self.visit(node.elt)
        self.stack.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comp


class Rewriter:
    """Rewrites one file's text: references, imports in place; top-level imports of modules are taken out."""

    def __init__(self, world, text, tree, module=None, self_new=None):
        self.world, self.text, self.tree, self.module, self.self_new = world, text, tree, module, self_new
        raw = text.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in raw:
            self.starts.append(self.starts[-1] + len(line))
        self.raw = text.encode()
        self.edits = []
        self.imports = []  # (target module or None, name, asname) from top level, run time
        self.typing_imports = []
        self.foreign = []  # source of other imports
        self.foreign_typing = []
        self.problems = []

    def at(self, line, col):
        return self.starts[line - 1] + col

    def span(self, node):
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def renames(self):
        """Global names of this file that change: name -> new text; and aliases of modules: name -> (old module)."""
        names, modules = {}, {}
        if self.module is not None:
            for (module, old), new in self.world.map.names.items():
                if module == self.module.name:
                    names[old] = new
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PKG and not node.level:
                for alias in node.names:
                    there, real = self.world.origin(node.module, alias.name)
                    bound = alias.asname or alias.name
                    if real is None:
                        modules[bound] = there
                        new = self.world.new_module(there)
                        if alias.asname in (None, alias.name) and not (self.self_new == new):
                            last = new.rsplit(".", 1)[-1]
                            if last != bound:
                                names[bound] = last
                        continue
                    new = self.world.new_name(node.module, alias.name)
                    if alias.asname in (None, alias.name):
                        if new != bound:
                            names[bound] = new
                    elif self.self_new is not None and self.world.target(node.module, alias.name) == self.self_new:
                        names[bound] = new
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == PKG:
                        if alias.asname:
                            modules[alias.asname] = alias.name
                        elif alias.name == PKG:
                            modules[PKG] = PKG
        return names, modules

    def run(self, take_imports):
        names, modules = self.renames()
        scopes = Scopes(set(names) | set(modules))
        scopes.visit(self.tree)
        taken = set()
        attributes = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(node, ast.Attribute) and child is node.value:
                    attributes[id(child)] = node
        for node, name in scopes.found:
            if name in modules and id(node) in attributes:
                parent = attributes[id(node)]
                module = modules[name]
                attr = parent.attr
                # walk down packages: penstock.schedule.text.to_text
                top = parent
                while True:
                    there, real = self.world.origin(module, attr)
                    if real is None and id(top) in attributes:
                        module = there
                        top = attributes[id(top)]
                        attr = top.attr
                        continue
                    break
                begin, _ = self.span(node)
                _, end = self.span(top)
                new_attr = attr if real is None else self.world.new_name(module, attr)
                if top is parent:
                    new = self.world.new_module(module)
                    if self.self_new is not None and new == self.self_new:
                        self.edit(begin, end, new_attr)
                    elif name in names or new_attr != attr:
                        self.edit(begin, end, f"{names.get(name, name)}.{new_attr}", keep=(parent, name))
                elif self.world.new_module(module) != module or new_attr != attr:
                    self.edit(begin, end, f"{self.world.new_module(module)}.{new_attr}")
                continue
            if name in names:
                begin, end = self.span(node)
                self.edit(begin, end, names[name])
        for node, inside in scopes.fstrings:
            begin, end = self.span(node)
            segment = self.raw[begin:end].decode()
            for name in inside:
                if name in names:
                    segment = re.sub(
                        r"(?<=\{)([^{}]*)",
                        lambda m, n=name: re.sub(rf"(?<![\w.'\"])\b{n}\b(?!['\"])", names[n], m.group(0)),
                        segment,
                    )
            self.edit(begin, end, segment)
        # definitions, global statements, quoted annotations
        own = {}
        if self.module is not None:
            own = {old: new for (module, old), new in self.world.map.names.items() if module == self.module.name}
        top_level = [
            n
            for node in self.tree.body
            for n in ([node, *node.body, *node.orelse] if isinstance(node, (ast.If, ast.Try)) else [node])
        ]
        for node in top_level:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and node.name in own:
                line = self.raw[self.at(node.lineno, node.col_offset) :]
                found = re.search(rb"(def|class)\s+" + node.name.encode() + rb"\b", line)
                begin = self.at(node.lineno, node.col_offset) + found.end() - len(node.name.encode())
                self.edit(begin, begin + len(node.name.encode()), own[node.name])
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Global):
                begin, end = self.span(node)
                self.edit(begin, end, "global " + ", ".join(own.get(n, n) for n in node.names))
            annotation = getattr(node, "annotation", None) or getattr(node, "returns", None)
            if annotation is not None:
                for sub in ast.walk(annotation):
                    if isinstance(sub, ast.Constant) and isinstance(sub.value, str):
                        begin, end = self.span(sub)
                        segment = self.raw[begin:end].decode()
                        for old, new in names.items():
                            segment = re.sub(rf"\b{old}\b", new, segment)
                        self.edit(begin, end, segment)
        # imports
        for node in self.tree.body:
            if take_imports and isinstance(node, (ast.Import, ast.ImportFrom)):
                self._take(node, self.imports, self.foreign)
                taken.add(id(node))
                self._remove(node)
            elif (
                take_imports
                and isinstance(node, ast.If)
                and "TYPE_CHECKING" in ast.dump(node.test)
                and all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in node.body)
            ):
                for inner in node.body:
                    self._take(inner, self.typing_imports, self.foreign_typing)
                    taken.add(id(inner))
                self._remove(node)
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                if take_imports:
                    self._remove(node)
                elif self.module is not None:
                    for item in ast.walk(node.value):
                        if isinstance(item, ast.Constant) and isinstance(item.value, str):
                            begin, end = self.span(item)
                            self.edit(begin, end, f'"{names.get(item.value, item.value)}"')
        for node in ast.walk(self.tree):
            if id(node) in taken:
                continue
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PKG and not node.level:
                self._replace_import(node)
            elif isinstance(node, ast.Import) and any(a.name.startswith(f"{PKG}.") for a in node.names):
                begin, end = self.span(node)
                text = ", ".join(
                    self.world.new_module(a.name) + (f" as {a.asname}" if a.asname else "") for a in node.names
                )
                self.edit(begin, end, f"import {text}")
        return self.apply()

    def _take(self, node, ours, foreign):
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PKG and not node.level:
            for alias in node.names:
                entry = self._entry(node.module, alias)
                if entry is not None:
                    ours.append(entry)
        else:
            begin, end = self.span(node)
            foreign.append(self.raw[begin:end].decode())

    def _entry(self, module, alias):
        """(from, name, asname) afterwards; None where it is in this very file."""
        there, real = self.world.origin(module, alias.name)
        if real is None:
            new = self.world.new_module(there)
            if self.self_new is not None and new == self.self_new:
                return None
            package, _, last = new.rpartition(".")
            asname = last if alias.asname == alias.name else alias.asname
            return package, last, asname
        target = self.world.target(module, alias.name)
        if self.self_new is not None and target == self.self_new:
            return None
        new = self.world.new_name(module, alias.name)
        if alias.asname is None:
            asname = None
        elif alias.asname == alias.name:
            asname = new
        else:
            asname = alias.asname
        return target, new, asname

    def _replace_import(self, node):
        begin, end = self.span(node)
        groups = defaultdict(list)
        for alias in node.names:
            entry = self._entry(node.module, alias)
            if entry is not None:
                groups[entry[0]].append(entry[1] + (f" as {entry[2]}" if entry[2] else ""))
        indent = " " * node.col_offset
        if not groups:
            self._remove(node)
            return
        lines = []
        for target, items in groups.items():
            items = list(dict.fromkeys(items))
            line = f"from {target} import {', '.join(items)}"
            if len(indent + line) > 119:
                line = f"from {target} import (\n" + "".join(f"{indent}    {i},\n" for i in items) + f"{indent})"
            lines.append(line)
        self.edit(begin, end, f"\n{indent}".join(lines))

    def _remove(self, node):
        begin, end = self.span(node)
        # with the rest of its line
        while end < len(self.raw) and self.raw[end : end + 1] != b"\n":
            end += 1
        begin = self.raw.rfind(b"\n", 0, begin) + 1
        self.edit(begin, min(end + 1, len(self.raw)), "")

    def edit(self, begin, end, text, keep=None):
        self.edits.append((begin, end, text))

    def apply(self):
        done, result, last = set(), [], 0
        for begin, end, text in sorted(set(self.edits), key=lambda e: (e[0], -(e[1]))):
            if begin < last:
                continue
            result.append(self.raw[last:begin])
            result.append(text.encode())
            last = end
        result.append(self.raw[last:])
        return b"".join(result).decode()


def import_lines(entries, foreign, indent=""):
    groups = defaultdict(list)
    for target, name, asname in entries:
        item = name + (f" as {asname}" if asname else "")
        if item not in groups[target]:
            groups[target].append(item)
    lines = []
    for text in dict.fromkeys(foreign):
        lines.append(text)
    for target in sorted(groups):
        line = f"from {target} import {', '.join(sorted(groups[target]))}"
        if len(indent + line) > 119:
            line = f"from {target} import (\n" + "".join(f"    {i},\n" for i in sorted(groups[target])) + ")"
        lines.append(line)
    return [f"{indent}{piece}" for line in lines for piece in line.split("\n")]


def names_bound(text):
    """Names that an import statement binds, with what they are."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        else:
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]


def build(world, new, parts):
    """The text of a new module from its old parts, and problems."""
    problems = []
    own = [world.modules[name] for name in parts]
    # parts come after those they need when they are imported, in the map's order otherwise
    order, pending = [], list(own)
    needs = {}
    for part in own:
        needs[part.name] = {world.origin(m, n)[0] for m, n in part.imported.values()} & {p.name for p in own} - {
            part.name
        }
        typing = set()
        for node in part.tree.body:
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                for inner in node.body:
                    if isinstance(inner, ast.ImportFrom):
                        typing |= {world.origin(inner.module, a.name)[0] for a in inner.names}
        needs[part.name] -= typing
    while pending:
        part = next((p for p in pending if not needs[p.name] & {q.name for q in pending}), None)
        if part is None:
            problems.append(f"parts need each other: {[p.name for p in pending]}")
            part = pending[0]
        pending.remove(part)
        order.append(part)
    imports, typing, foreign, foreign_typing, bodies, exported = [], [], [], [], [], []
    bound = defaultdict(dict)
    has_all = False
    docs = {}
    for part in order:
        rewriter = Rewriter(world, part.text, part.tree, part, new)
        doc = ast.get_docstring(part.tree)
        if doc is not None:
            rewriter._remove(part.tree.body[0])
        docs[part.name] = doc
        body = rewriter.run(take_imports=True)
        imports += rewriter.imports
        typing += rewriter.typing_imports
        foreign += rewriter.foreign
        foreign_typing += rewriter.foreign_typing
        for target, name, asname in (*rewriter.imports, *rewriter.typing_imports):
            bound[asname or name][f"{target}.{name}"] = part.name
        for text in (*rewriter.foreign, *rewriter.foreign_typing):
            for name, what in names_bound(text):
                bound[name][what] = part.name
        for name in part.defined:
            renamed = world.map.names.get((part.name, name), name)
            bound[renamed][f"defined in {part.name}"] = part.name
        for node in part.tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                has_all = True
                exported += [world.new_name(part.name, n) for n in ast.literal_eval(node.value)]
        bodies.append((part, body.strip("\n")))
    for name, origins in bound.items():
        if len(origins) > 1:
            problems.append(f"{name} is {' and '.join(f'{o} [{p}]' for o, p in origins.items())}")
    if len(order) > 1:
        for part in order:
            used = {n.id for n in ast.walk(part.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            for other in order:
                if other is not part:
                    for name in other.defined:
                        renamed = world.map.names.get((other.name, name), name)
                        if renamed in used and hasattr(builtins, renamed) and renamed not in part.defined:
                            problems.append(f"{renamed}, a builtin that {part.name} uses, is defined in {other.name}")
    main = parts[0]
    text = [f'"""{docs[main]}' + ("\n" if "\n" in (docs[main] or "") else "") + '"""', ""] if docs[main] else []
    if any("from __future__ import annotations" in part.text for part in order):
        text += ["from __future__ import annotations", ""]
    run_time = {(t, n, a) for t, n, a in imports}
    typing = [e for e in typing if e not in run_time]
    run_names = {name for t in foreign for name, _ in names_bound(t)} | {a or n for _, n, a in imports}
    foreign_typing = [t for t in foreign_typing if not all(n in run_names for n, _ in names_bound(t))]
    if typing or foreign_typing:
        foreign.append("from typing import TYPE_CHECKING")
    text += import_lines(imports, foreign) + [""]
    if typing or foreign_typing:
        text += ["if TYPE_CHECKING:", *import_lines(typing, foreign_typing, "    "), ""]
    if has_all:
        items = sorted(set(exported), key=lambda n: (not n.isupper(), not n[0].isupper(), n))
        line = "__all__ = [" + ", ".join(f'"{i}"' for i in items) + "]"
        if len(line) > 120:
            line = "__all__ = [\n" + "".join(f'    "{i}",\n' for i in items) + "]"
        text += [line, ""]
    for part, body in bodies:
        if part.name != main and docs[part.name] and len(order) > 1:
            text += ["", *(f"# {line}".rstrip() for line in docs[part.name].split("\n")), ""]
        if body:
            text += ["", body, ""] if not text or text[-1] else [body, ""]
    return "\n".join(text).rstrip("\n") + "\n", problems


def dotted(world):
    """A function that rewrites dotted paths and import lines in any text."""
    old = sorted(world.map.modules, key=len, reverse=True)
    changed = {m: world.new_module(m) for m in old}
    pattern = re.compile(r"\bpenstock(?:\.\w+)+")
    made = {new for new in changed.values() if new not in world.modules}  # new names, which may begin with an old one

    def path(match):
        text = match.group(0)
        parts = text.split(".")
        if any(".".join(parts[:size]) in made for size in range(len(parts), 1, -1)):
            return text  # rewritten already
        for size in range(len(parts), 1, -1):
            module = ".".join(parts[:size])
            if module in world.modules:
                rest = parts[size:]
                if rest:
                    there, real = world.origin(module, rest[0])
                    if real is not None:
                        rest[0] = world.new_name(module, rest[0])
                        return ".".join([world.target(module, parts[size]), *rest])
                return ".".join([changed.get(module, module), *rest])
        if len(parts) > 1:
            return ".".join([PKG, world.new_name(PKG, parts[1]), *parts[2:]])
        return text

    lines = re.compile(r"(?m)^([ \t>]*(?:>>> )?)from (penstock[\w.]*) import (\([^)]*\)|[^\n#\\\"']+)")

    def line(match):
        indent, module, names = match.groups()
        groups = defaultdict(list)
        if "*" in names:
            return f"{indent}from {world.new_module(module)} import {names}"
        for item in re.findall(r"(\w+)(?:\s+as\s+(\w+))?", names.strip("()")):
            name, asname = item
            there, real = world.origin(module, name)
            if real is None:
                new = world.new_module(there)
                package, _, last = new.rpartition(".")
                groups[package].append(last + (f" as {asname}" if asname else ""))
            else:
                new = world.new_name(module, name)
                groups[world.target(module, name)].append(new + (f" as {asname}" if asname else ""))
        return "\n".join(f"{indent}from {t} import {', '.join(dict.fromkeys(i))}" for t, i in groups.items())

    files = {m.replace(".", "/"): n.replace(".", "/") for m, n in changed.items()}
    short = {a.split("/", 1)[1]: b.split("/", 1)[1] for a, b in files.items()}
    slashed = re.compile(r"(?<![\w/])((?:src/)?)([\w/]+)(?=\.py\b)")

    def slash(match):
        source, name = match.groups()
        return source + files.get(name, short.get(name, name))

    def rewrite(text, imports):
        if imports and "from penstock" in text:
            text = lines.sub(line, text)
        if "penstock." in text:
            text = pattern.sub(path, text)
        if ".py" in text:
            text = slashed.sub(slash, text)
        return text

    def rewrite_python(text):
        """Strings and comments only: the rest is rewritten by its syntax."""
        starts = [0]
        for one in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(one))
        result, last = [], 0
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.STRING, tokenize.COMMENT):
                begin = starts[token.start[0] - 1] + token.start[1]
                end = starts[token.end[0] - 1] + token.end[1]
                result.append(text[last:begin])
                result.append(rewrite(text[begin:end], imports=token.type == tokenize.STRING))
                last = end
        return "".join(result) + text[last:]

    return rewrite, rewrite_python


def main():
    check = "--check" in sys.argv
    mapping = Map([a for a in sys.argv[1:] if not a.startswith("--")])
    world = World(mapping)
    groups = defaultdict(list)
    for module in mapping.modules:  # the map's order
        groups[mapping.modules[module].removesuffix(".__init__")].append(module)
    for module in world.modules:
        if module not in mapping.modules:
            groups[module].insert(0, module) if module in groups else groups[module].append(module)
    bad = 0
    texts = {}
    for module, new in mapping.modules.items():
        new = new.removesuffix(".__init__")
        if mapping.modules.get(new, new).removesuffix(".__init__") != new:
            print(f"!! chain: {module} -> {new} -> {mapping.modules[new]}")
    for new, parts in groups.items():
        parts = [p for p in parts if p in world.modules]
        if not parts:
            continue
        if len(parts) == 1 and world.new_module(parts[0]) == parts[0]:
            module = world.modules[parts[0]]
            texts[new] = Rewriter(world, module.text, module.tree, module, new).run(take_imports=False)
            continue
        texts[new], problems = build(world, new, parts)
        for problem in problems:
            bad += 1
            print(f"{new}: {problem}")
    for word in mapping.words:
        if not re.fullmatch(r"\w+", word):
            print(f"!! words: {word!r} is not an identifier")
    if check:
        print(f"{len(texts)} modules, {bad} problems")
        return bad > 0
    rewrite, rewrite_python = dotted(world)
    words = (
        re.compile(r"\b(" + "|".join(sorted(map(re.escape, mapping.words), key=len, reverse=True)) + r")\b")
        if mapping.words
        else None
    )

    def worded(text):
        return words.sub(lambda m: mapping.words[m.group(0)], text) if words else text

    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True).stdout.split("\n")
    others = [
        Path(p)
        for p in tracked
        if p.endswith((".py", ".md", ".txt", ".toml", ".yml", ".js", ".html"))
        and not p.startswith(f"src/{PKG}/")
        and not p.startswith("tools/house")
        and not p.startswith("tools/golden")
        and p
    ]
    others += [Path(p) for p in tracked if p.startswith(f"src/{PKG}/") and p.endswith((".js", ".html"))]
    staged = {}
    for path in others:
        text = path.read_text()
        if path.suffix == ".py":
            text = Rewriter(world, text, ast.parse(text)).run(take_imports=False)
            text = rewrite_python(text)
        elif path.suffix in (".js", ".html"):
            pass
        else:
            text = rewrite(text, imports=True)
        staged[path] = worded(text)
    for module in world.modules.values():
        module.path.unlink()
    for new, text in texts.items():
        base = SRC / Path(*new.split("."))
        package = any(other.startswith(new + ".") for other in texts)
        path = base / "__init__.py" if package or new == PKG else base.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(worded(rewrite_python(text)))
    for path, text in staged.items():
        path.write_text(text)
    # new packages need their fronts
    for new in list(texts):
        parent = new.rpartition(".")[0]
        while parent:
            front = SRC / Path(*parent.split(".")) / "__init__.py"
            if not front.exists():
                front.write_text(f'"""The package {parent}."""\n')
            parent = parent.rpartition(".")[0]
    for old, new in mapping.files.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", old, new], check=True)
    for folder in sorted((SRC / PKG).rglob("*"), reverse=True):
        if folder.is_dir() and not any(p for p in folder.iterdir() if p.name != "__pycache__"):
            subprocess.run(["rm", "-rf", str(folder)], check=True)
    print(f"{len(texts)} modules, {bad} problems")
    return 0


if __name__ == "__main__":
    sys.exit(main())
