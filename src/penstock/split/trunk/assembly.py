"""The containers that one call of a stage runs: like the model's own, with this stage's parts in them.

They are made for each call, so that their attributes are the model's of now, and calls do not meet. What the forward
writes into them goes back to the model, unless it was written on the way to the stage's first block: that is for the
stages before.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import nn

from penstock.split.trunk.layout import TORCHS_OWN, Layout
from penstock.split.trunk.parts import Gate, Part, StandIn
from penstock.split.trunk.run import Run
from penstock.split.trunk.source import AFTER, join


class Assembly:
    """The containers of one call. ``stage`` has the parts that are its own under the model's names."""

    def __init__(self, layout: Layout, stage: nn.Module) -> None:
        self.layout = layout
        self.stage = stage
        self.built: dict[str, nn.Module] = {}
        self.seen: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}

    def build(self, prefix: str, run: Run) -> nn.Module:
        """A container of its class, with its attributes of now, and its parts or what stands in for them."""
        original = self.layout.containers[prefix]
        mine = self.stage.get_submodule(prefix)
        container: nn.Module = object.__new__(type(original))
        state = {name: value for name, value in original.__dict__.items() if name in TORCHS_OWN}
        for name, value in self.layout.attributes(prefix).items():
            bound = isinstance(value, MethodType) and value.__self__ is original
            state[name] = MethodType(value.__func__, container) if bound else value
        state["_modules"] = {
            name: None if module is None else self._part(prefix, name, i, module, mine._modules.get(name), run)
            for i, (name, module) in enumerate(original._modules.items())
        }
        for kind in ("_parameters", "_buffers"):
            own = getattr(mine, kind)
            state[kind] = {
                name: own.get(name)
                if tensor is None or name in own
                else run.blanks.shape_blank(tensor.shape, tensor.dtype, join(prefix, name))
                for name, tensor in getattr(original, kind).items()
            }
        container.__dict__.update(state)
        self.built[prefix] = container
        return container

    def _part(self, prefix: str, name: str, i: int, module: nn.Module, own: nn.Module | None, run: Run) -> Any:
        full = join(prefix, name)
        if prefix == self.layout.path:
            return Gate(run, module if own is None else own, full, i)
        if full in self.layout.containers:
            return self.build(full, run)
        if full not in self.layout.stateful:
            return module if own is None else own
        late = self.layout.places(prefix, name) == {AFTER}
        if own is not None and run.first == 0:
            return own if late else Part(run, own, full)
        return StandIn(run, module if own is None else own, full, own is not None, late)

    def entered(self, run: Run) -> None:
        """What is written from now on is this stage's to write. Of what was written before, its copies of buffers."""
        for prefix, built in self.built.items():
            own = self.stage.get_submodule(prefix)._buffers
            own.update({name: built._buffers[name] for name in own if run.blanks.origin(built._buffers[name]) is None})
        self.seen = {prefix: (dict(built.__dict__), dict(built._buffers)) for prefix, built in self.built.items()}

    def forget(self) -> None:
        """The containers, their parts and this hold each other: let go."""
        self.built, self.seen = {}, {}

    def write_back(self) -> None:
        for prefix, (attributes, buffers) in self.seen.items():
            built = self.built[prefix]
            for name, value in built.__dict__.items():
                if name not in TORCHS_OWN and attributes.get(name, attributes) is not value:
                    self.layout.write(prefix, name, value)
            for name, buffer in built._buffers.items():
                if buffers.get(name, buffers) is not buffer:
                    self.layout.write_buffer(prefix, name, buffers.get(name), buffer)
                    self.stage.get_submodule(prefix)._buffers[name] = buffer
