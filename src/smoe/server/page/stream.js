// Requests to this server, and answers that come piece by piece.

const KEY = "smoe-api-key";

/** The key that was typed in, for as long as the tab is open. */
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
};

/** What the server refuses, in its own words. */
export class Refused extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** A request; throws `Refused` where the answer is an error. */
export async function ask(path, { body, signal } = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`, code = null;
  try {
    ({ message, code } = (await answer.json()).error);
  } catch { /* no JSON: the status says enough */ }
  throw new Refused(answer.status, message, code);
}

/** Server-sent events of an answer, as { name, data }. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    pending += value;
    let end;
    while ((end = pending.indexOf("\n\n")) >= 0) {
      const lines = pending.slice(0, end).split("\n");
      pending = pending.slice(end + 2);
      const of = (field) => lines.filter((line) => line.startsWith(field + ": ")).map((line) => line.slice(field.length + 2));
      const data = of("data").join("\n");
      if (data) yield { name: of("event")[0] ?? "message", data };
    }
  }
}
