"""The shapes of what crosses edges, from fake tensors: no kernel runs, and no module state is touched.

A stage's forward is propagated once per new signature of its input, on fake copies of its parameters and
buffers; then its backward, to learn which inputs get a gradient at all. The forward goes down the pipeline, the
answer ("these outputs will get gradients") comes back up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock.engine.context import Ambient
from penstock.engine.meta import MessageMeta, TensorMeta, meta_of
from penstock.engine.tree import flatten, unflatten
from penstock.errors import PlanError

__all__ = ["Propagation"]


class Propagation:
    """One stage's forward and backward on fake tensors."""

    def __init__(self, stage: int, module: nn.Module, device: torch.device, state: Ambient, grad: bool) -> None:
        self.stage = stage
        self.module = module
        self.device = device
        self.state = state
        self.grad = grad
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        parameters = module.named_parameters(remove_duplicate=False)
        members: dict[str, Tensor] = {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}
        fakes: dict[int, Tensor] = {}
        for tensor in members.values():
            fakes.setdefault(id(tensor), self.mode.from_tensor(tensor))
        self.members = {name: fakes[id(tensor)] for name, tensor in members.items()}
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def forward(self, meta: MessageMeta) -> MessageMeta:
        """The meta of the stage's output for an input of this meta."""
        with ExitStack() as stack:
            stack.enter_context(self.mode)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            leaves: list[Any] = [
                torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device) if isinstance(leaf, TensorMeta) else leaf
                for leaf in meta.leaves
            ]
            self.inputs = [leaves[i].requires_grad_() for i in meta.wants]
            for i in meta.wants:
                leaves[i] = torch.ops.aten._unsafe_view.default(leaves[i], leaves[i].shape)
            for context in self.state.contexts():
                stack.enter_context(context)
            try:
                output = torch.func.functional_call(self.module, self.members, (unflatten(leaves, meta.spec),))
            except Exception as error:
                raise PlanError(
                    f"stage {self.stage} could not be run on fake tensors to learn its output's shape, for an input of "
                    f"{meta}: {type(error).__name__}: {error}"
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
            with self.mode:
                seeds = [torch.empty_like(output) for output in outputs]
                grads = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        except Exception:  # a backward that fake tensors cannot follow: expect all; what is missing is sent as zeros
            return [True] * len(inputs)
        return [grad is not None for grad in grads]
