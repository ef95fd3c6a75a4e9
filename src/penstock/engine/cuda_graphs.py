"""Which actions run as CUDA graphs, and which run eagerly; the gradients that graphs add to.

    steps 0, 1    F and B run eagerly                   kernels are loaded, and the engine learns what the stage does
    step 2        capture F and B of each slot before its first F
    from then on  copy the inputs, replay F             one call instead of hundreds of kernel launches
                  copy the gradients, replay B

Sends, receives, copies between devices and the loss of the mini-batch stay outside of the graphs. Gradients are added
to one fixed tensor per parameter. A capture runs the code of ``StageEngine`` once. No Python code runs in a replay:
a stage whose forward changes Python state, has hooks or waits for the GPU runs eagerly. See `graph_capture`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock._torch import foreach_zero_, has_global_module_hooks
from penstock.engine.executor import GradStash
from penstock.engine.graph_capture import GraphDevice, SlotGraphs, cloned
from penstock.engine.message import PLAIN_TYPES, Grads, Message, flatten
from penstock.engine.recompute.python_state import OF_TORCH, find_read_state
from penstock.engine.recompute.rng import generators_lock
from penstock.engine.replicas.fp32_accumulate import fp32_sums, set_grad
from penstock.engine.replicas.ties import Ties
from penstock.engine.stage import Slot, StageEngine
from penstock.errors import PipelineError
from penstock.split.module_state import GeneratorState

logger = logging.getLogger("penstock")

WARMUP_RUNS = 2  # eager runs of a kind of call before it is captured
MAX_KINDS = 4  # of calls of a stage that are captured: each takes memory for all slots
_VARYING_GRADIENTS = "its outputs do not always get gradients in the same places"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class CudaGraphs:
    """The graphs of all stages of a process, and the gradients that they add to."""

    def __init__(self, stages: Iterable[StageEngine], loss_fn: Any, reason: str = "") -> None:
        """``reason`` is why no stage can be captured, if so."""
        stages = list(stages)
        self.devices = {d: self.new_device(d) for d in {stage.device for stage in stages} if self.supports(d)}
        self.grads: dict[nn.Parameter, Tensor] = {}
        self.steps = 0
        self.touched: set[nn.Parameter] = set()  # parameters to which the replays of a step have added gradients
        self.stages: dict[int, StageGraphs] = {}
        for stage in stages:
            own = loss_fn if stage.loss is not None else None
            stage.graphs = self.stages[stage.index] = StageGraphs(stage, self, own, reason or reason_against(stage))
        for reason in dict.fromkeys(graphs.reason for graphs in self.stages.values() if graphs.reason):
            numbers = ", ".join(str(index) for index, graphs in self.stages.items() if graphs.reason == reason)
            logger.warning("cuda_graphs: stages %s run eagerly, because %s", numbers, reason)

    new_device: Callable[[torch.device], GraphDevice] = staticmethod(GraphDevice)

    @staticmethod
    def supports(device: torch.device) -> bool:
        return device.type == "cuda"

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context for a mini-batch: its work is on the streams of the graphs."""
        with ExitStack() as stack:
            for device in self.devices.values():
                stack.enter_context(device.running())
            yield

    @property
    def fixed_grads(self) -> bool:
        """Whether this step adds its gradients to the fixed tensors."""
        return self.steps > WARMUP_RUNS

    def stash(self, parameters: Iterable[nn.Parameter], *, stash_all: bool, ties: Ties) -> GradStash:
        """The context of a step for the gradients of earlier steps."""
        self.steps += 1
        if not self.fixed_grads:
            return GradStash(parameters, stash_all=stash_all, ties=ties)
        captured = {p for graphs in self.stages.values() if not graphs.reason for p in graphs.parameters}
        if len(self.grads) > len(captured):
            self.grads = {parameter: grad for parameter, grad in self.grads.items() if parameter in captured}
        return FixedGrads(self, captured, parameters, stash_all=stash_all, ties=ties)

    def describe(self) -> str:
        """A line for each stage of this process: its graphs, or why it runs eagerly."""
        return "\n".join(f"stage {index}: {self.stages[index]}" for index in sorted(self.stages))


class FixedGrads(GradStash):
    """Gradients of a step that are added to the same tensors in every step, as graphs need it.

    ``.grad`` is None before a step if the user has set it to None; the tensor is kept, and zeroed for the step. If
    ``.grad`` is another tensor, it gets the sum at the end: it may be a part of a buffer of the user.
    """

    def __init__(self, graphs: CudaGraphs, captured: set[nn.Parameter], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.graphs, self.captured = graphs, captured
        self.fixed: dict[nn.Parameter, tuple[Tensor, int]] = {}  # with its version when the step began
        self.of_caller: dict[nn.Parameter, Tensor] = {}  # gradients of earlier steps in other tensors

    def __enter__(self) -> FixedGrads:
        zeroed = []
        for parameter in self.parameters:
            before = parameter.grad
            if parameter not in self.captured or (before is not None and before.is_sparse):
                self.stash(parameter)
                continue
            fixed = self._fixed_grad(parameter, before)
            if before is None or self.stash_all or parameter in self.tied:
                self.before[parameter] = before.clone() if before is fixed else before
                zeroed.append(fixed)
            elif before is not fixed:
                fixed.copy_(before.detach())
                self.of_caller[parameter] = before
            if before is not fixed:
                set_grad(parameter, fixed)
            assert parameter.grad is not None
            self.fixed[parameter] = parameter.grad, parameter.grad._version
        if zeroed:
            foreach_zero_(zeroed)
        for parameter, (grad, _) in self.fixed.items():
            self.fixed[parameter] = grad, grad._version
        self.graphs.touched.clear()
        return self

    def _fixed_grad(self, parameter: nn.Parameter, before: Tensor | None) -> Tensor:
        dtype = torch.float32 if id(parameter) in fp32_sums else parameter.dtype
        found = self.graphs.grads.get(parameter)
        if found is None or (found.dtype, found.device, found.shape) != (dtype, parameter.device, parameter.shape):
            usable = before is not None and before.dtype is dtype and not before.requires_grad
            found = before if usable else torch.zeros_like(parameter, dtype=dtype)
            assert found is not None
            self.graphs.grads[parameter] = found
        return found

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for parameter, (grad, version) in self.fixed.items():
            touched = parameter in self.graphs.touched or parameter.grad is not grad or grad._version != version
            if not touched and self.before.get(parameter, grad) is None:
                parameter.grad = None
        with torch.no_grad():
            for parameter, before in self.of_caller.items():
                if parameter.grad is not None:
                    parameter.grad = before.copy_(parameter.grad)
        super().__exit__(kind, error, trace)


def reason_against(stage: StageEngine) -> str:
    """Why the actions of a stage can never be captured; an empty text if they may be."""
    if not CudaGraphs.supports(stage.device):
        return f"it is on the device {stage.device}"
    if stage.offload is not None or stage.weights is not None:
        return "its tensors are offloaded to the host"
    if stage.parallel is not None:
        return "parallelize= has changed it"
    if stage.norms is not None and stage.norms.layers:
        return "batchnorm='deferred' collects the statistics of its layers in Python"
    if any(getattr(part, "sparse", False) is True for part in stage.submodules):
        return "an embedding has sparse gradients"
    return ""


class StageGraphs:
    """The actions of one stage: as graphs where they are captured, else those of the engine."""

    def __init__(self, engine: StageEngine, owner: CudaGraphs, loss_fn: Any, reason: str) -> None:
        self.engine, self.owner, self.loss_fn = engine, owner, loss_fn
        self.reason = reason  # why the stage runs eagerly
        self.device = owner.devices.get(engine.device)
        self.modules = self._all_modules()
        self.parameters = _trained(self.modules)
        self.states: list[Any] = []  # the Python state that a forward might change or read
        self.values: list[Any] = []  # of the state, at the beginning of the last run
        self.captured: dict[tuple[Hashable, Any], SlotGraphs] = {}  # by kind of call and slot
        self.kinds: dict[Hashable, set[int]] = {}  # of call, with the runs in which each was eager
        self.left_out = False  # whether there were more kinds than are captured
        self.run = 0
        self.settings: list[Any] = []
        self.changes_buffers: set[Hashable] = set()  # kinds of calls whose recompute restores buffers
        # By kind of call: the draws of a seeded forward, and the gradients of the outputs without data.
        self.draws: dict[Hashable, list[tuple[str, int]]] = {}
        self.grads: dict[Hashable, list[Tensor | None]] = {}
        self.recompute_pool: Any = None

    def _all_modules(self) -> list[nn.Module]:
        return [*self.engine.submodules, *(self.loss_fn.modules() if isinstance(self.loss_fn, nn.Module) else ())]

    def __str__(self) -> str:
        if self.reason:
            return f"eager, because {self.reason}"
        kinds = len({key[0] for key in self.captured})
        more = f"; more than {MAX_KINDS} kinds of calls, the others are eager" if self.left_out else ""
        return f"{len(self.captured)} slots captured for {kinds} kinds of calls{more}"

    def begin_run(self) -> None:
        """Before a run: drop the graphs if the stage has changed since they were captured."""
        self.run += 1
        if self.reason:
            return
        settings, states = _settings(self.modules), self._between_runs()
        changed = any(state.changed_since(value) is not None for state, value in zip(states, self.values, strict=False))
        if changed or settings != self.settings:
            if self.captured:
                logger.info("cuda_graphs: stage %d has changed, and is captured again", self.engine.index)
                for other in self.owner.stages.values():  # it may return other gradients to them
                    other.clear()
            self.clear()
            self.engine.submodules = list(self.engine.module.modules())
            self.modules = self._all_modules()
            self.parameters, settings = _trained(self.modules), _settings(self.modules)
        if not self.captured:  # the state of objects that modules have now
            self.states = find_read_state(self.modules, self.loss_fn)
        self.settings, self.values = settings, [state.read() for state in self._between_runs()]
        hooked = has_global_module_hooks() or any(getattr(m, kind, None) for m in self.modules for kind in _HOOKS)
        if hooked and not self._has_only_rng_hooks():
            self.give_up("its modules have hooks, which do not run in a replay")
        elif any(p._backward_hooks or p._post_accumulate_grad_hooks for p in self.parameters):
            self.give_up("its parameters have hooks, which do not run in a replay")

    def _between_runs(self) -> list[Any]:
        """The Python state that may change between two runs. Random generators always do."""
        return [state for state in self.states if not isinstance(state, GeneratorState)]

    def _has_only_rng_hooks(self) -> bool:
        """Whether all hooks are those by which the stage's random numbers are seeded."""
        rng = self.engine.rng
        hooks = [hook for m in self.modules for kind in _HOOKS for hook in getattr(m, kind, {}).values()]
        seeding = [hook for hook in hooks if rng is not None and getattr(hook, "__self__", None) is rng]
        return not has_global_module_hooks() and len(seeding) == len(hooks)

    def give_up(self, reason: str) -> None:
        """Run the stage eagerly from now on."""
        self.reason = reason
        logger.warning("cuda_graphs: stage %d runs eagerly, because %s", self.engine.index, reason)
        self.clear()

    def clear(self) -> None:
        for learned in (self.captured, self.kinds, self.draws, self.grads):
            learned.clear()
        self.left_out = False

    def close(self) -> None:
        self.clear()
        self.owner.grads.clear()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        kind = slot.graph_kind = None if self.reason else self._kind(microbatch, message, slot)
        graphs = slot.graphs = None if kind is None else self._find(kind, microbatch, message, slot)
        if graphs is not None:
            graphs.forward(microbatch, message, slot)
            return
        if self.owner.fixed_grads and self.engine.index:
            # A stage before this one may be captured, and overwrite its output when its slot is free again.
            message = cloned(message)
        with self._observed(kind, microbatch, message, slot):
            self.engine.forward(microbatch, message, slot)

    def recompute(self, microbatch: int, slot: Slot) -> None:
        if slot.graphs is None:
            self.engine.recompute(microbatch, slot)
        else:
            slot.graphs.recompute(microbatch, slot)

    def backward(self, grads: Grads, slot: Slot) -> None:
        self._backward(self.engine.backward, grads, slot)

    def input_gradient(self, grads: Grads, slot: Slot) -> None:
        self._backward(self.engine.input_gradient, grads, slot)

    def _backward(self, eager: Callable[[Grads, Slot], None], grads: Grads, slot: Slot) -> None:
        missing = [grad is None for grad in grads]
        if slot.graphs is None:
            if slot.graph_kind is not None and not self.reason:
                data = [None if grad is None else torch.empty_like(grad, device="meta") for grad in grads]
                known = self.grads.setdefault(slot.graph_kind, data)
                if missing != [grad is None for grad in known]:
                    self.give_up(_VARYING_GRADIENTS)
            eager(grads, slot)
            return
        if missing != [grad is None for grad in slot.graphs.grads]:
            if not self.reason:
                self.give_up(_VARYING_GRADIENTS)
            if any(grad is not None and old is None for grad, old in zip(grads, slot.graphs.grads, strict=True)):
                raise PipelineError(
                    f"an output of stage {self.engine.index} has a gradient, but had none when the stage was captured "
                    "as a CUDA graph: run the step again, which runs the stage eagerly"
                )
        slot.graphs.backward(grads, slot)
        self.owner.touched |= slot.graphs.touched

    def weight_gradient(self, slot: Slot) -> None:
        if slot.graphs is None:
            self.engine.weight_gradient(slot)
        else:
            slot.graphs.weight_gradient()

    # ── captures ─────────────────────────────────────────────────────────────────────────────────────────────

    def _find(self, kind: Hashable, microbatch: int, message: Message, slot: Slot) -> SlotGraphs | None:
        """The graphs for this call, captured now if its kind is known for long enough; None: run eagerly."""
        key = (kind, slot.graph_key if torch.is_grad_enabled() else None)
        found = self.captured.get(key)
        if found is not None:
            return found
        if kind not in self.kinds:
            if len(self.kinds) < MAX_KINDS:
                self.kinds[kind] = {self.run}
            elif not self.left_out:
                self.left_out = True
                logger.info(
                    "cuda_graphs: stage %d was called with more than %d kinds of inputs; the others run eagerly",
                    self.engine.index,
                    MAX_KINDS,
                )
            return None
        training, runs = torch.is_grad_enabled(), self.kinds[kind]
        ready = not training or (self.owner.fixed_grads and kind in self.grads)
        if len(runs - {self.run}) < WARMUP_RUNS or not ready:
            runs.add(self.run)
            return None
        assert self.device is not None
        if self.recompute_pool is None and slot.saved is not None:
            self.recompute_pool = self.device.new_pool()
        expected = self.draws.get(kind, []), self.grads.get(kind, ()), kind in self.changes_buffers
        graphs = SlotGraphs(self.engine, self.device, slot, message, *expected, self.recompute_pool)
        try:
            graphs.capture(microbatch, message, self.parameters)
        except Exception as error:
            self.give_up(f"it cannot be captured ({first_line(error)})")
            return None
        self.captured[key] = graphs
        return graphs

    def _kind(self, microbatch: int, message: Message, slot: Slot) -> Hashable | None:
        """A value that is equal for calls that launch the same kernels; None for a call that cannot be captured."""
        engine, loss = self.engine, self.engine.loss
        metas = self._metas(message.leaves)
        if metas is None:
            return None
        spec = message.spec if message.spec is None else repr(message.spec)
        variant = engine.microbatches[microbatch].variant if engine.microbatches else None
        layout = tuple(message.wants), tuple(message.shared), tuple(slot.inputs_per_edge), spec, variant
        # Whether outputs get gradients depends on the modes of other stages, too.
        modes = tuple(id(graphs.engine.mode) for graphs in self.owner.stages.values())
        about = (modes, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), metas, layout)
        if loss is None:
            return about
        targets: Any = ()
        if loss.targets:
            leaves, target_spec = flatten(loss.targets[microbatch])
            targets = self._metas(leaves), repr(target_spec)
        if targets and targets[0] is None:
            return None
        flags = loss.training, loss.wants_loss, loss.observes, loss.needs_graph, loss.kept is not None
        return *about, targets, flags, loss.sizes[microbatch], id(loss.rule)

    def _metas(self, leaves: Sequence[Any]) -> tuple[Any, ...] | None:
        metas: list[Any] = []
        for leaf in leaves:
            if type(leaf) is Tensor and leaf.layout is torch.strided and leaf.device == self.engine.device:
                metas.append((leaf.shape, leaf.dtype, leaf.stride()))
            elif isinstance(leaf, PLAIN_TYPES):
                metas.append((type(leaf), leaf))
            else:  # a tensor of the host: Python code may read it without a capture noticing
                self.give_up(f"an input is not a dense tensor on {self.engine.device}, but a {type(leaf).__name__}")
                return None
        return tuple(metas)

    @contextmanager
    def _observed(self, kind: Hashable, microbatch: int, message: Message, slot: Slot) -> Iterator[None]:
        """Around an eager forward: detect effects that a replay would not have."""
        if self.reason:
            yield
            return
        tensors = [leaf for leaf in message.leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [tensor._version for tensor in tensors]
        with generators_lock:  # other stages may draw from the same generators
            before, random = [state.read() for state in self.states], torch.get_rng_state()
            yield
            found = [state.changed_since(value) for state, value in zip(self.states, before, strict=True)]
            draws = not torch.equal(random, torch.get_rng_state())
        rng = self.engine.rng
        seeded = rng is not None and rng.seed is not None
        if rng is not None and seeded:
            self.draws[kind] = rng.draws
        if slot.saved is not None and slot.saved.buffers:
            self.changes_buffers.add(kind)
        if self.run == 1:  # a first forward may fill caches
            return
        changed = [state for state in found if state is not None]
        known = self.engine.microbatches[microbatch] if self.engine.microbatches else None
        if versions != [tensor._version for tensor in tensors]:
            self.give_up("it changes its inputs in place")
        elif changed:
            names = getattr(changed[0], "names", ())
            self.give_up(f"its forward changes Python state ({', '.join(names) or type(changed[0].holder).__name__})")
        elif draws:
            self.give_up("its forward draws random numbers on the CPU")
        elif known is not None and known.known:
            self.give_up("a layer asks for the current micro-batch")
        elif slot.saved is not None and slot.saved.keeper.used:
            self.give_up("a layer keeps values for the recompute by ps.keep")
        elif slot.saved is not None and len(slot.saved.rng_states) > 1 and not seeded:
            self.give_up("its recompute repeats random numbers: pass Pipeline(…, seed=…)")
        elif slot.saved is not None and slot.saved.python_state:
            self.give_up("its recompute restores Python state")


_SETTINGS = (bool, int, float, str, type(None))
_FUNCTIONS = (FunctionType, MethodType, BuiltinFunctionType, functools.partial)  # an activation, a forward


def _settings(modules: Sequence[nn.Module]) -> list[Any]:
    """The parts and tensors of modules, the plain values among their attributes, and torch's global settings."""
    found: list[Any] = [torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()]
    found.append(torch.get_default_dtype())
    for module in modules:
        found += map(id, module._modules.values())
        tensors = *module._parameters.values(), *module._buffers.values()
        found += [_tensor_setting(tensor) for tensor in tensors if tensor is not None]
        for name, value in vars(module).items():
            if name in OF_TORCH:  # the training flag is part of the kind of call
                continue
            kind = type(value)
            if kind in _SETTINGS or (kind is tuple and all(type(item) in _SETTINGS for item in value)):
                found.append(value)
            elif kind in _FUNCTIONS:
                found.append(id(value))
            elif isinstance(value, Tensor):
                found.append(_tensor_setting(value))
    return found


def _tensor_setting(tensor: Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad


def _trained(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    found = {p: None for module in modules for p in module._parameters.values() if p is not None and p.requires_grad}
    return list(found)


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe(stages: Mapping[int, StageEngine]) -> str:
    """The text of ``pipe.describe_graphs()``."""
    owner = next((stage.graphs.owner for stage in stages.values() if isinstance(stage.graphs, StageGraphs)), None)
    return "cuda_graphs is not set: all stages run eagerly" if owner is None else owner.describe()
