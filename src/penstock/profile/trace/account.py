"""The memory of ranks whose devices do not count it: what is saved for backwards to come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.profile.trace.steps import Done, Step

__all__ = ["with_memory"]


def with_memory(steps: Sequence[Step], saved: Mapping[int, int]) -> tuple[Step, ...]:
    """Every action with the bytes that its rank keeps after it, where they are not known already.

    A stage keeps ``saved`` bytes of a micro-batch from its forward, or from its recompute if it has one, to the end of
    its backward. What crosses between stages, and what a recompute keeps of its input, does not count.
    """
    kept: dict[int, Counter[tuple[int, int]]] = {}  # for each track, how many of each stage and micro-batch
    return tuple(
        replace(
            step,
            parts=tuple(
                replace(part, actions=_counted(step.kind, part.actions, kept.setdefault(part.track, Counter()), saved))
                for part in step.parts
            ),
        )
        for step in steps
    )


def _counted(
    run: str, actions: Sequence[Done], kept: Counter[tuple[int, int]], saved: Mapping[int, int]
) -> tuple[Done, ...]:
    if run == "step":  # nothing is left of a step before, unless it has failed
        kept.clear()
    again = {(d.action.stage, d.action.microbatch) for d in actions if d.action.kind == "R"}
    found = []
    for done in actions:
        stage, kind, microbatch = done.action
        pair = stage, microbatch
        if kind == "R" or (kind == "F" and run in ("step", "call") and pair not in again):
            kept[pair] += 1
        elif kind in "BW" and kept[pair]:
            kept[pair] -= 1
            if not kept[pair]:
                del kept[pair]  # so that those in flight are all that is summed
        total = sum(saved.get(s, 0) * count for (s, _), count in kept.items())
        found.append(done if done.memory is not None else replace(done, memory=total))
    return tuple(found)
