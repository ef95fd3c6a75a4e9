"""CUDA graphs of the actions of one slot: captures, replays, and the memory that they share.

A graph reads and writes fixed memory. Each slot has its own inputs, saved tensors and outputs, because several
micro-batches are in flight.

A graph must not write to memory that another one still reads. What F, R and I save is in a memory pool of the slot.
Graphs that leave nothing behind share one pool of the device, because all graphs of a device run one after the other:
B and W, and forwards that save nothing. Their results are copied out of it at once. Recomputes of one stage share a
pool, unless one of them comes before the backward of another is over.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock._torch import clear_cublas_workspaces, end_pool_allocation
from penstock.engine.loss import CapturedLoss
from penstock.engine.message import Grads, Message, flatten, unflatten
from penstock.engine.stage import SavedForward, Slot, StageEngine
from penstock.engine.weightgrad import WeightGradQueue

_capture_lock = threading.Lock()  # garbage collection is disabled for all threads during a capture


class GraphDevice:
    """The stream and the memory pools of the graphs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.shared_pool = self.new_pool()  # of graphs that leave nothing behind
        self.workspaces: Callable[[], None] | None = None  # the graph whose memory they are in

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a run: on the stream of the graphs, after the caller's work and before the caller's next work."""
        caller = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def generators(self, count: int) -> list[torch.Generator]:
        """Random streams for the draws of a captured forward, which are seeded before each replay."""
        default = torch.cuda.default_generators[self.device.index or 0]
        return [default.clone_state() for _ in range(count)]

    def capture(
        self, action: Callable[[], None], pool: Any, generators: Sequence[torch.Generator] = ()
    ) -> Callable[[], None]:
        """Capture the kernels that ``action`` launches; the result launches them again."""
        with _capture_lock:
            if self.workspaces is None:
                gc.collect()
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # the memory of the eager steps becomes free for the pools
                self.workspaces = self._capture(self._use_cublas, self.new_pool())
            return self._capture(action, pool, generators)

    def _use_cublas(self) -> None:
        """Allocate the workspaces of cuBLAS, in this thread and in that of backwards, in a pool that is kept.

        torch frees workspaces outside of pools when other code captures graphs (``mode="reduce-overhead"``).
        """
        clear_cublas_workspaces()
        with torch.enable_grad():
            x = torch.zeros(16, 16, device=self.device, requires_grad=True)
            (x @ x).sum().backward()  # type: ignore[no-untyped-call]

    def _capture(
        self, action: Callable[[], None], pool: Any, generators: Sequence[torch.Generator] = ()
    ) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        collecting = gc.isenabled()
        torch.clear_autocast_cache()  # its tensors are in the memory of another graph, or of no graph
        gc.disable()  # it might free tensors of other streams, which a capture forbids
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            action()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # the capture is invalid
                end_pool_allocation(self.device, pool)
            raise
        else:
            graph.capture_end()
        finally:
            torch.clear_autocast_cache()
            if collecting:
                gc.enable()
        return graph.replay


class SlotGraphs:
    """The graphs of one slot for one kind of call, and the memory that they read and write."""

    def __init__(
        self,
        engine: StageEngine,
        device: GraphDevice,
        slot: Slot,
        message: Message,
        draws: list[tuple[str, int]],
        grads: Sequence[Tensor | None],
        changes_buffers: bool,
        recompute_pool: Any,
    ) -> None:
        """The graphs for calls like that of ``message`` in ``slot``.

        ``draws`` are the calls of modules that draw seeded random numbers, ``grads`` the gradients of the outputs
        without data, and ``recompute_pool`` the pool of the stage's recomputes. If a forward ``changes_buffers``, their
        values before it are saved for the recompute.
        """
        self.engine, self.device = engine, device
        self.training = torch.is_grad_enabled()
        recomputed = self.training and slot.saved is not None
        queue = self.engine.new_queue() if self.training and slot.queue is not None else None
        self.slot = Slot(queue, SavedForward() if recomputed else None, inputs_per_edge=slot.inputs_per_edge)
        self.message = message._replace(leaves=_fixed(message.leaves))
        self.inputs = _writable(self.message.leaves)
        self.messages: list[Message] = []
        # A forward that saves nothing is not followed by a backward that keeps its slot from being used again.
        self.clones_outputs = recomputed or not self.training
        self.loss: CapturedLoss | None = None  # of the last stage
        self.rule = None if self.engine.loss is None else self.engine.loss.rule  # kept alive, its id is in the kind
        self.target: Any = None
        self.targets: list[tuple[int, Tensor]] = []  # the tensors in it
        self.count: Any = None  # of elements of the target that count, if known beforehand
        self.draws = draws
        self.streams: dict[str, list[torch.Generator]] = {}  # of the draws, by kind of action
        self.grads = _fixed(grads, engine.device)
        self.written_grads = _writable(self.grads)
        self.input_grads: list[Grads] = []
        self.touched: set[nn.Parameter] = set()
        self.replays: dict[str, Callable[[], None]] = {}  # by kind of action
        overlap = slot.graph_key is None or slot.graph_key[-1]
        self.pool = recompute_pool if recomputed and not changes_buffers and not overlap else device.new_pool()
        self.forward_pool = device.shared_pool if self.clones_outputs and not changes_buffers else self.pool

    def capture(self, microbatch: int, message: Message, parameters: Sequence[nn.Parameter]) -> None:
        """Capture all actions of the slot, and note the ``parameters`` to whose gradients they add.

        Nothing has run yet: after an error, the micro-batch can run eagerly.
        """
        engine, slot, loss = self.engine, self.slot, self.engine.loss
        if loss is not None:
            if loss.targets:
                leaves, spec = flatten(loss.targets[microbatch])
                leaves = _fixed(leaves)
                self.targets, self.target = _writable(leaves), unflatten(leaves, spec)
            (self.count,) = _fixed([loss.weights.counts[microbatch]])
        self._write_inputs(microbatch, message.leaves)
        own = self.message._replace(leaves=list(self.message.leaves))
        self._capture_forward("F", lambda: engine.forward(microbatch, own, slot), microbatch, self.forward_pool)
        self.messages = [message for message in slot.messages if message is not None]
        if not self.training:
            return
        if slot.saved is not None:
            self._capture_forward("R", lambda: engine.recompute(microbatch, slot), microbatch, self.pool)
        grads = [(p, p.grad, p.grad._version) for p in parameters if p.grad is not None]
        shared = self.device.shared_pool
        _check_leaves(slot.roots, {id(tensor) for tensor in (*parameters, *slot.inputs)})
        if slot.queue is None:
            self.replays["B"] = self.device.capture(lambda: engine.backward(self.grads, slot), shared)
        else:
            self.replays["B"] = self.device.capture(lambda: engine.input_gradient(self.grads, slot), self.pool)
            self.replays["W"] = lambda: None  # a compiled stage defers nothing
            if len(slot.queue):
                _check_deferred(slot.queue, set(parameters))
                self.replays["W"] = self.device.capture(lambda: engine.weight_gradient(slot), shared)
        self.input_grads = slot.grads
        self.touched = {p for p, grad, version in grads if grad._version != version}

    def _capture_forward(self, kind: str, action: Callable[[], None], microbatch: int, pool: Any) -> None:
        """Capture a forward, with a random stream for each draw of a seeded one."""
        rng, loss = self.engine.rng, self.engine.loss
        with ExitStack() as stack:
            if loss is not None:
                captured = stack.enter_context(loss.capture(microbatch, self.target, self.count))
                self.loss = self.loss or captured  # that of F: a recompute notes no results
            if rng is None or not self.draws:
                self.replays[kind] = self.device.capture(action, pool)
                return
            self.streams[kind] = generators = self.device.generators(len(self.draws))
            rng.captured = iter(generators)
            stack.callback(setattr, rng, "captured", None)
            self.replays[kind] = self.device.capture(action, pool, generators)
            if rng.draws != self.draws:
                raise RuntimeError("its modules draw random numbers in another order than before")

    # ── replays ──────────────────────────────────────────────────────────────────────────────────────────────

    def _write_inputs(self, microbatch: int, leaves: Sequence[Any]) -> None:
        for i, tensor in self.inputs:
            tensor.copy_(leaves[i])
        loss = self.engine.loss
        if loss is not None:
            targets = flatten(loss.targets[microbatch])[0] if self.targets else ()
            for i, tensor in self.targets:
                tensor.copy_(targets[i])
            if isinstance(self.count, Tensor):
                self.count.copy_(torch.as_tensor(loss.weights.counts[microbatch]))

    def forward(self, microbatch: int, message: Message, slot: Slot) -> None:
        self._write_inputs(microbatch, message.leaves)
        self._seed("F", microbatch)
        self.replays["F"]()
        # Without gradients, nothing on the GPU orders the next replay after a copy of this output to another device.
        slot.messages = [
            cloned(m) if self.clones_outputs or not m.wants else m._replace(leaves=list(m.leaves))
            for m in self.messages
        ]
        if self.loss is not None and self.engine.loss is not None:
            self.engine.loss.replayed(microbatch, self.loss)

    def recompute(self, microbatch: int, slot: Slot) -> None:
        self._seed("R", microbatch)
        self.replays["R"]()

    def backward(self, grads: Grads, slot: Slot) -> None:
        """The whole backward, or its first half if the slot has a queue for the weight gradients."""
        for i, tensor in self.written_grads:
            grad = grads[i]
            tensor.zero_() if grad is None else tensor.copy_(grad)
        self.replays["B"]()
        # The next replay may come before the stage before this one has read them.
        slot.grads = [[None if grad is None else grad.clone() for grad in row] for row in self.input_grads]

    def weight_gradient(self) -> None:
        self.replays["W"]()

    def _seed(self, kind: str, microbatch: int) -> None:
        rng = self.engine.rng
        if rng is not None and kind in self.streams:
            for (name, repeat), generator in zip(self.draws, self.streams[kind], strict=True):
                generator.manual_seed(rng.key(rng.first + microbatch, name, repeat))


_FOREIGN = "its backward adds to the gradient of a tensor that is not a parameter of its modules"


def _check_leaves(roots: Sequence[GradientEdge], known: set[int]) -> None:
    """A graph may add only to gradients in fixed memory: those of tensors with these identities."""
    nodes = dict.fromkeys(root.node for root in roots)
    queue = list(nodes)
    while queue:
        node = queue.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(_FOREIGN)
        inner = [source for source, _ in node.next_functions if source is not None and source not in nodes]
        nodes.update(dict.fromkeys(inner))
        queue += dict.fromkeys(inner)


def _check_deferred(queue: WeightGradQueue, known: set[nn.Parameter]) -> None:
    for _, entry in queue.entries:
        if any(isinstance(x, nn.Parameter) and x.requires_grad and x not in known for x in entry):
            raise RuntimeError(_FOREIGN)


def _fixed(values: Sequence[Any], device: torch.device | None = None) -> list[Any]:
    """The fixed memory that a graph reads instead of these tensors."""
    return [
        torch.empty_like(value, device=device, requires_grad=False) if isinstance(value, Tensor) else value
        for value in values
    ]


def _writable(values: Sequence[Any]) -> list[tuple[int, Tensor]]:
    """The tensors among ``values`` without their version counters: autograd does not see that they are written."""
    return [(i, value.data) for i, value in enumerate(values) if isinstance(value, Tensor)]


def cloned(message: Message) -> Message:
    return message._replace(leaves=[leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in message.leaves])
