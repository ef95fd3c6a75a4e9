"""The page in a real browser: it draws, zooms, pans, says what is under the mouse, and the console is silent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.profile.report.findings import analyze
from penstock.profile.report.page import page
from penstock.profile.trace.records import Span
from penstock.schedule import Costs
from tests.profile.test_report import plan, traced
from tests.profile.test_report_page import HOSTILE, several, uneven
from tests.profile.test_trace_files import example
from tests.support.browser import Browser, chromium

PROGRAM = chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no chromium here: apt-get install chromium")

CANVAS = "document.querySelector('#timeline-chart canvas')"
TIP = "document.getElementById('tip')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    found = Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _content(browser: Browser) -> Iterator[None]:
    yield
    assert browser.messages == []
    assert [url for url in browser.requested_urls if not url.startswith(("file:", "data:"))] == []


def show(browser: Browser, trace: ps.Trace, folder: Path, **options: Any) -> None:
    path = folder / "page.html"
    path.write_text(page(analyze(trace)), "utf-8")
    browser.open(path, **options)
    browser.wait_for_frame()
    assert span(browser) > 0


def view(browser: Browser) -> tuple[float, float]:
    return tuple(browser.run(f"[Number({CANVAS}.dataset.from), Number({CANVAS}.dataset.to)]"))


def span(browser: Browser) -> float:
    begin, end = view(browser)
    return end - begin


def place(browser: Browser, share: float, row: int = 0, high: float = 10.0) -> tuple[float, float]:
    """A point in the timeline: a share of its width, so many pixels below the top of a rank's row."""
    browser.run(f"{CANVAS}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    browser.wait_for_frame()
    x, y, width = browser.run(f"((box) => [box.x, box.y, box.width])({CANVAS}.getBoundingClientRect())")
    gutter = 58 if width < 600 else 92
    return x + gutter + share * (width - gutter), y + 22 + 38 * row + high


def pixel(browser: Browser, share: float, row: int = 0, high: float = 10.0) -> list[int]:
    x, y = place(browser, share, row, high)
    left, top = browser.run(f"((box) => [box.x, box.y])({CANVAS}.getBoundingClientRect())")
    code = f"""(() => {{
        const one = new OffscreenCanvas(1, 1).getContext("2d", {{ willReadFrequently: true }});
        one.drawImage({CANVAS}, {x - left}, {y - top}, 1, 1, 0, 0, 1, 1);
        return [...one.getImageData(0, 0, 1, 1).data];
    }})()"""
    return list(browser.run(code))


def tip(browser: Browser) -> str | None:
    return browser.run(f"{TIP}.hidden ? null : {TIP}.textContent")


def test_content(browser: Browser, tmp_path: Path) -> None:
    trace = uneven()
    show(browser, trace, tmp_path)
    headings = browser.run("[...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert headings == [
        "Advice", "Timeline of a step", "Bubble by cause", "Memory", "Balance of stages", "Edges", "Plan",
    ]  # fmt: skip
    advice = browser.run("[...document.querySelectorAll('#advice li')].map((li) => li.innerText)")
    assert [text.split(maxsplit=1)[1] for text in advice if "≤" not in text] == [
        one.text for one in analyze(trace).advice if not one.bound
    ]
    bars = browser.run("[...document.querySelectorAll('#bubble .stack')].map((b) => b.getBoundingClientRect().width)")
    assert len(bars) == 3
    assert min(bars) > 100


def test_bars_are_where_actions_are(browser: Browser, tmp_path: Path) -> None:
    """0F0 is the first sixth of the step, 0B0 the last quarter, and between them rank 0 waits from 1.5 to 4.5."""
    show(browser, example(), tmp_path)
    assert view(browser) == (0, 6)
    assert pixel(browser, 0.5 / 6, high=20) == [0x00, 0x72, 0xB2, 255]
    assert pixel(browser, 5.2 / 6, high=20) == [0xD5, 0x5E, 0x00, 255]
    assert pixel(browser, 3 / 6, high=13) == [0x8B, 0x94, 0x9E, 255]
    assert pixel(browser, 1.2 / 6, high=13)[3] == 0
    assert pixel(browser, 2.2 / 6, row=1, high=20) == [0x00, 0x72, 0xB2, 255]
    browser.run("document.querySelector('button[data-do=in]').click()")
    browser.run("document.querySelector('button[data-do=in]').click()")
    browser.wait_for_frame()
    assert pixel(browser, 0.01, row=1, high=20) == [0x00, 0x72, 0xB2, 255]
    assert pixel(browser, -0.01, row=1, high=20)[3] == 0  # what began before stays within the chart
    browser.run("document.querySelector('button[data-do=all]').click()")
    browser.wait_for_frame()
    faint = pixel(browser, 5.2 / 6, high=30)  # simulated
    assert faint[:3] != [0, 0, 0]
    assert 150 < faint[3] < 180


def test_hover(browser: Browser, tmp_path: Path) -> None:
    show(browser, example(), tmp_path)
    browser.mouse("mouseMoved", *place(browser, 5 / 6))
    assert tip(browser) == (
        "0B0 on rank 0\nbackward of stage 0, micro-batch 0\n4.5 s to 6 s: takes 1.5 s\n"
        "simulated: from 4.5 s, takes 1.5 s\nwaited 3 s for a message from stage 1\nmemory after it 0 B"
    )
    browser.mouse("mouseMoved", *place(browser, 3 / 6))
    assert tip(browser) == "rank 0\nidle before 0B0: waits 3 s for a message from stage 1"
    browser.mouse("mouseMoved", *place(browser, 1.2 / 6))
    assert tip(browser) == "rank 0\nidle before 0B0: no wait for a message"
    browser.mouse("mouseMoved", *place(browser, 0.5 / 6, high=30))
    assert (tip(browser) or "").startswith("0F0 on rank 0, simulated\n")
    browser.mouse("mouseMoved", *place(browser, 5.5 / 6, row=1))
    assert tip(browser) == "rank 1\nidle after the last action"
    browser.mouse("mouseMoved", 5, 5)
    assert tip(browser) is None


def test_zoom_and_pan_with_a_mouse(browser: Browser, tmp_path: Path) -> None:
    show(browser, uneven(), tmp_path)
    begin, end = view(browser)
    x, y = place(browser, 0.25)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-300)
    near, far = view(browser)
    assert far - near == pytest.approx((end - begin) / 2.718281828, rel=1e-3)
    assert near + 0.25 * (far - near) == pytest.approx(0.25 * end, rel=1e-2)  # what is under the mouse stays there
    browser.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
    browser.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    browser.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    later, _ = view(browser)
    assert later > near
    assert span(browser) == pytest.approx(far - near)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=3000)
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=3000)
    assert view(browser) == (begin, end)


def test_zoom_and_pan_with_keys_and_buttons(browser: Browser, tmp_path: Path) -> None:
    show(browser, uneven(), tmp_path)
    begin, end = view(browser)
    browser.run(f"{CANVAS}.focus()")
    browser.press_key("+")
    near, far = view(browser)
    assert far - near == pytest.approx(0.6 * end)
    browser.press_key("ArrowRight")
    assert view(browser)[0] == pytest.approx(near + 0.06 * end)
    browser.press_key("ArrowLeft")
    browser.press_key("-")
    assert view(browser) == pytest.approx((begin, end))
    for name, size in (("in", 0.6), ("in", 0.36), ("left", 0.36), ("out", 0.6), ("all", 1.0)):
        browser.run(f"document.querySelector('button[data-do={name}]').click()")
        browser.wait_for_frame()
        assert span(browser) == pytest.approx(size * end)
    for _ in range(60):
        browser.run("document.querySelector('button[data-do=in]').click()")
    browser.wait_for_frame()
    assert 0 < span(browser) < 1e-5 * end
    browser.press_key("0")
    assert view(browser) == (begin, end)


def test_actions_one_by_one_with_keys(browser: Browser, tmp_path: Path) -> None:
    show(browser, example(), tmp_path)
    browser.run(f"{CANVAS}.focus()")
    names = []
    for key in ("n", "n", "n", "p", "ArrowDown", "n"):
        browser.press_key(key)
        names.append((tip(browser) or "").split("\n")[0])
    assert names[:4] == ["0F0 on rank 0", "0B0 on rank 0", "0B0 on rank 0", "0F0 on rank 0"]
    assert names[5] == "1F0 on rank 1"
    announced = browser.run("document.getElementById('announcement').textContent")
    assert announced.startswith("1F0 on rank 1, forward of stage 1")
    browser.press_key("Escape")
    assert tip(browser) is None


def test_the_same_as_a_table(browser: Browser, tmp_path: Path) -> None:
    show(browser, example(), tmp_path)
    browser.run("document.getElementById('table').open = true")
    browser.wait_until("document.querySelectorAll('#table-rows tr').length === 2")
    cells = browser.run("[...document.querySelectorAll('#table-rows tr:last-child td')].map((td) => td.textContent)")
    assert cells == ["0B0", "4.5 s", "6 s", "1.5 s", "3 s", "4.5 s to 6 s", "", "0 B"]
    browser.run("document.getElementById('table-rank').value = 1")
    browser.run("document.getElementById('table-rank').dispatchEvent(new Event('change'))")
    assert browser.run("document.querySelector('#table-rows td').textContent") == "1F0"


# ── several steps ────────────────────────────────────────────────────────────────────────────────────────────


def chosen(browser: Browser) -> tuple[str, float]:
    """The step that is chosen, and how much time its timeline has."""
    browser.wait_for_frame()
    return browser.run("document.getElementById('step').selectedOptions[0].text"), round(span(browser), 6)


STEPS = [
    ("step 0: 6.50 s (median)", 6.0),
    ("step 1: 13.00 s (slowest)", 12.0),
    ("step 2: 5.85 s", 5.875),
    ("evaluate 3: 3.25 s (fastest)", 1.5),
]


def test_a_step_is_chosen(browser: Browser, tmp_path: Path) -> None:
    show(browser, several(), tmp_path)
    options = browser.run("[...document.getElementById('step').options].map((option) => option.text)")
    assert options == [name for name, _ in STEPS]
    assert chosen(browser) == STEPS[0]
    browser.run("document.getElementById('step').focus()")
    browser.press_key("ArrowDown")
    assert chosen(browser) == STEPS[1]
    for name, at in (("after", 2), ("after", 3), ("after", 3), ("before", 2)):
        browser.run(f"document.querySelector('button[data-do={name}]').click()")
        assert chosen(browser) == STEPS[at]
    browser.run(f"{CANVAS}.focus()")
    for key, at in (("s", 3), ("s", 3), ("S", 2), ("S", 1), ("S", 0), ("S", 0)):
        browser.press_key(key)
        assert chosen(browser) == STEPS[at]
    assert browser.run("document.getElementById('announcement').textContent") == STEPS[0][0]
    bar = "document.querySelector('#step-times [data-step=\"1\"]')"
    x, y, width, height = browser.run(f"((b) => [b.x, b.y, b.width, b.height])({bar}.getBoundingClientRect())")
    assert height == pytest.approx(40, abs=1)
    for kind in ("mousePressed", "mouseReleased"):
        browser.mouse(kind, x + width / 2, y + height / 2, button="left", clickCount=1)
    assert chosen(browser) == STEPS[1]
    assert browser.run("[...document.querySelectorAll('#step-times .chosen')].map((bar) => bar.dataset.step)") == ["1"]


def test_all_is_of_the_step_that_is_chosen(browser: Browser, tmp_path: Path) -> None:
    show(browser, several(), tmp_path)
    browser.run("document.getElementById('table').open = true")
    browser.run("document.getElementById('table-rank').value = 1")
    browser.run("document.getElementById('table-rank').dispatchEvent(new Event('change'))")
    browser.run(f"{CANVAS}.focus()")
    browser.press_key("+")
    browser.press_key("s")
    assert view(browser) == (0, 12)
    browser.mouse("mouseMoved", *place(browser, 10 / 12))
    assert (tip(browser) or "").startswith(
        "0B0 on rank 0\nbackward of stage 0, micro-batch 0\n9 s to 12 s: takes 3 s\nsimulated: from "
    )
    two = "(row) => [row.cells[0].innerText, row.cells[1].innerText]"
    rows = f"[...document.querySelectorAll('#table-rows tr')].map({two})"
    assert browser.run(rows) == [["1F0", "3 s"], ["1B0", "6 s"]]  # the same rank, of another step
    assert pixel(browser, 1 / 12, high=20) == [0x00, 0x72, 0xB2, 255]
    assert pixel(browser, 11 / 12, high=20) == [0xD5, 0x5E, 0x00, 255]
    browser.press_key("s")
    browser.press_key("s")  # a forward without gradients, which was not simulated
    browser.run(f"{CANVAS}.blur()")
    assert browser.run(rows) == [["1F0", "750 ms"]]
    browser.mouse("mouseMoved", *place(browser, 0.25 / 1.5))
    assert "simulated" not in (tip(browser) or "simulated")
    assert pixel(browser, 0.25 / 1.5, high=30)[3] == 0


def test_one_step_has_nothing_to_choose(browser: Browser, tmp_path: Path) -> None:
    show(browser, example(), tmp_path)
    assert browser.run("document.getElementById('step')") is None
    browser.run(f"{CANVAS}.focus()")
    browser.press_key("s")
    assert view(browser) == (0, 6)


def test_tab_goes_through_all_in_order_and_shows_where(browser: Browser, tmp_path: Path) -> None:
    show(browser, several(), tmp_path)
    browser.run("document.activeElement.blur()")
    found = []
    who = "((e) => e.id || e.dataset.do || e.getAttribute('href') || e.parentElement.id)(document.activeElement)"
    for _ in range(24):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
        found.append(browser.run(who))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", found
        if found[-1] == "memory-chart":
            break
    links = [f"#{name}" for name in ("advice", "advice", "timeline", "bubble", "memory", "stages", "edges", "plan")]
    tools = ["before", "after", "in", "out", "left", "right", "all"]
    assert found == [*links, "step", *tools, "timeline-chart", "table", "memory-chart"]


def test_dark_and_light(browser: Browser, tmp_path: Path) -> None:
    grounds = []
    for dark in (False, True):
        show(browser, example(), tmp_path, dark=dark)
        grounds.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(13, 17, 23)"]
    assert pixel(browser, 0.5 / 6, high=20) == [0x3B, 0x9D, 0xDB, 255]


def test_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    show(browser, uneven(), tmp_path, width=360, height=640, touch=True)
    assert browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.run(f"{CANVAS}.getBoundingClientRect().width") <= 360
    heights = browser.run("[...document.querySelectorAll('button[data-do]')].map((button) => button.offsetHeight)")
    assert min(heights) >= 40  # for fingers


def test_hostile_names_are_shown_as_they_are(browser: Browser, tmp_path: Path) -> None:
    names = plan([HOSTILE, *"bcdef"], ["g", "h"], ["i"])
    trace = uneven()
    show(browser, replace(trace, plan=names, schedule=replace(trace.schedule, name=HOSTILE)), tmp_path)
    assert browser.run("document.images.length") == 0
    assert HOSTILE in browser.run("document.querySelector('#plan td:last-child').textContent")
    assert HOSTILE in browser.run("document.querySelector('h1').textContent")
    trace = example()
    first, second = trace.steps[0].parts
    parts = (first, replace(second, spans=(Span(HOSTILE, 4.2, 5.0),)))
    show(browser, replace(trace, steps=(replace(trace.steps[0], parts=parts),)), tmp_path)
    browser.mouse("mouseMoved", *place(browser, 4.6 / 6, row=1))
    assert tip(browser) == f"rank 1\n{HOSTILE}: 800 ms"


@pytest.mark.slow
def test_many_ranks_and_actions(browser: Browser, tmp_path: Path) -> None:
    """64 ranks with 200 actions each: all rows can be reached, and a frame takes no time that anybody sees."""
    show(browser, traced("1f1b", 64, 100, Costs(f=1e-3, i=1e-3, w=1e-3)), tmp_path)
    assert browser.run(f"{CANVAS}.height") <= 900
    browser.run(f"{CANVAS}.focus()")
    for _ in range(63):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowDown")
    browser.press_key("n")
    assert (tip(browser) or "").startswith("63F0 on rank 63\n")
    took = browser.run(
        "new Promise((done) => { const t = performance.now(); document.querySelector('button[data-do=in]').click();"
        " requestAnimationFrame(() => setTimeout(() => done(performance.now() - t))); })"
    )
    assert took < 3000
