"""Pipelines of processes: every rank's part of a step equals the plain model's, whatever crosses between them.

A case is a function that runs on every rank of a group of worker processes (``two``, ``three``, ``four``), which many
cases share. A failed assertion on any rank fails the test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.channel.base import Endpoint
from penstock.engine.channel.process import InFlight
from tests.support.models import PlainResult, assert_same, batch, gradients, labels, mlp, plain_step
from tests.support.ranks import Ranks


def pipeline(model: nn.Sequential, loss_fn: Any = F.mse_loss, stages: int | None = None, **options: Any) -> ps.Pipeline:
    options = {"microbatches": 4, "mesh": ps.Mesh(), **options}
    return ps.Pipeline(ps.split(model, stages=stages or dist.get_world_size()), loss_fn, **options)


def assert_plain(pipe: ps.Pipeline, result: ps.StepResult, expected: PlainResult) -> None:
    """Loss on every rank, gradients of its own parameters, outputs on the last."""
    assert_same(result.loss, expected.loss)
    own = [name for name, _ in pipe.named_parameters()]
    assert_same(gradients(pipe.named_parameters()), {name: expected.gradients[name] for name in own})
    last = pipe.plan.ranks is not None and pipe.plan.ranks[-1] == dist.get_rank()
    if last:
        assert_same(result.outputs, copy.copy(expected.output).detach())
    else:
        assert result.outputs is None


# ── channels ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def sends() -> Iterator[list[Endpoint]]:
    """The endpoint of every tensor that this rank sends meanwhile."""
    sent: list[Endpoint] = []
    several, one = Endpoint.send, InFlight.send_tensor

    def count_one(message: InFlight, tensor: Tensor) -> None:
        sent.append(message.endpoint)
        one(message, tensor)

    def count_several(endpoint: Endpoint, tensors: Sequence[Tensor]) -> list[Any]:
        sent.extend([endpoint] * len(tensors))
        return several(endpoint, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Endpoint, "send", count_several)
        patch.setattr(InFlight, "send_tensor", count_one)
        yield sent


def first_step_apart(rank: int, schedule: str) -> None:
    """As with NCCL, where the first step of each kind of mini-batch goes over channels of its own."""
    used: list[set[bool]] = []
    with pytest.MonkeyPatch.context() as patch, sends() as sent:
        patch.setattr("penstock.engine.distributed.uses_nccl", lambda device: True)
        model = mlp()
        with pipeline(model, stages=4, schedule=schedule) as pipe:
            for samples in (8, 8, 5, 8, 5):
                x, y = batch(samples), batch(samples, seed=1)
                expected = plain_step(model, x, y, F.mse_loss)
                assert_plain(pipe, pipe.step(x, y), expected)
                pipe.zero_grad()
                quiet = set(map(id, pipe._executor.programs.staged.values()))
                used.append({id(endpoint) in quiet for endpoint in sent})
                sent.clear()
    assert used == [{True}, {False}, {True}, {False}, {False}]


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_the_first_step_of_a_kind_may_go_over_channels_of_its_own(two: Ranks, schedule: str) -> None:
    two.check(first_step_apart, schedule)


# ── mini-batches ─────────────────────────────────────────────────────────────────────────────────────────────────


def sizes_and_shapes(rank: int, schedule: str) -> list[float]:
    """One pipeline, mini-batches of many sizes and lengths, some of them again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    losses = []
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        for samples, length in [(8, 3), (3, 3), (1, 1), (10, 2), (8, 3), (7, 5), (4, 1), (3, 3)]:
            x, y = (batch(samples * length, seed=s).reshape(samples, length, 4) for s in (samples, samples + 50))
            expected = plain_step(model, x, y, F.mse_loss)
            result = pipe.step(x, y)
            assert_plain(pipe, result, expected)
            assert (result.samples, result.microbatches) == (samples, min(4, samples))
            pipe.zero_grad()
            losses.append(float(result.loss))
    return losses


@pytest.mark.parametrize("schedule", ["interleaved", "zbv", "looped_bfs", "sharded"])
def test_sizes_and_shapes_may_differ_every_step(two: Ranks, schedule: str) -> None:
    losses = two.check(sizes_and_shapes, schedule)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_sizes_and_shapes_on_four_ranks(four: Ranks, schedule: str) -> None:
    losses = four.check(sizes_and_shapes, schedule)
    assert losses.count(losses[0]) == 4


def only_where_needed(rank: int) -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        result = pipe.step(batch() if rank == 0 else None, batch(seed=5) if rank == 2 else None)
        assert_plain(pipe, result, expected)


def test_inputs_are_needed_on_the_first_rank_and_targets_on_the_last_only(three: Ranks) -> None:
    three.check(only_where_needed)


def accumulated(rank: int) -> None:
    model = mlp()
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss, steps=3)
    with pipeline(model) as pipe:
        for _ in range(3):
            result = pipe.step(batch(), batch(seed=5))
        assert_plain(pipe, result, expected)


def test_gradients_accumulate_over_steps(two: Ranks) -> None:
    two.check(accumulated)


def input_gradient(rank: int) -> None:
    model, x, plain = mlp(), batch().requires_grad_(), batch().requires_grad_()
    F.mse_loss(copy.deepcopy(model)(plain), batch(seed=5)).backward()
    with pipeline(model) as pipe:
        pipe.step(x, batch(seed=5))
        if rank == 0:
            assert_same(x.grad, plain.grad)
        else:
            assert x.grad is None


def test_inputs_that_want_a_gradient_get_one_on_the_first_rank(two: Ranks) -> None:
    two.check(input_gradient)


def many_kinds(rank: int) -> None:
    """More kinds of mini-batch than are kept compiled, and each of them again when it has been forgotten."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with pipeline(model, outputs=None) as pipe:
        for length in [*range(1, 21), *range(1, 21)]:
            x = batch(4 * length, seed=length).reshape(4, length, 4)
            pipe.zero_grad()
            result = pipe.step(x, x)
            if length in (1, 7, 20):
                expected = plain_step(model, x, x, F.mse_loss)
                assert_same(result.loss, expected.loss)
                own = gradients(pipe.named_parameters())
                assert_same(own, {name: expected.gradients[name] for name in own})
            assert result.outputs is None


def test_ever_new_kinds_of_mini_batch_are_all_right(two: Ranks) -> None:
    two.check(many_kinds)


# ── losses ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tokens(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    kept = target >= 0
    return (F.cross_entropy(output, target.clamp(min=0), reduction="none") * kept).sum(), kept.sum()


class OwnLoss(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.pow(2).mean(), "logits": x}


def losses(rank: int) -> None:
    y = labels(10)
    y[:4] = -1
    kinds: list[tuple[Any, Any]] = [
        (tokens, lambda output, target: torch.div(*tokens(output, target))),
        (nn.CrossEntropyLoss(ignore_index=-1), nn.CrossEntropyLoss(ignore_index=-1)),
        (nn.CrossEntropyLoss(ignore_index=-1, reduction="sum"), nn.CrossEntropyLoss(ignore_index=-1, reduction="sum")),
    ]
    for ours, plain in kinds:
        model = mlp()
        expected = plain_step(model, batch(10), y, plain, steps=2)
        with pipeline(model, ours) as pipe:
            for _ in range(2):
                result = pipe.step(batch(10), y)
            assert_plain(pipe, result, expected)
    model = nn.Sequential(mlp(), OwnLoss())
    expected = plain_step(model[0], batch(10), None, lambda output, _: output.pow(2).mean())
    with pipeline(model, None, stages=2) as pipe:
        result = pipe.step(batch(10))
        assert_same(result.loss, expected.loss)
        own = gradients(pipe.named_parameters())
        assert_same(own, {name: expected.gradients[name.removeprefix("0.")] for name in own})


def test_every_kind_of_loss_is_that_of_the_mini_batch_on_every_rank(two: Ranks) -> None:
    two.check(losses)


# ── edges ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Fan(nn.Module):
    """The output is nested, starts with a value without gradient, and is partly unused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        return {
            "ids": (10 * x).long(),
            "h": h,
            "none": None,
            "plain": (True, 3, 2.5, "name"),
            "more": [h * 2, x > 0, h.detach(), h.t().contiguous().t()],
            "unused": self.idle(x),
            "scalar": h.mean(),
            "nothing": h[:, :0],
            "half": h.bfloat16(),
        }


class Collect(nn.Module):
    def forward(self, parts: dict[str, Any]) -> Tensor:
        assert parts["none"] is None
        assert parts["plain"] == (True, 3, 2.5, "name")
        twice, mask, cut, strided = parts["more"]
        out: Tensor = parts["h"] * mask + twice * parts["ids"] + cut * strided + parts["scalar"]
        return out + parts["nothing"].sum() + parts["half"].float()


def nested_edges(rank: int, schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fan(), Collect(), nn.Linear(4, 4))
    # The mean inside the model is over a micro-batch: with one micro-batch it is the plain model's.
    expected = plain_step(model, batch(6), batch(6, seed=5), F.mse_loss)
    with pipeline(model, microbatches=1, schedule=schedule) as pipe:
        result = pipe.step(batch(6), batch(6, seed=5))
        assert_plain(pipe, result, expected)
        assert (rank == 0) == ("0.idle.weight" in dict(pipe.named_parameters()))
        assert rank or model[0].idle.weight.grad is None


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_anything_nested_crosses_edges_and_unused_outputs_keep_no_gradient(three: Ranks, schedule: str) -> None:
    three.check(nested_edges, schedule)


def without_parameters(rank: int, scaled: bool) -> None:
    """The stage in the middle has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    plain = copy.deepcopy(model)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with pipeline(model) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        assert len(list(pipe.parameters())) == (1 if rank == 1 else 2)
        assert len(list(pipe.named_parameters())) == (0 if rank == 1 else 2)
        scaler = ps.GradScaler(pipe) if scaled else None
        for _ in range(2):
            pipe.step(batch(), batch(seed=5))
            if scaler is not None:
                scaler.unscale_(optimizer)
            pipe.clip_grad_norm_(0.1)
            optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            optimizer.zero_grad()
            F.mse_loss(plain(batch()), batch(seed=5)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            expected.step()
            expected.zero_grad()
        assert_same(pipe.state_dict(full=True), plain.state_dict())
        optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("scaled", [False, True])
def test_a_rank_without_parameters_has_an_optimizer_like_all_others(three: Ranks, scaled: bool) -> None:
    three.check(without_parameters, scaled)


class AddOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.add_(1)


def in_place(rank: int) -> None:
    torch.manual_seed(0)
    linears = nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(linears[0], nn.Tanh()), nn.Sequential(AddOne(), linears[1]))
    F.mse_loss(linears[1](linears[0](batch()).tanh() + 1), batch(seed=5)).backward()
    expected = gradients(model)
    model.zero_grad()
    with pipeline(model) as pipe:
        pipe.step(batch(), batch(seed=5))
        own = gradients(pipe.named_parameters())
        assert_same(own, {name: expected[name] for name in own})


def test_a_stage_may_change_what_it_received_in_place(two: Ranks) -> None:
    two.check(in_place)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x[:, :2]


class ChangeOne(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat((parts[0], parts[1].add_(1)), 1)


def in_place_of_two(rank: int, dynamic: bool) -> None:
    """Received apart, they would not be one any more."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Twice()), nn.Sequential(ChangeOne(), nn.Linear(6, 4)))
    with pipeline(model, dynamic=dynamic) as pipe, pytest.raises(ps.PipelineError, match="another input is a view"):
        pipe.step(batch(), batch(seed=5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_stage_that_changes_one_of_two_views_says_so(two: Ranks, dynamic: bool) -> None:
    two.check(in_place_of_two, dynamic)


def frozen(rank: int, stage: int) -> int:
    """How many tensors this rank sends in a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[stage].requires_grad_(False)
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with sends() as sent, pipeline(model) as pipe:
        result = pipe.step(batch(), batch(seed=5))
        assert_plain(pipe, result, expected)
    return len(sent)


@pytest.mark.parametrize(("stage", "sent"), [(0, [4, 4, 4]), (1, [4, 8, 4]), (2, [4, 8, 4])])
def test_a_frozen_stage_gets_no_gradient_and_nothing_travels_for_nothing(
    three: Ranks, stage: int, sent: list[int]
) -> None:
    """Four micro-batches: the first rank sends 4 outputs, the second 4 and 4 gradients, the last 4 gradients."""
    assert three.check(frozen, stage) == sent


def thawed(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pipeline(model) as pipe:
        for first, last in [(False, True), (True, True), (True, False), (False, True)]:
            model[0].requires_grad_(first)
            model[1].requires_grad_(last)
            expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
            assert_plain(pipe, pipe.step(batch(), batch(seed=5)), expected)
            pipe.zero_grad()


def test_stages_may_be_frozen_and_thawed_between_steps(two: Ranks) -> None:
    two.check(thawed, timeout=20)


# ── what shape inference must leave alone ────────────────────────────────────────────────────────────────────────


def counted(rank: int) -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    )
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
        norm = model[0][1] if rank == 0 else model[1][0]
        assert int(norm.num_batches_tracked) == 4
        pipe.eval()
        with torch.no_grad():
            pipe(batch())
        assert int(norm.num_batches_tracked) == 4


def test_buffers_see_the_micro_batches_and_nothing_else(two: Ranks) -> None:
    two.check(counted)


def random_numbers(rank: int) -> None:
    """The first step of a kind works shapes out, the second knows them: both must draw the same numbers."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    )
    with pipeline(model) as pipe:
        drawn = []
        for _ in range(2):
            torch.manual_seed(rank)
            result = pipe.step(batch(), batch())
            drawn.append((float(result.loss), torch.get_rng_state()))
        assert drawn[0][0] == drawn[1][0]
        assert torch.equal(drawn[0][1], drawn[1][1])


def test_working_out_shapes_draws_no_random_numbers(two: Ranks) -> None:
    two.check(random_numbers)


class Remembers(nn.Module):
    """Makes a table at its first call, and keeps it as a plain attribute, as rotary embeddings and masks often do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(4.0)
        out: Tensor = self.linear(x) + self.table
        return out


def remembered(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Remembers(), Remembers())
    expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
    with pipeline(model) as pipe:
        assert_plain(pipe, pipe.step(batch(), batch(seed=5)), expected)
        assert type(model[rank].table) is Tensor


def test_what_a_module_remembers_is_real(two: Ranks) -> None:
    two.check(remembered, timeout=20)


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(x)
        return out


def python_state(rank: int) -> None:
    model = nn.Sequential(Hooked(), Hooked())
    seen: list[Any] = []
    for layer in model:
        layer.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
    assert model[rank].calls == 4
    assert seen == [Tensor] * 4


def test_python_state_and_hooks_see_the_micro_batches_and_nothing_else(two: Ranks) -> None:
    two.check(python_state)


# ── evaluation ───────────────────────────────────────────────────────────────────────────────────────────────────


def evaluated(rank: int) -> None:
    model = mlp()
    with pipeline(model) as pipe:
        for mode in (torch.no_grad, torch.inference_mode):
            for samples in (1, 5, 8, 33):
                with mode():
                    output = pipe(batch(samples) if rank == 0 else None)
                    if rank == 2:
                        assert_same(output, model(batch(samples)))
                    else:
                        assert output is None
        with pytest.raises(ps.PlanError, match="no_grad"):
            pipe(batch())
        expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
        assert_plain(pipe, pipe.step(batch(), batch(seed=5)), expected)


def test_evaluation_takes_any_size_and_the_last_rank_has_the_outputs(three: Ranks) -> None:
    three.check(evaluated)


def under_autocast(rank: int) -> None:
    model = mlp()
    plain = copy.deepcopy(model)
    for part, target in zip(batch().chunk(4), batch(seed=5).chunk(4), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.mse_loss(plain(part), target) / 4
        loss.backward()
    with pipeline(model) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            result = pipe.step(batch(), batch(seed=5))
        own = gradients(pipe.named_parameters())
        expected = gradients(plain)
        assert_same(own, {name: expected[name] for name in own}, rtol=0, atol=0)
        assert rank == 0 or result.outputs.dtype is torch.bfloat16


def test_autocast_reaches_every_rank(two: Ranks) -> None:
    two.check(under_autocast)


# ── state ────────────────────────────────────────────────────────────────────────────────────────────────────────


def normed() -> nn.Sequential:
    torch.manual_seed(3)
    parts = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)]
    return nn.Sequential(*parts)


def saved(rank: int, schedule: str) -> dict[str, Tensor]:
    model = normed()
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        pipe.step(batch(), batch(seed=5))
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
        whole = pipe.state_dict(full=True)
        part = pipe.state_dict()
        assert set(part) < set(whole)
        assert_same({name: whole[name] for name in part}, part, rtol=0, atol=0)
        return whole


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_the_full_state_has_the_plain_models_keys_on_every_rank(two: Ranks, schedule: str) -> None:
    first, second = two.check(saved, schedule)
    assert list(first) == list(normed().state_dict())
    assert_same(second, first, rtol=0, atol=0)


def test_it_loads_into_the_plain_model_and_into_any_number_of_stages(two: Ranks, four: Ranks) -> None:
    state = four.check(saved, "1f1b")[0]
    plain = normed()
    plain.load_state_dict(state)
    with torch.no_grad():
        expected = plain.eval()(batch())
    for stages in (1, 3):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
        with ps.Pipeline(ps.split(model, stages=stages)) as pipe:
            pipe.load_state_dict(state)
            with torch.no_grad():
                assert_same(pipe.eval()(batch()), expected)
    assert_same(two.check(loaded, state)[1], expected)


def loaded(rank: int, state: dict[str, Tensor]) -> Any:
    torch.manual_seed(77)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))
    with pipeline(model) as pipe:
        with pytest.raises(ps.PlanError, match=r"missing.*0\.0\.weight" if rank == 0 else r"missing.*2\.0\.weight"):
            pipe.load_state_dict({name: t for name, t in state.items() if "0.weight" not in name})
        with pytest.raises(ps.PlanError, match=r"unexpected \['nobody'\]"):
            pipe.load_state_dict({**state, "nobody": torch.ones(1)})
        pipe.load_state_dict(state)
        with torch.no_grad():
            return pipe.eval()(batch())


# ── micro-batches ────────────────────────────────────────────────────────────────────────────────────────────────


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        assert mask.shape == (1, 4)
        return x * mask


def by_size(rank: int) -> None:
    """Inputs that the last rank alone has, with a mask for all samples, in micro-batches of three at most."""
    torch.manual_seed(0)
    model, mask = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(1, 4)
    net = Net(model)
    expected = F.mse_loss(net(batch(10), mask), batch(10, seed=5))
    options: dict[str, Any] = {"mesh": ps.Mesh(), "microbatch_size": 3}
    with ps.Pipeline(ps.split(net, cuts=["layers.1"]), F.mse_loss, **options) as pipe:
        given = {"x": batch(10), "mask": ps.Broadcast(mask)} if rank else None
        result = pipe.step(given, batch(10, seed=5) if rank else None)
        assert_same(result.loss, expected.detach())
        assert result.microbatches == 4


class Net(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.masked, self.layers = Masked(), layers

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.layers[1](self.layers[0](self.masked(x, mask)))
        return out


def test_repeated_inputs_of_another_rank_and_micro_batches_by_size(two: Ranks) -> None:
    two.check(by_size)


def seeded(rank: int) -> None:
    with pytest.raises(ps.PlanError, match="with a seed, replicas need equally many micro-batches"):
        pipeline(mlp(), stages=1, mesh=ps.Mesh(data=2, pipe=1), microbatch_size=3, seed=7)


def test_replicas_that_draw_by_a_seed_have_a_number_of_micro_batches(two: Ranks) -> None:
    two.check(seeded)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "turned, with a dimension of one": lambda x: x[:, :, :1].permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3),
    "the batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "in order": lambda x: x * 1,
}


def strides(x: Tensor) -> list[int]:
    """Those that mean something."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


class Laid(nn.Module):
    """Lays its input out, and checks how its input is laid out."""

    def __init__(self, out: str, found: str | None = None) -> None:
        super().__init__()
        self.out, self.found, self.scale = out, found, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.found is not None:
            assert strides(x) == strides(LAYOUTS[self.found](torch.zeros(x.shape))), self.found
        return LAYOUTS[self.out](x * self.scale)


def layouts(rank: int, dynamic: bool) -> None:
    x = torch.randn(6, 3, 2, 4)
    for name in LAYOUTS:
        model = nn.Sequential(Laid(name), Laid("in order", name), Laid("in order"))
        plain = copy.deepcopy(model)
        options: dict[str, Any] = {"reduction": "sum", "microbatches": 3, "mesh": ps.Mesh(), "dynamic": dynamic}
        with ps.Pipeline(ps.split(model, balance=[1, 2]), lambda y: y.sum(), **options) as pipe:
            for part in (x, -x[:4]):
                pipe.step(part)
                plain(part).sum().backward()
            for name, parameter in pipe.named_parameters():
                assert_same(parameter.grad, plain.get_parameter(name).grad)


@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_arrive_as_they_were_laid_out(two: Ranks, dynamic: bool) -> None:
    two.check(layouts, dynamic)


def trained_loss(rank: int) -> None:
    with pytest.raises(ps.PlanError, match=r"loss_fn has a parameter that is trained \(weight\).*replicas"):
        pipeline(mlp(), loss_fn=nn.Bilinear(4, 4, 1), stages=1, mesh=ps.Mesh(data=2, pipe=1))


def test_replicas_do_not_train_their_loss(two: Ranks) -> None:
    two.check(trained_loss)


# ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────


def clipped(rank: int, norm_type: float, max_norm: float, nothing_on: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    if nothing_on >= 0:
        model[nothing_on].requires_grad_(False)
    plain = copy.deepcopy(model)
    F.mse_loss(plain(batch()), batch(seed=5)).backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    expected = gradients(plain)
    with pipeline(model) as pipe:
        pipe.step(batch(), batch(seed=5))
        before = gradients(pipe.named_parameters())
        assert_same(pipe.grad_norm(norm_type), norm)
        assert_same(gradients(pipe.named_parameters()), before)
        found = pipe.clip_grad_norm_(max_norm, norm_type)
        assert_same(found, norm)
        own = gradients(pipe.named_parameters())
        assert_same(own, {name: expected[name] for name in own})
    return float(found)


@pytest.mark.parametrize("nothing_on", [-1, 0, 1, 2], ids=["all", "not 0", "not 1", "not 2"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_is_torchs_over_all_ranks(three: Ranks, norm_type: float, nothing_on: int) -> None:
    found = three.check(clipped, norm_type, 0.05, nothing_on)
    assert found.count(found[0]) == 3


def not_finite(rank: int) -> None:
    model = mlp()
    with pipeline(model) as pipe:
        pipe.step(batch(), batch())
        if rank == 1:
            next(pipe.parameters()).grad.fill_(float("inf"))  # type: ignore[union-attr]
        before = gradients(pipe.named_parameters())
        with pytest.raises(RuntimeError, match="inf"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert_same(gradients(pipe.named_parameters()), before)
        pipe.step(batch(), batch())


def test_an_infinite_norm_on_one_rank_is_an_error_on_all_and_changes_nothing(two: Ranks) -> None:
    two.check(not_finite)


# ── ties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def tied_model() -> nn.Sequential:
    """One weight in the first, third and last layer, one bias in the second and the third."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[2].weight = model[3].weight = model[0].weight
    model[2].bias = model[1].bias
    return model


def tied(rank: int, schedule: str, accumulate: int, clip: bool) -> dict[str, Tensor]:
    model, plain = tied_model(), tied_model()
    theirs = torch.optim.Adam(plain.parameters(), lr=0.01)
    with pipeline(model, stages=4, schedule=schedule) as pipe:
        ours = torch.optim.Adam(pipe.parameters(), lr=0.01)
        for step in range(5):
            for part in range(accumulate):
                x, y = batch(7, seed=step + 10 * part), batch(7, seed=step + 10 * part + 50)
                F.mse_loss(plain(x), y).backward()
                pipe.step(x, y)
            if clip:
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                assert_same(pipe.clip_grad_norm_(0.1), norm)
            for optimizer in (theirs, ours):
                optimizer.step()
                optimizer.zero_grad()
        state = pipe.state_dict(full=True)
        assert_same(state, plain.state_dict(), atol=1e-5)
        own: dict[str, Tensor] = pipe.state_dict()
        return own


@pytest.mark.parametrize(("accumulate", "clip"), [(1, False), (1, True), (3, False)], ids=["", "clip", "accumulate"])
def test_a_tied_parameter_stays_one(four: Ranks, accumulate: int, clip: bool) -> None:
    parts = four.check(tied, "1f1b", accumulate, clip)
    weights = [parts[0]["0.weight"], parts[2]["2.weight"], parts[3]["3.weight"]]
    assert all(torch.equal(weight, weights[0]) for weight in weights)
    assert torch.equal(parts[1]["1.bias"], parts[2]["2.bias"])


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_a_tied_parameter_with_two_of_its_places_on_one_rank(two: Ranks, schedule: str) -> None:
    two.check(tied, schedule, 2, True)


def tied_and_counted(rank: int) -> None:
    """A loss that counts as it goes rescales the new gradients at the end of a step, the sum of all copies included."""
    model, plain = tied_model(), tied_model()
    with pipeline(model, tokens, stages=4) as pipe:
        for step in range(3):
            x, y = batch(10, seed=step), labels(10, seed=step)
            y[: 2 * step] = -1
            torch.div(*tokens(plain(x), y)).backward()
            pipe.step(x, y)
        expected = dict(plain.named_parameters(remove_duplicate=False))
        own = gradients(pipe.named_parameters())
        assert_same(own, {name: expected[name].grad for name in own})


def test_a_tied_parameter_under_a_counted_loss_that_accumulates(four: Ranks) -> None:
    four.check(tied_and_counted)


def tied_apart(rank: int) -> None:
    """Every process has built the model with other random numbers."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pipeline(model) as pipe:
        whole = pipe.state_dict(full=True)
        assert torch.equal(whole["0.weight"], whole["1.weight"])


def test_copies_of_a_tied_parameter_start_out_equal(two: Ranks) -> None:
    two.check(tied_apart)


# ── several pipelines ────────────────────────────────────────────────────────────────────────────────────────────


def one_after_the_other(rank: int) -> None:
    for seed, close in enumerate([True, False, True, False]):
        model = mlp(seed=seed)
        expected = plain_step(model, batch(), batch(seed=5), F.mse_loss)
        pipe = pipeline(model)
        assert_plain(pipe, pipe.step(batch(), batch(seed=5)), expected)
        if close:
            pipe.close()
            pipe.close()
            with pytest.raises(ps.PipelineError, match="closed"):
                pipe.step(batch(), batch())


def test_pipelines_may_follow_each_other(two: Ranks) -> None:
    two.check(one_after_the_other)


def side_by_side(rank: int) -> None:
    models = [mlp(seed=0), mlp(seed=1)]
    plain = [plain_step(model, batch(), batch(seed=5), F.mse_loss) for model in models]
    with pipeline(models[0]) as one, pipeline(models[1], schedule="zb_h1") as other:
        for _ in range(2):
            for pipe, expected in zip((one, other), plain, strict=True):
                assert_plain(pipe, pipe.step(batch(), batch(seed=5)), expected)
                pipe.zero_grad()


def test_two_pipelines_may_be_alive_at_once(two: Ranks) -> None:
    two.check(side_by_side)
