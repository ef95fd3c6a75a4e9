"""One stage of a trunk: the model's own forward, run on copies of its containers that hold this stage's part.

model                 stage 1 of 3, as it is registered     as its forward is run
├ embed                                                     ├ stand-in
├ blocks              ├ blocks                              ├ blocks
│ ├ 0                 │                                     │ ├ gate: gives what was received
│ ├ 1                 │ ├ 1  (the model's own)              │ ├ gate: runs block 1
│ └ 2                 │                                     │ └ gate: leaves
└ head                                                      └ stand-in
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from penstock.errors import PlanError
from penstock.split.trunk.assembly import Assembly
from penstock.split.trunk.blank import describe, tensors
from penstock.split.trunk.layout import Layout
from penstock.split.trunk.run import Leave, Phase, Run
from penstock.split.trunk.source import join

_GAVE = "penstock.gave"
"""Among the arguments that go to other stages: the shapes of what parts before the trunk gave."""


class TrunkStage(nn.Module):
    """The stage number ``index`` of ``bounds``, which has each stage's first block and the one after its last.

    Takes what the first stage was called with, and what the block before its first one returned.
    """

    def __init__(self, layout: Layout, bounds: Sequence[tuple[int, int]], index: int) -> None:
        super().__init__()
        layout.check_containers()
        self._penstock_layout = layout
        self._penstock_bounds = tuple(bounds)
        self._penstock_index = index
        for prefix, container in layout.containers.items():
            self._penstock_fill(prefix, container)
        self.training = layout.model.training  # its own flag only: a layer may be in another mode on purpose

    def _penstock_fill(self, prefix: str, container: nn.Module) -> None:
        """Register what this stage has of a container."""
        layout, index, count = self._penstock_layout, self._penstock_index, len(self._penstock_bounds)
        holder = self.get_submodule(prefix)
        first, end = self._penstock_bounds[index]
        own = {name.rpartition(".")[2] for name in layout.names[first:end]} if prefix == layout.path else set()
        for name, module in container._modules.items():
            inner = join(prefix, name)
            if inner in layout.containers:
                holder._modules[name] = nn.Module()
                holder._modules[name].training = module.training  # type: ignore[union-attr]
            elif name in own:
                holder._modules[name] = module
        for name, module in layout.others(prefix):
            having = layout.stages(prefix, name, count)
            if index in having:
                one = index == min(having) or join(prefix, name) in layout.stateful
                holder._modules[name] = module if one else _own_buffers(module)
        holder._modules = {name: holder._modules[name] for name in container._modules if name in holder._modules}
        for name, parameter in container._parameters.items():
            if parameter is not None and index in layout.stages(prefix, name, count):
                holder.register_parameter(name, parameter)
        for name, buffer in container._buffers.items():
            if buffer is not None and index in (having := layout.stages(prefix, name, count)):
                persistent = name not in container._non_persistent_buffers_set
                holder.register_buffer(name, buffer if index == min(having) else buffer.clone(), persistent)

    def train(self, mode: bool = True) -> TrunkStage:
        super().train(mode)
        self._penstock_layout.train(mode)
        return self

    def forward(self, *values: Any) -> Any:
        layout, bounds, index = self._penstock_layout, self._penstock_bounds, self._penstock_index
        arguments, received = self._penstock_taken(values)
        layout.check_containers()
        if layout.copied and any(isinstance(tensor, FakeTensor) for tensor in tensors(values)):
            _by_shapes_alone(self)
        first, end = bounds[index]
        last = index == len(bounds) - 1
        if index == 0:
            _refuse(layout, arguments, len(bounds))
        assembly = Assembly(layout, self)
        run = Run(index, layout.names, first, end - 1, received, assembly.entered)
        run.loops = layout.mentions.loops
        output = None
        try:
            root = assembly.build("", run)
            run.gave = {name: list(shapes) for name, shapes in arguments.pop(_GAVE, {}).items()}
            given = {name: run.blanks.argument(value, name) for name, value in arguments.items()}
            args, kwargs = _spread(layout, given)
            if index == 0:
                assembly.entered(run)
            with suppress(Leave), run:
                output = root(*args, **kwargs)
                run.finished()
            output = run.output(output)
            assembly.write_back()
        except PlanError:
            raise
        except Exception as error:
            if run.entering:
                error.add_note(
                    f"In stage {index}, on the way to {layout.names[first]}, the model's forward runs on zeros like "
                    f"what {layout.names[first - 1]} returned, in the place of what the parts before it give."
                )
            raise
        finally:
            sent = run.sent
            run.phase, run.sent = Phase.OVER, None
            run.blanks.forget()
            assembly.forget()
        if last:
            return output
        if index > 0:
            return sent
        rest = [_for_stage(layout, arguments, stage == len(bounds) - 1) for stage in range(1, len(bounds))]
        for others in rest:
            others[_GAVE] = run.gave
        return (sent, rest[0]) if len(rest) == 1 else ((sent, rest[0]), *rest[1:])

    def _penstock_taken(self, values: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
        """The model's arguments, and what was received."""
        index = self._penstock_index
        expected = 1 if index <= 1 else 2
        taken: tuple[Any, ...] = values
        if index == 1 and len(values) == 1:
            taken = tuple(values[0])[::-1] if isinstance(values[0], (tuple, list)) else ()
        if len(values) != expected or not taken or not isinstance(taken[0], Mapping):
            names = self._penstock_layout.names
            before = names[self._penstock_bounds[index][0] - 1]
            takes = (
                f"the model's arguments by name and what {before} returned"
                if index
                else "the model's arguments by name"
            )
            raise PlanError(
                f"stage {index} of the trunk {self._penstock_layout.path} takes {takes}, got {len(values)} values: "
                f"{[type(value).__name__ for value in values]}"
            )
        return dict(taken[0]), taken[1] if index > 0 else None


def _by_shapes_alone(stage: nn.Module) -> None:
    """Hugging Face's experts go by the numbers, which fake tensors do not have, unless they are told not to."""
    for part in stage.modules():
        config = getattr(part, "config", None)
        if getattr(config, "_experts_implementation", None) in ("eager", "grouped_mm"):
            config._experts_implementation = "batched_mm"  # type: ignore[union-attr]


def _own_buffers(module: nn.Module) -> nn.Module:
    """A module without parameters, for one more stage: itself; where it has buffers, with buffers of its own."""
    if not any(True for _ in module.buffers()):
        return module
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    copied._buffers = {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    copied._modules = {name: None if part is None else _own_buffers(part) for name, part in module._modules.items()}
    copied._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    return copied


def _refuse(layout: Layout, arguments: Mapping[str, Any], stages: int) -> None:
    """Arguments that a model in stages cannot serve."""
    if arguments.get("past_key_values") is not None:
        raise PlanError("past_key_values was given: a pipeline keeps no cache of keys and values between calls")
    config = getattr(layout.model, "config", None)
    flags = ("output_hidden_states", "output_attentions", "output_router_logits")
    for flag in dict.fromkeys([*(name for name in arguments if name.startswith("output_")), *flags]):
        if stages > 1 and (arguments[flag] if arguments.get(flag) is not None else getattr(config, flag, False)):
            raise PlanError(
                f"{flag} asks for something of every block, and the last of {stages} stages has only its own: set it "
                "to False, in the call and in the model's config (hooks on the blocks see what they compute)"
            )


def _for_stage(layout: Layout, arguments: Mapping[str, Any], last: bool) -> dict[str, Any]:
    """The arguments that a later stage needs; of some, only the shape."""
    return {
        name: describe(value)
        if isinstance(value, Tensor) and value.is_floating_point() and layout.argument_blank(name, last)
        else value
        for name, value in arguments.items()
        if layout.argument_goes(name, last)
    }


def _spread(layout: Layout, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments by name as the forward takes them: by position where it has no names for them."""
    kwargs = {**arguments, **layout.fixed}
    starred = next((n for n, p in layout.parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    args: list[Any] = []
    for name, parameter in layout.parameters.items():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY or (
            parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and starred is not None and kwargs.get(starred)
        ):
            if name in kwargs:
                args.append(kwargs.pop(name))
        elif name == starred:
            args.extend(kwargs.pop(name, ()))
    return args, kwargs
