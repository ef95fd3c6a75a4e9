// A chart: rows of ranks below a time axis. It draws the visible rows, and handles the mouse and keys.
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
    this.chosen = null; // the index of an action in this.row
    this.listen();
    charts.push(this);
  }
  get gutter() { return this.width < 600 ? 58 : 92; }
  x(moment) { return this.gutter + ((moment - view.from) / (view.to - view.from)) * (this.width - this.gutter); }
  moment(x) { return view.from + ((x - this.gutter) / (this.width - this.gutter)) * (view.to - view.from); }
  restart() { // shows another step
    this.row = Math.min(this.row, now.rows.length - 1);
    this.chosen = null;
    this.size();
  }
  size() {
    const full = AXIS + now.rows.length * this.height;
    this.width = this.box.clientWidth;
    this.tall = Math.min(full, Math.max(160, Math.floor(window.innerHeight * 0.72)));
    this.space.style.height = full - this.tall + "px";
    this.box.style.height = this.tall + 2 + "px"; // with its border
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
    const to = Math.min(now.rows.length, Math.ceil((top + this.tall) / this.height));
    for (let at = from; at < to; at++) {
      const y = AXIS + at * this.height - top;
      pen.save();
      pen.beginPath();
      pen.rect(this.gutter, y, this.width - this.gutter, this.height);
      pen.clip();
      this.paint(this, pen, at, y);
      pen.restore();
      pen.fillStyle = at === this.row && document.activeElement === this.canvas ? inks.mark : inks.ink;
      pen.fillText(now.rows[at].name, 6, y + this.height / 2, this.gutter - 10);
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
  at(event) { // the row of an event, and the position in the row
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top - AXIS + this.box.scrollTop;
    const row = Math.floor(y / this.height);
    const x = event.clientX - box.left;
    return event.clientY - box.top < AXIS || row < 0 || row >= now.rows.length || x < this.gutter
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
      } else if (event.deltaY < 0 || view.to - view.from < whole) { // if zoomed out, the page scrolls
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
      0: all, Home: all, n: () => this.next(1), p: () => this.next(-1), s: () => turn(1), S: () => turn(-1), Escape: hide,
    };
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  }
  choose(by) {
    this.row = Math.max(0, Math.min(now.rows.length - 1, this.row + by));
    this.chosen = null;
    const y = this.row * this.height;
    if (y < this.box.scrollTop) this.box.scrollTop = y;
    if (y + this.height + AXIS > this.box.scrollTop + this.tall) this.box.scrollTop = y + this.height + AXIS - this.tall;
    announcement.textContent = now.rows[this.row].name;
    this.draw();
  }
  next(by) {
    const { actions } = now.rows[this.row];
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
    announcement.textContent = lines.join(", ");
  }
}
