"""The shapes of what crosses edges, from fake tensors: no kernel runs, and no module state is touched.

A stage's forward is propagated once per new signature of its input, on a copy with fake parameters and
buffers; then its backward, to learn which inputs get a gradient at all. The forward goes down the pipeline, the
answer ("these outputs will get gradients") comes back up.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock._torch import BatchNorm, fake_tensor_mode, unsafe_view
from penstock.engine.context import CallerContext
from penstock.engine.message import (
    Message,
    MessageMeta,
    TensorMeta,
    detach_outputs,
    detach_outputs_per_edge,
    mark_shared,
    meta_of,
    unflatten,
)
from penstock.errors import PlanError, text_of
from penstock.split.chain import CountedOutput

__all__ = ["FakeStage", "Propagation"]


class FakeStage:
    """A stage's module with fake parameters and buffers, apart from the real one.

    A copy is run where the module can be copied, so that nothing that it counts or remembers in Python is touched;
    users' hooks, which are not to see fake tensors, are left off. Else the module itself, with its members replaced.
    ``parts`` are the module's parts and those of the copy.
    """

    def __init__(self, stage: int, module: nn.Module, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        self.mode = fake_tensor_mode()
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        fakes: dict[int, Any] = {}
        with self.mode:
            for tensor in (*parameters.values(), *buffers.values()):
                fake = self.mode.from_tensor(tensor.detach())
                real = isinstance(tensor, nn.Parameter)
                fakes.setdefault(id(tensor), nn.Parameter(fake, tensor.requires_grad) if real else fake)
        self.parts: list[tuple[nn.Module, nn.Module]] = []
        self.run: Callable[..., Any]
        try:
            copied = copy.deepcopy(module, dict(fakes))
        except Exception:
            members = {name: fakes[id(tensor)] for name, tensor in {**parameters, **buffers}.items()}
            self.run = lambda *values: torch.func.functional_call(module, members, values)
        else:
            for part in copied.modules():
                part._forward_hooks.clear()
                part._forward_pre_hooks.clear()
                part._backward_hooks.clear()
                part._backward_pre_hooks.clear()
                if isinstance(part, BatchNorm) and part.momentum is None:
                    part.momentum = 0.0  # it would ask a fake tensor for its value, to learn nothing of shapes
            self.run = copied
            self.parts = list(zip(module.modules(), copied.modules(), strict=True))

    def now(self) -> FakeStage:
        """This copy, with what is frozen and what is in training mode as it is in the stage now."""
        for part, fake in self.parts:
            fake.training = part.training
            for name, parameter in fake._parameters.items():
                real = part._parameters.get(name)
                if parameter is not None and real is not None:
                    parameter.requires_grad_(real.requires_grad)
        return self


class Propagation:
    """One stage's forward and backward on fake tensors, for one kind of micro-batch."""

    def __init__(self, fake: FakeStage, state: CallerContext, grad: bool) -> None:
        self.fake = fake
        self.state = state
        self.grad = grad
        self.inputs: list[Tensor] = []
        self.shares: list[int] = []  # how many of them come over each edge
        self.roots: Sequence[GradientEdge] = ()
        self.leaving: list[MessageMeta] = []

    def forward(self, metas: Sequence[MessageMeta], gives: int) -> list[MessageMeta]:
        """What leaves the stage over each of its edges, for what comes in over each."""
        device = self.fake.device
        with ExitStack() as stack:
            stack.enter_context(self.fake.mode)
            stack.enter_context(torch.set_grad_enabled(self.grad))
            values = []
            shared: list[Tensor] = []
            self.inputs = []
            self.shares = [len(meta.wants) for meta in metas]
            for meta in metas:
                leaves: list[Any] = [
                    leaf.from_memory(torch.empty(leaf.in_memory().shape, dtype=leaf.dtype, device=device))
                    if isinstance(leaf, TensorMeta)
                    else leaf
                    for leaf in meta.leaves
                ]
                self.inputs += [leaves[i].requires_grad_() for i in meta.wants]
                for i in meta.wants:
                    leaves[i] = unsafe_view(leaves[i], leaves[i].shape)
                shared += [leaves[i] for i in meta.shared]
                values.append(unflatten(leaves, meta.spec))
            for context in self.state.contexts():
                stack.enter_context(context)
            try:
                output = self.fake.run(*values)
            except Exception as error:
                problem = PlanError(
                    f"stage {self.fake.stage} could not be run on fake tensors to learn its output's shape, for an "
                    f"input of {', '.join(map(str, metas))}: {type(error).__name__}: {text_of(error)}. If its shapes "
                    "depend on the data, or it needs numbers that fake tensors do not have, say Pipeline(…, "
                    "dynamic=True)"
                )
                problem.stage = self.fake.stage
                raise problem from error
            if isinstance(output, CountedOutput):  # of the last stage: what leaves the pipeline is its output
                output = output.output
            parts: list[Message | None]
            if gives > 1:
                parts, self.roots = detach_outputs_per_edge(output, gives)
            else:
                part, self.roots = detach_outputs(output)
                parts = [part]
            parts = mark_shared(parts, shared)
            self.leaving = [meta_of(part) for part in parts if part is not None]
            return self.leaving

    def backward(self, present: Sequence[Sequence[bool]] | None) -> list[list[bool]]:
        """Which of the inputs that want a gradient get one, by edge, when the outputs marked ``present`` do.

        ``present`` goes by edge as well; None is for the last stage, all of whose outputs get one.
        """
        found = self._backward([there for row in present or () for there in row] or [True] * len(self.roots))
        ends = list(accumulate(self.shares, initial=0))
        return [found[a:b] for a, b in pairwise(ends)]

    def _backward(self, present: Sequence[bool]) -> list[bool]:
        metas = [meta.leaves[i] for meta in self.leaving for i in meta.wants]
        wanted = [pair for *pair, there in zip(self.roots, metas, present, strict=True) if there]
        inputs, self.inputs, self.roots = self.inputs, [], ()
        if not wanted or not inputs:
            return [False] * len(inputs)
        try:
            with self.fake.mode:
                seeds = [torch.empty(meta.shape, dtype=meta.dtype, device=self.fake.device) for _, meta in wanted]
                grads = torch.autograd.grad([root for root, _ in wanted], inputs, seeds, allow_unused=True)
        except Exception:  # a backward that fake tensors cannot follow: expect all; what is missing is sent as zeros
            return [True] * len(inputs)
        return [grad is not None for grad in grads]
