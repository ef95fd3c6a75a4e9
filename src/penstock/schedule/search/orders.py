"""Where the search starts: the fixed schedules, and families of orders that are like them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from penstock.schedule.registry import SCHEDULES
from penstock.schedule.schedule import Schedule, loop, vee
from penstock.schedule.search.problem import TOLERANCE, Orders, Problem
from penstock.schedule.search.recompute_choice import with_recomputes
from penstock.schedule.v_shape import v_schedule

__all__ = ["encode", "fixed_orders", "fixed_schedules", "sequential_orders", "start_orders", "without_weight_grads"]

_HOPS = (
    (4, 2, 4, 2),
    (2, 1, 2, 1),
    (1, 1, 1, 1),
    (1, 2, 1, 2),
    (2, 2, 2, 2),
    (1, 2, 2, 1),
    (2, 1, 1, 2),
    (3, 1, 3, 1),
    (2, 4, 2, 4),
    (1, 1, 2, 2),
    (2, 2, 1, 1),
    (1, 3, 1, 3),
    (3, 2, 3, 2),
)
"""Ways to travel through a V: places per hop of F out, F back, I out, I back."""

_made: dict[tuple[tuple[int, ...], int, tuple[bool, ...]], list[Orders]] = {}
_MOST = 4
"""The fixed schedules that were made last, by placement, micro-batches and what is fused: a few such lists."""


def fixed_schedules(problem: Problem) -> Iterator[Schedule]:
    """All known schedules that train on just this placement."""
    ranks, per_rank = problem.num_ranks, problem.num_stages // problem.num_ranks
    for kind in SCHEDULES.values():
        if problem.placement not in (loop(ranks, per_rank), vee(ranks)):
            return
        if kind.stages_per_rank not in (None, per_rank):
            continue
        schedule = kind.make(ranks, problem.m, per_rank) if kind.takes_v else kind.make(ranks, problem.m)
        if schedule.trains and schedule.placement == problem.placement:
            yield schedule


def fixed_orders(problem: Problem, *, as_made: bool = False) -> list[Orders]:
    """The same as letters, with the problem's recomputes; and if ``as_made``, with their own backwards."""
    fuses = (True,) * problem.num_stages if as_made else problem.fuses
    key = problem.placement, problem.m, fuses
    if key not in _made:
        if len(_made) >= _MOST:
            _made.clear()
        _made[key] = [encode(problem, schedule, fuses) for schedule in fixed_schedules(problem)]
    return [with_recomputes(problem, words) for words in _made[key]]


def encode(problem: Problem, schedule: Schedule, fuses: Sequence[bool] | None = None) -> Orders:
    """A schedule's orders as letters; a B is one letter where a stage ``fuses``: that takes less time than I and W."""
    count, fuses = problem.num_stages, problem.fuses if fuses is None else fuses
    words: Orders = []
    for order in schedule.orders:
        word: list[int] = []
        again = {(stage, k) for stage, kind, k in order if kind == "R"}
        for stage, kind, k in order:
            if kind == "B" and not fuses[stage]:
                word += (count + stage, 3 * count + stage)
            else:
                word.append(("FIBWR".index(kind) + 5 * (kind == "F" and (stage, k) in again)) * count + stage)
        words.append(word)
    return words


def without_weight_grads(problem: Problem, words: Orders) -> Orders:
    """Without W."""
    weights, count = 3 * problem.num_stages, problem.num_stages
    return [[letter for letter in word if not weights <= letter < weights + count] for word in words]


def sequential_orders(problem: Problem) -> Orders:
    """Each micro-batch through all stages and back before the next: slow, and never short of memory."""
    count = problem.num_stages
    backs = [(2 * count + s,) if problem.fuses[s] else (count + s, 3 * count + s) for s in range(count)]
    return with_recomputes(
        problem,
        [[*stages, *(letter for s in reversed(stages) for letter in backs[s])] * problem.m for stages in problem.local],
    )


def start_orders(problem: Problem, families: int) -> Iterator[Orders]:
    """Orders to begin with: those that are known, and up to so many relatives of them; the likeliest two first."""
    ranks, per_rank = problem.num_ranks, problem.num_stages // problem.num_ranks
    relatives: Iterator[Orders] = iter(())
    if problem.placement == vee(ranks):
        relatives = _travelling(problem)
    elif problem.placement == loop(ranks, per_rank):
        relatives = _alternating(problem, per_rank)
    for words in islice(relatives, 2):
        yield with_recomputes(problem, words)
    for words in fixed_orders(problem):
        yield words
        yield without_weight_grads(problem, words)
    for words in islice(relatives, max(2, families)):
        yield with_recomputes(problem, words)


def _alternating(problem: Problem, per_rank: int) -> Iterator[Orders]:
    """Warm-ups of different length, then backward and forward in turn, in groups of p micro-batches."""
    ranks, count, m = problem.num_ranks, problem.num_stages, problem.m
    deepest = (per_rank - 1) * min(m, ranks)
    for groups, slope in product(_groupings(m, ranks) if per_rank > 1 else [[1] * m], (1, 2, 0)):
        for base in range(deepest + 1, deepest + ranks * (1 if slope else 2) + 1, max(1, ranks // 8)):
            words: Orders = []
            for rank, stages in enumerate(problem.local):
                forwards = [s for group in groups for s in stages for _ in range(group)]
                backwards = [count + s for group in groups for s in reversed(stages) for _ in range(group)]
                kept, most = 0.0, 0
                for s in forwards:
                    if kept + problem.activation[s] > problem.cap[rank] * (1 + TOLERANCE):
                        break
                    kept += problem.held(s)
                    most += 1
                warm = min(most, base + slope * (ranks - 1 - rank))
                word = forwards[:warm]
                for i, back in enumerate(backwards):
                    word.append(back)
                    word += forwards[warm + i : warm + i + 1]
                words.append(word)
            yield words


def _groupings(m: int, size: int) -> list[list[int]]:
    """Groups of ``size``. A few left over share the last groups' places evenly; many are a group of their own."""
    full, rest = divmod(m, size)
    if not rest or not full:
        return [[size] * full + [rest] * bool(rest)]
    alone = [size] * full + [rest]
    shared = [size] * (full - 1) + [(size + rest + 1) // 2, (size + rest) // 2]
    return [alone, shared] if 2 * rest >= size else [shared, alone]


def _travelling(problem: Problem) -> Iterator[Orders]:
    """On a V, different hops, in as many activations as fit if all stages keep the same."""
    ranks = problem.num_ranks
    size = max(sum(map(problem.held, stages)) / 2 for stages in problem.local)
    whole = max(map(max, ([problem.activation[s] - problem.held(s) for s in stages] for stages in problem.local)))
    room = min(2 * problem.m, int((min(problem.cap) - whole) / size * (1 + TOLERANCE))) if size else 2 * problem.m
    for hops in _HOPS:
        if sum(hops) * (ranks - 1) + 12 <= 6 * room:
            words = encode(problem, v_schedule("travel", ranks, problem.m, hops, room))
            yield words
            yield without_weight_grads(problem, words)
