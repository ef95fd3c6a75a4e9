"""Which parameters, buffers and modules belong to which layer of a traced model, under every name they have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from penstock.split.lazy import members
from penstock.split.trace.marks import Recording
from penstock.split.trace.segments import layer_of, small


class Members:
    """What the layers of a model hold.

    A layer holds the modules that it calls and the parameters that it reads, in any of the recorded kinds of call. What
    none uses is held by the layer whose own names are most like its own, so that no state is lost.
    """

    def __init__(self, model: nn.Module, recordings: Iterable[Recording], layers: Sequence[str]) -> None:
        self.model = model
        self.aliases: dict[int, list[str]] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            self.aliases.setdefault(id(module), []).append(path)
        self.modules: dict[str, dict[str, nn.Module]] = {layer: {} for layer in layers}
        """The whole modules of a layer, by every path."""
        self.own: dict[str, dict[str, None]] = {layer: {} for layer in layers}
        """The names of the parameters and buffers that a layer holds apart from them."""
        self.entered: set[str] = set()
        for recording in recordings:
            self.entered |= recording.entered
            for node in recording.graph.nodes:
                if node.op == "call_module":
                    module = model.get_submodule(str(node.target))
                    own = self.modules[layer_of(recording, node)]
                    own.update(dict.fromkeys(self.aliases[id(module)], module))
                elif node.op == "get_attr" and node.target not in recording.constants:
                    for user in node.users:
                        if not small(user):  # else its dtype or shape alone is asked
                            layer = layers[-1] if user.op == "output" else layer_of(recording, user)
                            self.own[layer][str(node.target)] = None
        self._hold_the_rest(layers)

    def of(self, layer: str) -> dict[str, Tensor]:
        """The parameters and buffers of a layer as they are now, by every name."""
        found = {name: tensor for path, module in self.modules[layer].items() for name, tensor in members(module, path)}
        for name in self.own[layer]:
            parents, _, last = name.rpartition(".")
            owner = self.model.get_submodule(parents)
            tensor = owner._parameters.get(last, owner._buffers.get(last))
            if tensor is not None:
                found[name] = tensor
        return found

    def _hold_the_rest(self, layers: Sequence[str]) -> None:
        held = {layer: self.of(layer) for layer in layers}
        names = {name for tensors in held.values() for name in tensors}
        rest = {name: tensor for name, tensor in members(self.model, "") if name not in names}
        if not rest:
            return
        holder = {id(tensor): layer for layer in reversed(layers) for tensor in held[layer].values()}
        entered = {prefix for name in names for prefix in _prefixes(name)} | self.entered
        for name, tensor in rest.items():
            if id(tensor) in holder:  # another name of what is held already
                self.own[holder[id(tensor)]][name] = None
                continue
            likeness = {layer: max((_common(other, name) for other in held[layer]), default=0) for layer in layers}
            layer = max(reversed(layers), key=likeness.__getitem__)
            whole = next((prefix for prefix in _prefixes(name) if prefix not in entered), None)
            if whole is not None:  # a module that no call uses is kept in one piece
                self.modules[layer][whole] = self.model.get_submodule(whole)
            else:
                self.own[layer][name] = None


def _prefixes(name: str) -> list[str]:
    """The paths of the modules that a name leads through, the outermost first."""
    parts = name.split(".")[:-1]
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _common(a: str, b: str) -> int:
    """How many parts at the beginning of two names are the same."""
    count = 0
    for one, other in zip(a.split("."), b.split("."), strict=False):
        if one != other:
            break
        count += 1
    return count
