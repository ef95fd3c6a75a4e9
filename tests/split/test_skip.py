"""Skips in Sequentials: stash and pop, alone and in a plan, over every balance; and what does not match."""

from __future__ import annotations

import copy
import gc
import inspect
import itertools
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.split.lazy import Lazy
from penstock.split.plan import run_stages
from penstock.split.sequential import SequentialChain
from penstock.split.skip import (
    Namespace,
    SkipError,
    SkipUseError,
    pop,
    skippable,
    stash,
    stashed_values,
    verify_skippables,
)
from tests.support.models import assert_same, batch, gradients, mlp, plain_step, snapshot
from tests.support.ranks import run_ranks


@skippable(stash=["skip"])
class Down(nn.Module):
    """Half the resolution; what went in is kept for the way up."""

    def __init__(self, channels: int, *, wider: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, wider * channels, 2, stride=2)
        self.norm = nn.BatchNorm2d(wider * channels)

    def forward(self, x: Tensor) -> Iterator[Any]:
        yield stash("skip", x)
        return torch.tanh(self.norm(self.conv(x)))


@skippable(pop=["skip"])
class Up(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)

    def forward(self, x: Tensor) -> Iterator[Any]:
        skip = yield pop("skip")
        return self.conv(x) * torch.sigmoid(skip)


def unet() -> nn.Sequential:
    """Seven layers, three skips inside each other: 0 ─▶ 6, 1 ─▶ 5, 2 ─▶ 4."""
    torch.manual_seed(0)
    spaces = [Namespace() for _ in range(3)]
    return nn.Sequential(
        *(Down(2 * 2**i).isolate(space) for i, space in enumerate(spaces)),
        nn.Sequential(nn.Conv2d(16, 16, 1), nn.Tanh()),
        *(Up(2 * 2**i).isolate(spaces[i]) for i in (2, 1, 0)),
    )


def balances(layers: int) -> list[list[int]]:
    """Every way to cut so many layers into stages."""
    found = []
    for cuts in itertools.product((False, True), repeat=layers - 1):
        at = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), layers]
        found.append([b - a for a, b in itertools.pairwise(at)])
    return found


def picture(seed: int = 1) -> Tensor:
    return torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(seed))


# ── the class ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_decorated_class_is_still_itself() -> None:
    layer = Down(2, wider=3)
    assert isinstance(layer, Down)
    assert isinstance(layer, nn.Module)
    assert (Down.__name__, Down.__module__) == ("Down", __name__)
    assert Down.__doc__ == "Half the resolution; what went in is kept for the way up."
    assert str(inspect.signature(Down)) == "(channels: 'int', *, wider: 'int' = 2) -> 'None'"
    assert list(inspect.signature(layer.forward).parameters) == ["x"]
    assert set(dict(layer.named_parameters())) == {"conv.weight", "conv.bias", "norm.weight", "norm.bias"}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_layer_can_be_copied_and_pickled_with_its_namespace(again: Any) -> None:
    space = Namespace()
    down, up = again(Down(2).isolate(space)), again(Up(2).isolate(space))
    verify_skippables(nn.Sequential(down, up))
    assert down.stashes() == [(space, "skip")]


def test_a_subclass_with_a_forward_of_its_own_is_driven_too() -> None:
    class Twice(Down):
        def forward(self, x: Tensor) -> Iterator[Any]:
            yield stash("skip", 2 * x)
            return x

    @skippable(stash=["skip", "more"])
    class More(Down):
        def forward(self, x: Tensor) -> Iterator[Any]:
            yield stash("skip", x)
            yield stash("more", x)
            return x

    x = picture()
    assert_same(nn.Sequential(Twice(2), _Popped("skip"))(x), 2 * x)
    assert_same(nn.Sequential(More(2), _Popped("skip"), _Popped("more"))(x), x)


class _Popped(nn.Module):
    """The popped value itself, of whatever name."""

    def __new__(cls, name: str) -> Any:
        @skippable(pop=[name])
        class Popped(nn.Module):
            def forward(self, x: Any) -> Iterator[Any]:
                return (yield pop(name))

        return Popped()


def _stashed(*names: str, value: Any = ...) -> Any:
    """The identity, which stashes its input (or ``value``) under some names."""

    @skippable(stash=names)
    class Stashed(nn.Module):
        def forward(self, x: Any) -> Iterator[Any]:
            for name in names:
                yield stash(name, x if value is ... else value)
            return x

    return Stashed()


def test_a_forward_that_asks_for_nothing_may_be_a_plain_function() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert_same(Plain()(torch.ones(2)), torch.full((2,), 2.0))


def test_hooks_see_the_output_and_not_the_generator() -> None:
    seen = []
    layer = _stashed("a")
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    nn.Sequential(layer, _Popped("a"))(torch.ones(2))
    assert_same(seen, [torch.ones(2)])


# ── alone ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_it_works_without_a_pipeline() -> None:
    model, x = unet().eval(), picture()
    skips, y = [], x
    for down in model[:3]:
        skips.append(y)
        y = torch.tanh(down.norm(down.conv(y)))
    y = model[3](y)
    for up in model[4:]:
        y = up.conv(y) * torch.sigmoid(skips.pop())
    assert_same(model(x), y)


def test_none_may_be_stashed() -> None:
    seen = []
    model = nn.Sequential(_stashed("a", value=None), _Popped("a"))
    model[1].register_forward_hook(lambda module, args, output: seen.append(output))
    model(torch.ones(2))
    assert seen == [None]


class _Watch(nn.Module):
    """The identity, which notes whether the watched tensors are alive when it runs."""

    def __init__(self, watched: list[weakref.ref[Tensor]], alive: list[list[bool]]) -> None:
        super().__init__()
        self.note = lambda: alive.append([ref() is not None for ref in watched])

    def forward(self, x: Tensor) -> Tensor:
        gc.collect()
        self.note()
        return x


@skippable(stash=["made"])
class _Make(nn.Module):
    """Stashes a tensor that nothing else holds."""

    def __init__(self, watched: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.watch = lambda tensor: watched.append(weakref.ref(tensor))

    def forward(self, x: Tensor) -> Iterator[Any]:
        made = x + 1
        self.watch(made)
        yield stash("made", made)
        del made
        return x.clone()


@skippable(pop=["made"])
class _Use(nn.Module):
    def forward(self, x: Tensor) -> Iterator[Any]:
        made = yield pop("made")
        return x + made


def _watched() -> tuple[nn.Sequential, list[list[bool]]]:
    watched: list[weakref.ref[Tensor]] = []
    alive: list[list[bool]] = []
    layers = [_Make(watched), _Watch(watched, alive), _Use(), *(_Watch(watched, alive) for _ in range(2))]
    return nn.Sequential(*layers), alive


def test_a_popped_value_is_freed() -> None:
    model, alive = _watched()
    with torch.no_grad():
        model(torch.ones(2))
    assert alive == [[True], [False], [False]]


@pytest.mark.slow
def test_in_a_plan_nothing_but_the_edge_holds_a_skip() -> None:
    for sizes in balances(5):
        model, alive = _watched()
        plan = ps.split(model, balance=sizes)
        with torch.no_grad():
            run_stages(plan, (torch.ones(2),), {})
        made, used, watched = (next(s for s, group in enumerate(plan.groups) if name in group) for name in "024")
        inside = made == used  # else its stage's caller holds it, as every argument, until the stage is through
        assert alive[0] == [True]
        assert alive[2] == [not inside and used == watched]
        assert not held()


def held() -> dict[Any, Any]:
    """Values stashed in this thread and not popped yet."""
    return stashed_values()


def test_a_call_that_fails_leaves_no_values_to_the_next() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() < 0:
                raise ValueError("negative")
            return x

    model = nn.Sequential(_stashed("a"), Fails(), _Popped("a"))
    with pytest.raises(ValueError, match="negative"):
        model(-torch.ones(2))
    assert_same(model(torch.ones(2)), torch.ones(2))

    @skippable(pop=["a"])
    class FailsToo(nn.Module):
        def forward(self, x: Tensor) -> Iterator[Any]:
            yield pop("a")
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        nn.Sequential(_stashed("a"), _stashed("b"), FailsToo())(torch.ones(2))
    assert not held()


def test_threads_do_not_see_each_others_values() -> None:
    _stashed("a")(torch.ones(2))
    failed: list[BaseException] = []

    def other() -> None:
        try:
            _Popped("a")(torch.ones(2))
        except SkipUseError as error:
            failed.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(failed) == 1
    _Popped("a")(torch.ones(2))


# ── in a plan ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_unet_equals_itself_over_every_balance() -> None:
    for sizes in balances(7):
        model = unet()
        expected = plain_step(model, picture(), picture(2), nn.functional.mse_loss)
        before = snapshot(model)
        plan = ps.split(model, balance=sizes)
        modules = [plan.stage_module(s) for s in range(plan.num_stages)]
        assert_same(snapshot(model), before)
        output = run_stages(plan, (picture(),), {}, modules)
        nn.functional.mse_loss(output, picture(2)).backward()
        assert_same(output, expected.output)
        assert_same(gradients(model), expected.gradients)
        assert_same(model.state_dict(), expected.state)
        named = [name for module in modules for name, _ in module.named_parameters()]
        assert sorted(named) == sorted(dict(model.named_parameters()))
        assert {name for module in modules for name in module.state_dict()} == set(model.state_dict())


def test_every_value_travels_once() -> None:
    """Of the activation one value crosses each cut; of a skip one, however many cuts it passes."""
    for sizes in balances(7):
        model = unet()
        plan = ps.split(model, balance=sizes)
        sent: list[int] = []
        edge_values: dict[tuple[int, int], Any] = {}
        for s in range(plan.num_stages):
            taken = [
                edge_values.pop((edge.src, s)) for edge in sorted(plan.edges, key=lambda e: e.src) if edge.dst == s
            ]
            output = plan.stage_module(s)(*(taken or [picture()]))
            out = sorted((edge for edge in plan.edges if edge.src == s), key=lambda e: e.dst)
            for edge, value in zip(out, output if len(out) > 1 else [output], strict=False):
                values = value if isinstance(value, tuple) else (value,)
                assert len(values) == max(1, len(edge.values))
                edge_values[edge.src, edge.dst] = value
                sent += [tensor.nbytes for tensor in values]
        full = picture().nbytes  # halved on the way down: half the height and width, twice the channels
        after = [full // 2, full // 4, full // 8, full // 8, full // 4, full // 2]  # each layer but the last
        stage_of = {layer: s for s, group in enumerate(plan.groups) for layer in group}
        cuts = [after[i] for i in range(6) if stage_of[str(i)] != stage_of[str(i + 1)]]
        skips = [full // 2**i for i in range(3) if stage_of[str(i)] != stage_of[str(6 - i)]]
        assert sorted(sent) == sorted(cuts + skips)


@pytest.mark.slow
def test_a_unet_is_trained_as_the_plain_one() -> None:
    model = unet().eval()  # BatchNorm looks across the batch
    expected = plain_step(model, picture(), picture(2), nn.functional.mse_loss)
    for number, sizes in enumerate(balances(7)):
        model, schedule = unet().eval(), ("gpipe", "1f1b")[number % 2]
        with ps.Pipeline(ps.split(model, balance=sizes), nn.MSELoss(), microbatches=3, schedule=schedule) as pipe:
            result = pipe.step(picture(), picture(2))
            assert_same(result.loss, expected.loss)
            assert_same(result.outputs, expected.output)
            assert_same(gradients(pipe.named_parameters()), expected.gradients)


def processes(rank: int) -> None:
    for sizes, schedule in [([3, 1, 3], "1f1b"), ([2, 2, 3], "gpipe"), ([1, 5, 1], "1f1b"), ([1, 1, 5], "zb_h1")]:
        model = unet().eval()
        expected = plain_step(model, picture(), picture(2), nn.functional.mse_loss)
        plan = ps.split(model, balance=sizes)
        with ps.Pipeline(plan, nn.MSELoss(), microbatches=3, schedule=schedule, mesh=ps.Mesh()) as pipe:
            assert_same(pipe.step(picture(), picture(2)).loss, expected.loss)
            mine = dict(pipe.named_parameters())
            assert_same(gradients(mine.items()), {name: expected.gradients[name] for name in mine})


def test_a_unet_is_trained_in_processes_as_the_plain_one() -> None:
    assert run_ranks(processes, 3) == [None] * 3


def edges(plan: ps.Plan) -> list[tuple[int, int, tuple[str, ...]]]:
    return [(edge.src, edge.dst, edge.values) for edge in plan.edges]


def test_skips_go_straight_to_their_stage_and_share_the_edge_that_is_there() -> None:
    assert edges(ps.split(unet(), balance=[1, 1, 1, 1, 1, 1, 1])) == [
        (0, 1, ()),
        (0, 6, ("skip@1",)),
        (1, 2, ()),
        (1, 5, ("skip@2",)),
        (2, 3, ()),
        (2, 4, ("skip@3",)),
        (3, 4, ()),
        (4, 5, ()),
        (5, 6, ()),
    ]
    assert edges(ps.split(unet(), balance=[2, 2, 3])) == [
        (0, 1, ()),
        (0, 2, ("skip@1", "skip@2")),
        (1, 2, ("3", "skip@3")),
    ]
    assert edges(ps.split(unet(), balance=[3, 4])) == [(0, 1, ("2", "skip@1", "skip@2", "skip@3"))]
    assert edges(ps.split(unet(), stages=1)) == []


def test_an_edge_of_one_value_carries_it_itself_and_one_of_several_a_tuple() -> None:
    model = nn.Sequential(_stashed("a"), _stashed("b"), nn.Tanh(), _Popped("b"), nn.Sequential(_Popped("a")))
    plan = ps.split(model, balance=[1, 1, 1, 2])
    assert edges(plan) == [(0, 1, ()), (0, 3, ("a",)), (1, 2, ()), (1, 3, ("b",)), (2, 3, ())]
    x = batch()
    assert_same(plan.stage_module(0)(x), (x, x))
    both = ps.split(model, balance=[2, 1, 2])
    assert_same(both.stage_module(0)(x), (x, (x, x)))
    assert_same(both.stage_module(2)((x, 2 * x), 3 * x), x)
    near = ps.split(model, balance=[3, 2])
    assert_same(near.stage_module(0)(x), (torch.tanh(x), x, x))


def test_none_and_things_that_are_no_tensors_may_cross() -> None:
    model = nn.Sequential(_stashed("a", value=None), nn.Tanh(), _Popped("a"))
    assert run_stages(ps.split(model, stages=3), (batch(),), {}) is None
    sizes = nn.Sequential(_stashed("a", value=(3, "nearest")), nn.Tanh(), _Popped("a"))
    assert run_stages(ps.split(sizes, stages=3), (batch(),), {}) == (3, "nearest")


def test_stages_without_skips_in_or_out_are_plain_sequentials() -> None:
    plan = ps.split(nn.Sequential(*mlp(2), _stashed("a"), _Popped("a"), *mlp(2)), balance=[3, 2, 3])
    assert [type(plan.stage_module(s)) for s in range(3)] == [nn.Sequential] * 3
    assert edges(plan) == [(0, 1, ()), (1, 2, ())]
    crossed = ps.split(nn.Sequential(*mlp(2), _stashed("a"), _Popped("a"), *mlp(2)), balance=[4, 1, 3])
    assert [type(crossed.stage_module(s)) is nn.Sequential for s in range(3)] == [False, False, True]


def test_a_cut_costs_what_crosses_it() -> None:
    line = SequentialChain(unet())
    assert [line.crossing(cut) for cut in range(1, 7)] == [2, 3, 4, 4, 3, 2]


def test_a_plan_with_skips_prints_and_is_read_again(tmp_path: Any) -> None:
    model = unet()
    plan = ps.split(model, balance=[2, 2, 3])
    assert [line[-3:].strip() for line in str(plan).splitlines()[2:]] == ["1 2", "2", "-"]
    plan.save(tmp_path / "plan.json")
    again = ps.Plan.load(tmp_path / "plan.json", model)
    assert again == plan
    model.eval()
    assert_same(run_stages(again, (picture(),), {}), model(picture()))


def test_a_stage_can_be_copied() -> None:
    model = unet().eval()
    plan = ps.split(model, balance=[2, 2, 3])
    copied = [copy.deepcopy(plan.stage_module(s)) for s in range(3)]
    assert_same(run_stages(plan, (picture(),), {}, copied), model(picture()))
    assert not {id(p) for p in model.parameters()} & {id(p) for stage in copied for p in stage.parameters()}


def test_modes_are_kept_and_followed() -> None:
    model = unet()
    model[1].eval()
    stage = ps.split(model, balance=[3, 4]).stage_module(0)
    assert [stage.training, *(layer.training for layer in stage)] == [True, True, False, True]
    stage.eval()
    assert not any(module.training for module in stage.modules())


# ── namespaces ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_copies_of_a_module_are_kept_apart_by_namespaces() -> None:
    def half(space: Namespace) -> list[nn.Module]:
        return [_stashed("a").isolate(space), nn.Linear(4, 4), _Popped("a").isolate(space), nn.Tanh()]

    inner, outer = half(Namespace()), half(Namespace())
    model = nn.Sequential(*outer[:2], *inner, *outer[2:])  # one inside the other
    x = batch()
    assert_same(model(x), torch.tanh(x))
    for sizes in balances(len(model)):
        plan = ps.split(model, balance=sizes)
        assert_same(run_stages(plan, (x,), {}), torch.tanh(x))
    with pytest.raises(SkipError, match="and again by 1"):
        ps.split(nn.Sequential(_stashed("a"), _stashed("a"), _Popped("a"), _Popped("a")), stages=2)


def test_only_some_names_may_be_isolated() -> None:
    space = Namespace()
    layer = _stashed("a", "b")
    assert layer.isolate(space, only=["b"]) is layer
    assert layer.stashes() == [(None, "a"), (space, "b")]
    verify_skippables(nn.Sequential(layer, _Popped("b").isolate(space), _Popped("a")))
    with pytest.raises(SkipError):
        verify_skippables(nn.Sequential(layer, _Popped("b"), _Popped("a")))


def test_isolate_says_what_it_does_not_know() -> None:
    with pytest.raises(ps.PlanError, match=r"declares 'a', but 'c' was to be isolated"):
        _stashed("a").isolate(Namespace(), only=["c"])
    with pytest.raises(ps.PlanError, match="only must be a list of names"):
        _stashed("a").isolate(Namespace(), only="a")


def test_isolation_is_of_one_layer_and_not_of_its_class() -> None:
    one, other = Down(2), Down(2)
    one.isolate(Namespace())
    assert other.stashes() == [(None, "skip")]


# ── what does not match ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("layers", "kind", "text"),
    [
        (["+a"], "not popped", r"'a' is stashed by 0 \(Stashed\), but no layer pops it"),
        (["-a"], "not stashed", r"'a' is popped by 0 \(Popped\), but no layer stashes it"),
        (["-a", "+a"], "popped before stashed", r"'a' is popped by 0 \(Popped\) before 1 \(Stashed\) stashes it"),
        (["+a", "+a", "-a"], "stashed twice", r"'a' is stashed by 0 \(Stashed\) and again by 1 \(Stashed\)"),
        (["+a", "-a", "-a"], "popped twice", r"'a' is popped by 1 \(Popped\) and again by 2 \(Popped\)"),
    ],
)
def test_every_mismatch_has_its_words(layers: list[str], kind: str, text: str) -> None:
    model = nn.Sequential(*(_stashed(name[1:]) if name[0] == "+" else _Popped(name[1:]) for name in layers))
    with pytest.raises(SkipError, match=text) as raised:
        verify_skippables(model)
    assert [(fault.kind, fault.name) for fault in raised.value.faults] == [(kind, "a")]
    with pytest.raises(SkipError, match=text):
        ps.split(model, stages=1)


def test_all_mismatches_are_in_one_message() -> None:
    nested = nn.Sequential(_stashed("b"), _Popped("d"))
    model = nn.Sequential(_Popped("c"), _stashed("a"), nested, _Popped("b"), _stashed("c"))
    with pytest.raises(SkipError) as raised:
        ps.split(model, stages=2)
    assert str(raised.value) == (
        "stash and pop do not match:\n"
        "  - 'a' is stashed by 1 (Stashed), but no layer pops it\n"
        "  - 'c' is popped by 0 (Popped) before 4 (Stashed) stashes it\n"
        "  - 'd' is popped by 2.1 (Popped), but no layer stashes it"
    )
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ps.PlanError)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.faults) == (str(raised.value), raised.value.faults)


def test_a_layer_that_stashes_for_itself_is_told_so() -> None:
    @skippable(stash=["a"], pop=["a"])
    class Both(nn.Module):
        """Never run."""

    with pytest.raises(SkipError, match=r"'a' is both stashed and popped by 0 \(Both\)"):
        verify_skippables(nn.Sequential(Both()))


def test_one_layer_in_two_places_stashes_twice() -> None:
    layer = _stashed("a")
    with pytest.raises(SkipError, match="again by 1"):
        verify_skippables(nn.Sequential(layer, layer, _Popped("a")))


def test_only_sequentials_can_be_verified() -> None:
    with pytest.raises(ps.PlanError, match="but this is a Linear"):
        verify_skippables(nn.Linear(2, 2))


def test_skippables_inside_layers_are_seen() -> None:
    class Wrapped(nn.Module):
        """Runs its two members the other way round than they stand here."""

        def __init__(self, last: nn.Module, first: nn.Module) -> None:
            super().__init__()
            self.last, self.first = last, first

        def forward(self, x: Tensor) -> Any:
            return self.last(self.first(x))

    x = batch()
    inside = nn.Sequential(Wrapped(_Popped("a"), _stashed("a")), nn.Tanh())
    assert edges(ps.split(inside, stages=2)) == [(0, 1, ())]
    across = nn.Sequential(
        nn.Sequential(nn.Tanh(), nn.Sequential(_stashed("a"))), nn.Tanh(), Wrapped(nn.Tanh(), _Popped("a"))
    )
    plan = ps.split(across, stages=3)
    assert edges(plan) == [(0, 1, ()), (0, 2, ("a",)), (1, 2, ())]
    assert_same(run_stages(plan, (x,), {}), across(x))


def test_skippables_inside_lazy_layers_are_seen() -> None:
    model = nn.Sequential(Lazy(lambda: _stashed("a")), nn.Tanh(), Lazy(lambda: _Popped("a")))
    plan = ps.split(model, stages=3)
    assert edges(plan) == [(0, 1, ()), (0, 2, ("a",)), (1, 2, ())]
    assert_same(run_stages(plan, (batch(),), {}), batch())


# ── what goes wrong while running ────────────────────────────────────────────────────────────────────────────────


def _layer(forward: Any, stash: list[str] = [], pop: list[str] = []) -> nn.Module:  # noqa: B006
    return skippable(stash=stash, pop=pop)(type("Odd", (nn.Module,), {"forward": forward}))()


def _stash_undeclared(self: Any, x: Any) -> Any:
    yield stash("b", x)
    return x


def _pop_undeclared(self: Any, x: Any) -> Any:
    yield pop("b")
    return x


def _nothing(self: Any, x: Any) -> Any:
    yield from ()
    return x


def _stash_twice(self: Any, x: Any) -> Any:
    yield stash("a", x)
    yield stash("a", x)
    return x


def _pop_twice(self: Any, x: Any) -> Any:
    yield pop("a")
    yield pop("a")
    return x


def _yields_its_output(self: Any, x: Any) -> Any:
    yield stash("a", x)
    yield x


def test_a_forward_must_do_what_it_declares() -> None:
    for forward, declared, text in [
        (_stash_undeclared, {"stash": ["a"]}, r"Odd does not declare to stash 'b': say @skippable\(stash=\['b', …\]\)"),
        (_pop_undeclared, {"stash": ["b"]}, r"Odd does not declare to pop 'b'"),
        (_nothing, {"stash": ["a", "b"]}, "Odd declares to stash 'a', 'b', but its forward ended without"),
        (_nothing, {"pop": ["a"]}, "Odd declares to pop 'a', but"),
        (_nothing, {"stash": ["a"], "pop": ["b"]}, "Odd declares to stash 'a' and to pop 'b', but"),
        (lambda self, x: x, {"stash": ["a"]}, "Odd declares to stash 'a', but"),
        (_stash_twice, {"stash": ["a"]}, "Odd has stashed 'a' already"),
        (_pop_twice, {"pop": ["a"]}, "Odd has popped 'a' already"),
        (_pop_twice, {"pop": ["a", "z"]}, "Odd has popped 'a' already"),
        (_yields_its_output, {"stash": ["a"]}, "the forward of Odd yields a Tensor.* must return its output"),
    ]:
        before = [_stashed("a")] if "a" in declared.get("pop", []) else []
        with pytest.raises(SkipUseError, match=text) as raised:
            nn.Sequential(*before, _layer(forward, **declared))(torch.ones(2))
        assert isinstance(raised.value, RuntimeError)


def test_a_pop_in_another_namespace_says_so() -> None:
    with pytest.raises(SkipUseError, match="has stashed that in its namespace"):
        nn.Sequential(_stashed("a"), _Popped("a").isolate(Namespace()))(torch.ones(2))


def test_a_layer_that_is_not_run_has_stashed_nothing() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _stashed("a")

        def forward(self, x: Tensor) -> Tensor:
            return x

    plan = ps.split(nn.Sequential(Sometimes(), nn.Tanh(), _Popped("a")), stages=3)
    with pytest.raises(SkipUseError, match="'a' goes to a later stage, but the layer that stashes it did not run"):
        run_stages(plan, (batch(),), {})


@pytest.mark.parametrize("wrong", ["a", [1]], ids=repr)
def test_names_are_a_list_of_names(wrong: Any) -> None:
    with pytest.raises(ps.PlanError, match="stash"):
        skippable(stash=wrong)
