"""State that a forward changes: a recompute finds it as the first run did, and leaves the plain model's behind."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.engine.recompute.python_state import PythonStateGuard
from penstock.engine.stage import SavedForward

WIDTH, BATCH, MICROBATCHES = 4, 8, 4


def check(layer: Callable[[], nn.Module], schedule: str = "1f1b", recompute: str = "always") -> None:
    """Two steps equal a loop over the micro-batches: loss, gradients, parameters and buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH), layer())
    plain = copy.deepcopy(model)
    pipe = ps.Pipeline(
        ps.split(model, balance=[2, 2]), F.mse_loss, microbatches=MICROBATCHES, schedule=schedule, recompute=recompute
    )
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for step in range(2):
        x, y = torch.randn(2, BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        result = pipe.step(x, y)
        total = torch.zeros(())
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            loss = F.mse_loss(plain(part), target) / MICROBATCHES
            loss.backward()
            total += loss.detach()
        torch.testing.assert_close(result.loss, total)
        for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, name=name: f"gradient of {name}: {text}")
        for (name, value), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other, msg=lambda text, name=name: f"{name}: {text}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(model, plain, strict=True):
        state = [{k: v for k, v in vars(one).items() if isinstance(v, (int, list))} for one in (mine, other)]
        assert state[0] == state[1]


class Codebook(nn.Module):
    """Nearest of some vectors, which are running means and not trained; as in a VQ-VAE."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH)
        self.table.weight.requires_grad_(False)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x.detach(), self.table.weight).argmin(-1)
        found = self.table(nearest)
        with torch.no_grad():
            means = self.table.weight.lerp(x.mean(0), 0.2)
            if self.way == "in place":
                self.table.weight.copy_(means)
            elif self.way == "data":
                self.table.weight.data.copy_(means)
            elif self.way == "other memory":
                self.table.weight.data = means
            else:
                self.table.weight = nn.Parameter(means, requires_grad=False)
        return x + found.detach() * x.sigmoid()


class Shrinking(nn.Module):
    """A trained weight that a forward changes before it uses it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "data":
            self.weight.data.mul_(0.8)
        else:
            with torch.no_grad():
                self.weight.mul_(0.8)
        return F.linear(x, self.weight).tanh()


class Renormed(nn.Module):
    """torch's own: an embedding whose forward shortens its vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().abs().sum(-1).long() % 3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize(
    "layer",
    [
        *(lambda way=way: Codebook(way) for way in ("in place", "data", "other memory", "another parameter")),
        *(lambda way=way: Shrinking(way) for way in ("in place", "data")),
        Renormed,
    ],
)
def test_parameters_that_a_forward_changes(layer: Callable[[], nn.Module], schedule: str) -> None:
    """A recompute changed a codebook once more, and used values of later micro-batches."""
    check(layer, schedule)


def test_a_parameter_that_begins_to_change_is_an_error_once() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("now", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            if self.now:
                with torch.no_grad():
                    self.weight.mul_(0.9)
            return x * self.weight.clone()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(), nn.Linear(WIDTH, WIDTH))
    pipe = ps.Pipeline(ps.split(model, balance=[1, 2]), F.mse_loss, microbatches=2, recompute="always")
    x, y = torch.randn(2, BATCH, WIDTH)
    pipe.step(x, y)
    late: Any = model[1]
    late.now.fill_(True)
    with pytest.raises(ps.PlanError, match=r"changed 1\.weight \(16 bytes\).*run the step again"):
        pipe.step(x, y)
    pipe.step(x, y)


class Counting(nn.Module):
    """Its output depends on Python state, which the forward changes in one of many ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.way, self.calls = way, 0
        self.seen: list[int] = []
        self.options = {"limits": {"calls": 0}}
        self.recent: deque[int] = deque([0], maxlen=3)
        self.settings = SimpleNamespace(calls=0)
        self.generator = random.Random(3)
        self.torch_generator = torch.Generator().manual_seed(3)
        self.numpy_generator = np.random.default_rng(3)
        self.total = torch.zeros(WIDTH)
        self.last: Tensor | None = None

    def factor(self, x: Tensor) -> Any:
        match self.way:
            case "number":
                self.calls += 1
                return self.calls
            case "list":
                self.seen.append(len(self.seen) + x.shape[0])
                return len(self.seen)
            case "dict":
                self.options["limits"]["calls"] += 1
                return self.options["limits"]["calls"]
            case "deque":
                self.recent.append(self.recent[-1] + 1)
                return sum(self.recent) / 10
            case "object":
                self.settings.calls += 1
                return self.settings.calls
            case "generator":
                return self.generator.random()
            case "torch's generator":
                return torch.rand(WIDTH, generator=self.torch_generator)
            case "NumPy's generator":
                return self.numpy_generator.random()
            case "tensor":
                self.total += x.detach().mean(0)
                return self.total.clone()
            case "another tensor":
                self.total = self.total + x.detach().mean(0)
                return self.total
            case "tensor made by the first forward":
                self.last = torch.zeros(WIDTH) if self.last is None else self.last
                self.last += x.detach().mean(0)
                return self.last.clone()
            case "last output":
                before = 0.0 if self.last is None else self.last.detach()
                self.last = x.tanh()
                return 1 + before
        raise AssertionError(self.way)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale * self.factor(x)).sin()


WAYS = ("number", "list", "dict", "deque", "object", "generator", "torch's generator", "NumPy's generator", "tensor",
        "another tensor", "tensor made by the first forward", "last output")  # fmt: skip


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("way", WAYS)
def test_python_state_that_a_forward_changes(way: str, schedule: str) -> None:
    """A recompute advanced counters and generators once more; speechbrain's LiGRU took another dropout mask."""
    check(lambda: Counting(way), schedule)


@pytest.mark.parametrize("way", ["random", "numpy"])
def test_the_global_generators_of_python_and_numpy(way: str) -> None:
    """Two stages draw in threads, so numbers differ from run to run: a recompute draws those of its first run."""
    drawn: dict[tuple[int, int], list[float]] = {}

    class Drawing(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.scale, self.number = nn.Parameter(torch.ones(())), number

        def forward(self, x: Tensor) -> Tensor:
            factor = random.random() if way == "random" else float(np.random.rand())
            drawn.setdefault((self.number, int(x[0, -1])), []).append(factor)
            return x * torch.cat([(self.scale * factor).expand(WIDTH - 1), torch.ones(1)])

    model = nn.Sequential(Drawing(0), Drawing(1))
    pipe = ps.Pipeline(ps.split(model, balance=[1, 1]), F.mse_loss, microbatches=4, recompute="always")
    x, y = torch.randn(2, BATCH, WIDTH)
    x[:, -1] = torch.arange(4).repeat_interleave(2)  # the number of the micro-batch
    for _ in range(2):
        pipe.step(x, y)
        assert len(drawn) == 8
        for first, again in drawn.values():
            assert first == again
        drawn.clear()


def test_a_graph_that_an_attribute_holds_is_not_kept_for_the_recompute() -> None:
    """Saved outputs would keep the graphs of all micro-batches in flight, which a recompute is to avoid."""
    module = Counting("last output")
    guard, saved, mode = PythonStateGuard(module), SavedForward().python_state, object()
    for _ in range(3):
        with guard.saving(mode, saved):
            module(torch.randn(2, WIDTH, requires_grad=True))
    ((_, value),) = saved
    assert value["last"].grad_fn is None
    assert module.last is not None
    assert module.last.grad_fn is not None


def test_only_state_that_changes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Renormed())
    guard, mode = PythonStateGuard(module), object()
    with guard.saving(mode, []):
        module(torch.randn(2, WIDTH))
    monkeypatch.setattr(guard, "modules", None)  # nothing is looked at
    for _ in range(2):
        saved: list[Any] = []
        with guard.saving(mode, saved):
            module(torch.randn(2, WIDTH))
        assert saved == []


# ── state of several stages ──────────────────────────────────────────────────────────────────────────────────────


class Shares(nn.Module):
    """A layer that has an object in common with another one, which may change it."""

    def __init__(self, shared: Any, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.shared, self.use = nn.Linear(WIDTH, WIDTH), shared, use

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.use(self.shared, x)


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[[0, 1, 2, 0]])


def appends(log: list[float], x: Tensor) -> float:
    log.append(float(len(log)))
    return 1.0


def counts(state: dict[str, int], x: Tensor) -> int:
    state["calls"] += 1
    return state["calls"]


def counts_in_object(state: Any, x: Tensor) -> int:
    state.calls += 1
    return int(state.calls)


def remembers(cache: dict[int, Tensor], x: Tensor) -> Tensor:
    if WIDTH not in cache:
        cache[WIDTH] = torch.arange(1.0, WIDTH + 1)
    return cache[WIDTH]


def shared_list() -> list[nn.Module]:
    log: list[float] = []
    return [Shares(log, appends), Shares(log, lambda log, x: 1.0 + sum(log))]


def shared_dict() -> list[nn.Module]:
    state = {"calls": 0}
    return [Shares(state, counts), Shares(state, lambda state, x: state["calls"])]


def shared_object() -> list[nn.Module]:
    state = SimpleNamespace(calls=0)
    return [Shares(state, counts_in_object), Shares(state, lambda state, x: state.calls)]


def shared_cache() -> list[nn.Module]:
    cache: dict[int, Tensor] = {}
    return [Shares(cache, remembers), Shares(cache, remembers)]


def counter_of_another_module() -> list[nn.Module]:
    first = CountsCalls()
    return [first, Shares([first], lambda held, x: held[0].calls)]


def one_module_twice() -> list[nn.Module]:
    first = CountsCalls()
    return [first, first]


def tied_embedding() -> list[nn.Module]:
    first = Renormed()
    return [first, Tied(first.table.weight)]


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


SHARED = [shared_list, shared_dict, shared_object, counter_of_another_module, one_module_twice, tied_embedding]


def of_two_stages(make: Callable[[], list[nn.Module]], kind: str) -> tuple[nn.Module, ps.Plan]:
    torch.manual_seed(0)
    first, last = make()
    layers = [first, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), last]
    if kind == "sequential":
        model: nn.Module = nn.Sequential(*layers)
        return model, ps.split(model, balance=[2, 2])
    model = Layers(layers)
    return model, ps.split(model, stages=2, cuts=["layers.2"], sample=torch.zeros(2, WIDTH))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("kind", ["sequential", "recorded"])
@pytest.mark.parametrize("make", SHARED)
def test_state_that_stages_share_and_change_is_refused(make: Any, kind: str, recompute: Any) -> None:
    def step() -> None:
        _, plan = of_two_stages(make, kind)
        with ps.Pipeline(plan, F.mse_loss, microbatches=2, recompute=recompute) as pipe:
            pipe.step(*torch.randn(2, BATCH, WIDTH))

    with pytest.raises(ps.PlanError, match=r"changes .* (of another stage, too|and stage 1 ).* into one stage"):
        step()


@pytest.mark.parametrize("kind", ["sequential", "recorded"])
@pytest.mark.parametrize(("make", "microbatches"), [(shared_cache, 2), *((make, 1) for make in SHARED[:4])])
def test_stages_may_share_caches_and_all_else_with_one_micro_batch(make: Any, microbatches: int, kind: str) -> None:
    model, plan = of_two_stages(make, kind)
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, BATCH, WIDTH)
    with ps.Pipeline(plan, F.mse_loss, microbatches=microbatches) as pipe:
        for _ in range(2):
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            torch.testing.assert_close(pipe.step(x, y).loss, loss.detach())
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# ── the loss function ────────────────────────────────────────────────────────────────────────────────────────────


class CountingLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.ones(()))
        self.average: Tensor

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        loss = F.mse_loss(output, target)
        self.average = self.average * 0.9 + loss.detach() * 0.1
        return loss * self.calls / self.average


class CountingObject:
    def __init__(self) -> None:
        self.state = {"calls": 0}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.state["calls"] += 1
        return F.mse_loss(output, target) * self.state["calls"]

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return F.mse_loss(output, target) * calls

    return loss


LOSSES: list[Callable[[], Any]] = [
    CountingLoss, CountingObject, lambda: CountingObject().method, closure, lambda: partial(closure())
]  # fmt: skip


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
@pytest.mark.parametrize("make", LOSSES, ids=["module", "object", "method", "closure", "partial"])
def test_state_that_a_loss_function_changes(make: Callable[[], Any], schedule: str, recompute: Any) -> None:
    """A recompute of the last stage computes the loss again: counters advanced twice, and gradients were of others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain, loss_fn, plain_loss = copy.deepcopy(model), make(), make()
    x, y = torch.randn(2, BATCH, WIDTH)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "schedule": schedule, "recompute": recompute}
    with ps.Pipeline(ps.split(model, stages=2), loss_fn, reduction="mean", **options) as pipe:
        for _ in range(2):
            total = torch.zeros(())
            for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
                loss = plain_loss(plain(part), target) / MICROBATCHES
                loss.backward()
                total += loss.detach()
            torch.testing.assert_close(pipe.step(x, y).loss, total)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
