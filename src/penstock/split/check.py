"""``Plan.check``: run a model whole and in stages on a sample and compare all values.

    whole    the model ─────────────▶ outputs, buffers ─▶ backward ─▶ gradients
    staged   its stages in sequence ─▶ outputs, buffers ─▶ backward ─▶ gradients
                                      compared in this order, gradients from the last stage to the first

Both runs start from the same state of parameters, buffers and random generators, and leave it unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.sample import (
    accelerators_of,
    backward_roots,
    named_leaves,
    only_device,
    preserve_state,
    sample_arguments,
    temporary_copies,
)

MAX_COPIED = 2**28  # bytes of parameters that are copied for a comparison of the outputs


@dataclass(frozen=True)
class CheckReport:
    """The number of values that were compared, all of which are equal."""

    stages: int
    outputs: int
    buffers: int
    gradients: int

    def __str__(self) -> str:
        compared = f"{self.outputs} outputs, {self.buffers} buffers and {self.gradients} gradients"
        return f"{self.stages} stages compute what the whole model computes: {compared} are equal"


def check_stages(
    model: nn.Module,
    whole: Callable[..., Any],
    make_stages: Callable[[], Sequence[nn.Module]],
    run_stages: Callable[..., Any],
    sample: Any,
    shared: Iterable[Sequence[str]],
    rtol: float | None,
    atol: float | None,
) -> CheckReport:
    """Compare ``run_stages(args, kwargs, make_stages())`` with ``whole``, a call of the model, on ``sample``.

    Outputs, buffers, and the gradients of parameters and float inputs are compared. The gradients are those of the
    loss, if the output has one, else of a weighted sum of all outputs. Both runs do the same arithmetic, so equality is
    bitwise by default; ``rtol`` and ``atol`` allow for kernels that add in no fixed order. Hooks on modules run.
    """
    args, kwargs = sample_arguments(sample)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for first, *others in shared:  # the pipeline has one of them
        for name in others:
            if not torch.equal(parameters[name], parameters[first]):
                raise PlanError(f"{first} and {name} are to be one parameter, but have different values")
    difference = partial(_difference, rtol=rtol or 0.0, atol=atol or 0.0)
    running = 0  # the stage

    def run_stage(stage: int, *values: Any) -> Any:
        nonlocal running
        running = stage
        return stages[stage](*values)

    def staged(*args: Any, **kwargs: Any) -> Any:
        return run_stages(args, kwargs, [partial(run_stage, s) for s in range(len(stages))])

    devices = accelerators_of(model, (args, kwargs))
    with torch.inference_mode(False), torch.enable_grad(), preserve_state(model, devices) as reset:
        try:
            expected = _run(whole, args, kwargs, [model])
        except Exception as error:
            raise PlanError(f"the model does not run on the sample: {type(error).__name__}: {error}") from error
        reset()
        stages = make_stages()
        owners = _owners(model, stages)
        try:
            found = _run(staged, args, kwargs, [*stages, model])
        except Exception as error:
            raise PlanError(
                f"stage {running} does not run on the sample, but the whole model does: {type(error).__name__}: {error}"
            ) from error
        text = _first_difference(expected, found, owners, difference)
        if text is not None:
            reset()
            repeated = _run(whole, args, kwargs, [model])
            if _first_difference(expected, repeated, owners, difference) is not None:
                text += "; but the model itself gives other values when it is run again: allow for it by rtol and atol"
            raise PlanError(f"{len(stages)} stages do not compute what the whole model computes: {text}")
    return CheckReport(len(stages), len(expected.outputs), len(expected.buffers), len(expected.gradients))


def compare_outputs(
    model: nn.Module,
    whole: Callable[..., Any],
    staged: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> str | None:
    """Run the model whole and in stages: the first difference of their outputs, or None.

    Both start from the same state and leave it unchanged. They build a graph only if they differ without one, since a
    forward may ask whether there is one. None also if one of them fails: the pipeline will tell.
    """
    if torch.is_grad_enabled():
        with torch.no_grad():
            if compare_outputs(model, whole, staged, args, kwargs) is None:
                return None
    found: list[dict[str, Any]] = []
    parameters = list(model.parameters())  # a forward may change them, such as an average of the embeddings it has seen
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    cpu = torch.device("cpu")
    with preserve_state(model, {only_device(model) or cpu} - {cpu}) as reset:
        for call in (whole, staged):
            given = pytree.tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, (args, dict(kwargs)))
            with temporary_copies([*model.buffers(), *(parameters if size <= MAX_COPIED else ())]):
                try:
                    found.append(dict(named_leaves(call(*given[0], **given[1]), "output")))
                except Exception:
                    return None
            reset()
    for path in dict.fromkeys((*found[0], *found[1])):
        if path not in found[0] or path not in found[1]:
            return f"{path} {'is missing' if path in found[0] else 'is not there in the whole model'}"
        # Kernels may add in another order from one run to the next: the difference of a wrong value is larger.
        if detail := _difference(found[0][path], found[1][path], rtol=1e-2, atol=1e-4):
            return f"{path} {detail}"
    return None


@dataclass(frozen=True)
class _RunValues:
    outputs: dict[str, Any]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    """In the order of backward: from the last parameter to the first."""


def _run(call: Callable[..., Any], args: Any, kwargs: Any, holders: Sequence[nn.Module]) -> _RunValues:
    """Run forward and backward; outputs, buffers of ``holders`` (whose last is the model), and gradients."""
    given, structure = pytree.tree_flatten((args, kwargs))
    inputs = [
        v.detach().requires_grad_(v.is_floating_point() or v.is_complex()) if isinstance(v, Tensor) else v
        for v in given
    ]
    # Clones, since a leaf that requires a gradient may not be modified in place.
    args, kwargs = pytree.tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in inputs], structure)
    with temporary_copies(t for holder in holders for t in (*holder.parameters(), *holder.buffers())):
        output = call(*args, **kwargs)
        outputs = {
            path: v.detach().clone() if isinstance(v, Tensor) else v for path, v in named_leaves(output, "output")
        }
        buffers: dict[str, Tensor] = {}
        for holder in holders:  # stages first; the model adds buffers that no stage has
            for name, buffer in holder.named_buffers(remove_duplicate=False):
                buffers.setdefault(name, buffer.detach().clone())
        roots = backward_roots(output)
        if roots:  # weights differ per element, to expose errors that a plain sum would cancel
            numbers = [torch.arange(root.numel(), device=root.device).view_as(root) for root in roots]
            torch.autograd.backward(roots, [n.cos().to(root.dtype) for n, root in zip(numbers, roots, strict=True)])
        gradients = {name: p.grad for name, p in reversed(list(holders[-1].named_parameters()))}
    floats = [value.grad for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    gradients.update((f"input {i}", grad) for i, grad in enumerate(floats))
    return _RunValues(outputs, buffers, gradients)


def _difference(whole: Any, staged: Any, rtol: float, atol: float) -> str | None:
    """A description of the difference; None for equal values."""
    if isinstance(whole, Tensor) and isinstance(staged, Tensor):
        try:
            torch.testing.assert_close(staged, whole, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            return f"differs: {' '.join(str(error).split())}"
        return None
    comparable = isinstance(whole, int | float | complex | str | bytes | type(None))
    if type(whole) is type(staged) and (not comparable or whole == staged):
        return None
    a, b = (f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else repr(v) for v in (whole, staged))
    return f"is {b}, in the whole model {a}"


def _owners(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, int]:
    """The first stage that holds each of the model's parameters and buffers, by identity; the last one for outputs."""
    first: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for tensor in (*stage.parameters(), *stage.buffers()):
            first.setdefault(id(tensor), number)
    named = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
    return {"": len(stages) - 1, **{name: first[id(tensor)] for name, tensor in named if id(tensor) in first}}


def _first_difference(
    whole: _RunValues, staged: _RunValues, owners: dict[str, int], difference: Callable[[Any, Any], str | None]
) -> str | None:
    """The first difference, in order of computation."""
    for path in [*whole.outputs, *staged.outputs]:
        if path not in whole.outputs or path not in staged.outputs:
            missing = "is missing" if path in whole.outputs else "is not there in the whole model"
            return f"{path} (stage {owners['']}) {missing}"
        if detail := difference(whole.outputs[path], staged.outputs[path]):
            return f"{path} (stage {owners['']}) {detail}"
    for name, buffer in whole.buffers.items():
        if detail := difference(buffer, staged.buffers.get(name)):
            return f"buffer {name}{f' (stage {owners[name]})' if name in owners else ''} {detail}"
    for name, grad in whole.gradients.items():
        own = 0 if name.startswith("input ") else owners.get(name)
        if own is None:
            return f"parameter {name} is in no stage: it would be lost"
        if detail := difference(grad, staged.gradients[name]):
            return f"the gradient of {name} (stage {own}) {detail}"
    return None
