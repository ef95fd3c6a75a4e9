"""Checkpoints by cuts: written at one depth, read at another, and training goes on as if nothing had happened."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.compat.varuna import Varuna
from tests.compat.varuna_models import TIES, Tower, Words, adam, data, share, tied, tokens, wrapped
from tests.support.ranks import Ranks

DEPTHS = ["0;1;2;", "2,0;3,1;", "3;0;1;2;", "1;"]  # three stages, two of two replicas, four, one
STEPS = 3  # at each depth


def batches(kind: str, depth: int) -> list[dict[str, Any]]:
    make = data if kind == "tower" else tokens
    return [make(6, depth * STEPS + step) for step in range(STEPS)]


def model_of(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    if kind == "words":
        return Words(), {"shared_weights": TIES}
    return plain_of(kind), {}


def plain_of(kind: str) -> nn.Module:
    return Tower() if kind == "tower" else tied(Words())


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with two groups of parameters."""
    named = list(model.named_parameters())
    few = [p for name, p in named if "bias" not in name]
    rest = [p for name, p in named if "bias" in name]
    return torch.optim.Adam([{"params": few}, {"params": rest, "lr": 0.02}], lr=0.05)


def goes_on(rank: int, store: str, kind: str, depth: int, how: dict[str, Any]) -> Any:
    """Load what the depth before left, train, and leave a checkpoint for the next."""
    stages = DEPTHS[depth]
    if str(rank) not in stages:
        return None
    model, options = model_of(kind)
    with torch.no_grad():
        for parameter in model.parameters():  # what counts is what is loaded
            parameter.mul_(1.0 if depth == 0 else 0.5)
    with wrapped(model, stages, 6, 2, fp16=how.get("fp16", False), **options) as made:
        optimizer = groups(made)
        with pytest.raises(ps.PlanError, match="call set_optimizer"):
            made.load_checkpoint(store, 0)
        made.set_optimizer(optimizer, init_loss_scale=2.0**8)
        if depth:
            made.load_checkpoint(store, depth * STEPS)
        if how.get("fp16") and depth:
            assert made.get_loss_scale() == 2.0**6
        losses = []
        for batch in batches(kind, depth):
            loss, overflow, _ = made.step(share(batch, made.rank_within_stage, made.data_depth))
            assert not overflow
            losses.append(loss)
            optimizer.step()
            made.zero_grad()
        if how.get("fp16") and not depth:
            made._scaler.update(2.0**6)  # type: ignore[union-attr]
        future = made.checkpoint(store, **{name: how[name] for name in ("tempdir", "shard") if name in how})
        if "tempdir" in how:
            assert isinstance(future, Future)
            assert future.done()
        else:
            assert future is None
        assert made.iteration == (depth + 1) * STEPS
    return losses


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("tower", "tempdir"),
        ("tower", "fp16"),  # like the two below, at two depths only
        ("tower", "shard"),
        ("words", "whole"),
        ("one parameter", "whole"),
    ],
)
def test_training_resumes_at_another_depth(four: Ranks, tmp_path: Path, kind: str, way: str) -> None:
    store = tmp_path / "store"
    how: dict[str, Any] = {} if way == "whole" else {way: tmp_path / "local" if way == "tempdir" else True}
    plain = plain_of(kind)
    optimizer, expected = groups(plain), []
    depths = DEPTHS if way in ("tempdir", "shard") else DEPTHS[:2]
    for batch in (batch for depth in range(len(depths)) for batch in batches(kind, depth)):
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    for depth, stages in enumerate(depths):
        rows = [row for row in four.check(goes_on, str(store), kind, depth, how) if row is not None]
        assert len(rows) == len(stages.replace(",", "").replace(";", ""))
        wanted = expected[depth * STEPS : (depth + 1) * STEPS]
        for row in rows:
            assert row == pytest.approx(wanted, rel=3e-2 if way == "fp16" else 1e-4)
    folder = store / "varuna_ckpt_6"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *(f"opt-fp32-params-{cut}" for cut in range(8)),
        *(f"opt-state-{cut}" for cut in range(8)),
        "opt-common-state",
        "markers",
    }
    writers = range(4) if way == "shard" else (2, 3)
    assert {path.name for path in (folder / "markers").iterdir()} == {f"complete_{rank}.txt" for rank in writers}


def bits(rank: int, store: str, stages: str, loads: bool) -> Any:
    """The files' bits do not depend on the depth, nor does what is loaded of them."""
    with wrapped(Tower(norm=True), stages, chunk_size=10) as model:
        optimizer = adam(model)
        model.set_optimizer(optimizer)
        if loads:
            model.load_checkpoint(store, 4)
        else:
            model.step(data())
            optimizer.step()
        model.checkpoint(store, step=5 if loads else 4)
    return None


def test_files_are_the_same_at_any_depth(four: Ranks, tmp_path: Path) -> None:
    four.check(bits, str(tmp_path), "0;1;2;3;", False)
    four.check(bits, str(tmp_path), "0,1;3,2;", True)
    names = sorted(path.name for path in (tmp_path / "varuna_ckpt_4").glob("opt-*-*") if path.name[-1].isdigit())
    assert len(names) == 16
    for name in names:
        first, second = (torch.load(tmp_path / f"varuna_ckpt_{step}" / name) for step in (4, 5))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    state = torch.load(tmp_path / "varuna_ckpt_4" / "opt-fp32-params-0")
    assert {"norm.running_mean", "norm.num_batches_tracked", "blocks.0.weight"} <= set(state)
    assert int(state["norm.num_batches_tracked"]) == 1


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def refused(rank: int, store: str, iteration: int, check: bool, cuts: int) -> None:
    with wrapped(Tower(cuts), "0;1;2;") as model:
        model.set_optimizer(adam(model))
        model.load_checkpoint(store, iteration, check_complete=check)


def written(rank: int, store: str) -> None:
    with wrapped(Tower(), "0;2;1;") as model:
        model.set_optimizer(adam(model))
        model.checkpoint(store, 1)


@pytest.fixture
def store(three: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    three.check(written, str(folder))
    return folder


@pytest.mark.parametrize("check", [True, False])
def test_an_incomplete_checkpoint_is_refused(three: Ranks, store: Path, check: bool) -> None:
    folder = store / "varuna_ckpt_1"
    (folder / "markers" / "complete_2.txt").unlink()
    found = three.run(refused, str(store), 1, check, 7)
    if not check:
        assert found == [None] * 3  # it is all there, though nobody has said so
        (folder / "opt-state-4").unlink()
        found = three.run(refused, str(store), 1, check, 7)
    told = [str(error) for error in found]
    assert all(isinstance(error, ps.PipelineError) for error in found)
    complaint = r"not complete: ranks [2] have" if check else "opt-state-4 cannot be read"
    assert any(complaint in text for text in told)
    assert all(complaint in text or "another rank could not read" in text for text in told)


def test_checkpoints_of_the_same_step_are_replaced(three: Ranks, store: Path) -> None:
    (store / "varuna_ckpt_1" / "markers" / "complete_9.txt").write_text("of a larger run\n")
    three.check(written, str(store))
    assert not (store / "varuna_ckpt_1" / "markers" / "complete_9.txt").exists()
    three.check(refused, str(store), 1, True, 7)


def test_no_checkpoint_another_model_and_a_broken_file(three: Ranks, store: Path) -> None:
    for iteration, cuts, complaint in (
        (3, 7, "has no checkpoint varuna_ckpt_3: there are ['varuna_ckpt_1']"),
        (1, 4, "is of a model with 8 parts between its cut points, but this one has 5"),
    ):
        for error in three.run(refused, str(store), iteration, True, cuts):
            assert isinstance(error, (ps.PlanError, ps.PipelineError))  # its own, or that of a rank that was faster
            assert complaint in str(error)
    (store / "varuna_ckpt_1" / "opt-fp32-params-0").write_bytes(b"nothing")
    first, *_ = three.run(refused, str(store), 1, True, 7)
    assert isinstance(first, ps.PipelineError)
    assert "opt-fp32-params-0 cannot be read" in str(first)
    shutil.rmtree(store / "varuna_ckpt_1")
    for error in three.run(refused, str(store), 1, True, 7):
        assert "has no checkpoint varuna_ckpt_1" in str(error)


def test_a_rank_raises_its_own_failure() -> None:
    """Not that of a rank which has heard of it, and has raised its error and left before."""

    def left(number: float) -> float:
        raise ps.PipelineError("rank 1 failed: another rank could not read it: see its error")

    def work() -> None:
        raise OSError("cannot be read")

    model = SimpleNamespace(pipeline=SimpleNamespace(max_over_ranks=left))
    with pytest.raises(OSError, match="cannot be read"):
        Varuna._on_all_ranks(model, work, "read it")  # type: ignore[arg-type]
