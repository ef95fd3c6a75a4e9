"use strict";
// Two charts over one stretch of time, view.from to view.to in seconds: who does what, and what is kept.
// data.rows has a row for each rank; an action is [stage, kind, micro-batch, start, end, memory, sent bytes, waits].
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const KINDS = { F: "forward", R: "recompute", B: "backward", I: "input gradient", W: "weight gradient" };
  const AXIS = 22;
  const whole = Math.max(data.seconds, 1e-9);
  const view = { from: 0, to: whole };
  const charts = [];
  const tip = document.getElementById("tip");
  const said = document.getElementById("said");
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
  const simulated = (row) => data.simulated[row.place] || [];
  const twins = data.rows.map(() => null);
  function twin(at, action) { // the same action, simulated
    twins[at] = twins[at] || new Map(simulated(data.rows[at]).map((a) => [name(a), a]));
    return twins[at].get(name(action));
  }
  function describe(at, action, paper) {
    const row = data.rows[at];
    const lines = [`${name(action)} on ${row.name}${paper ? ", simulated" : ""}`];
    lines.push(`${KINDS[action[1]]} of stage ${action[0]}, micro-batch ${action[2]}`);
    lines.push(`${time(action[3])} to ${time(action[4])}: takes ${time(action[4] - action[3])}`);
    if (paper) return lines;
    const other = twin(at, action);
    if (other) lines.push(`simulated: from ${time(other[3])}, takes ${time(other[4] - other[3])}`);
    for (const [peer, start, end, what] of action[7]) {
      lines.push(`waited ${time(end - start)} ${what === "message" ? "for stage" : "until it was sent to stage"} ${peer}`);
    }
    if (action[6]) lines.push(`sent ${bytes(action[6])}`);
    if (action[5] !== null) lines.push(`memory after it ${bytes(action[5])}`);
    return lines;
  }

  // ── finding ──────────────────────────────────────────────────────────────────────────────────────────────
  function first(actions, moment) { // the first that ends after a moment
    let low = 0, high = actions.length;
    while (low < high) {
      const mid = (low + high) >> 1;
      if (actions[mid][4] > moment) high = mid; else low = mid + 1;
    }
    return low;
  }

  // ── charts ───────────────────────────────────────────────────────────────────────────────────────────────
  class Chart {
    constructor(id, height, paint, hit) {
      this.box = document.getElementById(id);
      this.canvas = this.box.querySelector("canvas");
      this.height = height;
      this.paint = paint;
      this.hit = hit;
      this.space = document.createElement("div");
      this.box.append(this.space);
      this.row = 0;
      this.chosen = null; // the number of an action in this.row
      this.listen();
      charts.push(this);
    }
    get gutter() { return this.width < 600 ? 58 : 92; }
    x(moment) { return this.gutter + ((moment - view.from) / (view.to - view.from)) * (this.width - this.gutter); }
    moment(x) { return view.from + ((x - this.gutter) / (this.width - this.gutter)) * (view.to - view.from); }
    size() {
      const full = AXIS + data.rows.length * this.height;
      this.width = this.box.clientWidth;
      this.tall = Math.min(full, Math.max(160, Math.floor(window.innerHeight * 0.72)));
      this.space.style.height = full - this.tall + "px";
      this.box.style.height = this.tall + 2 + "px"; // and its border
      const ratio = window.devicePixelRatio || 1;
      this.canvas.style.height = this.tall + "px";
      this.canvas.width = Math.round(this.width * ratio);
      this.canvas.height = Math.round(this.tall * ratio);
      this.ratio = ratio;
    }
    draw() {
      const pen = this.canvas.getContext("2d");
      pen.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      pen.clearRect(0, 0, this.width, this.tall);
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const top = this.box.scrollTop;
      const from = Math.floor(top / this.height);
      const to = Math.min(data.rows.length, Math.ceil((top + this.tall) / this.height));
      for (let at = from; at < to; at++) {
        const y = AXIS + at * this.height - top;
        pen.save();
        pen.beginPath();
        pen.rect(this.gutter, y, this.width - this.gutter, this.height);
        pen.clip();
        this.paint(this, pen, at, y);
        pen.restore();
        pen.fillStyle = at === this.row && document.activeElement === this.canvas ? inks.mark : inks.ink;
        pen.fillText(data.rows[at].name, 6, y + this.height / 2, this.gutter - 10);
        pen.fillStyle = inks.line;
        pen.fillRect(0, y + this.height - 1, this.width, 1);
      }
      this.axis(pen);
      this.canvas.dataset.from = view.from;
      this.canvas.dataset.to = view.to;
    }
    axis(pen) {
      pen.fillStyle = inks.paper;
      pen.fillRect(0, 0, this.width, AXIS);
      const span = view.to - view.from;
      const rough = span / Math.max(2, (this.width - this.gutter) / 110);
      const power = 10 ** Math.floor(Math.log10(rough));
      const pace = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
      pen.fillStyle = inks.soft;
      for (let t = Math.ceil(view.from / pace) * pace; t <= view.to; t += pace) {
        const x = this.x(t);
        pen.fillRect(x, AXIS - 5, 1, 5);
        if (x < this.width - 40) pen.fillText(time(Math.max(0, Math.round(t / pace) * pace)), x + 3, 9);
      }
      pen.fillStyle = inks.line;
      pen.fillRect(0, AXIS - 1, this.width, 1);
    }
    at(event) { // the row and the place in it
      const box = this.canvas.getBoundingClientRect();
      const y = event.clientY - box.top - AXIS + this.box.scrollTop;
      const row = Math.floor(y / this.height);
      const x = event.clientX - box.left;
      return event.clientY - box.top < AXIS || row < 0 || row >= data.rows.length || x < this.gutter
        ? null : { row, x, y: y - row * this.height };
    }
    listen() {
      const { canvas } = this;
      const fingers = new Map();
      canvas.addEventListener("wheel", (event) => {
        const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
        if (sideways) {
          event.preventDefault();
          pan((event.deltaX || event.deltaY) / (this.width - this.gutter));
        } else if (event.deltaY < 0 || view.to - view.from < whole) { // zoomed out, the page scrolls on
          event.preventDefault();
          const by = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
          zoom(by, this.moment(event.clientX - canvas.getBoundingClientRect().left));
        }
      }, { passive: false });
      canvas.addEventListener("pointerdown", (event) => {
        fingers.set(event.pointerId, event);
        canvas.setPointerCapture(event.pointerId);
      });
      for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => fingers.delete(event.pointerId));
      canvas.addEventListener("pointermove", (event) => {
        const before = fingers.get(event.pointerId);
        if (before) {
          const width = this.width - this.gutter;
          if (fingers.size === 2) {
            const [other] = [...fingers].filter(([id]) => id !== event.pointerId).map(([, finger]) => finger);
            const apart = (finger) => Math.max(20, Math.abs(finger.clientX - other.clientX));
            zoom(apart(before) / apart(event), this.moment(other.clientX - canvas.getBoundingClientRect().left));
          } else {
            pan((before.clientX - event.clientX) / width);
            if (event.pointerType === "mouse") this.box.scrollTop += before.clientY - event.clientY;
          }
          fingers.set(event.pointerId, event);
        }
        const place = this.at(event);
        const lines = place && this.hit(this, place);
        if (lines) show(lines, event.clientX, event.clientY); else hide();
      });
      canvas.addEventListener("pointerleave", hide);
      canvas.addEventListener("blur", () => { hide(); this.draw(); });
      canvas.addEventListener("focus", () => this.draw());
      canvas.addEventListener("keydown", (event) => this.key(event));
      this.box.addEventListener("scroll", () => this.draw());
    }
    key(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const keys = {
        ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), ArrowUp: () => this.choose(-1), ArrowDown: () => this.choose(1),
        "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), _: () => zoom(1 / 0.6),
        0: all, Home: all, n: () => this.next(1), p: () => this.next(-1), Escape: hide,
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    }
    choose(by) {
      this.row = Math.max(0, Math.min(data.rows.length - 1, this.row + by));
      this.chosen = null;
      const y = this.row * this.height;
      if (y < this.box.scrollTop) this.box.scrollTop = y;
      if (y + this.height + AXIS > this.box.scrollTop + this.tall) this.box.scrollTop = y + this.height + AXIS - this.tall;
      said.textContent = data.rows[this.row].name;
      this.draw();
    }
    next(by) {
      const { actions } = data.rows[this.row];
      if (!actions.length) return;
      const start = by > 0 ? first(actions, view.from) : first(actions, view.to) - 1;
      this.chosen = Math.max(0, Math.min(actions.length - 1, this.chosen === null ? start : this.chosen + by));
      const action = actions[this.chosen];
      if (action[3] < view.from || action[4] > view.to) {
        const span = Math.max(view.to - view.from, (action[4] - action[3]) * 1.2);
        look((action[3] + action[4] - span) / 2, span);
      }
      this.draw();
      const box = this.canvas.getBoundingClientRect();
      const y = box.top + AXIS + (this.row + 1) * this.height - this.box.scrollTop;
      const lines = describe(this.row, action, false);
      show(lines, box.left + this.x((action[3] + action[4]) / 2), y);
      said.textContent = lines.join(", ");
    }
  }

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

  // ── what each chart paints ───────────────────────────────────────────────────────────────────────────────
  const many = data.rows.length > 16;
  const BAR = many ? 13 : 20;
  const THIN = many ? 6 : 9;
  const paper = Object.keys(data.simulated).length > 0;
  function bars(chart, pen, actions, y, height, labels, chosen) {
    let drawn = -1;
    for (let i = first(actions, view.from); i < actions.length && actions[i][3] < view.to; i++) {
      const [stage, kind, microbatch, start, end] = actions[i];
      const left = chart.x(start), right = chart.x(end);
      if (right - left < 1 && Math.floor(left) === drawn && i !== chosen) continue; // another has this pixel
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
        pen.fillStyle = kind === "I" ? inks["on-light"] : inks.on;
        pen.fillText(text, Math.max(left, chart.gutter) + 3, y + height / 2 + 0.5);
      }
    }
  }
  function paintActions(chart, pen, at, y) {
    const row = data.rows[at];
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
    const row = data.rows[at], moment = chart.moment(x);
    const onPaper = paper && y > BAR + 4;
    const actions = onPaper ? simulated(row) : row.actions;
    const near = (view.to - view.from) / (chart.width - chart.gutter);
    const i = first(actions, moment - near);
    if (i < actions.length && actions[i][3] <= moment + near) return describe(at, actions[i], onPaper);
    if (onPaper) return [`${row.name}, simulated`, "idle"];
    const span = row.spans.find(([, start, end]) => start <= moment && moment <= end);
    if (span) return [row.name, `${span[0]}: ${time(span[2] - span[1])}`];
    if (i === actions.length) return [row.name, "idle: done with its actions"];
    const waits = actions[i][7].filter(([, start, end]) => start <= moment && moment <= end);
    const before = `idle before ${name(actions[i])}`;
    return [row.name, ...(waits.length ? waits.map(([peer, start, end, what]) =>
      `${before}: waits ${time(end - start)} ${what === "message" ? "for a message of" : "until a message is over to"} stage ${peer}`)
      : [`${before}: nothing is waited for`])];
  }
  let largest = 0;
  for (const row of data.rows) for (const action of row.actions) largest = Math.max(largest, action[5] || 0);
  const MEMORY = many ? 24 : 40;
  function paintMemory(chart, pen, at, y) {
    const { actions } = data.rows[at];
    const base = y + MEMORY - 2;
    pen.fillStyle = inks.F;
    let drawn = -1, high = 0;
    for (let i = Math.max(0, first(actions, view.from) - 1); i < actions.length && actions[i][4] < view.to; i++) {
      const left = Math.floor(chart.x(actions[i][4]));
      const right = Math.floor(i + 1 < actions.length ? chart.x(actions[i + 1][4]) : chart.x(whole));
      const height = largest ? ((actions[i][5] || 0) / largest) * (MEMORY - 6) : 0;
      high = left === drawn ? Math.max(high, height) : height; // of all in one pixel, the highest
      pen.fillRect(left, base - high, Math.max(1, right - left), high);
      drawn = left;
    }
  }
  function hitMemory(chart, { row: at, x }) {
    const { actions, name: who } = data.rows[at];
    const i = first(actions, chart.moment(x)) - 1;
    if (i < 0 || actions[i][5] === null) return null;
    return [`${who}: ${bytes(actions[i][5])}`, `after ${name(actions[i])}, from ${time(actions[i][4])}`];
  }

  // ── the table ────────────────────────────────────────────────────────────────────────────────────────────
  const details = document.getElementById("table");
  const pick = document.getElementById("table-rank");
  const body = document.getElementById("table-rows");
  const more = document.getElementById("table-more");
  for (const [at, row] of data.rows.entries()) pick.add(new Option(row.name, at));
  function fill() {
    const at = Number(pick.value), { actions } = data.rows[at];
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
  function restart() { body.replaceChildren(); if (details.open && data.rows.length) fill(); }
  details.addEventListener("toggle", restart);
  pick.addEventListener("change", restart);
  more.addEventListener("click", fill);

  // ── begin ────────────────────────────────────────────────────────────────────────────────────────────────
  function colours() {
    const style = getComputedStyle(document.documentElement);
    for (const one of ["paper", "ink", "soft", "line", "mark", "F", "B", "I", "W", "R", "on", "on-light", "wait", "span"]) {
      inks[one] = style.getPropertyValue("--" + one).trim();
    }
  }
  function resize() { for (const chart of charts) chart.size(); redraw(); }
  colours();
  new Chart("timeline-chart", BAR + (paper ? THIN + 2 : 0) + 7, paintActions, hitActions);
  new Chart("memory-chart", MEMORY, paintMemory, hitMemory);
  const does = { in: () => zoom(0.6), out: () => zoom(1 / 0.6), left: () => pan(-0.25), right: () => pan(0.25), all };
  for (const button of document.querySelectorAll("button[data-do]")) button.addEventListener("click", does[button.dataset.do]);
  window.addEventListener("resize", resize);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours(); redraw(); });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  resize();
})();
