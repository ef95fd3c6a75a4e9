"""All that a report says of a trace, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from penstock.errors import PenstockError, PlanError
from penstock.profile.report.advice import LEAST, Advice, advise
from penstock.profile.report.balance import Cut, better_cut
from penstock.profile.report.causes import CAUSES, Idle, idle_times
from penstock.profile.report.contents import Peak, peak
from penstock.profile.report.replay import replay
from penstock.profile.trace.measure import crossings, typical
from penstock.profile.trace.steps import Step
from penstock.profile.trace.words import counted, milliseconds
from penstock.schedule.simulate import Simulation

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["EdgeUse", "Findings", "look"]


@dataclass(frozen=True)
class EdgeUse:
    """What crosses an edge in a step, both ways. ``seconds`` is one message's, where ranks waited for any."""

    src: int
    dst: int
    ranks: tuple[int, int]  # in their pipeline
    messages: int
    forward: int  # bytes of one message
    backward: int
    seconds: float | None

    @property
    def bandwidth(self) -> float | None:
        """Bytes in a second, of a message whose time is known."""
        return max(self.forward, self.backward) / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Findings:
    """What was found in a trace. ``step`` is the one that stands for all: of the typical ones, the middle one."""

    trace: Trace
    step: Step
    idle: Sequence[Idle]
    peaks: Sequence[Peak]
    edges: Sequence[EdgeUse]
    advice: Sequence[Advice]
    simulation: Simulation | None  # where one is possible
    idle_simulated: Sequence[Idle]
    cut: Cut | None

    @property
    def bubble(self) -> float:
        return _share(self.idle, "idle")

    @property
    def causes(self) -> dict[str, float]:
        """The share of each cause in the time of all ranks; together they are the bubble."""
        return {cause: _share(self.idle, cause) for cause in CAUSES}

    @property
    def what(self) -> str:
        """What the step is, with its article."""
        return {"evaluate": "an evaluation"}.get(self.step.kind, f"a {self.step.kind}")

    @property
    def head(self) -> str:
        """What was run, and how long it took."""
        trace, schedule = self.trace, self.trace.schedule
        causes = sorted(self.causes.items(), key=lambda item: -item[1])
        why = ", ".join(f"{cause} {share:.1%}" for cause, share in causes if share >= 0.0005)
        text = (
            f"{schedule.name}, {counted(schedule.num_stages, 'stage')} on {counted(schedule.num_ranks, 'rank')}, "
            f"{counted(trace.order.num_microbatches, 'micro-batch')}: {self.what} takes "
            f"{milliseconds(self.step.seconds)}, bubble {self.bubble:.1%}"
        )
        return f"{text} ({why})" if why else text

    @property
    def best(self) -> str:
        """The first advice."""
        return self.advice[0].text if self.advice else f"no change was found that saves {LEAST:.0%} or more"


def look(trace: Trace) -> Findings:
    """Look at a trace: an error where it has no whole step."""
    steps = typical(trace)
    if not steps:
        raise PlanError(
            "this trace has no whole step to report on: record one, with `with pipe.trace() as trace: pipe.step(…)`"
        )
    step = sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]
    idle = idle_times(trace, step)
    simulation, cut, simulated = None, None, list[Idle]()
    try:
        simulation = trace.simulation()
    except PenstockError:  # one rank's part only, or half of a call
        pass
    else:
        cut = better_cut(trace, simulation)
        again = replay(simulation, trace.edges)
        simulated = idle_times(again, again.steps[0])
    peaks = [peak(part, trace.saved) for part in step.of(range(len(trace.tracks)))]
    return Findings(
        trace,
        step,
        idle,
        [one for one in peaks if one is not None],
        _edges(trace, step),
        advise(trace, idle),
        simulation,
        simulated,
        cut,
    )


def _edges(trace: Trace, step: Step) -> list[EdgeUse]:
    found = defaultdict(list)
    for crossing in crossings(trace, step):
        found[crossing.edge].append(crossing)
    uses = []
    for src, dst in trace.edges:
        messages = found[src, dst]
        sizes = {
            way: [c.sent.bytes for c in messages if (c.maker.action.kind == "F") == (way == "forward")]
            for way in ("forward", "backward")
        }
        times = [c.seconds for c in messages if c.seconds is not None]
        uses.append(
            EdgeUse(
                src,
                dst,
                (trace.schedule.placement[src], trace.schedule.placement[dst]),
                len(messages),
                int(median(sizes["forward"] or [0])),
                int(median(sizes["backward"] or [0])),
                median(times) if times else None,
            )
        )
    return uses


def _share(idle: Sequence[Idle], what: str) -> float:
    total = sum(rank.total for rank in idle)
    return sum(getattr(rank, what) for rank in idle) / total if total else 0.0
