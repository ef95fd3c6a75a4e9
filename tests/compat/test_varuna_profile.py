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
from penstock.compat.varuna import AutoConfig, Profiler, run_varuna
from penstock.compat.varuna.profiler import even_cuts, load_links
from penstock.profile.costs import Link, Profile
from penstock.profile.links import Links
from penstock.profile.planner.cuts import Segments
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
    with mock.patch("penstock.compat.varuna.profiler.measure_links", return_value=links):
        for each in (1, 2, 3):
            profiler = Profiler(Tower(cuts=1), get_batch, "cpu", each, out_folder=folder / str(each))
            profiler.profile_all([2], seconds=0.05)


def test_ranks_measure_the_links_between_them(three: Ranks, tmp_path: Path) -> None:
    three.check(together, tmp_path)
    assert load_links(tmp_path / "2") == {"inside": Link(1e-4, 1e9), "outside": Link(2e-4, 2e9)}
    (outside,) = load_links(tmp_path / "1").items()
    (inside,) = load_links(tmp_path / "3").items()
    assert (outside[0], inside[0]) == ("outside", "inside")
    assert inside[1] == outside[1] == Link(2e-4, 1e9)  # the worst of both
    config = AutoConfig(2, 2, 8, tmp_path / "3")
    free = AutoConfig(2, 2, 8, tmp_path / "3")
    free.links = {}
    for real, ideal in zip(config.choices, free.choices, strict=True):  # messages, and sums over replicas
        assert real.seconds > ideal.seconds


# ── costs that are known ─────────────────────────────────────────────────────────────────────────────────────────


def known(folder: Path, layers: int = 4) -> Path:
    """Layers of one second forward and two backward for a sample; each keeps 10 bytes and weighs 5 four times over."""
    layer = {"forward": 1, "input_gradient": 1, "weight_gradient": 1, "activation": 10, "parameters": 5, "output": 0}
    (folder / "costs.json").write_text(json.dumps({"layers": [{"name": str(i), **layer} for i in range(layers)]}))
    return folder


def test_fastest_configuration(tmp_path: Path) -> None:
    config = AutoConfig(2, 2, 8, known(tmp_path))
    assert config.get_min() == (1, 1, 4 * 4 * 3.0)  # two replicas, which divide the samples, and do nothing twice
    alone, both = sorted(config.choices, key=lambda choice: choice.stages)
    assert (alone.replicas, both.replicas) == (2, 1)
    assert alone.memory == 4 * 20 + 4 * 10
    # The first rank has two layers forward, again and backward, 8 times; and waits for its first gradient, which comes
    # after 8 seconds, when it has two forwards and one again done.
    assert both.seconds == 8 * (2 + 2 + 4) + 8 - 6
    assert both.memory == 2 * 20 + 2 * 10
    assert str(config).splitlines()[2].split()[:3] == ["1", "2", "1"]


def test_models_too_large_for_one_gpu(tmp_path: Path) -> None:
    assert AutoConfig(2, 2, 8, known(tmp_path), gpu_memory_capacity=100).get_min()[0] == 2
    with pytest.raises(ps.PlanError, match=r"fits into 50 bytes: the smallest needs 60 bytes"):
        AutoConfig(2, 2, 8, tmp_path, gpu_memory_capacity=50).get_min()


def test_the_model_is_cut_as_varuna_cuts_it() -> None:
    for cuts in (3, 6, 7):
        plan = ps.split(Tower(cuts), stages=3, balance="uniform", sample=data(4))
        profile = Profiler(Tower(cuts), get_batch, "cpu")._measure([4], 0.0)
        ends = even_cuts(Segments(profile.at(4)), 3)
        assert [len(stage.layers) for stage in plan.stages] == [j - i for i, j in zip((0, *ends), ends, strict=False)]


def test_the_launcher_chooses_by_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    known(tmp_path)
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    monkeypatch.setattr("penstock.cli.main", lambda arguments: seen.append(" ".join(arguments)))
    line = "--gpus_per_node 2 --batch_size 8 --no_morphing --profile_folder . {} train.py"
    run_varuna.main(line.format("").split())
    run_varuna.main(line.format("--nstages 2").split())
    started = "-m penstock.compat.varuna.run_varuna --this-is-a-rank"
    assert seen[0] == f"run --stages 1 --data 2 {started} 0,1; 4 1 train.py"
    assert seen[1] == f"run --stages 2 --data 1 {started} 0;1; 8 1 train.py"


def test_invalid_arguments(tmp_path: Path) -> None:
    with pytest.raises(ps.PlanError, match="get_batch must be a function of a size and a device, got NoneType"):
        Profiler(Tower(), None, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ps.PlanError, match="leave out pstages_to_profile"):
        Profiler(Tower(), get_batch, "cpu", pstages_to_profile=[0])
    profiler = Profiler(Tower(), get_batch, "cpu", out_folder=tmp_path)
    with pytest.raises(ps.PlanError, match="at least one size"):
        profiler.profile_all([])
    with pytest.raises(ps.PlanError, match="a micro-batch size must be a whole number of samples from 1, got 0"):
        profiler.profile_all([0])
    with pytest.raises(ps.PlanError, match=r"there is no profile in .*: make it with Profiler"):
        AutoConfig(4, 2, 16, tmp_path)
    with pytest.raises(ps.PlanError, match="7 GPUs are more than 4 stages and 3 samples can use"):
        AutoConfig(7, 7, 3, known(tmp_path)).get_min()
    (tmp_path / "links.json").write_text("[]")
    with pytest.raises(ps.PlanError, match=r"links.json is not what Profiler wrote"):
        AutoConfig(2, 2, 8, tmp_path)
