"""Recompute as much as the memory asks for, and no more."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import penstock as ps
from penstock.profile.costs import Crossing, LayerCosts, Link, ModelCosts, Profile
from penstock.profile.planner.cuts import Ranks, Segments, placement_of, rank_static_bytes, stage_costs
from penstock.profile.planner.joint import StageProblem, _Search, find_order, joint_search
from penstock.profile.planner.plan import plan_costs
from penstock.schedule import Costs, Schedule, simulate

pytestmark = pytest.mark.slow


def chain(kept: list[float], works: list[float], sent: float = 1.0, latency: float = 0.0) -> ModelCosts:
    rows = [
        LayerCosts(f"l{i}", work, work, work, work, size, 1.0, 1.0, 0.0)
        for i, (size, work) in enumerate(zip(kept, works, strict=True))
    ]
    crossings = tuple(Crossing(i, i + 1, sent) for i in range(len(rows) - 1))
    return ModelCosts(tuple(rows), crossings, link=Link(latency))


def test_some_stages_are_recomputed_where_neither_all_nor_none_is_best() -> None:
    costs = Profile((chain([20.0, 2.0] * 4, [0.5, 1.5] * 4),))  # what keeps the most is computed soonest
    how: dict[str, Any] = {"batch": 8, "grids": [(1, 4)], "microbatches": 8, "memory": 40.0, "seconds": 0.5}
    none, some, every = (plan_costs(costs, recompute=how_much, **how) for how_much in (False, None, True))
    assert 0 < len(some.best.recomputed) < len(some.best.cuts)
    assert some.seconds < 0.95 * min(none.seconds, every.seconds)
    assert max(some.memory) <= 40.0
    assert none.best.recomputed == ()
    assert every.best.recomputed == tuple(range(len(every.best.cuts)))
    again = ", ".join(map(str, some.best.recomputed[:1]))
    assert f"stages {again}" in str(some)
    assert "recomputed" in str(some)


def test_nothing_is_recomputed_where_there_is_room() -> None:
    costs = Profile((chain([10.0] * 8, [1.0] * 8),))
    planned = plan_costs(costs, batch=8, grids=[(1, 4)], microbatches=8, memory=1000.0, seconds=0.5)
    assert planned.best.recomputed == ()


def test_what_need_not_be_recomputed_is_kept_again() -> None:
    ranks = Ranks((1.0,) * 2, (1000.0,) * 2, (1.0,) * 2, None)
    search = _Search(Segments(chain([10.0] * 4, [1.0] * 4)), ranks, 4, placement_of("loop", 2, 2), 0)
    start = search.first_order(((1, 2, 3, 4), frozenset(range(4))), 0.01)
    search.alternate(start, Random(0), 0.2)
    assert search.best.result.schedule.recomputed == frozenset()


def all_points(n: int, stages: int) -> list[tuple[tuple[int, ...], frozenset[int]]]:
    return [
        ((*cuts, n), frozenset(again))
        for cuts in combinations(range(1, n), stages - 1)
        for count in range(stages + 1)
        for again in combinations(range(stages), count)
    ]


@pytest.mark.parametrize(
    ("shape", "p", "v", "n", "memory"),
    [("straight", 2, 1, 5, 24.0), ("straight", 3, 1, 5, 20.0), ("v", 2, 2, 5, 30.0), ("loop", 2, 2, 5, 24.0)],
)
def test_no_cuts_and_recomputes_of_all_are_much_better(shape: str, p: int, v: int, n: int, memory: float) -> None:
    draw = Random(f"{shape} {p}")
    kept = [float(draw.randint(2, 9)) for _ in range(n)]
    works = [draw.uniform(0.5, 1.5) for _ in range(n)]
    segments = Segments(chain(kept, works, latency=0.05))
    ranks = Ranks((1.0,) * p, (memory,) * p, (1.0,) * p, None)
    placement, m = placement_of(shape, p, v), 4
    best = inf
    for cuts, again in all_points(n, len(placement)):
        static = rank_static_bytes(segments, placement, cuts, p)
        room = tuple(memory - held for held in static)
        if min(room) >= 0:
            costs = stage_costs(segments, ranks, placement, cuts)
            found = find_order(StageProblem(costs, again, placement, m, room), seconds=0.01)
            best = best if found is None else min(best, found.makespan)
    assert best < inf
    answer = joint_search(segments, ranks, m, shape=shape, v=v, seconds=1.0)
    assert answer is not None
    assert max(answer.memory) <= memory * (1 + 1e-9)
    assert answer.result.makespan <= best * 1.01
    assert answer.result.lower_bound <= answer.result.makespan


def kept_at_most(schedule: Schedule, sizes: list[float], inputs: list[float]) -> list[float]:
    """Peak memory of each rank, counted by its live data of each micro-batch."""
    peaks = []
    for own in schedule.orders:
        again = {(a.stage, a.microbatch) for a in own if a.kind == "R"}
        has: dict[tuple[int, int], float] = {}
        peak = 0.0
        for stage, kind, k in own:
            if kind in "FR":
                has[stage, k] = sizes[stage]
            peak = max(peak, sum(has.values()))
            if kind == "F" and (stage, k) in again:
                has[stage, k] = inputs[stage]
            elif kind in "BW":
                del has[stage, k]
        assert not has
        peaks.append(peak)
    return peaks


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_memory_is_what_the_order_keeps(data: st.DataObject) -> None:
    shape, v = data.draw(st.sampled_from([("straight", 1), ("v", 2), ("loop", 2)]))
    p = data.draw(st.integers(1, 3))
    placement = placement_of(shape, p, v)
    count, m = p * v, data.draw(st.integers(1, 5))
    numbers = st.tuples(*[st.integers(1, 5).map(float)] * count)
    sizes = data.draw(numbers)
    inputs = tuple(min(size, 1.0) for size in sizes)
    costs = Costs(
        f=data.draw(numbers), i=data.draw(numbers), w=data.draw(numbers), activation=sizes,
        checkpoint=tuple(came / size for came, size in zip(inputs, sizes, strict=True)),
    )  # fmt: skip
    again = frozenset(data.draw(st.sets(st.integers(0, count - 1))))
    room = data.draw(st.tuples(*[st.integers(4, 25).map(float)] * p))
    found = find_order(StageProblem(costs, again, placement, m, room), seconds=0.005)
    if found is None:
        return
    assert {a.stage for own in found.schedule.orders for a in own if a.kind == "R"} == again
    peaks = kept_at_most(found.schedule, list(sizes), list(inputs))
    assert list(found.peak_memory) == pytest.approx(peaks)
    assert all(peak <= limit * (1 + 1e-9) for peak, limit in zip(peaks, room, strict=True))
    assert simulate(found.schedule, costs).makespan == found.makespan
    assert found.lower_bound <= found.makespan * (1 + 1e-9)


# ── for real ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ledger:
    """The bytes that autograd keeps for each thread's forwards, and the most that there were."""

    def __init__(self) -> None:
        self.now: Counter[int] = Counter()
        self.most: Counter[int] = Counter()
        self._of: dict[int, Counter[int]] = {}
        self._lock = threading.RLock()

    def take(self, where: int, size: int) -> tuple[int, int, int]:
        whose = threading.get_ident()
        with self._lock:
            count = self._of.setdefault(whose, Counter())
            count[where] += 1
            if count[where] == 1:
                self.now[whose] += size
                self.most[whose] = max(self.most[whose], self.now[whose])
        return whose, where, size

    def give(self, whose: int, where: int, size: int) -> None:
        with self._lock:
            self._of[whose][where] -= 1
            if not self._of[whose][where]:
                self.now[whose] -= size


ledger = Ledger()


class Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.taken = ledger.take(tensor.data_ptr(), tensor.nbytes)

    def __del__(self) -> None:
        ledger.give(*self.taken)


class Watched(nn.Module):
    """A layer whose saved activations are counted, if at all; parameters are not among them."""

    counted = False

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x: Tensor) -> Tensor:
        if not Watched.counted:
            return x + self.down(torch.tanh(self.up(x)))
        own = {p.untyped_storage().data_ptr() for p in self.parameters()}

        def pack(tensor: Tensor) -> Any:
            return tensor if tensor.untyped_storage().data_ptr() in own else Held(tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: getattr(held, "tensor", held)):
            return x + self.down(torch.tanh(self.up(x)))


def test_a_plan_that_recomputes_some_stages_trains_in_the_memory_that_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Watched(16, 160 if i % 2 == 0 else 16) for i in range(8)))
    x, y = torch.randn(64, 16), torch.randn(64, 16)
    rows = []
    for i, layer in enumerate(model):  # what keeps the most is computed soonest; a float has 4 bytes
        work, size = (0.5, 160) if i % 2 == 0 else (1.5, 16)
        weights = 4.0 * sum(p.numel() for p in layer.parameters())
        kept = 4.0 * 8 * (16 + size)  # of 8 samples: the input, and what tanh gave
        rows.append(LayerCosts(str(i), work, work, work, work, kept, weights, weights, 0.0))
    crossings = tuple(Crossing(i, i + 1, 4.0 * 8 * 16) for i in range(7))
    costs = ModelCosts(tuple(rows), crossings, samples=8)
    memory = sum(row.parameters + row.gradients for row in rows) / 4 + 1.8 * rows[0].activation
    planned = ps.plan(
        model, costs=costs, devices=["cpu"] * 4, memory=memory, batch=64, microbatches=8, seconds=0.3, link=Link()
    )
    assert 0 < len(planned.best.recomputed) < len(planned.best.cuts)
    assert max(planned.memory) <= memory
    plain = copy.deepcopy(model)
    loss = F.mse_loss(plain(x), y)
    loss.backward()
    with planned.pipeline(F.mse_loss) as pipe:
        pipe.step(x, y)  # in its first step a stage is given copies, to see whether it changes them
        for parameter in pipe.parameters():
            parameter.grad = None
        monkeypatch.setattr(Watched, "counted", True)
        torch.testing.assert_close(pipe.step(x, y).loss, loss.detach())
        most = sorted(ledger.most.values())
    for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    segments, placement, p = Segments(costs), planned.schedule.placement, planned.configuration.pipe
    of_stages = stage_costs(segments, Ranks((1.0,) * p, (inf,) * p, (1.0,) * p), placement, planned.best.cuts)
    saved = simulate(planned.schedule, replace(of_stages, checkpoint=0.0)).peak_memory  # autograd has no inputs
    assert all(size <= said for size, said in zip(most, sorted(saved), strict=True))
    assert sum(most) > 0.85 * sum(saved)  # what waits for a weight gradient is out of autograd's hands
    static = rank_static_bytes(segments, placement, planned.best.cuts, p)
    exact = simulate(planned.schedule, of_stages).peak_memory
    assert planned.memory == pytest.approx([a + b for a, b in zip(static, exact, strict=True)])
    runs = list(pairwise((0, *planned.best.cuts)))
    for stage in planned.best.recomputed:
        assert of_stages.of_stages("checkpoint", len(runs))[stage] * segments.activation_bytes(*runs[stage]) == (
            pytest.approx(8 * 16 * 4 if stage else 0)  # what comes to a stage: a micro-batch of 8 samples
        )
