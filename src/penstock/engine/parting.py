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

from penstock.engine.agree import Announcement
from penstock.engine.call import call, in_modes
from penstock.engine.context import Ambient, ambient, surround
from penstock.engine.doing import SUMS
from penstock.engine.message import Lent, Message
from penstock.engine.outcome import origins_of, send_back
from penstock.engine.outputs import refuse_other_layouts
from penstock.engine.settle import Settlement
from penstock.engine.tape import recorded, walking
from penstock.engine.tree import Spec

if TYPE_CHECKING:
    from penstock.engine.process import ProcessCrew
    from penstock.engine.runner import Runner
    from penstock.engine.tape import Tape

__all__ = ["UNFINISHED", "Parting", "part"]

UNFINISHED = (
    "what pipe.forward(…) returned has had no backward, and the other ranks wait for it: call backward on a loss of it "
    "before anything else, or call the pipeline under torch.no_grad()"
)
_NOTHING = Message([], None, ())  # the inputs on a rank that has none


def part(crew: ProcessCrew, value: Any, adding: AbstractContextManager[Any]) -> Any:
    """The outputs of one mini-batch, on the rank of the last stage, in autograd's graph.

    The other ranks wait for the backward, which that rank is to call. Gradients are added to ``.grad``, within
    ``adding``.
    """
    state = ambient()
    announced, messages = crew.guarded(lambda: crew.announce(value, None, training=True, apart=True))
    crew.parting = parting = Parting(crew, announced, state, adding)
    if crew.head is not None:
        return call(parting, messages or [_NOTHING])
    origins = origins_of(messages)
    parting.forward(messages)
    grads, _ = parting.backward(())
    if messages:
        send_back(origins, grads, None)
    return None


class Parting:
    """One such mini-batch on one rank: see ``Flying``."""

    def __init__(
        self, crew: ProcessCrew, announced: Announcement, state: Ambient, adding: AbstractContextManager[Any]
    ) -> None:
        self.crew = crew
        self.sizes: Sequence[int] = announced.sizes
        self.count = len(announced.sizes)
        self.state = state
        self.adding = adding
        self.ends = (job := crew.jobs.of(announced)).ends
        self.halves = job.runner.halves()
        self.occasion = crew.occasions.next(training=False)
        self.modes = [(part, part.training) for stage in crew.stages.values() for part in stage.module.modules()]
        # The parameters get their gradients here; autograd only needs something that wants one.
        self.parameters = [nn.Parameter(torch.empty(()))]
        self.tape: Tape | None = None  # that has recorded the forward
        self.settlement = Settlement(())
        self.template: tuple[list[Any], Spec] = ([], None)

    def forward(self, inputs: list[Message]) -> list[Message]:
        """Run this rank's forwards; its outputs, where it has the last stage."""
        with recorded(tape := self.crew.tape, "call"):
            self.tape = None if tape is None or tape.now is None else tape
            return self.crew.guarded(lambda: self._forward(inputs), self)  # type: ignore[no-any-return]

    def backward(
        self, seeds: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Sequence[Tensor | None]], dict[int, Tensor]]:
        """Run this rank's backwards; the gradients of the inputs, where it has the first stage."""
        if self.crew.parting is not self:
            raise RuntimeError("Trying to backward through the pipeline a second time: under a mesh, call it again")
        with recorded(self.tape if self.tape is self.crew.tape else None, "backward"):
            return self.crew.guarded(lambda: self._backward(seeds), self), {}

    def _forward(self, inputs: list[Message]) -> list[Message]:
        crew, head = self.crew, self.crew.head
        if head is not None:
            head.begin(self.sizes, None, None)
            self.ends.outputs = [None] * self.count
        with crew.committing(training=True), Lent(inputs) as self.ends.inputs:
            if crew.reducer is not None:
                crew.reducer.begin()
            crew.gather_shards()
            self._run(self.halves[0], grad=True)
        outputs = [message for message in self.ends.outputs or () if message is not None]
        self.ends.inputs, self.ends.outputs = [], None
        if head is not None:
            refuse_other_layouts([message.leaves for message in outputs], self.sizes)
            self.settlement = head.settlement
            if not any(message.wants for message in outputs):  # nobody waits for gradients, which there are none of
                self._backward([()] * self.count)
        return outputs

    def _backward(self, seeds: Sequence[Sequence[Tensor | None]]) -> list[Sequence[Tensor | None]]:
        crew, ends = self.crew, self.ends
        ends.seed = seeds.__getitem__
        ends.grads = [()] * self.count
        with self.adding, in_modes(self.modes), crew.ties.reducing():
            self._run(self.halves[1], grad=False)
            if crew.reducer is not None:
                crew.reducer.finish()
        grads, ends.grads, ends.seed = ends.grads, None, None
        crew.parting = None
        return grads

    def _run(self, runner: Runner, *, grad: bool) -> None:
        stages = self.crew.stages.values()
        surround(stages, self.state, self.count, self.occasion)
        self.crew.doing.runner, self.crew.doing.phase = runner, SUMS
        with torch.set_grad_enabled(grad):
            walking(self.crew.tape, runner)()
        for stage in stages:
            stage.moments = ()
