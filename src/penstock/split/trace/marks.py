"""The marks that a forward meets while it is traced, and the layer that each operation is in because of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from penstock.errors import PlanError
from penstock.split.marks import Block, CutPoint, cut_points
from penstock.split.trace.call import Call
from penstock.split.trace.state import user_line


@dataclass
class Recording:
    """A forward, recorded."""

    call: Call
    graph: fx.Graph
    kind: str = ""
    order: list[str] = field(default_factory=list)
    """The marks in the order in which they were met, or the blocks in the order of their first entry."""
    where: dict[str, str] = field(default_factory=dict)
    devices: dict[str, str] = field(default_factory=dict)
    expanded: set[str] = field(default_factory=set)
    """The modules that were traced through."""
    entered: set[str] = field(default_factory=set)
    """These, and the modules that lead to others that are called: some method of theirs may have run."""
    placed: dict[str | None, str] = field(default_factory=dict)
    """The layers of the line that the marks begin; None: what comes before any."""
    constants: dict[str, Any] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


class Marking:
    """Follows the marks of one forward. With ``silent``, modules and not marks begin layers: marks do nothing."""

    def __init__(self, model: nn.Module, silent: bool) -> None:
        self.points = cut_points(model)
        self.silent = silent
        self.layer: str | None = None
        self.open: list[str | None] = []
        self.numbers: dict[Block, str] = {}  # of the blocks without names
        self.met = 0
        self.result: Recording

    def mark(self, point: CutPoint | None, value: Any) -> Any:
        if self.silent:
            return value
        where = user_line()
        if point is None:
            line = where.rpartition("/")[2]
            seen = sum(name.partition("#")[0] == f"cut at {line}" for name in self.result.order)
            name = f"cut at {line}" + (f"#{seen + 1}" if seen else "")
        else:
            name = self.points.get(id(point), f"CutPoint at {where}")
            if id(point) in self.result.used:
                raise PlanError(
                    f"the CutPoint {name} is used twice, at {self.result.where[name]} and at {where}: "
                    "each is used once; make one for each place"
                )
            self.result.used.add(id(point))
        self._kind("cuts", where)
        self.result.order.append(name)
        self.result.where[name] = where
        self.layer = name
        self.met += 1
        return value

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
        where = user_line()
        name = block.name or self.numbers.setdefault(block, str(len(self.numbers)))
        self._kind("blocks", where)
        if name not in self.result.where:
            self.result.order.append(name)
            self.result.where[name] = where
        if block.device is not None and self.result.devices.setdefault(name, block.device) != block.device:
            raise PlanError(
                f"block {name!r} is marked for {self.result.devices[name]} and, at {where}, for {block.device}: "
                "a block has one device"
            )
        self.met += name != self.layer
        self.layer = name

    def _kind(self, kind: str, where: str) -> None:
        if self.result.kind not in ("", kind):
            first = self.result.where[self.result.order[0]]
            raise PlanError(f"the model is marked with cut points and with blocks ({first}, {where}): use one of them")
        self.result.kind = kind
