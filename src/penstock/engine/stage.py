"""One stage at work: F, B, I and W on one micro-batch at a time.

What a stage keeps between its forward and the end of its backward lives in a slot:

    message ─▶ inputs ──module──▶ output ─▶ message      F  keeps inputs (leaves) and roots (ends of the graph);
                 │ .grad            │ edge                  the output's data goes with the message
    grads ◀──────┘ ◀──autograd──── roots ◀── grads       B  the inputs' gradients go with the message back

A micro-batch that is recomputed keeps its input alone; R runs the module once more to get inputs and roots.

Where several edges meet, their messages are taken as one, and one output is parted into as many messages as there
are edges out of the stage. The stage does not know where messages come from or go to: that is the lanes' business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version

from penstock.engine.batchnorm import DeferredBatchNorm
from penstock.engine.buffers import Unnoticed
from penstock.engine.head import Head
from penstock.engine.hostweights import HostWeights
from penstock.engine.message import Message, counting, depart, depart_apart, passed_on, share_out
from penstock.engine.moment import MicroBatch, here
from penstock.engine.offload import ActivationOffload
from penstock.engine.randomness import Randomness
from penstock.engine.slot import Slot
from penstock.engine.surroundings import surroundings
from penstock.engine.tree import unflatten
from penstock.engine.weightgrad import Recorder, WeightGradQueue
from penstock.errors import PlanError

if TYPE_CHECKING:
    from penstock.engine.parallelized import Parallelized

__all__ = ["StageEngine"]

# torch.autograd.backward costs as much again in checks of arguments that are known to be right here.
_run_backward: Callable[..., Any] = torch.autograd.Variable._execution_engine.run_backward
_unsafe_view: Callable[..., Tensor] = torch.ops.aten._unsafe_view.default
_NEVER = object()


class StageEngine:
    """A stage's module, with its forward and backward. The last stage has a head: the loss.

    ``takes`` and ``gives`` count the edges into the stage and out of it.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        head: Head | None = None,
        *,
        takes: int = 1,
        gives: int = 1,
    ) -> None:
        self.index = index
        self.module, self.device, self.head = module, device, head
        self.takes, self.gives = takes, gives
        self.moments: Sequence[MicroBatch] = ()  # what ``current_microbatch`` answers inside the module
        self.around: AbstractContextManager[Any] | None = None  # entered for each forward
        self.parts = list(module.modules())
        self.mode: object = None  # what the forward may depend on: which modules are in training, autocast
        self.modes: dict[object, object] = {}  # all that there were
        self.calm_in: object = _NEVER  # the mode in which the module was seen to leave its inputs alone
        self.calm_again_in: object = _NEVER  # the same, for forwards that are run again
        self.moody = False  # it has been seen to change its inputs for some micro-batches, and not for others
        self.plain_in: object = _NEVER  # and in which a forward is a call of the module, with nothing around it
        self.shared: Sequence[Tensor] = ()  # parameters that other threads add gradients to
        self.offload: ActivationOffload | None = None  # there on a GPU, when activations go to the host
        self.weights: HostWeights | None = None  # there on a GPU, when weights live on the host
        self.randomness: Randomness | None = None  # there when draws are seeded, or must be repeated
        self.unnoticed: Unnoticed | None = None  # there when forwards are run again
        self.norms: DeferredBatchNorm | None = None  # there when statistics are those of the mini-batch
        self.parallel: Parallelized | None = None  # there when the user has parallelized the stage
        self._recorder: Recorder | None = None

    def new_queue(self) -> WeightGradQueue:
        """A queue for the weight gradients of one micro-batch in flight, where the backward is split."""
        if self._recorder is None:
            sharded = None if self.parallel is None else self.parallel.sharded
            if sharded is not None:  # what the forward will use are the gathered parameters
                sharded.arrive()
            self._recorder = Recorder(self.module, self.shared, whole=sharded is not None and sharded.rounds)
        return WeightGradQueue(self._recorder)

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """Run the module; the output is left in ``slot.message``, the ends of its graph in the slot."""
        leaves, spec, wants, shared = message
        if self.mode is not self.plain_in or slot.replay is not None or slot.away or spec is not None or shared:
            self._forward(microbatch, message, slot)
            return
        leaf, moments = leaves[0], self.moments
        slot.inputs = (leaf.requires_grad_(),) if wants else ()
        here.microbatch = moments[microbatch] if moments else None
        try:
            if slot.queue is None:
                output = self.module(leaf)
            else:
                with slot.queue.recording():
                    output = self.module(leaf)
        except RuntimeError as error:
            self._explain(error)
            raise
        finally:
            here.microbatch = None
        slot.message, slot.roots = depart(output, stage=self.index)

    def _forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """The same, where more has to be done around the call of the module, or may have to be."""
        replay = slot.replay
        if replay is None or not torch.is_grad_enabled():
            self._run(microbatch, message, slot)
            return
        replay.keep(message, self.moments[microbatch] if self.moments else None)
        here.checkpointing, here.keeper = True, replay.keeper
        assert self.unnoticed is not None
        self.unnoticed.guard.before(self.mode)
        try:
            self._run(microbatch, message, slot)
            replay.seen = self.unnoticed.guard.after()
        finally:
            here.checkpointing, here.keeper = False, None
        slot.inputs = slot.roots = ()
        if slot.queue is not None:
            slot.queue.clear()

    def recompute(self, microbatch: int, slot: Slot) -> None:
        """Run the module on the same input once more, for the backward: what it gave is known, and dropped."""
        replay = slot.replay
        assert replay is not None
        here.recomputing, here.keeper = True, replay.keeper
        try:
            with torch.enable_grad():
                self._run(microbatch, replay.again(self.index), slot, again=True)
        finally:
            here.recomputing, here.keeper = False, None
        slot.message = None
        slot.messages = []

    def _run(self, microbatch: int, message: Message, slot: Slot, *, again: bool = False) -> None:
        leaves, spec, wants, shared = message
        inputs: Sequence[Tensor]
        if spec is None:  # one tensor, as most messages are
            inputs = (leaves[0].requires_grad_(),) if wants else ()
        else:
            inputs = [leaves[i].requires_grad_() for i in wants]
        slot.inputs = inputs
        if slot.replay is not None:
            careful = self.mode is not self.calm_again_in
            if careful:  # what is kept must not be changed
                leaves[:] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        else:
            careful = self.mode is not self.calm_in
            if careful:
                for i, leaf in zip(wants, inputs, strict=True):
                    leaves[i] = _unsafe_view(leaf, leaf.shape)
        if shared and torch.is_inference_mode_enabled():
            for i in shared:
                leaves[i] = counting(leaves[i])
        versions = [leaves[i]._version for i in shared] if shared else None
        value = leaves[0] if spec is None else unflatten(leaves, spec)
        try:
            if slot.bare and self.around is None and self.randomness is None and self.norms is None:
                output = self._call(microbatch, value, slot)
            else:
                with surroundings(self, microbatch, slot, leaves, again):
                    output = self._call(microbatch, value, slot)
        except RuntimeError as error:
            if not careful:
                self._explain(error)
            raise
        if shared and versions != [leaves[i]._version for i in shared]:
            raise PlanError(
                f"stage {self.index} changes one of its inputs in place, and another stage uses that value as well, or "
                "another input is a view of it: change a copy instead (x.clone()), or cut elsewhere"
            )
        if careful and slot.replay is not None:
            changed = any(leaf._version for leaf in leaves if isinstance(leaf, Tensor))
            self.calm_again_in = _NEVER if changed or self.moody else self.mode
        elif careful:
            self._look_for_changes(leaves, wants, inputs)
        if self.gives > 1:
            slot.messages, slot.roots = depart_apart(output, self.gives, self.index)
        else:
            slot.message, slot.roots = depart(output, stage=self.index if self.head is None else None)
        if shared and self.head is None:
            slot.message, *slot.messages = passed_on((slot.message, *slot.messages), [leaves[i] for i in shared])

    def _explain(self, error: RuntimeError) -> None:
        """Of an error in a module that was given a leaf."""
        if "leaf Variable that requires grad" in str(error):
            self.calm_in = self.calm_again_in = self.plain_in = _NEVER
            self.moody = True
            error.add_note("the stage changes its input in place, and did not before: run the step again")

    def _look_for_changes(self, leaves: Sequence[Tensor], wants: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """Learn whether the module changes its inputs in place.

        Autograd forbids that for a leaf and for a view of one, so the module was given neither. A module that does
        not do it is given the leaf itself from now on, while it stays in this mode: one node less each way.
        """
        changed = [leaf for i, leaf in zip(wants, inputs, strict=True) if leaves[i]._version]
        for leaf in changed:  # what the stage before saved of its output is no longer that
            increment_version(leaf)
        if wants and not changed and not self.moody:
            self.calm_in = self.mode
            around = (self.around, self.randomness, self.norms, self.head)
            if self.takes == self.gives == 1 and all(one is None for one in around):
                self.plain_in = self.mode
        elif changed:
            self.calm_in = self.plain_in = _NEVER

    def _call(self, microbatch: int, value: Any, slot: Slot) -> Any:
        if slot.replay is not None:
            here.microbatch = slot.replay.moment
        else:
            here.microbatch = self.moments[microbatch] if self.moments else None
        try:
            output = self.module(value) if self.takes == 1 else self.module(*value)
            return output if self.head is None else self.head(microbatch, output)
        finally:
            here.microbatch = None

    def backward(self, grads: Sequence[Tensor | None], slot: Slot) -> None:
        """Turn the gradients of the outputs into those of the inputs (``slot.grads``) and of the parameters."""
        roots, inputs = slot.roots, slot.inputs
        for grad in grads:
            if grad is None:
                roots, grads = _present(roots, grads)
                break
        if roots and self.norms is None:
            _run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        elif roots and self.norms is not None:
            with self.norms.quiet:  # a checkpoint of the user's may run a forward in here
                _run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        if len(inputs) == 1:
            (leaf,) = inputs
            slot.grads = (leaf.grad,)
            leaf.grad = None
        else:
            slot.grads = [leaf.grad for leaf in inputs]
            for leaf in inputs:
                leaf.grad = None
        if slot.shares:
            slot.rows = share_out(slot.grads, slot.shares)
        slot.inputs = slot.roots = ()

    def input_gradient(self, grads: Sequence[Tensor | None], slot: Slot) -> None:
        """The first half of a backward: what the weight-gradient queue takes up is left for ``weight_gradient``."""
        assert slot.queue is not None
        with slot.queue.taking(() if self.device.type == "cpu" else slot.roots):
            self.backward(grads, slot)

    def weight_gradient(self, slot: Slot) -> None:
        """The second half: run the queue."""
        assert slot.queue is not None
        slot.queue.run()

    def close(self) -> None:
        """Take off the module what was put on it."""
        if self.randomness is not None:
            self.randomness.close()

    def gradients(
        self, grads: Sequence[Tensor | None], slot: Slot, wanted: Sequence[Tensor], keep: bool
    ) -> Sequence[Tensor | None]:
        """Like ``backward``, but the gradients of ``wanted`` are returned, and no ``.grad`` is touched."""
        roots, grads = _present(slot.roots, grads)
        targets = (*slot.inputs, *wanted)
        found: list[Tensor | None]
        if not roots or not targets:
            found = [None] * len(targets)
        else:
            with nullcontext() if self.norms is None else self.norms.quiet:
                found = list(_run_backward(tuple(roots), tuple(grads), keep, False, targets, True, False))
        slot.grads = found[: len(slot.inputs)]
        if slot.shares:
            slot.rows = share_out(slot.grads, slot.shares)
        return found[len(slot.inputs) :]


def _present(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Without the outputs that no gradient came for."""
    pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
