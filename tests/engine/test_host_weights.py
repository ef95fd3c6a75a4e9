"""Weights on the host: the same gradients bit for bit, with memory on the device only where it is needed."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.offload.weights import host_weights
from penstock.errors import PlanError
from penstock.schedule.lower import Instruction
from tests.support.copies import LateCopies
from tests.support.weights import LateWeights

CPU = torch.device("cpu")


def modules_of(count: int = 3, width: int = 8) -> dict[int, nn.Module]:
    torch.manual_seed(0)
    return {s: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for s in range(count)}


def settled(modules: dict[int, nn.Module]) -> LateWeights:
    weights = LateWeights(modules, [CPU] * len(modules))
    for stage in modules:
        weights.offload_stage(stage)
    return weights


def run(modules: dict[int, nn.Module], weights: LateWeights | None, x: Tensor, split: Sequence[int] = (2, 1)) -> Tensor:
    """All micro-batches through all stages and back, stage by stage: the gradient of the input."""
    stages = sorted(modules)
    xs = [part.detach().requires_grad_() for part in x.split(list(split))]
    order = [Instruction("F", s, k) for s in stages for k in range(len(xs))]
    order += [Instruction("B", s, k) for s in reversed(stages) for k in range(len(xs))]
    calls: dict[int, Callable[[], None]] = {}
    if weights is not None:
        calls = weights.transfer_calls(order, stages)
    inputs = {(0, k): part for k, part in enumerate(xs)}
    outputs: dict[tuple[int, int], Tensor] = {}
    for at, (kind, s, k, _) in enumerate(order):
        if at in calls:
            calls[at]()
        if kind == "F":
            outputs[s, k] = modules[s](inputs[s, k])
            inputs[s + 1, k] = outputs[s, k].detach().requires_grad_()
        else:
            grad = inputs[s + 1, k].grad
            outputs.pop((s, k)).backward(torch.ones_like(inputs[s + 1, k]) if grad is None else grad)
    if len(order) in calls:
        calls[len(order)]()
    return torch.cat([part.grad for part in xs if part.grad is not None])


def state(modules: dict[int, nn.Module]) -> list[Tensor]:
    found = []
    for module in modules.values():
        for parameter in module.parameters():
            found.append(parameter.detach().clone())
            if parameter.grad is not None:
                found.append(parameter.grad.to_dense().clone())
        found += [buffer.clone() for buffer in module.buffers()]
    return found


def check_equal(ours: Sequence[Tensor], plain: Sequence[Tensor]) -> None:
    assert len(ours) == len(plain)
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


def check_runs(modules: dict[int, nn.Module], x: Tensor | None = None, times: int = 3) -> LateWeights:
    """Several runs, whose gradients add up, are those of the same modules with all weights at hand."""
    plain = copy.deepcopy(modules)
    weights = settled(modules)
    x = torch.randn(3, 8) if x is None else x
    for _ in range(times):
        with weights.run():
            mine = run(modules, weights, x)
        check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])
        assert weights.bytes_on_device() == 0
    return weights


def test_gradients_are_the_plain_ones() -> None:
    weights = check_runs(modules_of(5))
    assert weights.late.bytes_to_device > 0
    assert weights.most == 2 * weights.bytes_of(0)


def test_parameters_are_host_tensors_between_runs() -> None:
    modules = modules_of()
    before = [p for module in modules.values() for p in module.parameters()]
    values = [p.detach().clone() for p in before]
    weights = settled(modules)
    for _ in range(2):
        assert [p for module in modules.values() for p in module.parameters()] == before  # the same objects
        check_equal(before, values)
        assert "Parameter containing" in repr(before[0])
        with weights.run():
            run(modules, weights, torch.randn(3, 8))
    file = io.BytesIO()
    torch.save(before[1].detach(), file)
    assert file.tell() < 2000  # its memory is its own: nobody else's is saved with it


def test_changes_between_runs_reach_the_device() -> None:
    modules = modules_of()
    plain = copy.deepcopy(modules)
    weights = settled(modules)
    x = torch.randn(3, 8)
    for step in range(3):
        for each in (modules, plain):
            with torch.no_grad():
                each[0][0].weight.mul_(0.9)  # type: ignore[index]
                each[1][0].weight.data = each[1][0].weight.data + 1  # type: ignore[index]
                each[2][2].load_state_dict({"weight": torch.full((8, 8), 0.1 * step), "bias": torch.ones(8)})  # type: ignore[index]
            if step == 1:
                each[1].double().float()
            if step == 2:
                each[2].zero_grad()
        with weights.run():
            mine = run(modules, weights, x)
        check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])


def test_another_type_and_layout() -> None:
    torch.manual_seed(0)
    modules: dict[int, nn.Module] = {0: nn.Linear(8, 8), 1: nn.Conv2d(2, 2, 3, padding=1)}
    weights = settled(modules)
    modules[0].double()
    modules[1].to(memory_format=torch.channels_last)
    strides = modules[1].weight.stride()  # type: ignore[operator]
    with weights.run():
        assert modules[0].weight.dtype is torch.float64
        assert modules[1].weight.stride() == strides  # type: ignore[operator]
        assert weights.bytes_on_device() == 0
    assert modules[0].weight.dtype is torch.float64
    assert modules[1].weight.stride() == strides  # type: ignore[operator]


def test_gradients_are_added_to_in_place() -> None:
    """Whoever holds a gradient from an earlier run sees the sum; and one that was let go is not overwritten."""
    modules = modules_of()
    weights = settled(modules)
    weight = modules[0].get_parameter("0.weight")
    with weights.run():
        run(modules, weights, torch.randn(3, 8))
    first = weight.grad
    assert first is not None
    value = first.clone()
    with weights.run():
        run(modules, weights, torch.randn(3, 8))
    assert weight.grad is first
    assert not torch.equal(first, value)
    value = first.clone()
    weight.grad = None
    with weights.run():
        run(modules, weights, torch.randn(3, 8))
    assert weight.grad is not first
    assert torch.equal(first, value)


# ── what is special about parameters ─────────────────────────────────────────────────────────────────────────────


def test_frozen_unused_and_empty_ones() -> None:
    modules = modules_of()
    modules[0].requires_grad_(False)
    modules[1].register_parameter("unused", nn.Parameter(torch.randn(4)))
    modules[2].register_parameter("empty", nn.Parameter(torch.randn(0, 4)))
    modules[2].register_parameter("number", nn.Parameter(torch.tensor(3), requires_grad=False))
    check_runs(modules)


def test_half_precision_and_complex() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rough, self.turn = nn.Parameter(torch.randn(8).bfloat16()), nn.Parameter(torch.randn(8) + 1j)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.rough * self.turn).abs()

    torch.manual_seed(0)
    check_runs({0: Mixed(), 1: Mixed()})


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.own = weight, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x @ self.weight.t()).tanh()


def test_a_parameter_of_two_stages_stays_while_either_needs_it() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8, 8))
    weights = check_runs({0: Tied(weight), 1: nn.Linear(8, 8), 2: nn.Linear(8, 8), 3: Tied(weight)})
    assert set(weights._params) == {(0,), (1,), (2,), (3,), (0, 3)}
    weight.grad = None
    check_runs({0: Tied(weight), 1: Tied(weight)})


def test_parts_of_a_larger_storage_stay_on_the_device() -> None:
    """The weights of an LSTM, for example, are parts of one storage on a GPU."""
    modules = modules_of()
    first, second = modules[1].get_parameter("0.weight"), modules[1].get_parameter("2.weight")
    flat = torch.cat([first.data.flatten(), second.data.flatten()])
    first.data, second.data = flat[:64].view(8, 8), flat[64:].view(8, 8)
    slice_of_more = modules[2].get_parameter("0.weight")
    slice_of_more.data = torch.cat([slice_of_more.data, torch.zeros(1000, 8)])[:8]
    weights = check_runs(modules)
    assert {first, second, slice_of_more}.isdisjoint(weights._params_of)
    assert first.untyped_storage()._cdata == second.untyped_storage()._cdata


def test_shared_memory_stays_on_the_device() -> None:
    modules = modules_of()
    one, other = modules[0].get_parameter("0.weight"), modules[0].get_parameter("2.weight")
    other.data = one.data[:]  # one memory under two names
    seen = modules[1].get_parameter("0.weight")
    modules[1].register_buffer("seen", seen.data)
    weights = settled(modules)
    assert {one, other, seen}.isdisjoint(weights._params_of)
    with weights.run():
        assert one.untyped_storage().nbytes() > 0
        run(modules, weights, torch.randn(3, 8))
    with torch.no_grad():
        seen.fill_(7)
    assert torch.equal(modules[1].get_buffer("seen"), seen)


def test_a_tie_beside_one_that_stays() -> None:
    """The second stage must not take for movable what the first one found shared with a buffer."""
    torch.manual_seed(0)
    free, stuck = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))
    modules: dict[int, nn.Module] = {s: nn.Sequential(Tied(free), Tied(stuck)) for s in range(2)}
    modules[0].register_buffer("seen", stuck.data)
    weights = check_runs(modules)
    assert stuck not in weights._params_of
    assert free in weights._params_of


def test_sparse_gradients() -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 8, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            looked: Tensor = self.table(torch.tensor([1, 3, 3])[: len(x)])
            return x * looked

    torch.manual_seed(0)
    modules = {0: Look(), 1: nn.Linear(8, 8), 2: Look(), 3: nn.Linear(8, 8)}
    check_runs(modules)
    grad = modules[0].get_parameter("table.weight").grad
    assert grad is not None
    assert grad.is_sparse


# ── forwards that change weights ─────────────────────────────────────────────────────────────────────────────────


def test_an_embedding_with_max_norm() -> None:
    class Look(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 8, max_norm=0.5)

        def forward(self, x: Tensor) -> Tensor:
            looked: Tensor = self.table(torch.tensor([1, 3, 2])[: len(x)])
            return x * looked

    torch.manual_seed(0)
    check_runs({s: Look() for s in range(4)})


def test_a_write_without_a_version_is_found() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randn(8), requires_grad=False)
            self.scale = nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.codes.data.lerp_(x.detach().mean(0), 0.1)
            return x * self.codes.clone() + self.scale

    torch.manual_seed(0)
    modules: dict[int, nn.Module] = {s: Codes().eval() for s in range(4)}
    plain = copy.deepcopy(modules)
    weights = settled(modules)
    for training in (False, True, True):
        for module in (*modules.values(), *plain.values()):
            module.train(training)
        x = torch.randn(3, 8)
        with weights.run():
            mine = run(modules, weights, x)
        check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])


def test_a_write_in_a_later_run() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.runs, self.codes = 0, nn.Parameter(torch.randn(8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            if self.runs > 3:
                with torch.no_grad():
                    self.codes.mul_(0.9)
            return x * self.codes.clone()

    torch.manual_seed(0)
    check_runs({s: Later() for s in range(4)})


def test_initial_values_written_without_a_version() -> None:
    modules = modules_of()
    weights = settled(modules)
    weight = modules[1].get_parameter("0.weight")
    with weights.initializing(1):
        assert weights.bytes_on_device() == weights.bytes_of(1)
        weight.data.fill_(3)
    assert weights.bytes_on_device() == 0
    assert torch.equal(weight, torch.full((8, 8), 3.0))


def test_unchanged_weights_are_not_copied_to_the_host() -> None:
    modules = modules_of(4)
    weights = settled(modules)
    for module in modules.values():
        module.requires_grad_(False)
    with weights.run():
        run(modules, weights, torch.randn(3, 8))
    assert weights.late.bytes_to_host == 0


def test_other_memory_is_refused() -> None:
    class Moves(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data * 2
            return super().forward(x)

    modules: dict[int, nn.Module] = {0: Moves(8, 8), 1: nn.Linear(8, 8), 2: nn.Linear(8, 8)}
    weights = settled(modules)
    before = modules[0].get_parameter("weight").detach().clone()
    with pytest.raises(PlanError, match=r"parameter.data = …\), which Offload\(weights=True\)"), weights.run():
        run(modules, weights, torch.randn(3, 8))
    assert torch.equal(modules[0].get_parameter("weight"), before)


# ── runs that fail, and weights that stay ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fails", range(12))
def test_a_run_that_fails_leaves_everything_on_the_host(fails: int) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _Fail.apply(x)  # type: ignore[no-any-return, no-untyped-call]

    left = [fails]

    class _Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return count(x)

        @staticmethod
        def backward(ctx: object, *grads: Tensor) -> Tensor:
            return count(grads[0])

    def count(x: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise ValueError("here it fails")
        return x * 1

    modules = {s: nn.Sequential(module, Fails()) for s, module in modules_of().items()}
    before = [p.detach().clone() for module in modules.values() for p in module.parameters()]
    weights = settled(modules)
    with pytest.raises(ValueError, match="here it fails"), weights.run():
        run(modules, weights, torch.randn(3, 8))
    assert weights.bytes_on_device() == 0
    after = [p for module in modules.values() for p in module.parameters()]
    check_equal(after, before)
    for parameter in after:
        parameter.grad = None
    left[0] = 1000
    plain = copy.deepcopy(modules)
    x = torch.randn(3, 8)
    with weights.run():
        mine = run(modules, weights, x)
    check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])


class Call:
    over = False


def test_weights_stay_resident_during_an_open_call() -> None:
    modules = modules_of()
    plain = copy.deepcopy(modules)
    weights = settled(modules)
    x = torch.randn(3, 8)
    for each, theirs in ((modules, weights), (plain, None)):
        with weights.run():
            run(each, theirs, x)
    call = Call()
    weights.make_resident(call)
    all_of_it = sum(weights.bytes_of(s) for s in modules)
    assert weights.bytes_on_device() == all_of_it
    check_equal([run(modules, None, x), *state(modules)], [run(plain, None, x), *state(plain)])
    with weights.run():
        mine = run(modules, weights, x)
        assert weights.bytes_on_device() == all_of_it
    check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])
    with torch.no_grad():
        for p in (*modules[0].parameters(), *plain[0].parameters()):
            p.mul_(0.5)
    call.over = True
    assert weights.bytes_on_device() == all_of_it
    with weights.run():
        assert weights.bytes_on_device() == 0
        mine = run(modules, weights, x)
    check_equal([mine, *state(modules)], [run(plain, None, x), *state(plain)])


def test_a_call_without_references_is_over() -> None:
    weights = settled(modules_of())
    weights.make_resident(Call())
    with weights.run():
        assert weights.bytes_on_device() == 0


def test_nothing_is_made_on_the_cpu() -> None:
    modules = modules_of()
    assert host_weights(modules, [CPU] * 3) is None


def test_late_copies_detect_memory_freed_too_early() -> None:
    """Else the tests above would prove nothing."""
    copies, there = LateCopies(), torch.empty(8)
    event = copies.to_device([(torch.randn(8), there)])
    there.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="freed before the copy"):
        copies.wait(event)
