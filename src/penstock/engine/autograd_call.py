"""``pipe(x)``: a whole pipeline as one node of the caller's autograd graph.

The node's forward runs the forward half of a fill-drain program, its backward the other half. How the halves are run is
the executor's: a `PipelineCall` of threads, or of one rank under a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock._torch import queue_callback
from penstock.engine.loss import ModelLoss
from penstock.engine.message import Message, Spec, unflatten
from penstock.engine.microbatch import join
from penstock.errors import PlanError


class PipelineCall(Protocol):
    """One mini-batch, whose forward runs when it is called, and whose backward when autograd gets there."""

    count: int  # of micro-batches
    parameters: list[nn.Parameter]  # autograd accumulates their gradients
    model_loss: ModelLoss
    template: tuple[list[Any], Spec]  # the structure of the joined output; non-tensor leaves are themselves

    def forward(self, inputs: list[Message]) -> list[Message]:
        """The output of each micro-batch."""

    def backward(
        self, seeds: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Sequence[Tensor | None]], dict[int, Tensor]]:
        """The gradients of the inputs, per micro-batch, and of the parameters, by identity."""


def apply_call(call: PipelineCall, inputs: list[Message]) -> Any:
    """Run the call's forward and return the joined output, in the caller's autograd graph."""
    wanted = inputs[0].wants
    tensors = [message.leaves[i] for message in inputs for i in wanted]
    result: tuple[Tensor, ...] = _PipelineFunction.apply(call, inputs, *tensors, *call.parameters)  # type: ignore[no-untyped-call]
    leaves, spec = call.template
    tensors_out = iter(result)
    joined = unflatten([next(tensors_out) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return call.model_loss.merge(joined)


class _PipelineFunction(torch.autograd.Function):
    """Inputs: the micro-batches' tensors that require a gradient, then the parameters. Outputs: the joined tensors."""

    @staticmethod
    def forward(ctx: Any, call: PipelineCall, inputs: list[Message], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = call.forward([message.detached() for message in inputs])
        leaves, spec, _, _ = outputs[0]
        if any(message.spec != spec for message in outputs):
            raise PlanError("the outputs of the micro-batches have different structures and cannot be joined")
        joined: list[Any] = [_join_outputs([message.leaves[i] for message in outputs]) for i in range(len(leaves))]
        call.template = ([leaf if isinstance(leaf, Tensor) else joined[i] for i, leaf in enumerate(leaves)], spec)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        ctx.call = call
        ctx.wants = [message.wants for message in outputs]  # may differ between micro-batches
        wants = sorted({i for message in outputs for i in message.wants})
        ctx.want = [(i, places.index(i)) for i in wants]
        ctx.shapes = [[message.leaves[i].shape for message in outputs] for i in wants]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(joined[i] for i in places if i not in wants))
        return tuple(joined[i] for i in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        call: PipelineCall = ctx.call
        columns = {i: _split_grad(grads[at], shapes) for (i, at), shapes in zip(ctx.want, ctx.shapes, strict=True)}
        seeds = [[columns[i][k] for i in wants] for k, wants in enumerate(ctx.wants)]
        input_grads, parameter_grads = call.backward(seeds)
        flat = [grad for row in input_grads for grad in row]
        return None, None, *flat, *(parameter_grads.get(id(p)) for p in call.parameters)


def _join_outputs(column: Sequence[Any]) -> Any:
    """One output of all micro-batches, joined; in a list of plain values, a tensor would lose its graph."""
    if len({isinstance(leaf, Tensor) for leaf in column}) > 1:
        kinds = " or a ".join(sorted({type(leaf).__name__ for leaf in column}))
        raise PlanError(
            f"an output of the model is a {kinds}, depending on the micro-batch, and cannot be joined with gradients: "
            "return the same kinds for all of them, or use step()"
        )
    return join(column)


def _split_grad(grad: Tensor | None, shapes: Sequence[torch.Size]) -> Sequence[Tensor | None]:
    """The gradient of a joined output, split as the output was joined."""
    if grad is None:
        return [None] * len(shapes)
    if len(shapes) == 1:
        return [grad]
    if not shapes[0]:
        return grad.unbind()
    return torch.split(grad, [shape[0] for shape in shapes])


@contextmanager
def with_training_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the ``training`` flags of modules to what they were at the forward."""
    now = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, _ in now:
        module.training = not module.training
    try:
        yield
    finally:
        for module, mode in now:
            module.training = mode


@contextmanager
def suspended_grad_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Suspend hooks on parameters: they run once, on the whole gradient, in the caller's graph."""
    hooked = [hooks for p in parameters if (hooks := p._backward_hooks)]
    kept = [list(hooks.items()) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()  # autograd refers to the dictionary itself
    try:
        yield
    finally:
        for hooks, items in zip(hooked, kept, strict=True):
            hooks.update(items)


class _HookUnlessNone:
    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


def skip_hooks_without_grad(parameters: Sequence[nn.Parameter]) -> None:
    """Until this backward ends, skip the hooks of parameters without a gradient, as in the plain model.

    Autograd would call the hooks of a node's input that gets no gradient with None.
    """
    if not parameters:
        return
    every: list[dict[int, Any]] = [p._backward_hooks for p in parameters]  # type: ignore[misc]
    for hooks in every:
        plain = {key: hook for key, hook in hooks.items() if not isinstance(hook, _HookUnlessNone)}
        hooks.update({key: _HookUnlessNone(hook) for key, hook in plain.items()})

    def restore() -> None:
        for hooks in every:
            hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _HookUnlessNone)})

    queue_callback(restore)
