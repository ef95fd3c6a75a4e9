"""One call of the model's own forward in one stage of its trunk: entered at the first block, left after the last.

    ENTERING ──▶ BETWEEN ⇄ RUNNING ──▶ LEAVING      a stage in the middle, of blocks 2 and 3
    embed 0 1    ▲          2 3         anything
                 └ block 1 gives what the stage before sent

While the forward is on its way to the stage's first block, it computes on blanks: zeros in the place of what other
stages have computed. What is made of a blank is a blank; what is not (masks, positions, rotary tables) is as in the
whole model. A blank that reaches a block of this stage, or anything after it, is an error: it would have changed the
result. Random numbers are not drawn on the way, for the whole model would not draw them twice.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.hooks import RemovableHandle

from penstock.errors import PlanError
from penstock.split.trunk.blank import PLAIN, Blanks, describe, tensors
from penstock.split.trunk.calls import (
    ABOUT_GRADIENTS,
    DECIDES,
    FIRST_ONLY,
    SHAPE_ONLY,
    draws,
    in_reentrant_checkpoint,
    user_line,
    writes,
)


class Leave(BaseException):
    """Leaves the model's forward after the stage's last block. Not an ``Exception``: forwards may catch those."""


class Phase(Enum):
    ENTERING = "on the way to the first block"
    BETWEEN = "outside the blocks"
    RUNNING = "in a block"
    LEAVING = "after the last block"
    OVER = "the forward was left"


_DRAWN = "random numbers, drawn"


class Run(TorchFunctionMode):
    """The state of one call. It sees every torch function that is called outside the stage's own blocks."""

    def __init__(
        self, stage: int, names: Sequence[str], first: int, last: int, received: Any, entered: Callable[[Run], None]
    ) -> None:
        super().__init__()
        self.stage = stage
        self.names = names
        self.first, self.last = first, last
        self.phase = Phase.BETWEEN if first == 0 else Phase.ENTERING
        self.blanks = Blanks()
        self.blanks.like = self.received = received
        self.entered = entered
        self.sent: Any = None
        self.next = 0
        self.grad = torch.is_grad_enabled()
        self.loops: Sequence[tuple[str, int, int]] = ()
        self.gave: dict[str, list[Any]] = {}
        """The shapes of what the parts before the trunk gave in the first stage, by their names."""

    @property
    def entering(self) -> bool:
        return self.phase is Phase.ENTERING

    # ── the blocks ───────────────────────────────────────────────────────────────────────────────────────────────

    def block(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward calls block number ``index``."""
        if self.phase is Phase.OVER:  # a checkpoint around the block, in backward
            return self.received if index < self.first else module(*args, **kwargs)
        if index != self.next:
            raise PlanError(self._out_of_order(index))
        self.next += 1
        if index > self.last:
            raise Leave
        return self._skip(index) if index < self.first else self._through(index, module, args, kwargs)

    def _skip(self, index: int) -> Any:
        """A block of an earlier stage: the last of them gives what was received."""
        if index < self.first - 1:
            return self.blanks.tree_blank(self.names[index])
        received = self.blanks.like
        self.phase = Phase.BETWEEN
        self.entered(self)
        self.blanks.forget()
        return received

    def _through(self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = self._run(self.names[index], module, args, kwargs)
        if index == self.last and self.last < len(self.names) - 1:
            if torch.is_grad_enabled() != self.grad and in_reentrant_checkpoint():
                raise PlanError(
                    f"the model's forward runs {self.names[index]}, the last block of stage {self.stage}, in a "
                    "reentrant checkpoint, whose gradient cannot be sent on: use checkpoint(..., use_reentrant=False)"
                )
            self.sent = self._tree(output)
            self.phase = Phase.LEAVING
        return output

    def _run(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block or a part that is given no blanks, as fast as in the whole model: nothing in it is looked at."""
        for key, value in (*enumerate(args), *kwargs.items()):
            origin = self.blanks.origin(value)
            if origin is not None:
                which = f"argument {key}" if isinstance(key, int) else key
                raise PlanError(self._lost(f"{which} of {name}", origin))
        self.phase = Phase.RUNNING
        aside = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        if aside:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        try:
            return module(*args, **kwargs)
        finally:
            if aside:
                self.__enter__()  # type: ignore[no-untyped-call]
            self.phase = Phase.BETWEEN

    def _tree(self, output: Any) -> Any:
        """What a block returned, if it can be sent."""
        for leaf in pytree.tree_leaves(output):
            if not (leaf is None or isinstance(leaf, (Tensor, *PLAIN))):
                raise PlanError(
                    f"{self.names[self.last]} returned a {type(leaf).__name__}, which stage {self.stage} cannot send "
                    "on: let blocks return tensors, None and plain values, in tuples, lists and dicts"
                )
        return output

    def _out_of_order(self, index: int) -> str:
        name = self.names[index]
        if index < self.next:
            what = f"runs {name} again, after {self.names[self.next - 1]}"
        else:
            what = f"skips {self.names[self.next]} and runs {name}"
        return (
            f"the model's forward {what}{user_line()}, in stage {self.stage}: the blocks of a trunk must run once "
            "each, in their order. Turn off what leaves blocks out (layerdrop), or cut this model another way"
        )

    def unfinished(self, comes: str) -> str:
        """What is wrong where the forward came to its end, or to what is after its blocks, before it ran them."""
        never = f"never runs {self.names[0]}, the first of its blocks"
        if self.next > 0:
            never = f"{comes} after {self.names[self.next - 1]}, and never runs {self.names[self.next]}"
        return f"the model's forward {never}: the blocks of a trunk must run once each, in their order"

    def finished(self) -> None:
        """The forward came to its end."""
        if self.next < len(self.names):
            raise PlanError(self.unfinished("ends"))

    def where(self) -> str:
        return "before the blocks" if self.next == 0 else f"after {self.names[self.next - 1]}"

    def output(self, output: Any) -> Any:
        """What the forward of the last stage gave, which other stages may have a share in."""
        origin = self.blanks.origin(output)
        if origin is None:
            return output
        if not (is_dataclass(output) and isinstance(output, dict)):
            raise PlanError(self._lost("a part of the model's output", origin))
        for key, value in list(output.items()):  # Hugging Face: a field that is None was not asked for
            if self.blanks.origin(value) is not None:
                output[key] = None
        return output

    def part(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A part before the trunk, in the first stage."""
        if self.phase is not Phase.BETWEEN:
            return module(*args, **kwargs)
        output = self._run(name, module, args, kwargs)
        if self.next == 0:
            self.gave.setdefault(name, []).append(describe(output))
        return output

    def part_blank(self, name: str) -> Any:
        """The same part on the way to another stage's first block."""
        gave = self.gave.get(name)
        description = gave.pop(0) if gave else None
        if description is None:  # its use before the trunk was not seen
            return self.blanks.hidden_blank(name)
        return self.blanks.described_blank(description, name)

    # ── what the forward does outside the blocks ─────────────────────────────────────────────────────────────────

    def _lost(self, what: str, origin: str) -> str:
        return (
            f"{what} is computed from {origin}{user_line()}, which stage {self.stage} does not have: only what the "
            "blocks return goes from stage to stage. Let each block take it and return it along with the hidden "
            "state, compute it inside the blocks, or cut this model another way"
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        phase = self.phase
        if phase is Phase.RUNNING or phase is Phase.OVER:
            return func(*args, **kwargs)
        if phase is Phase.LEAVING:
            raise Leave
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute: most are of the outside, such as the shape
            value = func(*args, **kwargs)
            if not isinstance(value, Tensor):
                return value
        if phase is Phase.ENTERING and draws(name, args, kwargs):
            return self._undrawn(func, name, args, kwargs)
        if name in SHAPE_ONLY:
            return func(*args, **kwargs)
        origin = self.blanks.origin(args[:1] if name in FIRST_ONLY else args[1:] if name == "new_tensor" else args)
        if origin is None and (not kwargs or (origin := self.blanks.origin(kwargs)) is None):
            return func(*args, **kwargs)
        return self._with_blank(func, name, origin, args, kwargs)

    def _with_blank(
        self, func: Callable[..., Any], name: str, origin: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function that a blank is given to gives a blank. After the stage's first block nothing may use one."""
        if name in DECIDES and not (origin.startswith(_DRAWN) and self._in_loop()):
            raise PlanError(self._lost(f"what the forward decides by {name}()", origin))
        if self.entering and writes(name) and args and self.blanks.origin(args[0]) is None:
            return self.blanks.mark(args[0], origin)  # a buffer, or an argument: it is not to be spoilt
        if self.entering and name in ABOUT_GRADIENTS:
            return RemovableHandle(OrderedDict())
        result = func(*args, **kwargs)
        if name == "__iter__":
            return iter(self.blanks.mark(list(result), origin))
        if self.phase is Phase.BETWEEN and any(True for _ in tensors(result)):
            raise PlanError(self._lost(f"a value that is used {self.where()}", origin))
        return self.blanks.mark(result, origin)

    def _undrawn(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A blank instead of random numbers."""
        origin = self.blanks.origin((args, kwargs)) or f"{_DRAWN} by {name}{user_line()}"
        if "dropout" in name:
            value = args[0] if args else kwargs["input"]
            return self.blanks.mark(value.view_as(value), origin)
        hidden = self.blanks.hidden()
        with torch.random.fork_rng([hidden.device] if hidden is not None and hidden.is_cuda else []):
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and result.ndim == 0 and result.is_floating_point():
            result.fill_(1.0)  # a coin tossed for a block of an earlier stage: this stage does not leave it out
        return self.blanks.mark(result, origin)

    def _in_loop(self) -> bool:
        """Whether the forward is between its blocks, where a decision is about the next block."""
        frame = sys._getframe(3)
        for _ in range(4):
            for file, first, last in self.loops:
                if frame.f_code.co_filename == file and first <= frame.f_lineno <= last:
                    return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False
