"""Random numbers: with a seed they depend only on the seed, the step, the micro-batch and the layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.ranks import Ranks

WIDTH = 8


class Noisy(nn.Module):
    """Draws itself, before and after a part that draws too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.2, self.training)
        x = self.inner(x)
        return x + 0.1 * torch.rand_like(x) if self.training else x


def network() -> nn.Sequential:
    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.2, batch_first=True)
    again = nn.Dropout(0.4)
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(ends[0], again, Noisy(), nn.Dropout(0.5), attention, again, Noisy(), ends[1])


def data(samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, WIDTH, generator=generator), torch.randn(samples, 3, WIDTH, generator=generator)


def run(stages: int, steps: int = 2, **options: Any) -> dict[str, Any]:
    """Losses, outputs and gradients of some steps; under a mesh, of this rank's stages."""
    options = {"schedule": "gpipe", "seed": 7, "microbatches": 3, **options}
    x, y = data()
    found: dict[str, Any] = {}
    with ps.Pipeline(ps.split(network(), stages=stages, balance="uniform"), F.mse_loss, **options) as pipe:
        for step in range(steps):
            result = pipe.step(x, y)
            found[f"loss {step}"] = result.loss
            if result.outputs is not None:
                found[f"outputs {step}"] = result.outputs
            found.update({f"{name} {step}": p.grad for name, p in pipe.named_parameters()})
            pipe.zero_grad()
    return found


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=lambda text, name=name: f"{name}: {text}")


WAYS = [
    (stages, schedule, recompute)
    for stages, schedule in [(1, "gpipe"), (2, "1f1b"), (4, "gpipe"), (4, "zbv"), (8, "interleaved"), (4, "zb_h1")]
    for recompute in ("never", "except_last", "always")
]


@pytest.mark.parametrize(("stages", "schedule", "recompute"), WAYS)
def test_a_seed_gives_the_same_masks_however_the_model_is_run(stages: int, schedule: str, recompute: str) -> None:
    assert_same(run(stages, schedule=schedule, recompute=recompute, devices="cpu"), run(1, devices="cpu"))


def over_processes(rank: int, stages: int, schedule: str, recompute: str) -> None:
    expected = run(1, devices="cpu")
    assert_same(run(stages, schedule=schedule, recompute=recompute, mesh=ps.Mesh()), expected)


@pytest.mark.parametrize(("stages", "schedule", "recompute"), [(2, "1f1b", "always"), (4, "zbv", "except_last")])
def test_a_seed_gives_the_same_masks_over_processes(two: Ranks, stages: int, schedule: str, recompute: str) -> None:
    two.check(over_processes, stages, schedule, recompute)


# A run that was resumed drew the masks of its first steps once more: the number of the step was kept nowhere.


def resumed(mesh: ps.Mesh | None, train: Callable[[ps.Pipeline], Tensor]) -> None:
    """Four steps at once, and two of them in another pipeline, that takes over after the second."""
    options: dict[str, Any] = {"microbatches": 3, "seed": 7, "mesh": mesh, "devices": None if mesh else "cpu"}
    plan = ps.split(network(), stages=2, balance="uniform")
    with ps.Pipeline(plan, F.mse_loss, **options) as pipe:
        pipe.evaluate(*data())  # draws by itself
        losses = [train(pipe) for _ in range(2)]
        state, steps = copy.deepcopy(pipe.state_dict(full=True)), pipe.steps
        losses += [train(pipe) for _ in range(2)]
    assert steps == 2
    with ps.Pipeline(ps.split(network(), stages=2, balance="uniform"), F.mse_loss, **options) as pipe:
        pipe.load_state_dict(state)
        again = train(pipe)
        assert again not in losses[2:], "the masks of the first step"
        pipe.load_state_dict(state)
        pipe.steps = steps
        assert [train(pipe) for _ in range(2)] == losses[2:], "to the last bit"
        assert pipe.steps == 4


def by_step(pipe: ps.Pipeline) -> Tensor:
    loss: Tensor = pipe.step(*data()).loss
    return updated(pipe, loss)


def by_call(pipe: ps.Pipeline) -> Tensor:
    """The caller computes the loss."""
    x, y = data()
    outputs = pipe.forward(x)
    loss = torch.zeros(()) if outputs is None else F.mse_loss(outputs, y)
    if outputs is not None:
        loss.backward()
    return updated(pipe, loss.detach())


def updated(pipe: ps.Pipeline, loss: Tensor) -> Tensor:
    torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    pipe.zero_grad()
    return pipe.broadcast(loss)  # type: ignore[no-any-return]


def resumed_ranks(rank: int, train: Callable[[ps.Pipeline], Tensor]) -> None:
    resumed(ps.Mesh(), train)


@pytest.mark.parametrize("train", [by_step, by_call])
def test_a_resumed_run_draws_the_masks_of_one_that_went_on(two: Ranks, train: Callable[[ps.Pipeline], Tensor]) -> None:
    resumed(None, train)
    two.check(resumed_ranks, train)


@pytest.mark.parametrize("steps", [-1, 1.5, "2"])
def test_the_number_of_steps_is_a_whole_number(steps: Any) -> None:
    pipe = ps.Pipeline(ps.split(network(), stages=2), F.mse_loss, seed=1, devices="cpu")
    with pipe, pytest.raises(ps.PlanError, match="at least 0"):
        pipe.steps = steps


class Turned(nn.Module):
    """Gives its values in another order in memory, as attention, recurrent layers and convolutions may."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)


def turned(rank: int, dynamic: bool) -> None:
    """A mask is drawn in the order that values have in memory."""
    x, y = data(8)
    losses = []
    for balance, how in (([2, 1], {"mesh": ps.Mesh(), "dynamic": dynamic}), ([3], {"devices": "cpu"})):
        torch.manual_seed(0)
        plan = ps.split(nn.Sequential(nn.Linear(WIDTH, WIDTH), Turned(), nn.Dropout(0.5)), balance=balance)
        with ps.Pipeline(plan, F.mse_loss, microbatches=3, seed=7, **how) as pipe:  # type: ignore[arg-type]
            losses.append(pipe.step(x, y).loss)
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_seed_gives_the_same_masks_for_other_memory_layouts(two: Ranks, dynamic: bool) -> None:
    two.check(turned, dynamic)


def test_micro_batches_steps_layers_and_seeds_draw_different_numbers() -> None:
    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    x = torch.zeros(4, 1000)
    seen: list[Tensor] = []
    for seed in (1, 2):
        model = nn.Sequential(nn.Linear(1, 1), Draw(), Draw())
        model[0] = nn.Identity()
        with ps.Pipeline(ps.split(model, stages=2), devices="cpu", microbatches=2, seed=seed) as pipe, torch.no_grad():
            for _ in range(2):
                both = pipe(x)
                seen.extend(both)
    assert len({tuple(row.tolist()) for row in seen}) == len(seen)
    assert all((row.mean() - 1).abs() < 0.1 for row in seen), "two independent draws"


def test_a_seeded_pipeline_leaves_the_plain_generator_alone() -> None:
    torch.manual_seed(3)
    with ps.Pipeline(ps.split(network(), stages=4), F.mse_loss, microbatches=3, seed=1, devices="cpu") as pipe:
        before = torch.get_rng_state()
        pipe.step(*data())
        with torch.no_grad():
            pipe(data()[0])
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_without_a_seed_one_stage_draws_as_the_plain_loop_does(recompute: str) -> None:
    x, y = data()
    plain = network()
    torch.manual_seed(5)
    outputs = [plain(part) for part in x.split(2)]
    expected = torch.stack([F.mse_loss(a, b) for a, b in zip(outputs, y.split(2), strict=True)]).mean()
    expected.backward()
    after = torch.get_rng_state()
    with ps.Pipeline(
        ps.split(network(), stages=1), F.mse_loss, microbatches=3, devices="cpu", recompute=recompute
    ) as pipe:
        torch.manual_seed(5)
        result = pipe.step(x, y)
        assert torch.equal(torch.get_rng_state(), after), "a recomputed forward does not count"
        torch.testing.assert_close(result.outputs, torch.cat(outputs))
        grads = dict(plain.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name].grad)
        torch.manual_seed(5)  # and once more: now it is known which layers draw
        torch.testing.assert_close(pipe.step(x, y).outputs, torch.cat(outputs))
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * grads[name].grad)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "interleaved"])
def test_a_recomputed_mask_is_the_same_mask_whatever_other_threads_draw(schedule: str) -> None:
    """The gradient of a scale in front of dropouts tells which values the backward's masks kept."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x * self.scale, 0.5)

    x = torch.rand(40, 50, dtype=torch.float64)
    model = nn.Sequential(*(Scaled() for _ in range(4))).double()
    plan = ps.split(model, stages=4)
    loss_fn = torch.nn.L1Loss(reduction="sum")
    with ps.Pipeline(plan, loss_fn, microbatches=8, schedule=schedule, recompute="always", devices="cpu") as pipe:
        for _ in range(5):
            result = pipe.step(x, torch.full_like(x, -1.0))  # every value counts with slope one
            for parameter in pipe.parameters():
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.sum(), result.outputs.sum())
            pipe.zero_grad()


def test_hooks_are_removed() -> None:
    model = network()
    pipe = ps.Pipeline(ps.split(model, stages=2), F.mse_loss, microbatches=3, seed=1, devices="cpu")
    pipe.step(*data())
    assert any(module._forward_pre_hooks for module in model.modules())
    pipe.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("seed", ["7", 1.5, True])
def test_a_seed_must_be_an_integer(seed: Any) -> None:
    with pytest.raises(ps.PlanError, match="seed must be a whole number"):
        ps.Pipeline(ps.split(network(), stages=2), F.mse_loss, seed=seed, devices="cpu")
