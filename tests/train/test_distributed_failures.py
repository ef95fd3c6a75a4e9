"""A failure on one rank is raised as the same error on every rank, within seconds, with the cause.

rank 0   F0 F1 F2 .   ←  raises: rank 1, stage 1, micro-batch 1, action 1F1: Boom: on purpose
rank 1      F0 F1 ✗
rank 2         F0 .   ←  raises the same
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.failure import watch
from penstock.engine.failure.cause import Cause, FailureStore
from tests.support.faults import call_in_backward
from tests.support.models import assert_same, batch, gradients, mlp, plain_step
from tests.support.ranks import RankExited, Ranks, run_ranks

SOON = 10.0  # seconds within which a failure reaches all ranks
DEAD = 15.0  # the same for a killed process, which cannot publish a cause
HOLD = 4.0  # seconds for which a rank lives on without serving the others


class Boom(Exception):
    """The user's own kind of error."""


class Interrupted(BaseException):
    """Not an ``Exception``, like KeyboardInterrupt and SystemExit."""


class Fault(nn.Module):
    """An identity that fails on its second real forward, recompute or backward."""

    def __init__(self, where: str, how: str = "raise") -> None:
        super().__init__()
        self.where, self.how, self.calls = where, how, 0

    def hit(self, where: str, value: Tensor) -> None:
        if where != self.where or type(value) is not Tensor:  # shapes are worked out on fake tensors
            return
        self.calls += 1
        if self.calls == 2:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise (Interrupted if self.how == "interrupted" else Boom)(f"on purpose, in {where}")

    def forward(self, x: Tensor) -> Tensor:
        self.hit("recompute" if ps.is_recomputing() else "forward", x)
        return call_in_backward(x, lambda grad: self.hit("backward", grad))


def faulty(at: int, fault: nn.Module) -> nn.Sequential:
    """One layer per rank, with the fault in one of them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(dist.get_world_size())]
    layers[at] = nn.Sequential(layers[at], fault)
    return nn.Sequential(*layers)


def pipeline(model: nn.Sequential, loss_fn: Any = F.mse_loss, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "mesh": ps.Mesh(), **options}
    return ps.Pipeline(ps.split(model, stages=dist.get_world_size()), loss_fn, **options)


def assert_works(pipe: ps.Pipeline, model: nn.Sequential) -> None:
    pipe.zero_grad()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    assert_same(pipe.step(batch(), batch(seed=5)).loss, expected.loss)
    own = gradients(pipe.named_parameters())
    assert_same(own, {name: expected.gradients[name] for name in own})


def assert_new_pipeline_works() -> None:
    model = mlp()
    with pipeline(model) as pipe:
        assert_works(pipe, model)


@dataclass
class RaisedError:
    """The error that a rank raised, and after how many seconds."""

    kind: str
    text: str
    seconds: float
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None


def failing_step(pipe: ps.Pipeline, inputs: Any = None, targets: Any = None) -> RaisedError:
    """Run a step that must fail, and return its error."""
    start = time.monotonic()
    try:
        pipe.step(batch() if inputs is None else inputs, batch() if targets is None else targets)
    except ps.PipelineError as error:
        seconds = time.monotonic() - start
        place = (error.rank, error.stage, error.microbatch, error.action)
        return RaisedError("PipelineError", str(error), seconds, *place)
    except Exception as error:
        return RaisedError(type(error).__name__, str(error), time.monotonic() - start)
    raise AssertionError("the step did not fail")


# ── user code that raises ────────────────────────────────────────────────────────────────────────────────────────


def raises(rank: int, where: str, at: int) -> RaisedError:
    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        fault.hit("loss", output)
        return F.mse_loss(output, target)

    fault = Fault(where)
    model = faulty(at, fault)
    recompute = "always" if where == "recompute" else "never"
    pipe = pipeline(model, bad_loss if where == "loss" else F.mse_loss, recompute=recompute)
    error = failing_step(pipe)
    again = failing_step(pipe)
    assert again.kind == "PipelineError"
    assert "has stopped" in again.text
    assert "on purpose" in again.text
    assert again.seconds < 1
    assert_new_pipeline_works()
    return error


@pytest.mark.parametrize(
    ("where", "at"), [*((where, at) for where in ("forward", "recompute", "backward") for at in (0, 1, 2)), ("loss", 2)]
)
def test_an_exception_in_user_code_reaches_every_rank(three: Ranks, where: str, at: int) -> None:
    """Who, where, on which micro-batch, doing what, and the traceback; a new pipeline works afterwards."""
    errors = three.check(raises, where, at)
    action = f"{at}{ {'backward': 'B', 'recompute': 'R'}.get(where, 'F') }1"
    for error in errors:
        assert error.kind == "PipelineError"
        assert error.seconds < SOON
        assert (error.rank, error.stage, error.microbatch, error.action) == (at, at, 1, action)
        assert f"rank {at}, stage {at}, micro-batch 1, action {action}" in error.text
        assert f"Boom: on purpose, in {where}" in error.text
        assert "Traceback" in error.text
        assert "in hit" in error.text  # the user's own line


def raises_twice_over(rank: int) -> RaisedError:
    """Two stages per rank, on a V: the fault is in a stage in the middle."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), Fault("backward")), nn.Linear(4, 4)
    )
    pipe = ps.Pipeline(ps.split(model, stages=4), F.mse_loss, microbatches=4, schedule="zbv", mesh=ps.Mesh())
    return failing_step(pipe)


def test_error_names_the_stage_of_several_on_a_rank(two: Ranks) -> None:
    for error in two.check(raises_twice_over):
        assert (error.rank, error.stage, error.microbatch, error.action) == (1, 2, 1, "2I1")


def held(rank: int) -> tuple[float, str]:
    """The user keeps the error: to log it, to look at it in a notebook, or because clearing up takes a while."""
    pipe = pipeline(faulty(1, Fault("forward")))
    start = time.monotonic()
    try:
        pipe.step(batch(), batch())
    except ps.PipelineError as error:
        seconds = time.monotonic() - start
        if rank == 1:
            time.sleep(HOLD)
        return seconds, str(error)
    raise AssertionError("the step did not fail")


def test_error_reaches_other_ranks_while_the_failed_rank_holds_it(three: Ranks) -> None:
    for seconds, text in three.check(held):
        assert seconds < HOLD - 1
        assert "on purpose" in text


def interrupted(rank: int) -> tuple[float, str]:
    """Ctrl-C on one rank, whose program catches it and lives on."""
    pipe = pipeline(faulty(1, Fault("forward", "interrupted")))
    start = time.monotonic()
    try:
        pipe.step(batch(), batch())
    except (ps.PipelineError, Interrupted) as error:
        seconds, text = time.monotonic() - start, repr(error)
    if rank == 1:
        time.sleep(HOLD)
    return seconds, text


def test_base_exception_stops_the_other_ranks(three: Ranks) -> None:
    errors = three.check(interrupted)
    assert errors.pop(1)[1].startswith("Interrupted")
    for seconds, text in errors:
        assert seconds < HOLD - 1
        assert text.startswith("PipelineError")
        assert "Interrupted" in text


def raises_in_evaluation(rank: int) -> str:
    pipe = pipeline(faulty(1, Fault("forward")))
    with torch.no_grad():
        try:
            pipe(batch())
        except ps.PipelineError as error:
            return str(error)
    raise AssertionError("the call did not fail")


def test_an_exception_in_evaluation_reaches_every_rank(three: Ranks) -> None:
    for text in three.check(raises_in_evaluation):
        assert "rank 1, stage 1, micro-batch 1, action 1F1: Boom: on purpose" in text


# ── processes that die ───────────────────────────────────────────────────────────────────────────────────────────


def dies(rank: int, where: str, at: int) -> RaisedError:
    pipe = pipeline(faulty(at, Fault(where, "kill")))
    return failing_step(pipe)


@pytest.mark.parametrize(("where", "at"), [("forward", 0), ("backward", 1), ("forward", 2)])
def test_a_killed_process_is_named_by_all_others(where: str, at: int) -> None:
    errors = run_ranks(dies, 3, where, at)
    assert isinstance(errors.pop(at), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.kind == "PipelineError"
        assert error.seconds < DEAD
        assert error.rank == at
        assert f"rank {at}" in error.text
        assert "gone" in error.text


@pytest.mark.parametrize("at", [0, 1])
def test_a_killed_process_is_named_when_the_store_is_in_rank_0(at: int) -> None:
    """Without torchrun the store lives in rank 0, and dies with it."""
    errors = run_ranks(dies, 3, "forward", at, store="first")
    assert isinstance(errors.pop(at), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.kind == "PipelineError"
        assert error.seconds < DEAD
        assert f"rank {at}" in error.text


def leaves(rank: int) -> str:
    """One rank closes the pipeline and goes on with other things."""
    model = mlp()
    pipe = pipeline(model)
    assert_works(pipe, model)
    if rank == 1:
        pipe.close()
        time.sleep(HOLD)
        return ""
    return failing_step(pipe).text


def test_a_rank_that_closed_its_pipeline_is_not_reported_as_dead(two: Ranks) -> None:
    text = two.check(leaves)[0]
    assert "rank 1" in text
    assert "closed" in text
    assert "killed" not in text


def hangs(rank: int) -> RaisedError:
    pipe = pipeline(mlp(), timeout=(None, 1))
    if rank == 1:
        time.sleep(HOLD)
    error = failing_step(pipe)
    if rank == 0:
        os._exit(0)
    return error


def test_timeout_reaches_all_ranks_before_rank_0_ends_with_the_store() -> None:
    first, error = run_ranks(hangs, 2, store="first")
    assert isinstance(first, RankExited)
    assert isinstance(error, RaisedError), error
    assert error.rank == 1
    assert "timed out" in error.text


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class FailsAlways(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NoText


def fails_at_once(rank: int, dynamic: bool) -> RaisedError:
    return failing_step(pipeline(faulty(1, FailsAlways()), dynamic=dynamic))


@pytest.mark.parametrize("dynamic", [False, True], ids=["on fake tensors", "dynamic"])
def test_error_without_text_names_the_stage(two: Ranks, dynamic: bool) -> None:
    for error in two.check(fails_at_once, dynamic):
        assert error.kind == "PipelineError"
        assert (error.rank, error.stage) == (1, 1)
        assert "rank 1, stage 1" in error.text
        assert "NoText" in error.text


# ── calls that not all ranks make ────────────────────────────────────────────────────────────────────────────────


def call_of(name: str, pipe: ps.Pipeline) -> None:
    if name == "clip":
        pipe.clip_grad_norm_(1.0)
    elif name == "state":
        pipe.state_dict(full=True)
    elif name == "agree":
        pipe.max_over_ranks(1.0)
    elif name == "trace":
        pipe.trace().__enter__()
    else:
        pipe.step(batch(), batch(seed=5))


def call_apart(rank: int, first: str, other: str) -> str:
    model = mlp()
    pipe = pipeline(model)
    assert_works(pipe, model)
    with pytest.raises(ps.PipelineError) as caught:
        call_of(other if rank == 1 else first, pipe)
    return str(caught.value)


@pytest.mark.parametrize(
    ("first", "other"),
    [*permutations(("clip", "state", "step"), 2), ("agree", "clip"), ("step", "trace")],
)
def test_different_calls_on_ranks_are_named(two: Ranks, first: str, other: str) -> None:
    words = {
        "clip": "clip_grad_norm_()",
        "state": "state_dict(full=True)",
        "step": "a step",
        "agree": "max_over_ranks()",
    }
    words["trace"] = "trace()"
    for text in two.check(call_apart, first, other):
        assert "must make the same" in text
        assert words[first] in text
        assert words[other] in text


# ── mini-batches that do not fit ─────────────────────────────────────────────────────────────────────────────────


BAD = {
    "empty": (batch(0), "empty"),
    "unequal": ((batch(8), batch(6)), "[8, 6]"),
    "missing": (None, "inputs must be passed on rank 0"),
}


def bad_inputs(rank: int) -> None:
    model = mlp()
    with pipeline(model) as pipe:
        for value, says in BAD.values():
            with pytest.raises(ps.PlanError) as caught:
                pipe.step(value if rank == 0 else None, batch())
            assert says in str(caught.value)
            assert all(grad is None for grad in gradients(pipe.named_parameters()).values())
            with torch.no_grad(), pytest.raises(ps.PlanError):
                pipe(value if rank == 0 else None)
            assert_works(pipe, model)
            pipe.zero_grad()


def test_invalid_inputs_raise_on_all_ranks_and_the_pipeline_continues(three: Ranks) -> None:
    three.check(bad_inputs)


def bad_targets(rank: int, case: str) -> RaisedError:
    targets = {"missing": None, "fewer": batch(6), "unequal": (batch(8), batch(6))}[case]
    pipe = pipeline(mlp())
    start = time.monotonic()
    try:
        pipe.step(batch(), targets)
    except ps.PenstockError as error:
        raised = RaisedError(type(error).__name__, str(error), time.monotonic() - start)
    assert_new_pipeline_works()
    return raised


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("missing", "targets must be passed on rank 2"),
        ("fewer", "8 samples, but the targets have 6"),
        ("unequal", "[8, 6]"),
    ],
)
def test_invalid_targets_raise_on_all_ranks(three: Ranks, case: str, says: str) -> None:
    for error in three.check(bad_targets, case):
        assert says in error.text
        assert error.seconds < SOON


# ── shapes and values that cannot be known beforehand ────────────────────────────────────────────────────────────


class Positive(nn.Module):
    """The size of the output depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


class RealOrFake(nn.Module):
    """The output depends on the data."""

    def forward(self, x: Tensor) -> Any:
        return x, type(x) is Tensor


class First(nn.Module):
    def forward(self, parts: Any) -> Tensor:
        out: Tensor = parts[0]
        return out


def unknowable(rank: int, kind: str) -> RaisedError:
    layer: list[nn.Module] = {"shape": [Positive(), nn.Identity()], "value": [RealOrFake(), First()]}[kind]
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), layer[0]), nn.Sequential(layer[1], nn.Linear(4, 4)))
    pipe = pipeline(model)
    error = failing_step(pipe)
    assert_new_pipeline_works()
    return error


@pytest.mark.parametrize(("kind", "says"), [("shape", "fake tensors"), ("value", "inferred")])
def test_an_output_that_depends_on_the_data_is_a_clear_error(two: Ranks, kind: str, says: str) -> None:
    for error in two.check(unknowable, kind):
        assert error.kind == "PipelineError"
        assert "stage 0" in error.text
        assert says in error.text
        assert "dynamic=True" in error.text
        assert error.seconds < SOON


def misfit(rank: int) -> RaisedError:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4))
    pipe = pipeline(model)
    return failing_step(pipe)


def test_shape_mismatch_names_the_next_stage(two: Ranks) -> None:
    for error in two.check(misfit):
        assert "stage 1" in error.text
        assert "[2, 4]" in error.text


# ── ranks that were given different things ───────────────────────────────────────────────────────────────────────


def different(rank: int, what: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        return differ(rank, what, patch)


def differ(rank: int, what: str, patch: pytest.MonkeyPatch) -> str:
    options: dict[str, Any] = {"mesh": ps.Mesh(), "microbatches": 4}
    model, balance = mlp(), [3, 2, 2]
    if what == "schedule" and rank == 1:
        options["schedule"] = "gpipe"
    if what == "micro-batches" and rank == 1:
        options["microbatches"] = 5
    if what == "plan" and rank == 1:
        balance = [1, 2, 4]
    if what == "'0.weight'" and rank == 1:
        model = mlp(width=6)
    if what == "module '1'" and rank == 1:
        model[1] = nn.Sigmoid()
    if what == "'6.bias'" and rank == 1:
        model[6] = nn.Linear(4, 4, bias=False)
    if what == "seed" and rank == 1:
        options["seed"] = 3
    if what in ("penstock", "torch"):
        module = watch if what == "penstock" else torch
        patch.setattr(module, "__version__", f"2.{rank == 1}")
    try:
        ps.Pipeline(ps.split(model, balance=balance), F.mse_loss, **options)
    except ps.PlanError as error:
        return str(error)
    raise AssertionError("the pipeline was built")


# Models with equal names and sizes, but other modules, once trained together until their states did not fit.
MODELS = ["'0.weight'", "module '1'", "'6.bias'"]


@pytest.mark.parametrize("what", [*MODELS, "schedule", "micro-batches", "plan", "seed", "penstock", "torch"])
def test_different_pipelines_on_ranks_are_named(three: Ranks, what: str) -> None:
    for text in three.check(different, what):
        assert what in text
        assert "on rank 0" in text
        assert "on rank 1" in text
        assert "on rank 2" not in text


def test_plans_that_ranks_have_measured_may_differ(three: Ranks) -> None:
    """Ranks that each balance by their own measurements once were told no more than that their plans differ."""
    for text in three.check(different, "plan"):
        assert "[3, 2, 2] layers" in text
        assert "[1, 2, 4] layers" in text
        assert "balance='parameters'" in text


def without_meta() -> nn.Module:
    """Fails on the meta device: the layer is not known before it is built."""
    torch.empty(1).item()
    return nn.Linear(4, 4)


def built_in_part(rank: int) -> None:
    """Each rank has its own layers, and of the others a description; the second pipeline finds its own ones built."""
    model = nn.Sequential(*(nn.Linear(4, 4) if own == rank else ps.Lazy(lambda: nn.Linear(4, 4)) for own in range(2)))
    model.append(nn.Linear(4, 4, device="meta" if rank == 0 else "cpu"))
    model.append(ps.Lazy(without_meta))
    plan = ps.split(model, balance=[1, 3])
    for _ in range(2):
        with ps.Pipeline(plan, F.mse_loss, mesh=ps.Mesh(), microbatches=4) as pipe:
            pipe.step(batch(), batch(seed=5))


def test_models_of_which_each_rank_has_built_its_own_layers_agree(two: Ranks) -> None:
    two.check(built_in_part)


def refuses(rank: int) -> str:
    """A mistake that one rank finds by itself, before it ever meets the others."""
    start = time.monotonic()
    try:
        pipeline(mlp(), schedule="1f1b" if rank else "1f1c")
    except ps.PenstockError as error:
        assert time.monotonic() - start < SOON
        return str(error)
    raise AssertionError("the pipeline was built")


def test_build_error_of_one_rank_reaches_the_others(two: Ranks) -> None:
    for text in two.check(refuses):
        assert "1f1c" in text
    two.check(new_pipeline)


def new_pipeline(rank: int) -> None:
    assert_new_pipeline_works()


def different_calls(rank: int) -> RaisedError:
    pipe = pipeline(mlp())
    if rank == 0:
        return failing_step(pipe)
    with torch.no_grad():
        try:
            pipe(batch())
        except ps.PipelineError as error:
            return RaisedError("PipelineError", str(error), 0)
    raise AssertionError("the call did not fail")


def test_step_and_call_at_once_is_a_clear_error(two: Ranks) -> None:
    for error in two.check(different_calls):
        assert "a step" in error.text
        assert "a call" in error.text


def different_autocast(rank: int) -> RaisedError:
    pipe = pipeline(mlp())
    with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0):
        return failing_step(pipe)


def test_autocast_on_some_ranks_only_is_a_clear_error(two: Ranks) -> None:
    for error in two.check(different_autocast):
        assert "bfloat16" in error.text


def wrong_world(rank: int) -> None:
    with pytest.raises(ps.PlanError, match=r"Mesh\(pipe=5\) needs 5 processes.* has 2"):
        ps.Mesh(pipe=5)
    with pytest.raises(ps.ScheduleError, match=r"3 stages need 3 ranks, not 2"):
        ps.Pipeline(ps.split(mlp(), stages=3), F.mse_loss, mesh=ps.Mesh())
    with pytest.raises(ps.PlanError, match="devices"):
        pipeline(mlp(), devices=["cpu", "cpu"])
    assert_new_pipeline_works()


def test_mesh_size_mismatch_names_both_numbers(two: Ranks) -> None:
    two.check(wrong_world)


def foreign_writes(rank: int, text: str) -> str:
    """Another program writes into the store, and later a rank fails."""
    pipe = pipeline(mlp(3))
    for step in range(20):
        if rank == 0 and step == 5:
            store = pipe._executor.watch._store
            for key in ("failure/cause", "status/1", "status/2"):
                store.set(key, text)
        pipe.step(batch(), batch())
        time.sleep(0.05)  # the watch reads the store a few times
    if rank == 1:
        pipe._executor.exit(ValueError("mine"))
        return "ValueError: mine"
    with pytest.raises(ps.PipelineError) as caught:
        pipe.step(batch(), batch())
    return str(caught.value)


FORGED = '{"rank": 7, "kind": "", "message": "of no rank", "traceback": ""}'


@pytest.mark.parametrize("text", ["{", "[" * 3000, "9" * 5000, "[]", FORGED])
def test_foreign_values_in_the_store_neither_end_a_pipeline_nor_hide_a_cause(three: Ranks, text: str) -> None:
    assert all("ValueError: mine" in told for told in three.check(foreign_writes, text))


def test_control_characters_of_a_cause_are_not_printed() -> None:
    store = dist.HashStore()
    failures = FailureStore(store, [0, 1], 0)
    failures.publish(Cause(1, "ValueError", "\x1b[2Jgone\n", "a\x00b\tc"))
    assert failures.read() == Cause(1, "ValueError", "\ufffd[2Jgone\n", "a\ufffdb\tc")
