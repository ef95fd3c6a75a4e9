"""Random numbers in a stage: what each layer draws, and that a second forward draws the same again.

torch's generators belong to the process, and many threads draw from them. So a module that draws does so alone, under a
lock, and its stream is put in place when it begins:

    with a seed     from the seed, the step, the micro-batch and the module's name; then the generator is as before
    without one     the plain generator; for a forward that will run again, its state is kept, and set again for that

Which modules draw is learned from the first forward in each mode, which runs under a mode of torch's that sees every
operator. After that only these modules are watched.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock._torch import TorchDispatchMode

__all__ = ["RngStates", "StageRng"]

_generators_lock = threading.RLock()

RngStates = list[list[Tensor]]
"""The states of the generators with which a forward began to draw, each time; before them, how it was watched."""


class _CurrentSession(threading.local):
    session: _RngSession | None = None


_current = _CurrentSession()


class StageRng:
    """The modules of one stage that draw random numbers. ``seed=None`` leaves the numbers to the plain generators.

    ``first`` is the number of this replica's first micro-batch among those of all replicas; ``own`` gives the model's
    name of a part that something was wrapped around.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        seed: int | None,
        first: int = 0,
        own: Callable[[str], str] = str,
    ) -> None:
        self.module = module
        self.device = device
        self.seed = seed
        self.first = first
        self.moment = ""  # which step or call this is
        self.names: dict[int, list[str]] = {}
        for name, part in module.named_modules(remove_duplicate=False):
            self.names.setdefault(id(part), []).append(own(name))
        self.sites: dict[int, nn.Module] = {}
        self._learned: list[object] = []  # the modes whose forwards have been watched; few
        self._handles: list[RemovableHandle] = []

    @contextmanager
    def forward(self, mode: object, microbatch: int, draws: RngStates | None, again: bool) -> Iterator[None]:
        """Around a forward: keep what it draws with in ``draws``, or, ``again``, use what is kept there.

        The second run of a forward must be watched as the first one was: ``draws`` remembers that.
        """
        late = not again and not any(known is mode for known in self._learned)
        if draws is not None:
            if again:
                late = draws[0] is _DETECTED
            else:
                draws[:] = [_DETECTED if late else _KNOWN]
        elif not late and not self.sites:
            yield
            return
        session = _RngSession(self, self.first + microbatch, draws, again, late)
        outer, _current.session = _current.session, session
        try:
            if late:
                with self._watching(session):
                    yield
                self._learned.append(mode)
            else:
                session.begin(self.module, id(self.module) in self.sites)
                try:
                    yield
                finally:
                    session.end()
        finally:
            _current.session = outer

    @contextmanager
    def _watching(self, session: _RngSession) -> Iterator[None]:
        handles = [
            handle
            for part in self.module.modules()
            if part is not self.module and not isinstance(part, torch.jit.ScriptModule)  # whose draws are its owner's
            for handle in (
                part.register_forward_pre_hook(session.begin_late),
                part.register_forward_hook(session.end_late, always_call=True),
            )
        ]
        session.begin(self.module, False)
        try:
            with _RandomOpDetector(session):
                yield
        finally:
            session.end()
            for handle in handles:
                handle.remove()

    def found(self, module: nn.Module) -> None:
        """A module was seen to draw: from now on it is watched."""
        if id(module) not in self.sites:
            self.sites[id(module)] = module
            if module is not self.module:  # around the stage itself there is ``forward``
                self._handles.append(module.register_forward_pre_hook(self._begin))
                self._handles.append(module.register_forward_hook(self._end, always_call=True))

    def _begin(self, module: nn.Module, _: Any) -> None:
        session = _current.session
        if session is not None and session.owner is self and not session.late:
            session.begin(module, True)

    def _end(self, *_: Any) -> None:
        session = _current.session
        if session is not None and session.owner is self and not session.late:
            session.end()

    def generators(self) -> list[torch.Generator]:
        found = [torch.default_generator]
        if self.device.type == "cuda":
            found.append(torch.cuda.default_generators[self.device.index or 0])
        return found

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.sites.clear()
        self._learned.clear()


class _RngSession:
    """One forward: the modules that are running, and which of them have begun to draw."""

    def __init__(self, owner: StageRng, microbatch: int, draws: RngStates | None, again: bool, late: bool) -> None:
        self.owner = owner
        self.microbatch = microbatch
        self.draws = draws
        self.kept = iter(draws[1:]) if again and draws is not None else None
        self.late = late
        self.frames: list[_ModuleCall] = []
        self.calls: dict[int, int] = {}
        self.depth = 0  # how many of the frames draw

    def begin(self, module: nn.Module, draws: bool) -> None:
        number = self.calls.get(id(module), 0)
        self.calls[id(module)] = number + 1
        self.frames.append(_ModuleCall(module, number))
        if draws:
            self.draw()

    def begin_late(self, module: nn.Module, _: Any) -> None:
        if _current.session is self:  # another stage, in another thread, may run the same module
            self.begin(module, False)

    def end_late(self, *_: Any) -> None:
        if _current.session is self:
            self.end()

    def draw(self) -> None:
        """The module that is running draws: put its stream in place, unless that has been done."""
        frame = self.frames[-1]
        if frame.before is not None:
            return
        _generators_lock.acquire()
        generators = self.owner.generators()
        frame.before = [generator.get_state() for generator in generators]
        self.depth += 1
        if self.owner.seed is not None:
            key = self._key(frame)
            for generator in generators:
                generator.manual_seed(key)
        elif self.depth == 1 and self.draws is not None:  # what runs inside of it goes on with its stream
            if self.kept is not None:
                for generator, state in zip(generators, next(self.kept), strict=True):
                    generator.set_state(state)
            else:
                self.draws.append(frame.before)

    def end(self) -> None:
        frame = self.frames.pop()
        if frame.before is None:
            return
        self.depth -= 1
        if self.owner.seed is not None or (self.kept is not None and self.depth == 0):
            for generator, state in zip(self.owner.generators(), frame.before, strict=True):
                generator.set_state(state)
        _generators_lock.release()

    def _key(self, frame: _ModuleCall) -> int:
        # A module that stands in several places is called once in each, in their order: they are its names.
        names = self.owner.names[id(frame.module)]
        place, more = names[min(frame.number, len(names) - 1)], max(0, frame.number - len(names) + 1)
        text = f"{self.owner.seed}/{self.owner.moment}/{self.microbatch}/{place}/{more}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class _ModuleCall:
    __slots__ = ("before", "module", "number")

    def __init__(self, module: nn.Module, number: int) -> None:
        self.module = module
        self.number = number
        self.before: list[Tensor] | None = None


class _RandomOpDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and notices those that draw."""

    def __init__(self, session: _RngSession) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.session = session

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.session.owner.found(self.session.frames[-1].module)
            self.session.draw()
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))


_DETECTED: list[Tensor] = []
_KNOWN: list[Tensor] = []
