"""Analytic costs, against formulas and published step times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.profile.analytic import (
    HARDWARE,
    MODELS,
    Hardware,
    Transformer,
    analytic_costs,
    get_hardware,
    parse_transformer,
)
from penstock.profile.costs import Link, SharedParameters
from penstock.schedule.costs import Costs
from penstock.schedule.registry import build
from penstock.schedule.simulate import simulate
from tests.support.published import PUBLISHED, UNKNOWN_STAGE_COUNT, Published, step_seconds, work_of

# ── models ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "billions"),
    [  # arXiv 2104.04473, table 1
        ("gpt:1.7b", 1.7),
        ("gpt:3.6b", 3.6),
        ("gpt:7.5b", 7.5),
        ("gpt:18b", 18.4),
        ("gpt:39b", 39.1),
        ("gpt:76b", 76.1),
        ("gpt:145b", 145.6),
        ("gpt:310b", 310.1),
        ("gpt:530b", 529.6),
        ("gpt:1t", 1008.0),
        # and what the models are called after
        ("gpt:22b", 22.1),
        ("gpt:175b", 174.6),
        ("llama:8b", 8.0),
        ("llama:70b", 70.6),
        ("llama:405b", 405.9),
    ],
)
def test_models_have_the_parameters_that_they_are_said_to_have(name: str, billions: float) -> None:
    assert round(parse_transformer(name).parameters / 1e9, 1) == billions


def test_layers_have_the_parameters_of_the_model() -> None:
    for name in ("gpt:22b", "llama:8b"):
        costs = analytic_costs(name, "h100")
        tied = sum(tie.bytes for tie in costs.shared)
        assert sum(layer.parameters for layer in costs.layers) - tied == 2 * parse_transformer(name).parameters


def test_a_gpt_layer_by_the_known_formulas() -> None:
    """12h² + 13h parameters; 24bsh² + 4bs²h operations in a forward; s·b·h·(34 + 5as/h) bytes kept."""
    h, s, b, a = 1024, 512, 3, 16
    model = Transformer(layers=2, hidden=h, heads=a, vocab=1000, seq=s)
    rate = Hardware("unit", 1.0, 1.0, 1e30, 1e30, 1e30, efficiency=1.0)  # seconds are operations
    layer = analytic_costs(model, rate, samples=b, attention="plain").layers[1]
    dense, core = 24 * b * s * h**2, 4 * b * s**2 * h
    assert layer.parameters == 2 * (12 * h**2 + 13 * h)
    assert (layer.gradients, layer.optimizer) == (2 * layer.parameters, 6 * layer.parameters)
    assert layer.forward == pytest.approx(dense + core)
    assert layer.input_gradient == pytest.approx(dense + 2 * core)
    assert layer.weight_gradient == pytest.approx(dense)
    assert layer.recompute == layer.forward
    assert layer.activation == s * b * h * (34 + 5 * a * s / h)
    # 72bsh²(1 + s/6h) for each layer, and 6bshV for the head
    assert model.flops(b) == pytest.approx(2 * 72 * b * s * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * 1000)


@pytest.mark.parametrize(
    ("options", "factor"),
    [  # arXiv 2205.05198, table 2, with t = 8; as/h = 16 for gpt:175b
        ({"attention": "plain"}, 34 + 5 * 16),
        ({"attention": "plain", "tensor": 8}, 10 + 24 / 8 + 5 * 16 / 8),
        ({"attention": "plain", "tensor": 8, "sequence_parallel": True}, 34 / 8 + 5 * 16 / 8),
        ({"attention": "selective", "tensor": 8}, 10 + 24 / 8),
        ({"attention": "selective", "tensor": 8, "sequence_parallel": True}, 34 / 8),
        ({"attention": "flash"}, 34),
    ],
)
def test_activations_of_each_kind_of_parallelism(options: dict[str, Any], factor: float) -> None:
    model = MODELS["gpt:175b"]
    costs = analytic_costs(model, "a100", samples=2, **options)
    unit = 2 * model.seq * model.hidden
    assert costs.layers[1].activation == factor * unit
    assert costs.crossings[1].bytes == 2 * unit / (8 if options.get("sequence_parallel") else 1)


def test_half_layers_are_the_layers_in_two() -> None:
    whole = analytic_costs("llama:8b", "h100", tensor=2)
    halves = analytic_costs("llama:8b", "h100", tensor=2, half_layers=True)
    assert [layer.name for layer in halves.layers[:3]] == ["embed", "layer.0.attention", "layer.0.mlp"]
    assert len(halves.layers) == 2 * 32 + 2
    assert len(whole.layers) == 32 + 2
    for what in ("forward", "input_gradient", "weight_gradient", "recompute", "activation", "parameters", "optimizer"):
        one, two = (getattr(layer, what) for layer in halves.layers[1:3])
        assert getattr(whole.layers[1], what) == pytest.approx(one + two)
        assert one > 0
        assert two > 0


def test_devices_that_share_layers_divide_work_and_memory_and_talk() -> None:
    alone, shared = (analytic_costs("gpt:22b", "a100", tensor=t) for t in (1, 8))
    silent = replace(HARDWARE["a100"], intra_node=1e30, intra_node_latency=0.0)
    quiet = analytic_costs("gpt:22b", silent, tensor=8).layers[1]
    one, eight = alone.layers[1], shared.layers[1]
    assert eight.weight_gradient == pytest.approx(one.weight_gradient / 8)
    assert one.forward / 8 < quiet.forward < eight.forward < one.forward
    sums = 2 * HARDWARE["a100"].all_reduce(2048 * 6144 * 2, 8)
    assert eight.forward - quiet.forward == pytest.approx(sums)
    assert eight.parameters == pytest.approx(one.parameters / 8, rel=0.01)
    assert shared.shared == (SharedParameters((0, 49), 51200 * 6144 * 2 / 8),)


def test_memory_of_parameters() -> None:
    layer = analytic_costs("gpt:22b", "a100", gradient_bytes=2, state_bytes=12, optimizer_shards=4).layers[1]
    assert layer.gradients == layer.parameters
    assert layer.optimizer == 1.5 * layer.parameters


def test_the_ends_of_a_model() -> None:
    costs = analytic_costs("llama:8b", "h100")
    embed, head = costs.layers[0], costs.layers[-1]
    assert (embed.name, head.name) == ("embed", "head")
    assert embed.input_gradient == 0
    assert 0 < work_of(embed) < work_of(costs.layers[1]) / 10
    assert work_of(head) > work_of(costs.layers[1])  # of a vocabulary of 128,256 words
    assert costs.shared == ()
    assert embed.parameters == 2 * 128256 * 4096


def test_work_grows_with_samples_and_attention_is_cheaper_by_flash() -> None:
    kinds = ("plain", "selective", "flash")
    plain, selective, flash = (analytic_costs("gpt:22b", "a100", attention=kind).layers[1] for kind in kinds)
    assert flash.forward < plain.forward == selective.forward
    assert plain.input_gradient < selective.input_gradient
    assert flash.activation == selective.activation < plain.activation
    four = analytic_costs("gpt:22b", "a100", samples=4, attention="plain")
    assert four.samples == 4
    assert four.layers[1].forward == pytest.approx(4 * plain.forward)


def test_models_are_described_by_name_by_numbers_or_both() -> None:
    assert parse_transformer("GPT:175B") == MODELS["gpt:175b"]
    assert parse_transformer("llama:70b, seq=4096") == replace(MODELS["llama:70b"], seq=4096)
    assert parse_transformer("layers=2,hidden=64,heads=4,vocab=100,seq=8,kv=2,ffn=100") == Transformer(
        2, 64, 4, 100, 8, 100, 2
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gtp:175b", "did you mean 'gpt:175b'"),
        ("", "known are gpt:1.7b"),
        ("gpt:175b,sequence=3", "it has layers, hidden"),
        ("gpt:175b,seq", "write a whole number, as in seq=8"),
        ("gpt:175b,seq=-3", "write a whole number"),
        ("gpt:175b,seq=1e3", "write a whole number"),
        ("gpt:175b,seq=1,seq=2", "seq given twice"),
        ("gpt:175b,seq=0", "seq=0: it must be a whole number, from 1 up"),
        ("layers=2,hidden=64", "needs heads and vocab and seq as well"),
        ("layers=2,hidden=64,heads=5,vocab=100,seq=8", "hidden=64 cannot have 5 heads"),
        ("layers=2,hidden=64,heads=4,vocab=100,seq=8,kv=3", "cannot have kv=3"),
        ("llama:8b,llama=2", "llama=2"),
    ],
)
def test_descriptions_that_make_no_sense(text: str, words: str) -> None:
    with pytest.raises(ps.PlanError) as caught:
        parse_transformer(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor": 5}, "cannot be divided among 5 devices"),
        ({"tensor": 0}, "tensor=0"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"devices": -1}, "devices=-1"),
        ({"optimizer_shards": 0}, "optimizer_shards=0"),
        ({"attention": "flsh"}, "'plain', 'selective', 'flash'"),
        ({"sequence_parallel": True}, "give tensor= too"),
        ({"hardware": "h1000"}, "did you mean 'h100'"),
        ({"state_bytes": float("nan")}, "layer 'embed'"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.PlanError) as caught:
        analytic_costs("gpt:175b", **{"hardware": "h100", **options})
    assert words in str(caught.value)


# ── hardware ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_links_inside_and_outside_of_a_machine() -> None:
    h100 = get_hardware("H100")
    assert h100 is get_hardware(h100)
    assert h100.link(8) == Link(5e-6, 450e9 * 0.8)
    assert h100.link(9) == Link(10e-6, 50e9 * 0.8)
    assert analytic_costs("gpt:22b", "h100", devices=8).link == h100.link(8)
    assert analytic_costs("gpt:22b", "h100", devices=16).link == analytic_costs("gpt:22b", "h100").link == h100.link(16)
    assert h100.all_reduce(1e9, 1) == 0
    assert h100.all_reduce(1e9, 8) == pytest.approx(5e-6 + 2 * 7 / 8 * 1e9 / 360e9)
    assert h100.compute(989.5e12) == pytest.approx(1 / h100.efficiency)


def test_hardware_that_makes_no_sense() -> None:
    for change, words in [
        ({"flops": 0.0}, "flops is 0"),
        ({"efficiency": 1.5}, "efficiency is 1.5: it must be at most 1"),
        ({"memory_bandwidth": float("nan")}, "memory_bandwidth is nan"),
    ]:
        with pytest.raises(ps.PlanError, match=words):
            replace(HARDWARE["a100"], **change)  # type: ignore[arg-type]
    with pytest.raises(ps.PlanError, match="known are v100, a100"):
        get_hardware("abacus")


# ── what others have published ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.model} {row.attention}")
def test_published_steps(row: Published) -> None:
    """One efficiency for all eight: from one device's machine to 64 machines, the estimates are within 10 %."""
    assert row.estimate() == pytest.approx(row.seconds, rel=0.1)


@pytest.mark.parametrize("row", UNKNOWN_STAGE_COUNT, ids=lambda row: f"{row.model} {row.batch}")
def test_published_steps_are_between_what_is_left_open(row: Published) -> None:
    """A rank has eight layers, in one to eight stages."""
    assert row.estimate(8) < row.seconds < row.estimate(1)
    with pytest.raises(ps.PlanError, match="table 4 does not say how many stages a rank has"):
        row.estimate()


def test_published_steps_have_the_utilization_that_was_published() -> None:
    """41.5, 51.4, 56.0 and 56.3 % of the peak, with selective recomputation: so the models and times are theirs."""
    found = [row.utilization for row in PUBLISHED if not row.recompute]
    assert found == pytest.approx([0.415, 0.514, 0.560, 0.563], abs=0.003)
    assert [row.utilization for row in UNKNOWN_STAGE_COUNT] == pytest.approx([0.43, 0.41], abs=0.006)


def test_the_formula_of_a_step_is_what_the_simulator_finds() -> None:
    row = next(row for row in PUBLISHED if row.model == "gpt:175b" and not row.recompute)
    costs = row.costs()
    p, v, m = row.pipe, row.interleaved, row.batch // row.microbatch
    stages = p * v
    inner, each = costs.layers[1:-1], (len(costs.layers) - 2) // stages
    groups = [list(inner[s * each : (s + 1) * each]) for s in range(stages)]
    groups[0].insert(0, costs.layers[0])
    groups[-1].append(costs.layers[-1])
    times = Costs(
        f=tuple(sum(layer.forward for layer in group) for group in groups),
        i=tuple(sum(layer.input_gradient for layer in group) for group in groups),
        w=tuple(sum(layer.weight_gradient for layer in group) for group in groups),
        latency=costs.link.latency,
        bandwidth=costs.link.bandwidth,
        bytes=costs.crossings[0].bytes,
    )
    simulated = simulate(build("interleaved", p, m, v), times).makespan
    assert step_seconds(costs, p, m, interleaved=v) == pytest.approx(simulated, rel=0.03)


def test_the_tables_in_the_document_are_these() -> None:
    text = (Path(__file__).parents[2] / "docs" / "costs.md").read_text("utf-8")
    for row in PUBLISHED:
        assert f"| {row.model} | {row.devices} | {row.tensor} × {row.pipe} | {row.interleaved} |" in text
        assert f"| {row.seconds:.2f} s | {row.estimate():.2f} s |" in text
    for one in HARDWARE.values():
        numbers = [f"{one.flops / 1e12:,g}", f"{one.memory / 2**30:.0f} GiB", f"{one.memory_bandwidth / 1e9:,.0f}"]
        numbers += [
            f"{one.intra_node / 1e9:g}",
            f"{one.inter_node / 1e9:g}",
            str(one.devices_per_node),
            str(one.efficiency),
        ]
        assert f"| `{one.name}` | {' | '.join(numbers)} |" in text
    for name in MODELS:
        assert f"`{name}`" in text or f"`{name.partition(':')[2]}`" in text


def test_where_layers_do_not_come_out_even_the_ends_count_as_one_each() -> None:
    """Six layers on four ranks, and the embedding and the head of no time: 1, 2, 2, 1."""
    free = replace(HARDWARE["a100"], inter_node=1e30, inter_node_latency=0.0)
    costs = analytic_costs("layers=6,hidden=64,heads=4,vocab=1,seq=64", free)
    nothing = {"forward": 0.0, "input_gradient": 0.0, "weight_gradient": 0.0}
    ends = {0: replace(costs.layers[0], **nothing), 7: replace(costs.layers[7], **nothing)}
    costs = replace(costs, layers=tuple(ends.get(i, layer) for i, layer in enumerate(costs.layers)))
    each = work_of(costs.layers[1])
    assert step_seconds(costs, 4, 8) == pytest.approx((8 * 2 + 1 + 2 + 1) * each, rel=1e-6)
    with pytest.raises(ps.PlanError, match="6 layers cannot be divided evenly among 5 ranks"):
        step_seconds(costs, 5, 8)


def test_a_step_by_hand() -> None:
    """Four ranks, all alike: m + p - 1 times forward and backward; two stages a rank halve the bubble."""
    free = replace(HARDWARE["a100"], inter_node=1e30, inter_node_latency=0.0)
    costs = analytic_costs("layers=8,hidden=64,heads=4,vocab=1,seq=64", free)
    first, *inner, last = costs.layers
    nothing = {"forward": 0.0, "input_gradient": 0.0, "weight_gradient": 0.0}
    costs = replace(costs, layers=(replace(first, **nothing), *inner, replace(last, **nothing)))
    each = 2 * work_of(costs.layers[1])
    assert step_seconds(costs, 4, 6) == pytest.approx(9 * each)
    assert step_seconds(costs, 4, 6, interleaved=2) == pytest.approx(7.5 * each)
    again = 2 * (work_of(costs.layers[1]) + costs.layers[1].recompute)
    assert step_seconds(costs, 4, 6, recompute=True) == pytest.approx(9 * again)
    with pytest.raises(ps.PlanError, match="8 layers cannot be divided evenly among 3 ranks"):
        step_seconds(costs, 3, 6)


@pytest.mark.parametrize(
    ("name", "p", "m", "published", "off"),
    [("1f1b", 8, 24, 0.2347, 0.02), ("1f1b", 32, 96, 0.2676, 0.03), ("zbv", 32, 96, 0.0593, 0.02)],
)
def test_published_bubbles_are_a_little_above_those_of_even_stages(
    name: str, p: int, m: int, published: float, off: float
) -> None:
    """Zero Bubble, tables 5 and 8."""
    schedule = build(name, p, m)
    bubble = simulate(schedule, Costs.per_rank(v=schedule.num_stages // p)).bubble
    assert published - off < bubble < published


@pytest.mark.parametrize(("m", "published"), [(32, 3.70), (64, 4.03)])
def test_published_speeds_grow_with_micro_batches_as_the_bubble_shrinks(m: int, published: float) -> None:
    """Zero Bubble, table 4: samples per second of 1F1B on 8 ranks, 3.50 with 24 micro-batches."""
    few, many = (simulate(build("1f1b", 8, count)).makespan / count for count in (24, m))
    assert few / many == pytest.approx(published / 3.50, rel=0.015)
