"""Shape inference on fake tensors: no kernel runs, and no module state changes.

For each new signature of its input, a stage's forward is run once on a copy with fake parameters and buffers. Then its
backward is run, to find the inputs that get a gradient. The forwards run from the first stage to the last, the
backwards from the last to the first.
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

from penstock._torch import BatchNorm, fake_tensor_mode, unlogged_fake_tensor_errors, unsafe_view
from penstock.engine.forward_context import CallerContext
from penstock.engine.message import (
    PLAIN_TYPES,
    MessageMeta,
    TensorMeta,
    detach_outputs_per_edge,
    mark_shared,
    meta_of,
    unflatten,
)
from penstock.errors import PlanError, text_of


class FakeStage:
    """A stage's module with fake parameters and buffers.

    A module that can be copied is run as a copy without the user's hooks, so that its Python state does not change.
    Otherwise the module itself is run, with its parameters and buffers replaced. ``pairs`` are the submodules with
    their copies.
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
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
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
                    part.momentum = 0.0  # None reads the value of num_batches_tracked, a fake tensor
            self.run = copied
            self.pairs = list(zip(module.modules(), copied.modules(), strict=True))

    def synced(self) -> FakeStage:
        """This copy, with the stage's current ``requires_grad`` and ``training`` flags."""
        for part, fake in self.pairs:
            fake.training = part.training
            for name, parameter in fake._parameters.items():
                real = part._parameters.get(name)
                if parameter is not None and real is not None:
                    parameter.requires_grad_(real.requires_grad)
        return self


class Propagation:
    """One stage's forward and backward on fake tensors, for one kind of micro-batch."""

    def __init__(self, fake: FakeStage, context: CallerContext, grad: bool) -> None:
        self.fake = fake
        self.context = context
        self.grad = grad
        self.inputs: list[Tensor] = []
        self.inputs_per_edge: list[int] = []
        self.roots: Sequence[GradientEdge] = ()
        self.outgoing: list[MessageMeta] = []

    def forward(self, metas: Sequence[MessageMeta], num_targets: int) -> list[MessageMeta]:
        """The metadata of the message on each outgoing edge, given those of the incoming edges."""
        device = self.fake.device
        with ExitStack() as stack:
            stack.enter_context(self.fake.mode)
            stack.enter_context(unlogged_fake_tensor_errors())  # a recording has the results of such operators
            stack.enter_context(torch.set_grad_enabled(self.grad))
            values = []
            shared: list[Tensor] = []
            self.inputs = []
            self.inputs_per_edge = [len(meta.wants) for meta in metas]
            for meta in metas:
                sent = [tensor.in_memory() for tensor in meta.tensors()]
                leaves = meta.to_message([torch.empty(x.shape, dtype=x.dtype, device=device) for x in sent]).leaves
                self.inputs += [leaves[i].requires_grad_() for i in meta.wants]
                for i in meta.wants:
                    leaves[i] = unsafe_view(leaves[i], leaves[i].shape)
                shared += [leaves[i] for i in meta.shared]
                values.append(unflatten(leaves, meta.spec))
            stack.enter_context(self.context.entered())
            try:
                output = self.fake.run(*values)
            except Exception as error:
                problem = PlanError(
                    f"stage {self.fake.stage} could not be run on fake tensors to infer the shape of its output, for "
                    f"an input of {', '.join(map(str, metas))}: {type(error).__name__}: {text_of(error)}. If its "
                    "shapes depend on the data, or it reads values of tensors, pass Pipeline(…, dynamic=True)"
                )
                problem.stage = self.fake.stage
                raise problem from error
            parts, self.roots = detach_outputs_per_edge(output, num_targets)
            self.outgoing = [meta_of(part) for part in (mark_shared(parts, shared) if shared else parts)]
            return self.outgoing

    def backward(self, present: Sequence[Sequence[bool]] | None) -> list[list[bool]]:
        """Per incoming edge: whether each input that wants a gradient gets one.

        ``present`` marks the outputs that get a gradient, per outgoing edge. None is for the last stage, where all
        outputs get one; if they are in an object that is no pytree, all inputs are expected to, and a missing gradient
        is sent as zeros.
        """
        expected = [exists for row in present or () for exists in row] or [True] * len(self.roots)
        metas = [meta.leaves[i] for meta in self.outgoing for i in meta.wants]
        wanted = [pair for *pair, exists in zip(self.roots, metas, expected, strict=True) if exists]
        inputs, self.inputs, self.roots = self.inputs, [], ()
        leaves = (leaf for meta in self.outgoing for leaf in meta.leaves)
        opaque = present is None and not all(isinstance(leaf, (TensorMeta, *PLAIN_TYPES)) for leaf in leaves)
        found = [opaque] * len(inputs)
        if wanted and inputs and not opaque:
            try:
                with self.fake.mode, unlogged_fake_tensor_errors():
                    seeds = [torch.empty(meta.shape, dtype=meta.dtype, device=self.fake.device) for _, meta in wanted]
                    grads = torch.autograd.grad([root for root, _ in wanted], inputs, seeds, allow_unused=True)
                found = [grad is not None for grad in grads]
            except Exception:  # an op does not support fake tensors: expect all; missing gradients are sent as zeros
                found = [True] * len(inputs)
        return [found[a:b] for a, b in pairwise(accumulate(self.inputs_per_edge, initial=0))]
