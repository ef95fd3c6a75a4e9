"""One stage at work: F, B, I and W on one micro-batch at a time.

What a stage keeps between its forward and the end of its backward lives in a slot:

    message ─▶ inputs ──module──▶ output ─▶ message      F  keeps inputs (leaves) and roots (ends of the graph);
                 │ .grad            │ edge                  the output's data goes with the message
    grads ◀──────┘ ◀──autograd──── roots ◀── grads       B  the inputs' gradients go with the message back

A micro-batch that is recomputed keeps its input alone; R runs the module once more to get inputs and roots.

Where several edges meet, their messages are taken as one, and one output is parted into as many messages as there
are edges out of the stage. The stage does not know where messages come from or go to: that is the channels' business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version

from penstock._torch import run_backward, unsafe_view
from penstock.engine.forward_context import MicroBatch, forward_state
from penstock.engine.loss import LossAndOutputs
from penstock.engine.message import (
    Message,
    detach_outputs,
    detach_outputs_per_edge,
    mark_shared,
    split_grads,
    unflatten,
    version_counted,
)
from penstock.engine.offload.activations import ActivationOffload
from penstock.engine.offload.weights import HostWeights
from penstock.engine.recompute.batchnorm import DeferredStatistics
from penstock.engine.recompute.buffers import BufferGuard, SavedBuffers
from penstock.engine.recompute.keep import KeptValues
from penstock.engine.recompute.rng import RngStates, StageRng
from penstock.engine.weightgrad import WeightGradQueue, WeightGradRecorder, make_recorder
from penstock.errors import PlanError
from penstock.schedule.lower import Program

if TYPE_CHECKING:
    from penstock.engine.parallelized import ParallelizedStage

__all__ = ["SavedForward", "Slot", "StageEngine", "forward_contexts", "make_slots"]


# What a stage keeps of a forward that will run again: its input, and what it drew.


class SavedForward:
    """One forward to be run again. Its output's graph is dropped at once; this is all that stays until then."""

    __slots__ = ("draws", "keeper", "message", "moment", "seen", "versions")

    def __init__(self) -> None:
        self.message: Message | None = None
        self.versions: Sequence[int | None] = ()
        self.draws: RngStates = []
        self.keeper = KeptValues()
        self.seen: SavedBuffers = ()  # buffers that the forward changed, as it found them
        self.moment: MicroBatch | None = None

    def keep(self, message: Message, moment: MicroBatch | None) -> None:
        self.message = message._replace(leaves=list(message.leaves))
        self.versions = _leaf_versions(message)
        self.moment = moment

    def again(self, stage: int) -> Message:
        """The input as it was; an error if somebody has changed it since."""
        assert self.message is not None
        if _leaf_versions(self.message) != self.versions:
            raise PlanError(
                f"an input of stage {stage} was changed in place after its forward, which is to be recomputed from it: "
                "change a copy instead (x.clone()), or keep this stage's activations (recompute='never' for it)"
            )
        return self.message._replace(leaves=list(self.message.leaves))

    def clear(self) -> None:
        self.message = self.moment = None
        self.seen = ()
        self.draws.clear()
        self.keeper.clear()


def _leaf_versions(message: Message) -> list[int | None]:
    return [leaf._version if isinstance(leaf, Tensor) else None for leaf in message.leaves]


# Slots: what a stage keeps of a micro-batch, and how many of them a program needs.


class Slot:
    """What a stage keeps for one micro-batch in flight."""

    __slots__ = ("away", "bare", "grads", "inputs", "message", "messages", "queue", "replay", "roots", "rows", "shares")

    def __init__(self, queue: WeightGradQueue | None = None, replay: SavedForward | None = None) -> None:
        self.inputs: Sequence[Tensor] = ()
        self.roots: Sequence[GradientEdge] = ()
        self.message: Message | None = None
        self.grads: Sequence[Tensor | None] = ()
        # Where several edges leave the stage, a message for each; where several enter it, how many of the inputs came
        # over each, and their gradients.
        self.messages: list[Message | None] = []
        self.shares: Sequence[int] = ()
        self.rows: list[Sequence[Tensor | None]] = []
        self.queue = queue  # there when the backward is split into I and W
        self.replay = replay  # there when the forward is to be run again
        self.away = False  # what the next forward saves goes to the host
        self.bare = queue is None and replay is None  # nothing need be done around a forward, for all the slot knows

    def clear(self) -> None:
        self.inputs = self.roots = self.grads = self.shares = ()
        self.message = None
        self.messages, self.rows = [], []
        if self.queue is not None:
            self.queue.clear()
        if self.replay is not None:
            self.replay.clear()


def make_slots(program: Program, stages: Mapping[int, StageEngine]) -> dict[tuple[int, int], Slot]:
    """The slots of a program's (stage, micro-batch) pairs: as few as its numbering says, shared one after the other."""
    split = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "W"}
    twice = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "R"}
    made: dict[tuple[int, int, bool, bool], Slot] = {}
    slots = {}
    for (stage, k), number in program.slots.items():
        key = (stage, number, (stage, k) in split, (stage, k) in twice)
        if key not in made:
            queue = stages[stage].new_queue() if key[2] else None
            made[key] = Slot(queue, SavedForward() if key[3] else None)
        slots[stage, k] = made[key]
    return slots


# What a stage's forward runs in, beside the caller's grad mode.


def forward_contexts(
    stage: StageEngine, microbatch: int, slot: Slot, leaves: Sequence[Any], again: bool
) -> AbstractContextManager[Any]:
    """The caller's autocast and default device, the stage's own random numbers, and those who look on.

    ``again`` says that the forward has run before. Where the recording of weight gradients is all there is, it is
    entered without a stack, which would cost more than it does.
    """
    plain = stage.around is None and stage.randomness is None and stage.norms is None
    if plain and slot.replay is None and not slot.away:
        assert slot.queue is not None
        return slot.queue.recording()
    stack = ExitStack()
    if slot.away:
        assert stage.offload is not None
        slot.away, slot.bare = False, slot.queue is None and slot.replay is None  # another micro-batch comes next
        stack.enter_context(stage.offload.saving(microbatch, leaves))
    if stage.around is not None:
        stack.enter_context(stage.around)
    if stage.randomness is not None:
        draws = None if slot.replay is None else slot.replay.draws
        stack.enter_context(stage.randomness.forward(stage.mode, microbatch, draws, again))
    if again:
        assert stage.unnoticed is not None
        assert slot.replay is not None
        stack.enter_context(stage.unnoticed.batchnorm_freeze if stage.norms is None else stage.norms.ignoring)
        stack.enter_context(stage.unnoticed.restored(slot.replay.seen))
    elif stage.norms is not None:
        stack.enter_context(stage.norms.counting)
    if slot.queue is not None:
        stack.enter_context(slot.queue.recording())
    if slot.replay is not None and slot.replay.keeper.used:
        stack.enter_context(slot.replay.keeper.forward(recomputing=again))
    return stack


# torch.autograd.backward costs as much again in checks of arguments that are known to be right here.
_NO_MODE = object()


class StageEngine:
    """A stage's module, with its forward and backward. The last stage has a head: the loss.

    ``takes`` and ``gives`` count the edges into the stage and out of it.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        head: LossAndOutputs | None = None,
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
        self.no_input_mutation_in: object = _NO_MODE  # the mode in which the module was seen to leave its inputs alone
        self.no_input_mutation_recomputing_in: object = _NO_MODE  # the same, for forwards that are run again
        self.mutates_sometimes = (
            False  # it has been seen to change its inputs for some micro-batches, and not for others
        )
        self.fast_path_in: object = _NO_MODE  # and in which a forward is a call of the module, with nothing around it
        self.shared: Sequence[Tensor] = ()  # parameters that other threads add gradients to
        self.offload: ActivationOffload | None = None  # there on a GPU, when activations go to the host
        self.weights: HostWeights | None = None  # there on a GPU, when weights live on the host
        self.randomness: StageRng | None = None  # there when draws are seeded, or must be repeated
        self.unnoticed: BufferGuard | None = None  # there when forwards are run again
        self.norms: DeferredStatistics | None = None  # there when statistics are those of the mini-batch
        self.parallel: ParallelizedStage | None = None  # there when the user has parallelized the stage
        self._recorder: WeightGradRecorder | None = None

    def new_queue(self) -> WeightGradQueue:
        """A queue for the weight gradients of one micro-batch in flight, where the backward is split."""
        if self._recorder is None:
            sharded = None if self.parallel is None else self.parallel.sharded
            if sharded is not None:  # what the forward will use are the gathered parameters
                sharded.wait_unshard()
            self._recorder = make_recorder(
                self.module, self.shared, defer=sharded is None or not sharded.converts_grads
            )
        return WeightGradQueue(self._recorder)

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """Run the module; the output is left in ``slot.message``, the ends of its graph in the slot."""
        leaves, spec, wants, shared = message
        if self.mode is not self.fast_path_in or slot.replay is not None or slot.away or spec is not None or shared:
            self._forward(microbatch, message, slot)
            return
        leaf, moments = leaves[0], self.moments
        slot.inputs = (leaf.requires_grad_(),) if wants else ()
        forward_state.microbatch = moments[microbatch] if moments else None
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
            forward_state.microbatch = None
        slot.message, slot.roots = detach_outputs(output, stage=self.index)

    def _forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """The same, where more has to be done around the call of the module, or may have to be."""
        replay = slot.replay
        if replay is None or not torch.is_grad_enabled():
            self._run(microbatch, message, slot)
            return
        replay.keep(message, self.moments[microbatch] if self.moments else None)
        forward_state.checkpointing, forward_state.keeper = True, replay.keeper
        assert self.unnoticed is not None
        self.unnoticed.before(self.mode)
        try:
            self._run(microbatch, message, slot)
            replay.seen = self.unnoticed.after()
        finally:
            forward_state.checkpointing, forward_state.keeper = False, None
        slot.inputs = slot.roots = ()
        if slot.queue is not None:
            slot.queue.clear()

    def recompute(self, microbatch: int, slot: Slot) -> None:
        """Run the module on the same input once more, for the backward: what it gave is known, and dropped."""
        replay = slot.replay
        assert replay is not None
        forward_state.recomputing, forward_state.keeper = True, replay.keeper
        try:
            with torch.enable_grad():
                self._run(microbatch, replay.again(self.index), slot, again=True)
        finally:
            forward_state.recomputing, forward_state.keeper = False, None
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
            careful = self.mode is not self.no_input_mutation_recomputing_in
            if careful:  # what is kept must not be changed
                leaves[:] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        else:
            careful = self.mode is not self.no_input_mutation_in
            if careful:
                for i, leaf in zip(wants, inputs, strict=True):
                    leaves[i] = unsafe_view(leaf, leaf.shape)
        if shared and torch.is_inference_mode_enabled():
            for i in shared:
                leaves[i] = version_counted(leaves[i])
        versions = [leaves[i]._version for i in shared] if shared else None
        value = leaves[0] if spec is None else unflatten(leaves, spec)
        try:
            if slot.bare and self.around is None and self.randomness is None and self.norms is None:
                output = self._call(microbatch, value, slot)
            else:
                with forward_contexts(self, microbatch, slot, leaves, again):
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
            self.no_input_mutation_recomputing_in = _NO_MODE if changed or self.mutates_sometimes else self.mode
        elif careful:
            self._look_for_changes(leaves, wants, inputs)
        if self.gives > 1:
            slot.messages, slot.roots = detach_outputs_per_edge(output, self.gives, self.index)
        else:
            slot.message, slot.roots = detach_outputs(output, stage=self.index if self.head is None else None)
        if shared and self.head is None:
            slot.message, *slot.messages = mark_shared((slot.message, *slot.messages), [leaves[i] for i in shared])

    def _explain(self, error: RuntimeError) -> None:
        """Of an error in a module that was given a leaf."""
        if "leaf Variable that requires grad" in str(error):
            self.no_input_mutation_in = self.no_input_mutation_recomputing_in = self.fast_path_in = _NO_MODE
            self.mutates_sometimes = True
            error.add_note("the stage changes its input in place, and did not before: run the step again")

    def _look_for_changes(self, leaves: Sequence[Tensor], wants: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """Learn whether the module changes its inputs in place.

        Autograd forbids that for a leaf and for a view of one, so the module was given neither. A module that does
        not do it is given the leaf itself from now on, while it stays in this mode: one node less each way.
        """
        changed = [leaf for i, leaf in zip(wants, inputs, strict=True) if leaves[i]._version]
        for leaf in changed:  # what the stage before saved of its output is no longer that
            increment_version(leaf)
        if wants and not changed and not self.mutates_sometimes:
            self.no_input_mutation_in = self.mode
            around = (self.around, self.randomness, self.norms, self.head)
            if self.takes == self.gives == 1 and all(one is None for one in around):
                self.fast_path_in = self.mode
        elif changed:
            self.no_input_mutation_in = self.fast_path_in = _NO_MODE

    def _call(self, microbatch: int, value: Any, slot: Slot) -> Any:
        if slot.replay is not None:
            forward_state.microbatch = slot.replay.moment
        else:
            forward_state.microbatch = self.moments[microbatch] if self.moments else None
        try:
            output = self.module(value) if self.takes == 1 else self.module(*value)
            return output if self.head is None else self.head(microbatch, output)
        finally:
            forward_state.microbatch = None

    def backward(self, grads: Sequence[Tensor | None], slot: Slot) -> None:
        """Turn the gradients of the outputs into those of the inputs (``slot.grads``) and of the parameters."""
        roots, inputs = slot.roots, slot.inputs
        for grad in grads:
            if grad is None:
                roots, grads = _drop_missing_grads(roots, grads)
                break
        if roots and self.norms is None:
            run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        elif roots and self.norms is not None:
            with self.norms.ignoring:  # a checkpoint of the user's may run a forward in here
                run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        if len(inputs) == 1:
            (leaf,) = inputs
            slot.grads = (leaf.grad,)
            leaf.grad = None
        else:
            slot.grads = [leaf.grad for leaf in inputs]
            for leaf in inputs:
                leaf.grad = None
        if slot.shares:
            slot.rows = split_grads(slot.grads, slot.shares)
        slot.inputs = slot.roots = ()

    def input_gradient(self, grads: Sequence[Tensor | None], slot: Slot) -> None:
        """The first half of a backward: what the weight-gradient queue takes up is left for ``weight_gradient``."""
        assert slot.queue is not None
        with slot.queue.deferring(() if self.device.type == "cpu" else slot.roots):
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
        roots, grads = _drop_missing_grads(slot.roots, grads)
        targets = (*slot.inputs, *wanted)
        found: list[Tensor | None]
        if not roots or not targets:
            found = [None] * len(targets)
        else:
            with nullcontext() if self.norms is None else self.norms.ignoring:
                found = list(run_backward(tuple(roots), tuple(grads), keep, False, targets, True, False))
        slot.grads = found[: len(slot.inputs)]
        if slot.shares:
            slot.rows = split_grads(slot.grads, slot.shares)
        return found[len(slot.inputs) :]


def _drop_missing_grads(
    roots: Sequence[GradientEdge], grads: Sequence[Tensor | None]
) -> tuple[list[GradientEdge], list[Tensor | None]]:
    """Without the outputs that no gradient came for."""
    pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
