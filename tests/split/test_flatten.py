"""``ps.flatten``: parts of a model as a Sequential that has the model's names."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.split.flatten import FlatSequential, flatten
from penstock.split.lazy import Lazy
from penstock.split.plan import run_stages
from penstock.split.skip import pop, skippable, stash
from tests.support.models import assert_same, batch, gradients, plain_step, snapshot


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + x)


class Net(nn.Module):
    """Like a ResNet: stem, a Sequential and a ModuleList of blocks, a head. The head is defined first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.conv1 = nn.Conv2d(2, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.body = nn.ModuleDict({"layer2": nn.ModuleList([Block(4), Block(4)])})
        self.avgpool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.relu(self.bn1(self.conv1(x))))
        for block in self.body["layer2"]:
            x = block(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


LIST: list[Any] = ["conv1", "bn1", "relu", "layer1", "body.layer2", "avgpool", lambda x: torch.flatten(x, 1), "fc"]


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def picture(seed: int = 1) -> Tensor:
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def target() -> Tensor:
    return torch.tensor([0, 1, 2, 1])


# ── the same model ───────────────────────────────────────────────────────────────────────────────────────────────


def test_it_computes_what_the_model_does() -> None:
    model = net()
    flat = flatten(model, LIST)
    expected = plain_step(model, picture(), target(), F.cross_entropy)
    output = flat(picture())
    F.cross_entropy(output, target()).backward()
    assert_same(output, expected.output)
    assert_same(gradients(flat), expected.gradients)
    assert_same(flat.state_dict(), expected.state)


def test_names_are_the_models_own() -> None:
    model = net()
    flat = flatten(model, LIST)
    assert dict(flat.named_parameters()).keys() == dict(model.named_parameters()).keys()
    assert [name for name, _ in flat.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert dict(flat.named_buffers()).keys() == dict(model.named_buffers()).keys()
    assert flat.state_dict().keys() == model.state_dict().keys()
    assert all(tensor is flat.get_parameter(name) for name, tensor in model.named_parameters())
    assert flat.get_submodule("layer1.0") is model.layer1[0]
    assert "layer1.0.conv.weight" in dict(flat.named_parameters())


def test_states_go_both_ways() -> None:
    one, other = net(), net()
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.add_(1)
    flat = flatten(other, LIST)
    flat.load_state_dict(one.state_dict())
    assert_same(dict(other.state_dict()), dict(one.state_dict()))
    net().load_state_dict(flat.state_dict())


def test_the_model_is_not_touched() -> None:
    model = net()
    model.layer1[0].eval()
    before, members, attributes = snapshot(model), list(model.named_modules()), set(vars(model))
    flat = flatten(model, LIST)
    plan = ps.split(flat, stages=3)
    modules = [plan.stage_module(s) for s in range(3)]
    assert_same(snapshot(model), before)
    assert list(model.named_modules()) == members
    assert set(vars(model)) == attributes
    assert [module.training for module in flat].count(False) == 1
    assert all(module.training for module in modules)


def test_it_is_a_sequential_of_the_layers() -> None:
    model = net()
    flat = flatten(model, LIST)
    assert isinstance(flat, nn.Sequential)
    assert len(flat) == 10
    assert flat[0] is model.conv1
    assert flat[-1] is model.fc
    assert list(flat)[3:7] == [*model.layer1, *model.body["layer2"]]
    assert flat[2:5] == [model.relu, *model.layer1]


def test_its_layers_are_fixed() -> None:
    for change in [
        lambda flat: flat.append(nn.ReLU()),
        lambda flat: flat.insert(0, nn.ReLU()),
        lambda flat: flat.extend([nn.ReLU()]),
        lambda flat: flat.pop(0),
        lambda flat: flat.__setitem__(0, nn.ReLU()),
        lambda flat: flat.__delitem__(0),
        lambda flat: flat.__iadd__(nn.Sequential()),
    ]:
        flat = flatten(net(), LIST)
        with pytest.raises(ps.PlanError, match="flatten the model again"):
            change(flat)
        assert len(flat) == 10


def test_train_and_eval_reach_all_layers() -> None:
    model = net()
    flat = flatten(model, LIST)
    flat.eval()
    assert not any(module.training for module in flat.modules())
    assert_same(flat(picture()), model.eval()(picture()))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda flat: pickle.loads(pickle.dumps(flat))])
def test_it_can_be_copied_and_pickled(again: Any) -> None:
    flat = flatten(net().eval(), [*LIST[:-2], nn.Flatten(), "fc"])
    other = again(flat)
    assert_same(other(picture()), flat(picture()))
    assert other[3] is other.get_submodule("layer1.0")
    assert not {id(p) for p in flat.parameters()} & {id(p) for p in other.parameters()}


def test_a_module_put_in_anothers_place_is_run() -> None:
    flat = flatten(net().eval(), LIST)
    flat.set_submodule("layer1.0", nn.Identity())
    assert isinstance(flat[3], nn.Identity)


# ── cut ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def balances(layers: int) -> Iterator[list[int]]:
    """Cuts into up to three stages, everywhere."""
    for cuts in itertools.chain([()], *(itertools.combinations(range(1, layers), n) for n in (1, 2))):
        yield [b - a for a, b in itertools.pairwise([0, *cuts, layers])]


def test_stages_have_the_models_names_over_every_balance() -> None:
    model = net()
    expected = plain_step(model, picture(), target(), F.cross_entropy)
    for sizes in balances(10):
        copied = copy.deepcopy(model)
        plan = ps.split(flatten(copied, LIST), balance=sizes)
        modules = [plan.stage_module(s) for s in range(plan.num_stages)]
        output = run_stages(plan, (picture(),), {}, modules)
        F.cross_entropy(output, target()).backward()
        assert_same(output, expected.output)
        assert_same(gradients(copied), expected.gradients)
        assert_same(copied.state_dict(), expected.state)
        named = [pair for module in modules for pair in module.named_parameters()]
        assert sorted(name for name, _ in named) == sorted(expected.gradients)
        assert all(copied.get_parameter(name) is parameter for name, parameter in named)
        assert {name for module in modules for name in module.state_dict()} == set(expected.state)


def test_layers_have_the_models_dotted_names() -> None:
    plan = ps.split(flatten(net(), LIST), balance=[3, 4, 3])
    assert plan.groups == [
        ("conv1", "bn1", "relu"),
        ("layer1.0", "layer1.1", "body.layer2.0", "body.layer2.1"),
        ("avgpool", "lambda_6", "fc"),
    ]
    assert sum(stage.parameters for stage in plan.stages) == sum(p.numel() for p in net().parameters())


def test_a_pipeline_trains_it_and_keeps_the_names() -> None:
    model = net().eval()
    expected = plain_step(model, picture(), target(), F.cross_entropy)
    plan = ps.split(flatten(model, LIST), stages=3)
    with ps.Pipeline(plan, F.cross_entropy, microbatches=2) as pipe:
        result = pipe.step(picture(), target())
        assert_same(result.loss, expected.loss)
        assert_same(gradients(pipe.named_parameters()), expected.gradients)
        assert pipe.state_dict().keys() == model.state_dict().keys()
        pipe.load_state_dict(net().state_dict())


def test_a_saved_plan_needs_the_same_list(tmp_path: Any) -> None:
    model = net()
    plan = ps.split(flatten(model, LIST), stages=3)
    plan.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json", flatten(model, LIST))
    assert again == plan
    assert again.stage_module(1).state_dict().keys() == plan.stage_module(1).state_dict().keys()
    with pytest.raises(ps.PlanError, match="another model"):
        ps.Plan.load(tmp_path / "plan.json", flatten(model, [*LIST[:-2], nn.Flatten(), "fc"]))


def test_a_stage_can_be_copied_with_other_tensors() -> None:
    stage = ps.split(flatten(net(), LIST), balance=[5, 5]).stage_module(0)
    fakes: dict[int, Any] = {id(p): nn.Parameter(torch.zeros_like(p)) for p in stage.parameters()}
    copied = copy.deepcopy(stage, dict(fakes))
    assert all(not p.any() for p in copied.parameters())
    assert_same(copied(picture()), torch.zeros(4, 4, 4, 4))


# ── entries ──────────────────────────────────────────────────────────────────────────────────────────────────────


def names(flat: FlatSequential) -> list[str]:
    return [layer for group in ps.split(flat, stages=1).groups for layer in group]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.seq = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


def test_a_named_list_is_expanded_one_level_and_a_module_stays_whole() -> None:
    model = Small()
    assert names(flatten(model, ["a", "seq"])) == ["a", "seq.0", "seq.1"]
    assert names(flatten(model, ["a", "seq.0", "seq.1"])) == ["a", "seq.0.0", "seq.0.1", "seq.1"]
    assert names(flatten(model, [model.a, model.seq])) == ["a", "seq"]
    whole = ps.split(flatten(model, [model.a, model.seq]), stages=2).stage_module(1)
    assert next(name for name, _ in whole.named_parameters()) == "seq.0.0.weight"


def test_a_sequential_with_a_forward_of_its_own_is_one_layer() -> None:
    class Residual(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return input + super().forward(input)

    model = nn.Module()
    model.seq = Residual(nn.Linear(4, 4), nn.Tanh())
    assert names(flatten(model, ["seq"])) == ["seq"]


class Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return self.by * x


def test_functions_are_named_after_themselves() -> None:
    softmax = functools.partial(F.softmax, dim=0)
    entries = ["a", torch.flatten, torch.tanh, torch.tanh, lambda x: x, softmax, Scale(2), "seq"]
    expected = ["a", "flatten", "tanh", "tanh_3", "lambda_4", "partial", "Scale", "seq.0", "seq.1"]
    assert names(flatten(Small(), entries)) == expected


def test_names_of_functions_and_strangers_keep_clear_of_the_models() -> None:
    model = nn.Module()
    model.tanh = nn.Linear(4, 4)
    model.pop = nn.Linear(4, 4)  # a method of Sequentials
    flat = flatten(model, [torch.tanh, "tanh", nn.Tanh(), "pop"])
    assert names(flat) == ["tanh_0", "tanh", "tanh_2", "pop"]
    assert flat.state_dict().keys() == model.state_dict().keys()
    flat.load_state_dict(model.state_dict())
    x = batch()
    assert_same(flat(x), model.pop(torch.tanh(model.tanh(torch.tanh(x)))))
    assert_same(run_stages(ps.split(flat, stages=4), (x,), {}), flat(x))


def test_a_module_listed_twice_is_shared_and_a_tie_between_stages() -> None:
    model = Small()
    flat = flatten(model, ["a", "seq", "a", model.a])
    assert names(flat) == ["a", "seq.0", "seq.1", "a:2", "a:3"]
    assert flat.state_dict().keys() == model.state_dict().keys()
    plan = ps.split(flat, balance=[1, 2, 2])
    assert [(tie.names, tie.stages) for tie in plan.ties] == [(("a.weight",), (0, 2)), (("a.bias",), (0, 2))]
    assert plan.stages[2].parameters == 20
    assert list(plan.stage_module(2)) == [model.a, model.a]
    assert_same(run_stages(plan, (batch(),), {}), model.a(model.a(model.seq(model.a(batch())))))
    expected = plain_step(flat, batch(), batch(seed=3), nn.functional.mse_loss)
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=2) as pipe:
        pipe.step(batch(), batch(seed=3))
        assert_same(gradients(pipe.named_parameters()), expected.gradients)


def test_a_module_and_a_part_of_it_may_both_be_listed() -> None:
    model = Small()
    flat = flatten(model, ["seq.1", model.seq, "a"])
    assert names(flat) == ["seq.1", "seq", "a"]
    assert flat.state_dict().keys() == model.state_dict().keys()
    plan = ps.split(flat, stages=3)
    assert plan.stage_module(0).state_dict().keys() == {"seq.1.weight", "seq.1.bias"}
    assert {tie.names for tie in plan.ties} == {("seq.1.weight",), ("seq.1.bias",)}
    assert_same(run_stages(plan, (batch(),), {}), model.a(model.seq(model.seq[1](batch()))))
    assert list(model.seq._modules) == ["0", "1"]


def test_a_module_that_the_model_has_under_two_names_keeps_both() -> None:
    model = Small()
    model.shared = model.seq[0][0]
    flat = flatten(model, ["a", "seq"])
    assert flat.state_dict().keys() == model.state_dict().keys()
    flat.load_state_dict(model.state_dict())
    plan = ps.split(flat, balance=[1, 2])
    stage = plan.stage_module(1)
    assert {"shared.weight", "seq.0.0.weight"} < stage.state_dict().keys()
    assert_same(run_stages(plan, (batch(),), {}), model.seq(model.a(batch())))


def test_skips_cross_between_the_layers_of_a_flat_model() -> None:
    @skippable(stash=["x"])
    class First(nn.Linear):
        def forward(self, x: Tensor) -> Iterator[Any]:  # type: ignore[override]
            yield stash("x", x)
            return super().forward(x)

    @skippable(pop=["x"])
    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Iterator[Any]:  # type: ignore[override]
            return super().forward(x) + (yield pop("x"))

    model = nn.Module()
    model.encoder = nn.ModuleList([First(4, 4), nn.Linear(4, 4)])
    model.decoder = nn.ModuleList([nn.Linear(4, 4), Last(4, 4)])
    flat = flatten(model, ["encoder", "decoder"])
    plan = ps.split(flat, stages=4)
    assert [(edge.src, edge.dst, edge.values) for edge in plan.edges] == [
        (0, 1, ()),
        (0, 3, ("x",)),
        (1, 2, ()),
        (2, 3, ()),
    ]
    assert plan.stage_module(3).state_dict().keys() == {"decoder.1.weight", "decoder.1.bias"}
    assert_same(run_stages(plan, (batch(),), {}), flat(batch()))


def test_lazy_parts_stay_lazy_until_their_stage_is_made() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList([Lazy(lambda: nn.Linear(4, 4)), Lazy(lambda: nn.Linear(4, 4))])
    plan = ps.split(flatten(model, ["parts"]), stages=2)
    assert plan.stage_module(1).state_dict().keys() == {"parts.1.weight", "parts.1.bias"}
    assert [isinstance(part, Lazy) for part in model.parts] == [True, False]


# ── what it refuses ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("con1", r"entry 1: there is no module 'con1' in Net: did you mean 'conv1'"),
        ("layer1.2", r"no module 'layer1\.2'.*'layer1\.[01]'"),
        ("layer1.0.cnv", r"did you mean 'layer1\.0\.conv'"),
        ("fc.weight", r"no module 'fc\.weight'"),
        ("", "there is no module ''"),
        ("forward", "there is no module 'forward'"),
    ],
)
def test_an_unknown_name_is_told_what_is_near(name: str, text: str) -> None:
    with pytest.raises(ps.PlanError, match=text):
        flatten(net(), ["conv1", name])


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (3, "entry 0 must be a name, a module or a function, but is 3"),
        (None, "but is None"),
        (nn.ReLU, "must be a name, a module or a function, but is <class"),
        ("body", r"'body', has no forward: list its members \('body\.layer2'\)"),
        (nn.ModuleList([nn.ReLU()]), r"has no forward"),
    ],
)
def test_an_entry_that_cannot_run_is_refused(entry: Any, text: str) -> None:
    with pytest.raises(ps.PlanError, match=text):
        flatten(net(), [entry])


def test_the_model_itself_is_no_part_of_it() -> None:
    model = net()
    with pytest.raises(ps.PlanError, match="entry 0 is the model itself"):
        flatten(model, [model])


@pytest.mark.parametrize("entries", ["conv1", 3, nn.Sequential()], ids=["name", "number", "module"])
def test_the_entries_are_a_list(entries: Any) -> None:
    with pytest.raises(ps.PlanError, match="flatten takes a list"):
        flatten(net(), entries)


def test_an_empty_list_is_refused() -> None:
    with pytest.raises(ps.PlanError, match="nothing is listed"):
        flatten(net(), [])


def test_parameters_and_buffers_that_would_be_lost_are_named() -> None:
    model = net()
    with pytest.raises(ps.PlanError, match=r"2 parameters.* lost: fc\.weight, fc\.bias\. .*partial=True"):
        flatten(model, LIST[:-1])
    assert len(flatten(model, LIST[:-1], partial=True)) == 9
    model.register_buffer("mean", torch.zeros(1))
    with pytest.raises(ps.PlanError, match="lost: mean"):
        flatten(model, LIST)
    model.register_buffer("mean", torch.zeros(1), persistent=False)
    flatten(model, LIST)
    model.shift = nn.Parameter(torch.zeros(1))
    with pytest.raises(ps.PlanError, match="lost: shift"):
        flatten(model, LIST)


def test_a_lazy_part_that_would_be_lost_is_named() -> None:
    model = nn.Module()
    model.parts = nn.ModuleList([Lazy(lambda: nn.Linear(4, 4)), Lazy(lambda: nn.Linear(4, 4))])
    with pytest.raises(ps.PlanError, match=r"lost: parts\.1\.weight, parts\.1\.bias"):
        flatten(model, ["parts.0"])


@pytest.mark.parametrize(
    ("where", "text"),
    [
        (lambda model: model, "the Net itself has hooks"),
        (lambda model: model.layer1, r"'layer1' \(Sequential\) has hooks"),
        (lambda model: model.body, r"'body' \(ModuleDict\) has hooks"),
    ],
)
def test_hooks_of_modules_that_nobody_would_call_are_refused(where: Any, text: str) -> None:
    model = net()
    where(model).register_forward_hook(lambda *args: None)
    with pytest.raises(ps.PlanError, match=text):
        flatten(model, LIST)


def test_hooks_on_layers_are_kept() -> None:
    model = net()
    seen = []
    model.layer1.register_forward_hook(lambda *args: seen.append("layer1"))
    model.fc.register_forward_hook(lambda *args: seen.append("fc"))
    flat = flatten(model, [*LIST[:3], model.layer1, *LIST[4:]])
    run_stages(ps.split(flat, stages=4), (picture(),), {})
    assert seen == ["layer1", "fc"]
