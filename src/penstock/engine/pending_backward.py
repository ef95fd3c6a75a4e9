"""A mini-batch under a mesh whose loss is made outside of the pipeline, on the rank of the last stage.

    rank 0   F0 F1 F2 F3 · · · · waits · · · · · · · · B0 B1 B2 B3     forward(x) returns None
    rank 1   ·  F0 F1 F2 F3 ─▶ outputs ─▶ loss.backward() B0 B1 B2 B3  forward(x) returns the outputs, after F3

The ranks run the same program, all forwards and then all backwards. The last one leaves it in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.autograd_call import apply_call, with_training_modes
from penstock.engine.context import CallerContext, begin_run, caller_context
from penstock.engine.failure.status import REDUCE_GRADS
from penstock.engine.loss import ModelLoss, backward_inputs, check_joinable, input_edges
from penstock.engine.message import BorrowedInputs, Message, Spec
from penstock.engine.recorder import recorded_program, recorded_run
from penstock.engine.step_protocol import StepHeader

if TYPE_CHECKING:
    from penstock.engine.distributed import DistributedExecutor
    from penstock.engine.recorder import StepRecorder
    from penstock.engine.runner import Runner

__all__ = ["BACKWARD_PENDING", "PendingBackward", "forward_pending"]

BACKWARD_PENDING = (
    "what pipe.forward(…) returned has had no backward, and the other ranks wait for it: call backward on a loss of it "
    "before anything else, or call the pipeline under torch.no_grad()"
)
_NO_INPUT = Message([], None, ())  # the inputs on a rank that has none


def forward_pending(crew: DistributedExecutor, value: Any, adding: AbstractContextManager[Any]) -> Any:
    """The outputs of one mini-batch, on the rank of the last stage, in autograd's graph.

    The other ranks wait for the backward, which that rank is to call. Gradients are added to ``.grad``, within
    ``adding``.
    """
    state = caller_context()
    announced, messages = crew.guarded(lambda: crew.announce(value, None, training=True, apart=True))
    crew.pending = pending = PendingBackward(crew, announced, state, adding)
    if crew.head is not None:
        return apply_call(pending, messages or [_NO_INPUT])
    origins = input_edges(messages)
    pending.forward(messages)
    grads, _ = pending.backward(())
    if messages:
        backward_inputs(origins, grads, None)
    return None


class PendingBackward:
    """One such mini-batch on one rank: see ``Flying``."""

    def __init__(
        self,
        crew: DistributedExecutor,
        announced: StepHeader,
        state: CallerContext,
        adding: AbstractContextManager[Any],
    ) -> None:
        self.crew = crew
        self.sizes: Sequence[int] = announced.sizes
        self.count = len(announced.sizes)
        self.state = state
        self.adding = adding
        self.ends = (job := crew.jobs.of(announced)).ends
        self.halves = job.runner.halves()
        self.run_name = crew.run_names.next(training=False)
        self.modes = [(part, part.training) for stage in crew.stages.values() for part in stage.module.modules()]
        # The parameters get their gradients here; autograd only needs something that wants one.
        self.parameters = [nn.Parameter(torch.empty(()))]
        self.tape: StepRecorder | None = None  # that has recorded the forward
        self.model_loss = ModelLoss(())
        self.template: tuple[list[Any], Spec] = ([], None)

    def forward(self, inputs: list[Message]) -> list[Message]:
        """Run this rank's forwards; its outputs, where it has the last stage."""
        with recorded_run(tape := self.crew.tape, "call"):
            self.tape = None if tape is None or tape.now is None else tape
            return self.crew.guarded(lambda: self._forward(inputs), self)  # type: ignore[no-any-return]

    def backward(
        self, seeds: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Sequence[Tensor | None]], dict[int, Tensor]]:
        """Run this rank's backwards; the gradients of the inputs, where it has the first stage."""
        if self.crew.pending is not self:
            raise RuntimeError("Trying to backward through the pipeline a second time: under a mesh, call it again")
        with recorded_run(self.tape if self.tape is self.crew.tape else None, "backward"):
            return self.crew.guarded(lambda: self._backward(seeds), self), {}

    def _forward(self, inputs: list[Message]) -> list[Message]:
        crew, head = self.crew, self.crew.head
        if head is not None:
            head.begin(self.sizes, None, None)
            self.ends.outputs = [None] * self.count
        with crew.committing(training=True), BorrowedInputs(inputs) as self.ends.inputs:
            if crew.reducer is not None:
                crew.reducer.begin()
            crew.gather_shards()
            self._run(self.halves[0], grad=True)
        outputs = [message for message in self.ends.outputs or () if message is not None]
        self.ends.inputs, self.ends.outputs = [], None
        if head is not None:
            check_joinable([message.leaves for message in outputs], self.sizes)
            self.model_loss = head.model_loss
            if not any(message.wants for message in outputs):  # nobody waits for gradients, which there are none of
                self._backward([()] * self.count)
        return outputs

    def _backward(self, seeds: Sequence[Sequence[Tensor | None]]) -> list[Sequence[Tensor | None]]:
        crew, ends = self.crew, self.ends
        ends.seed = seeds.__getitem__
        ends.grads = [()] * self.count
        with self.adding, with_training_modes(self.modes), crew.ties.reducing():
            self._run(self.halves[1], grad=False)
            if crew.reducer is not None:
                crew.reducer.finish()
        grads, ends.grads, ends.seed = ends.grads, None, None
        crew.pending = None
        return grads

    def _run(self, runner: Runner, *, grad: bool) -> None:
        stages = self.crew.stages.values()
        begin_run(stages, self.state, self.count, self.run_name)
        self.crew.status.runner, self.crew.status.phase = runner, REDUCE_GRADS
        with torch.set_grad_enabled(grad):
            recorded_program(self.crew.tape, runner)()
        for stage in stages:
            stage.moments = ()
