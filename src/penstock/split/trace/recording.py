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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._torch import pytree, storage_id
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
    checks_shapes: bool = False  # the shapes of a module's result may depend on data
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
    lost: list[str] = field(default_factory=list)  # attributes that entered modules set, and no replay does
    counts: dict[str, list[str]] = field(default_factory=dict)  # by module that stays whole: attributes that it changes

    @cached_property
    def questions(self) -> list[Step]:
        """The steps that decide the path through the forward: questions about the inputs, and what they are made of."""
        return needed_for(self.steps)

    def holds_for(self, tensors: Sequence[Tensor], model: nn.Module) -> bool:
        """Whether the forward takes the same path for other inputs."""
        if not self.answers:
            return True
        return evaluate(self.questions, dict(zip(self.inputs, tensors, strict=True)), model) == self.answers


class ResultTensor:
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
    """The result of a module with a ``ResultTensor`` in place of each tensor."""
    storages = {storage_id(tensor): i for i, tensor in enumerate(inputs) if tensor.layout is torch.strided}

    def leaf(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        same = next((i for i, tensor in enumerate(inputs) if tensor is value), None)
        return ResultTensor(value, same, storages.get(storage_id(value)))

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


def store_outputs(step: Step, result: Any, env: Env, unused: Collection[int] = ()) -> None:
    """Number the tensors of a step's result; those that nothing uses may be missing."""
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
    found = [isinstance(leaf, Tensor) or n in unused for leaf, n in zip(leaves, outputs, strict=False)]
    if len(leaves) != len(outputs) or found != [number is not None for number in outputs]:
        raise PlanError(
            f"{step.where}: {step.target} returned {len(leaves)} values, {len(outputs)} when the model's forward was "
            "recorded, or tensors in other places: it does not return the same for inputs of the same shapes"
        )
    for number, leaf in zip(outputs, leaves, strict=True):
        if number is not None:
            env[number] = leaf


def check_result(step: Step, result: Any) -> None:
    """Raise an error if a module returns other numbers, strings or shapes than when the forward was recorded."""
    for recorded, leaf in zip(leaves_of(step.result), leaves_of(result), strict=False):
        if isinstance(recorded, (bool, int, float, str)) and leaf != recorded:
            raise PlanError(
                f"{step.where}: {step.target} returned {leaf!r}, but {recorded!r} when the forward was recorded: "
                "return a tensor, or put the code that uses the number into the module"
            )

        tensors = isinstance(recorded, ResultTensor) and isinstance(leaf, Tensor)
        if step.checks_shapes and tensors and leaf.shape != recorded.size[0]:
            raise PlanError(
                f"{step.where}: {step.target} returned a tensor of shape {tuple(leaf.shape)}, but the model's forward "
                f"was recorded with {tuple(recorded.size[0])}: its shapes depend on the data, so the model cannot be "
                "cut around it"
            )


# ── questions: values on which the forward's path depends ──────────────────────────────────────────────────────────

_HIGHEST = 1 - 2**-24  # that torch.rand can return


def needed_for(steps: Sequence[Step], numbers: Collection[int] = ()) -> list[Step]:
    """The known steps that these values depend on; without values, those that the questions among the steps are."""
    used, found = set(numbers), list[Step]()
    for step in reversed([step for step in steps if step.known]):
        wanted = not used.isdisjoint(n for n in step.outputs if n is not None)
        if wanted or (step.asks and not numbers) or (step.changes and found):
            used.update(ref.number for ref in step.refs() if type(ref) is Ref)
            found.append(step)
    return found[::-1]


def evaluate(steps: Sequence[Step], env: Env, model: nn.Module) -> list[Any] | None:
    """The answers to the questions among ``steps``, which depend on inputs alone; ``env`` has the inputs.

    Uniform random numbers are replaced by the lowest, the highest and some others: None if an answer depends on them.
    """
    found = []
    draws = torch.Generator().manual_seed(0)
    for uniform in (0.0, _HIGHEST, *[draws] * 6) if any(is_uniform(step.target) for step in steps) else (0.0,):
        copies = {number: tensor.detach() for number, tensor in env.items()}
        if any(step.changes for step in steps):
            copies = {number: tensor.clone() for number, tensor in copies.items()}
        device = next((tensor.device for tensor in copies.values()), torch.device("cpu"))
        answers: list[Any] = []
        with torch.no_grad():
            for step in steps:
                run_known(step, copies, model, device, answers, uniform)
        found.append(answers)
    return found[0] if all(answers == found[0] for answers in found) else None


def run_known(
    step: Step, env: Env, model: nn.Module, device: torch.device, answers: list[Any], uniform: Any = 0.0
) -> Any:
    """Run a step whose arguments are known; a question's answer is appended to ``answers``."""
    fill = resolver(env, lambda name: tensor_of(model, name), device)
    args, kwargs = fill(step.args), fill(step.kwargs)
    if is_uniform(step.target):
        kwargs.pop("generator", None)
        result = (torch.zeros if step.target is torch.rand else torch.zeros_like)(*args, **kwargs)
        result += uniform if isinstance(uniform, float) else torch.rand(result.shape, generator=uniform).to(result)
    else:
        result = step.target(*args, **kwargs)
    if step.asks:
        answers.append(answer_of(result))
    if step.outputs:
        store_outputs(step, result, env)
    return result


def compute_known(steps: Sequence[Step], env: Env, model: nn.Module, number: int) -> Tensor:
    """The value of this number, which known steps compute from ``env``."""
    device = next((tensor.device for tensor in env.values()), torch.device("cpu"))
    with torch.no_grad():
        for step in steps:
            run_known(step, env, model, device, [])
    found: Tensor = env[number]
    return found


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
    """A parameter or buffer by its name; None if it is not there any more."""
    parents, _, last = name.rpartition(".")
    owner = model.get_submodule(parents)
    return owner._parameters.get(last, owner._buffers.get(last))


def parent_paths(name: str) -> list[str]:
    """The paths of the modules that a name leads through, the outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


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
