"""Arguments that ``Pipeline(...)`` refuses: one clear message, before any computation, without changes."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as ps
from penstock.schedule.registry import SCHEDULES, build
from tests.schedule.samples import placed, staircase
from tests.support.models import assert_same, batch, mlp, penstock_threads, snapshot


@contextmanager
def refused(model: nn.Module, kind: type[Exception], says: str) -> Iterator[None]:
    """The block raises ``kind`` with one message, and leaves the model and the process as they were."""
    F.mse_loss(model(batch()), batch()).backward()
    before, threads = snapshot(model), penstock_threads()
    with pytest.raises(kind, match=says):
        yield
    assert_same(snapshot(model), before)
    assert not penstock_threads() - threads


def construct(model: nn.Sequential, stages: int = 4, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(ps.split(model, stages=stages), options.pop("loss_fn", F.mse_loss), **options)


# ── the schedule ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_unknown_schedule_comes_with_the_nearest_name() -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, r"'1f2b'.*did you mean '1f1b'"):
        construct(model, schedule="1f2b")


def test_a_schedule_like_nothing_known_comes_with_all_names() -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, r"(?=.*'gpipe')(?=.*'zbv')"):
        construct(model, schedule="xyz")


@pytest.mark.parametrize("schedule", [3, object], ids=str)
def test_a_schedule_is_a_name_or_a_schedule(schedule: Any) -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, "schedule"):
        construct(model, schedule=schedule)


def test_names_are_forgiving_in_spelling() -> None:
    with construct(mlp(), schedule="ZB-H1") as pipe:
        assert pipe.schedule.name == "zb_h1"


@pytest.mark.parametrize("schedule", ["forward_only", build("forward_only", 4, 2)], ids=["name", "object"])
def test_a_schedule_without_backward_does_not_train(schedule: Any) -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, "no backward"):
        construct(model, schedule=schedule, microbatches=2)


@pytest.mark.parametrize(
    ("p", "m", "says"),
    [(3, 2, r"3 stages.*pipeline has 4"), (4, 3, r"3 micro-batches.*2")],
    ids=["stages", "micro-batches"],
)
def test_a_schedule_for_another_pipeline_names_both_numbers(p: int, m: int, says: str) -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, says):
        construct(model, schedule=build("1f1b", p, m), microbatches=2)


def test_a_schedule_for_more_ranks_than_there_are_devices_names_both_numbers() -> None:
    model = mlp()
    with refused(model, ps.PlanError, r"2 ranks.*1 devices"):
        construct(model, schedule=build("interleaved", 2, 2, 2), microbatches=2, devices=["cpu"])


BROKEN = {
    # Rank 0 wants the gradient of 0 before it sends 1; rank 1 wants 1 before it gives the gradient of 0.
    "deadlock": (staircase("F0 B0 F1 B1", "F0 F1 B0 B1"), r"deadlock.*0B0.*1F1"),
    "other order": (staircase("F0 B0 F1 B1", "F1 B1 F0 B0"), r"deadlock.*0B0.*1F1"),
    "incomplete": (staircase("F0 F1 B0", "F0 B0 F1 B1"), r"0B1.*missing"),
    "twice": (staircase("F0 F1 F1 B0 B1", "F0 B0 F1 B1"), r"0F1.*second time"),
    "backward first": (staircase("B0 F0 F1 B1", "F0 B0 F1 B1"), r"0B0.*needs 0F0"),
    "elsewhere": (placed([0, 1], "0F0 1F0 1B0 0B0", "0F1 1F1 1B1 0B1"), r"stage 1 is on rank 1"),
    "idle rank": (placed([0, 0], "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", ""), r"rank 1 holds no stage"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_schedule_that_cannot_run_is_refused_before_anything_moves(fault: str) -> None:
    schedule, says = BROKEN[fault]
    model = mlp()
    with refused(model, ps.ScheduleError, says):
        construct(model, stages=2, schedule=schedule, microbatches=2)


def test_a_schedule_of_ones_own_runs() -> None:
    mine = staircase(
        "F0 F1 .  .  B1 B0",
        ".  F0 F1 B1 B0 . ",
    )
    with construct(mlp(), stages=2, schedule=mine, microbatches=2) as pipe:
        pipe.step(batch(), batch())
        assert pipe.schedule == mine


# ── ranks and devices ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("schedule", "devices", "says"),
    [
        *(("1f1b", n, rf"4 ranks.*{n} devices") for n in (0, 1, 3)),
        *(("zbv", n, rf"2 ranks.*{n} devices") for n in (0, 1)),
        ("interleaved", 0, "0 devices"),
        ("interleaved", 3, r"4 stages.*3 ranks"),
    ],
)
def test_too_few_devices_name_both_numbers(schedule: str, devices: int, says: str) -> None:
    model = mlp()
    with refused(model, ps.PenstockError, says):
        construct(model, schedule=schedule, devices=["cpu"] * devices)


@pytest.mark.parametrize("devices", ["cpu", torch.device("cpu"), ["cpu"] * 4, ("cpu",) * 9], ids=str)
def test_one_device_serves_all_ranks_and_more_than_needed_are_left_alone(devices: Any) -> None:
    with construct(mlp(), devices=devices) as pipe:
        assert pipe.plan.devices == ("cpu",) * 4


@pytest.mark.parametrize("device", ["cuda:99", "banana", "mps", "meta"])
def test_a_device_that_is_not_there_is_named(device: str) -> None:
    model = mlp()
    with refused(model, ps.PlanError, device):
        construct(model, stages=2, devices=["cpu", device])


def test_a_v_schedule_needs_an_even_number_of_stages() -> None:
    model = mlp()
    with refused(model, ps.ScheduleError, r"2 stages on each rank.*3 stages"):
        construct(model, stages=3, schedule="zbv")


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0, "2", None], ids=repr)
def test_micro_batches_are_a_whole_number_from_one_up(microbatches: Any) -> None:
    model = mlp()
    with refused(model, ps.PenstockError, rf"microbatches.*at least 1, got {re.escape(repr(microbatches))}"):
        construct(model, microbatches=microbatches)


def test_a_model_is_not_a_plan() -> None:
    model = mlp()
    with refused(model, ps.PlanError, r"got Sequential: make one with penstock\.split"):
        ps.Pipeline(model)  # type: ignore[arg-type]


@pytest.mark.parametrize("loss_fn", ["mse", 3, F.mse_loss(batch(), batch())], ids=["str", "int", "tensor"])
def test_a_loss_that_cannot_be_called_is_refused(loss_fn: Any) -> None:
    model = mlp()
    with refused(model, ps.PlanError, f"loss_fn.*got {type(loss_fn).__name__}"):
        construct(model, loss_fn=loss_fn)


@pytest.mark.parametrize(
    "loss_fn",
    [nn.MSELoss(reduction="none"), nn.CrossEntropyLoss(reduction="none"), partial(F.mse_loss, reduction="none")],
    ids=["mse", "cross entropy", "partial"],
)
def test_a_loss_that_does_not_reduce_is_refused(loss_fn: Any) -> None:
    model = mlp()
    with refused(model, ps.PlanError, r"reduction='none'.*'mean' or 'sum'"):
        construct(model, loss_fn=loss_fn)


@pytest.mark.parametrize("reduction", ["none", "avg", 1])
def test_an_unknown_reduction_is_refused(reduction: Any) -> None:
    model = mlp()
    with refused(model, ps.PlanError, r"'mean' or 'sum'"):
        construct(model, reduction=reduction)


@pytest.mark.parametrize("outputs", ["some", "every:0", "every:x", "every", 3])
def test_outputs_are_of_a_known_kind(outputs: Any) -> None:
    model = mlp()
    with refused(model, ps.PlanError, rf"'all', 'final', 'sum', 'every:N'.*got {outputs!r}"):
        construct(model, outputs=outputs)


def test_running_statistics_live_on_one_rank() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Linear(4, 4))
    with refused(model, ps.PlanError, r"2\.running_mean keeps running statistics of stages 0 and 2, on ranks 0 and 2"):
        construct(model)
    untracked = nn.BatchNorm1d(4, track_running_stats=False)
    construct(nn.Sequential(untracked, nn.Linear(4, 4), untracked, nn.Linear(4, 4))).close()


@pytest.mark.parametrize("option", [{"batchnorm": "late"}, {"accumulate": "fp8"}, {"mesh": 2}, {"offload": True}])
def test_options_that_cannot_be(option: dict[str, Any]) -> None:
    model = mlp()
    ((name, value),) = option.items()
    with refused(model, ps.PlanError, rf"{name} must be .*got {value if name == 'x' else ''}"):
        construct(model, **option)


def test_a_mesh_outside_of_torchrun_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ps.PlanError, match=r"RANK.*torchrun"):
        ps.Mesh(pipe=2)


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "forward_only"])
def test_every_schedule_takes_a_plan_of_four_stages(schedule: str) -> None:
    with construct(mlp(), schedule=schedule, microbatches=3) as pipe:
        assert pipe.schedule.name == schedule
        assert pipe.schedule.num_stages == 4


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_that_is_copied_says_what_to_do(copied: Callable[[Any], Any]) -> None:
    with ps.Pipeline(ps.split(mlp(), stages=2), F.mse_loss) as pipe, pytest.raises(ps.PlanError, match="state_dict"):
        copied(pipe)
