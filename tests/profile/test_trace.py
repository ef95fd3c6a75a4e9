"""``pipe.trace()`` with threads: what is recorded is what was done, and nothing else changes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.engine import recorder, runner
from penstock.profile.trace import recording
from penstock.schedule import build, simulate
from penstock.schedule.registry import SCHEDULES
from tests.support.models import batch, gradients, labels, mlp
from tests.train.test_bubble import UNIT, Sleeper, near

TRAINING = sorted(name for name in SCHEDULES if build(name, 1, 1).trains)


def pipeline(stages: int = 4, **options: Any) -> ps.Pipeline:
    given = {"microbatches": 4, **options}
    return ps.Pipeline(ps.split(mlp(stages), stages=stages), nn.CrossEntropyLoss(), **given)


def orders(step: Any) -> list[list[ps.Action]]:
    return [[done.action for done in part.actions] for part in step.parts]


def check_consistent(trace: ps.Trace) -> None:
    """Properties of every trace."""
    last = dict.fromkeys(range(len(trace.tracks)), 0.0)
    for step in trace.steps:
        for part in step.parts:
            assert part.begin >= last[part.track]
            last[part.track] = part.end
            now = part.begin
            for done in part.actions:
                for wait in done.waits:
                    assert now <= wait.start <= wait.end <= done.start
                    now = wait.end
                assert now <= done.start <= done.end
                now = done.end
                for sent in done.sends:
                    assert now <= sent.start <= sent.end
                    now = sent.end
            assert now <= part.end
            assert part.busy + part.waited <= part.end - part.begin + 1e-9
            assert part.waited == pytest.approx(sum(w.end - w.start for done in part.actions for w in done.waits))


@pytest.mark.parametrize("schedule", TRAINING)
def test_actions_come_in_the_schedules_order(schedule: str) -> None:
    with pipeline(4, schedule=schedule) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
        pipe.step(batch(), labels())
    assert [step.kind for step in trace.steps] == ["step", "step"]
    for step in trace.steps:
        assert tuple(map(tuple, orders(step))) == pipe.schedule.orders
    assert trace.schedule == trace.order == pipe.schedule
    assert trace.missing is None
    check_consistent(trace)
    assert trace.simulation().schedule == pipe.schedule
    assert trace.bubble is not None
    assert 0 <= trace.bubble < 1


@pytest.mark.parametrize("options", [{"schedule": "zbv"}, {"schedule": "1f1b", "recompute": "always", "seed": 3}])
def test_numbers_are_those_of_a_step_without_a_trace(options: dict[str, Any]) -> None:
    found = []
    for traced in (False, True):
        with pipeline(4, **options) as pipe:
            losses = []
            for _ in range(2):
                if traced:
                    with pipe.trace():
                        losses.append(pipe.step(batch(), labels()).loss)
                else:
                    losses.append(pipe.step(batch(), labels()).loss)
            found.append((losses, gradients(pipe.named_parameters())))
    (losses, grads), (traced_losses, traced_grads) = found
    assert all(torch.equal(a, b) for a, b in zip(losses, traced_losses, strict=True))
    assert grads.keys() == traced_grads.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, traced_grads[name]), name  # type: ignore[arg-type]


def test_recompute_and_the_memory_that_is_saved() -> None:
    """A linear layer saves its input, and a tanh its output: 2 samples of 4 numbers of 4 bytes each."""
    with pipeline(2, schedule="gpipe", recompute={0: "always"}) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
    assert {a.kind for a in orders(trace.steps[0])[0]} == {"F", "R", "B"}
    layer = 2 * 4 * 4
    assert trace.saved[0] == 2 * layer
    assert trace.saved[1] > layer
    memory = [{str(d.action): d.memory for d in part.actions} for part in trace.steps[0].parts]
    assert memory[0]["0F3"] == 0, "what is recomputed saves nothing"
    assert max(memory[0].values()) == trace.saved[0]
    assert memory[1]["1F3"] == 4 * trace.saved[1]
    assert memory[1]["1B3"] == 3 * trace.saved[1] or memory[1]["1B0"] == 3 * trace.saved[1]
    assert min(memory[1].values()) == 0
    assert trace.costs().r is not None
    assert trace.costs().activation == (float(trace.saved[0]), float(trace.saved[1]))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.runs = 0

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.inner(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._run, x, use_reentrant=False)
        return out


def test_what_a_checkpoint_has_packed_away_is_not_unpacked() -> None:
    layers = [Checkpointed(), Checkpointed()]
    plan = ps.split(nn.Sequential(*layers), stages=2)
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), microbatches=2) as pipe, pipe.trace() as trace:
        pipe.step(batch(4), labels(4))
    assert [layer.runs for layer in layers] == [4, 4], "once for the forward and once for the backward"
    assert trace.saved.keys() == {0, 1}


def test_parameters_are_not_what_is_saved() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    plan = ps.split(model, stages=2)
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), microbatches=2) as pipe, pipe.trace() as trace:
        pipe.step(batch(4, 64), labels(4))
    assert trace.saved[0] == 2 * 64 * 4
    assert 2 * 64 * 4 <= trace.saved[1] < 64 * 4 * 4, "its weight, which its graph keeps, is as large as the latter"


def test_looking_at_a_graph_is_no_part_of_an_action(monkeypatch: pytest.MonkeyPatch) -> None:
    later = [0]

    def slow(slot: object, engine: object) -> int:
        later[0] += 10**12
        return 1

    monkeypatch.setattr(recorder, "saved_bytes", slow)
    monkeypatch.setattr(recording, "clock", lambda: time.perf_counter_ns() + later[0])
    with pipeline(1) as pipe, pipe.trace() as trace:
        pipe.step(batch(), labels())
    assert later[0] == 10**12
    assert trace.steps[0].seconds > 1000
    assert all(done.seconds < 900 for done in trace.steps[0].parts[0].actions)


def test_sizes_of_messages() -> None:
    """3 samples of 4 numbers and then 2; gradients are as large."""
    with pipeline(3, microbatches=3, schedule="gpipe") as pipe, pipe.trace() as trace:
        pipe.step(batch(8), labels(8))
    rows = {row["action"]: row for row in trace.table()}
    assert [rows[f"0F{k}"]["sent"] for k in range(3)] == [48, 48, 32]
    assert [rows[f"1F{k}"]["received"] for k in range(3)] == [48, 48, 32]
    assert rows["0F0"]["received"] == rows["2F0"]["sent"] == rows["0B0"]["sent"] == 0
    assert [rows[f"2B{k}"]["sent"] for k in range(3)] == [48, 48, 32]
    assert rows["1B2"]["received"] == 32
    assert trace.costs().bytes == {(0, 1): 48.0, (1, 2): 48.0}


def test_messages_that_skip_stages_and_that_stay_on_a_rank() -> None:
    @ps.skippable(stash=["early"])
    class Stash(nn.Module):
        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            yield ps.stash("early", x)
            return x * 2

    @ps.skippable(pop=["early"])
    class Pop(nn.Module):
        def forward(self, x: Tensor):  # type: ignore[no-untyped-def]
            early = yield ps.pop("early")
            return x + early

    model = nn.Sequential(Stash(), nn.Linear(4, 4), nn.Linear(4, 4), Pop())
    with (
        ps.Pipeline(
            ps.split(model, balance=[1, 1, 1, 1]), nn.CrossEntropyLoss(), microbatches=2, schedule="zbv"
        ) as pipe,
        pipe.trace() as trace,
    ):
        pipe.step(batch(4), labels(4))
    assert set(trace.edges) == {(0, 1), (1, 2), (2, 3), (0, 3)}
    sent = {(str(d.action), s.target): s.bytes for p in trace.steps[0].parts for d in p.actions for s in d.sends}
    assert sent["0F0", 1] == sent["0F0", 3] == 32
    assert ("1F0", 2) in sent, "stages 1 and 2 are on one rank"
    waits = {str(d.action): [w.peer for w in d.waits] for p in trace.steps[0].parts for d in p.actions}
    assert waits["1F0"] == [0]
    assert waits["2F0"] == [], "what comes from the same rank is not waited for"
    assert waits["3F0"] == [2], "stage 0 is on the rank of stage 3"
    check_consistent(trace)


def test_steps_and_skip() -> None:
    with pipeline(2) as pipe:
        with pipe.trace(steps=2, skip=1) as trace:
            assert trace.steps == ()
            for _ in range(5):
                pipe.step(batch(), labels())
            assert trace.steps == ()
        assert [step.number for step in trace.steps] == [0, 1]
        with pipe.trace(steps=9) as trace:
            pipe.step(batch(), labels())
        assert len(trace.steps) == 1
        with pipe.trace(skip=3) as trace:
            pipe.step(batch(), labels())
        assert len(trace.steps) == 0
        assert "no complete step" in str(trace)
        assert trace.bubble is None
        with pytest.raises(ps.PlanError, match="no complete step"):
            trace.costs()
        with pytest.raises(ps.PlanError, match="no complete step"):
            trace.simulation()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"steps": -1}, {"steps": True}, {"steps": 1.5}, {"skip": -1}])
def test_wrong_numbers(wrong: dict[str, Any]) -> None:
    with pipeline(2) as pipe, pytest.raises(ps.PlanError, match=f"{next(iter(wrong))}="):
        pipe.trace(**wrong)


def test_one_trace_at_a_time() -> None:
    with pipeline(2) as pipe:
        with pipe.trace() as trace:
            with pytest.raises(ps.PlanError, match="traced already"), pipe.trace():
                pass
            pipe.step(batch(), labels())
        assert len(trace.steps) == 1, "the first one is none the worse for it"
        block = pipe.trace()
        with block:
            pass
        with pytest.raises(ps.PlanError, match="has ended"), block:
            pass
    with pytest.raises(ps.PipelineError, match="closed"):
        pipe.trace()


def test_other_calls() -> None:
    """Outputs alone; and outputs with gradients, whose backward may come later, or after the trace."""
    with pipeline(2) as pipe:
        with pipe.trace() as trace:
            with torch.no_grad():
                pipe(batch())
            pipe.evaluate(batch(), labels())
            first, second = pipe(batch()), pipe(batch())
            second.sum().backward()
            first.sum().backward()
            late = pipe(batch())
        late.sum().backward()
    kinds = ["evaluate", "evaluate", "call", "call", "backward", "backward", "call"]
    assert [step.kind for step in trace.steps] == kinds
    assert {a.kind for order in orders(trace.steps[0]) for a in order} == {"F"}
    assert {a.kind for order in orders(trace.steps[4]) for a in order} == {"B"}
    check_consistent(trace)
    memory = [[done.memory for done in step.parts[0].actions] for step in trace.steps]
    assert set(memory[0]) == {0}, "without a graph nothing is saved"
    saved = trace.saved[0]
    assert [max(memory[n]) for n in (2, 3)] == [4 * saved, 8 * saved], "two calls are in flight"
    assert memory[5][-1] == 0
    assert trace.costs().f
    assert "trace of 7 steps" in str(trace)


def test_a_call_that_is_not_recorded_has_no_backward_either() -> None:
    with pipeline(2) as pipe, pipe.trace(steps=1, skip=1) as trace:
        outputs = [pipe(batch()) for _ in range(3)]
        for output in outputs:
            output.sum().backward()
    assert [step.kind for step in trace.steps] == ["call", "backward"]


def test_a_last_mini_batch_that_is_smaller() -> None:
    with pipeline(2, microbatches=4, schedule="gpipe") as pipe, pipe.trace() as trace:
        for samples in (8, 8, 3):
            pipe.step(batch(samples), labels(samples))
    assert [len(step.parts[0].actions) for step in trace.steps] == [8, 8, 6]
    assert trace.order == pipe.schedule, "most steps have four micro-batches"


@pytest.mark.slow
def test_the_sleepers_times_are_known() -> None:
    plan = ps.split(nn.Sequential(*(Sleeper() for _ in range(3))), stages=3)
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=4, schedule="1f1b") as pipe, pipe.trace(steps=3, skip=1) as trace:
        for _ in range(4):
            pipe.step(torch.ones(4, 1), torch.ones(4, 1))
    costs = trace.costs()
    assert all(UNIT <= f < 4 * UNIT for f in costs.f)  # type: ignore[union-attr]
    assert all(2 * UNIT <= b < 8 * UNIT for b in costs.b)  # type: ignore[union-attr]
    assert costs.i == costs.w == tuple(b / 2 for b in costs.b)  # type: ignore[union-attr]
    ideal = simulate(pipe.schedule)
    assert near([trace.step_bubble(step) or 0.0 for step in trace.steps], ideal.bubble)
    assert near([trace.simulation().bubble], ideal.bubble)
    fill = trace.steps[0].parts[2].actions[0]
    assert fill.waited > 1.5 * UNIT, "the last rank waits for two forwards before its first"
    assert [wait.peer for wait in fill.waits] == [1]


class Fails(nn.Module):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.at -= 1
        if self.at == 0:
            raise RuntimeError("an accident")
        return self.layer(x)


def test_a_step_that_fails_in_it() -> None:
    layer = Fails(7)
    plan = ps.split(nn.Sequential(nn.Linear(4, 4), layer), stages=2)
    with ps.Pipeline(plan, nn.CrossEntropyLoss(), microbatches=4, schedule="gpipe") as pipe:
        with pytest.raises(RuntimeError, match="accident"), pipe.trace() as trace:  # noqa: PT012
            pipe.step(batch(), labels())
            pipe.step(batch(), labels())
        assert [step.failed for step in trace.steps] == [False, True]
        assert [str(done.action) for done in trace.steps[1].parts[1].actions] == ["1F0", "1F1"]
        check_consistent(trace)
        assert len(trace.table()) > 16
        assert trace.order == pipe.schedule
        layer.at = 3
        with pipe.trace() as trace:  # and the pipeline can be traced again
            with pytest.raises(RuntimeError, match="accident"):
                pipe.step(batch(), labels())
            pipe.step(batch(), labels())
        assert [step.failed for step in trace.steps] == [True, False]
        memory = [done.memory for done in trace.steps[1].parts[0].actions]
        assert max(memory) == 4 * trace.saved[0], "nothing is left of the step that failed"  # type: ignore[type-var]
        assert len(trace.table()) > 16


def test_an_error_outside_of_a_step() -> None:
    with pipeline(2) as pipe:
        with pytest.raises(KeyError), pipe.trace() as trace:  # noqa: PT012
            pipe.step(batch(), labels())
            raise KeyError("the user's")
        assert len(trace.steps) == 1
        assert not trace.steps[0].failed


def test_without_a_trace_the_clock_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []

    def clock() -> int:
        reads.append(1)
        return time.perf_counter_ns()

    monkeypatch.setattr(recording, "clock", clock)
    with pipeline(2) as pipe:
        with pipe.trace(steps=1):
            pipe.step(batch(), labels())
            inside = len(reads)
            assert inside
            pipe.step(batch(), labels())
            assert len(reads) == inside
        outside = len(reads)
        pipe.step(batch(), labels())
        assert len(reads) == outside


@pytest.mark.parametrize("traced", [False, True])
def test_ranges_of_the_profiler_have_the_actions_names(traced: bool) -> None:
    every = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with pipeline(2, microbatches=2) as pipe:
        with torch.profiler.profile(activities=on_cpu, experimental_config=every) as found:
            if traced:
                with pipe.trace() as trace:
                    pipe.step(batch(), labels())
                assert len(trace.steps[0].parts[0].actions) == 4
            else:
                pipe.step(batch(), labels())
        names = {event.name for event in found.events()}
        assert {str(a) for order in pipe.schedule.orders for a in order} <= names
        with pipe.trace() as trace:  # once more, without the profiler
            pipe.step(batch(), labels())
        assert len(trace.steps) == 1


def test_ranges_come_and_go_with_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def record(name: str) -> Any:
        names.append(name)
        return torch.profiler.record_function(name)

    monkeypatch.setattr(runner, "record_function", record)
    on_cpu = [torch.profiler.ProfilerActivity.CPU]
    with pipeline(2, microbatches=2) as pipe, pipe.trace() as trace:
        for profiled in (False, False, False, True, False, True, False):
            before = len(names)
            with torch.profiler.profile(activities=on_cpu) if profiled else nullcontext():
                pipe.step(batch(), labels())
            assert (len(names) > before) == profiled
    assert all(tuple(map(tuple, orders(step))) == pipe.schedule.orders for step in trace.steps)


def test_in_lockstep_a_rank_waits_until_its_outputs_are_taken() -> None:
    plan = ps.split(nn.Sequential(nn.Identity(), Sleeper()), balance=[1, 1])
    with ps.Pipeline(plan, nn.MSELoss(), microbatches=4) as pipe, pipe.trace() as trace:
        pipe.lockstep = True
        pipe.evaluate(torch.ones(4, 1))
    first = trace.steps[0].parts[0]
    assert [[(wait.what, wait.peer) for wait in done.waits] for done in first.actions[1:]] == [[("sent", 1)]] * 3
    assert [span.name for span in first.spans] == ["sends"]
    assert first.waited > UNIT, "it waits for those that sleep"
    check_consistent(trace)
