"""What one stage runs, compiled: a list of steps on numbered values, each dropped after its last use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import PlanError
from penstock.split.trace.context import switched_as
from penstock.split.trace.proxy import spread
from penstock.split.trace.segments import Part, label, small

Env = list[Any]
Fetch = Callable[[Env], Any]


class Step:
    """One operation."""

    __slots__ = ("args", "context", "drops", "kind", "kwargs", "out", "owner", "place", "target")

    def __init__(
        self,
        node: fx.Node,
        slots: Mapping[fx.Node, int],
        drops: list[int],
        constants: Mapping[str, Any],
        model: nn.Module,
    ) -> None:
        self.owner: nn.Module | None = None
        self.kind = node.op
        self.target: Any = node.target
        if node.op in ("call_module", "get_attr"):
            self.target = tuple(str(node.target).split("."))
        if node.op == "get_attr" and str(node.target) in constants:
            self.kind, self.target = "constant", constants[str(node.target)]
        elif node.op == "get_attr" and all(small(user) for user in node.users if user in slots):
            # Only its dtype or shape is asked: of the model, for this stage may not hold it.
            self.kind, self.owner = "of model", model
        self.args = _sequence(node.args, slots)
        self.kwargs = [(name, _fetch(value, slots)) for name, value in node.kwargs.items()]
        self.out = slots[node]
        self.drops = drops
        self.place: str = node.meta["where"]
        self.context: tuple[Any, ...] | None = node.meta.get("context")

    def run(self, root: nn.Module, env: Env) -> Any:
        if self.kind == "constant":
            return self.target
        if self.kind == "get_attr":
            return getattr(_module(root, self.target[:-1]), self.target[-1])
        if self.owner is not None:
            return getattr(_module(self.owner, self.target[:-1]), self.target[-1])
        args = self.args(env)
        kwargs = {name: fetch(env) for name, fetch in self.kwargs}
        if self.kind == "call_module":
            return _module(root, self.target)(*args, **kwargs)
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return self.target(*args, **kwargs)


class Program:
    """One stage's steps for one kind of call."""

    def __init__(
        self,
        slots: Mapping[fx.Node, int],
        received: Sequence[Sequence[fx.Node]],
        sent: Sequence[Sequence[fx.Node]],
        steps: list[Step],
        output: fx.Node | None,
        own_device: set[int],
    ) -> None:
        self.received = [[slots[node] for node in nodes] for nodes in received]
        self.sent = [[slots[node] for node in nodes] for nodes in sent]
        self.names = [[(label(node), node.meta["where"]) for node in nodes] for nodes in sent]
        self.checked = False
        self.steps = steps
        self.size = len(slots)
        self.output = None if output is None else _fetch(output.args[0], slots)
        self.own_device = own_device

    def __call__(self, root: nn.Module, inputs: Sequence[Sequence[Any]]) -> Any:
        """The stage's output, or the values of each edge out of it."""
        env: Env = [None] * self.size
        for slots, values in zip(self.received, inputs, strict=True):
            for slot, value in zip(slots, values, strict=True):
                env[slot] = value
        device = _device(inputs, root) if self.own_device else None
        for step in self.steps:
            if step.out in self.own_device:
                env[step.out] = device
                continue
            try:
                if step.context is None:
                    env[step.out] = step.run(root, env)
                else:
                    with switched_as(step.context):
                        env[step.out] = step.run(root, env)
            except Exception as error:
                error.add_note(f"in the forward's line {step.place}")
                raise
            for slot in step.drops:
                env[slot] = None
        if self.output is not None:
            return self.output(env)
        values = [[env[slot] for slot in slots] for slots in self.sent]
        if not self.checked:
            self._check(values)
        return values

    def _check(self, values: list[list[Any]]) -> None:
        """What crosses is a tree of tensors and plain values; looked at once."""
        for named, edge in zip(self.names, values, strict=True):
            for (name, place), value in zip(named, edge, strict=True):
                bad = next(_strangers(value), None)
                if bad is not None:
                    raise PlanError(
                        f"{place}: {name!r} crosses to another stage, but it holds a {type(bad).__name__}: only "
                        "tensors, None, numbers and strings can cross, and tuples, lists and dicts of them"
                    )
        self.checked = True


def compiled(
    part: Part,
    received: Sequence[Sequence[fx.Node]],
    sent: Sequence[Sequence[fx.Node]],
    constants: Mapping[str, Any],
    model: nn.Module,
) -> Program:
    """The program of a part whose edges bring ``received`` and take ``sent``."""
    nodes = dict.fromkeys(node for values in received for node in values)
    steps = [node for node in part.steps if node.op != "output" and node not in nodes]
    output = next((node for node in part.steps if node.op == "output"), None)
    slots = {node: i for i, node in enumerate([*nodes, *steps])}
    kept = {node for values in sent for node in values} | set(output.all_input_nodes if output else ())
    last: dict[fx.Node, fx.Node] = {}
    for node in steps:
        last[node] = node
        for value in node.all_input_nodes:
            if value in slots:
                last[value] = node
    drops: dict[fx.Node, list[int]] = {}
    for value, node in last.items():
        if value not in kept:
            drops.setdefault(node, []).append(slots[value])
    made = [Step(node, slots, drops.get(node, []), constants, model) for node in steps if node not in part.own_device]
    alone = [_Given(slots[node]) for node in steps if node in part.own_device]
    return Program(slots, received, sent, [*alone, *made], output, {slots[node] for node in part.own_device})


class _Given(Step):
    """A step whose value the program has already."""

    __slots__ = ()

    def __init__(self, slot: int) -> None:
        self.out = slot


def _module(root: nn.Module, path: Sequence[str]) -> Any:
    module: Any = root
    for name in path:
        module = module._modules[name] if name in module._modules else getattr(module, name)
    return module


def _fetch(value: Any, slots: Mapping[fx.Node, int]) -> Fetch:
    """A function that puts an argument together."""
    if isinstance(value, fx.Node):
        slot = slots[value]
        return lambda env: env[slot]
    if isinstance(value, (tuple, list)):
        items = _sequence(value, slots)
        return items if isinstance(value, list) else lambda env: tuple(items(env))
    if isinstance(value, dict):
        pairs = [(key, _fetch(item, slots)) for key, item in value.items()]
        return lambda env: {key: fetch(env) for key, fetch in pairs}
    if isinstance(value, slice):
        start, stop, step = (_fetch(item, slots) for item in (value.start, value.stop, value.step))
        return lambda env: slice(start(env), stop(env), step(env))
    return lambda env: value


def _sequence(values: Sequence[Any], slots: Mapping[fx.Node, int]) -> Callable[[Env], list[Any]]:
    fetches = [_fetch(value, slots) for value in values]
    spreads = [isinstance(value, fx.Node) and value.target is spread for value in values]
    if not any(spreads):
        return lambda env: [fetch(env) for fetch in fetches]

    def build(env: Env) -> list[Any]:
        items: list[Any] = []
        for fetch, many in zip(fetches, spreads, strict=True):
            items.extend(fetch(env)) if many else items.append(fetch(env))
        return items

    return build


def _device(inputs: Sequence[Any], root: nn.Module) -> torch.device:
    """The device that a stage runs on: that of a tensor it was given, or of its parameters."""
    for tensor in _tensors(inputs):
        return tensor.device
    for parameter in root.parameters():
        return parameter.device
    return torch.get_default_device()


_PLAIN = (Tensor, bool, int, float, complex, str, torch.dtype, torch.Size, type(None))


def _strangers(value: Any) -> Iterator[Any]:
    """What cannot cross to another stage."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _strangers(item)
    elif type(value) is dict:
        yield from _strangers(list(value.values()))
    elif not isinstance(value, _PLAIN):
        yield value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
