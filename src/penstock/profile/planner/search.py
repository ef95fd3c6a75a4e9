"""The fastest way to train a mini-batch, among all: first on the back of an envelope, then the promising ones in full.

    ways ──▶ an estimate and a floor of each ──▶ the most promising, cut and ordered ──▶ the best few, refined

A way whose floor is above what was found already is not looked at: no order of it is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from penstock.errors import PlanError
from penstock.format import format_size_exact
from penstock.profile.costs import ModelCosts
from penstock.profile.planner.candidates import Candidate, Cluster, Configuration, Rejection
from penstock.profile.planner.cuts import balanced, least_memory, placement_of
from penstock.profile.planner.devices import check_numbers
from penstock.profile.planner.joint import JointResult, joint_search
from penstock.profile.planner.segments import Ranks, Segments, rank_bytes
from penstock.schedule.simulate import simulate

__all__ = ["Answer", "search"]

LOOKED_AT = 16  # ways that are cut and ordered
REFINED = 3  # of which so many are gone over again
PATIENCE = 3  # times as long as it should take is what a slow core may take, before some ways are left out


@dataclass(frozen=True)
class Answer:
    """The best way, and the others."""

    best: Candidate
    others: tuple[Rejection, ...]


def search(
    costs_of: Callable[[Configuration], ModelCosts],
    ways: Sequence[Configuration],
    cluster: Cluster,
    *,
    seconds: float = 10.0,
    seed: int = 0,
    report: Callable[[str], None] = lambda text: None,
) -> Answer:
    """Look at all ``ways``, for about ``seconds`` of a core; ``costs_of(way)`` is for its micro-batches."""
    check_numbers({"seconds": seconds, "seed": seed})
    until = time.thread_time() + PATIENCE * seconds
    models: dict[tuple[int, int], Segments] = {}
    looks = []
    for way in ways:
        key = way.samples, way.tensor
        if key not in models:
            models[key] = Segments(costs_of(way))
            if not sum(models[key].works):
                raise PlanError("all layers take 0 seconds: costs need the time of each, or nothing can be compared")
        looks.append(_Evaluation(way, models[key], cluster))
    looks.sort(key=lambda look: look.estimate)
    lost = [Rejection(look.way, look.reason, None, look.needs) for look in looks if look.reason]
    found: list[tuple[_Evaluation, Candidate]] = []
    fastest, left = inf, list[_Evaluation]()
    for look in looks:
        if look.reason:
            continue
        enough = LOOKED_AT if look.estimate >= fastest else LOOKED_AT + LOOKED_AT // 2  # memory is not in estimates
        late = len(found) >= enough or (len(found) > 3 and time.thread_time() > until)
        if look.floor >= fastest or late:
            left.append(look)
        else:
            report(str(look.way))
            candidate = look.think(0.3 * seconds / LOOKED_AT, seed, moves=False)
            if candidate is None:
                lost.append(Rejection(look.way, look.reason, None, look.needs))
            else:
                found.append((look, candidate))
                fastest = min(fastest, candidate.seconds)
    if not found:
        raise PlanError(_nothing_fits(looks))
    found.sort(key=lambda pair: pair[1].seconds)
    for number, (look, candidate) in enumerate(found[:REFINED]):
        if look.floor < fastest and time.thread_time() <= until:
            report(f"{look.way}, refined")
            again = look.think(0.7 * seconds / REFINED, seed, moves=True)
            if again is not None and again.seconds < candidate.seconds:
                found[number] = look, again
    found.sort(key=lambda pair: pair[1].seconds)
    best = found[0][1]
    lost += [look.left_out(best.seconds) for look in left]
    lost += [
        Rejection(other.way, f"{other.seconds / best.seconds - 1:.1%} slower", other.seconds, max(other.memory))
        for _, other in found[1:]
    ]
    return Answer(best, tuple(sorted(lost, key=lambda one: inf if one.seconds is None else one.seconds)))


class _Evaluation:
    """One way: about how long it will take, how long at least, or why it cannot be."""

    def __init__(self, way: Configuration, segments: Segments, cluster: Cluster) -> None:
        self.way, self.segments = way, segments
        p = way.pipe
        chosen = cluster.chosen(way.data * p)
        of_rank = [chosen[rank::p] for rank in range(p)]  # a rank of each replica: the slowest decides
        self.ranks = Ranks(
            tuple(min(cluster.speed[d] for d in devices) for devices in of_rank),
            tuple(min(cluster.memory[d] for d in devices) for devices in of_rank),
            (1.0,) * p,
            way.recompute,
        )
        self.between = cluster.link or segments.costs.link
        self.placement = placement_of(way.shape, p, way.v)
        self.reason = ""
        self.needs: float | None = None
        n, speed, layers = segments.n, self.ranks.speed, segments.costs.layers
        works = segments.works
        if way.recompute:
            works = [work + layer.recompute for work, layer in zip(works, layers, strict=True)]
        share = sum(works) / sum(speed)
        least = segments.static(0, n) + (segments.activation(0, n) if way.recompute is False else 0.0)
        if least > sum(self.ranks.memory):
            self._misses(least / p)
        self.floor = way.microbatches * max(share, max(works) / max(speed))
        uneven = max(works) / max(speed) / 2 / way.v if p > 1 else 0.0  # in the mean, a half
        forward = sum(layer.forward for layer in layers) / max(speed)
        fill = forward * (1 - 1 / p) / way.v + (p - 1) * segments.costs.link.latency
        gradients = sum(layer.gradients for layer in layers) / p
        self.estimate = max(self.floor, way.microbatches * (share + uneven)) + fill + self._summing([gradients])[0]

    def think(self, seconds: float, seed: int, *, moves: bool) -> Candidate | None:
        """Cut and order it; None if nothing keeps the memory."""
        way = self.way
        found = joint_search(
            self.segments, self.ranks, way.microbatches, shape=way.shape, v=way.v, seconds=seconds, moves=moves,
            seed=seed,
        )  # fmt: skip
        if found is None and not self.reason:
            free = balanced(
                self.segments, replace(self.ranks, memory=(inf,) * way.pipe, recompute=False), self.placement
            )
            assert free is not None  # with as many layers as stages there are always cuts
            runs: list[list[tuple[int, int]]] = [[] for _ in range(way.pipe)]
            for rank, run in zip(self.placement, pairwise((0, *free)), strict=True):
                runs[rank].append(run)
            again = range(0 if way.recompute is False else way.v)
            self._misses(max(rank_bytes(self.segments, own, again, 1) for own in runs))
        return None if found is None else self._candidate(found)

    def _candidate(self, found: JointResult) -> Candidate:
        schedule, costs = found.found.schedule, found.costs
        edges = tuple(costs.bytes) if isinstance(costs.bytes, dict) else None
        simulation = simulate(schedule, costs, edges)
        sizes = [0.0] * self.way.pipe
        for rank, (i, j) in zip(self.placement, pairwise((0, *found.cuts)), strict=True):
            sizes[rank] += self.segments.total("gradients", i, j)
        summing = self._summing(sizes)
        done = max(ends[-1] + sums for ends, sums in zip(simulation.ends, summing, strict=True))
        floor = min(done, found.found.lower_bound)
        saved = None if found.again else tuple(simulate(schedule, replace(costs, keep=1.0), edges).peak_memory)
        return Candidate(self.way, found.cuts, schedule, done, floor, found.memory, simulation.bubble, costs, saved)

    def left_out(self, best: float) -> Rejection:
        """Why it was not thought through, where the best of the others takes so long."""
        if self.floor >= best:
            return Rejection(self.way, f"at least {self.floor / best - 1:.1%} slower", self.floor)
        return Rejection(self.way, "less promising" if self.estimate >= best else "not looked at", self.estimate)

    def share(self) -> float:
        """About the least that a rank needs: its share of what stays, and what a micro-batch needs at once."""
        segments, p = self.segments, self.way.pipe
        kept = segments.activation(0, segments.n)
        return (segments.static(0, segments.n) + (kept if self.way.recompute is False else 0.0)) / p + kept / segments.n

    def _summing(self, sizes: Sequence[float]) -> list[float]:
        """The seconds in which ranks' gradients, of so many bytes, are summed over the replicas."""
        return [self.between.all_reduce_seconds(size, self.way.data) for size in sizes]

    def _misses(self, needs: float) -> None:
        self.needs, limit = needs, max(self.ranks.memory)
        more = f"needs {format_size_exact(needs)} on a device that has {format_size_exact(limit)}"
        self.reason = more if needs > limit else "no order keeps the memory"


def _nothing_fits(looks: Sequence[_Evaluation]) -> str:
    """By how much the memory is too small, and what would help."""
    costs = looks[0].segments.costs
    limit = max(max(look.ranks.memory) for look in looks)
    stays = [layer.parameters + layer.gradients + layer.optimizer + layer.buffers for layer in costs.layers]
    heaviest = max(range(len(stays)), key=stays.__getitem__)
    lines = [f"nothing keeps the memory of {format_size_exact(limit)} a device"]
    if stays[heaviest] > limit:
        name = costs.layers[heaviest].name
        lines.append(
            f"layer {name} alone needs {format_size_exact(stays[heaviest])} with its gradients and the optimizer's "
            "states: "
            "divide it into smaller layers, or shard it (parallelize=)"
        )
    closest = sorted(looks, key=lambda look: (look.way.v, look.share()))[:REFINED]
    factor, best = min(
        ((least_memory(look.segments, look.ranks, look.way.shape, look.way.v), look) for look in closest),
        key=lambda pair: pair[0],
    )
    needs = factor * max(best.ranks.memory)
    lines.append(f"the least that was found is {format_size_exact(needs)}, {factor:.3g} times as much ({best.way})")
    hints = ["more memory or devices"]
    if all(look.way.recompute is False for look in looks):
        hints.append("recompute")
    if best.way.samples > 1:
        hints.append("smaller micro-batches")
    if any(layer.optimizer for layer in costs.layers):
        hints.append("an optimizer with fewer states (optimizer=)")
    lines.append(f"what would help: {', '.join(hints)}")
    return "; ".join(lines)
