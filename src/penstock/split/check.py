"""``Plan.check``: run a model whole and in stages on a sample and compare all values.

    whole    the model ─────────────▶ outputs, buffers ─▶ backward ─▶ gradients
    staged   its stages in sequence ─▶ outputs, buffers ─▶ backward ─▶ gradients
                                      compared in this order, gradients from the last stage to the first

Both runs start from the same state of parameters, buffers and random generators, and leave it unchanged. If they
differ, both are repeated with hooks on every module, to name the first value that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.flatten import is_plain_sequential
from penstock.split.module_state import preserve_state, temporary_copies
from penstock.split.plan import Plan, run_stages
from penstock.split.sample import accelerators_of, backward_roots, model_output, named_leaves, sample_arguments


@dataclass(frozen=True)
class Difference:
    """The first value that differs, its stage, and the largest absolute difference of numbers, if that applies."""

    value: str
    stage: int | None
    detail: str
    largest: float | None = None

    def __str__(self) -> str:
        where = "" if self.stage is None else f" (stage {self.stage})"
        return f"{self.value}{where} {self.detail}"


@dataclass(frozen=True)
class CheckReport:
    """The number of compared values and the first difference. True if there is none."""

    stages: int
    outputs: int
    buffers: int
    gradients: int
    difference: Difference | None = None

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        compared = f"{self.outputs} outputs, {self.buffers} buffers and {self.gradients} gradients"
        if self.difference is None:
            return f"{self.stages} stages compute what the whole model computes: {compared} are equal"
        return f"{self.stages} stages do not compute what the whole model computes: {self.difference}"


def check_plan(plan: Plan, sample: Any, *, rtol: float | None = None, atol: float | None = None) -> CheckReport:
    """Run the model whole and in stages on ``sample``, a small batch, and compare; a difference is a ``PlanError``.

    Outputs, buffers, and the gradients of parameters and float inputs are compared. The gradients are those of the
    loss, if the output has one, else of a weighted sum of all outputs. Both runs do the same arithmetic, so equality is
    bitwise by default; ``rtol`` and ``atol`` allow for kernels that add in no fixed order. Hooks on modules run.
    """
    chain, (args, kwargs) = plan.require_chain(), sample_arguments(sample)
    model = chain.model
    _check_shared_equal(model, plan)
    devices = accelerators_of(model, (args, kwargs))
    tolerance = Tolerance(rtol or 0.0, atol or 0.0)
    last = plan.num_stages - 1

    def whole(*args: Any, **kwargs: Any) -> Any:
        if is_plain_sequential(model):
            return model(chain.arguments(args, kwargs))
        return model(*args, **{**kwargs, **chain.fixed})

    with torch.inference_mode(False), torch.enable_grad(), preserve_state(model, devices) as reset:
        try:
            expected = _run(whole, args, kwargs, [model])
        except Exception as error:
            raise PlanError(f"the model does not run on the sample: {type(error).__name__}: {error}") from error
        reset()
        staged_run = _StagedRun(plan)
        owners = _owners(model, staged_run.stages)
        try:
            found = _run(staged_run, args, kwargs, [*staged_run.stages, model])
        except Exception as error:
            raise PlanError(
                f"stage {staged_run.stage} does not run on the sample, but the whole model does: "
                f"{type(error).__name__}: {error}"
            ) from error
        difference = _first_difference(expected, found, owners, last, tolerance)
        if difference is not None:
            reset()
            with _record_module_values(model, None) as whole_values:
                repeated = _run(whole, args, kwargs, [model])
            reset()
            staged_run = _StagedRun(plan)
            with _record_module_values(model, staged_run) as staged_values:
                _run(staged_run, args, kwargs, [*staged_run.stages, model])
            if _first_difference(expected, repeated, owners, last, tolerance) is None:
                difference = _first_module_difference(whole_values, staged_values, tolerance) or difference
            else:
                note = "; but the model itself gives other values when it is run again: allow for it with rtol and atol"
                difference = replace(difference, detail=difference.detail + note)
    report = CheckReport(
        plan.num_stages, len(expected.outputs), len(expected.buffers), len(expected.gradients), difference
    )
    if not report:
        raise PlanError(str(report))
    return report


def _check_shared_equal(model: nn.Module, plan: Plan) -> None:
    """Parameters in ``shared_weights`` must be equal, or the pipeline does not compute what the model computes."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in plan.recipe.get("shared_weights", ()):
        for name in names[1:]:
            if not torch.equal(parameters[name], parameters[names[0]]):
                raise PlanError(
                    f"{names[0]} and {name} are to be one parameter, but have different values: the pipeline will use "
                    f"those of {names[0]}, and the model does not"
                )


@dataclass(frozen=True)
class _RunValues:
    outputs: dict[str, Any]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    """In the order of backward: from the last parameter to the first."""


def _run(call: Callable[..., Any], args: Any, kwargs: Any, holders: Sequence[nn.Module]) -> _RunValues:
    """Run forward and backward; outputs, buffers of ``holders`` (whose last is the model), and gradients."""
    given, structure = pytree.tree_flatten((args, kwargs))
    inputs = [_input_leaf(value) for value in given]
    # Clones, since a leaf that requires a gradient may not be modified in place.
    args, kwargs = pytree.tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in inputs], structure)
    with temporary_copies(t for holder in holders for t in (*holder.parameters(), *holder.buffers())):
        output = model_output(call(*args, **kwargs))
        outputs = {
            path: v.detach().clone() if isinstance(v, Tensor) else v for path, v in named_leaves(output, "output")
        }
        buffers: dict[str, Tensor] = {}
        for holder in holders:  # stages first; the model adds buffers that no stage has
            for name, buffer in holder.named_buffers(remove_duplicate=False):
                buffers.setdefault(name, buffer.detach().clone())
        roots = backward_roots(output)
        if roots:
            torch.autograd.backward(roots, [_backward_weights(root) for root in roots])
        gradients = {name: p.grad for name, p in reversed(list(holders[-1].named_parameters()))}
    floats = [value.grad for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    gradients.update((f"input {i}", grad) for i, grad in enumerate(floats))
    return _RunValues(outputs, buffers, gradients)


def _input_leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())


def _backward_weights(root: Tensor) -> Tensor:
    """Gradients for backward that differ per element, to expose errors that a plain sum would cancel."""
    if root.dim() == 0:
        return torch.ones_like(root)
    return torch.arange(root.numel(), device=root.device).cos().to(root.dtype).view(root.shape)


class _StagedRun:
    """The stages of a plan, callable like the model. ``stage`` is the one that runs."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stage = plan, 0
        self.stages = [plan.stage_module(s) for s in range(plan.num_stages)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_stages(self.plan, args, kwargs, [partial(self._run, s) for s in range(len(self.stages))])

    def _run(self, stage: int, *values: Any) -> Any:
        self.stage = stage
        return self.stages[stage](*values)


@dataclass(frozen=True)
class Tolerance:
    """Compares values for equality within ``rtol`` and ``atol``."""

    rtol: float
    atol: float

    def difference(self, whole: Any, staged: Any) -> tuple[str, float | None] | None:
        """A description of the difference, and the largest absolute one; None for equal values."""
        if not (isinstance(whole, Tensor) and isinstance(staged, Tensor)):
            if isinstance(whole, Tensor) or isinstance(staged, Tensor) or type(whole) is not type(staged):
                return f"is {_describe(staged)}, in the whole model {_describe(whole)}", None
            comparable = isinstance(whole, int | float | complex | str | bytes | type(None))
            return (f"is {staged!r}, in the whole model {whole!r}", None) if comparable and whole != staged else None
        if whole.shape != staged.shape or whole.dtype != staged.dtype:
            return f"is {_describe(staged)}, in the whole model {_describe(whole)}", None
        a, b = (t.detach().to_dense() if t.layout is not torch.strided else t.detach() for t in (whole, staged))
        inexact = a.is_floating_point() or a.is_complex()
        if torch.equal(a, b) or (inexact and torch.allclose(a, b, self.rtol, self.atol, equal_nan=True)):
            return None
        dtype = torch.complex128 if a.is_complex() else torch.float64
        distance = (a.to(dtype) - b.to(dtype)).abs().flatten().nan_to_num(torch.inf)
        distance[(a.isnan() & b.isnan()).flatten()] = 0
        index = int(distance.argmax())
        largest = float(distance[index])
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), a.shape))
        values = f"at {list(at)} it is {b[at].item()}, in the whole model {a[at].item()}"
        return f"differs by up to {largest:.3g}: {values}", largest


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _owners(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, int]:
    """The first stage that holds each of the model's parameters and buffers, by identity."""
    first: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for tensor in (*stage.parameters(), *stage.buffers()):
            first.setdefault(id(tensor), number)
    named = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if id(tensor) in first}


def _first_difference(
    whole: _RunValues, staged: _RunValues, owners: Mapping[str, int], last: int, tolerance: Tolerance
) -> Difference | None:
    """The first difference, in order of computation."""
    for path in [*whole.outputs, *staged.outputs]:
        if path not in whole.outputs or path not in staged.outputs:
            missing = "is missing" if path in whole.outputs else "is not there in the whole model"
            return Difference(path, last, missing)
        if detail := tolerance.difference(whole.outputs[path], staged.outputs[path]):
            return Difference(path, last, *detail)
    for name, buffer in whole.buffers.items():
        if detail := tolerance.difference(buffer, staged.buffers.get(name)):
            return Difference(f"buffer {name}", owners.get(name), *detail)
    for name, grad in whole.gradients.items():
        own = 0 if name.startswith("input ") else owners.get(name)
        if own is None:
            return Difference(f"parameter {name}", None, "is in no stage: it would be lost")
        if detail := tolerance.difference(grad, staged.gradients[name]):
            return Difference(f"the gradient of {name}", own, *detail)
    return None


@dataclass(frozen=True)
class _ModuleValue:
    """An input or output of a module."""

    value: str
    stage: int | None
    tensors: tuple[Tensor, ...]


@contextmanager
def _record_module_values(model: nn.Module, staged_run: _StagedRun | None) -> Iterator[list[_ModuleValue]]:
    """Record the inputs and outputs of the model's modules, in order."""
    names: Mapping[int, str] = {id(module): name for name, module in model.named_modules() if name}
    values: list[_ModuleValue] = []

    def record(kind: str, module: nn.Module, value: Any) -> None:
        if id(module) in names:
            tensors = tuple(t.detach().clone() for _, t in named_leaves(value, "") if isinstance(t, Tensor))
            stage = None if staged_run is None else staged_run.stage
            values.append(_ModuleValue(f"{kind} {names[id(module)]}", stage, tensors))

    handles = [
        register_module_forward_pre_hook(lambda module, args: record("the input of", module, args)),
        register_module_forward_hook(lambda module, args, output: record("the output of", module, output)),
    ]
    try:
        yield values
    finally:
        for handle in handles:
            handle.remove()


def _first_module_difference(
    whole: Sequence[_ModuleValue], staged: Sequence[_ModuleValue], tolerance: Tolerance
) -> Difference | None:
    """The first value that no stage reproduces. Stages may run a module several times, or not at all."""
    for one in whole:
        others = [other for other in staged if other.value == one.value]
        differences = [_module_difference(one, other, tolerance) for other in others]
        if others and all(differences):
            return differences[0]
    return None


def _module_difference(one: _ModuleValue, other: _ModuleValue, tolerance: Tolerance) -> Difference | None:
    if len(one.tensors) != len(other.tensors):
        detail = f"has {len(other.tensors)} tensors, in the whole model {len(one.tensors)}"
        return Difference(one.value, other.stage, detail)
    for a, b in zip(one.tensors, other.tensors, strict=True):
        if found := tolerance.difference(a, b):
            return Difference(one.value, other.stage, *found)
    return None
