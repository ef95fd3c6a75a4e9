"""Random numbers in a stage: reproducible per module and micro-batch, and repeated exactly by a recompute.

torch's default generators belong to the process and stages run in many threads. A module that draws random numbers
therefore runs under a lock, and its stream is set when it begins:

    with a seed     from the seed, the step, the micro-batch and the module's name; then the generators are restored
    without a seed  the default generators; for a forward that will be recomputed their state is saved, and set again

Which modules draw is learned from the first forward in each mode, which runs under a dispatch mode that sees every
operator. Later forwards only have hooks on these modules.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from penstock._torch import TorchDispatchMode
from penstock.engine.forward_context import forward_state

generators_lock = threading.RLock()

RngStates = list[list[Tensor]]
"""Of one forward: ``_LEARNING`` or ``_LEARNED``, then the generator states at each module that began to draw."""

_LEARNING: list[Tensor] = []
_LEARNED: list[Tensor] = []


class StageRng:
    """The modules of one stage that draw random numbers. ``seed=None`` leaves the default generators' streams as is.

    ``first`` is the number of this replica's first micro-batch among those of all replicas. ``fqn`` maps a module's
    path in the stage to its name in the model, without names of wrappers.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, seed: int | None, first: int = 0, fqn: Callable[[str], str] = str
    ) -> None:
        self.module = module
        self.device = device
        self.seed = seed
        self.first = first
        self.run_name = ""  # of the step or call, a part of every key
        self.names: dict[int, list[str]] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            self.names.setdefault(id(part), []).append(fqn(name))
        self.drawing: set[int] = set()  # identities of modules that were seen to draw
        self.draws: list[tuple[str, int]] = []  # of the last seeded forward: modules, with a number
        self.captured: Iterator[torch.Generator] | None = None  # set in a capture: for its draws, in order
        self._learned: list[object] = []  # modes whose first forward has run
        self._handles: dict[int, list[RemovableHandle]] = {}  # by module: all during a first forward, then the drawing

    @contextmanager
    def forward(self, mode: object, microbatch: int, states: RngStates | None, recomputing: bool) -> Iterator[None]:
        """Around a forward: save generator states in ``states``; when ``recomputing``, draw from those saved there.

        A recompute detects draws in the way the first run did, which ``states`` records.
        """
        learning = not recomputing and not any(known is mode for known in self._learned)
        if states is not None:
            if recomputing:
                learning = states[0] is _LEARNING
            else:
                states[:] = [_LEARNING if learning else _LEARNED]
        elif not learning and not self.drawing:
            yield
            return
        self.draws = []
        session = _RngSession(self, self.first + microbatch, states, recomputing, learning)
        session.enter_module(self.module, not learning and id(self.module) in self.drawing)
        outer, forward_state.rng_session = forward_state.rng_session, session
        try:
            if learning:
                with self._hooked_modules(), _RandomOpDetector(session):
                    yield
                self._learned.append(mode)
            else:
                yield
        finally:
            session.exit_module()
            forward_state.rng_session = outer

    @contextmanager
    def _hooked_modules(self) -> Iterator[None]:
        """All modules have hooks, and afterwards those that draw; ``forward`` covers the stage's own module."""
        for part in self.module.modules():
            # A scripted module takes no hooks: its draws count as its parent's.
            if part is not self.module and id(part) not in self._handles and not isinstance(part, ScriptModule):
                self._handles[id(part)] = [
                    part.register_forward_pre_hook(self._pre_hook),
                    part.register_forward_hook(self._hook, always_call=True),
                ]
        try:
            yield
        finally:
            self._remove_hooks(self._handles.keys() - self.drawing)

    def _pre_hook(self, module: nn.Module, _: Any) -> None:
        session = forward_state.rng_session
        if session is not None and session.rng is self:
            session.enter_module(module, not session.learning)

    def _hook(self, *_: Any) -> None:
        session = forward_state.rng_session
        if session is not None and session.rng is self:
            session.exit_module()

    def _remove_hooks(self, keys: Iterable[int]) -> None:
        for key in list(keys):
            for handle in self._handles.pop(key):
                handle.remove()

    def key(self, microbatch: int, name: str, repeat: int) -> int:
        """The seed of one call of a module in a forward."""
        text = f"{self.seed}/{self.run_name}/{microbatch}/{name}/{repeat}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def generators(self) -> list[torch.Generator]:
        if self.device.type == "cuda":
            return [torch.default_generator, torch.cuda.default_generators[self.device.index or 0]]
        return [torch.default_generator]

    def close(self) -> None:
        self._remove_hooks(self._handles)
        self.drawing.clear()
        self._learned.clear()


class _RngSession:
    """One forward: the stack of modules that are running, and which of them have begun to draw."""

    def __init__(
        self, rng: StageRng, microbatch: int, states: RngStates | None, recomputing: bool, learning: bool
    ) -> None:
        self.rng = rng
        self.microbatch = microbatch
        self.states = states
        self.saved = iter(states[1:]) if recomputing and states is not None else None
        self.learning = learning
        self.stack: list[_ModuleCall] = []
        self.num_calls: dict[int, int] = {}
        self.depth = 0  # number of modules on the stack that have begun to draw

    def enter_module(self, module: nn.Module, draws: bool) -> None:
        number = self.num_calls.get(id(module), 0)
        self.num_calls[id(module)] = number + 1
        self.stack.append(_ModuleCall(module, number))
        if draws:
            self.begin_drawing()

    def begin_drawing(self) -> None:
        """Take the lock and set the stream of the module on top of the stack, once per call."""
        call = self.stack[-1]
        if call.before is not None:
            return
        generators_lock.acquire()
        generators, captured = self.rng.generators(), self.rng.captured
        if captured is None:
            call.before = [generator.get_state() for generator in generators]
        else:
            call.outer = generators[-1].graphsafe_get_state()
            call.before = []
        self.depth += 1
        if self.rng.seed is not None:
            # A module that is used in several places is called once in each, in the order of its names.
            names = self.rng.names[id(call.module)]
            name, repeat = names[min(call.number, len(names) - 1)], max(0, call.number - len(names) + 1)
            self.rng.draws.append((name, repeat))
            if captured is not None:
                generators[-1].graphsafe_set_state(next(captured))
                return
            for generator in generators:
                generator.manual_seed(self.rng.key(self.microbatch, name, repeat))
        elif self.depth == 1 and self.states is not None:  # modules inside it continue its stream
            if self.saved is not None:
                for generator, state in zip(generators, next(self.saved), strict=True):
                    generator.set_state(state)
            else:
                self.states.append(call.before)

    def exit_module(self) -> None:
        call = self.stack.pop()
        if call.before is None:
            return
        self.depth -= 1
        if self.rng.captured is not None:
            assert call.outer is not None
            self.rng.generators()[-1].graphsafe_set_state(call.outer)
        elif self.rng.seed is not None or (self.saved is not None and self.depth == 0):
            for generator, state in zip(self.rng.generators(), call.before, strict=True):
                generator.set_state(state)
        generators_lock.release()


@dataclass(slots=True)
class _ModuleCall:
    module: nn.Module
    number: int
    before: list[Tensor] | None = None  # generator states when it began to draw
    outer: torch.Generator | None = None  # in a capture: the generator until then


class _RandomOpDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator of a forward; one that draws marks the module that is running."""

    def __init__(self, session: _RngSession) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.session.rng.drawing.add(id(self.session.stack[-1].module))
            self.session.begin_drawing()
        return func(*args, **(kwargs or {}))
