"""The report page: one self-contained HTML file. All texts of a trace are escaped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from penstock.format import count_noun, format_size
from penstock.profile.report.findings import CAUSES, MIN_SAVING, Findings, layers_of, stage_seconds
from penstock.profile.trace.analysis import TraceData, milliseconds, prediction_source
from penstock.profile.trace.records import ActionRecord, RankRecord, Span, StepRecord
from penstock.schedule.schedule import ACTION_NAMES

# ── choice of steps ──────────────────────────────────────────────────────────────────────────────────────────────
#
# ▂▂▃▂▂▂█▂▂▂▂▁▂▂    one bar per step; the median, slowest, fastest and failed ones and some others have a timeline
#     ^ ^    ^

MAX_ACTIONS = 10_000
"""The limit for all timelines of a page together, unless a single step has more: about a megabyte."""

_BAR_HEIGHT = 40


def steps_shown(findings: Findings) -> list[StepRecord]:
    """The steps with a timeline, in order; ``findings.step`` is always one of them."""
    steps = [step for step in findings.trace.steps if any(part.actions for part in step.parts)]
    sizes = [sum(len(part.actions) for part in step.parts) for step in steps]
    times = sorted(range(len(steps)), key=lambda place: steps[place].seconds)
    middle = next(place for place, step in enumerate(steps) if step is findings.step)
    failed = [place for place, step in enumerate(steps) if step.failed]
    # Every prefix of these is evenly distributed: 0, 4, 2, 6, 1, 5, 3, 7.
    bits = max(1, (len(steps) - 1).bit_length())
    spread = sorted(range(len(steps)), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    found, room = {middle}, MAX_ACTIONS - sizes[middle]
    for place in (times[-1], times[0], *failed, *spread):
        if place not in found and sizes[place] <= room:
            found.add(place)
            room -= sizes[place]
    return [steps[place] for place in sorted(found)]


def step_picker(findings: Findings) -> str:
    """HTML to choose a step; empty if there is only one."""
    all_steps = [step for step in findings.trace.steps if step.parts]
    shown = steps_shown(findings)
    if len(all_steps) < 2:
        return ""
    slowest, fastest = (pick(all_steps, key=lambda step: step.seconds) for pick in (max, min))
    kinds = ((findings.step, "median"), (slowest, "slowest"), (fastest, "fastest"))
    options = []
    for number, step in enumerate(shown):
        about = ", ".join(word for one, word in kinds if step is one)
        text = f"{step.name}: {milliseconds(step.seconds)}" + (f" ({about})" if about else "")
        selected = " selected" if step is findings.step else ""
        options.append(f'<option value="{number}"{selected}>{escape(text)}</option>')
    times = f"{milliseconds(fastest.seconds)} to {milliseconds(slowest.seconds)}"
    words = f"Each bar is a step: {count_noun(len(all_steps), 'step')} of {times}"
    if len(shown) < len(all_steps):
        words += f". {len(shown)} of them, in colour, have a timeline"
    most = slowest.seconds or 1.0
    number_of = {id(step): number for number, step in enumerate(shown)}
    bars = []
    for x, step in enumerate(all_steps):
        height = step.seconds / most * _BAR_HEIGHT
        place = f'x="{x + 0.1}" y="{_BAR_HEIGHT - height:.2f}" width="0.8" height="{height:.2f}"'
        choice = f' data-step="{number_of[id(step)]}"' if id(step) in number_of else ""  # steps that can be chosen
        bars.append(f"<rect {place}{choice}/>")
    return (
        '<div class="toolbar"><label>Step <select id="step">' + "".join(options) + "</select></label>"
        '<div role="group" aria-label="Step" class="buttons">'
        '<button type="button" data-do="before" aria-label="Previous step">‹</button> '
        '<button type="button" data-do="after" aria-label="Next step">›</button></div></div>'
        f'<svg id="step-times" role="img" aria-label="{escape(words)}" '
        f'viewBox="0 0 {max(len(bars), 8)} {_BAR_HEIGHT}" preserveAspectRatio="none">{"".join(bars)}</svg>'
        f'<p class="note">{escape(words)}. The rest of this page is of {escape(findings.step.name)}.</p>'
    )


# ── sections ─────────────────────────────────────────────────────────────────────────────────────────────────────

_CAUSES = {
    "fill": "before the rank's first action, and waits before its first gradient that balanced stages would have",
    "drain": "after the rank's last action, and such waits after its first gradient",
    "imbalance": "waits for a stage that computes longer than balanced stages would",
    "communication": "the other rank has finished, its message is in transit",
    "host": "no wait for a message: launches, sends, Python",
}


def page(findings: Findings) -> str:
    trace, schedule = findings.trace, findings.trace.schedule
    here = files("penstock.profile.report")
    kinds = ("html", "css", "text.js", "chart.js", "js")
    template, style, *scripts = (here.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in kinds)
    versions = ", ".join(f"{name} {version}" for name, version in trace.versions.items())
    missing = "" if trace.missing is None else f"Records of one rank only: {trace.missing}. "
    thin = ", and below it a thinner bar for the same order, simulated with the median time of each action"
    colours = [(kind, f"{kind} {ACTION_NAMES[kind]}") for kind in "FRBIW" if kind in trace.order.kinds]
    colours.append(("wait", "wait"))
    legend = [f'<span><i style="background:var(--{colour})"></i>{name}</span>' for colour, name in colours]
    memory = "The bytes that each rank has saved for pending backwards"
    if trace.memory != "saved":
        memory = f"The bytes {trace.memory} on each rank's device"
    return Template(template).substitute(
        style=style,
        script="".join(scripts),
        # With ``<`` escaped, no text can end the script element.
        data=json.dumps(_data(findings), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        picker=step_picker(findings),
        title=escape(f"Penstock report: {schedule.name}"),
        subtitle=escape(f"{missing}{findings.head}."),
        tiles=_tiles(findings),
        advice=_advice(findings),
        timeline_note=f"Each rank has a bar for its actions{'' if findings.simulation is None else thin}. Grey lines "
        "between actions are waits; light boxes are spans outside of actions. Time starts at the first action.",
        legend="".join(legend),
        bubble=_bubble(findings),
        memory_note=escape(f"{memory}, after each action. All rows have the same scale."),
        memory=_memory(findings),
        stages=_stages(findings),
        edges=_edges(findings),
        plan=_plan(trace),
        footer=escape(f"{count_noun(len(trace.steps), 'step')} recorded. {versions}"),
    )


def rank_name(trace: TraceData, track: int) -> str:
    """The global rank, and the replica if there are several."""
    one = trace.tracks[track]
    return f"rank {one.rank}" + (f" ({one.replica})" if len(trace.replicas) > 1 else "")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", texts: Sequence[int] = ()) -> str:
    """A table of HTML cells; the first column and those in ``texts`` are left-aligned."""
    about = f'<p class="note">{caption}</p>' if caption else ""
    kind = ['class="text"' if i in texts else "" for i in range(len(head))]
    top = "".join(f'<th scope="col" {k}>{cell}</th>' for k, cell in zip(kind, head, strict=True))
    lines = "".join(
        "<tr>" + "".join(f"<td {k}>{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>" for row in rows
    )
    return f'{about}<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _stack(parts: Iterable[tuple[str, float]], kind: str = "") -> str:
    """A stacked bar of (colour name, fraction of the width)."""
    spans = "".join(
        f'<i style="width:{100 * share:.2f}%;background:var(--{colour})"></i>' for colour, share in parts if share > 0
    )
    return f'<div class="stack {kind}" aria-hidden="true">{spans}</div>'


def _tiles(findings: Findings) -> str:
    trace, simulation = findings.trace, findings.simulation
    tiles = [(milliseconds(findings.step.seconds), f"{findings.what}, the median of those that were recorded")]
    if trace.predicted is not None and trace.seconds is not None:
        tiles.append((milliseconds(trace.predicted.seconds), prediction_source(trace.predicted, trace.seconds)))
    tiles.append((f"{findings.bubble:.1%}", "bubble, measured"))
    if simulation is not None:
        tiles.append((f"{simulation.bubble:.1%}", "bubble, simulated with the median time of each action"))
    if findings.peaks:
        most = max(findings.peaks, key=lambda peak: peak.bytes)
        kind = "saved for backwards" if trace.memory == "saved" else trace.memory
        tiles.append((format_size(most.bytes), f"most {kind}, on {rank_name(trace, most.track)}"))
    for first in findings.advice[:1]:
        tiles.append((f"{'≤ ' * first.bound}{first.saved:.0%}", "the first advice saves"))
    return "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)


def _advice(findings: Findings) -> str:
    if not findings.advice:
        none = f"no change was found that saves {MIN_SAVING:.0%} of a step or more"
        none = "this step cannot be simulated, because it is incomplete" if findings.simulation is None else none
        return f"<p>None: {none}.</p>"
    items = "".join(
        f'<li data-saved="{advice.saved:.6f}"><b>{"≤ " * advice.bound}{advice.saved:.0%}</b> {escape(advice.text)}</li>'
        for advice in findings.advice
    )
    note = "Each change is simulated alone, with the measured times. Savings do not add up."
    return f'<ol class="advice">{items}</ol><p class="note">{note}</p>'


def _bubble(findings: Findings) -> str:
    legend = "".join(
        f'<span><i style="background:var(--{cause})"></i><b>{cause}</b>: {_CAUSES[cause]}</span>' for cause in CAUSES
    )
    rows = []
    for idle in findings.idle:
        parts = {name: seconds / (idle.total or 1.0) for name, seconds in {"idle": idle.idle, **idle.causes}.items()}
        bar = _stack((cause, parts[cause]) for cause in CAUSES)
        name = escape(rank_name(findings.trace, idle.track))
        rows.append([name, *(f"{share:.1%}" for share in parts.values()), bar])
    total = (findings.bubble, *findings.causes.values())
    rows.append(["<b>all</b>", *(f"<b>{share:.1%}</b>" for share in total), ""])
    head = ["rank", "idle", *CAUSES, '<span class="unseen">bar</span>']
    caption = "Shares of the time from a step's first action to its last."
    return f'<div class="legend">{legend}</div>' + _table(head, rows, caption)


def _memory(findings: Findings) -> str:
    trace = findings.trace
    if not findings.peaks:
        return "<p>The memory of this run is unknown.</p>"
    rows = []
    for peak in findings.peaks:
        inside = [
            f"stage {stage}: {count_noun(len(flight), 'micro-batch')} ({', '.join(map(str, flight))})"
            + (f" of {format_size(trace.saved[stage])}" if trace.saved.get(stage) else "")
            for stage, flight in peak.flight.items()
        ]
        if peak.rest:
            inside.append(f"{format_size(peak.rest)} of parameters, gradients, optimizer state and others")
        who = escape(rank_name(trace, peak.track))
        rows.append([who, format_size(peak.bytes), escape(peak.after), escape("; ".join(inside)) or "–"])
    head = ["rank", "peak", "after", "composition"]
    return _table(head, rows, "The peak of each rank, and the action after which it occurs.", texts=[3])


def _stages(findings: Findings) -> str:
    trace, simulation, cut = findings.trace, findings.simulation, findings.cut
    if simulation is None:
        return "<p>Unknown: the trace does not have all stages, or no complete steps.</p>"
    count, trains = trace.schedule.num_stages, simulation.schedule.trains
    times = simulation.costs.durations(count)
    seconds = stage_seconds(simulation.costs, count, trains)
    better = [0.0] * count if cut is None else stage_seconds(cut.costs, count, trains)
    most = max([*seconds, *better]) or 1.0
    layers = layers_of(trace)
    rows = []
    for stage in range(count):
        back = times["B"][stage] if trains else 0.0
        bar = _stack([("F", times["F"][stage] / most), ("B", back / most)], "of-stage")
        row = [str(stage), str(trace.schedule.placement[stage]), "–" if layers is None else str(len(layers[stage]))]
        row += [milliseconds(times["F"][stage]), milliseconds(back)]
        if cut is not None:
            bar += _stack([("W", better[stage] / most)], "of-stage")
            row += [str(cut.after[stage]), milliseconds(better[stage])]
        rows.append([*row, bar])
    head = ["stage", "rank", "layers", "forward", "backward"]
    words = "The times of the stages show no better cut."
    caption = "The time of one micro-batch in each stage."
    if layers is None:
        words = "The plan of the trace has no layers, so no other cut is suggested."
    elif cut is not None:
        head += ["layers, better cut", "both, better cut"]
        words = f"{cut.text[0].upper()}{cut.text[1:]} saves {cut.saved:.1%}, if the layers of a stage cost alike."
        caption += " The thin bar is the better cut."
    return f"<p>{escape(words)}</p>" + _table([*head, '<span class="unseen">bar</span>'], rows, caption)


def _edges(findings: Findings) -> str:
    if not findings.edges:
        return "<p>None: the model is one stage.</p>"
    rows = []
    for edge in findings.edges:
        inside = edge.ranks[0] == edge.ranks[1]
        took = "within a rank" if inside else "–" if edge.seconds is None else milliseconds(edge.seconds)
        speed = "–" if inside or not edge.bandwidth else f"{format_size(edge.bandwidth)}/s"
        ends = f"{edge.src} → {edge.dst}", f"{edge.ranks[0]} → {edge.ranks[1]}"
        sizes = format_size(edge.forward), format_size(edge.backward)
        rows.append([*ends, str(edge.messages), *sizes, took, speed])
    caption = "Bytes are those of one message. The time is known if a rank waited for messages."
    head = ["stages", "ranks", "messages", "bytes forward", "bytes back", "takes", "bandwidth"]
    return _table(head, rows, caption)


def _plan(trace: TraceData) -> str:
    stages = trace.plan.get("stages", [])
    devices = trace.plan.get("devices") or [""] * len(stages)
    rows = []
    for number, stage in enumerate(stages):
        rank = str(trace.schedule.placement[number]) if number < trace.schedule.num_stages else "–"
        sizes = f"{int(stage['parameters']):,}", format_size(float(stage["bytes"]))
        layers = escape(", ".join(map(str, stage["layers"])))
        rows.append([str(number), rank, escape(str(devices[number])) or "–", *sizes, layers])
    if not rows:
        return "<p>The trace has no plan.</p>"
    return _table(["stage", "rank", "device", "parameters", "bytes", "layers"], rows, texts=[2, 5])


def _data(findings: Findings) -> dict[str, Any]:
    trace, simulation = findings.trace, findings.simulation
    shown = steps_shown(findings)
    simulated = {}
    if simulation is not None:
        for rank, order in enumerate(simulation.schedule.orders):
            times = zip(order, simulation.starts[rank], simulation.ends[rank], strict=True)
            simulated[rank] = [[*action, round(start, 9), round(end, 9)] for action, start, end in times]
    alike = set() if simulation is None else {id(step) for step in trace.typical_steps()}
    return {
        "many_stages": trace.schedule.num_stages > trace.schedule.num_ranks,
        "simulated": simulated,
        "step": shown.index(findings.step),
        "steps": [
            _step(trace, step, simulation.makespan if simulation is not None and id(step) in alike else None)
            for step in shown
        ],
    }


def _step(trace: TraceData, step: StepRecord, simulated: float | None) -> dict[str, Any]:
    """One step, in seconds since its first action; ``simulated`` is its simulated duration."""
    parts = step.of(range(len(trace.tracks)))
    zero = min(part.actions[0].start for part in parts)

    def since(moment: float) -> float:
        return round(moment - zero, 9)

    def row(done: ActionRecord) -> list[Any]:
        waits = [[w.peer, since(w.start), since(w.end), w.what] for w in done.waits if w.end > w.start]
        sent = sum(sent.bytes for sent in done.sends)
        return [*done.action, since(done.start), since(done.end), done.memory, sent, waits]

    def spans(part: RankRecord) -> list[Span]:
        return [span for span in part.host_spans if span.end > zero]

    rows = [
        {
            "name": rank_name(trace, part.track),
            "place": trace.tracks[part.track].place,
            "actions": [row(done) for done in part.actions],
            "spans": [[span.name, since(span.start), since(span.end)] for span in spans(part)],
        }
        for part in parts
    ]
    ends = [done.end - zero for part in parts for done in part.actions]
    ends += [span.end - zero for part in parts for span in spans(part)]
    length = max([*ends, simulated or 0.0])
    return {"name": step.name, "seconds": length, "has_simulation": simulated is not None, "rows": rows}
