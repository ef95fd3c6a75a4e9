"""What was predicted, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, PlanError
from penstock.profile.trace.measure import typical
from penstock.profile.trace.words import milliseconds, size
from penstock.schedule.prediction import Prediction

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["beside", "comparison", "predicted", "prediction_from", "prediction_to", "told"]

_BY = {
    "plan": "predicted by the plan",
    "costs": "predicted from the pipeline's costs",
    "replan": "predicted by replan",
    "trace": "simulated with the times of this trace",
}


def predicted(trace: Trace) -> Prediction | None:
    """See ``Trace.predicted``."""
    steps = typical(trace)
    if trace.missing is not None or not steps or steps[0].kind != "step":
        return None
    try:
        if trace.prediction is not None and trace.order.num_microbatches == trace.schedule.num_microbatches:
            return trace.prediction
        return Prediction(trace.simulation().makespan, "trace")
    except PenstockError:  # not all ranks have done anything
        return None


def comparison(trace: Trace) -> str | None:
    """One line: both times of a step, and both numbers of bytes of the fullest rank; None without a prediction."""
    text, seconds = beside(trace), trace.seconds
    return None if text is None or seconds is None else f"step {milliseconds(seconds)} measured, {text}"


def beside(trace: Trace) -> str | None:
    """What is to be said beside the measured time of a step."""
    found, seconds = trace.predicted, trace.seconds
    if found is None or seconds is None:
        return None
    text = f"{milliseconds(found.seconds)} {told(found, seconds)}"
    expects = found.saved if trace.memory == "saved" else found.memory
    most = _most(trace)
    if expects is None or not most or len(expects) != trace.schedule.num_ranks:
        return text
    track = max(most, key=lambda track: most[track])
    where, expected = trace.tracks[track], expects[trace.tracks[track].place]
    kind = "saved for backwards" if trace.memory == "saved" else "memory"
    there = f"{size(most[track])} measured, {size(expected)} predicted on rank {where.rank}"
    return f"{text}; {kind} {there} ({_difference(expected, most[track])})"


def told(found: Prediction, seconds: float) -> str:
    """By whom, and how far it is off the measured ``seconds``."""
    return f"{_BY[found.by]} ({_difference(found.seconds, seconds)})"


def _most(trace: Trace) -> dict[int, int]:
    """The most bytes of each track in the steps to judge by, where they are known."""
    most: dict[int, int] = {}
    for step in typical(trace):
        for part in step.parts:
            for done in part.actions:
                if done.memory is not None:
                    most[part.track] = max(most.get(part.track, 0), done.memory)
    return most


def _difference(expected: float, measured: float) -> str:
    share = expected / measured - 1 if measured else 0.0
    return "the same" if abs(share) < 0.0005 else f"{abs(share):.1%} {'more' if share > 0 else 'less'}"


def prediction_to(found: Prediction | None) -> dict[str, Any] | None:
    """As numbers, texts, lists and dicts."""
    return None if found is None else asdict(found)


def prediction_from(data: Mapping[str, Any] | None) -> Prediction | None:
    """The inverse."""
    if data is None:
        return None
    memory, saved = (None if data[name] is None else tuple(map(float, data[name])) for name in ("memory", "saved"))
    samples, by = data["samples"], str(data["by"])
    if by not in _BY:
        raise PlanError(f"the trace has a prediction by {by!r}: it must be one of {sorted(_BY)}")
    return Prediction(float(data["seconds"]), by, memory, saved, None if samples is None else int(samples))
