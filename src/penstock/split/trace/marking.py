"""The marks that a forward meets while it is recorded, and the layer of each step that follows from them."""

from __future__ import annotations

from typing import Any

from torch import nn

from penstock.errors import PlanError
from penstock.split.marks import Block, CutPoint, cut_points
from penstock.split.trace.recording import Recording
from penstock.split.trace.state import user_line


class Marking:
    """Follows the marks of one forward. With ``silent``, modules begin layers and marks do nothing."""

    def __init__(self, model: nn.Module, silent: bool, result: Recording) -> None:
        self.cut_points = cut_points(model)
        self.silent = silent
        self.layer: str | None = None
        self.open: list[str | None] = []
        self.numbers: dict[Block, str] = {}  # of the blocks without names
        self.path = [""]  # of the modules whose forwards are running
        self.result = result

    def mark(self, point: CutPoint | None, value: Any) -> Any:
        if self.silent:
            return value
        where, result = user_line(), self.result
        if point is None:
            line = where.rpartition("/")[2]
            seen = sum(name.partition("#")[0] == f"cut at {line}" for name in result.order)
            name = f"cut at {line}" + (f"#{seen + 1}" if seen else "")
        else:
            name = self.cut_points.get(id(point), f"CutPoint at {where}")
            if id(point) in result.points:
                raise PlanError(
                    f"the CutPoint {name} is used twice, at {result.lines[name]} and at {where}: "
                    "each is used once; make one for each place"
                )
            result.points.add(id(point))
        self._kind("cuts", where)
        self.begin_layer(name, where)
        return value

    def begin_layer(self, name: str, where: str) -> None:
        self.result.order.append(name)
        self.result.marked |= set(self.path)
        self.result.lines.setdefault(name, where)
        self.layer = name

    def enter(self, block: Block) -> None:
        self.open.append(self.layer)
        self.begin(block)

    def leave(self) -> None:
        outer = self.open.pop()
        if self.open and outer is not None:  # within another block; after the outermost, its name stays
            self.layer = outer

    def begin(self, block: Block) -> None:
        if self.silent:
            return
        where, result = user_line(), self.result
        name = block.name or self.numbers.setdefault(block, str(len(self.numbers)))
        self._kind("blocks", where)
        result.marked |= set(self.path)
        if name not in result.lines:
            self.begin_layer(name, where)
        if block.device is not None and result.devices.setdefault(name, block.device) != block.device:
            raise PlanError(
                f"block {name!r} is marked for {result.devices[name]} and, at {where}, for {block.device}: "
                "a block has one device"
            )
        self.layer = name

    def _kind(self, kind: str, where: str) -> None:
        if self.result.kind not in ("", kind):
            first = self.result.lines[self.result.order[0]]
            raise PlanError(f"the model is marked with cut points and with blocks ({first}, {where}): use one of them")
        self.result.kind = kind
