"""Outputs: which of them are kept, where they arrive, and many mini-batches in a row."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from tests.support.models import batch, mlp
from tests.support.ranks import Ranks

M = 4


def pipeline(model: nn.Module, **options: Any) -> ps.Pipeline:
    options = {"microbatches": M, **({} if "mesh" in options else {"devices": "cpu"}), **options}
    return ps.Pipeline(ps.split(model, stages=2), F.mse_loss, **options)


def expected(model: nn.Module, outputs: Any, x: Tensor) -> Any:
    parts = [part.detach() for part in model(x).split(len(x) // M)]
    return {
        "all": torch.cat(parts),
        "final": parts[-1],
        "sum": torch.stack(parts).sum(0),
        "every:2": torch.cat(parts[1::2]),
        "every:3": parts[2],
        "every:9": None,
        None: None,
        running_max: torch.stack(parts).amax(0),
    }[outputs]


def running_max(so_far: Any, output: Tensor) -> Tensor:
    return output if so_far is None else torch.maximum(so_far, output)


KINDS = ["all", "final", "sum", "every:2", "every:3", "every:9", None, running_max]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("outputs", KINDS, ids=lambda kind: getattr(kind, "__name__", str(kind)))
def test_of_a_step_and_of_an_evaluation(outputs: Any, schedule: str) -> None:
    model, x = mlp(), batch(8)
    wanted = expected(model, outputs, x)
    with pipeline(model, outputs=outputs, schedule=schedule) as pipe:
        torch.testing.assert_close(pipe.broadcast(pipe.step(x, x).outputs), wanted)
        torch.testing.assert_close(pipe.evaluate(x, x).outputs, wanted)
        torch.testing.assert_close(pipe.evaluate(x).outputs, wanted)
        torch.testing.assert_close(pipe.evaluate(x, outputs="all").outputs, model(x).detach())


def test_an_evaluation_has_the_loss_and_no_gradients() -> None:
    model, x, y = mlp(), batch(10), batch(10, seed=3)
    with pipeline(model) as pipe:
        result = pipe.evaluate(x, y)
        torch.testing.assert_close(result.loss, F.mse_loss(model(x), y).detach())
        assert pipe.evaluate(x).loss is None
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert (result.samples, result.microbatches) == (10, 4)


def test_a_sum_needs_outputs_of_one_shape() -> None:
    with pipeline(mlp(), outputs="sum") as pipe, pytest.raises(ps.PlanError, match=r"\(3, 4\).*\(2, 4\)"):
        pipe.step(batch(9), batch(9))


def test_outputs_that_do_not_have_the_samples_first_are_not_joined() -> None:
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t()

    class Tokens(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.repeat_interleave(3, 0)

    with ps.Pipeline(ps.split(nn.Sequential(*mlp(), Transposed()), stages=2), microbatches=3, devices="cpu") as pipe:
        with pytest.raises(ps.PlanError, match=r"\[3, 3, 3\] samples have \[4, 4, 4\] entries.*samples first"):
            pipe.evaluate(batch(9))
        assert pipe.evaluate(batch(9), outputs="final").outputs.shape == (4, 3)
    model = nn.Sequential(*mlp(), Tokens())
    with pipeline(model) as pipe:
        torch.testing.assert_close(pipe.evaluate(batch(9)).outputs, model(batch(9)).detach())


class OwnLoss(nn.Module):
    """Computes its loss itself, and gives it alone or among other things."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.first, self.second, self.alone = nn.Linear(4, 4), nn.Linear(4, 4), alone

    def forward(self, x: Tensor, y: Tensor) -> Any:
        out = self.second(torch.tanh(self.first(x)))
        loss = F.mse_loss(out, y)
        return loss if self.alone else {"loss": loss, "out": out}


@pytest.mark.parametrize("alone", [True, False])
def test_the_loss_among_the_outputs_is_that_of_the_mini_batch(alone: bool) -> None:
    model, x, y = OwnLoss(alone), batch(10), batch(10, seed=3)
    expected = model(x, y)
    with ps.Pipeline(ps.split(model, stages=2), microbatches=4, devices="cpu") as pipe:
        result = pipe.step((x, y))
        torch.testing.assert_close(result.outputs, expected)
        torch.testing.assert_close(result.loss, expected if alone else expected["loss"])
        torch.testing.assert_close(pipe.evaluate((x, y)).outputs, expected)
        torch.testing.assert_close(next(iter(pipe.stream([(x, y)]))), expected)
        pipe.zero_grad()
        found = pipe(x, y)
        (found if alone else found["loss"]).backward()
        (expected if alone else expected["loss"]).backward()


def broadcast_outputs(rank: int, outputs: Any) -> None:
    model, x = mlp(), batch(8)
    wanted = expected(model, outputs, x)
    with pipeline(model, outputs=outputs, mesh=ps.Mesh()) as pipe:
        torch.testing.assert_close(pipe.broadcast(pipe.step(x, x).outputs), wanted)
        result = pipe.evaluate(x, x)
        torch.testing.assert_close(pipe.broadcast(result.outputs), wanted)
        torch.testing.assert_close(result.loss, F.mse_loss(model(x), x).detach())
        with torch.no_grad():
            torch.testing.assert_close(pipe.broadcast(pipe(x)), model(x))
        assert pipe.evaluate(x).loss is None


@pytest.mark.parametrize("outputs", ["all", "sum"])
def test_broadcast_gives_outputs_to_all_ranks(two: Ranks, outputs: str) -> None:
    two.check(broadcast_outputs, outputs)


def on_the_last(rank: int) -> bool:
    model, x = mlp(), batch(8)
    with pipeline(model, mesh=ps.Mesh()) as pipe:
        found = pipe.evaluate(x, x).outputs
        streamed = list(pipe.stream([x, x[:3]]))
        assert len(streamed) == 2
        if found is not None:
            torch.testing.assert_close(found, model(x).detach())
            torch.testing.assert_close(streamed, [model(x).detach(), model(x[:3]).detach()])
        return found is not None


def test_else_on_the_last_rank(two: Ranks) -> None:
    assert two.run(on_the_last) == [False, True]


# ── many mini-batches in a row ───────────────────────────────────────────────────────────────────────────────────


def test_a_stream_gives_the_outputs_of_each_in_order() -> None:
    model = mlp()
    batches = [batch(samples, seed=samples) for samples in (8, 3, 1, 8, 10, 7, 8)]
    with pipeline(model) as pipe:
        for _ in range(2):
            outputs = list(pipe.stream(batches))
            torch.testing.assert_close(outputs, [model(x).detach() for x in batches])
        assert torch.is_grad_enabled()
        pipe.step(batch(8), batch(8))


def test_the_pipeline_is_not_drained_between_mini_batches() -> None:
    """Stage 1 waits with the first mini-batch until stage 0 has begun with the second: it would wait for ever."""
    second = threading.Event()

    class Early(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > M:
                second.set()
            return x

    class Late(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert second.wait(30)
            return x

    with pipeline(nn.Sequential(Early(), Late())) as pipe:
        outputs = list(pipe.stream([batch(8), batch(8, seed=2)]))
    torch.testing.assert_close(outputs, [batch(8), batch(8, seed=2)])


def test_the_consumer_keeps_its_grad_mode_and_cannot_step_meanwhile() -> None:
    with pipeline(mlp()) as pipe:
        stream = pipe.stream(batch(8) for _ in range(5))
        next(stream)
        assert torch.is_grad_enabled()
        with pytest.raises(ps.PipelineError, match=r"stream.*under way"):
            pipe.step(batch(), batch())
        stream.close()
        pipe.step(batch(), batch())


def test_a_failure_in_a_stream_is_raised_and_the_pipeline_goes_on() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("not a number")
            return x

    with pipeline(nn.Sequential(*mlp(), Fails())) as pipe:
        with pytest.raises(ValueError, match="not a number"):
            list(pipe.stream([batch(8), batch(8) * torch.nan, batch(8), batch(8)]))
        torch.testing.assert_close(next(iter(pipe.stream([batch(8)]))), pipe.evaluate(batch(8)).outputs)


def test_sharded_is_one_micro_batch_at_a_time() -> None:
    busy: list[int] = []

    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            busy.append(1)
            assert len(busy) == 1
            busy.pop()
            return x

    model = nn.Sequential(*(part for layer in mlp() for part in (Alone(), layer)))
    with pipeline(model, schedule="sharded") as pipe:
        assert pipe.schedule.name == "sharded"
        result = pipe.step(batch(8), batch(8))
    with pipeline(model) as pipe:
        pipe.zero_grad()
        torch.testing.assert_close(pipe.evaluate(batch(8), batch(8)).loss, result.loss)
