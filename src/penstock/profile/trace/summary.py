"""A trace in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.profile.trace.compare import beside
from penstock.profile.trace.measure import typical
from penstock.profile.trace.words import counted, milliseconds

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["sharing", "summary"]


def summary(trace: Trace) -> str:
    """How long a step takes, its bubble beside the simulated one, and what each rank does meanwhile."""
    schedule = trace.schedule
    head = (
        f"trace of {counted(len(trace.steps), 'step')}: {schedule.name}, {counted(schedule.num_stages, 'stage')} on "
        f"{counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_microbatches, 'micro-batch')}"
    )
    if len(trace.replicas) > 1:
        head += f", {len(trace.replicas)} replicas"
    lines = [head] + ([] if trace.missing is None else [f"one rank's part only: {trace.missing}"])
    steps = typical(trace)
    if not steps:
        return "\n".join([*lines, "no whole step"])
    times = [step.seconds for step in steps]
    middle, least, most = (milliseconds(pick(times)) for pick in (median, min, max))
    lines.append(f"step    {middle} (median of {len(times)}; {least} to {most})")
    lines += [f"        {text}" for text in [beside(trace)] if text]
    lines += [f"bubble  {text}" for text in [_bubble(trace)] if text]
    lines += sharing(trace)
    cells: list[tuple[str, ...]] = [("rank", "device", "stages", "busy", "waits", "around", "other")]
    for t, track in enumerate(trace.tracks):
        parts = [part for step in steps for part in step.of([t])]
        if parts:
            known = [[part.busy, part.waited, part.around] for part in parts]
            other = [max(0.0, p.end - p.begin - sum(row)) for p, row in zip(parts, known, strict=True)]
            times = [median(column) for column in (*zip(*known, strict=True), other)]
            stages = " ".join(map(str, schedule.stages_of(track.place)))
            cells.append((str(track.rank), track.device, stages, *map(milliseconds, times)))
    return "\n".join([*lines, "", *_columns(cells)])


def sharing(trace: Trace) -> list[str]:
    """A sentence for each GPU that ranks share."""
    return [
        f"ranks {', '.join(str(trace.tracks[t].rank) for t in tracks)} share a GPU: what they do on it takes as long "
        "as all of it together, and its memory is counted for each"
        for tracks in trace.sharing
    ]


def _bubble(trace: Trace) -> str | None:
    if trace.bubble is None:
        return None
    text = f"{trace.bubble:.1%} measured"
    try:
        return f"{text}, {trace.simulation().bubble:.1%} simulated with the median time of each action"
    except PenstockError:  # one rank's part only, or half of a call
        return text


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = []
    for row in cells:
        padded = [c.rjust(w) if i > 2 else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("─" * width for width in widths))
    return lines
