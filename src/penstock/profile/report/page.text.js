// Two charts of one time span, view.from to view.to in seconds: the actions of ranks, and their memory.
// data.steps has the steps, now is the shown one. now.rows has a row per rank; an action is [stage, kind, micro-batch, start, end, memory, sent bytes, waits].
// This file has the text of actions and numbers, and their lookup. page.py joins page.text.js, page.chart.js and page.js.
const data = JSON.parse(document.getElementById("data").textContent);
const KINDS = { F: "forward", R: "recompute", B: "backward", I: "input gradient", W: "weight gradient" };
const AXIS = 22;
let now = data.steps[data.step];
let whole = Math.max(now.seconds, 1e-9);
const view = { from: 0, to: whole };
const charts = [];
const tip = document.getElementById("tip");
const announcement = document.getElementById("announcement");
let inks = {};

// ── words ────────────────────────────────────────────────────────────────────────────────────────────────
const clean = (number) => String(Number(number.toPrecision(4)));
const time = (s) => (s === 0 ? "0" : s >= 1 ? clean(s) + " s" : s >= 1e-3 ? clean(s * 1e3) + " ms" : clean(s * 1e6) + " µs");
const bytes = (n) => {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (n < 1024) return clean(n) + " " + unit;
    n /= 1024;
  }
  return clean(n) + " TiB";
};
const name = (a) => `${a[0]}${a[1]}${a[2]}`;
const waited = (a) => {
  let total = 0, until = -Infinity;
  for (const [, start, end] of [...(a[7] || [])].sort((x, y) => x[1] - y[1])) {
    total += Math.max(0, end - Math.max(start, until));
    until = Math.max(until, end);
  }
  return total;
};
const simulated = (row) => (now.has_simulation && data.simulated[row.place]) || [];
const twins = new Map(); // by row: the simulated actions, by name
function twin(at, action) { // the same action in the simulation
  const row = now.rows[at];
  if (!twins.has(row)) twins.set(row, new Map(simulated(row).map((a) => [name(a), a])));
  return twins.get(row).get(name(action));
}
function describe(at, action, isSimulated) {
  const row = now.rows[at];
  const lines = [`${name(action)} on ${row.name}${isSimulated ? ", simulated" : ""}`];
  lines.push(`${KINDS[action[1]]} of stage ${action[0]}, micro-batch ${action[2]}`);
  lines.push(`${time(action[3])} to ${time(action[4])}: takes ${time(action[4] - action[3])}`);
  if (isSimulated) return lines;
  const other = twin(at, action);
  if (other) lines.push(`simulated: from ${time(other[3])}, takes ${time(other[4] - other[3])}`);
  for (const [peer, start, end, what] of action[7]) {
    lines.push(`waited ${time(end - start)} ${what === "message" ? "for a message from" : "for the end of a send to"} stage ${peer}`);
  }
  if (action[6]) lines.push(`sent ${bytes(action[6])}`);
  if (action[5] !== null) lines.push(`memory after it ${bytes(action[5])}`);
  return lines;
}

// ── lookup ───────────────────────────────────────────────────────────────────────────────────────────────
function first(actions, moment) { // the first action that ends after a time
  let low = 0, high = actions.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (actions[mid][4] > moment) high = mid; else low = mid + 1;
  }
  return low;
}
