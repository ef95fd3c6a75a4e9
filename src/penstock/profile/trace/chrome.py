"""A trace as Chrome's and Perfetto's JSON: a process for each replica, a thread for each rank.

rank 0  ▕▔0F0▔▏▕▔0F1▔▏                       an "X" event for each action and each wait;
           ╲ s    ╲                          an "s" and an "f" event with one id are the two ends of an arrow,
rank 1    f ▕▔1F0▔▏▕▔1F1▔▏                   each inside of the action that it belongs to
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.profile.trace.measure import Crossing, crossings
from penstock.profile.trace.steps import Done, Part, Step

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["chrome_trace"]

Event = dict[str, Any]

NAMES = {"F": "forward", "R": "recompute", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The whole file. Times are in microseconds, and none is before 0."""
    events = [event for step in trace.steps for event in _step(trace, step)]
    for number, (step, crossing) in enumerate((s, c) for s in trace.steps for c in crossings(trace, s)):
        events += _arrow(trace, step, crossing, number)
    first = min((event["ts"] for event in events), default=0.0)
    for event in events:
        event["ts"] = round(event["ts"] - min(0.0, first), 3)
        if "dur" in event:
            event["dur"] = round(event["dur"], 3)
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    about = {"schedule": trace.schedule.name, "memory": trace.memory, **trace.versions}
    return {"traceEvents": [*_titles(trace), *events], "displayTimeUnit": "ms", "otherData": about}


def _titles(trace: Trace) -> list[Event]:
    titles = []
    for replica in trace.replicas:
        name = "pipeline" if trace.replicas == [0] else f"replica {replica}"
        where = _steps(trace, replica)
        titles.append(_title("process_name", **where, name=name))
        titles.append(_title("process_sort_index", **where, sort_index=replica))
        titles.append(_title("thread_name", **where, name="steps"))
        titles.append(_title("thread_sort_index", **where, sort_index=trace.schedule.num_ranks))
    for t, track in enumerate(trace.tracks):
        where = _where(trace, t)
        stages = trace.schedule.stages_of(track.place)
        name = f"rank {track.rank}: stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))} on {track.device}"
        titles.append(_title("thread_name", **where, name=name))
        titles.append(_title("thread_sort_index", **where, sort_index=track.place))
    return titles


def _title(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _where(trace: Trace, track: int) -> dict[str, int]:
    """A rank's ids. Perfetto takes a thread 0 for its process's first one: none is 0, nor the same as another."""
    return {"pid": 1 + trace.tracks[track].replica, "tid": 1 + len(trace.replicas) + track}


def _steps(trace: Trace, replica: int) -> dict[str, int]:
    """The ids of the row in which a pipeline's steps are."""
    return {"pid": 1 + replica, "tid": 1 + len(trace.replicas) + len(trace.tracks) + replica}


def _step(trace: Trace, step: Step) -> list[Event]:
    events = []
    for part in step.parts:
        where = _where(trace, part.track)
        track = trace.tracks[part.track]
        if track.place == 0:  # as the pipeline's first rank saw it: the next one may begin before others have ended
            there = _steps(trace, track.replica)
            name = f"{step.kind} {step.number}" + (" (failed)" if step.failed else "")
            events.append(_slice(name, "step", part.begin, part.end, there))
        for done in part.actions:
            events += _action(trace, step, part, done, where)
        on_host = all(done.launched is None for done in part.actions)  # a GPU does its actions beside them
        for span in part.spans if on_host else ():
            events.append(_slice(span.name, "outside", span.start, span.end, where))
    return events


def _action(trace: Trace, step: Step, part: Part, done: Done, where: dict[str, int]) -> list[Event]:
    stage, kind, microbatch = done.action
    events = [
        _slice(f"wait for {wait.what}", "wait", wait.start, wait.end, where, stage=wait.peer, before=str(done.action))
        for wait in done.waits
    ]
    about: dict[str, Any] = {
        "stage": stage, "microbatch": microbatch, "step": step.number, "waited": done.waited * 1e6,
        "bytes sent": sum(sent.bytes for sent in done.sends),
    }  # fmt: skip
    if done.launched is not None:
        about["launched"] = done.launched * 1e6
    events.append(_slice(str(done.action), NAMES[kind], done.start, done.end, where, **about))
    if done.memory is not None:
        name = f"memory {trace.memory} of rank {trace.tracks[part.track].rank}"
        counter = {"ph": "C", "name": name, "ts": done.end * 1e6, **where, "args": {"bytes": done.memory}}
        events.append(counter)
    return events


def _slice(name: str, category: str, start: float, end: float, where: dict[str, int], **args: Any) -> Event:
    duration = max(0.0, end - start) * 1e6
    return {"ph": "X", "name": name, "cat": category, "ts": start * 1e6, "dur": duration, **where, "args": args}


def _arrow(trace: Trace, step: Step, crossing: Crossing, number: int) -> list[Event]:
    """Both ends lie inside of their actions, and the arrow does not go back in time where clocks are not exact."""
    maker, taker = crossing.maker, crossing.taker
    leaves = maker.start + 0.5 * maker.seconds
    comes = max(leaves, taker.start + 0.5 * taker.seconds)
    common = {"name": "message", "cat": "edge", "id": number}
    args = {"bytes": crossing.sent.bytes, "step": step.number}
    return [
        {"ph": "s", **common, "ts": leaves * 1e6, **_where(trace, crossing.made_on), "args": args},
        {"ph": "f", "bp": "e", **common, "ts": comes * 1e6, **_where(trace, crossing.taken_on), "args": args},
    ]
