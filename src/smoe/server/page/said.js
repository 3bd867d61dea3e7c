// Numbers as people read them.

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** A number in three digits, or in as many as it has before the point. */
export const digits = (value) => (value === 0 ? "0" : Number(value).toLocaleString("en", { maximumSignificantDigits: Math.max(3, Math.ceil(Math.log10(value) || 1)) }));

/** [number, unit] of so many bytes. */
export function bytes(count) {
  let step = 0;
  while (count >= 1000 && step < UNITS.length - 1) {
    count /= 1024;
    step += 1;
  }
  return [digits(count), UNITS[step]];
}

export const inBytes = (count) => bytes(count).join(" ");
export const percent = (share) => `${share < 0.0995 && share > 0 ? digits(+(100 * share).toPrecision(2)) : Math.round(100 * share)} %`;
export const seconds = (time) => (time >= 1 ? `${digits(time)} s` : `${digits(1000 * time)} ms`);
export const plural = (count, one, many = one + "s") => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

/** Replaces what an element holds. */
export const show = (element, ...parts) => element.replaceChildren(...parts);

/** A new element with text or other elements in it. */
export function make(name, classes = "", ...parts) {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  element.append(...parts);
  return element;
}

/** What a part's name is among classes. */
export const asClass = (name) => name.replace(/[^A-Za-z]+/g, "-");
