// Speed, hits, what a token waits for, memory by part, and what more memory would save.

import { asClass, bytes, inBytes, make, percent, seconds, show, digits } from "./said.js";

const WINDOW = 2000; // ms of decoding that figures are taken over
const SVG = "http://www.w3.org/2000/svg";
const PARTS = ["disk", "link", "the GPU", "the CPU's experts", "workers", "experts", "the other layers", "looking ahead", "Python"];
const NAMES = { disk: "the disk", link: "the link", experts: "experts being computed", Python: "Python between layers and tokens" };
const MEMORY = {
  "non-expert weights": "all other weights", "KV cache": "the text so far (KV cache)", "expert slots": "experts",
  "slots of low copies": "low copies of experts", staging: "experts passing through",
};
const RESERVED = ["workspace", "KV cache"]; // parts that experts use until a long text needs the memory

export class Figures {
  constructor(part) {
    this.part = part;
    this.recent = [];
    this.hits = null;
  }

  describe(model) {
    this.model = model;
    this.recent = [];
    this.hits = null;
    this.curve = null;
    this.here = 0;
    this.tiers = new Uint8Array(model.layers.reduce((sum, [, experts]) => sum + experts, 0));
    for (const name of ["speed", "hits", "read"]) show(this.part[name], "–");
    show(this.part.timeLegend);
    show(this.part.timeBar);
    show(this.part.timeSub, "no token has been timed yet");
    this.memory();
  }

  look(found) {
    if (found.tiers) this.count(found.tiers);
    if (found.decode) this.decode(found.decode);
    if (found.curve) {
      this.curve = found.curve;
      this.drawCurve();
    }
  }

  /** Whether nothing runs at present: the figures are the last run's. */
  rest(isStill) {
    this.part.figures.classList.toggle("still", isStill);
  }

  decode(step) {
    const now = performance.now();
    this.recent.push({ ...step, at: now });
    while (this.recent.length > 1 && this.recent[0].at < now - WINDOW) this.recent.shift();
    const sum = (name) => this.recent.reduce((total, each) => total + each[name], 0);
    const tokens = sum("tokens"), time = sum("seconds"), uses = sum("uses");
    const unit = (element, number, name) => show(element, number, " ", make("small", "", name));
    if (time > 0) show(this.part.speed, digits(+(tokens / time).toPrecision(3)));
    if (uses > 0) {
      this.hits = sum("hits") / uses;
      unit(this.part.hits, percent(this.hits).replace(" %", ""), "%");
    }
    unit(this.part.read, ...bytes(sum("bytes") / tokens));
    const parts = {};
    for (const { parts: each } of this.recent) for (const [name, spent] of Object.entries(each)) parts[name] = (parts[name] ?? 0) + spent;
    if (Object.keys(parts).length) this.time(parts, tokens);
  }

  time(parts, tokens) {
    const named = PARTS.filter((name) => parts[name] > 0), whole = named.reduce((sum, name) => sum + parts[name], 0);
    const shown = named.filter((name) => parts[name] / whole >= 0.005);
    const bars = [...this.part.timeBar.children], lines = [...this.part.timeLegend.children];
    if (bars.map((bar) => bar.title).join() !== shown.join()) {
      show(this.part.timeBar, ...shown.map((name) => Object.assign(make("i", asClass(name)), { title: name })));
      show(this.part.timeLegend, ...shown.map((name) => make("li", "", make("i", asClass(name)), NAMES[name] ?? name, make("b"))));
      return this.time(parts, tokens);
    }
    shown.forEach((name, n) => {
      bars[n].style.width = `${(100 * parts[name]) / whole}%`;
      show(lines[n].lastChild, seconds(parts[name] / tokens));
    });
    show(this.part.timeSub, `${seconds(whole / tokens)} each`);
    this.part.timeBar.setAttribute("aria-label", shown.map((name) => `${NAMES[name] ?? name} ${percent(parts[name] / whole)}`).join(", "));
  }

  // -- memory ----------------------------------------------------------------------------------------------------------

  count(pairs) {
    for (let n = 0; n < pairs.length; n += 2) {
      this.here += (pairs[n + 1] === 5) - (this.tiers[pairs[n]] === 5);
      this.tiers[pairs[n]] = pairs[n + 1];
    }
    if (this.filled) this.fill();
  }

  memory() {
    const { memory, budget } = this.model, parts = Object.entries(memory ?? {}).filter(([, size]) => size > 0);
    this.part.memory.hidden = !parts.length;
    show(this.part.memorySub, `a budget of ${inBytes(budget ?? 0)}`);
    const bar = parts.map(([name, size]) => {
      const piece = Object.assign(make("i", asClass(name)), { title: `${MEMORY[name] ?? name}: ${inBytes(size)}` });
      piece.style.width = `${(100 * size) / budget}%`;
      return piece;
    });
    show(this.part.memoryBar, ...bar);
    show(this.part.memoryLegend, ...parts.map(([name, size]) => make("li", "", make("i", asClass(name)), `${MEMORY[name] ?? name} `, make("b", "", inBytes(size)))));
    this.part.memoryBar.setAttribute("aria-label", parts.map(([name, size]) => `${MEMORY[name] ?? name} ${inBytes(size)}`).join(", "));
    const slots = parts.findIndex(([name]) => name === "expert slots");
    this.filled = null;
    if (slots >= 0) {
      this.filled = {
        rest: make("i", "rest"), piece: bar[slots], said: this.part.memoryLegend.children[slots].lastChild, size: memory["expert slots"],
        reserved: parts.flatMap(([name, size], n) => (RESERVED.includes(name) ? [[bar[n], size]] : [])),
      };
      bar[slots].append(this.filled.rest);
      this.fill();
    }
  }

  /** The slots in use, also those in memory that is reserved for longer texts. */
  fill() {
    const { rest, piece, said, size, reserved } = this.filled, { slots, budget, expert_bytes: each } = this.model;
    const lent = Math.max(0, this.here - slots) * each, share = Math.min(1, this.here / slots);
    const all = reserved.reduce((sum, [, its]) => sum + its, 0), width = (size) => `${(100 * size) / budget}%`;
    rest.style.width = `${100 * (1 - share)}%`;
    piece.style.width = width(size + lent);
    for (const [other, its] of reserved) other.style.width = width(its * Math.max(0, 1 - lent / all));
    show(said, usedBytes(size, lent, share));
  }

  // -- the curve -------------------------------------------------------------------------------------------------------

  drawCurve() {
    const { slots, misses } = this.curve, { layers } = this.model, now = this.room(), last = slots.at(-1);
    if (slots.length < 3 || !layers) return;
    const at = (size) => {
      if (size >= last) return misses.at(-1);
      const next = slots.findIndex((each) => each > size), before = Math.max(0, next - 1);
      const part = (size - slots[before]) / (slots[next] - slots[before] || 1);
      return misses[before] + part * (misses[next] - misses[before]);
    };
    const said = this.inWords(at, last);
    show(this.part.curveSaid, said);
    this.part.curve.setAttribute("aria-label", said);
    const width = 560, height = 220, left = 44, bottom = 50, top = 10, most = Math.max(last, now);
    const x = (size) => left + ((width - left - 10) * size) / most, y = (share) => top + (height - top - bottom) * (1 - share);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}` });
    for (const share of [0, 0.5, 1]) {
      svg.append(draw("line", { class: "axis", x1: left, x2: width - 10, y1: y(share), y2: y(share) }), words(left - 8, y(share) + 4, `${100 * share} %`, "end"));
    }
    const fits = (size) => inBytes(size * this.model.expert_bytes);
    for (const size of [0.25, 0.5, 0.75, 1].map((part) => Math.round(part * most))) {
      svg.append(words(x(size), height - 30, this.model.expert_bytes ? fits(size) : size, size === most ? "end" : "middle"));
    }
    svg.append(words(left, height - 30, "0"), words(width - 10, height - 8, "room for experts", "end"), words(width - 10, top + 16, "of the uses missed", "end"));
    svg.append(draw("polyline", { class: "line", points: slots.map((size, n) => `${x(size).toFixed(1)},${y(misses[n]).toFixed(1)}`).join(" ") }));
    svg.append(draw("line", { class: "now", x1: x(now), x2: x(now), y1: y(0), y2: y(1) }));
    if (this.hits !== null) svg.append(draw("circle", { cx: x(now), cy: y(1 - this.hits), r: 5 }));
    show(this.part.curve, svg);
  }

  /** The number of experts for which there is memory now: more than always, until a long text needs the memory. */
  room() {
    return Math.max(this.model.slots, this.here);
  }

  inWords(at, last) {
    const now = this.room(), sizes = this.model.expert_bytes ? (size) => inBytes(size * this.model.expert_bytes) : (size) => `${size} experts`;
    const found = this.hits === null ? "" : ` The dot is how often this engine misses now (${percent(1 - this.hits)}): it also prefetches, and evicts by its own rules.`;
    const first = at(last) < 0.005 ? "" : ` The curve ends at ${percent(at(last))}: the first use of an expert is a miss with any memory.`;
    if (now >= last) return `All experts used recently fit: more memory would change nothing.${first}${found}`;
    const more = Math.min(last, 2 * now);
    return `Of the last uses, a plain cache (least recently used) would miss ${percent(at(now))} with room for ${sizes(now)} of experts, as here; ` +
      `${percent(at(more))} with ${sizes(more)}; ${percent(at(now / 2))} with half.${first}${found}`;
  }
}

/** The memory of experts in words. `lent`: bytes of it that are reserved for longer texts; `share`: the part in use. */
export function usedBytes(size, lent, share) {
  if (lent > 0) return `${inBytes(size + lent)}, of which ${inBytes(lent)} are reserved for longer texts`;
  return share < 1 ? `${inBytes(size)}, ${percent(share)} full` : inBytes(size);
}

function draw(name, attributes, ...parts) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...parts);
  return element;
}

const words = (x, y, said, anchor = "start") => draw("text", { x, y, "text-anchor": anchor }, String(said));
