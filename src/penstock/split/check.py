"""Whether a plan's stages compute what the whole model computes: both are run on a sample, and compared.

    whole    the model itself ─▶ output, buffers ─▶ backward ─▶ gradients
    staged   relay of its stages ─▶ output, buffers ─▶ backward ─▶ gradients
                                      compared in this order, gradients from the last stage to the first

Both runs start from the same state and leave none: they work on copies of parameters and buffers, with the random
number generators as they are. Where they differ, both are run once more, and this time every layer is listened to,
so that the first value that differs can be named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from penstock._torch import pytree
from penstock.errors import PlanError
from penstock.split.flatten import is_plain_sequential
from penstock.split.plan import Plan, run_stages
from penstock.split.sample import (
    accelerators_of,
    backward_roots,
    model_output,
    named_leaves,
    preserve_state,
    sample_arguments,
    temporary_copies,
)

__all__ = ["CheckReport", "Difference", "Tolerance", "check_plan"]


# How two values differ, in words.


@dataclass(frozen=True)
class Tolerance:
    """Equal, or as near as the tolerances allow."""

    rtol: float
    atol: float

    def differ(self, whole: Any, staged: Any) -> tuple[str, float | None] | None:
        """How two values differ: in words, and the largest difference of two numbers."""
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
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a.to(wide) - b.to(wide)).abs().flatten().nan_to_num(torch.inf)
        apart[(a.isnan() & b.isnan()).flatten()] = 0
        place = int(apart.argmax())
        largest = float(apart[place])
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), a.shape))
        here = f"at {list(at)} it is {b[at].item()}, in the whole model {a[at].item()}"
        return f"differs by up to {largest:.3g}: {here}", largest


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Difference:
    """The first value that is not the same: which, in which stage, and how far off (None: not a matter of numbers)."""

    value: str
    stage: int | None
    how: str
    largest: float | None = None

    def __str__(self) -> str:
        where = "" if self.stage is None else f" (stage {self.stage})"
        return f"{self.value}{where} {self.how}"


@dataclass(frozen=True)
class CheckReport:
    """What was compared, and the first difference. True if there is none."""

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

    Compared are outputs, buffers, and the gradients of parameters and of float inputs: of the loss, if the output has
    one, else of a sum of all outputs with fixed weights. The two are expected to be equal bit for bit, since they
    are the same arithmetic; ``rtol`` and ``atol`` allow for kernels that add in no fixed order.
    Hooks on the model's modules run with it.
    """
    chain, (args, kwargs) = plan.require_chain(), sample_arguments(sample)
    model = chain.model
    _check_shared_equal(model, plan)
    devices = accelerators_of(model, (args, kwargs))
    alike = Tolerance(rtol or 0.0, atol or 0.0)
    last = plan.num_stages - 1

    fixed = chain.fixed

    def whole(*args: Any, **kwargs: Any) -> Any:
        return (
            model(chain.arguments(args, kwargs)) if is_plain_sequential(model) else model(*args, **{**kwargs, **fixed})
        )

    with torch.inference_mode(False), torch.enable_grad(), preserve_state(model, devices) as again:
        try:
            expected = _run(whole, args, kwargs, [model])
        except Exception as error:
            raise PlanError(f"the model does not run on the sample: {type(error).__name__}: {error}") from error
        again()
        running = _StagedRun(plan)
        owners = _owners(model, running.stages)
        try:
            found = _run(running, args, kwargs, [*running.stages, model])
        except Exception as error:
            raise PlanError(
                f"stage {running.stage} does not run on the sample, but the whole model does: "
                f"{type(error).__name__}: {error}"
            ) from error
        difference = _first_difference(expected, found, owners, last, alike)
        if difference is not None:
            again()
            with _record_module_values(model, None) as heard:
                once_more = _run(whole, args, kwargs, [model])
            again()
            running = _StagedRun(plan)
            with _record_module_values(model, running) as heard_staged:
                _run(running, args, kwargs, [*running.stages, model])
            if _first_difference(expected, once_more, owners, last, alike) is None:
                difference = _first_module_difference(heard, heard_staged, alike) or difference
            else:
                note = "; but the model itself gives other values when it is run again: allow for it with rtol and atol"
                difference = replace(difference, how=difference.how + note)
    report = CheckReport(
        plan.num_stages, len(expected.outputs), len(expected.buffers), len(expected.gradients), difference
    )
    if not report:
        raise PlanError(str(report))
    return report


def _check_shared_equal(model: nn.Module, plan: Plan) -> None:
    """Parameters that are to be one must be equal, or the pipeline computes something else than the model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for names in plan.recipe.get("shared_weights", ()):
        for name in names[1:]:
            if not torch.equal(parameters[name], parameters[names[0]]):
                raise PlanError(
                    f"{names[0]} and {name} are to be one parameter, but have different values: the pipeline will use "
                    f"those of {names[0]}, and the model does not"
                )


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _RunValues:
    outputs: dict[str, Any]
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    """From the end of the model to its beginning, as backward makes them."""


def _run(call: Callable[..., Any], args: Any, kwargs: Any, holders: Sequence[nn.Module]) -> _RunValues:
    """What a call gives, does to the buffers of ``holders`` (the last of them is the model), and has as gradients."""
    given, structure = pytree.tree_flatten((args, kwargs))
    inputs = [_input_leaf(value) for value in given]
    # A copy of a leaf may be written to.
    args, kwargs = pytree.tree_unflatten([v.clone() if isinstance(v, Tensor) else v for v in inputs], structure)
    with temporary_copies(t for holder in holders for t in (*holder.parameters(), *holder.buffers())):
        output = model_output(call(*args, **kwargs))
        outputs = {
            path: v.detach().clone() if isinstance(v, Tensor) else v for path, v in named_leaves(output, "output")
        }
        buffers: dict[str, Tensor] = {}
        for holder in holders:  # what the stages have is what counts; the model knows what no stage has
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
    """Weights for a sum of a tensor: no two the same, so that what is summed to zero by equal ones is seen."""
    if root.dim() == 0:
        return torch.ones_like(root)
    return torch.arange(root.numel(), device=root.device).cos().to(root.dtype).view(root.shape)


class _StagedRun:
    """The stages of a plan, called like the model; and which of them is running."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stage = plan, 0
        self.stages = [plan.stage_module(s) for s in range(plan.num_stages)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_stages(
            self.plan, args, kwargs, [_TrackedStage(self, s, stage) for s, stage in enumerate(self.stages)]
        )


class _TrackedStage(nn.Module):
    def __init__(self, running: _StagedRun, number: int, stage: nn.Module) -> None:
        super().__init__()
        self._running, self._number, self._stage = running, number, [stage]  # in a list, so that it is no child

    def forward(self, *values: Any) -> Any:
        self._running.stage = self._number
        return self._stage[0](*values)


# ── comparing ────────────────────────────────────────────────────────────────────────────────────────────────────


def _owners(model: nn.Module, stages: Sequence[nn.Module]) -> dict[str, int]:
    """The first stage that has each of the model's parameters and buffers: the same objects, under whatever name."""
    first: dict[int, int] = {}
    for number, stage in enumerate(stages):
        for tensor in (*stage.parameters(), *stage.buffers()):
            first.setdefault(id(tensor), number)
    named = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in named if id(tensor) in first}


def _first_difference(
    whole: _RunValues, staged: _RunValues, owners: Mapping[str, int], last: int, alike: Tolerance
) -> Difference | None:
    """The first difference, in the order in which the values are computed."""
    for path in [*whole.outputs, *staged.outputs]:
        if path not in whole.outputs or path not in staged.outputs:
            missing = "is missing" if path in whole.outputs else "is not there in the whole model"
            return Difference(path, last, missing)
        if how := alike.differ(whole.outputs[path], staged.outputs[path]):
            return Difference(path, last, *how)
    for name, buffer in whole.buffers.items():
        if how := alike.differ(buffer, staged.buffers.get(name)):
            return Difference(f"buffer {name}", owners.get(name), *how)
    for name, grad in whole.gradients.items():
        own = 0 if name.startswith("input ") else owners.get(name)
        if own is None:
            return Difference(f"parameter {name}", None, "is in no stage: it would be lost")
        if how := alike.differ(grad, staged.gradients[name]):
            return Difference(f"the gradient of {name}", own, *how)
    return None


# ── which layer was it? ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _ModuleValue:
    """A value that went into a module, or came out."""

    value: str
    stage: int | None
    tensors: tuple[Tensor, ...]


@contextmanager
def _record_module_values(model: nn.Module, running: _StagedRun | None) -> Iterator[list[_ModuleValue]]:
    """What goes in and out of the model's modules meanwhile, in order."""
    names: Mapping[int, str] = {id(module): name for name, module in model.named_modules() if name}
    heard: list[_ModuleValue] = []

    def listen(what: str, module: nn.Module, value: Any) -> None:
        if id(module) in names:
            tensors = tuple(t.detach().clone() for _, t in named_leaves(value, "") if isinstance(t, Tensor))
            heard.append(
                _ModuleValue(f"{what} {names[id(module)]}", None if running is None else running.stage, tensors)
            )

    handles = [
        register_module_forward_pre_hook(lambda module, args: listen("the input of", module, args)),
        register_module_forward_hook(lambda module, args, output: listen("the output of", module, output)),
    ]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def _first_module_difference(
    whole: Sequence[_ModuleValue], staged: Sequence[_ModuleValue], alike: Tolerance
) -> Difference | None:
    """The first value that no stage has. A stage may run a module for nothing, or leave it out: that is no fault."""
    for one in whole:
        others = [other for other in staged if other.value == one.value]
        differences = [_module_difference(one, other, alike) for other in others]
        if others and all(differences):
            return differences[0]
    return None


def _module_difference(one: _ModuleValue, other: _ModuleValue, alike: Tolerance) -> Difference | None:
    if len(one.tensors) != len(other.tensors):
        how = f"has {len(other.tensors)} tensors, in the whole model {len(one.tensors)}"
        return Difference(one.value, other.stage, how)
    for a, b in zip(one.tensors, other.tensors, strict=True):
        if found := alike.differ(a, b):
            return Difference(one.value, other.stage, *found)
    return None
