"""``penstock.compat.varuna``: maps of stages to ranks, the ways to say things, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.compat import install
from penstock.compat.varuna import CutPoint, Varuna, get_this_rank_config_varuna, get_varuna_config
from penstock.compat.varuna.varuna import _arguments as arguments_of
from tests.compat.varuna_models import Tower, adam, data
from tests.support.models import assert_same
from tests.support.ranks import Ranks


@pytest.mark.parametrize(("samples", "repeated"), [(3, True), (0, True), (1, False)])
def test_tensors_of_one_sample_are_repeated_beside_others(samples: int, repeated: bool) -> None:
    made = arguments_of({"x": torch.rand(samples, 2), "mask": torch.ones(1, 2), "none": None, "all": torch.tensor(1.0)})
    assert isinstance(made["mask"], ps.Broadcast) == repeated
    assert not any(isinstance(made[name], ps.Broadcast) for name in ("x", "none", "all"))


@pytest.mark.parametrize("given", ["0,2;1,3;", "0,2;1,3"])
def test_maps_of_stages_to_ranks(given: str) -> None:
    assert get_varuna_config(given) == (2, 2)
    places = [get_this_rank_config_varuna(given, rank) for rank in range(4)]
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1)]
    with pytest.raises(RuntimeError, match="rank 4 is not in stage_to_rank_map"):
        get_this_rank_config_varuna(given, 4)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("0,a;1", "as in '0,2;1,3;', got '0,a;1'"),
        ("", "as in '0,2;1,3;', got ''"),
        (5, "got 5"),
        ("0,2;1;", r"has \[2, 1\]"),
        ("0;0;", "every rank has one stage"),
        ("0;-1;", "every rank has one stage"),
    ],
)
def test_invalid_maps(given: Any, complaint: str) -> None:
    with pytest.raises(ps.PlanError, match=complaint):
        get_varuna_config(given)


def test_errors_before_ranks_connect() -> None:
    with pytest.raises(AssertionError, match=r"must be on the CPU.*blocks.0.weight is on meta"):
        Varuna(Tower().to("meta"), "0;", data(), 4, 2)
    with pytest.raises(ps.PlanError, match=r"fp16=True computes in float16 from parameters in float32, but blocks.0"):
        Varuna(Tower().half(), "0;", data(), 4, 2, fp16=True)
    for sizes, name in (((0, 2), "batch_size"), ((4, 2.0), "chunk_size"), ((None, 2), "batch_size")):
        with pytest.raises(ps.PlanError, match=f"{name} must be a whole number of samples from 1"):
            Varuna(Tower(), "0;", data(), *sizes)  # type: ignore[arg-type]


def wrong(rank: int) -> None:
    batch, seen = data(), []

    def get_batch(size: int, device: Any = None) -> dict[str, Tensor]:
        seen.append((size, device))
        return data(size)

    with pytest.raises(RuntimeError, match=f"rank {rank} is not in stage_to_rank_map '7;8;9;'"):
        Varuna(Tower(), "7;8;9;", batch, 10, 3, device="cpu")
    with pytest.raises(ps.PlanError, match=r"stage_to_rank_map is '0;1;2;3;', but the world has 3 ranks"):
        Varuna(Tower(), "0;1;2;3;", batch, 10, 3, device="cpu")
    with pytest.raises(ps.PlanError, match="Linear has no CutPoint: it cannot be cut into 3 stages"):
        Varuna(nn.Linear(2, 2), "0;1;2;", (torch.ones(1, 2),), 10, 3, device="cpu")
    with pytest.raises(ps.PlanError, match="3 stages asked for, but the model has only 2"):
        Varuna(Tower(1), "0;1;2;", batch, 10, 3, device="cpu")
    with pytest.raises(ps.PlanError, match="say how the model is called"):
        Varuna(Tower(), "0;1;2;", None, 10, 3, device="cpu")
    with pytest.raises(ps.PlanError, match="say how the model is called"):
        Varuna(Tower(), "0;1;2;", batch, 10, 3, device="cpu", dry_run_input=batch)
    with pytest.raises(ps.PlanError, match="shared_weights names 'nobody'"):
        Varuna(Tower(), "0;1;2;", batch, 10, 3, device="cpu", shared_weights=[("nobody", "head.weight")])
    model = Varuna(
        Tower(plain_list=True), "0;1;2;", get_batch, batch_size=10, chunk_size=3, local_rank=rank, device="cpu"
    )
    assert seen == [(1, "cpu")]
    with model.pipeline:
        with pytest.raises(RuntimeError, match=r"call step\(inputs\) to train"):
            model(**batch)
        with pytest.raises(ps.PlanError, match="inputs must be a dict of the model's keyword arguments, got tuple"):
            model.step((batch["x"], batch["labels"]))  # type: ignore[arg-type]
        for scale in ("static", True):
            with pytest.raises(ps.PlanError, match="loss_scale must be 'dynamic' or a number, got"):
                model.set_optimizer(adam(model), loss_scale=scale)
        assert model.get_loss_scale() == 1.0
        with pytest.raises(ps.PlanError, match="disagree on the batch size"):
            model.step({"x": batch["x"], "labels": batch["labels"][:3]})
        assert model.step(batch)[0] == pytest.approx(Tower()(**batch).item(), rel=1e-5)
        names = {name for name, _ in model.named_parameters()}
        assert names == set(dict(Tower().named_parameters())) & names
        assert len(list(model.modules())) > 2


def test_errors_while_ranks_connect(three: Ranks) -> None:
    three.check(wrong)


def keywords(rank: int) -> None:
    made = Varuna(Tower(), "0;2;1;", dry_run_input=data(), batch_size=10, chunk_size=3, device=0)
    with made.pipeline:
        assert made.step(data())[0] == pytest.approx(Tower()(**data()).item(), rel=1e-5)
    with Varuna(Pair(), "0;1;2;", (data()["x"],), 10, 3, device=-1).pipeline as pipe:
        assert_same(pipe.step(data()["x"]).loss, Pair()(data()["x"])[0].detach())


class Pair(nn.Module):
    """Gives its loss, and more, in a tuple; its cut points stand in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), CutPoint(), nn.Linear(6, 6), CutPoint(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layers(x)
        return x.square().mean(), x


def test_the_ways_to_say_how_a_model_is_called_and_losses_in_tuples(three: Ranks) -> None:
    three.check(keywords)


class Breaks(nn.Module):
    """Fails from the second forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = False

    def forward(self, x: Tensor) -> Tensor:
        if self.runs and torch.is_grad_enabled():
            raise ValueError("the last stage is broken")
        return x


def broken(rank: int) -> None:
    model, breaks = Tower(), Breaks()
    model.head = nn.Sequential(model.head, breaks)
    made = Varuna(model, "1;2;0;", data(), 10, 3, device="cpu")
    with made.pipeline:
        made.step(data())
        breaks.runs = True
        made.step(data())


def test_an_exception_behind_the_cut_reaches_every_rank(three: Ranks) -> None:
    for error in three.run(broken):
        assert isinstance(error, ps.PipelineError)
        assert (error.rank, error.stage) == (0, 2)
        assert "ValueError: the last stage is broken" in str(error)


def renamed(rank: int) -> None:
    install("varuna")
    import varuna  # type: ignore[import-not-found]

    assert varuna.Varuna is Varuna
    assert varuna.CutPoint is CutPoint
    from varuna.utils import get_varuna_config as theirs  # type: ignore[import-not-found]

    assert theirs is get_varuna_config


def test_installed_under_its_own_name(three: Ranks) -> None:
    three.check(renamed)
