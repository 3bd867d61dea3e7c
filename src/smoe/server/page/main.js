// The page: one engine, live or replayed, and a chat with its model.

import { Chat } from "./chat.js";
import { Figures } from "./figures.js";
import { ExpertMap } from "./map.js";
import { Replay } from "./replay.js";
import { make, show } from "./said.js";
import { ask, events, key, Refused } from "./stream.js";
import { readTrace, TraceError } from "./trace.js";

const AGAIN = 1500; // ms until a lost connection is tried again
const at = (id) => document.getElementById(id);

const map = new ExpertMap({ canvas: at("map"), tip: at("tip"), legend: at("legend"), subtitle: at("map-sub") });
const figures = new Figures({
  figures: document.querySelector(".figures"), speed: at("speed"), hits: at("hits"), read: at("read"),
  timeBar: at("time-bar"), timeLegend: at("time-legend"), timeSub: at("time-sub"),
  memory: at("memory-bar").parentElement, memoryBar: at("memory-bar"), memoryLegend: at("memory-legend"), memorySub: at("memory-sub"),
  curve: at("curve"), curveSaid: at("curve-said"),
});
const chat = new Chat({
  title: at("chat-title"), log: at("log"), form: at("ask"), prompt: at("prompt"), send: at("send"), stop: at("stop"), anew: at("anew"),
  tokens: at("tokens"), temperature: at("temperature"), settings: at("settings"), onRefused: askForKey,
});
const views = [map, figures];
const replay = new Replay({
  panel: at("replay"), name: at("replay-name"), play: at("replay-play"), at: at("replay-at"), atSaid: at("replay-at-said"),
  speed: at("replay-speed"), speedSaid: at("replay-speed-said"), share: at("replay-share"), shareSaid: at("replay-share-said"),
  onModel: (model) => views.forEach((view) => view.describe(model)),
  onLook: (found) => views.forEach((view) => view.look(found)),
});
let live = null; // the engine that is watched, where it stands
let isReplaying = false;
let isOver = false;
let promptSince = 0;

/** Watch the engine until the connection ends. */
async function watch() {
  const stream = await ask("watch");
  let isFirst = true;
  for await (const { name, data } of events(stream)) {
    const found = JSON.parse(data);
    if (name === "model") {
      live = { model: found, tiers: new Map(), state: {} };
      show(at("name"), found.name + (found.precision ? ` (${found.precision})` : ""));
      at("name").title = found.name;
      document.title = `${found.name} – smoe`;
      chat.describe(found);
      if (!isReplaying) views.forEach((view) => view.describe(found));
    } else {
      hear(found, isFirst);
      isFirst = false;
    }
  }
}

function hear(found, isFirst) {
  const tiers = found.tiers ?? [];
  for (let n = 0; n < tiers.length; n += 2) live.tiers.set(tiers[n], tiers[n + 1]);
  for (const name of ["running", "waiting", "over"]) if (name in found) live.state[name] = found[name];
  if (found.text) chat.said(found.text, isFirst);
  if (!isReplaying) views.forEach((view) => view.look(found));
  if (found.prompt) promptSince = performance.now();
  if (found.decode) promptSince = 0;
  isOver = Boolean(live.state.over);
  tell();
}

function tell() {
  const { running, waiting } = live.state, isReading = promptSince && performance.now() - promptSince < 3000;
  const doing = isOver ? "the run has ended" : !running ? "idle" : isReading ? "reading a prompt" : running > 1 ? `writing ${running} texts` : "writing";
  const said = waiting ? `${doing}, ${waiting} waiting` : doing;
  if (at("state").textContent !== said) show(at("state"), said);
  at("state").className = running && !isOver ? "busy" : "";
  figures.rest(!isReplaying && (!running || isOver));
}

async function watchOn() {
  for (;;) {
    try {
      await watch();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) return askForKey();
    }
    if (isOver) return;
    show(at("state"), "no connection; trying again");
    at("state").className = "lost";
    await new Promise((resolve) => setTimeout(resolve, AGAIN));
  }
}

function askForKey() {
  at("key-form").hidden = false;
  show(at("state"), key.get() ? "wrong key; enter another" : "a key is needed");
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  watchOn();
});

// -- replay --------------------------------------------------------------------------------------------------------------

at("open-trace").addEventListener("click", () => at("trace-file").click());
at("trace-file").addEventListener("change", async () => {
  const [file] = at("trace-file").files;
  at("trace-file").value = "";
  if (!file) return;
  try {
    const trace = await readTrace(file);
    if (!trace.steps) throw new TraceError(`${file.name} has no tokens`);
    if (isReplaying) replay.end();
    isReplaying = true;
    at("time-part").hidden = true;
    replay.begin(trace);
  } catch (error) {
    const told = make("p", "problem", error instanceof TraceError ? error.message : `${file.name} cannot be read: it is damaged`);
    told.setAttribute("role", "alert");
    show(at("tip"), told);
  }
});

at("replay-end").addEventListener("click", () => {
  replay.end();
  isReplaying = false;
  at("time-part").hidden = false;
  if (!live) return;
  views.forEach((view) => view.describe(live.model));
  views.forEach((view) => view.look({ tiers: [...live.tiers].flat() }));
});

watchOn();
