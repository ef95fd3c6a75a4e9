"""``ps.flatten``: parts of a model in execution order, as a Sequential that keeps the model's names.

flatten(net, ["stem", "body", lambda x: x.mean(-1), "head"])

runs     stem ─▶ body.0 ─▶ body.1 ─▶ lambda_2 ─▶ head      one after the other
names    stem    body┬0    lambda_2    head                a tree that mirrors the model's
                     └1
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from penstock.errors import PlanError, did_you_mean
from penstock.split.lazy import members

Entry = str | nn.Module | Callable[[Any], Any]


class FlatSequential(nn.Sequential):
    """Layers that run one after the other and are registered in a tree by their dotted names.

    ``paths`` maps each layer, in order, to its names: the module under the first name is called, the others are further
    names of its parts. ``tree`` maps names to modules, in the order of ``parameters()``.
    """

    def __init__(self, paths: Mapping[str, Iterable[str]], tree: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._paths = {layer: tuple(names) for layer, names in paths.items()}
        for path, module in tree.items():
            _insert(self, path, module, tree)
        self._order = [names[0].split(".") for names in self._paths.values()]

    def __iter__(self) -> Iterator[nn.Module]:
        for parts in self._order:
            module: nn.Module = self
            for part in parts:
                module = module._modules[part]  # type: ignore[assignment]
            yield module

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def _immutable(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PlanError("the layers of a flattened model are fixed: flatten the model again, with another list")

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = insert = extend = pop = _immutable


class _Branch(nn.Module):
    """A node in the tree of names, in place of a module of the model that is not itself called."""


class _Function(nn.Module):
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, input: Any) -> Any:
        return self._fn(input)


def flatten(model: nn.Module, entries: Iterable[Entry], *, partial: bool = False) -> FlatSequential:
    """The layers ``entries`` of ``model`` as an ``nn.Sequential`` that ``ps.split`` can cut.

    An entry is the (dotted) name of a module, a module, or a function of one value. The *name* of a plain
    ``nn.Sequential`` or ``nn.ModuleList`` stands for its members; a module object is always one layer. The layers are
    the model's own modules under its names, so ``state_dict()`` has the model's keys. A module may be listed several
    times. Modules that are not part of the model are named after their class, functions after themselves.

    Parameters and buffers outside all entries would be lost; this is an error unless ``partial=True``. The caller is
    responsible for listing the entries as the model's forward runs them.
    """
    if isinstance(entries, (str, nn.Module)) or not isinstance(entries, Iterable):
        raise PlanError(f"flatten takes a list of names, modules and functions, got {entries!r}")
    names = _LayerNames(model)
    for number, entry in enumerate(entries):
        names.add(number, entry)
    if not names.layers:
        raise PlanError("nothing is listed: flatten needs the layers of the model, in the order in which they run")
    _check_no_lost_hooks(model, names)
    if not partial:
        _check_no_lost_members(model, names)
    paths = names.paths()
    known = [path for path in names.modules if path in names.tree]
    order = dict.fromkeys((*known, *names.tree))  # of the model's parameters(); modules of no model come last
    flat = FlatSequential(paths, {path: names.tree[path] for path in order})
    for module in flat.modules():
        if isinstance(module, _Branch):
            module.training = model.training
    flat.training = model.training
    return flat


class _LayerNames:
    """Names of the listed layers: the model's names, or free names for modules that it does not have."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layers: dict[str, str] = {}  # layer -> path
        self.tree: dict[str, nn.Module] = {}
        self.expanded: set[str] = set()
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.own: dict[int, list[str]] = {}
        for path, module in self.modules.items():
            self.own.setdefault(id(module), []).append(path)
        self.foreign: dict[int, str] = {}

    def add(self, number: int, entry: Any) -> None:
        if isinstance(entry, str):
            module = self.modules.get(entry) if entry else None
            if module is None:
                hint = did_you_mean(entry, self.modules, otherwise=f": it has {', '.join(self.model._modules)}")
                raise PlanError(f"entry {number}: there is no module '{entry}' in {type(self.model).__name__}{hint}")
            plain = is_plain_sequential(module) and not isinstance(module, FlatSequential)
            if plain or (isinstance(module, nn.ModuleList) and _has_no_forward(module)):  # stands for its members
                self.expanded.add(entry)
                for name, member in layers_of(module).items():
                    self._add_layer(number, f"{entry}.{name}", member)
            else:
                self._add_layer(number, entry, module)
        elif isinstance(entry, nn.Module):
            paths = self.own.get(id(entry))
            if paths == [""]:
                raise PlanError(f"entry {number} is the model itself: list its parts")
            if paths is None and id(entry) not in self.foreign:
                self.foreign[id(entry)] = self._free_name(type(entry).__name__.lower(), number)
            self._add_layer(number, paths[0] if paths else self.foreign[id(entry)], entry)
        elif callable(entry) and not inspect.isclass(entry):
            name = getattr(entry, "__name__", type(entry).__name__).replace("<lambda>", f"lambda_{number}")
            self._add_layer(number, self._free_name(name, number), _Function(entry))
        else:
            raise PlanError(f"entry {number} must be a name, a module or a function, but is {entry!r}")

    def paths(self) -> dict[str, list[str]]:
        """For each layer its path, and further paths under which the model has parts of it."""
        paths = {}
        for layer, path in self.layers.items():
            others = [
                name
                for part in self.tree[path].modules()
                if part._parameters or part._buffers
                for name in self.own.get(id(part), ())
                if not f"{name}.".startswith(f"{path}.")
            ]
            paths[layer] = [path, *(name for name in dict.fromkeys(others) if name)]
            self.tree.update((name, _at(self.model, name)) for name in paths[layer][1:])
        return paths

    def _add_layer(self, number: int, path: str, module: nn.Module) -> None:
        if _has_no_forward(module):
            inside = ", ".join(f"'{path}.{name}'" for name in module._modules) or "none"
            raise PlanError(f"entry {number}, '{path}', has no forward: list its members ({inside})")
        repeats = sum(known == path for known in self.layers.values())
        self.layers[f"{path}:{repeats + 1}" if repeats else path] = path
        self.tree[path] = module

    def _free_name(self, name: str, number: int) -> str:
        taken = {*self.model._modules, *self.layers.values()}
        candidates = (name, f"{name}_{number}", *(f"{name}_{number}_{i}" for i in range(len(taken))))
        return next(candidate for candidate in candidates if candidate not in taken)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a Sequential or list by name, repeated modules included (unlike ``named_children``)."""
    if isinstance(model, FlatSequential):
        return dict(zip(model._paths, model, strict=True))
    return {name: layer for name, layer in model._modules.items() if layer is not None}


def paths_of(model: nn.Module, layer: str) -> dict[str, nn.Module]:
    """The modules of a layer by their names in the model; the first is the layer itself."""
    names = model._paths[layer] if isinstance(model, FlatSequential) else (layer,)
    return {name: _at(model, name) for name in names}


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether a module is a Sequential with the original forward."""
    if not isinstance(module, nn.Sequential):  # the class of a scripted module has no forward
        return False
    return type(module).forward is nn.Sequential.forward and "forward" not in module.__dict__


def check_no_hooks(module: nn.Module, what: str) -> None:
    """Raise an error if a module that no stage calls has hooks, which would never run."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise PlanError(f"{what} has hooks, and no stage runs the whole of it: register them on its layers")


def _check_no_lost_hooks(model: nn.Module, names: _LayerNames) -> None:
    check_no_hooks(model, f"the {type(model).__name__} itself")
    for path in (*names.layers.values(), *names.expanded):
        parts = path.split(".")
        for end in range(1, len(parts) + (path in names.expanded)):
            above = ".".join(parts[:end])
            if above not in names.tree:
                module = _at(model, above)
                check_no_hooks(module, f"'{above}' ({type(module).__name__})")


def _check_no_lost_members(model: nn.Module, names: _LayerNames) -> None:
    listed = {id(tensor) for layer in names.layers.values() for _, tensor in members(names.tree[layer], layer)}
    state = set(model.state_dict())
    lost = [
        name
        for name, tensor in members(model, "")
        if id(tensor) not in listed and (isinstance(tensor, nn.Parameter) or name in state)
    ]
    if lost:
        shown = ", ".join(lost[:10]) + (f" and {len(lost) - 10} more" if len(lost) > 10 else "")
        raise PlanError(
            f"{len(lost)} parameters and buffers of {type(model).__name__} are in no entry and would be lost: {shown}. "
            "List the modules that have them, or say partial=True if the rest does without"
        )


def _insert(root: nn.Module, path: str, module: nn.Module, tree: Mapping[str, nn.Module]) -> None:
    """Register a module under its dotted name, unless a module above it is in the tree too.

    Writes to ``_modules``, since ``add_module`` rejects names of Sequential's methods.
    """
    *above, name = path.split(".")
    if any(".".join(above[:end]) in tree for end in range(1, len(above) + 1)):
        return
    for part in above:
        root = root._modules.setdefault(part, _Branch())  # type: ignore[assignment]
    root._modules[name] = module


def _at(root: nn.Module, path: str) -> nn.Module:
    for part in path.split("."):
        root = root._modules[part]  # type: ignore[assignment]
    return root


def _has_no_forward(module: nn.Module) -> bool:
    return getattr(type(module), "forward", None) is nn.Module.forward and "forward" not in module.__dict__
