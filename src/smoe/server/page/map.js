// The map of the experts: one cell for each, where it is and what befalls it.
//
// A cell is as full as its copy is precise, so that nothing hangs on colour alone; an event is a mark of its own shape
// that fades. Only cells that change are drawn again, at most twenty times a second.

import { make, plural, show } from "./said.js";

const LONGEST = 800, SHORTEST = 250; // ms that a mark can be seen, by how fast tokens come
const FRAME = 50;
const [ABSENT, LOW_COMING, COMING, LOW, PASSING, HERE] = [0, 1, 2, 3, 4, 5];
const MARKS = ["read", "replaced", "wrong", "right", "by_cpu", "by_worker", "used"]; // of several, the first is shown
const COLOURS = ["paper", "absent", "here", "used", "read", "right", "wrong", "replaced", "elsewhere", "focus"];

/** How many of all experts fit, always and while the memory reserved for longer texts is unused. */
export function fitting({ slots, most_slots: most = slots }, count) {
  if (slots >= count) return "all fit in memory";
  const found = (always) => `${slots.toLocaleString("en")} of ${count.toLocaleString("en")} ${always}fit in memory`;
  if (most <= slots) return found("");
  return `${found("always ")}, ${most >= count ? "all" : `up to ${most.toLocaleString("en")}`} until a long text needs the memory`;
}

export class ExpertMap {
  constructor({ canvas, tip, legend, subtitle }) {
    Object.assign(this, { canvas, tip, legend, subtitle });
    this.context = canvas.getContext("2d");
    this.model = null;
    this.marks = new Map();
    this.chosen = null;
    this.isHeld = false; // whether what is named was chosen by a key or a click
    this.timer = null;
    this.fading = LONGEST;
    new ResizeObserver(() => this.lay()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.lay());
    canvas.addEventListener("pointermove", (event) => event.pointerType === "mouse" && !this.isHeld && this.choose(this.under(event)));
    canvas.addEventListener("pointerleave", () => !this.isHeld && this.choose(null));
    canvas.addEventListener("click", (event) => {
      const found = this.under(event);
      this.isHeld = found !== null && !(this.isHeld && found === this.chosen);
      this.choose(this.isHeld ? found : null);
    });
    canvas.addEventListener("keydown", (event) => this.move(event));
    canvas.addEventListener("blur", () => {
      this.isHeld = false;
      this.choose(null);
    });
  }

  /** Another engine, or the same one anew. */
  describe(model) {
    this.model = model;
    this.first = [];
    let count = 0;
    for (const [, experts] of model.layers) {
      this.first.push(count);
      count += experts;
    }
    this.count = count;
    this.tiers = new Uint8Array(count);
    this.counts = Object.fromEntries(model.events.map((name) => [name, new Uint32Array(count)]));
    this.marks.clear();
    this.choose(null);
    const most = Math.max(...model.layers.map(([, experts]) => experts));
    this.widest = most;
    this.isUpright = most < model.layers.length; // few experts in many layers: a column for each layer
    const sizes = new Set(model.layers.map(([, experts]) => experts));
    const each = sizes.size === 1 ? `${model.layers.length} layers of ${most}` : `${model.layers.length} layers`;
    show(this.subtitle, `${each}; ${fitting(model, count)}`);
    this.explain();
    this.lay();
  }

  /** What has happened. */
  look(found) {
    const now = performance.now(), tiers = found.tiers ?? [];
    const { tokens, seconds } = found.decode ?? {};
    if (tokens) this.fading = Math.max(SHORTEST, Math.min(LONGEST, (3000 * seconds) / tokens));
    for (let n = 0; n < tiers.length; n += 2) {
      this.tiers[tiers[n]] = tiers[n + 1];
      this.draw(tiers[n], now);
    }
    for (let rank = MARKS.length - 1; rank >= 0; rank -= 1) { // the first of MARKS last: it stays
      const pairs = found[MARKS[rank]] ?? [], counts = this.counts[MARKS[rank]];
      for (let n = 0; n < pairs.length; n += 2) {
        counts[pairs[n]] += pairs[n + 1];
        this.marks.set(pairs[n], { rank, since: now });
      }
    }
    if (this.marks.size && this.timer === null) this.timer = setTimeout(() => this.fade(), 0);
    if (this.chosen !== null) this.name();
  }

  /** Forget marks and counts. */
  clear() {
    this.marks.clear();
    for (const counts of Object.values(this.counts)) counts.fill(0);
    this.tiers.fill(0);
    this.drawAll();
  }

  fade() {
    this.timer = null;
    const now = performance.now();
    for (const [cell, { since }] of this.marks) {
      if (now - since > this.fading) this.marks.delete(cell);
      this.draw(cell, now);
    }
    if (this.marks.size) this.timer = setTimeout(() => requestAnimationFrame(() => this.fade()), FRAME);
  }

  // -- drawing ---------------------------------------------------------------------------------------------------------

  lay() {
    if (!this.model) return;
    const style = getComputedStyle(document.documentElement), width = this.canvas.clientWidth;
    this.colour = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const across = this.isUpright ? this.model.layers.length : this.widest;
    const down = this.isUpright ? this.widest : this.model.layers.length;
    this.scale = Math.max(1, window.devicePixelRatio || 1);
    const whole = (size) => Math.max(1, Math.floor(size * this.scale)) / this.scale; // pixels of the screen
    this.pitchX = whole(Math.min(28, width / across));
    this.pitchY = whole(Math.max(3, Math.min(28, Math.max(this.pitchX, Math.min(18, 260 / down)))));
    this.gap = this.pitchX >= 4 ? whole(1) : this.pitchX >= 2.5 ? 1 / this.scale : 0;
    this.canvas.style.height = `${Math.ceil(this.pitchY * down)}px`;
    this.canvas.width = Math.round(width * this.scale);
    this.canvas.height = Math.round(Math.ceil(this.pitchY * down) * this.scale);
    this.context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    this.drawAll();
    this.explain();
  }

  drawAll() {
    const now = performance.now();
    this.context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    for (let cell = 0; cell < this.count; cell += 1) this.draw(cell, now);
  }

  place(cell) {
    let layer = this.first.length - 1;
    while (this.first[layer] > cell) layer -= 1;
    const expert = cell - this.first[layer];
    return { layer, expert, x: (this.isUpright ? layer : expert) * this.pitchX, y: (this.isUpright ? expert : layer) * this.pitchY };
  }

  draw(cell, now) {
    const { x, y } = this.place(cell), width = this.pitchX - this.gap, height = this.pitchY - this.gap;
    this.context.clearRect(x, y, this.pitchX, this.pitchY);
    paint(this.context, this.colour, this.tiers[cell], x, y, width, height);
    const mark = this.marks.get(cell);
    if (mark) {
      const age = (now - mark.since) / this.fading;
      this.context.globalAlpha = Math.max(0, Math.min(1, 1.15 * (1 - age)));
      paintMark(this.context, this.colour, MARKS[mark.rank], x, y, width, height);
      this.context.globalAlpha = 1;
    }
    if (cell === this.chosen) {
      this.context.strokeStyle = this.colour.focus;
      this.context.lineWidth = 2;
      this.context.strokeRect(x + 1, y + 1, Math.max(1, width - 2), Math.max(1, height - 2));
    }
  }

  // -- naming ----------------------------------------------------------------------------------------------------------

  under(event) {
    const box = this.canvas.getBoundingClientRect();
    const across = Math.floor((event.clientX - box.left) / this.pitchX), down = Math.floor((event.clientY - box.top) / this.pitchY);
    const [layer, expert] = this.isUpright ? [across, down] : [down, across];
    return this.cell(layer, expert);
  }

  cell(layer, expert) {
    const of = this.model?.layers[layer];
    return of && expert >= 0 && expert < of[1] ? this.first[layer] + expert : null;
  }

  move(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (event.key === "Escape") {
      this.isHeld = false;
      this.choose(null);
    }
    if (!step || !this.model) return;
    event.preventDefault();
    this.isHeld = true;
    if (this.chosen === null) return this.choose(0);
    const at = this.place(this.chosen), [right, down] = step;
    const found = this.isUpright ? this.cell(at.layer + right, at.expert + down) : this.cell(at.layer + down, at.expert + right);
    if (found !== null) this.choose(found);
  }

  choose(cell) {
    const before = this.chosen, now = performance.now();
    this.chosen = cell;
    if (before !== null && before !== cell && before < this.count) this.draw(before, now);
    if (cell === null) return show(this.tip);
    this.draw(cell, now);
    this.name();
  }

  name() {
    const { layer, expert } = this.place(this.chosen);
    const counted = this.model.events.filter((name) => this.counts[name][this.chosen]);
    const said = counted.map((name) => `${this.words()[name]} ${plural(this.counts[name][this.chosen], "time")}`);
    const where = this.places()[this.tiers[this.chosen]];
    show(this.tip, `Layer ${this.model.layers[layer][0]}, expert ${expert}: ${where}. Since this page was opened: ${said.join(", ") || "not used"}.`);
  }

  places() {
    const { low, has_device: hasDevice } = this.model;
    return [
      hasDevice ? "not on the device" : "on disk only", `${low} copy loading`, "loading",
      `${low} copy in memory`, "in memory, passing through", "in memory",
    ];
  }

  words() {
    return {
      used: "used", read: "loaded", replaced: "replaced or dropped", right: "predicted and used", wrong: "predicted, not used",
      by_cpu: "computed by the CPU", by_worker: "computed by a worker",
    };
  }

  /** The legend, of what this engine can show. */
  explain() {
    if (!this.model || !this.colour) return;
    const { low, prefetches, replaces, by_cpu: byCpu, by_worker: byWorker, has_device: hasDevice } = this.model;
    const entry = (paintIt, words) => {
      const sample = make("canvas"), scale = this.scale;
      sample.width = sample.height = 14 * scale;
      sample.setAttribute("aria-hidden", "true");
      const context = sample.getContext("2d");
      context.setTransform(scale, 0, 0, scale, 0, 0);
      paintIt(context);
      return make("li", "", sample, words);
    };
    const tier = (number, words) => entry((context) => paint(context, this.colour, number, 0, 0, 14, 14), words);
    const mark = (name, under, words) => entry((context) => {
      paint(context, this.colour, under, 0, 0, 14, 14);
      paintMark(context, this.colour, name, 0, 0, 14, 14);
    }, words);
    show(this.legend, ...[
      tier(HERE, "in memory"), low && tier(LOW, `${low} copy`), tier(ABSENT, hasDevice ? "not there" : "on disk"),
      mark("used", HERE, "used"), mark("read", ABSENT, "missing: loaded"), prefetches && mark("right", PASSING, "predicted and used"),
      prefetches && mark("wrong", ABSENT, "predicted, not used"), replaces && mark("replaced", ABSENT, "replaced or dropped"),
      (byCpu || byWorker) && mark("by_cpu", ABSENT, byWorker ? "computed by a worker" : "computed by the CPU"),
    ].filter(Boolean));
  }
}

/** Where an expert is: a cell as full as the copy is precise, hollow while it comes. */
function paint(context, colour, tier, x, y, width, height) {
  context.fillStyle = colour.absent;
  context.fillRect(x, y, width, height);
  if (tier === ABSENT) return;
  context.fillStyle = context.strokeStyle = colour.here;
  const isLow = tier === LOW || tier === LOW_COMING, tall = isLow ? height / 2 : height;
  if (tier === HERE || tier === LOW) return context.fillRect(x, y + height - tall, width, tall);
  if (tier === PASSING) return context.fillRect(x, y, width / 2, height);
  if (Math.min(width, tall) < 4) return context.fillRect(x, y + height - tall / 3, width, tall / 3);
  context.lineWidth = 1;
  context.strokeRect(x + 0.5, y + height - tall + 0.5, width - 1, tall - 1);
}

/** What befalls it, each in a shape of its own where there is room for one. */
function paintMark(context, colour, name, x, y, width, height) {
  const size = Math.min(width, height), isSmall = size < 5;
  context.fillStyle = context.strokeStyle = colour[name.startsWith("by_") ? "elsewhere" : name];
  context.lineWidth = Math.max(1.5, size / 6);
  context.beginPath();
  if (name === "used") return context.fillRect(x + width / 4, y + height / 4, width / 2, height / 2);
  if (name === "read" || isSmall) return context.fillRect(x, y, width, height);
  if (name === "right") return context.strokeRect(x + 1, y + 1, width - 2, height - 2);
  if (name === "wrong") {
    context.moveTo(x + 1, y + 1);
    context.lineTo(x + width - 1, y + height - 1);
    context.moveTo(x + width - 1, y + 1);
    context.lineTo(x + 1, y + height - 1);
    return context.stroke();
  }
  if (name === "replaced") {
    context.moveTo(x, y);
    context.lineTo(x + width, y);
    context.lineTo(x, y + height);
    return context.fill();
  }
  context.arc(x + width / 2, y + height / 2, size / 2.2, 0, 2 * Math.PI);
  return context.fill();
}
