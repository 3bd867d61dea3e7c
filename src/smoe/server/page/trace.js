// A trace that `smoe record` has written (docs/traces.md), read from a file: which experts each token used.

const MAGIC = "smoetrac", VERSION = 1, HEAD = 24, PAGE = 4096, PIECE = 1 << 23;

export class TraceError extends Error {}

/** Throws `TraceError` for a file that is none. */
export async function readTrace(file) {
  const head = await file.slice(0, HEAD).arrayBuffer();
  if (head.byteLength < HEAD || new TextDecoder().decode(head.slice(0, 8)) !== MAGIC) throw new TraceError(`${file.name} is not a trace; smoe record writes one`);
  const view = new DataView(head), length = view.getUint32(12, true), count = view.getBigUint64(16, true);
  if (view.getUint32(8, true) !== VERSION) throw new TraceError(`${file.name} is a trace of another format; record it again`);
  if (count === 2n ** 64n - 1n) throw new TraceError(`${file.name} was never finished; record it again`);
  const header = JSON.parse(await file.slice(HEAD, HEAD + length).text());
  const places = offsets(header.row), begin = Math.ceil((HEAD + length) / PAGE) * PAGE;
  return new Trace(file.name, header, await readRows(file, begin, Number(count), places));
}

function offsets(row) {
  const found = {};
  let at = 0;
  for (const [name, type, shape] of row) {
    const items = (shape ?? [1]).reduce((product, each) => product * each, 1);
    found[name] = { at, items };
    at += Number(type.slice(2)) * items;
  }
  return { ...found, size: at };
}

async function readRows(file, begin, count, places) {
  const width = places.top_k_index.items, whole = Math.max(1, Math.floor(PIECE / places.size));
  const rows = { width, count, step: new Uint32Array(count), layer: new Uint16Array(count), isDecode: new Uint8Array(count), chosen: new Uint16Array(count * width) };
  for (let first = 0; first < count; first += whole) {
    const some = Math.min(whole, count - first), from = begin + first * places.size;
    const piece = await file.slice(from, from + some * places.size).arrayBuffer();
    if (piece.byteLength < some * places.size) throw new TraceError(`${file.name} is truncated; copy or record it again`);
    const view = new DataView(piece);
    for (let n = 0; n < some; n += 1) {
      const at = n * places.size, row = first + n;
      rows.step[row] = view.getUint32(at + places.step.at, true);
      rows.layer[row] = view.getUint16(at + places.layer.at, true);
      rows.isDecode[row] = view.getUint16(at + places.phase.at, true);
      for (let k = 0; k < width; k += 1) rows.chosen[row * width + k] = view.getUint16(at + places.top_k_index.at + 2 * k, true);
    }
  }
  return rows;
}

class Trace {
  constructor(name, header, rows) {
    Object.assign(this, { name, header, rows });
    this.layers = header.layers.map(({ layer, experts }) => [layer, experts]);
    this.first = new Map();
    this.experts = 0;
    for (const [layer, experts] of this.layers) {
      this.first.set(layer, { at: this.experts, experts });
      this.experts += experts;
    }
    this.begins = []; // the first row of every step
    for (let row = 0; row < rows.count; row += 1) if (!row || rows.step[row] !== rows.step[row - 1]) this.begins.push(row);
    const sizes = header.expert_bytes;
    this.expertBytes = sizes ? sizes.reduce((sum, each) => sum + each, 0) / sizes.length : null;
  }

  get steps() {
    return this.begins.length;
  }

  /** Of a step: whether it decodes, its tokens, and for each layer the experts that are used, ascending. */
  step(number) {
    const { rows } = this, begin = this.begins[number], end = this.begins[number + 1] ?? rows.count;
    const layers = [];
    let row = begin, tokens = 0;
    while (row < end) {
      const layer = rows.layer[row], { at, experts } = this.first.get(layer), used = new Set();
      let count = 0;
      for (; row < end && rows.layer[row] === layer; row += 1, count += 1) {
        for (let k = 0; k < rows.width; k += 1) {
          const expert = rows.chosen[row * rows.width + k];
          if (expert < experts) used.add(at + expert);
        }
      }
      tokens = Math.max(tokens, count);
      layers.push([...used].sort((a, b) => a - b));
    }
    return { isDecode: rows.isDecode[begin] === 1, tokens, layers };
  }
}
