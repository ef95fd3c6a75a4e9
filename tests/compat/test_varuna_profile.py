"""``Profiler`` and ``AutoConfig`` of ``penstock.compat.varuna``: costs by cut points, and the fastest way with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import penstock as ps
from penstock.compat.varuna import AutoConfig, Profiler
from penstock.profile.costs import Link, Profile
from penstock.profile.links import Links
from tests.compat.varuna_models import Tower, data
from tests.support.ranks import Ranks


def get_batch(size: int, device: Any = None) -> dict[str, Tensor]:
    return data(size)


def test_costs_are_saved_per_cut_point(tmp_path: Path) -> None:
    model = Tower(cuts=3)
    before = [parameter.clone() for parameter in model.parameters()]
    profiler = Profiler(model, get_batch, "cpu", 2, out_folder=tmp_path / "profile")
    profile = profiler.profile_all([2, 4], seconds=0.1)
    assert profile == Profile.load(tmp_path / "profile" / "costs.json")
    assert [costs.samples for costs in profile.sizes] == [2, 4]
    assert len(profile.sizes[0].layers) == 4
    assert all(layer.forward > 0 for layer in profile.sizes[0].layers)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    stages, chunk, seconds = AutoConfig(2, 2, 8, tmp_path / "profile").get_min()
    assert stages in (1, 2)
    assert chunk in (2, 4)
    assert seconds > 0


def test_sizes_are_added_to_what_is_there(tmp_path: Path) -> None:
    first = Profiler(Tower(cuts=1), get_batch, "cpu", out_folder=tmp_path).profile_all([2], seconds=0.05)
    more = Profiler(Tower(cuts=1), get_batch, "cpu", out_folder=tmp_path, add_to_existing=True)
    both = more.profile_all([2, 3], seconds=0.05)
    assert both.sizes[0] == first.sizes[0]
    assert [costs.samples for costs in both.sizes] == [2, 3]
    anew = Profiler(Tower(cuts=1), get_batch, "cpu", out_folder=tmp_path).profile_all([3], seconds=0.05)
    assert [costs.samples for costs in anew.sizes] == [3]


def test_half_precision_is_measured_as_it_is_trained(tmp_path: Path) -> None:
    sizes = []
    for fp16 in (False, True):
        profiler = Profiler(Tower(cuts=1), get_batch, "cpu", fp16=fp16, out_folder=tmp_path)
        profile = profiler.profile_all([4], seconds=0.0)
        sizes.append(profile.at(4).layers[0].activation)
    assert sizes[1] == sizes[0] / 2


def together(rank: int, folder: Path) -> None:
    """Three ranks, whose links are given: measuring them takes long on a machine with other work."""
    links = Links({(0, 1): Link(1e-4, 1e9), (1, 2): Link(2e-4, 2e9)})
    with mock.patch("penstock.profile.measure_links", return_value=links):
        Profiler(Tower(cuts=1), get_batch, "cpu", out_folder=folder).profile_all([2], seconds=0.05)


def test_ranks_measure_the_links_between_them(three: Ranks, tmp_path: Path) -> None:
    three.check(together, tmp_path)
    config, free = AutoConfig(2, 2, 8, tmp_path), AutoConfig(2, 2, 8, tmp_path)
    assert config.profile.sizes[0].link == Link(2e-4, 1e9)  # the worst of both
    config.profile = config.profile.with_link(Link(1.0, 1e3))  # no layer here takes so long that it hides a message
    free.profile = free.profile.with_link(Link())
    for grid in ((1, 2), (2, 1)):  # messages, and sums over replicas
        assert config.predict(config.profile.sizes[0], *grid) > free.predict(free.profile.sizes[0], *grid)


# ── costs that are known ─────────────────────────────────────────────────────────────────────────────────────────


def known(folder: Path, layers: int = 4) -> Path:
    """Layers of one second forward and two backward for a sample; each keeps 10 bytes and weighs 5 four times over."""
    layer = {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 10, "parameters": 5, "output": 0}
    (folder / "costs.json").write_text(json.dumps({"layers": [{"name": str(i), **layer} for i in range(layers)]}))
    return folder


def test_fastest_configuration(tmp_path: Path) -> None:
    config = AutoConfig(2, 2, 8, known(tmp_path))
    assert config.get_min() == (1, 1, 4 * 4 * 3.0)  # two replicas, which divide the samples, and do nothing twice
    (costs,) = config.profile.sizes
    assert config.predict(costs, 2, 1)[1] == 4 * 20 + 4 * 10
    # The first rank has two layers forward, again and backward, 8 times; and waits for its first gradient, which comes
    # after 8 seconds, when it has two forwards and one again done.
    assert config.predict(costs, 1, 2) == (8 * (2 + 2 + 4) + 8 - 6, 2 * 20 + 2 * 10)


def test_models_too_large_for_one_gpu(tmp_path: Path) -> None:
    assert AutoConfig(2, 2, 8, known(tmp_path), gpu_memory_capacity=100).get_min()[0] == 2
    with pytest.raises(ps.PlanError, match=r"2 GPUs have no configuration that fits into 50 bytes"):
        AutoConfig(2, 2, 8, tmp_path, gpu_memory_capacity=50).get_min()


def test_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ps.PlanError, match="leave out pstages_to_profile"):
        Profiler(Tower(), get_batch, "cpu", pstages_to_profile=[0])
    profiler = Profiler(Tower(), get_batch, "cpu", out_folder=tmp_path)
    with pytest.raises(ps.PlanError, match="at least one micro-batch size"):
        profiler.profile_all([])
    with pytest.raises(ps.PlanError, match="a micro-batch size must be a whole number of samples from 1, got 0"):
        profiler.profile_all([0])
    with pytest.raises(ps.PlanError, match=r"costs.json cannot be read as costs"):
        AutoConfig(4, 2, 16, tmp_path)
    with pytest.raises(ps.PlanError, match="7 GPUs have no configuration that fits"):
        AutoConfig(7, 7, 3, known(tmp_path)).get_min()
