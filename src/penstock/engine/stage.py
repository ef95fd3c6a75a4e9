"""One stage: forward (F), backward (B, or its halves I and W) and recompute (R) of one micro-batch at a time.

A slot holds everything that a micro-batch needs between its forward and the end of its backward:

    message ─▶ inputs ──module──▶ output ─▶ message      F  keeps inputs (leaves) and roots (gradient edges of the
                 │ .grad            │ edge                  outputs); the data of the outputs is sent and dropped
    grads ◀──────┘ ◀──autograd──── roots ◀── grads       B  the gradients of the inputs are sent and dropped

A micro-batch that is recomputed keeps only its input; R runs the module again to rebuild inputs and roots.

Messages of several incoming edges are merged into one; an output with several outgoing edges is split into one message
for each. The channels, not the stage, determine the source and the destination of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, increment_version

from penstock._torch import run_backward, unsafe_view
from penstock.engine.forward_context import CallerContext, MicroBatch, forward_state
from penstock.engine.loss import LossAndOutputs
from penstock.engine.loss_terms import requiring_grad, with_graph
from penstock.engine.message import (
    Grads,
    Message,
    detach_outputs,
    detach_outputs_per_edge,
    detach_tensors,
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
from penstock.engine.recompute.python_state import PythonStateGuard, SavedPythonState
from penstock.engine.recompute.rng import RngStates, StageRng
from penstock.engine.recompute.shared_state import SharedStateCheck
from penstock.engine.weightgrad import WeightGradQueue, WeightGradRecorder, make_recorder
from penstock.errors import PlanError
from penstock.schedule.lower import LoweredProgram

if TYPE_CHECKING:  # FSDP takes seconds to import
    from penstock.engine.replicas.ddp import DdpSettings
    from penstock.engine.replicas.fsdp import FsdpStage
    from penstock.engine.shapes import FakeStage


@dataclass(slots=True, eq=False)
class SavedForward:
    """The input of a forward that will be recomputed, its RNG states and changed buffers. Its graph is dropped."""

    message: Message | None = None
    versions: Sequence[int | None] = ()
    rng_states: RngStates = field(default_factory=list)
    keeper: KeptValues = field(default_factory=KeptValues)
    buffers: SavedBuffers = ()  # values, before the forward, of buffers and parameters that it changed
    python_state: SavedPythonState = field(default_factory=list)
    microbatch: MicroBatch | None = None


def _leaf_versions(message: Message) -> list[int | None]:
    return [leaf._version if isinstance(leaf, Tensor) else None for leaf in message.leaves]


@dataclass(slots=True, eq=False)
class Slot:
    """The state of one micro-batch in flight in one stage."""

    queue: WeightGradQueue | None = None  # set when the backward is split into I and W
    saved: SavedForward | None = None  # set when the forward will be recomputed
    inputs: Sequence[Tensor] = ()
    roots: Sequence[GradientEdge] = ()
    messages: list[Message | None] = field(default_factory=list)  # per outgoing edge; of the last stage, one
    inputs_per_edge: Sequence[int] = ()  # set for several incoming edges
    grads: list[Grads] = field(default_factory=list)  # per incoming edge; of the first stage, one
    offload_next: bool = False  # whether the next forward's saved tensors are offloaded to the host
    # If the actions may run as CUDA graphs:
    graph_key: tuple[Any, ...] | None = None  # slots of all programs with the same key share their graphs
    graph_kind: Any = None  # of call of the last forward
    graphs: Any = None  # those of the last forward; None if it ran eagerly


def make_slots(
    program: LoweredProgram, stages: Mapping[int, StageEngine], *, graphs: bool = False
) -> dict[tuple[int, int], Slot]:
    """The slot of each (stage, micro-batch): micro-batches with the same slot number in the program share one.

    With ``graphs``, their actions may run as CUDA graphs.
    """
    split = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "W"}
    recomputed = {(i.stage, i.microbatch) for i in program.instructions if i.kind == "R"}
    made: dict[tuple[int, int, bool, bool], Slot] = {}
    slots = {}
    overlapping = _overlapping_recomputes(program, recomputed, split) if graphs else set()
    for (stage, k), number in program.slots.items():
        key = (stage, number, (stage, k) in split, (stage, k) in recomputed)
        if key not in made:
            queue = stages[stage].new_queue() if key[2] else None
            graph_key = (*key[1:], stage in overlapping) if graphs else None
            made[key] = Slot(queue, SavedForward() if key[3] else None, graph_key=graph_key)
        slots[stage, k] = made[key]
    return slots


def _overlapping_recomputes(
    program: LoweredProgram, recomputed: set[tuple[int, int]], split: set[tuple[int, int]]
) -> set[int]:
    """The stages that recompute a forward before the backward of another recomputed one is over."""
    active: dict[int, int] = {}
    found = set()
    for kind, stage, k, _ in program.instructions:
        if kind == "R":
            if stage in active:
                found.add(stage)
            active[stage] = k
        elif (stage, k) in recomputed and kind == ("W" if (stage, k) in split else "B") and active.get(stage) == k:
            del active[stage]
    return found


@dataclass(frozen=True)
class ParallelizedStage:
    """Properties of a stage that ``Pipeline(…, parallelize=…)`` has wrapped or changed."""

    fake: FakeStage | None  # a copy of the stage before the change, if the changed stage cannot be copied
    wrapped: Mapping[int, DdpSettings]  # by parameter identity
    sharded: FsdpStage | None  # the part that FSDP manages


_NO_MODE = object()


class StageActions(Protocol):
    """The actions of a stage: of the stage itself, or of its CUDA graphs."""

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None: ...
    def recompute(self, microbatch: int, slot: Slot) -> None: ...
    def backward(self, grads: Grads, slot: Slot) -> None: ...
    def input_gradient(self, grads: Grads, slot: Slot) -> None: ...
    def weight_gradient(self, slot: Slot) -> None: ...


class GraphedActions(StageActions, Protocol):
    """The actions of a stage as CUDA graphs."""

    def begin_run(self) -> None: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class StageEngine:
    """A stage's module, with its forward and backward. The last stage also has the loss."""

    index: int
    module: nn.Module
    device: torch.device
    loss: LossAndOutputs | None = None
    num_sources: int = 1  # edges into the stage
    num_targets: int = 1  # edges out of it
    microbatches: Sequence[MicroBatch] = ()  # of the run: ``current_microbatch`` returns one of them
    context: CallerContext | None = None  # entered for each forward
    # A mode is the state that a forward depends on: training flags of the modules, autocast, default device. Each mode
    # is one object, compared by identity. The attributes below hold the mode in which …
    mode: object = None
    modes: dict[object, object] = field(default_factory=dict)
    no_input_mutation_in: object = _NO_MODE  # … the module did not change its inputs in place,
    no_input_mutation_recomputing_in: object = _NO_MODE  # … the same for forwards that will be recomputed,
    fast_path_in: object = _NO_MODE  # … a forward only calls the module,
    fast_path_no_grad_in: object = _NO_MODE  # … the same for inputs that need no gradient.
    mutates_sometimes: bool = False  # the module changes its inputs in place for some micro-batches only
    shared_parameters: Sequence[Tensor] = ()  # parameters whose gradients other threads accumulate too
    offload: ActivationOffload | None = None  # set on a GPU if activations are offloaded
    weights: HostWeights | None = None  # set on a GPU if weights are offloaded
    rng: StageRng | None = None  # set if random numbers are seeded, or repeated in recomputes
    buffer_guard: BufferGuard | None = None  # set if forwards are recomputed
    python_state: PythonStateGuard | None = None  # set if forwards are recomputed
    shared_state: SharedStateCheck | None = None  # set if other stages share some of this stage's state
    norms: DeferredStatistics | None = None  # set if BatchNorm statistics are deferred
    parallel: ParallelizedStage | None = None
    graphs: GraphedActions | None = None  # set if the actions may run as CUDA graphs
    _recorder: WeightGradRecorder | None = None

    def __post_init__(self) -> None:
        self.submodules = list(self.module.modules())

    def new_queue(self) -> WeightGradQueue:
        """A queue for the deferred weight gradients of one micro-batch in flight."""
        if self._recorder is None:
            sharded = None if self.parallel is None else self.parallel.sharded
            if sharded is not None:  # the forward uses the gathered parameters
                sharded.wait_unshard()
            defer = sharded is None or not sharded.converts_grads
            self._recorder = make_recorder(self.module, self.shared_parameters, defer=defer)
        return WeightGradQueue(self._recorder)

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """Run the module; store its output in ``slot.messages``, and the output's gradient edges in ``slot.roots``."""
        leaves, spec, wants, shared = message
        if (
            self.mode is not (self.fast_path_in if wants else self.fast_path_no_grad_in)
            or slot.saved is not None
            or slot.offload_next
            or spec is not None
            or shared
            or (self.loss is not None and self.loss.needs_graph and not torch.is_grad_enabled())
        ):
            self._forward(microbatch, message, slot)
            return
        leaf, microbatches, loss = leaves[0], self.microbatches, self.loss
        slot.inputs = (leaf.requires_grad_(),) if wants else ()
        forward_state.microbatch = microbatches[microbatch] if microbatches else None
        try:
            if slot.queue is None:
                output = self.module(leaf)
                if loss is not None:
                    output = loss(microbatch, output)
            else:
                with slot.queue.recording():
                    output = self.module(leaf)
                    if loss is not None:
                        output = loss(microbatch, output)
        except RuntimeError as error:
            if wants:
                self._note_input_mutation(error)
            raise
        finally:
            forward_state.microbatch = None
        found, slot.roots = detach_outputs(output, stage=self.index if loss is None else None)
        slot.messages = [found]

    def _forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        """The general case of ``forward``, which is the fast path."""
        saved = slot.saved
        if saved is None or not torch.is_grad_enabled():
            self._run(microbatch, message, slot)
            return
        saved.message, saved.versions = message._replace(leaves=list(message.leaves)), _leaf_versions(message)
        saved.microbatch = self.microbatches[microbatch] if self.microbatches else None
        forward_state.checkpointing, forward_state.keeper = True, saved.keeper
        assert self.buffer_guard is not None
        assert self.python_state is not None
        try:
            with self.buffer_guard.before(self.mode), self.python_state.saving(self.mode, saved.python_state):
                self._run(microbatch, message, slot)
            saved.buffers = self.buffer_guard.after()
        finally:
            forward_state.checkpointing, forward_state.keeper = False, None
        slot.inputs = slot.roots = ()
        if slot.queue is not None:
            slot.queue.clear()

    def recompute(self, microbatch: int, slot: Slot) -> None:
        """Run the module on its saved input again to rebuild the graph; drop the output."""
        saved = slot.saved
        assert saved is not None
        assert saved.message is not None
        if _leaf_versions(saved.message) != saved.versions:
            raise PlanError(
                f"an input of stage {self.index} was changed in place after its forward, but the recompute needs it: "
                "change a copy instead (x.clone()), or keep this stage's activations (recompute='never' for it)"
            )
        message = saved.message._replace(leaves=list(saved.message.leaves))
        forward_state.recomputing, forward_state.keeper = True, saved.keeper
        try:
            with torch.enable_grad():
                self._run(microbatch, message, slot, recomputing=True)
        finally:
            forward_state.recomputing, forward_state.keeper = False, None
        slot.messages = []

    def _run(self, microbatch: int, message: Message, slot: Slot, *, recomputing: bool = False) -> None:
        leaves, spec, wants, shared = message
        slot.inputs = inputs = tuple(leaves[i].requires_grad_() for i in wants)
        if slot.saved is not None:
            protect_inputs = self.mode is not self.no_input_mutation_recomputing_in
            if protect_inputs:  # the saved input must not change
                leaves[:] = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        else:
            protect_inputs = self.mode is not self.no_input_mutation_in
            if protect_inputs:
                for i, leaf in zip(wants, inputs, strict=True):
                    leaves[i] = unsafe_view(leaf, leaf.shape)
        if shared and torch.is_inference_mode_enabled():
            for i in shared:
                leaves[i] = version_counted(leaves[i])
        versions = [leaves[i]._version for i in shared] if shared else None
        value = unflatten(leaves, spec)
        try:
            with self._forward_contexts(microbatch, slot, leaves, recomputing):
                output = self._call(microbatch, value, slot)
        except RuntimeError as error:
            if not protect_inputs:
                self._note_input_mutation(error)
            raise
        if shared and versions != [leaves[i]._version for i in shared]:
            raise PlanError(
                f"stage {self.index} changes one of its inputs in place, and another stage uses that value as well, or "
                "another input is a view of it: change a copy instead (x.clone()), or cut elsewhere"
            )
        if protect_inputs and slot.saved is not None:
            changed = any(leaf._version for leaf in leaves if isinstance(leaf, Tensor))
            self.no_input_mutation_recomputing_in = _NO_MODE if changed or self.mutates_sometimes else self.mode
        elif protect_inputs:
            self._detect_input_mutation(leaves, wants, inputs)
        index = self.index if self.loss is None else None
        messages, slot.roots = detach_outputs_per_edge(output, self.num_targets, index)
        if shared and self.loss is None:
            messages = mark_shared(messages, [leaves[i] for i in shared])
        slot.messages = [*messages]

    def _needs_no_context(self) -> bool:
        return self.context is None and self.rng is None and self.norms is None and self._shared_state_is_known()

    def _shared_state_is_known(self) -> bool:
        return self.shared_state is None or self.shared_state.is_done(self.mode)

    def _forward_contexts(
        self, microbatch: int, slot: Slot, leaves: Sequence[Any], recomputing: bool
    ) -> AbstractContextManager[Any]:
        """The contexts of a forward: offload, the caller's context, RNG, buffers, weight-gradient recording."""
        if self._needs_no_context() and slot.saved is None and not slot.offload_next:
            # An ExitStack costs more than the recording.
            return nullcontext() if slot.queue is None else slot.queue.recording()
        stack = ExitStack()
        if slot.offload_next:
            assert self.offload is not None
            slot.offload_next = False
            stack.enter_context(self.offload.saving(microbatch, leaves))
        if self.context is not None:
            stack.enter_context(self.context.entered())
        if self.rng is not None:
            states = None if slot.saved is None else slot.saved.rng_states
            stack.enter_context(self.rng.forward(self.mode, microbatch, states, recomputing))
        if recomputing:
            assert self.buffer_guard is not None
            assert self.python_state is not None
            assert slot.saved is not None
            stack.enter_context(self.buffer_guard.batchnorm_freeze if self.norms is None else self.norms.ignoring)
            stack.enter_context(self.buffer_guard.restored(slot.saved.buffers))
            stack.enter_context(self.python_state.restored(slot.saved.python_state))
        elif self.norms is not None:
            stack.enter_context(self.norms.counting)
        if not recomputing and not self._shared_state_is_known():
            assert self.shared_state is not None
            known = self.microbatches[microbatch] if self.microbatches else None
            stack.enter_context(self.shared_state.checking(self.mode, known))
        if slot.queue is not None:
            stack.enter_context(slot.queue.recording())
        if slot.saved is not None and slot.saved.keeper.used:
            stack.enter_context(slot.saved.keeper.forward(recomputing=recomputing))
        return stack

    def _call(self, microbatch: int, value: Any, slot: Slot) -> Any:
        if slot.saved is not None:
            forward_state.microbatch = slot.saved.microbatch
        else:
            forward_state.microbatch = self.microbatches[microbatch] if self.microbatches else None
        loss = self.loss
        try:
            if loss is not None and loss.needs_graph and not torch.is_grad_enabled():
                with with_graph():
                    value = requiring_grad(value)
                    output = self.module(value) if self.num_sources == 1 else self.module(*value)
                    return detach_tensors(loss(microbatch, output))
            output = self.module(value) if self.num_sources == 1 else self.module(*value)
            return output if loss is None else loss(microbatch, output)
        finally:
            forward_state.microbatch = None

    def _note_input_mutation(self, error: RuntimeError) -> None:
        """Explain autograd's error for a module that changes an input in place, but did not in earlier forwards."""
        if "leaf Variable that requires grad" in str(error):
            self.no_input_mutation_in = self.no_input_mutation_recomputing_in = self.fast_path_in = _NO_MODE
            self.mutates_sometimes = True
            error.add_note("the stage changed its input in place, but not in earlier forwards: run the step again")

    def _detect_input_mutation(self, leaves: Sequence[Tensor], wants: Sequence[int], inputs: Sequence[Tensor]) -> None:
        """Detect whether the module changes its inputs in place.

        Autograd forbids this for a leaf and for a view of a leaf, so the module received neither. A module without such
        changes receives the leaf itself from now on, while it stays in this mode: one autograd node less in each
        direction. Inputs that need no gradient are always passed directly.
        """
        changed = [leaf for i, leaf in zip(wants, inputs, strict=True) if leaves[i]._version]
        for leaf in changed:  # autograd detects the change if the stage before saved its output
            increment_version(leaf)
        simple = self.num_sources == self.num_targets == 1 and self._needs_no_context()
        if not wants:
            self.fast_path_no_grad_in = self.mode if simple else _NO_MODE
        elif changed:
            self.no_input_mutation_in = self.fast_path_in = _NO_MODE
        elif not self.mutates_sometimes and self._shared_state_is_known():
            self.no_input_mutation_in = self.mode
            if simple:
                self.fast_path_in = self.mode

    def backward(self, grads: Grads, slot: Slot) -> None:
        """Compute the gradients of the inputs (``slot.grads``) and of the parameters from those of the outputs."""
        roots, inputs = slot.roots, slot.inputs
        for grad in grads:
            if grad is None:
                roots, grads = _drop_missing_grads(roots, grads)
                break
        if roots and self.norms is None:
            run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        elif roots and self.norms is not None:
            with self.norms.ignoring:  # a checkpoint inside the module recomputes its forward here
                run_backward(tuple(roots), tuple(grads), False, False, (), True, True)
        if len(inputs) == 1 and not slot.inputs_per_edge:
            (leaf,) = inputs
            slot.grads = [(leaf.grad,)]
            leaf.grad = None
        else:
            found = [leaf.grad for leaf in inputs]
            for leaf in inputs:
                leaf.grad = None
            slot.grads = split_grads(found, slot.inputs_per_edge)
        slot.inputs = slot.roots = ()

    def input_gradient(self, grads: Grads, slot: Slot) -> None:
        """The first half of a backward. ``weight_gradient`` computes the weight gradients that the queue defers."""
        assert slot.queue is not None
        with slot.queue.deferring(() if self.device.type == "cpu" else slot.roots):
            self.backward(grads, slot)

    def weight_gradient(self, slot: Slot) -> None:
        """The second half of a backward: compute the deferred weight gradients."""
        assert slot.queue is not None
        slot.queue.run()

    def gradients(self, grads: Grads, slot: Slot, wanted: Sequence[Tensor], keep: bool) -> Grads:
        """Like ``backward``, but return the gradients of ``wanted`` and change no ``.grad``."""
        roots, grads = _drop_missing_grads(slot.roots, grads)
        targets = (*slot.inputs, *wanted)
        found: list[Tensor | None]
        if not roots or not targets:
            found = [None] * len(targets)
        else:
            with nullcontext() if self.norms is None else self.norms.ignoring:
                found = list(run_backward(tuple(roots), tuple(grads), keep, False, targets, True, False))
        slot.grads = split_grads(found[: len(slot.inputs)], slot.inputs_per_edge)
        return found[len(slot.inputs) :]

    def close(self) -> None:
        if self.rng is not None:
            self.rng.close()
        if self.graphs is not None:
            self.graphs.close()


def begin_run(
    stages: Iterable[StageEngine], context: CallerContext, variants: Sequence[str | None], run_name: str
) -> Sequence[MicroBatch]:
    """Prepare the stages for a run. ``variants`` are the kinds of call of its micro-batches."""
    made = [MicroBatch(k, variant) for k, variant in enumerate(variants)]
    for stage in stages:
        stage.microbatches = made
        if stage.rng is not None:
            stage.rng.run_name = run_name
        stage.context = context or None
        mode = (context, *[module.training for module in stage.submodules])
        stage.mode = stage.modes.setdefault(mode, mode)
        if stage.buffer_guard is not None:
            stage.buffer_guard.begin_run()
        if stage.graphs is not None:
            stage.graphs.begin_run()
    return made


def _drop_missing_grads(roots: Sequence[GradientEdge], grads: Grads) -> tuple[list[GradientEdge], list[Tensor | None]]:
    pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if grad is not None]
    return [root for root, _ in pairs], [grad for _, grad in pairs]
