"""A forward may depend on Python values besides its arguments: a step follows their changes, or the model is refused.

A recording is a run of Python code whose answers are kept. Each model here reads or writes a value in a way that a
recording would miss if it looked at the arguments alone.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import MethodType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import PlanError

X = torch.linspace(-1, 2, 24).reshape(4, 6)
SETTINGS = {"scale": 1.0}
SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


@dataclass(slots=True)
class Slots:
    scale: float


class Base(nn.Module):
    """Two linear layers with a function between them, which is recorded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.scale: Any = 1.0
        self.activation: Callable[[Tensor], Tensor] = F.relu
        self.config = SimpleNamespace(inner={"scales": [1.0, 2.0]}, name="base", long=[1.0] * 300)
        self.config.array, self.config.slots = numpy.ones(2), Slots(1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    gain = 1.0

    def factor(self) -> float:
        return SETTINGS["scale"]

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def model_with(between: Callable[[Any, Tensor], Tensor]) -> Any:
    return type("Model", (Base,), {"between": between})()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_step_is_plain(pipe: ps.Pipeline, model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    plain.zero_grad()
    model.zero_grad()
    loss = plain(X).square().mean()
    loss.backward()
    torch.testing.assert_close(pipe.step(X, X).loss, loss.detach())
    torch.testing.assert_close(gradients(model), gradients(plain))


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def scaled_by_attribute(self: Any, x: Tensor) -> Tensor:
    return x * self.scale


def scaled_by_child(self: Any, x: Tensor) -> Tensor:
    return x * getattr(self.a, "scale", 1.0)


def activated(self: Any, x: Tensor) -> Tensor:
    return self.activation(x)


def scaled_by_config(self: Any, x: Tensor) -> Tensor:
    return x * self.config.inner["scales"][1]


def scaled_by_global(self: Any, x: Tensor) -> Tensor:
    return x * SETTINGS["scale"]


def helper() -> float:
    return SETTINGS["scale"]


def scaled_by_helper(self: Any, x: Tensor) -> Tensor:
    return x * helper()


def scaled_by_method(self: Any, x: Tensor) -> Tensor:
    return x * self.factor()


def scaled_by_class(self: Any, x: Tensor) -> Tensor:
    return x * type(self).gain


def scaled_by_long_list(self: Any, x: Tensor) -> Tensor:
    return x * self.config.long[-1]


def scaled_by_array(self: Any, x: Tensor) -> Tensor:
    return x * float(self.config.array[0])


def scaled_by_slots(self: Any, x: Tensor) -> Tensor:
    return x * self.config.slots.scale


def scaled_if_trained(self: Any, x: Tensor) -> Tensor:
    return x * (2.0 if x.requires_grad else 3.0)


def frozen_first(self: Any, x: Tensor) -> Tensor:
    return x * (2.0 if self.a.weight.requires_grad else 3.0)


def scaled_by_environment(self: Any, x: Tensor) -> Tensor:
    return x * float(os.environ.get("PENSTOCK_TEST_SCALE", "1"))


def scaled_by_getenv(self: Any, x: Tensor) -> Tensor:
    return x * float(os.getenv("PENSTOCK_TEST_SCALE", "1"))


def scaled_by_any_variable(self: Any, x: Tensor) -> Tensor:
    return x * sum(float(value) for name, value in os.environ.items() if name == "PENSTOCK_TEST_SCALE")


def scaled_by_context(self: Any, x: Tensor) -> Tensor:
    return x * SCALE.get()


def scaled_by_vars(self: Any, x: Tensor) -> Tensor:
    return x * vars(self)["scale"]


def scaled_by_dictionary_of_child(self: Any, x: Tensor) -> Tensor:
    return x * self.a.__dict__.get("scale", 1.0)


def scaled_by_object(self: Any, x: Tensor) -> Tensor:
    return x * object.__getattribute__(self, "scale")


def set_environment(model: Any) -> None:
    os.environ["PENSTOCK_TEST_SCALE"] = "3"


def set_context(model: Any) -> None:
    SCALE.set(3.0)


def set_scale(model: Any) -> None:
    model.scale = 3.0


def set_scale_of_child(model: Any) -> None:
    model.a.scale = 3.0


def set_activation(model: Any) -> None:
    model.activation = torch.tanh


def set_activation_to_a_closure(model: Any) -> None:
    model.activation = lambda x: x * 2


def set_config(model: Any) -> None:
    model.config.inner["scales"][1] = 5.0


def set_global(model: Any) -> None:
    SETTINGS["scale"] = 3.0


def freeze(model: Any) -> None:
    model.a.weight.requires_grad_(False)


def freeze_all_of_a(model: Any) -> None:
    model.a.requires_grad_(False)


def set_class_attribute(model: Any) -> None:
    type(model).gain = 3.0


def set_end_of_list(model: Any) -> None:
    model.config.long[-1] = 3.0


def set_array(model: Any) -> None:
    model.config.array[0] = 3.0


def set_slots(model: Any) -> None:
    model.config.slots.scale = 3.0


def replace_forward(model: Any) -> None:
    model.forward = MethodType(lambda self, x: self.b(self.a(x) * 3.0), model)


CHANGES: list[tuple[Callable[..., Tensor], Callable[[Any], None]]] = [
    (scaled_by_attribute, set_scale),
    (scaled_by_child, set_scale_of_child),
    (activated, set_activation),
    (activated, set_activation_to_a_closure),
    (scaled_by_config, set_config),
    (scaled_by_global, set_global),
    (frozen_first, freeze),
    (scaled_if_trained, freeze_all_of_a),
    (scaled_by_helper, set_global),
    (scaled_by_method, set_global),
    (scaled_by_class, set_class_attribute),
    (scaled_by_long_list, set_end_of_list),
    (scaled_by_array, set_array),
    (scaled_by_slots, set_slots),
    (scaled_by_attribute, replace_forward),
    (scaled_by_environment, set_environment),
    (scaled_by_getenv, set_environment),
    (scaled_by_any_variable, set_environment),
    (scaled_by_context, set_context),
    (scaled_by_vars, set_scale),
    (scaled_by_dictionary_of_child, set_scale_of_child),
    (scaled_by_object, set_scale),
]


@pytest.mark.parametrize("sample", [None, X], ids=["without a sample", "with a sample"])
@pytest.mark.parametrize(("between", "change"), CHANGES, ids=lambda f: f.__name__)
def test_a_step_sees_values_that_were_changed_after_the_split(
    between: Callable[..., Tensor], change: Callable[[Any], None], sample: Tensor | None, monkeypatch: Any
) -> None:
    monkeypatch.setitem(SETTINGS, "scale", 1.0)
    monkeypatch.setenv("PENSTOCK_TEST_SCALE", "1")
    model = model_with(between)
    before = SCALE.set(1.0)
    plan = ps.split(model, stages=2, sample=sample)
    with ps.Pipeline(plan, loss_fn=square, microbatches=2) as pipe:
        assert_step_is_plain(pipe, model)
        change(model)
        assert_step_is_plain(pipe, model)
    SCALE.reset(before)


def type_is_tensor(self: Any, x: Tensor) -> Tensor:
    return x * 2 if type(x) is Tensor else x * 3


def type_equals_tensor(self: Any, x: Tensor) -> Tensor:
    return x * 2 if type(x) == torch.Tensor else x * 3  # noqa: E721


def class_is_tensor(self: Any, x: Tensor) -> Tensor:
    return x * 2 if x.__class__ is Tensor and isinstance(type(x), type) else x * 3


def type_has_name(self: Any, x: Tensor) -> Tensor:
    return x * {"Tensor": 2, "Value": 3}[type(x).__name__]


@pytest.mark.parametrize("between", [type_is_tensor, type_equals_tensor, class_is_tensor, type_has_name])
def test_the_values_of_a_recording_are_of_the_type_tensor(between: Callable[..., Tensor]) -> None:
    model = model_with(between)
    with ps.Pipeline(ps.split(model, stages=2, sample=X, verify=False), loss_fn=square, microbatches=2) as pipe:
        assert_step_is_plain(pipe, model)
    assert "type" not in globals()


class InContext(nn.Linear):
    """A layer that stays whole, in the thread of its stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE.get()


def test_stages_run_with_the_callers_context_variables() -> None:
    model = nn.Sequential(InContext(6, 6), InContext(6, 6))
    with ps.Pipeline(ps.split(model, stages=2), loss_fn=square, microbatches=2, recompute="always") as pipe:
        for scale in (1.0, 3.0):
            before = SCALE.set(scale)
            assert_step_is_plain(pipe, model)
            SCALE.reset(before)


class Counts(nn.Module):
    """A layer with Python state of its own, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class CountsTwice(nn.Module):
    """A module with Python state is called twice, which is one layer, or two where marks say so."""

    def __init__(self, marked: bool = False) -> None:
        super().__init__()
        self.mark = ps.cut if marked else nn.Identity()
        self.counts = Counts()
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.counts(self.mark(self.counts(x))))


def own_generator(self: Any, x: Tensor) -> Tensor:
    return x * self.generator.random()


GENERATOR = numpy.random.default_rng(0)


def global_generator(self: Any, x: Tensor) -> Tensor:
    return x * float(GENERATOR.random())


def sets_a_child(self: Any, x: Tensor) -> Tensor:
    self.b.gain = float(x.shape[0])
    return x


def reads_a_gradient(self: Any, x: Tensor) -> Tensor:
    return x if self.a.weight.grad is None else x * 2


def flips(self: Any, x: Tensor) -> Tensor:
    self.flag = not getattr(self, "flag", False)
    return x if self.flag else -x


def hooks_saved_tensors(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x * x


def hooks_a_gradient(self: Any, x: Tensor) -> Tensor:
    mask = x > 0
    x.register_hook(lambda grad: grad * mask)
    return x


def catches_errors(self: Any, x: Tensor) -> Tensor:
    try:
        return x if x.sum() > 0 else -x
    except Exception:
        return x * 2


def counts_calls(self: Any, x: Tensor) -> Tensor:
    self.scale = self.scale + 1
    return x * self.scale


def changes_a_global(self: Any, x: Tensor) -> Tensor:
    SETTINGS["scale"] += 1
    return x * SETTINGS["scale"]


def with_generator() -> nn.Module:
    model = model_with(own_generator)
    model.generator = random.Random(0)
    return model


class Gain(nn.Linear):
    gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def child_that_is_set() -> nn.Module:
    model = model_with(sets_a_child)
    model.b = Gain(6, 6)
    return model


def reads_a_counter(self: Any, x: Tensor) -> Tensor:
    return x * self.a.calls


def child_that_counts() -> nn.Module:
    model = model_with(reads_a_counter)
    model.a = Counts()
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a generator of its own": (with_generator, "draws random numbers"),
    "a global generator": (lambda: model_with(global_generator), "draws random numbers"),
    "the gradient of a parameter": (lambda: model_with(reads_a_gradient), "reads the gradient of a parameter"),
    "a flag that it flips": (lambda: model_with(flips), "sets flag while it runs"),
    "hooks of saved tensors": (lambda: model_with(hooks_saved_tensors), "hooks of saved tensors are not recorded"),
    "a hook with a tensor": (lambda: model_with(hooks_a_gradient), "a hook uses a tensor of the forward"),
    "an error that it catches": (lambda: model_with(catches_errors), "its path depends on data"),
    "a number that it counts": (lambda: model_with(counts_calls), "sets scale while it runs"),
    "a number that a child counts": (child_that_counts, "reads a.calls, which a changes when it runs"),
    "a global that it changes": (lambda: model_with(changes_a_global), "changes the variable SETTINGS"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_a_recording_would_freeze_is_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        ps.split(make(), stages=2, sample=X)


def test_a_child_whose_attribute_is_set_by_its_parent_is_recorded_itself() -> None:
    model = child_that_is_set()
    with pytest.warns(UserWarning, match="forward sets b.gain"):
        plan = ps.split(model, stages=2, sample=X)
    with ps.Pipeline(plan, loss_fn=square, microbatches=1) as pipe:
        assert_step_is_plain(pipe, model)


def test_calls_of_a_module_with_state_are_in_one_stage() -> None:
    model = CountsTwice()
    with ps.Pipeline(ps.split(model, stages=2, sample=X), loss_fn=square, microbatches=1) as pipe:
        assert_step_is_plain(pipe, model)
    with pytest.raises(PlanError, match=r"counts changes counts.calls .* stage 0 .* and stage 1"):
        ps.split(CountsTwice(marked=True), stages=2, sample=X)


class Table:
    @cached_property
    def weights(self) -> Tensor:
        return torch.arange(6.0)


class Caches(Base):
    """Cached properties of the model and of an object are computed at the first call, as in Chameleon."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    @cached_property
    def double(self) -> float:
        return self.scale * 2

    def between(self, x: Tensor) -> Tensor:
        return x * self.table.weights * self.double


def test_cached_properties_are_not_state() -> None:
    model = Caches()
    with ps.Pipeline(ps.split(model, stages=2), loss_fn=square, microbatches=1) as pipe:
        for _ in range(2):
            assert_step_is_plain(pipe, model)


class OwnTensors(nn.Module):
    """Parameters and buffers of a module whose forward is recorded, and a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("shift", torch.zeros(6))
        self.register_buffer("later", None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale + self.shift
        return x if self.later is None else x * self.later


def new_parameter(model: Any) -> None:
    model.scale = nn.Parameter(torch.full((6,), 2.0))


def new_buffer(model: Any) -> None:
    model.shift = torch.ones(6)


def new_buffer_for_none(model: Any) -> None:
    model.later = torch.ones(6)


def assigned_state(model: Any) -> None:
    state = {name: tensor.clone() * 2 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def new_layer(model: Any) -> None:
    model.layers[1] = nn.Linear(6, 6)


def more_layers(model: Any) -> None:
    model.layers.append(nn.Linear(6, 6))


def test_tensors_and_modules_that_are_replaced_after_the_split_are_refused() -> None:
    for change in (new_parameter, new_buffer, new_buffer_for_none, assigned_state, new_layer, more_layers):
        model = OwnTensors()
        with ps.Pipeline(ps.split(model, stages=2), loss_fn=square, microbatches=2) as pipe:
            assert_step_is_plain(pipe, model)
            with torch.no_grad():  # changes in place are seen
                model.scale.mul_(2)
                model.shift.add_(1)
            assert_step_is_plain(pipe, model)
            change(model)
            with pytest.raises(PlanError, match=r"replaced after the split|in another stage"):
                pipe.step(X, X)


def test_hooks_for_all_modules_are_refused() -> None:
    model = OwnTensors()
    with ps.Pipeline(ps.split(model, stages=2), loss_fn=square, microbatches=2) as pipe:
        pipe.step(X, X)
        handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output)
        try:
            with pytest.raises(PlanError, match="OwnTensors, like all modules, has hooks"):
                pipe.step(X, X)
        finally:
            handle.remove()
