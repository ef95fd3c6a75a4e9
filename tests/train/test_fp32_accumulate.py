"""``Fp32GradAccumulator``: half-precision gradients summed in float32 and rounded once."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.replicas.fp32_accumulate import Fp32GradAccumulator, fp32_sums, set_grad

# Of these, added one after the other in bfloat16, only the first is seen.
PARTS = [1.0, 2.0**-9, 2.0**-9, 2.0**-9]


def weight(dtype: torch.dtype = torch.bfloat16, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2, 3), value, dtype=dtype))


def bring(parameter: nn.Parameter, part: float | Tensor) -> None:
    """One micro-batch: autograd brings this gradient."""
    (parameter * torch.as_tensor(part, dtype=parameter.dtype)).sum().backward()


def filled(parameter: nn.Parameter, value: float) -> Tensor:
    return torch.full_like(parameter, value, requires_grad=False)


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_the_float32_sum_is_rounded_once() -> None:
    parameter, plain = weight(), weight()
    for part in PARTS:
        bring(plain, part)
    with Fp32GradAccumulator([parameter]):
        gc.collect()  # autograd's node that adds, which nobody else holds, must be there still
        for part in PARTS:
            bring(parameter, part)
    assert torch.equal(grad_of(plain), filled(plain, 1.0)), "the example loses nothing: choose another"
    exact = torch.tensor(PARTS).sum().to(torch.bfloat16)
    assert exact > 1
    assert torch.equal(grad_of(parameter), filled(parameter, exact.item()))
    assert grad_of(parameter).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_random_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(5, 7).to(dtype).t())
    parts = [torch.randn(7, 5).to(dtype) for _ in range(16)]
    with Fp32GradAccumulator([parameter]):
        for part in parts:
            bring(parameter, part)
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    assert torch.equal(grad_of(parameter), total.to(dtype))
    assert grad_of(parameter).stride() == parameter.stride()


def test_one_gradient_comes_through_as_it_is() -> None:
    parameter = weight()
    with Fp32GradAccumulator([parameter]):
        bring(parameter, -0.0)
    assert torch.signbit(grad_of(parameter)).all()


def test_sums_are_in_float32_during_the_step() -> None:
    """Sums of ties and the scaling of a loss with count use the float32 sums."""
    parameter = weight()
    with Fp32GradAccumulator([parameter]):
        for part in PARTS:
            bring(parameter, part)
        assert grad_of(parameter).dtype is torch.float32
        grad_of(parameter).mul_(3)
    assert torch.equal(grad_of(parameter), filled(parameter, torch.tensor(3 * sum(PARTS)).bfloat16().item()))


def test_parameters_that_get_no_gradient_have_none() -> None:
    unused, frozen, used = weight(), weight().requires_grad_(False), weight()
    with Fp32GradAccumulator([unused, frozen, used]):
        bring(used, 1.0)
    assert unused.grad is None
    assert frozen.grad is None


def test_wider_parameters_are_left_to_autograd() -> None:
    parameters = [weight(torch.float32), weight(torch.float64), nn.Parameter(torch.ones(2, dtype=torch.complex64))]
    held = [torch.ones_like(p) for p in parameters]
    for parameter, grad in zip(parameters, held, strict=True):
        parameter.grad = grad
    with Fp32GradAccumulator(parameters):
        assert not fp32_sums
        assert all(p.grad is grad for p, grad in zip(parameters, held, strict=True))


def test_earlier_gradients_are_added_before_rounding_and_in_place() -> None:
    parameter = weight()
    parameter.grad = held = filled(parameter, 1.0)
    with Fp32GradAccumulator([parameter]):
        for _ in range(3):
            bring(parameter, 2.0**-9)
    assert parameter.grad is held
    assert torch.equal(held, filled(parameter, (torch.tensor(1 + 3 * 2.0**-9)).bfloat16().item()))
    with Fp32GradAccumulator([parameter]):
        pass
    assert parameter.grad is held
    # Between steps the sum is the parameter's own type: bits that a step is too small to show are gone.
    parameter.grad = filled(parameter, 1.0)
    for _ in range(3):
        with Fp32GradAccumulator([parameter]):
            bring(parameter, 2.0**-9)
    assert torch.equal(grad_of(parameter), filled(parameter, 1.0))


def test_a_step_that_fails_leaves_gradients_as_they_were() -> None:
    with_one, without = weight(), weight()
    with_one.grad = held = filled(with_one, 3.0)
    with contextlib.suppress(KeyError), Fp32GradAccumulator([with_one, without]):
        bring(with_one, 1.0)
        bring(without, 1.0)
        raise KeyError
    assert with_one.grad is held
    assert torch.equal(held, filled(with_one, 3.0))
    assert without.grad is None
    assert not fp32_sums
    bring(without, 2.0**-9)
    assert grad_of(without).dtype is torch.bfloat16


def test_nothing_is_left_behind() -> None:
    """A model that is converted after its training computes gradients in its new type.

    Setting ``grad_dtype`` for the step and back would fail this: once set, it does not follow the parameter.
    """
    model = nn.Linear(3, 3).bfloat16()
    with Fp32GradAccumulator(model.parameters()):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    model.zero_grad()
    model.float()
    plain = copy.deepcopy(model)
    x = torch.full((1, 3), 1 / 3)
    for each in (model, plain):
        each(x).sum().backward()
    assert grad_of(model.weight).dtype is torch.float32
    assert torch.equal(grad_of(model.weight), grad_of(plain.weight))
    assert torch.equal(grad_of(model.weight), torch.full((3, 3), 1 / 3))


def test_hooks_see_the_same_gradients() -> None:
    parameter, seen, after = weight(), [], []
    parameter.register_hook(lambda grad: seen.append(grad.dtype))
    parameter.register_post_accumulate_grad_hook(lambda p: after.append(float(grad_of(p)[0, 0])))
    with Fp32GradAccumulator([parameter]):
        for part in PARTS[:2]:
            bring(parameter, part)
    assert seen == [torch.bfloat16] * 2
    assert after == [1.0, 1.0 + 2.0**-9]


def test_a_grad_dtype_set_by_the_user_stays() -> None:
    parameter = weight()
    parameter.grad_dtype = torch.float32
    with Fp32GradAccumulator([parameter]):
        for part in PARTS:
            bring(parameter, part)
    assert torch.equal(grad_of(parameter), torch.full((2, 3), sum(PARTS)))


def _rows(*rows: int) -> Callable[[nn.Embedding], Tensor]:
    return lambda table: table(torch.tensor(rows)).sum()


@pytest.mark.parametrize("before", [None, "sparse", "dense"])
def test_sparse_gradients_stay_sparse(before: str | None) -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    expected = torch.zeros(4, 2)
    if before is not None:
        _rows(1)(table).backward()
        expected[1] += 1
    if before == "dense":
        table.weight.grad = grad_of(table.weight).to_dense()
    with Fp32GradAccumulator(table.parameters()):
        for _ in range(2):
            (_rows(1, 1, 3)(table) * 2.0**-9).backward()
            expected[1] += 2 * 2.0**-9
            expected[3] += 2.0**-9
    found = grad_of(table.weight)
    assert found.is_sparse == (before != "dense")
    assert found.dtype is torch.bfloat16
    assert torch.equal(found.to_dense(), expected.bfloat16())


@pytest.mark.parametrize("first", ["sparse", "dense"])
def test_sparse_and_dense_gradients_of_one_parameter(first: str) -> None:
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    calls = [lambda: _rows(1)(table).backward(), lambda: bring(table.weight, 2.0**-9)]
    with Fp32GradAccumulator(table.parameters()):
        for call in calls if first == "sparse" else reversed(calls):
            call()
        for _ in range(2):
            bring(table.weight, 2.0**-9)
    expected = torch.full((4, 2), 3 * 2.0**-9)
    expected[1] += 1
    assert torch.equal(grad_of(table.weight), expected.bfloat16())


def test_a_parameter_that_several_threads_share() -> None:
    parameter, rounds = weight(), 50
    with Fp32GradAccumulator([parameter]):
        start = threading.Barrier(4)

        def work() -> None:
            start.wait()
            for _ in range(rounds):
                bring(parameter, 2.0**-9)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert torch.equal(grad_of(parameter), filled(parameter, 4 * rounds * 2.0**-9))


def test_steps_of_several_threads_take_turns() -> None:
    parameter = weight()
    accumulator = Fp32GradAccumulator([parameter])

    def step() -> None:
        for _ in range(20):
            with accumulator:
                bring(parameter, 2.0**-7)

    threads = [threading.Thread(target=step) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(grad_of(parameter), filled(parameter, 60 * 2.0**-7))


@pytest.mark.parametrize("sparse", [False, True])
def test_code_that_adds_without_autograd_calls_fp32_sums(sparse: bool) -> None:
    """As ``W`` does: ``fp32_sums`` tells whether the parameter is summed in float32, and prepares the sum."""
    parameter = weight()
    value = torch.ones_like(parameter).detach()
    if sparse:
        value = value.to_sparse(1)
    with Fp32GradAccumulator([parameter]):
        added = [fp32_sums[id(parameter)](value) for _ in range(2)]
        assert added == [sparse, sparse]
        assert grad_of(parameter).dtype is torch.float32
        assert torch.equal(grad_of(parameter).to_dense(), torch.full((2, 3), 2.0 if sparse else 0.0))
        assert not fp32_sums[id(parameter)](value.to_dense())
        assert not grad_of(parameter).is_sparse, "a dense one can be added to it in place"
    assert not fp32_sums


def test_set_grad_of_another_dtype() -> None:
    parameter = weight()
    version = parameter._version
    set_grad(parameter, torch.zeros(2, 3))
    bring(parameter, 2.0**-9)
    assert grad_of(parameter).dtype is torch.float32
    assert parameter._version == version, "the gradient counts its changes apart"
    assert torch.equal(parameter, filled(parameter, 1.0))
    set_grad(parameter, filled(parameter, 1.0))
    assert grad_of(parameter).dtype is torch.bfloat16


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    parameter = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16, device="cuda"))
    with Fp32GradAccumulator([parameter]):
        for part in PARTS:
            (parameter * part).sum().backward()
    assert torch.equal(grad_of(parameter).cpu(), torch.full((2, 3), sum(PARTS)).bfloat16())
