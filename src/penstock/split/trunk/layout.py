"""A model with a trunk, laid out for stages: which stage has which of the parts around the blocks.

before the trunk (embeddings)     the first stage          ┐ parts with parameters; used at both ends, they are in
after it (norm, head)             the last stage           │ both stages: a tie
between the blocks                every stage              ┘
parts without (rotary tables)     every stage that may use them, each with buffers of its own
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from penstock.errors import PlanError
from penstock.split.trunk.find import blocks_at
from penstock.split.trunk.source import AFTER, BEFORE, DURING, containers, join, mentions

TORCHS_OWN = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes that every module has: its parameters, buffers, modules and hooks."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Layout:
    """Where everything of one model is. Copied, it keeps the containers' attributes as they were."""

    def __init__(self, model: nn.Module, path: str) -> None:
        self.model = model
        self.path = path
        blocks = blocks_at(model, path)
        self.containers = {prefix: model.get_submodule(prefix) for prefix in (*containers(path), path)}
        self.names = tuple(f"{path}.{key}" for key in self.containers[path]._modules)
        self.foreign = dict(zip(self.names, blocks, strict=True))
        self.check_containers()
        self.stateful = frozenset(
            join(prefix, name) for prefix in self.containers for name, part in self.others(prefix) if _stateful(part)
        )
        self.mentions = mentions(model, path)
        self.parameters = inspect.signature(model.forward).parameters
        self.fixed = {"use_cache": False} if self._takes_cache() else {}
        self.embedded = {name for name, parts in self.mentions.embedded.items() if parts <= self.stateful}
        main = getattr(model, "main_input_name", None)  # Hugging Face: what embeddings take, wherever they are
        self.conventional = set() if main is None else {"inputs_embeds", str(main)}
        self._kept: dict[str, dict[str, Any]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        layout = copy.copy(self)
        layout._kept = {}
        for prefix in self.containers:
            layout._kept[prefix] = {name: _copied(value, memo) for name, value in self.attributes(prefix).items()}
        return layout

    @property
    def copied(self) -> bool:
        return self._kept is not None

    def attributes(self, prefix: str) -> dict[str, Any]:
        """A container's own attributes, apart from what every module has: as they are now."""
        if self._kept is not None:
            return self._kept[prefix]
        return {name: value for name, value in self.containers[prefix].__dict__.items() if name not in TORCHS_OWN}

    def write(self, prefix: str, name: str, value: Any) -> None:
        """The forward gave a container's attribute another value."""
        (self.containers[prefix].__dict__ if self._kept is None else self._kept[prefix])[name] = value

    def write_buffer(self, prefix: str, name: str, old: Tensor | None, new: Tensor | None) -> None:
        """The forward put another tensor in the place of a buffer; the model's own where that is what it was."""
        own = self.containers[prefix]._buffers
        if self._kept is None and own.get(name) is old:
            own[name] = new

    def train(self, mode: bool) -> None:
        """The containers are in no stage, and follow all of them."""
        for prefix, container in self.containers.items():
            if self._kept is not None:
                self._kept[prefix]["training"] = mode
            else:
                container.training = mode

    def check_containers(self) -> None:
        """No stage runs the whole of a container: what is called once per forward would be called once per stage."""
        for prefix, container in self.containers.items():
            name = prefix or type(container).__name__
            if any(getattr(container, hooks) for hooks in _HOOKS):
                raise PlanError(
                    f"{name} itself has hooks, and no stage runs the whole of it: register them on its blocks or on "
                    "the parts around them"
                )
            own = container.__dict__.get("forward")
            compiled = container.__dict__.get("_compiled_call_impl") is not None
            if compiled or (own is not None and getattr(own, "__self__", None) is not container):
                raise PlanError(
                    f"the forward of {name} was replaced by one that is not its method (compiled or wrapped): split "
                    "the model first, then compile or wrap its blocks"
                )

    # ── parts ────────────────────────────────────────────────────────────────────────────────────────────────────

    def others(self, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules in a container that are not on the way to the trunk."""
        if prefix == self.path:
            return
        for name, module in self.containers[prefix]._modules.items():
            if module is not None and join(prefix, name) not in self.containers:
                yield name, module

    def places(self, prefix: str, name: str) -> set[str]:
        """Where the forward uses a part. A part that its source does not mention stands on its side of the trunk."""
        found = self.mentions.parts.get(join(prefix, name))
        if found:
            return found
        order = list(self.containers[prefix]._modules)
        inner = self.path[len(prefix) + 1 if prefix else 0 :].split(".")[0]
        if name not in order and not self.mentions.parts:  # no source
            return {BEFORE, AFTER}
        late = name in order and order.index(name) > order.index(inner)
        return {AFTER} if late else {BEFORE}

    def stages(self, prefix: str, name: str, count: int) -> set[int]:
        """The stages, of ``count``, that have a part."""
        places = self.places(prefix, name)
        container = self.containers[prefix]
        stays = name in container._parameters or join(prefix, name) in self.stateful
        if DURING in places or (BEFORE in places and not stays):
            return set(range(count))
        return {index for place, index in ((BEFORE, 0), (AFTER, count - 1)) if place in places}

    def members(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """The parameters and buffers of a block, with those of the parts that go where it goes."""
        count = len(self.names)
        block = self.foreign[self.names[index]]
        yield from block.named_parameters(self.names[index], remove_duplicate=False)
        yield from block.named_buffers(self.names[index], remove_duplicate=False)
        for prefix, container in self.containers.items():
            for name, module in self.others(prefix):
                if index in self.stages(prefix, name, count):
                    yield from module.named_parameters(join(prefix, name), remove_duplicate=False)
                    yield from module.named_buffers(join(prefix, name), remove_duplicate=False)
            for name, tensor in (*container._parameters.items(), *container._buffers.items()):
                if tensor is not None and index in self.stages(prefix, name, count):
                    yield join(prefix, name), tensor

    # ── arguments ────────────────────────────────────────────────────────────────────────────────────────────────

    def argument_goes(self, name: str, last: bool) -> bool:
        """Whether a stage that is not the first needs an argument of the model's forward."""
        places = self.mentions.arguments.get(name, {BEFORE})
        return last or places != {AFTER}

    def argument_blank(self, name: str, last: bool) -> bool:
        """Whether a stage that is not the first needs no more of an argument than its shape."""
        return name in self.embedded or (
            name in self.conventional and not (last and AFTER in self.mentions.arguments.get(name, ()))
        )

    def _takes_cache(self) -> bool:
        """Whether the forward keeps keys and values for the next call, which training has no use for."""
        if "use_cache" in self.parameters:
            return True
        spread = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in self.parameters.values())
        inner = [c for prefix, c in self.containers.items() if prefix and prefix != self.path and _has_forward(c)]
        taken = any("use_cache" in inspect.signature(container.forward).parameters for container in inner)
        return spread and taken and bool(getattr(getattr(self.model, "config", None), "use_cache", False))


def _stateful(module: nn.Module) -> bool:
    """Whether a module has something that training changes: parameters, or statistics."""
    return any(True for _ in module.parameters()) or any(isinstance(part, _NormBase) for part in module.modules())


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A copy, where there can be one: methods belong to the container, which is not copied."""
    if inspect.ismethod(value):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value
