// The visible time span, the painting of both charts, the table, and initialization.
// ── the view ─────────────────────────────────────────────────────────────────────────────────────────────
let asked = false;
function redraw() {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; for (const chart of charts) chart.draw(); });
}
function look(from, span) {
  span = Math.max(whole * 1e-6, Math.min(whole, span));
  view.from = Math.max(0, Math.min(whole - span, from));
  view.to = view.from + span;
  redraw();
}
function zoom(by, around = (view.from + view.to) / 2) {
  const span = Math.max(whole * 1e-6, Math.min(whole, (view.to - view.from) * by));
  look(around - ((around - view.from) / (view.to - view.from)) * span, span);
}
const pan = (by) => look(view.from + by * (view.to - view.from), view.to - view.from);
const all = () => look(0, whole);
function show(lines, x, y) {
  tip.textContent = lines.join("\n");
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(window.innerWidth - width - 4, x + 12)) + "px";
  tip.style.top = (y + 16 + height > window.innerHeight ? Math.max(4, y - height - 12) : y + 16) + "px";
}
function hide() { tip.hidden = true; }

// ── painting of charts ───────────────────────────────────────────────────────────────────────────────────
const many = Math.max(...data.steps.map((step) => step.rows.length)) > 16;
const BAR = many ? 13 : 20;
const THIN = many ? 6 : 9;
const anySimulated = Object.keys(data.simulated).length > 0;
function bars(chart, pen, actions, y, height, labels, chosen) {
  let drawn = -1;
  for (let i = first(actions, view.from); i < actions.length && actions[i][3] < view.to; i++) {
    const [stage, kind, microbatch, start, end] = actions[i];
    const left = chart.x(start), right = chart.x(end);
    if (right - left < 1 && Math.floor(left) === drawn && i !== chosen) continue; // another action covers this pixel
    drawn = Math.floor(left);
    pen.fillStyle = inks[kind];
    pen.fillRect(left, y, Math.max(1, right - left - (right - left > 4 ? 1 : 0)), height);
    if (i === chosen) {
      pen.strokeStyle = inks.ink;
      pen.lineWidth = 2;
      pen.strokeRect(left, y + 1, Math.max(3, right - left), height - 2);
    }
    const text = (data.many_stages ? stage : "") + kind + microbatch;
    if (labels && right - left > 7 * text.length + 4) {
      pen.fillStyle = kind === "F" ? inks.on : inks["on-light"];
      pen.fillText(text, Math.max(left, chart.gutter) + 3, y + height / 2 + 0.5);
    }
  }
}
function paintActions(chart, pen, at, y) {
  const row = now.rows[at];
  pen.fillStyle = inks.span;
  for (const [, start, end] of row.spans) pen.fillRect(chart.x(start), y + 3, Math.max(1, chart.x(end) - chart.x(start)), BAR);
  pen.fillStyle = inks.wait;
  let drawn = -1;
  for (let i = first(row.actions, view.from); i < row.actions.length; i++) {
    for (const [, start, end] of row.actions[i][7]) {
      const left = chart.x(start), right = chart.x(end);
      if (right - left < 1 && Math.floor(left) === drawn) continue;
      drawn = Math.floor(left);
      pen.fillRect(left, y + 3 + BAR / 2 - 2, Math.max(1, right - left), 4);
    }
    if (row.actions[i][3] > view.to) break;
  }
  bars(chart, pen, row.actions, y + 3, BAR, BAR > 11, at === chart.row ? chart.chosen : null);
  pen.globalAlpha = 0.65;
  bars(chart, pen, simulated(row), y + 5 + BAR, THIN, false, null);
  pen.globalAlpha = 1;
}
function hitActions(chart, { row: at, x, y }) {
  const row = now.rows[at], moment = chart.moment(x);
  const onSimulated = now.has_simulation && y > BAR + 4;
  const actions = onSimulated ? simulated(row) : row.actions;
  const near = (view.to - view.from) / (chart.width - chart.gutter);
  const i = first(actions, moment - near);
  if (i < actions.length && actions[i][3] <= moment + near) return describe(at, actions[i], onSimulated);
  if (onSimulated) return [`${row.name}, simulated`, "idle"];
  const span = row.spans.find(([, start, end]) => start <= moment && moment <= end);
  if (span) return [row.name, `${span[0]}: ${time(span[2] - span[1])}`];
  if (i === actions.length) return [row.name, "idle after the last action"];
  const waits = actions[i][7].filter(([, start, end]) => start <= moment && moment <= end);
  const before = `idle before ${name(actions[i])}`;
  return [row.name, ...(waits.length ? waits.map(([peer, start, end, what]) =>
    `${before}: waits ${time(end - start)} ${what === "message" ? "for a message from" : "for the end of a send to"} stage ${peer}`)
    : [`${before}: no wait for a message`])];
}
let largest = 0;
for (const step of data.steps) for (const row of step.rows) for (const action of row.actions) largest = Math.max(largest, action[5] || 0);
const MEMORY = many ? 24 : 40;
function paintMemory(chart, pen, at, y) {
  const { actions } = now.rows[at];
  const base = y + MEMORY - 2;
  pen.fillStyle = inks.F;
  let drawn = -1, high = 0;
  for (let i = Math.max(0, first(actions, view.from) - 1); i < actions.length && actions[i][4] < view.to; i++) {
    const left = Math.floor(chart.x(actions[i][4]));
    const right = Math.floor(i + 1 < actions.length ? chart.x(actions[i + 1][4]) : chart.x(whole));
    const height = largest ? ((actions[i][5] || 0) / largest) * (MEMORY - 6) : 0;
    high = left === drawn ? Math.max(high, height) : height; // the maximum of each pixel
    pen.fillRect(left, base - high, Math.max(1, right - left), high);
    drawn = left;
  }
}
function hitMemory(chart, { row: at, x }) {
  const { actions, name: who } = now.rows[at];
  const i = first(actions, chart.moment(x)) - 1;
  if (i < 0 || actions[i][5] === null) return null;
  return [`${who}: ${bytes(actions[i][5])}`, `after ${name(actions[i])}, from ${time(actions[i][4])}`];
}

// ── the table ────────────────────────────────────────────────────────────────────────────────────────────
const details = document.getElementById("table");
const pick = document.getElementById("table-rank");
const body = document.getElementById("table-rows");
const more = document.getElementById("table-more");
function fill() {
  const at = Number(pick.value), { actions } = now.rows[at];
  const here = body.rows.length;
  for (const action of actions.slice(here, here + 500)) {
    const other = twin(at, action);
    const cells = [name(action), time(action[3]), time(action[4]), time(action[4] - action[3]), time(waited(action)),
      other ? `${time(other[3])} to ${time(other[4])}` : "", action[6] ? bytes(action[6]) : "", action[5] === null ? "" : bytes(action[5])];
    const line = body.insertRow();
    for (const cell of cells) line.insertCell().textContent = cell;
  }
  more.hidden = body.rows.length >= actions.length;
}
function restart() { body.replaceChildren(); if (details.open) fill(); }
function names() { // lists the ranks of the step; the selection stays
  const before = pick.selectedOptions[0]?.text;
  pick.replaceChildren(...now.rows.map((row, at) => new Option(row.name, at, false, row.name === before)));
}
names();
details.addEventListener("toggle", restart);
pick.addEventListener("change", restart);
more.addEventListener("click", fill);

// ── another step ─────────────────────────────────────────────────────────────────────────────────────────
const chooser = document.getElementById("step"); // null if the trace has one step
const times = document.getElementById("step-times");
function mark() {
  const number = data.steps.indexOf(now);
  for (const bar of times ? times.querySelectorAll("[data-step]") : []) {
    bar.classList.toggle("chosen", bar.dataset.step === String(number));
  }
}
function go(number) {
  now = data.steps[number];
  whole = Math.max(now.seconds, 1e-9);
  chooser.value = number;
  hide();
  mark();
  for (const chart of charts) chart.restart();
  names();
  restart();
  all();
  announcement.textContent = chooser.selectedOptions[0].textContent;
}
function turn(by) {
  const number = data.steps.indexOf(now) + by;
  if (data.steps[number]) go(number);
}
if (chooser) {
  chooser.addEventListener("change", () => go(Number(chooser.value)));
  times.addEventListener("click", ({ clientX }) => { // the nearest bar that has a timeline
    let best = null, near = Infinity;
    for (const bar of times.querySelectorAll("[data-step]")) {
      const { left, right } = bar.getBoundingClientRect();
      const apart = Math.abs((left + right) / 2 - clientX);
      if (apart < near) [best, near] = [bar, apart];
    }
    go(Number(best.dataset.step));
  });
}
mark();

// ── initialization ───────────────────────────────────────────────────────────────────────────────────────
function colours() {
  const style = getComputedStyle(document.documentElement);
  for (const one of ["paper", "ink", "soft", "line", "mark", "F", "B", "I", "W", "R", "on", "on-light", "wait", "span"]) {
    inks[one] = style.getPropertyValue("--" + one).trim();
  }
}
function resize() { for (const chart of charts) chart.size(); redraw(); }
colours();
new Chart("timeline-chart", BAR + (anySimulated ? THIN + 2 : 0) + 7, paintActions, hitActions);
new Chart("memory-chart", MEMORY, paintMemory, hitMemory);
const does = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => pan(-0.25), right: () => pan(0.25), all,
  before: () => turn(-1), after: () => turn(1) };
for (const button of document.querySelectorAll("button[data-do]")) button.addEventListener("click", does[button.dataset.do]);
window.addEventListener("resize", resize);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours(); redraw(); });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
resize();
