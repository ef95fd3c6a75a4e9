"""A recorded forward: a list of steps on numbered values, which call functions and whole modules of the model.

    0 = inputs                      step                        layer
    1 = embed(0)                    module   embed              embed
    2 = add(1, positions)           function add                embed
    3 = blocks.0(2)                 module   blocks.0           blocks.0

Arguments of steps are trees in which ``Ref`` stands for a value, ``Attribute`` for a parameter or buffer of the model,
and ``OwnDevice`` for the device that the stage runs on. All else is as it was when the forward was recorded.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock._torch import is_fake_tensor, pytree, storage_id
from penstock.errors import PlanError

Env = dict[int, Any]


class Ref(NamedTuple):
    """The value of this number."""

    number: int


class Attribute(NamedTuple):
    """A parameter or buffer of the model."""

    name: str


class OwnDevice(NamedTuple):
    """The device of the stage."""


PLACEHOLDERS = (Ref, Attribute, OwnDevice)


def map_tree(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """``value`` with ``leaf(x)`` in place of each leaf of its tuples, lists, mappings and dataclasses."""
    kind = type(value)
    if isinstance(value, PLACEHOLDERS):
        return leaf(value)
    if kind is tuple or kind is list:
        return kind([map_tree(item, leaf) for item in value])
    if kind is dict:
        return {key: map_tree(item, leaf) for key, item in value.items()}
    if kind is slice:
        return slice(*(map_tree(item, leaf) for item in (value.start, value.stop, value.step)))
    if kind in pytree.SUPPORTED_NODES and kind is not torch.Size:
        items, context = pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return pytree.SUPPORTED_NODES[kind].unflatten_fn([map_tree(item, leaf) for item in items], context)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(map_tree(item, leaf) for item in value))
    if isinstance(value, (list, dict)) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        copied: Any = copy.copy(value)
        if isinstance(value, list):
            copied[:] = [map_tree(item, leaf) for item in value]
        elif isinstance(value, dict):
            copied.update({key: map_tree(item, leaf) for key, item in value.items()})
        else:
            for entry in dataclasses.fields(value):
                if hasattr(value, entry.name):
                    object.__setattr__(copied, entry.name, map_tree(getattr(value, entry.name), leaf))
        return copied
    return leaf(value)


def leaves_of(value: Any) -> list[Any]:
    found: list[Any] = []
    map_tree(value, found.append)
    return found


@dataclass(eq=False)
class Step:
    """One call of a function, or of a module of the model.

    ``outputs`` are the numbers of the leaves of its result, None for those that are no tensors. ``changes`` are the
    storages that it changes in place.
    """

    target: Any
    args: Any
    kwargs: Any
    outputs: list[int | None]
    layer: str | None
    where: str
    module: bool = False
    context: tuple[Any, ...] | None = None  # grad mode and autocast, where the forward has set them
    changes: frozenset[int] = frozenset()
    changed_names: tuple[str, ...] = ()  # of the parameters and buffers that it changes
    known: bool = False  # it is computed from the inputs alone
    answer: Any = None  # the result, or its shapes, if the forward goes on with it
    asks: bool = False
    checkpoint: bool | None = None  # a module runs in a checkpoint, reentrant or not
    result: Any = None  # of a module: its result as a template
    shape: tuple[int, ...] | None = None  # of its result, where the data might give it another one

    def refs(self) -> Iterator[Any]:
        """The values, parameters and buffers that it uses."""
        return (leaf for leaf in leaves_of((self.args, self.kwargs)) if isinstance(leaf, (Ref, Attribute)))


@dataclass(eq=False)
class Recording:
    """One kind of call, recorded."""

    key: str
    text: str  # the call, for errors
    call: Mapping[str, Any] = field(default_factory=dict)  # its description
    inputs: list[int] = field(default_factory=list)  # numbers of the tensors among the arguments
    steps: list[Step] = field(default_factory=list)
    output: Any = None  # the model's output, with placeholders
    labels: dict[int, str] = field(default_factory=dict)  # names of values
    storages: dict[int, int] = field(default_factory=dict)  # of values: those with equal numbers share memory
    # Marks that the forward met, in order: cut points, blocks, or modules that begin layers.
    kind: str = ""
    order: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)  # where each was met
    devices: dict[str, str] = field(default_factory=dict)
    points: set[int] = field(default_factory=set)  # cut points that were met
    entered: set[str] = field(default_factory=set)  # modules whose forward was recorded, and not the call of it
    marked: set[str] = field(default_factory=set)  # modules in whose forwards marks were met
    answers: list[Any] = field(default_factory=list)

    @cached_property
    def questions(self) -> list[Step]:
        """The steps that decide the path through the forward: questions about the inputs, and what they are made of."""
        return needed_for_answers(self.steps)

    def holds_for(self, tensors: Sequence[Tensor], model: nn.Module) -> bool:
        """Whether the forward takes the same path for other inputs."""
        if not self.answers:
            return True
        return evaluate(self.questions, dict(zip(self.inputs, tensors, strict=True)), model) == self.answers


class TensorMeta:
    """A tensor in the result of a module: one of its inputs, a view of one, or a new one."""

    def __init__(self, tensor: Tensor, same: int | None, view_of: int | None) -> None:
        self.size: Any = (tensor.shape, tensor.stride(), tensor.storage_offset())
        self.dtype, self.device, self.requires_grad = tensor.dtype, tensor.device, tensor.requires_grad
        self.same, self.view_of = same, view_of

    def empty(self) -> Tensor:
        """A tensor like it, which is no leaf of the graph."""
        made = torch.empty_strided(*self.size[:2], dtype=self.dtype, device=self.device)
        return made.requires_grad_().clone() if self.requires_grad else made


def template_of(result: Any, inputs: Sequence[Tensor]) -> Any:
    """The result of a module with a ``TensorMeta`` in place of each tensor."""
    storages = {storage_id(tensor): i for i, tensor in enumerate(inputs) if tensor.layout is torch.strided}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        same = next((i for i, tensor in enumerate(inputs) if tensor is value), None)
        return TensorMeta(value, same, storages.get(storage_id(value)))

    return map_tree(result, leaf)


# ── replay ───────────────────────────────────────────────────────────────────────────────────────────────────────


def resolver(env: Env, attribute: Callable[[str], Any], device: torch.device | None) -> Callable[[Any], Any]:
    """A function that gives the arguments of a step their values."""

    def leaf(value: Any) -> Any:
        if type(value) is Ref:
            return env[value.number]
        if type(value) is Attribute:
            return attribute(value.name)
        return device if type(value) is OwnDevice else value

    return lambda tree: map_tree(tree, leaf)


def store_outputs(step: Step, result: Any, env: Env) -> None:
    """Number the tensors of a step's result."""
    outputs = step.outputs
    if step.shape is not None and step.shape != tuple(result.shape):
        raise PlanError(
            f"{step.where}: {step.target.__name__} returned a tensor of shape {tuple(result.shape)}, but the model's "
            f"forward was recorded for {step.shape}"
        )
    if len(outputs) == 1 and isinstance(result, Tensor):
        if outputs[0] is not None:
            env[outputs[0]] = result
        return
    leaves = leaves_of(result)
    if len(leaves) != len(outputs) or any(
        (number is not None) != isinstance(leaf, Tensor) for number, leaf in zip(outputs, leaves, strict=True)
    ):
        raise PlanError(
            f"{step.where}: {step.target} returned {_structure(leaves)}, but {_structure(outputs)} when the model's "
            "forward was recorded: it does not return the same for inputs of the same shapes"
        )
    for number, leaf in zip(outputs, leaves, strict=True):
        if number is not None:
            env[number] = leaf


def _structure(leaves: Sequence[Any]) -> str:
    tensors = sum(isinstance(leaf, (Tensor, int)) and not isinstance(leaf, bool) for leaf in leaves)
    return f"{tensors} tensors among {len(leaves)} values"


# ── questions: values on which the forward's path depends ──────────────────────────────────────────────────────────

_HIGHEST = 1 - 2**-24  # that torch.rand can return


def needed_for(steps: Sequence[Step], numbers: set[int]) -> list[Step]:
    """The known steps that these values, and the questions among the steps, depend on."""
    used, found = set(numbers), list[Step]()
    for step in reversed([step for step in steps if step.known]):
        wanted = not used.isdisjoint(n for n in step.outputs if n is not None)
        if wanted or (step.asks and not numbers) or (step.changes and found):
            used.update(ref.number for ref in step.refs() if type(ref) is Ref)
            found.append(step)
    return found[::-1]


def needed_for_answers(steps: Sequence[Step]) -> list[Step]:
    """The questions among ``steps``, with the steps that they depend on."""
    return needed_for(steps, set())


def evaluate(steps: Sequence[Step], env: Env, model: nn.Module) -> list[Any] | None:
    """The answers to the questions among ``steps``, which depend on inputs alone; ``env`` has the inputs.

    Uniform random numbers are replaced by the lowest and the highest: None if an answer depends on them.
    """
    both = []
    for uniform in (0.0, _HIGHEST) if any(is_uniform(step.target) for step in steps) else (0.0,):
        copies = {number: tensor.detach() for number, tensor in env.items()}
        if any(step.changes for step in steps):
            copies = {number: tensor.clone() for number, tensor in copies.items()}
        device = next((tensor.device for tensor in copies.values()), torch.device("cpu"))
        answers: list[Any] = []
        with torch.no_grad():
            for step in steps:
                run_known(step, copies, model, device, answers, uniform)
        both.append(answers)
    return both[0] if all(answers == both[0] for answers in both) else None


def run_known(
    step: Step, env: Env, model: nn.Module, device: torch.device, answers: list[Any], uniform: float = 0.0
) -> Any:
    """Run a step whose arguments are known; a question's answer is appended to ``answers``."""
    fill = resolver(env, lambda name: tensor_of(model, name), device)
    args, kwargs = fill(step.args), fill(step.kwargs)
    if is_uniform(step.target):
        kwargs.pop("generator", None)
        result = (torch.zeros if step.target is torch.rand else torch.zeros_like)(*args, **kwargs) + uniform
    else:
        result = step.target(*args, **kwargs)
    if step.asks:
        answers.append(answer_of(result))
    if step.outputs:
        store_outputs(step, result, env)
    return result


def answer_of(result: Any) -> Any:
    """The answer to a question, as JSON data: plain values, and the shapes of tensors."""
    if isinstance(result, Tensor):
        return {"shape": list(result.shape), "dtype": str(result.dtype).removeprefix("torch.")}
    if isinstance(result, (tuple, list)):
        return [answer_of(item) for item in result]
    if type(result).__module__ == "numpy":
        return {"array": result.tolist(), "dtype": str(result.dtype)}
    return result


def from_answer(answer: Any, device: torch.device) -> Any:
    """The result of a question: plain values and arrays as they were, tensors without data."""
    if isinstance(answer, dict) and "array" in answer:
        import numpy

        return numpy.array(answer["array"], dtype=answer["dtype"])
    if isinstance(answer, dict):
        return torch.empty(answer["shape"], dtype=getattr(torch, answer["dtype"]), device=device)
    if isinstance(answer, list) and any(isinstance(item, dict) for item in answer):
        return tuple(from_answer(item, device) for item in answer)
    return answer


def is_uniform(function: Any) -> bool:
    return function in (torch.rand, torch.rand_like)


def tensor_of(model: nn.Module, name: str) -> Any:
    """A parameter or buffer by its name."""
    parents, _, last = name.rpartition(".")
    owner = model.get_submodule(parents)
    return owner._parameters[last] if last in owner._parameters else owner._buffers[last]


# ── the steps of one stage ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Part:
    """The steps of one stage, and the values that it receives from and sends to each other stage."""

    steps: list[Step] = field(default_factory=list)
    received: dict[int, list[int]] = field(default_factory=dict)
    sent: dict[int, list[int]] = field(default_factory=dict)


def divide(recording: Recording, stage_of: Callable[[Step], int], num_stages: int) -> list[Part]:
    """The parts of a recording in stages. A value goes straight from its producer to each stage that uses it."""
    parts = [Part() for _ in range(num_stages)]
    made_in = dict.fromkeys(recording.inputs, 0)
    made_by: dict[int, Step] = {}
    steps = _needed(recording)
    stages = {id(step): stage_of(step) for step in steps}
    uses: dict[int, dict[int, None]] = {}
    for step in steps:
        stage = stages[id(step)]
        parts[stage].steps.append(step)
        for ref in step.refs():
            if isinstance(ref, Ref):
                source = made_in[ref.number]
                if source > stage:
                    raise _flows_back(recording, step, stage, ref.number, made_by[ref.number], source)
                uses.setdefault(ref.number, {})[stage] = None
        for number in step.outputs:
            if number is not None and number not in made_in:
                made_in[number], made_by[number] = stage, step
    for leaf in leaves_of(recording.output):
        if isinstance(leaf, Ref):
            uses.setdefault(leaf.number, {})[num_stages - 1] = None
    for number, stages_using in sorted(uses.items()):
        source = made_in[number]
        for stage in stages_using:
            if stage != source:
                parts[stage].received.setdefault(source, []).append(number)
                parts[source].sent.setdefault(stage, []).append(number)
    _check_in_place(recording, steps, stages, made_in, parts)
    return parts


def _needed(recording: Recording) -> list[Step]:
    """The steps without those whose results nothing uses and that were recorded to answer questions alone."""
    used = {leaf.number for leaf in leaves_of(recording.output) if isinstance(leaf, Ref)}
    found = []
    for step in reversed(recording.steps):
        if step.asks and not any(number is not None for number in step.outputs):
            continue
        has_effect = step.changes or step.changed_names or is_uniform(step.target)
        if step.known and not has_effect and used.isdisjoint(n for n in step.outputs if n is not None):
            continue
        used.update(ref.number for ref in step.refs() if isinstance(ref, Ref))
        found.append(step)
    return found[::-1]


def _flows_back(recording: Recording, user: Step, stage: int, number: int, maker: Step, source: int) -> PlanError:
    return PlanError(
        f"{user.layer!r} ({user.where}) is in stage {stage} but needs the value {recording.labels[number]!r} of "
        f"{maker.layer!r} ({maker.where}), which is in stage {source}: values flow from earlier stages to later ones "
        "only. Put the two into one stage, or change the stages' order"
    )


def _check_in_place(
    recording: Recording,
    steps: Sequence[Step],
    stages: Mapping[int, int],
    made_in: Mapping[int, int],
    parts: Sequence[Part],
) -> None:
    """A value that is changed in place in one stage is not used in another that has its own copy of it."""
    storages, outputs = recording.storages, {leaf.number for leaf in leaves_of(recording.output) if type(leaf) is Ref}
    origin: dict[int, int] = {}
    for number, stage in made_in.items():
        origin.setdefault(storages[number], stage)
    for i, step in enumerate(steps):
        stage = stages[id(step)]
        later = [(stages[id(other)], ref, other.where) for other in steps[i + 1 :] for ref in other.refs()]
        later += [(len(parts) - 1, Ref(number), "the model's output") for number in outputs]
        for storage in step.changes:
            if storage not in origin or origin[storage] == stage:
                continue
            received = [n for row in parts[stage].received.values() for n in row if storages[n] == storage]
            for there, ref, where in later:
                if type(ref) is Ref and storages.get(ref.number) == storage:
                    if there != stage:
                        raise _changed_elsewhere(step, recording.labels[ref.number], stage, there, where)
                    if len(received) > 1 and ref.number in received:
                        raise _changed_elsewhere(step, recording.labels[ref.number], stage, origin[storage], where)
        for name in step.changed_names:
            for other in steps:
                there = stages[id(other)]
                if there != stage and Attribute(name) in other.refs():
                    raise _changed_elsewhere(step, name, stage, there, other.where)


def _changed_elsewhere(step: Step, label: str, stage: int, other: int, where: str) -> PlanError:
    return PlanError(
        f"{step.where}: {label!r} is changed in place in stage {stage}, but stage {other} uses it too ({where}) and "
        "would not see the change: compute a new value instead, or put the two into one stage"
    )


def route(parts: Sequence[Part], planned: set[tuple[int, int]]) -> None:
    """Send values from stage to stage where the plan has no edge for them, because their kind of call was not known."""
    for src, part in enumerate(parts):
        for dst in [dst for dst in part.sent if (src, dst) not in planned]:
            values = part.sent.pop(dst)
            del parts[dst].received[src]
            for stage in range(src, dst):
                sent = parts[stage].sent.setdefault(stage + 1, [])
                sent.extend(value for value in values if value not in sent)
                parts[stage + 1].received[stage] = list(sent)


class Program:
    """The steps of one stage for one recording, each value dropped after its last use."""

    def __init__(
        self,
        model: nn.Module,
        recording: Recording,
        part: Part,
        received: Sequence[list[int]],
        sent: Sequence[list[int]],
        last: bool,
    ) -> None:
        self.model, self.received, self.sent = model, received, sent
        self.output = _compiled(recording.output)
        self.last = last
        kept = {number for numbers in sent for number in numbers}
        if last:
            kept |= {leaf.number for leaf in leaves_of(recording.output) if type(leaf) is Ref}
        uses = {number: -1 for numbers in received for number in numbers}
        for i, step in enumerate(part.steps):
            uses.update({ref.number: i for ref in step.refs() if type(ref) is Ref})
            uses.update({number: i for number in step.outputs if number is not None})
        drops: dict[int, list[int]] = {}
        for number, i in uses.items():
            if number not in kept:
                drops.setdefault(i, []).append(number)
        self.steps = [
            (step, _compiled(step.args), _compiled(step.kwargs), drops.get(i, [])) for i, step in enumerate(part.steps)
        ]
        self.own_device = any(
            type(leaf) is OwnDevice for step in part.steps for leaf in leaves_of((step.args, step.kwargs))
        )

    def __call__(self, root: nn.Module, inputs: Sequence[Sequence[Any]]) -> Any:
        """The model's output in the last stage; else the values of each edge."""
        env: Env = {}
        for numbers, values in zip(self.received, inputs, strict=True):
            env.update(zip(numbers, values, strict=True))
        env[_ROOT], env[_DEVICE] = root, _device(inputs, root) if self.own_device else None
        for step, fill_args, fill_kwargs, drops in self.steps:
            try:
                args, kwargs = fill_args(env), fill_kwargs(env)
                target = self._module(root, step.target) if step.module else step.target
                if step.checkpoint is not None:
                    target, kwargs = partial(checkpoint, partial(target, **kwargs), use_reentrant=step.checkpoint), {}
                if step.context is None:
                    result = target(*args, **kwargs)
                else:
                    with entered_context(step.context):
                        result = target(*args, **kwargs)
            except Exception as error:
                result = _infer_result(step, args, kwargs, root) if step.module or step.asks else None
                if result is None:
                    error.add_note(f"in the forward's line {step.where}")
                    raise
            if step.outputs:
                store_outputs(step, result, env)
            del result, args, kwargs
            for number in drops:
                env.pop(number, None)
        if self.last:
            return self.output(env)
        return [[env[number] for number in numbers] for numbers in self.sent]


    def _module(self, root: nn.Module, path: str) -> Any:
        """A module of the stage, or one of the model without state, which any stage may call."""
        try:
            return _lookup(root, path)
        except AttributeError:
            return self.model.get_submodule(path)


_ROOT, _DEVICE = -1, -2  # among the values of a program: the stage's module and its device


def _compiled(tree: Any) -> Callable[[Env], Any]:
    """A function that gives a tree of arguments its values."""
    kind = type(tree)
    if kind is Ref:
        return itemgetter(tree.number)
    if kind is Attribute:
        return lambda env: _lookup(env[_ROOT], tree.name)
    if kind is OwnDevice:
        return itemgetter(_DEVICE)
    if not any(isinstance(leaf, PLACEHOLDERS) for leaf in leaves_of(tree)):
        return lambda env: tree
    if kind is tuple or kind is list:
        items = [_compiled(item) for item in tree]
        return lambda env: kind([item(env) for item in items])
    if kind is dict:
        entries = [(key, _compiled(item)) for key, item in tree.items()]
        return lambda env: {key: item(env) for key, item in entries}
    return lambda env: resolver(env, lambda name: _lookup(env[_ROOT], name), env[_DEVICE])(tree)


def _infer_result(step: Step, args: Any, kwargs: Any, root: nn.Module) -> Any:
    """The result of a step that fake tensors cannot follow, as it was recorded; None if the tensors are real."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    if not any(map(is_fake_tensor, tensors)):
        return None
    if step.asks:
        return from_answer(step.answer, tensors[0].device)
    members = (*tensors, *_lookup(root, step.target).parameters())
    zero = sum(t.flatten()[:0].sum() for t in members if t.requires_grad)  # the result depends on all of these

    def leaf(value: Any) -> Any:
        if type(value) is not TensorMeta:
            return value
        made = torch.empty_strided(*value.size[:2], dtype=value.dtype, device=value.device)
        return made + zero if value.requires_grad and torch.is_grad_enabled() else made

    return map_tree(step.result, leaf)


def _lookup(root: nn.Module, path: str) -> Any:
    """The module, parameter or buffer at a path of a stage."""
    found: Any = root
    for name in path.split("."):
        inner = found._modules.get(name)
        found = getattr(found, name) if inner is None else inner
    return found


def _device(inputs: Any, root: nn.Module) -> torch.device:
    """The device that a stage runs on: that of a tensor it was given, or of its parameters."""
    for tensor in (leaf for leaf in leaves_of(list(inputs)) if isinstance(leaf, Tensor)):
        return tensor.device
    for parameter in root.parameters():
        return parameter.device
    return torch.get_default_device()


# ── grad mode and autocast ─────────────────────────────────────────────────────────────────────────────────────────

_DEVICE_TYPES = ("cpu", "cuda")


def context_now() -> tuple[Any, ...]:
    """Grad mode, and autocast for each type of device."""
    casts = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _DEVICE_TYPES)
    return (torch.is_grad_enabled(), *casts)


def changed_context(before: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The parts of the context that differ from ``before``; None if all are the same."""
    now = context_now()
    return None if now == before else tuple(new if new != old else None for new, old in zip(now, before, strict=True))


def entered_context(context: tuple[Any, ...]) -> ExitStack:
    """Grad mode and autocast as the forward has set them for a step."""
    stack = ExitStack()
    if context[0] is not None:
        stack.enter_context(torch.set_grad_enabled(context[0]))
    for kind, setting in zip(_DEVICE_TYPES, context[1:], strict=True):
        if setting is not None:
            enabled, dtype = setting
            stack.enter_context(torch.autocast(kind, dtype=dtype if enabled else None, enabled=enabled))
    return stack
