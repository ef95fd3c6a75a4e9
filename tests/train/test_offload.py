"""Optimizer state on the host: the same update bit for bit, with copies as late as possible."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import PlanError
from penstock.train.optimizer_offload import Offload, OffloadedOptimizer, offload_optimizer, require_offloaded
from tests.support.copies import LateCopies
from tests.support.weights import LateWeights

STEPS = 5


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(module: nn.Module, step: int) -> Tensor:
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    loss: Tensor = module(x).square().mean()
    return loss


def backward(module: nn.Module, step: int) -> None:
    module.zero_grad()
    loss_of(module, step).backward()


def offloaded(optimizer: Optimizer, bucket: int = 3 * 600) -> tuple[Optimizer, LateCopies]:
    """With the CPU in the part of both sides: the counters of steps are the host's own, all else is the device's."""
    copies = LateCopies()
    OffloadedOptimizer(optimizer, bucket, lambda tensor: copies if tensor.dim() else None, smallest=1)
    return optimizer, copies


def tensors(state: Any) -> Iterable[Tensor]:
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from tensors(value)


def check_same(ours: nn.Module, plain: nn.Module, optimizer: Optimizer, expected: Optimizer) -> None:
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    states = [list(tensors(list(o.state_dict()["state"].values()))) for o in (optimizer, expected)]
    assert len(states[0]) == len(states[1])
    for mine, theirs in zip(*states, strict=True):
        assert torch.equal(mine, theirs)


MADE: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam single": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "ASGD foreach": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True, t0=2),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Rprop foreach": lambda p: torch.optim.Rprop(p, lr=0.1, foreach=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.1),
}


@pytest.mark.parametrize("name", MADE)
def test_the_update_is_the_plain_one(name: str) -> None:
    for bucket in [1, 3 * 1200, 1 << 30]:
        ours, plain = model(), model()
        optimizer, copies = offloaded(MADE[name](list(ours.parameters())), bucket)
        expected = MADE[name](list(plain.parameters()))
        for step in range(STEPS):
            for module, each in ((ours, optimizer), (plain, expected)):
                backward(module, step)
                each.step()
        check_same(ours, plain, optimizer, expected)
        assert copies.bytes_to_host > copies.bytes_to_device > 0  # the first step has nothing to bring


def test_a_subclass_that_adds_settings_is_divided_too() -> None:
    class Named(torch.optim.AdamW):
        def __init__(self, params: Any, name: str) -> None:
            super().__init__(params, lr=0.1)
            self.name = name

    most = []
    for bucket in (1, 1 << 30):
        ours, plain = model(), model()
        optimizer, copies = offloaded(Named(list(ours.parameters()), "ours"), bucket)
        expected = Named(list(plain.parameters()), "plain")
        for step in range(STEPS):
            for module, each in ((ours, optimizer), (plain, expected)):
                backward(module, step)
                each.step()
        check_same(ours, plain, optimizer, expected)
        most.append(copies.most_on_device)
    assert most[0] < most[1]


def test_every_optimizer_of_torch_is_tried_here() -> None:
    classes = {n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
    assert {name.split()[0] for name in MADE} == classes - {"Optimizer", "LBFGS", "SparseAdam"}


def test_sparse_gradients() -> None:
    def made() -> tuple[nn.Embedding, Optimizer]:
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        return table, torch.optim.SparseAdam(table.parameters(), lr=0.1)

    (ours, optimizer), (plain, expected) = made(), made()
    optimizer, copies = offloaded(optimizer)
    for step in range(STEPS):
        for table, each in ((ours, optimizer), (plain, expected)):
            table.zero_grad()
            table(torch.tensor([step, 2, 2])).square().sum().backward()
            each.step()
    check_same(ours, plain, optimizer, expected)
    assert copies.bytes_to_device


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_takes_all_parameters_together(search: str | None) -> None:
    """LBFGS: its state is of lists, and its closure runs with the state on the device."""
    ours, plain = model(), model()
    optimizer, copies = offloaded(torch.optim.LBFGS(ours.parameters(), max_iter=4, line_search_fn=search), bucket=1)
    expected = torch.optim.LBFGS(plain.parameters(), max_iter=4, line_search_fn=search)
    for step in range(3):
        for module, each in ((ours, optimizer), (plain, expected)):

            def closure(module: nn.Module = module, step: int = step) -> Tensor:
                backward(module, step)
                return loss_of(module, step)

            each.step(closure)
    check_same(ours, plain, optimizer, expected)
    assert copies.bytes_to_device


def test_an_unknown_optimizer() -> None:
    class Coupled(Optimizer):
        """Each update depends on all the others: not to be done in parts."""

        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            params = [p for group in self.param_groups for p in group["params"]]
            for p in params:
                self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
            norm = torch.stack([self.state[p]["sum"].norm() for p in params]).norm()
            for p in params:
                p.sub_(self.state[p]["sum"] / norm)

    ours, plain = model(), model()
    optimizer, copies = offloaded(Coupled(ours.parameters()), bucket=1)
    expected = Coupled(plain.parameters())
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
    check_same(ours, plain, optimizer, expected)
    assert copies.bytes_to_device


def test_state_that_shares_memory_stays_shared() -> None:
    class Aliased(Optimizer):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                if not state:
                    state["all"] = torch.zeros(2, *p.shape)
                    state["first"], state["self"] = state["all"][0], p.detach()
                state["first"].add_(p.grad)
                state["self"].sub_(state["all"].sum(0))

    ours, plain = model(), model()
    optimizer, _ = offloaded(Aliased(ours.parameters()))
    expected = Aliased(plain.parameters())
    for step in range(3):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
    check_same(ours, plain, optimizer, expected)


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_three_buckets_at_a_time_are_on_the_device() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))  # Adam has 2 x 1024 bytes for each
    optimizer, copies = offloaded(torch.optim.Adam(module.parameters()), bucket=3 * 2 * 2048)
    for step in range(3):
        module.zero_grad()
        module(torch.randn(2, 16, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    assert copies.most_on_device <= 3 * 2 * 2048
    assert copies.made == 24  # host memory is made once
    assert copies.bytes_to_device == 2 * 24 * 1024
    assert copies.bytes_to_host == 3 * 24 * 1024


def test_the_next_bucket_is_prefetched_before_the_update() -> None:
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    optimizer, copies = offloaded(torch.optim.SGD(module.parameters(), momentum=0.9), bucket=1)
    for _ in range(2):
        module(torch.randn(2, 4)).sum().backward()
        copies.log.clear()
        optimizer.step()
    assert copies.log == [
        *("to device", "to device", "wait", "to host"),  # 0 comes, 1 starts to come, 0 is there, updated, and leaves
        *("to device", "wait", "to host"),  # 2 starts to come, 1 is there, updated, and leaves
        *("wait", "wait", "to host"),  # 0 has left, 2 is there, updated, and leaves
        *("synchronize", "synchronize"),  # 1 and 2 have left
    ]


def test_a_group_of_several_kinds_is_not_divided() -> None:
    """Torch chooses between its implementations by looking at a whole group: a part of it might get another one."""

    def updates(sparse: bool) -> int:
        table, linear = nn.Embedding(4, 4, sparse=sparse), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*table.parameters(), *linear.parameters()])
        host = OffloadedOptimizer(optimizer, 1, lambda tensor: None)
        calls, raw = [], host._original_step
        host._original_step = lambda optimizer: calls.append(raw(optimizer))
        linear(table(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
        return len(calls)

    assert updates(sparse=False) == 3
    assert updates(sparse=True) == 1


def test_state_is_on_the_host_between_steps() -> None:
    module = model()
    optimizer, _ = offloaded(torch.optim.AdamW(module.parameters()))
    hosts: set[int] = set()
    for step in range(3):
        backward(module, step)
        optimizer.step()
        found = {id(t) for t in tensors(list(optimizer.state.values())) if t.dim()}
        assert len(found) == 2 * 6
        assert hosts in (set(), found)
        hosts = found


def test_state_from_the_beginning_leaves_at_once() -> None:
    _, copies = offloaded(torch.optim.Adagrad(model().parameters()))
    assert copies.bytes_to_host == sum(p.nbytes for p in model().parameters())


def test_state_that_changes_its_shape() -> None:
    class Growing(Optimizer):
        def __init__(self, params: Iterable[nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                past = self.state[p].get("past", p.new_zeros(0, *p.shape))
                self.state[p]["past"] = torch.cat([past, p.grad[None]])
                p.sub_(self.state[p]["past"].mean(0))

    ours, plain = model(), model()
    optimizer, _ = offloaded(Growing(ours.parameters()))
    expected = Growing(plain.parameters())
    for step in range(3):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
    check_same(ours, plain, optimizer, expected)


def test_parameters_without_gradients_are_left_alone() -> None:
    ours, plain = model(), model()
    optimizer, copies = offloaded(torch.optim.AdamW(ours.parameters(), lr=0.1))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            if step % 2:
                module[2].zero_grad()
            each.step()
    check_same(ours, plain, optimizer, expected)
    assert copies.bytes_to_device < 4 * sum(2 * p.nbytes for p in ours.parameters())


# ── what else an optimizer has ───────────────────────────────────────────────────────────────────────────────────


def groups_of(module: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": module[0].parameters(), "lr": 0.3}, {"params": module[2].parameters(), "weight_decay": 0.1}]


def test_groups_a_later_group_a_scheduler_and_a_closure() -> None:
    runs = []
    for offloading in (True, False):
        module = model()
        optimizer: Optimizer = torch.optim.AdamW(groups_of(module), lr=0.1)
        if offloading:
            optimizer, _ = offloaded(optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        losses = []
        for step in range(STEPS):
            if step == 2:
                optimizer.add_param_group({"params": module[4].parameters(), "lr": 0.5})

            def closure(module: nn.Module = module, step: int = step) -> float:
                assert torch.is_grad_enabled()
                backward(module, step)
                return loss_of(module, step).item()

            losses.append(optimizer.step(closure))
            scheduler.step()
        runs.append((losses, module, optimizer))
    (ours, module, optimizer), (plain, other, expected) = runs
    assert ours == plain
    check_same(module, other, optimizer, expected)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 2]


def test_hooks_run_once_a_step_and_see_all_parameters() -> None:
    module = model()
    optimizer, _ = offloaded(torch.optim.AdamW(module.parameters()), bucket=1)
    seen = []
    optimizer.register_step_pre_hook(lambda o, *_: seen.append(("before", len(o.param_groups[0]["params"]))))
    optimizer.register_step_post_hook(lambda o, *_: seen.append(("after", len(o.param_groups[0]["params"]))))
    backward(module, 0)
    optimizer.step()
    assert seen == [("before", 6), ("after", 6)]


def test_saved_and_loaded_either_way() -> None:
    """A state dict of one is a state dict of the other."""
    for first, second in ((True, False), (False, True), (True, True)):
        module = model()
        optimizer: Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        if first:
            optimizer, _ = offloaded(optimizer)
        for step in range(2):
            backward(module, step)
            optimizer.step()
        file = io.BytesIO()
        torch.save((module.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        again, copies = model(9), LateCopies()
        resumed: Optimizer = torch.optim.AdamW(again.parameters(), lr=0.7)
        if second:
            resumed, copies = offloaded(resumed)
        weights, state = torch.load(file)
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        assert bool(copies.bytes_to_host) == second  # it does not wait for the next step to leave the device
        for step in range(2, STEPS):
            for each, stepping in ((module, optimizer), (again, resumed)):
                backward(each, step)
                stepping.step()
        check_same(again, module, resumed, optimizer)


def test_with_a_scaler() -> None:
    runs = []
    for offloading in (True, False):
        module = model()
        optimizer: Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        if offloading:
            optimizer, _ = offloaded(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            module.zero_grad()
            scaler.scale(loss_of(module, step)).backward()
            if step == 2:
                assert module[0].weight.grad is not None
                module[0].weight.grad[0, 0] = float("inf")  # a step that no parameter may take
            scaler.step(optimizer)
            scaler.update()
        runs.append((module, optimizer))
    check_same(runs[0][0], runs[1][0], runs[0][1], runs[1][1])


def test_a_step_that_fails_puts_everything_back() -> None:
    module, copies = model(), LateCopies()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    host = OffloadedOptimizer(optimizer, 1, lambda tensor: copies, smallest=1)
    backward(module, 0)
    optimizer.step()
    params = list(module.parameters())
    before = [(t, t.clone()) for t in tensors(list(optimizer.state.values()))]
    weights = [p.detach().clone() for p in params]
    raw, calls = host._original_step, []

    def third_fails(optimizer: Optimizer) -> Any:
        calls.append(optimizer)
        if len(calls) == 3:
            raise RuntimeError("in the third bucket")
        return raw(optimizer)

    host._original_step = third_fails
    backward(module, 1)
    with pytest.raises(RuntimeError, match="in the third bucket"):
        optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [6]
    after = list(tensors(list(optimizer.state.values())))
    assert all(mine is theirs for mine, (theirs, _) in zip(after, before, strict=True))
    assert [not torch.equal(t, old) for t, old in before] == [True, True, False, False, False, False]
    assert [not torch.equal(p, w) for p, w in zip(params, weights, strict=True)] == [True, True] + [False] * 4


def test_an_offloaded_optimizer_can_be_freed() -> None:
    module = model()
    optimizer, _ = offloaded(torch.optim.AdamW(module.parameters()))
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


# ── with weights that live on the host ───────────────────────────────────────────────────────────────────────────


def host_weights(module: nn.Module) -> LateWeights:
    weights = LateWeights({0: module}, [torch.device("cpu")])
    weights.offload_stage(0)
    return weights


def offload_with_weights(
    optimizer: Optimizer, weights: LateWeights, bucket: int = 3 * 600, state: bool = True
) -> Optimizer:
    copies = LateCopies()
    OffloadedOptimizer(optimizer, bucket, lambda t: copies if state and t.dim() else None, smallest=1, weights=weights)
    return optimizer


@pytest.mark.parametrize("name", MADE)
def test_weights_are_leased_for_the_update(name: str) -> None:
    for bucket in [1, 3 * 2400, 1 << 30]:
        for state in [True, False]:
            ours, plain = model(), model()
            weights = host_weights(ours)
            optimizer = offload_with_weights(MADE[name](list(ours.parameters())), weights, bucket, state)
            expected = MADE[name](list(plain.parameters()))
            for step in range(STEPS):
                for module, each in ((ours, optimizer), (plain, expected)):
                    backward(module, step)
                    each.step()
                for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
                    assert torch.equal(mine, theirs)
                    assert mine.grad is not None
                    assert theirs.grad is not None
                    assert torch.equal(mine.grad, theirs.grad)
            check_same(ours, plain, optimizer, expected)
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            size = STEPS * sum(p.nbytes for p in trained)
            assert weights.late.bytes_to_device == 2 * size
            assert weights.late.bytes_to_host == size  # updates leave gradients as they are


def test_three_buckets_of_weights_gradients_and_state_at_a_time() -> None:
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(12)))  # 1024 bytes each, and Adam has 2048
    weights = host_weights(module)
    optimizer = offload_with_weights(torch.optim.Adam(module.parameters()), weights, bucket=3 * 2 * 4096, state=False)
    for step in range(3):
        module.zero_grad()
        module(torch.randn(2, 16, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
    assert 0 < weights.late.most_on_device <= 3 * 2 * 2048


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_an_optimizer_that_takes_all_weights_together(search: str | None) -> None:
    """Its closure runs the pipeline while the weights are on the device."""
    ours, plain = model(), model()
    weights = host_weights(ours)
    optimizer = offload_with_weights(torch.optim.LBFGS(ours.parameters(), max_iter=4, line_search_fn=search), weights)
    expected = torch.optim.LBFGS(plain.parameters(), max_iter=4, line_search_fn=search)
    for step in range(3):
        for module, each in ((ours, optimizer), (plain, expected)):

            def closure(module: nn.Module = module, step: int = step) -> Tensor:
                with weights.run():
                    assert weights.bytes_on_device() == (weights.bytes_of(0) if module is ours else 0)
                    backward(module, step)
                    return loss_of(module, step)

            each.step(closure)
            assert weights.bytes_on_device() == 0
    check_same(ours, plain, optimizer, expected)


def test_a_closure_may_run_the_pipeline() -> None:
    ours, plain = model(), model()
    weights = host_weights(ours)
    optimizer = offload_with_weights(torch.optim.AdamW(ours.parameters(), lr=0.1), weights, bucket=1)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):

            def closure(module: nn.Module = module, step: int = step) -> Tensor:
                backward(module, step)
                return loss_of(module, step)

            each.step(closure)
    check_same(ours, plain, optimizer, expected)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_weights_and_a_state_that_is_loaded(options: dict[str, Any]) -> None:
    ours, plain = model(), model()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1, **options)
    backward(plain, 0)
    expected.step()
    weights = host_weights(ours)
    optimizer = offload_with_weights(torch.optim.AdamW(ours.parameters(), lr=0.7, **options), weights)
    ours.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(expected.state_dict()))
    for step in range(1, STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
    check_same(ours, plain, optimizer, expected)


def test_an_update_of_weights_that_the_user_moved() -> None:
    ours, plain = model(), model()
    optimizer = offload_with_weights(
        torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), host_weights(ours), bucket=1
    )
    expected = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            with torch.no_grad():
                module[0].weight.data = module[0].weight.data * 0.9
            backward(module, step)
            module[2].weight.data = module[2].weight.data * 0.9
            each.step()
    check_same(ours, plain, optimizer, expected)


def test_gradients_that_the_update_changes() -> None:
    runs = []
    for offloading in (True, False):
        module = model()
        optimizer: Optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        if offloading:
            optimizer = offload_with_weights(optimizer, host_weights(module), bucket=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        grads = []
        for step in range(STEPS):
            module.zero_grad()
            scaler.scale(loss_of(module, step)).backward()
            scaler.step(optimizer)
            scaler.update()
            grads += [p.grad.clone() for p in module.parameters() if p.grad is not None]
        runs.append((module, optimizer, grads))
    (ours, optimizer, mine), (plain, expected, theirs) = runs
    check_same(ours, plain, optimizer, expected)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_sparse_gradients_of_weights_on_the_host() -> None:
    runs = []
    for offloading in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(10, 4, sparse=True)
        optimizer: Optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
        if offloading:
            optimizer = offload_with_weights(optimizer, host_weights(table))
        for step in range(STEPS):
            table.zero_grad()
            table(torch.tensor([step, 2, 2])).square().sum().backward()
            optimizer.step()
        runs.append((table, optimizer))
    check_same(runs[0][0], runs[1][0], runs[0][1], runs[1][1])


def test_an_update_that_fails_leaves_the_weights_on_the_host() -> None:
    module = model()
    weights = host_weights(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    host = OffloadedOptimizer(optimizer, 1, lambda tensor: None, weights=weights)
    backward(module, 0)
    before = [p.detach().clone() for p in module.parameters()]
    raw, calls = host._original_step, []

    def third_fails(optimizer: Optimizer) -> Any:
        calls.append(optimizer)
        if len(calls) == 3:
            raise RuntimeError("in the third bucket")
        return raw(optimizer)

    host._original_step = third_fails
    with pytest.raises(RuntimeError, match="in the third bucket"):
        optimizer.step()
    after = list(module.parameters())
    assert [not torch.equal(p, w) for p, w in zip(after, before, strict=True)] == [True, True] + [False] * 4
    assert all(p.grad is not None for p in after)
    host._original_step = raw
    with weights.run():
        assert weights.bytes_on_device() == 0
    backward(module, 1)
    optimizer.step()


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────────────────


def test_an_optimizer_is_offloaded_once_and_first() -> None:
    optimizer, _ = offloaded(torch.optim.AdamW(model().parameters()))
    with pytest.raises(PlanError, match="offloaded already"):
        offload_optimizer(optimizer, Offload())
    late = torch.optim.AdamW(model().parameters())
    torch.optim.lr_scheduler.StepLR(late, 1)
    with pytest.raises(PlanError, match="then create its LR scheduler"):
        offload_optimizer(late, Offload())
    with pytest.raises(PlanError, match="differentiable=True"):
        offload_optimizer(torch.optim.Adam(model().parameters(), differentiable=True), Offload())


def test_a_forgotten_optimizer_is_refused() -> None:
    module, other = model(), model()
    handle = require_offloaded(module.parameters())
    try:
        forgotten = torch.optim.AdamW([*other.parameters(), *module.parameters()])
        with pytest.raises(PlanError, match=r"pipe.offload_optimizer\(AdamW\(pipe.parameters"):
            forgotten.step()
        torch.optim.AdamW(other.parameters()).step()
        offload_optimizer(torch.optim.AdamW(module.parameters()), Offload()).step()
    finally:
        handle.remove()
    forgotten.step()


def test_invalid_options_are_refused() -> None:
    for options, message in [
        ({"budget": "lots"}, "budget='lots' is not a size"),
        ({"budget": -1}, r"budget=-1"),
        ({"budget": 0}, r"budget=0"),
        ({"budget": True}, r"budget=True"),
        ({"bucket": "3 parsecs"}, r"bucket='3 parsecs'"),
        ({"bucket": None}, r"bucket=None"),
        ({"optimizer": False, "activations": False}, "leave offload out"),
        ({"activations": False, "budget": "2GiB"}, "activations=False"),
    ]:
        with pytest.raises(PlanError, match=message):
            Offload(**options)


def test_sizes() -> None:
    assert Offload(budget="2GiB", bucket=3000).budget_bytes == 2 << 30
    assert Offload(budget="2GiB", bucket=3000).bucket_bytes == 3000
    assert Offload().budget_bytes is None
    assert Offload() == Offload(optimizer=True, activations=True, weights=False)
    assert Offload(optimizer=False, activations=False, weights=True).weights


def test_on_the_cpu_nothing_moves() -> None:
    ours, plain = model(), model()
    optimizer = offload_optimizer(torch.optim.AdamW(ours.parameters(), lr=0.1), Offload(bucket=1))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    kept = []
    for step in range(STEPS):
        for module, each in ((ours, optimizer), (plain, expected)):
            backward(module, step)
            each.step()
        kept.append([id(t) for t in tensors(list(optimizer.state.values()))])
    assert all(ids == kept[0] for ids in kept)
    check_same(ours, plain, optimizer, expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}])
def test_on_a_gpu(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()  # 4 MiB each, of which Adam has twice
    plain = copy.deepcopy(ours)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1, **options)
    optimizer = offload_optimizer(torch.optim.AdamW(ours.parameters(), lr=0.1, **options), Offload(bucket="24MiB"))
    for _ in range(STEPS):
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        assert options.get("foreach") is not False or torch.cuda.max_memory_allocated() - before < 64 << 20
        expected.step()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)
        big = [t for t in tensors(list(optimizer.state.values())) if t.nbytes > 1 << 20]
        assert len(big) == 32
        assert all(t.is_cpu and t.is_pinned() for t in big)
    optimizer.load_state_dict(expected.state_dict())
    assert all(t.is_cpu for t in tensors(list(optimizer.state.values())) if t.nbytes > 1 << 20)
