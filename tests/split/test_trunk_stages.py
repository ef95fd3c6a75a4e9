"""The stages of a trunk: what they hold, what they send, and that they leave the model and each other alone."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.engine.shapes import FakeStage
from penstock.split.balance import balance_stages
from penstock.split.plan import run_stages
from penstock.split.trunk.line import TrunkChain, trunk_chain
from tests.split.trunk_models import WIDTH, Trunked, Usual, assert_staged, cut, hidden, tokens, tril

# ── the plan and its stages ──────────────────────────────────────────────────────────────────────────────────────


def test_layers_are_the_blocks_and_the_ends_carry_the_rest() -> None:
    line = trunk_chain(Usual(), "blocks")
    assert line.layers == ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
    names = [{name for name, _ in line.members(layer)} for layer in line.layers]
    assert {"embed.weight", "pos"} <= names[0]
    assert {"norm.weight", "head.bias"} <= names[3]
    assert all(name.startswith("blocks.1.") for name in names[1])
    every = {name for part in names for name in part}
    model = line.model
    assert every == {*dict(model.named_parameters()), *dict(model.named_buffers())}


def test_a_big_embedding_weighs_in_the_balance() -> None:
    model = Usual(6)
    model.embed = nn.Embedding(1000, WIDTH)
    line = trunk_chain(model, "blocks")
    assert len(balance_stages(line, balance=None, stages=3)[0]) == 1


def test_arguments_go_from_the_first_stage_straight_to_each_other() -> None:
    edges = {(edge.src, edge.dst): edge.values for edge in cut(Usual(), [1, 1, 1, 1]).edges}
    assert edges == {
        (0, 1): ("hidden", "arguments"),
        (0, 2): ("arguments",),
        (0, 3): ("arguments",),
        (1, 2): ("hidden",),
        (2, 3): ("hidden",),
    }


def test_what_only_the_end_needs_goes_only_there() -> None:
    class Scored(Trunked):
        def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x, mask)
            return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    (_, one), two = cut(Scored(), [1, 1, 2]).stage_module(0)({"ids": tokens(), "mask": tril(), "targets": tokens(2)})
    shapes = {"penstock.gave"}
    assert (set(one), set(two)) == ({"ids", "mask"} | shapes, {"ids", "mask", "targets"} | shapes)


def test_a_stage_has_its_own_modules_under_the_models_names_and_no_others() -> None:
    model = Usual()
    plan = cut(model, [1, 2, 1])
    modules = [plan.stage_module(s) for s in range(3)]
    assert modules[1].get_submodule("blocks.1") is model.blocks[1]
    assert modules[0].get_submodule("embed") is model.embed
    assert modules[2].get_submodule("head") is model.head
    names = [set(module.state_dict()) for module in modules]
    assert set.union(*names) == set(model.state_dict())
    assert sum(map(len, names)) == len(model.state_dict())
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for module in modules for name, p in module.named_parameters())


def test_splitting_leaves_the_model_alone() -> None:
    model = Usual()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    plan = cut(model, [2, 2])
    [plan.stage_module(s) for s in range(2)]
    assert {name: module.__dict__ for name, module in model.named_modules()} == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state())


def test_a_saved_plan_finds_its_trunk_again() -> None:
    line = TrunkChain.from_recipe(Usual(), {"front": "trunk", "blocks": "blocks"})
    assert line.recipe == {"front": "trunk", "blocks": "blocks"}


def test_stages_of_a_meta_model_are_materialised_one_by_one() -> None:
    with torch.device("meta"):
        model = Usual()
    plan = cut(model, [2, 2])
    stage = plan.stage_module(1).to_empty(device="cpu")
    assert {p.device.type for p in stage.parameters()} == {"cpu"}
    assert model.embed.weight.is_meta
    assert model.pos.is_meta
    for parameter in stage.parameters():
        nn.init.ones_(parameter)
    for block in (stage.get_submodule("blocks.2"), stage.get_submodule("blocks.3")):
        block.norm.reset_running_stats()
    output = stage((hidden(), {"ids": tokens(), "mask": None}))  # runs without the meta half
    assert output.shape == (3, 6, 16)
    assert output.device.type == "cpu"


def test_train_and_eval_of_stages_and_of_the_model() -> None:
    class Both(Trunked):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.drop(self.embed(ids))
            for block in self.blocks:
                x = F.dropout(block(x), 0.5, self.training)
            return self.head(self.drop(x))

    model = Both()
    plan = cut(model, [1, 2, 1])
    modules = [plan.stage_module(s) for s in range(3)]
    for module in modules:
        module.eval()
    assert not model.training
    assert_staged(model, plan, tokens(), modules=modules)
    model.train()
    model.blocks[1].eval()
    model.zero_grad()
    assert_staged(model, plan, tokens(), modules=modules)


def test_attributes_changed_after_the_split_count() -> None:
    class Scaled(Trunked):
        scale = 1.0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x) * self.scale
            return self.head(x)

    model = Scaled()
    plan = cut(model, [2, 2])
    modules = [plan.stage_module(s) for s in range(2)]
    model.scale = 3.0
    assert_staged(model, plan, tokens(), modules=modules)


def test_hooks_on_blocks_and_parts_run_once_on_the_models_own() -> None:
    model = Usual()
    seen: list[nn.Module] = []
    for part in (*model.blocks, model.embed, model.norm, model.head):
        part.register_forward_hook(lambda module, args, output: seen.append(module))
    run_stages(cut(model, [1, 1, 2]), (tokens(),), {})
    assert seen == [model.embed, *model.blocks, model.norm, model.head]


def test_stages_run_at_the_same_time_in_threads() -> None:
    model = Usual().eval()
    plan = cut(model, [1, 1, 1, 1])
    want = model(tokens()).detach()
    wrong: list[Any] = []

    def work() -> None:
        modules = [plan.stage_module(s) for s in range(4)]
        for _ in range(5):
            got = run_stages(plan, (tokens(),), {}, modules)
            if not torch.equal(got, want):
                wrong.append(got)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_of_stages_run_on_fake_tensors_and_touch_nothing() -> None:
    class Remembers(Usual):
        calls = 0

        def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(ids, mask)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Remembers()

        def forward(self, ids: Tensor) -> Tensor:
            return self.inner(ids)

    model = Model()
    plan = cut(model, [2, 2], "inner.blocks")
    state = copy.deepcopy(model.state_dict())
    fakes = [FakeStage(s, plan.stage_module(s), torch.device("cpu")) for s in range(2)]
    with fakes[0].mode:
        sent, arguments = fakes[0].run({"ids": torch.empty(3, 6, dtype=torch.long)})
    with fakes[1].mode:
        received = torch.empty(sent.shape)
        output = fakes[1].run((received, {"ids": torch.empty(3, 6, dtype=torch.long)}))
    assert output.shape == (3, 6, 16)
    assert model.inner.calls == 0
    assert "ids" in arguments
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_copied_stage_is_apart_from_the_model() -> None:
    model = Usual()
    plan = cut(model, [2, 2])
    copied = [copy.deepcopy(plan.stage_module(s)).eval() for s in range(2)]
    assert model.training
    run_stages(plan, (tokens(),), {}, copied).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_call_leaves_nothing_for_the_garbage_collector() -> None:
    model = Usual()
    plan = cut(model, [2, 2])
    modules = [plan.stage_module(s) for s in range(2)]
    gc.collect()
    gc.disable()
    try:
        sent, arguments = modules[0]({"ids": tokens()})
        watched = weakref.ref(sent)
        del sent
        assert watched() is None
        output = modules[1]((received := hidden(), arguments))
        watched = weakref.ref(received)
        del output, received
        assert watched() is None
    finally:
        gc.enable()


def test_stages_leave_no_mode_behind() -> None:
    model = Usual()
    plan = cut(model, [2, 2])
    run_stages(plan, (tokens(),), {})
    with pytest.raises(IndexError):
        run_stages(plan, (tokens() + 100,), {})
    assert torch.overrides._get_current_function_mode() is None
