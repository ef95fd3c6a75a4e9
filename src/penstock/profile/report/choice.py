"""The steps that a page shows: how long each took, and which of them have a timeline on it.

▂▂▃▂▂▂█▂▂▂▂▁▂▂    a bar for each step; a page of many has timelines of the middle one, the slowest, the fastest,
    ^ ^    ^      those that failed, and of others at even distances
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.profile.report.findings import Findings
from penstock.profile.trace.steps import Step
from penstock.profile.trace.words import counted, milliseconds

__all__ = ["MOST_ACTIONS", "chosen", "picker", "step_name"]

MOST_ACTIONS = 10_000
"""Of all timelines on a page together, unless one step has more: about a megabyte."""

_COLUMNS = 400  # of bars: of more steps, one shows the slowest of several
_HIGH = 40


def chosen(findings: Findings) -> list[Step]:
    """The steps with a timeline, in their order. The one that the page is about is always among them."""
    steps = [step for step in findings.trace.steps if _size(step)]
    places = {id(step): place for place, step in enumerate(steps)}
    found, room = {places[id(findings.step)]}, MOST_ACTIONS - _size(findings.step)
    times = sorted(range(len(steps)), key=lambda place: steps[place].seconds)
    failed = (place for place, step in enumerate(steps) if step.failed)
    for place in dict.fromkeys([times[-1], times[0], *failed, *_spread(len(steps))]):
        if place not in found and _size(steps[place]) <= room:
            found.add(place)
            room -= _size(steps[place])
    return [steps[place] for place in sorted(found)]


def step_name(step: Step) -> str:
    """As in ``step 3``, or ``evaluate 4 (failed)``."""
    return f"{step.kind} {step.number}" + (" (failed)" if step.failed else "")


def picker(findings: Findings) -> str:
    """What a step is chosen with; nothing where there is one only."""
    all_steps = [step for step in findings.trace.steps if step.parts]
    shown = chosen(findings)
    if len(all_steps) < 2:
        return ""
    ends = {id(f(all_steps, key=lambda step: step.seconds)): word for f, word in ((max, "slowest"), (min, "fastest"))}
    options = []
    for number, step in enumerate(shown):
        about = [*(["the middle one"] if step is findings.step else []), *filter(None, [ends.get(id(step))])]
        text = f"{step_name(step)}: {milliseconds(step.seconds)}" + (f" ({', '.join(about)})" if about else "")
        selected = " selected" if step is findings.step else ""
        options.append(f'<option value="{number}"{selected}>{escape(text)}</option>')
    here = {id(step): number for number, step in enumerate(shown)}
    each = -(-len(all_steps) // _COLUMNS)
    words = "Each bar is a step" if each == 1 else f"Each bar is the slowest of {each} steps"
    words += f": {counted(len(all_steps), 'step')} of "
    words += " to ".join(milliseconds(f(step.seconds for step in all_steps)) for f in (min, max))
    if len(shown) < len(all_steps):
        words += (
            f". {len(shown)} of them, in colour, have a timeline here: a page has timelines of about {MOST_ACTIONS:,} "
            "actions"
        )
    return (
        '<div class="bar-of-tools"><label>Step <select id="step">' + "".join(options) + "</select></label>"
        '<div role="group" aria-label="Step" class="buttons">'
        '<button type="button" data-do="before" aria-label="Previous step">‹</button> '
        '<button type="button" data-do="after" aria-label="Next step">›</button></div></div>'
        + _bars([(step.seconds, here.get(id(step))) for step in all_steps], each, words)
        + f'<p class="note">{escape(words)}. The rest of this page is of {escape(step_name(findings.step))}.</p>'
    )


def _bars(steps: Sequence[tuple[float, int | None]], each: int, words: str) -> str:
    """The times of so many steps each; those with a number can be chosen."""
    groups = [steps[i : i + each] for i in range(0, len(steps), each)]
    most = max(seconds for seconds, _ in steps) or 1.0
    bars = []
    for x, group in enumerate(groups):
        height = max(seconds for seconds, _ in group) / most * _HIGH
        numbers = [number for _, number in group if number is not None]
        place = f'x="{x + 0.1}" y="{_HIGH - height:.2f}" width="0.8" height="{height:.2f}"'
        shown = f' data-step="{numbers[0]}" data-last="{numbers[-1]}"' if numbers else ""
        bars.append(f"<rect {place}{shown}/>")
    return (
        f'<svg id="step-times" role="img" aria-label="{escape(words)}" viewBox="0 0 {max(len(groups), 8)} {_HIGH}" '
        f'preserveAspectRatio="none">{"".join(bars)}</svg>'
    )


def _size(step: Step) -> int:
    return sum(len(part.actions) for part in step.parts)


def _spread(count: int) -> list[int]:
    """All numbers below ``count``, in an order of which any beginning is even: 0, 4, 2, 6, 1, 5, 3, 7."""
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2))
