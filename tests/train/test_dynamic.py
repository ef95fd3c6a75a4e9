"""``dynamic=True``: messages that describe themselves, what that costs, and what it saves a user from.

That steps equal the plain model's is in ``tests/equivalence/test_dynamic.py``.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.channel import dynamic
from penstock.engine.channel.base import Endpoint
from tests.support.models import assert_same, batch, gradients, mlp, plain_step
from tests.support.ranks import RankExited, Ranks, run_ranks
from tests.train.test_distributed_failures import DEAD, HOLD, SOON, Fault, RaisedError, failing_step, faulty


def pipeline(model: nn.Sequential, loss_fn: Any = F.mse_loss, stages: int | None = None, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "mesh": ps.Mesh(), "dynamic": True, **options}
    return ps.Pipeline(ps.split(model, stages=stages or dist.get_world_size()), loss_fn, **options)


def assert_plain(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor, loss_fn: Any = F.mse_loss) -> None:
    expected = plain_step(model, x, y, loss_fn)
    pipe.zero_grad()
    assert_same(pipe.step(x, y).loss, expected.loss)
    own = gradients(pipe.named_parameters())
    assert_same(own, {name: expected.gradients[name] for name in own})


# ── headers ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def headers() -> Iterator[Counter[str]]:
    """How many of the messages that this rank sends meanwhile are described, and how."""
    counts: Counter[str] = Counter()
    send = dynamic.DynamicEndpoint.send

    def count(channel: dynamic.DynamicEndpoint, tensors: Sequence[Tensor], header: bytes | None) -> list[Any]:
        counts["same" if header is None else "row" if len(header) <= dynamic.DATA_BYTES else "long"] += 1
        return send(channel, tensors, header)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic.DynamicEndpoint, "send", count)
        yield counts


def unchanged(rank: int) -> list[Counter[str]]:
    model, found = mlp(), []
    with pipeline(model) as pipe:
        for samples in (8, 8, 10):
            with headers() as counts:
                assert_plain(pipe, model, batch(samples), batch(samples, seed=5))
            found.append(counts)
    return found


def test_what_has_not_changed_is_not_described_again(three: Ranks) -> None:
    """Four micro-batches, outputs down and gradients up; of ten samples, the first two have one more."""
    first, middle, last = three.check(unchanged)
    assert first == last == [{"row": 1, "same": 3}, {"same": 4}, {"row": 2, "same": 2}]
    assert middle == [{"row": 2, "same": 6}, {"same": 8}, {"row": 4, "same": 4}]


class Many(nn.Module):
    """So many tensors, of which every other one is used."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.linear = count, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        return {"all of them": [self.linear(x) * i for i in range(self.count)]}


class EveryOther(nn.Module):
    def forward(self, value: dict[str, list[Tensor]]) -> Tensor:
        return torch.stack(value["all of them"][::2]).sum(0)


def long_header(rank: int) -> Counter[str]:
    model = nn.Sequential(Many(60), EveryOther())
    with pipeline(model) as pipe, headers() as counts:
        for samples in (8, 8, 4):
            assert_plain(pipe, model, batch(samples), batch(samples, seed=5))
    return counts


def test_a_header_of_any_length(two: Ranks) -> None:
    down, up = two.check(long_header)
    assert down == {"long": 2, "same": 10}
    assert up == {"long": 2, "same": 10}


class Likewise(nn.Module):
    """Values that are equal and not the same: each micro-batch says by its first number which it gives."""

    values = (1, True, 1.0, True, 0.0, -0.0, False, None)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        return self.linear(x), self.values[int(x[0, 0])], x


class ToldApart(nn.Module):
    def forward(self, parts: tuple[Tensor, Any, Tensor]) -> Tensor:
        h, value, x = parts
        assert repr(value) == repr(Likewise.values[int(x[0, 0])])
        return h


def look_alikes(rank: int) -> None:
    x = torch.arange(8.0).unsqueeze(1).repeat(1, 4)
    with pipeline(nn.Sequential(Likewise(), ToldApart()), microbatches=8) as pipe:
        pipe.step(x, x)


def test_values_that_are_equal_and_not_the_same_are_told_apart(two: Ranks) -> None:
    two.check(look_alikes)


class Slow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.3)
        return x


def ahead(rank: int) -> list[bool]:
    """For each output that lands: whether its header had been read by then."""
    found: list[bool] = []
    wait_recv = dynamic.DynamicForwardChannel.wait_recv

    def note(channel: dynamic.DynamicForwardChannel, microbatch: int) -> None:
        found.append(microbatch in channel.pending)
        wait_recv(channel, microbatch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic.DynamicForwardChannel, "wait_recv", note)
        with pipeline(nn.Sequential(nn.Linear(4, 4), Slow())) as pipe:
            pipe.evaluate(batch())
    return found


def test_tensors_come_while_the_receiver_computes(two: Ranks) -> None:
    """The second header comes during the first forward, and is seen when a third is asked for; the last one is not."""
    assert two.check(ahead)[1][1:3] == [True, True]


class Bag:
    """An object that nobody takes apart."""

    def __init__(self) -> None:
        self.seen: list[int] = []


class Give(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bag = nn.Linear(4, 4), Bag()

    def forward(self, x: Tensor) -> tuple[Tensor, Bag]:
        return self.linear(x), self.bag


class Fill(nn.Module):
    def forward(self, parts: tuple[Tensor, Bag]) -> Tensor:
        h, bag = parts
        bag.seen.append(len(h))
        assert len(bag.seen) == 1
        return h


def objects(rank: int) -> None:
    model = nn.Sequential(Give(), Fill())
    with torch.serialization.safe_globals([Bag]), pipeline(model) as pipe:
        for _ in range(2):
            pipe.step(batch(), batch())


def test_an_object_comes_as_it_was_sent_whatever_was_done_to_the_last_one(two: Ranks) -> None:
    two.check(objects)


class Bad(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        if self.kind == "lambda":
            return self.linear(x), lambda: 0
        if self.kind == "sparse":
            return self.linear(x), x.to_sparse()
        return self.linear(x), torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged)


class First(nn.Module):
    def forward(self, parts: Any) -> Tensor:
        out: Tensor = parts[0]
        return out


def unsendable(rank: int, kind: str, known: bool) -> RaisedError:
    return failing_step(pipeline(nn.Sequential(Bad(kind), First()), dynamic=not known))


@pytest.mark.parametrize(
    ("kind", "known", "says"),
    [
        ("lambda", False, "cannot be sent"),
        ("sparse", False, "sparse_coo tensor"),
        ("nested", False, "jagged tensor"),
        ("sparse", True, "sparse_coo tensor"),
    ],
)
def test_what_cannot_be_sent_is_named_on_every_rank(two: Ranks, kind: str, known: bool, says: str) -> None:
    for error in two.check(unsendable, kind, known):
        assert error.kind == "PipelineError"
        assert "stage 0" in error.text
        assert says in error.text
        assert error.seconds < SOON


class Turned(nn.Module):
    """Tensors whose memory is not what they say: it is to be conjugated and negated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(self.linear(x), x).conj()
        assert z.is_conj()
        assert z.imag.is_neg()
        return z, z.imag


class TurnedBack(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        z, imaginary = parts
        return z.real + z.imag * 3 + imaginary * 5


def turned(rank: int, known: bool) -> None:
    model = nn.Sequential(Turned(), TurnedBack())
    with pipeline(model, dynamic=not known) as pipe:
        assert_plain(pipe, model, batch(), batch(seed=5))


@pytest.mark.parametrize("known", [True, False])
def test_tensors_arrive_with_the_values_they_show(two: Ranks, known: bool) -> None:
    two.check(turned, known)


# ── what cannot be inferred ──────────────────────────────────────────────────────────────────────────────────────


def thawed(rank: int, known: bool) -> str:
    """Each rank thaws its own parameters, and the first has none to thaw."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    plain = copy.deepcopy(model)
    with pipeline(model, dynamic=not known) as pipe:
        assert_plain(pipe, plain, batch(), batch(seed=5))
        if rank:
            for parameter in pipe.parameters():
                parameter.requires_grad_()
        plain[1].requires_grad_()
        try:
            assert_plain(pipe, plain, batch(), batch(seed=5))
        except ps.PipelineError as error:
            return str(error)
    return "right"


def test_parameters_thawed_behind_the_first_ranks_back(three: Ranks) -> None:
    assert three.check(thawed, False) == ["right"] * 3
    for text in three.check(thawed, True):
        assert "gradients wanted for leaves [0], but [] was inferred" in text
        assert "dynamic=True" in text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.idle(x)


class Twice(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return parts[0] * 2, parts[1] * 2


def _first_only(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output[0], target)


def idle_output(rank: int) -> None:
    model = nn.Sequential(Two(), Twice())
    with pipeline(model, _first_only) as pipe:
        assert_plain(pipe, model, batch(), batch(seed=5), _first_only)
        assert rank or model[0].idle.weight.grad is None


def test_what_the_loss_does_not_use_gets_no_gradient_rather_than_zeros(two: Ranks) -> None:
    two.check(idle_output)


class LayerDrop(nn.Module):
    """Skips its layer as the dice say; then what it gives has another structure."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, Tensor) else value[0]
        return x if torch.rand(()) < 0.5 else (torch.tanh(self.linear(x)), "run")


class Only(nn.Module):
    def forward(self, value: Any) -> Tensor:
        out: Tensor = value if isinstance(value, Tensor) else value[0]
        return out


def dropped(stages: int, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), *(LayerDrop() for _ in range(6)), Only())
    found = []
    plan = ps.split(model, stages=stages, balance="uniform")
    with ps.Pipeline(plan, F.mse_loss, microbatches=4, seed=7, dynamic=True, **options) as pipe:
        for step in range(3):
            result = pipe.step(batch(seed=step), batch(seed=5))
            found.append((result.loss, gradients(pipe.named_parameters())))
            pipe.zero_grad()
    return found


def layers_dropped(rank: int, stages: int, schedule: str, recompute: str) -> None:
    ours = dropped(stages, schedule=schedule, recompute=recompute, mesh=ps.Mesh())
    for (loss, own), (expected, grads) in zip(ours, dropped(1, devices="cpu"), strict=True):
        assert_same(loss, expected)
        assert_same(own, {name: grads[name] for name in own})


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(("stages", "schedule"), [(2, "1f1b"), (4, "zbv"), (8, "interleaved")])
def test_with_a_seed_the_same_layers_are_dropped(two: Ranks, stages: int, schedule: str, recompute: str) -> None:
    two.check(layers_dropped, stages, schedule, recompute)


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


def _sizes(so_far: list[int] | None, output: Tensor) -> list[int]:
    return [*(so_far or []), output.numel()]


def ragged_outputs(rank: int) -> Any:
    """Outputs of any length, as a function of the user's takes them."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Positive()), nn.Identity())
    expected = [len(model(part)) for part in batch().split(2)]
    assert len(set(expected)) > 1
    with pipeline(model, lambda output, target: output.sum(), reduction="sum", outputs=_sizes) as pipe:
        stepped = pipe.step(batch(), batch()).outputs
        evaluated = pipe.evaluate(batch(), outputs=_sizes).outputs
    return rank == 0 or stepped == evaluated == expected


def test_outputs_of_any_length(two: Ranks) -> None:
    assert two.check(ragged_outputs) == [True, True]


class BySign(nn.Module):
    """Runs one of two layers, as the data says, and gives what it ran as well."""

    def __init__(self) -> None:
        super().__init__()
        self.plus, self.minus = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, value: Any) -> Any:
        x = value if isinstance(value, Tensor) else value[0]
        return self.plus(x) if x[0, 0] > 0 else (self.minus(x), "minus", x[x > 0])


def replicas(rank: int) -> None:
    """Two pipelines on halves of a mini-batch: a layer may have run in one of them alone, or in none."""
    torch.manual_seed(0)
    model = nn.Sequential(BySign(), BySign(), BySign(), Only())
    plain, mesh = copy.deepcopy(model), ps.Mesh(data=2, pipe=2)
    with pipeline(model, stages=2, microbatches=2, mesh=mesh) as pipe:
        for samples in (4, 8):
            x, y = batch(samples, seed=3), batch(samples, seed=5)
            parts = x.chunk(2 * 2)
            loss = F.mse_loss(torch.cat([plain(part) for part in parts]), y)
            plain.zero_grad()
            pipe.zero_grad()
            loss.backward()
            mine = slice(mesh.data_rank * samples // 2, (mesh.data_rank + 1) * samples // 2)
            assert_same(pipe.step(x[mine], y[mine]).loss, loss.detach())
            expected = gradients(plain)
            own = gradients(pipe.named_parameters())
            assert_same(own, {name: expected[name] for name in own})


def test_replicas_whose_layers_differ(four: Ranks) -> None:
    four.check(replicas)


def autocast(rank: int) -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    with pipeline(model, dynamic=True) as one, pipeline(plain, dynamic=False) as other:
        for enabled in (True, False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                ours, theirs = one.step(batch(), batch(seed=5)), other.step(batch(), batch(seed=5))
            assert torch.equal(ours.loss, theirs.loss)
            assert_same(gradients(one.named_parameters()), gradients(other.named_parameters()))


def test_precision_may_change_between_steps(two: Ranks) -> None:
    two.check(autocast)


# ── two sets of channels ─────────────────────────────────────────────────────────────────────────────────────────


def first_step_apart(rank: int, schedule: str) -> None:
    """As with NCCL: the first step of each micro-batch count uses the quiet endpoints, and headers always do."""
    sent: list[tuple[int, int]] = []
    send = Endpoint.send

    def note(endpoint: Endpoint, tensors: Sequence[Tensor], tag: int = 0) -> list[Any]:
        sent.append((id(endpoint), tag))
        return send(endpoint, tensors, tag)

    used: list[tuple[set[bool], set[bool]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.engine.distributed.uses_nccl", lambda device: True)
        patch.setattr(Endpoint, "send", note)
        model = mlp()
        with pipeline(model, stages=4, schedule=schedule) as pipe:
            quiet = set(map(id, pipe._executor.programs.staged.values()))
            for samples in (8, 8, 3, 12, 3):
                assert_plain(pipe, model, batch(samples), batch(samples, seed=1))
                tensors = {endpoint in quiet for endpoint, tag in sent if tag == 0}
                used.append((tensors, {endpoint in quiet for endpoint, tag in sent if tag}))
                sent.clear()
    assert used == [({quietly}, {True}) for quietly in (True, False, True, False, False)]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_the_first_step_of_a_number_of_micro_batches_may_go_over_channels_of_its_own(two: Ranks, schedule: str) -> None:
    two.check(first_step_apart, schedule)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────


def raises(rank: int, where: str, at: int) -> RaisedError:
    return failing_step(pipeline(faulty(at, Fault(where))))


@pytest.mark.parametrize(("where", "at"), [(where, at) for where in ("forward", "backward") for at in (0, 1, 2)])
def test_an_exception_in_user_code_reaches_every_rank(three: Ranks, where: str, at: int) -> None:
    action = f"{at}B1" if where == "backward" else f"{at}F1"
    for error in three.check(raises, where, at):
        assert error.kind == "PipelineError"
        assert error.seconds < SOON
        assert (error.rank, error.stage, error.microbatch, error.action) == (at, at, 1, action)
        assert f"Boom: on purpose, in {where}" in error.text


def held(rank: int, schedule: str) -> tuple[float, str]:
    """The rank that failed keeps its error, and with it every frame that the error came through."""
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(6)]
    layers[1] = nn.Sequential(layers[1], Fault("forward"))
    pipe = pipeline(nn.Sequential(*layers), stages=3 if schedule == "1f1b" else 6, schedule=schedule)
    start = time.monotonic()
    try:
        pipe.step(batch(), batch())
    except ps.PipelineError as error:
        seconds = time.monotonic() - start
        time.sleep(HOLD if rank == 1 else 0)
        return seconds, str(error)
    raise AssertionError("the step did not fail")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_the_others_are_told_even_while_the_failed_rank_still_holds_its_error(three: Ranks, schedule: str) -> None:
    for seconds, text in three.check(held, schedule):
        assert seconds < HOLD - 1
        assert "on purpose" in text


def dies(rank: int, where: str) -> RaisedError:
    return failing_step(pipeline(faulty(1, Fault(where, "kill"))))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_killed_process_is_named_by_all_others(where: str) -> None:
    errors = run_ranks(dies, 3, where)
    assert isinstance(errors.pop(1), RankExited)
    for error in errors:
        assert isinstance(error, RaisedError), error
        assert error.seconds < DEAD
        assert error.rank == 1
        assert "gone" in error.text


# ── the option ───────────────────────────────────────────────────────────────────────────────────────────────────


def different(rank: int) -> str:
    try:
        pipeline(mlp(), dynamic=rank == 0)
    except ps.PlanError as error:
        return str(error)
    raise AssertionError("the pipeline was built")


def test_all_ranks_must_be_dynamic_or_none(two: Ranks) -> None:
    for text in two.check(different):
        assert "dynamic is True on rank 0, but False on rank 1" in text
