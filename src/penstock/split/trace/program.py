"""A recording in stages: the steps of each stage, the values that cross between them, and their execution.

    stage 0          stage 1            stage 2
    x ── conv ── a ──▶ block ── b ──▶ ─┐
         └─ skip ─────────────────▶ add ── head ── out      a value goes straight from its producer to each consumer
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock._torch import is_fake_tensor
from penstock.errors import PlanError
from penstock.split.trace.recorder import WITHOUT_DATA
from penstock.split.trace.recording import (
    PLACEHOLDERS,
    Attribute,
    Env,
    OwnDevice,
    Recording,
    Ref,
    ResultTensor,
    Step,
    check_result,
    entered_context,
    from_answer,
    is_uniform,
    leaves_of,
    map_tree,
    resolver,
    store_outputs,
)


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
                inside = other.module and other.target != step.target and name.startswith(f"{other.target}.")
                if there != stage and (inside or Attribute(name) in other.refs()):
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
            args, kwargs = fill_args(env), fill_kwargs(env)
            try:
                target = self._module(root, step.target) if step.module else step.target
                if step.checkpoint is not None:
                    target, kwargs = partial(checkpoint, partial(target, **kwargs), use_reentrant=step.checkpoint), {}
                if step.context is None:
                    result = target(*args, **kwargs)
                else:
                    with entered_context(step.context):
                        result = target(*args, **kwargs)
            except Exception as error:
                result = _infer_result(step, args, kwargs, root)
                if result is None:
                    error.add_note(f"in the forward's line {step.where}")
                    raise
            if step.checks_shapes or (step.module and not isinstance(result, Tensor)):
                check_result(step, result)
            if step.outputs:
                store_outputs(step, result, env, drops)
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
    if not step.module:
        return WITHOUT_DATA[step.target](*args, **kwargs) if step.target in WITHOUT_DATA else None
    members = (*tensors, *_lookup(root, step.target).parameters())
    zero = sum(t.flatten()[:0].sum() for t in members if t.requires_grad)  # the result depends on all of these

    def leaf(value: Any) -> Any:
        if type(value) is not ResultTensor:
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
