"""``pipe(x)``: the forward half of a fill-drain program now, its backward half when autograd gets there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock._torch import graph_task_keeps_graph, queue_callback
from penstock.engine.context import begin_run, caller_context
from penstock.engine.loss import ModelLoss, check_joinable
from penstock.engine.message import BorrowedInputs, Message, Spec, split_grads, unflatten
from penstock.engine.microbatch import join
from penstock.engine.recompute.batchnorm import commit_statistics
from penstock.engine.recorder import StepRecorder, recorded_program, recorded_run
from penstock.engine.replicas.ties import LocalTies
from penstock.engine.runner import PipelineIO
from penstock.engine.stage import SavedForward, Slot, StageEngine
from penstock.engine.threads import StageBackward, ThreadExecutor, ThreadProgram
from penstock.errors import PlanError
from penstock.schedule.lower import lower
from penstock.schedule.schedule import Schedule

__all__ = [
    "PipelineCall",
    "ThreadCall",
    "apply_call",
    "skip_hooks_without_grad",
    "suspended_grad_hooks",
    "with_training_modes",
]


# Hooks on parameters, while a backward of the caller's runs the stages' own.


@contextmanager
def suspended_grad_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Hooks on parameters run once, on the whole gradient, in the caller's graph: not on each micro-batch's part."""
    hooked = [hooks for p in parameters if (hooks := p._backward_hooks)]
    kept = [list(hooks.items()) for hooks in hooked]
    for hooks in hooked:
        hooks.clear()  # autograd holds on to the dictionary itself
    try:
        yield
    finally:
        for hooks, items in zip(hooked, kept, strict=True):
            hooks.update(items)


class _HookUnlessNone:
    """A hook on a parameter, called where there is a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self.hook(grad)


def skip_hooks_without_grad(parameters: Sequence[nn.Parameter]) -> None:
    """Autograd calls the hooks of an input that gets no gradient, with None; those of the plain model's are not."""
    if not parameters:
        return
    every: list[dict[int, Any]] = [p._backward_hooks for p in parameters]  # type: ignore[misc]
    for hooks in every:
        hooks.update(
            {key: _HookUnlessNone(hook) for key, hook in hooks.items() if not isinstance(hook, _HookUnlessNone)}
        )

    def restore() -> None:
        for hooks in every:
            hooks.update({key: hook.hook for key, hook in hooks.items() if isinstance(hook, _HookUnlessNone)})

    queue_callback(restore)


class PipelineCall(Protocol):
    """A mini-batch whose forward is run when it is called, and whose backward when autograd gets there."""

    count: int  # of micro-batches
    parameters: list[nn.Parameter]  # those that autograd is to give their gradients to
    model_loss: ModelLoss
    template: tuple[list[Any], Spec]

    def forward(self, inputs: list[Message]) -> list[Message]: ...

    def backward(
        self, seeds: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Sequence[Tensor | None]], dict[int, Tensor]]: ...


class ThreadCall:
    """One call of the pipeline: its slots live until its backward is over, or nobody can ask for it any more."""

    def __init__(
        self,
        crew: ThreadExecutor,
        schedule: Schedule,
        sizes: Sequence[int],
        parameters: Sequence[nn.Parameter],
        wide: bool = False,
    ) -> None:
        self.crew = crew
        programs = lower(schedule, crew.edges)
        self.sizes = sizes
        self.count = schedule.num_microbatches
        self.model_loss = ModelLoss(())
        self.halves = [
            [[i for i in program.instructions if i.kind in kinds] for program in programs]
            for kinds in (("F", "SEND_F"), ("R", "B", "SEND_B"))
        ]
        twice = {(i.stage, i.microbatch) for program in programs for i in program.instructions if i.kind == "R"}
        self.slots = {
            (s, k): Slot(replay=SavedForward() if (s, k) in twice else None)
            for program in programs
            for s, k in program.slots
        }
        self.parameters = list(parameters)
        self.of_stage = {
            index: [p for p in stage.module.parameters() if p.requires_grad] for index, stage in crew.stages.items()
        }
        self.run_name = crew.run_names.next(training=False)
        # A backward may run forwards again: they are to find what they found.
        self.state = caller_context()
        self.modes = [(part, part.training) for stage in crew.stages.values() for part in stage.module.modules()]
        self.wide = wide  # gradients of half precision are summed in float32; autograd rounds the sum
        self.over = False
        self.keep = False
        self.tape: StepRecorder | None = None  # that has recorded the forward
        self.around = False  # layers may have passed values around the pipeline, by micro-batch
        self.template: tuple[list[Any], Spec] = ([], None)
        self.lent = BorrowedInputs(())

    def forward(self, inputs: list[Message]) -> list[Message]:
        tape = self.crew.tape
        self.lent = BorrowedInputs(inputs)
        with self.crew.lock, recorded_run(tape, "call"), commit_statistics(self.crew.norms), self.lent as alone:
            ends = PipelineIO(alone, outputs=[None] * self.count)
            self.tape = None if tape is None or tape.now is None else tape
            self.crew.head.begin(self.sizes, None, None)
            self.around = self.crew.run(self._job(0, ends), grad=True, run_name=self.run_name)
            self.model_loss = self.crew.head.model_loss
        assert ends.outputs is not None
        outputs = [message for message in ends.outputs if message is not None]
        check_joinable([message.leaves for message in outputs], self.sizes)
        return outputs

    def backward(
        self, seeds: Sequence[Sequence[Tensor | None]]
    ) -> tuple[list[Sequence[Tensor | None]], dict[int, Tensor]]:
        """The gradients of the inputs, per micro-batch, and of the parameters, by identity."""
        if self.over:
            raise RuntimeError(
                "Trying to backward through the pipeline a second time: call backward with retain_graph=True the "
                "first time, or call the pipeline again"
            )
        self.lent.returned()
        self.keep = graph_task_keeps_graph()
        sums: dict[int, dict[int, Tensor]] = {stage: {} for stage in self.of_stage}
        detours = _CrossStageGrads(self.slots, self.parameters) if self.around else None

        def work(stage: StageEngine, grads: Sequence[Tensor | None], slot: Slot) -> None:
            mine = sums[stage.index]
            if detours is None:
                wanted = self.of_stage[stage.index]
                found = stage.gradients(grads, slot, wanted, self.keep)
            else:
                wanted, found = detours.gradients(stage, grads, slot)
            for parameter, grad in zip(wanted, found, strict=True):
                if grad is not None:
                    if self.wide and grad.dtype.itemsize < 4:
                        grad = grad.float()
                    mine[id(parameter)] = grad if id(parameter) not in mine else mine[id(parameter)] + grad

        grads: list[Sequence[Tensor | None]] = [()] * self.count
        ends = PipelineIO(seed=seeds.__getitem__, grads=grads)
        tape = self.tape if self.tape is self.crew.tape else None
        with (
            self.crew.lock,
            recorded_run(tape, "backward"),
            suspended_grad_hooks(self.parameters),
            with_training_modes(self.modes),
        ):
            if self.crew.on_gpu:
                self._backward_here(ends, work)
            else:
                self.crew.run(self._job(1, ends, work), grad=False, run_name=self.run_name, state=self.state)
        if not self.keep:
            self.over = True
            self.slots.clear()
            self.lent = BorrowedInputs(())
        totals: dict[int, Tensor] = {}
        for of_stage in sums.values():
            for key, grad in of_stage.items():
                totals[key] = grad if key not in totals else totals[key] + grad.to(totals[key].device)
        for copies in self.crew.ties.copies:
            total = LocalTies.total([totals.get(id(parameter)) for parameter in copies])
            if total is not None:
                totals.update({id(parameter): total.to(parameter.device) for parameter in copies})
        skip_hooks_without_grad([p for p in self.parameters if p._backward_hooks and id(p) not in totals])
        return grads, totals

    def _backward_here(self, ends: PipelineIO, work: StageBackward) -> None:
        """The backward half in this thread.

        On a GPU this is autograd's own thread for that device, and whatever backward another thread began would wait
        for it. Launching is quick, so one thread keeps all devices busy: micro-batch by micro-batch, up the stages.
        """
        actions = [i for half in self.halves[1] for i in half if i.kind in "RB"]
        actions.sort(key=lambda i: (i.microbatch, -i.stage, i.kind == "B"))
        begin_run(self.crew.stages.values(), self.state, self.count, self.run_name)
        job = self.crew.compile([actions], self.count, self.slots, ends, work, together=True)
        recorded_program(self.crew.tape, job.runners[0])()

    def _job(self, half: int, ends: PipelineIO, work: StageBackward = StageEngine.backward) -> ThreadProgram:
        lockstep = self.crew.lockstep and half == 0
        return self.crew.compile(self.halves[half], self.count, self.slots, ends, work, lockstep=lockstep)


class _CrossStageGrads:
    """Gradients of values that layers passed around the pipeline, as ``current_microbatch`` allows them to.

    The graph of a stage then goes on into those of stages before it. What is found there is added to their own: it
    comes first, for a micro-batch goes back up the stages in order.
    """

    def __init__(self, slots: Mapping[tuple[int, int], Slot], parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.slots = {
            id(slot): [other for (s, j), other in slots.items() if j == k and s < stage]
            for (stage, k), slot in slots.items()
        }
        self.found: dict[int, Tensor] = {}  # by the input that it is the gradient of

    def gradients(
        self, stage: StageEngine, grads: Sequence[Tensor | None], slot: Slot
    ) -> tuple[list[nn.Parameter], Sequence[Tensor | None]]:
        """Like the stage's own, but of all parameters, which come with them."""
        entries = [leaf for other in self.slots[id(slot)] for leaf in other.inputs]
        found = stage.gradients(grads, slot, (*self.parameters, *entries), True)
        for leaf, grad in zip(entries, found[len(self.parameters) :], strict=True):
            self._add(leaf, grad)
        for leaf, grad in zip(slot.inputs, slot.grads, strict=True):
            self._add(leaf, grad)
        slot.grads = [self.found.pop(id(leaf), None) for leaf in slot.inputs]
        if slot.shares:
            slot.rows = split_grads(slot.grads, slot.shares)
        return self.parameters, found[: len(self.parameters)]

    def _add(self, leaf: Tensor, grad: Tensor | None) -> None:
        if grad is not None:
            self.found[id(leaf)] = grad if id(leaf) not in self.found else self.found[id(leaf)] + grad


@contextmanager
def with_training_modes(modes: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Modules in train or eval mode as they were."""
    now = [(module, module.training) for module, mode in modes if module.training != mode]
    for module, _ in now:
        module.training = not module.training
    try:
        yield
    finally:
        for module, mode in now:
            module.training = mode


def apply_call(flight: PipelineCall, inputs: list[Message]) -> Any:
    """Run the flight's forward and return its joined output, as part of the caller's autograd graph."""
    wanted = inputs[0].wants
    tensors = [message.leaves[i] for message in inputs for i in wanted]
    result: tuple[Tensor, ...] = _PipelineFunction.apply(flight, inputs, *tensors, *flight.parameters)  # type: ignore[no-untyped-call]
    leaves, spec = flight.template
    tensors_out = iter(result)
    joined = unflatten([next(tensors_out) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
    return flight.model_loss.settle(joined)


class _PipelineFunction(torch.autograd.Function):
    """The whole pipeline as one node of the caller's graph.

    Inputs: the micro-batches' tensors that want a gradient, then the parameters. Outputs: the joined tensors.
    """

    @staticmethod
    def forward(ctx: Any, flight: PipelineCall, inputs: list[Message], *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = flight.forward([message.detached() for message in inputs])
        leaves, spec, _, _ = outputs[0]
        if any(message.spec != spec for message in outputs):
            raise PlanError("the outputs of the micro-batches have different structures and cannot be joined")
        joined: list[Any] = [_join_outputs([message.leaves[i] for message in outputs]) for i in range(len(leaves))]
        flight.template = ([leaf if isinstance(leaf, Tensor) else joined[i] for i, leaf in enumerate(leaves)], spec)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        ctx.flight = flight
        ctx.wants = [message.wants for message in outputs]  # which may differ: the data may decide
        wants = sorted({i for message in outputs for i in message.wants})
        ctx.want = [(i, places.index(i)) for i in wants]
        ctx.shapes = [[message.leaves[i].shape for message in outputs] for i in wants]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(joined[i] for i in places if i not in wants))
        return tuple(joined[i] for i in places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        flight: PipelineCall = ctx.flight
        columns = {i: _split_grad(grads[at], shapes) for (i, at), shapes in zip(ctx.want, ctx.shapes, strict=True)}
        seeds = [[columns[i][k] for i in wants] for k, wants in enumerate(ctx.wants)]
        input_grads, parameter_grads = flight.backward(seeds)
        flat = [grad for row in input_grads for grad in row]
        return None, None, *flat, *(parameter_grads.get(id(p)) for p in flight.parameters)


def _join_outputs(column: Sequence[Any]) -> Any:
    """One output of all micro-batches, as one: among plain values a tensor would be cut off from its graph."""
    if len({isinstance(leaf, Tensor) for leaf in column}) > 1:
        kinds = " or a ".join(sorted({type(leaf).__name__ for leaf in column}))
        raise PlanError(
            f"an output of the model is a {kinds}, depending on the micro-batch, and cannot be joined with gradients: "
            "return the same kinds for all of them, or use step()"
        )
    return join(column)


def _split_grad(grad: Tensor | None, shapes: Sequence[torch.Size]) -> Sequence[Tensor | None]:
    """The gradient of a joined output, divided as the output was joined."""
    if grad is None:
        return [None] * len(shapes)
    if len(shapes) == 1:
        return [grad]
    if not shapes[0]:
        return grad.unbind()
    return torch.split(grad, [shape[0] for shape in shapes])
