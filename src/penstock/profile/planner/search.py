"""Search the configuration with the fastest step: estimates first, then cuts and schedules for the best estimates.

    configurations ──▶ estimate and lower bound of each ──▶ best estimates: cuts and schedule ──▶ best results: refined

A configuration with a lower bound above the best result so far is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from penstock.errors import PlanError
from penstock.format import format_size_exact
from penstock.profile.costs import Link, ModelCosts
from penstock.profile.planner.cuts import Ranks, Segments, least_memory, placement_of, rank_runs
from penstock.profile.planner.joint import joint_search
from penstock.profile.planner.result import Candidate, Configuration, Rejection
from penstock.schedule.simulate import simulate

EVALUATED = 16  # configurations that are evaluated with cuts and a schedule
REFINED = 3  # evaluated configurations that are searched again for longer
TIME_FACTOR = 3  # configurations are skipped after this multiple of the budget


@dataclass(frozen=True)
class Cluster:
    """Relative speed and memory of the devices. Ranks use them in this order, replica by replica."""

    speed: tuple[float, ...]
    memory: tuple[float, ...]
    link: Link | None = None  # between replicas; None: the link between the ranks of a pipeline

    def fastest(self, count: int) -> list[int]:
        """The devices that ``count`` ranks use, in order: the fastest ones; if equally fast, those with most memory."""
        best = sorted(range(len(self.speed)), key=lambda device: (-self.speed[device], -self.memory[device], device))
        return sorted(best[:count])


def configurations(
    batch: int,
    grids: Iterable[tuple[int, int]],
    layers: int,
    *,
    microbatches: int | None = None,
    largest: int | None = None,
    recompute: bool | None = False,
    tensor: int = 1,
) -> list[Configuration]:
    """All configurations for these ``grids`` (replicas, ranks); ``largest`` is the largest micro-batch in samples."""
    found = []
    for data, pipe in grids:
        if pipe > layers or data > batch:
            continue
        share = size = -(-batch // data)
        sizes = [share]  # the share of a replica, and repeated halves of it
        while size > 1:
            size = -(-size // 2)
            sizes.append(size)
        counts = [-(-share // size) for size in sizes if largest is None or size <= largest] or [share]
        for count in counts if microbatches is None else [min(share, microbatches)]:
            for shape, v in (("straight", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)):
                if pipe * v <= layers and (pipe > 1 or v == 1):
                    found.append(Configuration(data, pipe, shape, v, -(-share // count), count, recompute, tensor))
    return found


def device_grids(devices: int) -> list[tuple[int, int]]:
    """All pairs (replicas, ranks) that use all devices."""
    return [(n, devices // n) for n in range(1, devices + 1) if devices % n == 0]


def search(
    costs_of: Callable[[Configuration], ModelCosts],
    candidates: Sequence[Configuration],
    cluster: Cluster,
    *,
    seconds: float = 10.0,
    seed: int = 0,
) -> tuple[Candidate, tuple[Rejection, ...]]:
    """The best candidate and the rejected ones, within about ``seconds`` of CPU time.

    ``costs_of`` returns the costs for the micro-batches of a configuration.
    """
    until = time.thread_time() + TIME_FACTOR * seconds
    models: dict[tuple[int, int], Segments] = {}
    evaluations = []
    for configuration in candidates:
        key = configuration.samples, configuration.tensor
        if key not in models:
            models[key] = Segments(costs_of(configuration))
            if not sum(models[key].layer_work):
                raise PlanError("all layers take 0 seconds: the planner needs the time of each layer")
        evaluations.append(_Evaluation(configuration, models[key], cluster))
    evaluations.sort(key=lambda one: one.estimate)
    rejections = [one.rejected for one in evaluations if one.rejected]
    found: list[tuple[_Evaluation, Candidate]] = []
    fastest, skipped = inf, list[_Evaluation]()
    for one in evaluations:
        if one.rejected:
            continue
        limit = EVALUATED if one.estimate >= fastest else EVALUATED + EVALUATED // 2  # as estimates ignore memory
        late = len(found) >= limit or (len(found) > 3 and time.thread_time() > until)
        if one.lower_bound >= fastest or late:
            skipped.append(one)
            continue
        candidate = one.evaluate(0.3 * seconds / EVALUATED, seed, moves=False)
        if candidate is None:
            assert one.rejected is not None
            rejections.append(one.rejected)
        else:
            found.append((one, candidate))
            fastest = min(fastest, candidate.seconds)
    if not found:
        raise PlanError(_infeasible_text(evaluations))
    found.sort(key=lambda pair: pair[1].seconds)
    for number, (one, candidate) in enumerate(found[:REFINED]):
        if one.lower_bound < fastest and time.thread_time() <= until:
            refined = one.evaluate(0.7 * seconds / REFINED, seed, moves=True)
            if refined is not None and refined.seconds < candidate.seconds:
                found[number] = one, refined
    found.sort(key=lambda pair: pair[1].seconds)
    best = found[0][1]
    for one in skipped:
        expected, reason = one.estimate, "less promising" if one.estimate >= best.seconds else "not evaluated"
        if one.lower_bound >= best.seconds:
            expected, reason = one.lower_bound, f"at least {one.lower_bound / best.seconds - 1:.1%} slower"
        rejections.append(Rejection(one.configuration, reason, expected))
    for _, other in found[1:]:
        reason = f"{other.seconds / best.seconds - 1:.1%} slower"
        rejections.append(Rejection(other.configuration, reason, other.seconds, max(other.memory)))
    return best, tuple(sorted(rejections, key=lambda one: inf if one.seconds is None else one.seconds))


class _Evaluation:
    """A configuration with an estimate and a lower bound of its step time, or the reason for its rejection."""

    def __init__(self, configuration: Configuration, segments: Segments, cluster: Cluster) -> None:
        self.configuration, self.segments = configuration, segments
        p, m, v = configuration.pipe, configuration.microbatches, configuration.v
        used = cluster.fastest(configuration.data * p)
        of_rank = [used[rank::p] for rank in range(p)]  # one device per replica; the slowest determines the time
        self.ranks = Ranks(
            tuple(min(cluster.speed[d] for d in devices) for devices in of_rank),
            tuple(min(cluster.memory[d] for d in devices) for devices in of_rank),
            (1.0,) * p,
            configuration.recompute,
        )
        self.placement = placement_of(configuration.shape, p, v)
        self.replica_link = cluster.link or segments.costs.link
        self.rejected: Rejection | None = None
        n, speed, layers = segments.n, self.ranks.speed, segments.costs.layers
        work = segments.layer_work
        if configuration.recompute:
            work = [one + layer.recompute for one, layer in zip(work, layers, strict=True)]
        share = sum(work) / sum(speed)
        activations = segments.activation_bytes(0, n) if configuration.recompute is False else 0.0
        total = segments.static_bytes(0, n) + activations
        if total > sum(self.ranks.memory):
            self._reject(total / p)
        self.lower_bound = m * max(share, max(work) / max(speed))
        imbalance = max(work) / max(speed) / 2 / v if p > 1 else 0.0  # half a layer on average
        forward = sum(layer.forward for layer in layers) / max(speed)
        fill = forward * (1 - 1 / p) / v + (p - 1) * segments.costs.link.latency
        gradients = sum(layer.gradients for layer in layers) / p
        reduce = self.replica_link.all_reduce_seconds(gradients, configuration.data)
        self.estimate = max(self.lower_bound, m * (share + imbalance)) + fill + reduce

    def evaluate(self, seconds: float, seed: int, *, moves: bool) -> Candidate | None:
        """Search cuts and a schedule; None if none fits the memory."""
        configuration = self.configuration
        found = joint_search(
            self.segments, self.ranks, configuration.microbatches, shape=configuration.shape, v=configuration.v,
            seconds=seconds, moves=moves, seed=seed,
        )  # fmt: skip
        if found is None:
            self._reject(self.memory_estimate())
            return None
        schedule, costs = found.result.schedule, found.costs
        simulation = simulate(schedule, costs, costs.edges)
        reduced = []
        for runs in rank_runs(self.placement, found.cuts, configuration.pipe):
            gradients = sum(self.segments.total("gradients", *run) for run in runs)
            reduced.append(self.replica_link.all_reduce_seconds(gradients, configuration.data))
        end = max(ends[-1] + seconds for ends, seconds in zip(simulation.ends, reduced, strict=True))
        saved = None
        if not schedule.recomputed:
            saved = simulate(schedule, replace(costs, keep=1.0), costs.edges).peak_memory
        return Candidate(
            configuration, found.cuts, schedule, end, min(end, found.result.lower_bound), found.memory,
            simulation.bubble, costs, saved,
        )  # fmt: skip

    def memory_estimate(self) -> float:
        """Approximate minimum memory of a rank: its share of the model, and one micro-batch of a layer."""
        segments, p = self.segments, self.configuration.pipe
        kept = segments.activation_bytes(0, segments.n)
        shared = segments.static_bytes(0, segments.n) + (kept if self.configuration.recompute is False else 0.0)
        return shared / p + kept / segments.n

    def _reject(self, required: float) -> None:
        limit = max(self.ranks.memory)
        reason = f"needs {format_size_exact(required)} on a device that has {format_size_exact(limit)}"
        reason = reason if required > limit else "no order fits the memory"
        self.rejected = Rejection(self.configuration, reason, None, required)


def _infeasible_text(evaluations: Sequence[_Evaluation]) -> str:
    """The error message if no configuration fits: the required memory, and remedies."""
    costs = evaluations[0].segments.costs
    limit = max(max(one.ranks.memory) for one in evaluations)
    largest = max(costs.layers, key=lambda layer: layer.static_bytes)
    text = f"nothing fits the memory of {format_size_exact(limit)} per device; "
    if largest.static_bytes > limit:
        text += (
            f"layer {largest.name} alone needs {format_size_exact(largest.static_bytes)} with its gradients "
            "and optimizer state: divide it into smaller layers, or shard it (parallelize=); "
        )
    closest = sorted(evaluations, key=lambda one: (one.configuration.v, one.memory_estimate()))[:REFINED]
    factors = [least_memory(one.segments, one.ranks, one.placement) for one in closest]
    factor, best = min(zip(factors, closest, strict=True), key=lambda pair: pair[0])
    remedies = "more memory or devices, an optimizer with less state (optimizer=)"
    if all(one.configuration.recompute is False for one in evaluations):
        remedies += ", recompute"
    if best.configuration.samples > 1:
        remedies += ", smaller micro-batches"
    least = format_size_exact(factor * max(best.ranks.memory))
    text += f"the smallest requirement found is {least}, {factor:.3g} times as much ({best.configuration}); "
    return f"{text}remedies: {remedies}"
