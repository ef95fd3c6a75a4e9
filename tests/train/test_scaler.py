"""``GradScaler``: torch's scaler, number by number, with ranks that agree before any of them steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from penstock.errors import PipelineError, PlanError
from penstock.train.scaler import GradScaler


class Alone:
    """A pipeline of one rank, as far as a scaler can see."""

    def __init__(self) -> None:
        self.loss_scale = 1.0

    def max_over_ranks(self, number: float) -> float:
        return number


class Member(Alone):
    """One of several ranks, each a thread."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def max_over_ranks(self, number: float) -> float:
        world = self.world
        world.numbers.append(number)
        world.barrier.wait(10)
        largest = max(world.numbers)
        if world.barrier.wait(10) == 0:
            world.numbers.clear()
        world.barrier.wait(10)
        return largest


class World:
    """Ranks as threads. A rank that waits for the others in vain fails after ten seconds."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.numbers: list[float] = []

    def run(self, work: Callable[[int, Member], Any]) -> list[Any]:
        results: list[Any] = [None] * self.barrier.parties

        def live(rank: int) -> None:
            try:
                results[rank] = work(rank, Member(self))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def parameter(grad: Tensor | float = 0.0) -> nn.Parameter:
    """A parameter with a gradient, as a step would leave it."""
    value = torch.as_tensor(grad)
    made = nn.Parameter(torch.ones_like(value.to_dense()))
    made.grad = value.clone()
    return made


def sgd(*parameters: nn.Parameter) -> SGD:
    return SGD(parameters, lr=0.5)


# ── the scale ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("growth", "backoff", "init"), [(2.0, 0.5, 2.0**16), (1.7, 0.3, 1000.1), (2.0, 0.5, 1e38)])
def test_scale_and_parameters_are_those_of_torchs_scaler(growth: float, backoff: float, init: float) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(3, 3)
    theirs = copy.deepcopy(ours)
    options: dict[str, Any] = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": 3}
    pipe = Alone()
    scaler = GradScaler(pipe, init_scale=init, **options)
    plain = torch.amp.GradScaler("cpu", init_scale=init, **options)
    optimizer, plain_optimizer = SGD(ours.parameters(), lr=0.1), SGD(theirs.parameters(), lr=0.1)
    for _ in range(60):
        x = torch.randn(4, 3) * (float("inf") if torch.rand(()) < 0.2 else 1.0)
        scaler.scale(ours(x).square().mean()).backward()
        plain.scale(theirs(x).square().mean()).backward()
        scaler.step(optimizer)
        plain.step(plain_optimizer)
        scaler.update()
        plain.update()
        assert scaler.get_scale() == plain.get_scale() == pipe.loss_scale
        assert scaler.state_dict() == plain.state_dict()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()


def test_the_pipeline_is_told_the_scale_at_once_and_after_each_change() -> None:
    pipe = Alone()
    scaler = GradScaler(pipe, init_scale=8.0, growth_interval=1)
    assert pipe.loss_scale == 8.0
    scaler.step(sgd(parameter(float("nan"))))
    assert pipe.loss_scale == 8.0, "the scale changes in update() alone"
    scaler.update()
    assert pipe.loss_scale == 4.0
    scaler.step(sgd(parameter(1.0)))
    scaler.update()
    assert pipe.loss_scale == 8.0
    scaler.update(32.0)
    assert pipe.loss_scale == scaler.get_scale() == 32.0
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    assert pipe.loss_scale == 2.0
    assert GradScaler(pipe, enabled=False).get_scale() == pipe.loss_scale == 1.0


def test_state_goes_to_torchs_scaler_and_back() -> None:
    scaler = GradScaler(Alone(), init_scale=4.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
    scaler.step(sgd(parameter(1.0)))
    scaler.update()
    plain = torch.amp.GradScaler("cpu")
    plain.load_state_dict(scaler.state_dict())
    assert plain.state_dict() == scaler.state_dict()
    again = GradScaler(Alone())
    again.load_state_dict(plain.state_dict())
    assert again.state_dict() == scaler.state_dict()
    assert again.state_dict()["_growth_tracker"] == 1


def test_gradients_that_are_never_finite_are_not_blamed_on_the_scale() -> None:
    scaler = GradScaler(Alone(), init_scale=2.0**-125)
    scaler.step(sgd(parameter(float("nan"))))
    scaler.update()
    scaler.step(sgd(parameter(float("nan"))))
    with pytest.raises(PipelineError, match="the model and its data"):
        scaler.update()


def test_losses_are_scaled_as_torch_scales_them() -> None:
    scaler, plain = GradScaler(Alone(), init_scale=2.0**17), torch.amp.GradScaler("cpu", init_scale=2.0**17)
    half = torch.tensor(3.0, dtype=torch.float16)
    assert scaler.scale(half).dtype == plain.scale(half).dtype == torch.float32
    assert scaler.scale(half) == 3 * 2.0**17


# ── gradients ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128])
def test_gradients_of_every_type_are_unscaled_and_looked_at(dtype: torch.dtype) -> None:
    grad = torch.arange(6).reshape(2, 3).to(dtype).t()
    held = parameter(grad)
    GradScaler(Alone(), init_scale=4.0).unscale_(sgd(held))
    assert held.grad is not None
    assert torch.equal(held.grad, grad / 4)
    grad = grad.clone()
    grad[1, 1] = float("nan")
    assert stays(parameter(grad))


def stays(held: nn.Parameter) -> bool:
    """Whether a step leaves the parameter alone."""
    before = held.detach().clone()
    scaler = GradScaler(Alone())
    scaler.step(sgd(held))
    return torch.equal(held, before)


def test_conjugated_gradients() -> None:
    grad = torch.tensor([1 + 2j, 3 - 4j])
    held = parameter(grad)
    held.grad = grad.conj()
    GradScaler(Alone(), init_scale=2.0).unscale_(sgd(held))
    assert held.grad is not None
    assert torch.equal(held.grad, torch.tensor([0.5 - 1j, 1.5 + 2j]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_sparse_gradients_with_a_row_twice(dtype: torch.dtype) -> None:
    values = torch.tensor([[2.0], [4.0]], dtype=dtype)
    grad = torch.sparse_coo_tensor([[1, 1]], values, (3, 1), check_invariants=True)
    held = parameter(grad)
    GradScaler(Alone(), init_scale=2.0).unscale_(sgd(held))
    assert held.grad is not None
    assert held.grad.is_sparse
    assert torch.equal(held.grad.to_dense(), torch.tensor([[0.0], [3.0], [0.0]], dtype=dtype))
    assert stays(parameter(grad * float("inf")))


def test_parameters_without_gradients_and_without_elements() -> None:
    absent, empty, there = nn.Parameter(torch.ones(2)), parameter(torch.ones(0)), parameter(4.0)
    scaler = GradScaler(Alone(), init_scale=4.0)
    scaler.step(sgd(absent, empty, there))
    assert absent.grad is None
    assert there == 0.5


def test_inf_in_one_parameter_of_many_types_holds_back_all() -> None:
    held = [parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64, torch.bfloat16)]
    assert held[1].grad is not None
    held[1].grad[0] = float("-inf")
    scaler = GradScaler(Alone())
    scaler.step(sgd(*held))
    assert all(torch.equal(p, torch.ones_like(p)) for p in held)


def test_gradients_in_float16_are_refused_and_left_alone() -> None:
    held, half = parameter(2.0), parameter(torch.ones(2, dtype=torch.float16))
    scaler = GradScaler(Alone())
    with pytest.raises(PlanError, match="keep the parameters in float32"):
        scaler.step(sgd(held, half))
    assert held.grad == 2.0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gradients_on_several_devices() -> None:
    held = [parameter(torch.ones(2)), parameter(torch.ones(2, device="cuda"))]
    assert held[1].grad is not None
    held[1].grad[0] = float("inf")
    GradScaler(Alone()).step(sgd(*held))
    assert all(torch.equal(p, torch.ones_like(p)) for p in held)


# ── the order of calls ───────────────────────────────────────────────────────────────────────────────────────


def test_unscaled_gradients_are_not_unscaled_again_by_step() -> None:
    held = parameter(4.0)
    scaler, optimizer = GradScaler(Alone(), init_scale=4.0), sgd(held)
    scaler.unscale_(optimizer)
    assert held.grad == 1.0
    scaler.step(optimizer)
    assert held.grad == 1.0
    assert held == 0.5


def test_calls_out_of_order() -> None:
    scaler, optimizer = GradScaler(Alone()), sgd(parameter(1.0))
    with pytest.raises(PipelineError, match=r"update\(\) was called before step"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(PipelineError, match=r"unscale_\(\) was called twice"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(PipelineError, match=r"step\(\) was called twice"):
        scaler.step(optimizer)
    with pytest.raises(PipelineError, match=r"after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    scaler.step(optimizer)  # a new iteration
    with pytest.raises(PipelineError, match="no closure"):
        scaler.step(sgd(parameter(1.0)), lambda: 0.0)


def test_unscaling_alone_is_enough_for_an_update() -> None:
    scaler = GradScaler(Alone(), init_scale=8.0)
    scaler.unscale_(sgd(parameter(float("inf"))))
    assert scaler.update() is True
    assert scaler.get_scale() == 4.0
    scaler.unscale_(sgd(parameter(1.0)))
    assert scaler.update() is False


def test_the_scale_does_not_fall_below_the_least() -> None:
    scaler = GradScaler(Alone(), init_scale=8.0, min_scale=3.0)
    for expected in (4.0, 3.0, 3.0):
        scaler.unscale_(sgd(parameter(float("inf"))))
        assert scaler.update() is True
        assert scaler.get_scale() == expected


def test_optimizers_are_held_back_one_by_one_and_the_scale_for_all() -> None:
    bad, good = parameter(float("inf")), parameter(8.0)
    scaler = GradScaler(Alone(), init_scale=8.0)
    scaler.step(sgd(bad))
    scaler.step(sgd(good))
    scaler.update()
    assert bad == 1.0
    assert good == 0.5
    assert scaler.get_scale() == 4.0


def test_step_gives_back_what_the_optimizer_does() -> None:
    class Counts(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            return 7

    assert GradScaler(Alone()).step(Counts([parameter(1.0)], lr=0.1)) == 7
    assert GradScaler(Alone()).step(Counts([parameter(float("nan"))], lr=0.1)) is None


def test_switched_off_everything_passes_through() -> None:
    held, loss = parameter(float("inf")), torch.tensor(2.0)
    scaler, optimizer = GradScaler(Alone(), enabled=False), sgd(held)
    assert scaler.scale(loss) is loss
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert held == float("-inf")
    scaler.update()
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    assert not scaler.is_enabled()


def test_a_scaler_that_was_replaced_says_so() -> None:
    pipe = Alone()
    first = GradScaler(pipe, init_scale=8.0)
    GradScaler(pipe, init_scale=4.0)
    with pytest.raises(PipelineError, match="scaled by 4, this scaler's scale is 8"):
        first.unscale_(sgd(parameter(1.0)))


def test_numbers_that_cannot_be() -> None:
    for options, complaint in [
        ({"init_scale": 0.0}, "positive number"),
        ({"init_scale": 1e39}, "positive number"),
        ({"min_scale": 0.0}, "min_scale must be a positive number"),
        ({"init_scale": 2.0, "min_scale": 4.0}, "no more than the scale, 2; got 4"),
        ({"growth_factor": 1.0}, "growth_factor must be more than 1"),
        ({"backoff_factor": 1.0}, "backoff_factor between 0 and 1"),
        ({"growth_interval": 0}, "growth_interval 1 at least, got 2, 0.5 and 0"),
    ]:
        with pytest.raises(PlanError, match=complaint):
            GradScaler(Alone(), **options)


def test_a_state_of_a_scaler_that_was_switched_off() -> None:
    with pytest.raises(PlanError, match="disabled GradScaler saves nothing"):
        GradScaler(Alone()).load_state_dict({})


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("unscaled", [False, True])
def test_inf_on_one_rank_holds_back_all_and_the_scale_stays_one_number(unscaled: bool) -> None:
    def work(rank: int, pipe: Member) -> tuple[float, float]:
        held = parameter(8.0)
        scaler, optimizer = GradScaler(pipe, init_scale=8.0, growth_interval=1), sgd(held)
        for iteration in range(3):
            held.grad = torch.tensor(float("nan") if (iteration, rank) == (1, 2) else 8.0)
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return held.item(), scaler.get_scale()

    # 8 grows to 16, is held back to 8, grows to 16; steps of 8/8 and 8/8
    assert World(3).run(work) == [(0.0, 16.0)] * 3


def test_ranks_without_parameters_take_part() -> None:
    """Two optimizers: one of ranks 0 and 1, one of rank 1; rank 2 has none. The second finds an inf."""

    def work(rank: int, pipe: Member) -> tuple[list[float], float]:
        held = [parameter(8.0), parameter(float("inf"))]
        first: Optimizer | None = sgd(held[0]) if rank < 2 else None
        second: Optimizer | None = sgd(held[1]) if rank == 1 else None
        scaler = GradScaler(pipe, init_scale=8.0)
        scaler.unscale_(first)
        scaler.step(second)
        scaler.step(first)
        scaler.update()
        return [p.item() for p in held], scaler.get_scale()

    assert World(3).run(work) == [([0.5, 1.0], 4.0), ([0.5, 1.0], 4.0), ([1.0, 1.0], 4.0)]


def test_what_was_unscaled_on_one_rank_alone_counts_in_the_update() -> None:
    def work(rank: int, pipe: Member) -> float:
        scaler = GradScaler(pipe, init_scale=8.0)
        scaler.unscale_(sgd(parameter(float("inf"))) if rank == 0 else None)
        scaler.update()
        return scaler.get_scale()

    assert World(2).run(work) == [4.0, 4.0]


def test_errors_reach_all_ranks() -> None:
    def half(rank: int, pipe: Member) -> None:
        GradScaler(pipe).step(sgd(parameter(torch.ones(2, dtype=torch.float16 if rank else torch.float32))))

    def sound(rank: int, pipe: Member) -> None:
        GradScaler(pipe, growth_factor=2.0 - rank)

    def same(rank: int, pipe: Member) -> None:
        GradScaler(pipe, init_scale=8.0 + rank)

    def switched(rank: int, pipe: Member) -> None:
        GradScaler(pipe, enabled=rank == 0)

    def saved(rank: int, pipe: Member) -> None:
        scaler = GradScaler(pipe)
        scaler.load_state_dict(scaler.state_dict() if rank == 0 else {})

    def new(rank: int, pipe: Member) -> None:
        GradScaler(pipe).update(2.0 + rank)

    for case in (half, sound, same, switched, saved, new):
        assert [type(result) for result in World(2).run(case)] == [PlanError, PlanError], case.__name__
    complaint = str(World(2).run(same)[1])
    assert "scale is 8 to 9 over the ranks" in complaint
