// A trace played as if an engine ran: a cache of a size that is chosen here forgets what was used longest ago.

import { digits, inBytes, percent, show } from "./said.js";

const TICK = 100, CURVE_USES = 8192, CURVE_EVERY = 2000, HERE = 5;
const SPEEDS = [0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500];

export class Replay {
  constructor({ panel, name, play, at, atSaid, speed, speedSaid, share, shareSaid, onModel, onLook }) {
    Object.assign(this, { panel, name, play, at, atSaid, speed, speedSaid, share, shareSaid, onModel, onLook });
    play.addEventListener("click", () => (this.timer ? this.pause() : this.resume()));
    at.addEventListener("input", () => this.seek(at.valueAsNumber));
    speed.addEventListener("input", () => this.say());
    share.addEventListener("input", () => {
      this.capacity = this.room();
      this.onModel(this.model());
      this.seek(this.next);
    });
  }

  begin(trace) {
    this.trace = trace;
    this.panel.hidden = false;
    show(this.name, `Replaying ${trace.name}: ${trace.header.model}`);
    this.at.max = trace.steps;
    this.capacity = this.room();
    this.onModel(this.model());
    this.seek(0);
    this.resume();
  }

  end() {
    this.pause();
    this.panel.hidden = true;
    this.trace = null;
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    show(this.play, "Play");
  }

  resume() {
    if (this.next >= this.trace.steps) this.seek(0);
    this.due = 0;
    this.timer = setInterval(() => this.tick(), TICK);
    show(this.play, "Pause");
  }

  room() {
    const least = Math.max(...this.trace.header.layers.map((layer) => layer.top_k));
    return Math.max(least, Math.round((this.trace.experts * this.share.valueAsNumber) / 100));
  }

  model() {
    const { trace } = this;
    return {
      name: trace.header.model, layers: trace.layers, slots: this.capacity, expert_bytes: trace.expertBytes, low: null,
      has_device: false, prefetches: false, replaces: false, by_cpu: false, by_worker: false, events: ["used", "read"], memory: {},
    };
  }

  /** From the beginning to this step, at once. */
  seek(step) {
    this.cache = new Map();
    this.uses = [];
    this.next = 0;
    const found = this.go(step);
    const tiers = [];
    for (let cell = 0; cell < this.trace.experts; cell += 1) tiers.push(cell, this.cache.has(cell) ? HERE : 0);
    this.drawn = 0;
    this.onLook({ ...found, used: [], read: [], tiers, curve: this.curve() });
    this.say();
  }

  tick() {
    this.due += (SPEEDS[this.speed.valueAsNumber] * TICK) / 1000;
    const steps = Math.floor(this.due);
    this.due -= steps;
    if (steps) this.onLook(this.go(Math.min(this.trace.steps, this.next + steps)));
    this.say();
    if (this.next < this.trace.steps) return;
    this.pause();
    this.onLook({ curve: this.curve() });
  }

  /** What happens up to a step. */
  go(end) {
    const used = new Map(), read = new Map(), tiers = new Map();
    const decode = { tokens: 0, seconds: 0, uses: 0, hits: 0, bytes: 0, parts: {} };
    for (; this.next < end; this.next += 1) {
      const { isDecode, tokens, layers } = this.trace.step(this.next);
      decode.tokens += isDecode ? tokens : 0;
      for (const experts of layers) {
        for (const cell of experts) {
          used.set(cell, (used.get(cell) ?? 0) + 1);
          const isHit = this.cache.delete(cell);
          this.cache.set(cell, true);
          if (isDecode) {
            decode.uses += 1;
            decode.hits += isHit;
            this.uses.push(cell);
          }
          if (isHit) continue;
          read.set(cell, (read.get(cell) ?? 0) + 1);
          tiers.set(cell, HERE);
          if (isDecode) decode.bytes += this.trace.expertBytes ?? 0;
          if (this.cache.size <= this.capacity) continue;
          const [victim] = this.cache.keys();
          this.cache.delete(victim);
          tiers.set(victim, 0);
        }
      }
    }
    if (this.uses.length > 2 * CURVE_USES) this.uses = this.uses.slice(-CURVE_USES);
    const found = { used: flat(used), read: flat(read), tiers: flat(tiers) };
    if (decode.tokens) found.decode = decode;
    const now = performance.now();
    if (now - (this.drawn ?? 0) > CURVE_EVERY && this.uses.length) {
      this.drawn = now;
      found.curve = this.curve();
    }
    return found;
  }

  /** Misses at every size, by the stack distances of the last uses; the first half of them fills the caches. */
  curve() {
    const uses = this.uses.slice(-CURVE_USES), half = uses.length >> 1, stack = [], near = [];
    uses.forEach((cell, n) => {
      const depth = stack.indexOf(cell);
      if (depth >= 0) stack.splice(depth, 1);
      stack.unshift(cell);
      if (n >= half && depth >= 0) near[depth] = (near[depth] ?? 0) + 1;
    });
    const slots = [0], misses = [1];
    let hits = 0;
    for (let size = 1; size <= stack.length; size += 1) {
      hits += near[size - 1] ?? 0;
      slots.push(size);
      misses.push(1 - hits / (uses.length - half));
    }
    return { slots, misses };
  }

  say() {
    this.at.value = this.next;
    show(this.atSaid, `${this.next} of ${this.trace.steps}`);
    show(this.speedSaid, digits(SPEEDS[this.speed.valueAsNumber]));
    const bytes = this.trace.expertBytes;
    show(this.shareSaid, bytes ? inBytes(bytes * this.capacity) : percent(this.capacity / this.trace.experts));
    this.share.setAttribute("aria-valuetext", `${this.capacity} experts`);
  }
}

const flat = (pairs) => [...pairs].flat();
