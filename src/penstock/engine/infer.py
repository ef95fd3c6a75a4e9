"""The shapes of what crosses edges, from fake tensors: no kernel runs, and no module state is touched.

A stage's forward is propagated once per new signature of its input, on a copy with fake parameters and
buffers; then its backward, to learn which inputs get a gradient at all. The forward goes down the pipeline, the
answer ("these outputs will get gradients") comes back up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.engine.context import Ambient
from penstock.engine.meta import MessageMeta, TensorMeta, meta_of
from penstock.engine.tree import flatten, unflatten
from penstock.errors import PlanError

__all__ = ["FakeStage", "Propagation"]


class FakeStage:
    """A stage's module with fake parameters and buffers, apart from the real one.

    A copy is run where the module can be copied, so that nothing that it counts or remembers in Python is touched;
    users' hooks, which are not to see fake tensors, are left off. Else the module itself, with its members replaced.
    """

    def __init__(self, stage: int, module: nn.Module, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        fakes: dict[int, Any] = {}
        with self.mode:
            for tensor in (*parameters.values(), *buffers.values()):
                fake = self.mode.from_tensor(tensor.detach())
                real = isinstance(tensor, nn.Parameter)
                fakes.setdefault(id(tensor), nn.Parameter(fake, tensor.requires_grad) if real else fake)
        self.run: Callable[[Any], Any]
        try:
            copied = copy.deepcopy(module, dict(fakes))
        except Exception:
            members = {name: fakes[id(tensor)] for name, tensor in {**parameters, **buffers}.items()}
            self.run = lambda value: torch.func.functional_call(module, members, (value,))
        else:
            for part in copied.modules():
                part._forward_hooks.clear()
                part._forward_pre_hooks.clear()
                part._backward_hooks.clear()
                part._backward_pre_hooks.clear()
            self.run = copied


class Propagation:
    """One stage's forward and backward on fake tensors, for one kind of micro-batch."""

    def __init__(self, fake: FakeStage, state: Ambient, grad: bool) -> None:
        self.fake = fake
        self.state = state
        self.grad = grad
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def forward(self, meta: MessageMeta) -> MessageMeta:
        """The meta of the stage's output for an input of this meta."""
        device = self.fake.device
        with ExitStack() as stack:
            stack.enter_context(self.fake.mode)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            leaves: list[Any] = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device=device) if isinstance(leaf, TensorMeta) else leaf
                for leaf in meta.leaves
            ]
            self.inputs = [leaves[i].requires_grad_() for i in meta.wants]
            for i in meta.wants:
                leaves[i] = torch.ops.aten._unsafe_view.default(leaves[i], leaves[i].shape)
            for context in self.state.contexts():
                stack.enter_context(context)
            try:
                output = self.fake.run(unflatten(leaves, meta.spec))
            except Exception as error:
                raise PlanError(
                    f"stage {self.fake.stage} could not be run on fake tensors to learn its output's shape, for an "
                    f"input of {meta}: {type(error).__name__}: {error}"
                ) from error
            out, spec = flatten(output)
            wants = [i for i, leaf in enumerate(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
            self.outputs = [out[i] for i in wants]
            return meta_of(out, spec, wants)

    def backward(self, present: Sequence[bool] | None) -> list[bool]:
        """Which of the inputs that want a gradient get one, when the outputs marked ``present`` do (None: all)."""
        outputs = [t for t, there in zip(self.outputs, present or [True] * len(self.outputs), strict=True) if there]
        if not outputs or not self.inputs:
            return [False] * len(self.inputs)
        inputs, self.inputs, self.outputs = self.inputs, [], []
        try:
            with self.fake.mode:
                seeds = [torch.empty_like(output) for output in outputs]
                grads = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        except Exception:  # a backward that fake tensors cannot follow: expect all; what is missing is sent as zeros
            return [True] * len(inputs)
        return [grad is not None for grad in grads]
