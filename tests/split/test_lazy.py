"""``ps.Lazy``: layers that are built only where they are needed, and are then as if they had always been there."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.split.lazy import Lazy
from penstock.split.plan import run_stages
from tests.support.models import assert_same, batch, gradients, plain_step
from tests.support.ranks import run_ranks


class Counted:
    """A function that builds a layer, and counts how often it did so with data."""

    def __init__(self, fn: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        self.fn = fn
        self.built = 0

    def __call__(self) -> nn.Module:
        self.built += torch.get_default_device() != torch.device("meta")
        return self.fn()


def four(**options: Any) -> tuple[nn.Sequential, list[Counted]]:
    fns = [Counted() for _ in range(4)]
    seeds = options.get("seeds", [None] * 4)
    return nn.Sequential(*(Lazy(fn, seed=seed) for fn, seed in zip(fns, seeds, strict=True))), fns


def built(fns: list[Counted]) -> list[int]:
    return [fn.built for fn in fns]


# ── what is built, and when ──────────────────────────────────────────────────────────────────────────────────────


def test_splitting_builds_nothing_and_knows_the_sizes() -> None:
    model, fns = four()
    plan = ps.split(model, balance=[1, 3])
    assert built(fns) == [0, 0, 0, 0]
    assert [(stage.parameters, stage.bytes) for stage in plan.stages] == [(20, 80), (60, 240)]
    assert list(model.parameters()) == []
    str(plan)


def test_sizes_balance() -> None:
    model = nn.Sequential(Lazy(lambda: nn.Linear(10, 10)), *(Lazy(lambda: nn.Linear(1, 1)) for _ in range(3)))
    assert ps.split(model, stages=2).groups == [("0",), ("1", "2", "3")]


def test_a_stage_builds_its_own_layers_once() -> None:
    model, fns = four()
    plan = ps.split(model, balance=[1, 2, 1])
    stage = plan.stage_module(1)
    assert built(fns) == [0, 1, 1, 0]
    assert stage.state_dict().keys() == {"1.weight", "1.bias", "2.weight", "2.bias"}
    assert [type(layer) for layer in stage] == [nn.Linear, nn.Linear]
    again = plan.stage_module(1)
    assert built(fns) == [0, 1, 1, 0]
    assert list(again) == list(stage)
    assert type(stage) is nn.Sequential


def test_sizes_stay_the_same_when_some_layers_are_built() -> None:
    model, _ = four()
    plan = ps.split(model, balance=[2, 2])
    plan.stage_module(0)
    assert plan.attach(model) == plan
    assert ps.split(model, balance=[2, 2]) == plan


def test_called_plainly_a_layer_is_built_when_it_is_first_run() -> None:
    model, fns = four()
    output = model(batch())
    assert built(fns) == [1, 1, 1, 1]
    assert_same(model(batch()), output)
    assert built(fns) == [1, 1, 1, 1]
    assert [name for name, _ in model.named_parameters()] == [f"{i}.{n}" for i in range(4) for n in ("weight", "bias")]
    assert all(type(layer) is nn.Linear for layer in model)


def test_what_was_built_by_a_call_is_what_a_stage_has() -> None:
    model, fns = four()
    model(batch())
    plan = ps.split(model, stages=4)
    assert_same(run_stages(plan, (batch(),), {}), model(batch()))
    assert built(fns) == [1, 1, 1, 1]


def test_a_lazy_layer_that_stands_twice_is_one_layer() -> None:
    fn = Counted()
    layer = Lazy(fn)
    plan = ps.split(nn.Sequential(layer, nn.Tanh(), layer), stages=3)
    assert {tie.names for tie in plan.ties} == {("0.weight", "2.weight"), ("0.bias", "2.bias")}
    assert plan.stage_module(0)[0] is plan.stage_module(2)[0]
    assert fn.built == 1


def test_layers_inside_layers_are_built_with_them() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Lazy(fns[1])

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    fns = [Counted(), Counted(), Counted(lambda: nn.Sequential(Lazy(fns[0]), nn.Tanh())), Counted(lambda: Lazy(fns[0]))]
    model = nn.Sequential(nn.Sequential(Block(), nn.Tanh()), Lazy(fns[2]), Lazy(fns[3]))
    plan = ps.split(model, stages=3)
    assert built(fns) == [0, 0, 0, 0]
    assert [stage.parameters for stage in plan.stages] == [20, 20, 20]
    assert plan.stage_module(0).state_dict().keys() == {"0.0.inner.weight", "0.0.inner.bias"}
    assert built(fns) == [0, 1, 0, 0]
    assert plan.stage_module(1).state_dict().keys() == {"1.0.weight", "1.0.bias"}
    assert built(fns) == [1, 1, 1, 0]
    assert plan.stage_module(2).state_dict().keys() == {"2.weight", "2.bias"}
    assert built(fns) == [2, 1, 1, 1]


def test_threads_build_a_layer_once() -> None:
    for _ in range(20):
        fn = Counted()
        layer = Lazy(fn)
        start = threading.Barrier(4)
        outputs: list[Tensor] = []

        def run(layer: nn.Module = layer, start: threading.Barrier = start, outputs: list[Tensor] = outputs) -> None:
            start.wait()
            outputs.append(layer(batch()).detach())

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert fn.built == 1
        assert len(outputs) == 4
        assert_same(outputs, [outputs[0]] * 4)


# ── equality with the plain model ────────────────────────────────────────────────────────────────────────────────


def test_with_seeds_every_rank_builds_what_the_plain_model_has() -> None:
    seeds = [3, 1, 4, 1]
    whole, _ = four(seeds=seeds)
    whole(batch())
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2]):
        model, _ = four(seeds=seeds)
        plan = ps.split(model, stages=4)
        torch.manual_seed(len(order))
        for index in order:
            stage = plan.stage_module(index)
            names = stage.state_dict()
            assert_same(dict(names), {name: whole.state_dict()[name] for name in names})
    assert_same(whole[1].weight, whole[3].weight)


def test_a_seed_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    Lazy(lambda: nn.Linear(4, 4), seed=1).build()
    assert_same(torch.rand(3), expected)


def test_without_a_seed_layers_draw_in_the_order_of_building_as_plain_ones() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model, _ = four()
    plan = ps.split(model, stages=2)
    torch.manual_seed(0)
    for index in range(2):
        plan.stage_module(index)
    assert_same(dict(model.state_dict()), dict(plain.state_dict()))


def test_sizes_are_learned_without_a_random_number() -> None:
    def layer() -> nn.Module:
        torch.manual_seed(0)
        torch.rand(3, device="cpu")
        return nn.Dropout()

    before = torch.get_rng_state()
    ps.split(nn.Sequential(Lazy(layer), Lazy(lambda: nn.Linear(2, 2))), stages=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_pipeline_trains_lazy_layers_as_the_plain_model() -> None:
    model, fns = four(seeds=[1, 2, 3, 4])
    plain = copy.deepcopy(model)
    plain(batch())
    expected = plain_step(plain, batch(), batch(seed=5), nn.functional.mse_loss)
    with ps.Pipeline(ps.split(model, stages=2), nn.MSELoss(), microbatches=2) as pipe:
        pipe.step(batch(), batch(seed=5))
        assert_same(gradients(pipe.named_parameters()), expected.gradients)
        assert_same(dict(pipe.state_dict()), dict(expected.state))
    assert built(fns) == [1, 1, 1, 1]


def processes(rank: int) -> list[int]:
    """The layers that a rank has built after a step and reading its state."""
    plain, _ = four(seeds=[1, 2, 3, 4])
    plain(batch())
    expected = plain_step(plain, batch(), batch(seed=5), nn.functional.mse_loss)
    model, fns = four(seeds=[1, 2, 3, 4])
    with ps.Pipeline(ps.split(model, balance=[1, 3]), nn.MSELoss(), microbatches=2, mesh=ps.Mesh()) as pipe:
        result = pipe.step(batch(), batch(seed=5))
        assert_same(result.loss, expected.loss)
        mine = dict(pipe.named_parameters())
        assert_same(gradients(mine.items()), {name: expected.gradients[name] for name in mine})
        assert_same(pipe.state_dict(full=True), dict(expected.state))
        pipe.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in expected.state.items()})
        assert not any(parameter.any() for parameter in pipe.parameters())
    return built(fns)


def test_a_process_builds_its_own_stages_only() -> None:
    assert run_ranks(processes, 2) == [[1, 0, 0, 0], [0, 1, 1, 1]]


# ── as if it were the layer ──────────────────────────────────────────────────────────────────────────────────────


def test_a_state_of_the_plain_model_is_loaded_and_builds() -> None:
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model, fns = four()
    model.load_state_dict(plain.state_dict())
    assert built(fns) == [1, 1, 1, 1]
    assert_same(model(batch()), plain(batch()))
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        four()[0].load_state_dict({})


def test_the_state_of_what_is_not_built_has_its_names_without_data() -> None:
    model, fns = four()
    plan = ps.split(model, stages=4)
    plan.stage_module(2)
    state = model.state_dict()
    assert list(state) == [f"{i}.{name}" for i in range(4) for name in ("weight", "bias")]
    assert {name for name, tensor in state.items() if not tensor.is_meta} == {"2.weight", "2.bias"}
    assert built(fns) == [0, 0, 1, 0]


@pytest.mark.parametrize("mode", [True, False])
def test_modes_said_before_are_followed(mode: bool) -> None:
    model = nn.Sequential(Lazy(lambda: nn.Sequential(nn.Dropout(), nn.BatchNorm1d(4).eval())))
    model.train(mode)
    assert [part.training for part in ps.split(model, stages=1).stage_module(0).modules()] == [mode] * 4


def test_modes_that_fn_set_are_kept_if_nobody_said_otherwise() -> None:
    model = nn.Sequential(Lazy(lambda: nn.BatchNorm1d(4).eval()))
    assert not ps.split(model, stages=1).stage_module(0)[0].training


def test_conversions_and_initialisers_reach_it() -> None:
    model, _ = four()
    model.to(torch.float64)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    other, _ = four()
    other.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    assert not any(layer.weight.any() for layer in other)


def test_hooks_are_registered_after_the_build() -> None:
    seen: list[str] = []
    lazy = Lazy(lambda: nn.Linear(4, 4))
    handle = lazy.register_forward_pre_hook(lambda *args: seen.append("before"))
    with pytest.raises(ps.PlanError, match="before it was built"):
        lazy(batch())
    handle.remove()
    lazy.build().register_forward_pre_hook(lambda *args: seen.append("after"))
    lazy(batch())
    assert seen == ["after"]


def test_it_is_copied_and_pickled_before_and_after() -> None:
    layer = Lazy(nn.ReLU)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(other.build(), nn.ReLU)
    assert isinstance(layer, Lazy)
    model, _ = four(seeds=[1, 2, 3, 4])
    ps.split(model, stages=2)  # with outlines now
    expected = copy.deepcopy(model)(batch())
    assert_same(model(batch()), expected)
    assert_same(pickle.loads(pickle.dumps(model))(batch()), expected)


def test_what_is_built_in_inference_can_be_trained() -> None:
    layer = Lazy(lambda: nn.Linear(4, 4))
    with torch.inference_mode():
        layer(batch())
    layer(batch()).sum().backward()
    assert layer.weight.grad is not None


def test_a_layer_that_fn_only_hands_out_is_shared_and_unharmed() -> None:
    linear = nn.Linear(4, 4)
    model = nn.Sequential(Lazy(lambda: linear), nn.Tanh(), Lazy(lambda: linear))
    plan = ps.split(model, stages=3)
    assert not linear.weight.is_meta
    assert plan.stage_module(0)[0].weight is linear.weight
    assert_same(run_stages(plan, (batch(),), {}), linear(torch.tanh(linear(batch()))))


# ── what it refuses, and what it cannot know ─────────────────────────────────────────────────────────────────────


def test_a_layer_that_cannot_be_outlined_counts_as_one_without_parameters() -> None:
    def layer() -> nn.Module:
        made = nn.Linear(4, 4)
        assert float(made.weight.detach().sum()) < 1e9  # no number comes from the meta device
        return made

    plan = ps.split(nn.Sequential(Lazy(layer), nn.Linear(4, 4)), stages=2)
    assert [stage.parameters for stage in plan.stages] == [0, 20]
    assert plan.stage_module(0).state_dict().keys() == {"0.weight", "0.bias"}


def test_data_that_fn_makes_anyway_is_not_kept_for_the_sizes() -> None:
    layer = Lazy(lambda: nn.Linear(4, 4, device="cpu"))
    outline = layer.outline()
    assert outline is not None
    assert all(parameter.is_meta for parameter in outline.parameters())
    assert not layer.build().weight.is_meta


@pytest.mark.parametrize("wrong", [lambda: 3, lambda: None, lambda: nn.Linear], ids=["3", "None", "class"])
def test_fn_must_return_a_module(wrong: Any) -> None:
    with pytest.raises(ps.PlanError, match=r"must return an nn\.Module, not "):
        Lazy(wrong).build()


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), 3, None], ids=["module", "number", "None"])
def test_a_function_is_needed(wrong: Any) -> None:
    with pytest.raises(ps.PlanError, match="Lazy takes a function that builds a layer"):
        Lazy(wrong)


def test_a_failing_fn_says_where_and_may_be_tried_again() -> None:
    class Fails:
        tried = 0

        def __call__(self) -> nn.Module:
            self.tried += 1
            if self.tried < 3:
                raise ValueError("no disk")
            return nn.ReLU()

    layer = Lazy(Fails(), seed=3)
    plan = ps.split(nn.Sequential(layer), stages=1)
    with pytest.raises(ValueError, match="no disk") as raised:
        plan.stage_module(0)
    assert raised.value.__notes__ == ["while building the layer of Lazy(Fails, seed=3)"]
    assert isinstance(plan.stage_module(0)[0], nn.ReLU)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_is_refused_and_the_layer_stays_as_it_was() -> None:
    layer = Lazy(lambda: torch.jit.script(nn.ReLU()))
    with pytest.raises(ps.PlanError, match="cannot be a ScriptModule"):
        layer.build()
    assert isinstance(layer, Lazy)


def test_a_layer_that_does_not_know_its_size_is_refused_when_it_is_lazy_too() -> None:
    with pytest.raises(ps.PlanError, match=r"layer 0 .*does not know its size"):
        ps.split(nn.Sequential(Lazy(lambda: nn.LazyLinear(3))), stages=1)
