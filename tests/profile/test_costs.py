"""Costs as data: what can be written, what is refused and how, and costs between the sizes that were measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, Overhead, Profile, SharedParameters
from tests.support.published import work_of


def layer(name: str, **changed: Any) -> LayerCosts:
    values = {"forward": 1.0, "input_gradient": 2.0, "weight_gradient": 3.0, "recompute": 0.5, "activation": 100}
    values |= {"parameters": 10, "gradients": 10, "optimizer": 20}
    return LayerCosts(name, **{**values, **changed})


def model(**changed: Any) -> ModelCosts:
    values: dict[str, Any] = {
        "layers": (layer("a"), layer("b", backward=4.5, buffers=7, deferred=120), layer("c")),
        "crossings": (Crossing(0, 1, 64), Crossing(0, 2, 64, ((0, 48), (1, 16))), Crossing(1, 2, 32.5)),
        "samples": 4,
        "shared": (SharedParameters((0, 2), 10),),
        "kept_together": ((0, 1, 64.0),),
        "link": Link(1e-5, 1e9, 1e-6, 2e9),
        "device": "cuda",
        "overhead": Overhead(forward=1e-5),
    }
    return ModelCosts(**{**values, **changed})


# ── files ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    profile = Profile((model(samples=2), model()))
    profile.save(path)
    assert Profile.load(path) == profile
    for costs in (model(), model(link=Link()), model(crossings=(Crossing(0, 1, 5, ((3, 5),)), Crossing(1, 2, 0)))):
        assert Profile.from_json(Profile((costs,)).to_json()) == Profile((costs,))


def test_a_file_is_plain_json() -> None:
    json.loads(Profile((model(),)).to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    endless = model(link=Link(), crossings=(Crossing(0, 1, 1e30), Crossing(1, 2, 0)))
    json.loads(Profile((endless,)).to_json(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_what_is_written_by_hand_has_defaults() -> None:
    """The recomputed forward is a forward; gradients are as large as parameters, Adam's states twice as large."""
    profile = Profile.from_json("""
        {"layers": [
            {"name": "in", "forward": 1, "input_gradient": 0, "weight_gradient": 1, "activation": 8, "parameters": 10,
             "output": 64},
            {"name": "out", "forward": 2, "input_gradient": 2, "weight_gradient": 2, "activation": 8, "parameters": 0,
             "optimizer": 5, "recompute": 1}
        ]}""")
    (costs,) = profile.sizes
    first, last = costs.layers
    assert first == LayerCosts("in", 1, 0, 1, 1, 8, 10, 10, 20)
    assert (last.recompute, last.gradients, last.optimizer) == (1, 0, 5)
    assert costs.crossings == (Crossing(0, 1, 64),)
    assert (costs.samples, costs.link, costs.shared) == (1, Link(), ())


def by_hand(**changed: Any) -> dict[str, Any]:
    needed = {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 1, "parameters": 1}
    layers: list[Any] = [{"name": name, **needed, "output": 5} for name in "abc"]
    return {"layers": layers, **changed}


def read(data: Any) -> ModelCosts:
    (costs,) = Profile.from_json(json.dumps(data), "costs.json").sizes
    return costs


def test_layers_are_named_or_numbered_and_skips_come_in_any_order() -> None:
    costs = read(
        by_hand(
            crossings=[{"src": "a", "dst": "c", "bytes": 7}],
            shared=[{"layers": ["a", 2], "bytes": 1}],
            kept_together=[["b", "c", 1]],
            link={"latency": 1e-6},
        )
    )
    assert costs.crossings == (Crossing(0, 1, 5), Crossing(0, 2, 7), Crossing(1, 2, 5))
    assert costs.shared == (SharedParameters((0, 2), 1),)
    assert costs.kept_together == ((1, 2, 1),)
    assert costs.link == Link(1e-6)


def layer_with(**changed: Any) -> dict[str, Any]:
    data = by_hand()
    data["layers"][1] |= changed
    return data


def without(key: str) -> dict[str, Any]:
    data = by_hand()
    del data["layers"][1][key]
    return data


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (layer_with(forward=math.nan), "layer 'b': forward is nan: it must be a number, from 0 up"),
        (layer_with(activation=math.inf), "layer 'b': activation is inf"),
        (layer_with(weight_gradient=-1), "layer 'b': weight_gradient is -1"),
        (layer_with(parameters="many"), "layer 'b': parameters is 'many'"),
        (layer_with(optimizer=True), "layer 'b': optimizer is True"),
        (layer_with(backward=-0.5), "layer 'b': backward is -0.5"),
        (layer_with(deferred=-1), "layer 'b': deferred is -1"),
        (layer_with(forward=None), "layer 'b' has no forward"),
        (layer_with(output=math.nan), "from layer 1 to layer 2: bytes is nan"),
        (layer_with(fordward=1), "layer 'b' has an unknown key 'fordward': did you mean 'forward'?"),
        (layer_with(name="a"), "two layers called 'a'"),
        (layer_with(name=3), "name must be a text, got 3"),
        (without("name"), "layer number 1 has no name"),
        (without("input_gradient"), "layer 'b' has no input_gradient"),
        (without("output"), "layer 'b' has no output"),
        (by_hand(crossings=[{"src": 0, "dst": 9, "bytes": 1}]), "[0, 9], but the layers are 0 to 2"),
        (by_hand(crossings=[{"src": 2, "dst": 0, "bytes": 1}]), "the earlier layer first"),
        (by_hand(crossings=[{"src": 0, "dst": 2, "bytes": 1}] * 2), "each pair once"),
        (by_hand(crossings=[{"src": 0, "dst": 1, "bytes": 1}]), "layer 'a' has an output and a crossing"),
        (by_hand(crossings=[{"src": "aa", "dst": 2, "bytes": 1}]), "layer 'aa', which does not exist"),
        (by_hand(crossings=[{"src": 0, "dst": 2}]), "a crossing has no bytes"),
        (by_hand(crossings=[{"src": 0, "dst": 2, "bytes": 9, "values": [[0, 4]]}]), "its values have 4 together"),
        (by_hand(crossings={"src": 0}), "crossings must be a list"),
        (by_hand(shared=[{"layers": [1], "bytes": 1}]), "shared between layers [1]"),
        (by_hand(shared=[{"layers": [0, 1], "bytes": math.nan}]), "layers [0, 1] share: bytes is nan"),
        (by_hand(kept_together=[[0, 1]]), "write [layer, layer, bytes]"),
        (by_hand(kept_together=[[0, 1, -1]]), "activations saved by layers 0 and 1: bytes is -1"),
        (by_hand(samples=0), "samples=0 must be a whole number, from 1 up"),
        (by_hand(samples=1.5), "samples=1.5 must be a whole number"),
        (by_hand(link={"latency": math.nan}), "link: latency is nan"),
        (by_hand(link={"bandwidth": 0}), "link: bandwidth is 0"),
        (by_hand(link={"bandwith": 1}), "did you mean 'bandwidth' or"),
        (by_hand(link={"host": -1}), "link: host is -1"),
        (by_hand(link={"host_bandwidth": 0}), "link: host_bandwidth is 0"),
        (by_hand(device=3), "device is 3"),
        (by_hand(overhead={"forward": -1}), "overhead: forward is -1"),
        (by_hand(overhead={"forwards": 1}), "did you mean 'forward'?"),
        (by_hand(penstock_costs=7), "format 7 cannot be read here"),
        (by_hand(layer=[]), "did you mean 'layers'?"),
        ({"layers": []}, "costs have no layers"),
        ({}, "costs has no layers"),
        ([], "costs must be an object"),
        ({"layers": [3]}, "layer number 0 must be an object"),
        ({"sizes": [by_hand()], "samples": 3}, "both sizes and samples"),
    ],
)
def test_bad_costs_are_refused_with_the_place(data: Any, words: str) -> None:
    with pytest.raises(ps.PlanError) as caught:
        read(data)
    assert words in str(caught.value)
    assert str(caught.value).startswith("costs.json: ")


def test_what_is_no_file_of_costs(tmp_path: Path) -> None:
    with pytest.raises(ps.PlanError, match=r"nowhere\.json cannot be read as costs"):
        Profile.load(tmp_path / "nowhere.json")
    (tmp_path / "costs.json").write_text("{layers}")
    with pytest.raises(ps.PlanError, match=r"costs\.json is not JSON"):
        Profile.load(tmp_path / "costs.json")
    (tmp_path / "costs.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ps.PlanError, match="cannot be read as costs"):
        Profile.load(tmp_path / "costs.json")


def test_costs_made_by_a_program_are_checked_as_well() -> None:
    with pytest.raises(ps.PlanError, match="sorted by source"):
        model(crossings=(Crossing(1, 2, 1), Crossing(0, 1, 1)))
    with pytest.raises(ps.PlanError, match="layer 'x': recompute is nan"):
        layer("x", recompute=math.nan)


def test_the_costs_need_no_torch() -> None:
    """A plan is made on any machine: these files are read where the package's own imports are not."""
    code = (
        "import sys, types\n"
        "package = types.ModuleType('penstock'); package.__path__ = [sys.argv[1]]; sys.modules['penstock'] = package\n"
        "from penstock.profile import analytic, costs\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(ps.__file__).parent)], check=True, timeout=60)


# ── a layer's numbers ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_backward_that_was_not_measured_takes_as_long_as_both_halves() -> None:
    assert layer("x").full_backward == 5.0
    assert layer("x", backward=4.5).full_backward == 4.5
    assert work_of(layer("x", backward=4.5)) == 5.5


def test_a_value_that_several_layers_of_a_stage_need_goes_there_once() -> None:
    """A mask (value 1) goes to all layers after the first; the activation (value 0) to the next one."""
    costs = ModelCosts(
        tuple(layer(name) for name in "abcd"),
        (
            Crossing(0, 1, 48, ((0, 40), (1, 8))),
            Crossing(0, 2, 8, ((1, 8),)),
            Crossing(0, 3, 8, ((1, 8),)),
            Crossing(1, 2, 40),
            Crossing(2, 3, 40),
        ),
    )
    assert costs.bytes_between(range(1), range(1, 4)) == 48
    assert costs.bytes_between(range(2), range(2, 4)) == 48
    assert costs.bytes_between([1], [2]) == 40
    assert costs.bytes_between([0], [3]) == 8
    assert costs.bytes_between([3], [0]) == 0


# ── other sizes ──────────────────────────────────────────────────────────────────────────────────────────────────


def at(samples: int, forward: float, *, size: float = 0.0) -> ModelCosts:
    return ModelCosts((layer("x", forward=forward, activation=size),), (), samples)


def forward(profile: Profile, samples: int) -> float:
    return profile.at(samples).layers[0].forward


def test_a_fixed_part_and_a_part_for_each_sample() -> None:
    profile = Profile((at(2, 3.0, size=20), at(4, 5.0, size=40)))  # 1 and 1 for each
    assert [forward(profile, n) for n in (1, 2, 3, 4, 8)] == [2.0, 3.0, 4.0, 5.0, 9.0]
    assert [profile.at(n).layers[0].activation for n in (1, 3, 8)] == [10.0, 30.0, 80.0]
    assert profile.at(3).layers[0].parameters == 10
    assert profile.at(3).samples == 3


def test_what_was_measured_is_given_as_it_is() -> None:
    measured = (at(1, 3.0), at(2, 2.0), at(8, 9.5))
    assert [Profile(measured).at(n) for n in (1, 2, 8)] == list(measured)


def test_one_size_is_in_proportion() -> None:
    assert forward(Profile((at(4, 2.0),)), 2) == 1.0

    def scaled(samples: int) -> ModelCosts:
        return Profile((model(),)).at(samples)

    assert scaled(2).layers[0].activation == 50
    assert scaled(2).crossings[:2] == (Crossing(0, 1, 32), Crossing(0, 2, 32, ((0, 24), (1, 8))))
    assert scaled(4) == model()
    assert scaled(8).layers[1].backward == 9.0
    assert [layer.deferred_bytes for layer in scaled(8).layers] == [200, 240, 200]
    assert scaled(8).kept_together == ((0, 1, 128.0),)
    assert scaled(8).shared == model().shared


@pytest.mark.parametrize(
    ("sizes", "asked", "expected"),
    [
        pytest.param((at(2, 4.0), at(4, 3.0)), 1, 4.0, id="a slope that noise made negative is none"),
        pytest.param((at(2, 4.0), at(4, 3.0)), 8, 3.0, id="nor beyond"),
        pytest.param((at(2, 1.0), at(4, 5.0)), 1, 0.5, id="a fixed part that would be negative is none"),
        pytest.param((at(2, 1.0), at(4, 5.0)), 8, 13.0, id="but it grows as it did"),
        pytest.param((at(2, 0.0), at(4, 0.0)), 9, 0.0, id="nothing stays nothing"),
        pytest.param((at(1, 1.0), at(2, 2.0), at(4, 10.0)), 3, 6.0, id="between two of three"),
    ],
)
def test_neither_part_is_negative(sizes: tuple[ModelCosts, ...], asked: int, expected: float) -> None:
    assert forward(Profile(sizes), asked) == expected


def test_no_size_gives_a_negative_cost() -> None:
    for first in (0.0, 1.0, 7.0):
        for second in (0.0, 1.0, 7.0):
            for third in (0.0, 1.0, 7.0):
                profile = Profile((at(3, first), at(4, second), at(9, third)))
                assert all(forward(profile, n) >= 0 for n in range(1, 40))


def test_whole_backwards_that_only_some_sizes_know() -> None:
    known = replace(at(2, 1.0), layers=(layer("x", backward=4.0),))
    assert Profile((known, at(4, 1.0))).at(3).layers[0].backward == 4.5  # of 4 and 2 + 3


def test_what_layers_keep_together_at_some_sizes_only() -> None:
    profile = Profile((model(samples=2, kept_together=()), model(samples=4, kept_together=((0, 1, 10.0),))))
    assert profile.at(3).kept_together == ((0, 1, 5.0),)


def test_a_profile_is_of_one_model() -> None:
    for sizes, words in [
        ((), "at least one micro-batch size"),
        ((at(4, 1.0), at(2, 1.0)), r"different and ascending, got \[4, 2\]"),
        ((at(2, 1.0), at(2, 1.0)), "different and ascending"),
        ((at(2, 1.0), ModelCosts((layer("y"),), (), 4)), "different layers"),
        ((at(2, 1.0), ModelCosts((layer("x", parameters=11),), (), 4)), "the parameters of layer 'x'"),
        ((model(samples=2), model(crossings=())), "different crossings"),
    ]:
        with pytest.raises(ps.PlanError, match=words):
            Profile(sizes)
    for samples in (0, -1, 1.5, True):
        with pytest.raises(ps.PlanError, match="samples="):
            Profile((at(2, 1.0),)).at(samples)  # type: ignore[arg-type]


def test_another_link() -> None:
    link = Link(1.0, 2.0)
    assert [costs.link for costs in Profile((model(samples=2), model())).with_link(link).sizes] == [link, link]
