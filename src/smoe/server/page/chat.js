// A conversation with the model, or a text that it goes on with. What the model writes becomes text, never markup.

import { ask, events, Refused } from "./stream.js";
import { digits, make, plural, show } from "./said.js";

const TEXT_TOKENS = 256;

export class Chat {
  constructor({ title, log, form, prompt, send, stop, anew, tokens, temperature, settings, onRefused }) {
    Object.assign(this, { title, log, form, prompt, send, stop, anew, tokens, temperature, settings, onRefused });
    this.messages = [];
    this.running = null;
    this.talks = undefined; // nothing has been said of it
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    stop.addEventListener("click", () => this.running?.abort());
    form.addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    anew.addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      show(this.log);
      this.anew.hidden = true;
      this.prompt.focus();
    });
  }

  /** What the model can do: `chat`, `text`, or null where a command line writes the text. */
  describe({ name, talks, context, remark }) {
    Object.assign(this, { name, context });
    if (talks === this.talks) return;
    this.talks = talks;
    this.form.hidden = !talks;
    show(this.title, { chat: "Chat", text: "Text" }[talks] ?? "The run");
    const hint = talks ? "Send a message to see which experts are used, and which of them must be loaded first." : "The text appears here.";
    this.log.dataset.hint = [hint, remark].filter(Boolean).join(" ");
    this.prompt.placeholder = talks === "text" ? "Begin a text; the model continues it." : "Your message. Enter sends, Shift+Enter is a new line.";
    if (talks === "text") {
      this.tokens.placeholder = String(TEXT_TOKENS);
      show(this.send, "Continue");
    }
  }

  /** Text of a run that this page did not ask for. */
  said(text, isWhole) {
    if (isWhole || !this.told) {
      show(this.log);
      this.told = this.turn("assistant");
    }
    this.grow(this.told, text);
  }

  /** `given`: a text to send instead of the field's. */
  async submit(given = null) {
    const text = given ?? this.prompt.value;
    if (this.running || !text.trim() || !this.name) return;
    for (const field of [this.tokens, this.temperature]) {
      if (field.checkValidity()) continue;
      this.settings.open = true;
      field.reportValidity();
      return;
    }
    if (given === null) this.prompt.value = "";
    const answer = this.talks === "text" ? this.turn("assistant", make("span", "given", text)) : this.begin(text);
    const running = (this.running = new AbortController());
    this.busy(true);
    const began = performance.now();
    const found = { text: "", tokens: null, reason: "" };
    let isLost = false;
    try {
      await this.listen(text, answer, running.signal, found);
    } catch (error) {
      if (running.signal.aborted) found.reason = "stopped";
      else {
        const notice = await this.problem(error, text);
        isLost = !found.text;
        if (isLost) this.offerAgain(text, answer, notice);
      }
    }
    this.running = null;
    this.busy(false);
    if (!isLost) this.end(answer, found, began);
  }

  begin(text) {
    const asked = this.turn("user");
    this.grow(asked, text);
    this.messages.push({ role: "user", content: text });
    return Object.assign(this.turn("assistant"), { asked });
  }

  /** A question without an answer is no turn: it returns to the field or, while the field has another text, to a button. */
  offerAgain(text, answer, notice) {
    if (answer.asked) this.messages.pop();
    answer.asked?.turn.remove();
    answer.turn.remove();
    if (!this.prompt.value) {
      this.prompt.value = text;
      return;
    }
    const again = make("button", "again", `Send again: ${text.length > 60 ? `${text.slice(0, 60)}…` : text}`);
    again.type = "button";
    again.addEventListener("click", () => {
      if (this.running) return;
      notice.turn.remove();
      this.submit(text);
    });
    notice.turn.append(again);
    this.follow(notice);
  }

  async listen(text, answer, signal, found) {
    const body = { model: this.name, stream: true, stream_options: { include_usage: true } };
    const most = this.tokens.valueAsNumber, temperature = this.temperature.valueAsNumber;
    if (most) body.max_tokens = most;
    if (!Number.isNaN(temperature)) body.temperature = temperature;
    const isChat = this.talks === "chat";
    if (isChat) body.messages = this.messages;
    else Object.assign(body, { prompt: text, max_tokens: most || TEXT_TOKENS });
    const stream = await ask(isChat ? "v1/chat/completions" : "v1/completions", { body, signal });
    for await (const { data } of events(stream)) {
      if (data === "[DONE]") break;
      const piece = JSON.parse(data);
      if (piece.error) throw new Refused(0, piece.error.message);
      if (piece.usage) found.tokens = piece.usage.completion_tokens;
      const choice = piece.choices?.[0];
      if (!choice) continue;
      const thought = choice.delta?.reasoning_content;
      if (thought) this.grow((answer.thought ??= this.thought(answer)), thought);
      let more = (isChat ? choice.delta?.content : choice.text) ?? "";
      if (isChat && !found.text) more = more.trimStart();
      if (choice.finish_reason === "length") found.reason = "limit of tokens or context";
      if (more) {
        found.text += more;
        found.first ??= performance.now();
        this.grow(answer, more);
      }
    }
  }

  end(answer, found, began) {
    if (this.talks === "chat") {
      if (found.text) this.messages.push({ role: "assistant", content: found.text });
      else this.messages.pop();
    }
    if (!found.text) answer.words.textContent = answer.words.textContent || " ";
    const notes = [];
    if (found.tokens !== null) notes.push(plural(found.tokens, "token"));
    if (found.first) notes.push(`the first after ${digits(+((found.first - began) / 1000).toPrecision(2))} s`);
    if (found.reason) notes.push(found.reason);
    answer.turn.append(make("p", "by", notes.join(", ")));
    this.follow(answer);
  }

  /** `text`: the message that was refused. */
  async problem(error, text) {
    if (error instanceof Refused && error.status === 401) this.onRefused();
    const told = this.turn("problem");
    told.turn.setAttribute("role", "alert");
    this.grow(told, error instanceof Refused ? error.message : "The server cannot be reached; is it still running?");
    const isFull = error.code === "context_length_exceeded" && this.talks === "chat" && this.messages.length > 1;
    if (isFull) this.grow(told, await this.remedy(text));
    return told;
  }

  /** What to do when the context is full. A new conversation helps only if the message alone fits. */
  async remedy(text) {
    try {
      const answer = await ask("v1/messages/count_tokens", { body: { model: this.name, messages: [{ role: "user", content: text }] } });
      if ((await answer.json()).input_tokens < this.context) return ". The conversation is full: New starts another one.";
    } catch (error) {
      if (error.status !== 400) return ""; // 400: too long to be counted
    }
    return ". This message alone is too long: shorten it.";
  }

  busy(isBusy) {
    this.send.hidden = isBusy;
    this.stop.hidden = !isBusy;
    this.log.setAttribute("aria-busy", String(isBusy)); // read out when it is whole, not word by word
    this.anew.hidden = false;
    if (!isBusy && document.activeElement === document.body) this.prompt.focus();
  }

  // -- the log ---------------------------------------------------------------------------------------------------------

  turn(kind, ...parts) {
    const words = make("div", "words", ...parts), turn = make("div", `turn ${kind}`, words);
    this.log.append(turn);
    const made = { turn, words, node: null, pending: "" };
    this.log.scrollTop = this.log.scrollHeight;
    return made;
  }

  /** What is thought before an answer, above it. */
  thought(answer) {
    const words = make("div", "words given");
    answer.turn.prepend(words);
    return { turn: answer.turn, words, node: null, pending: "" };
  }

  /** More of it; what comes between two pictures is drawn at once. */
  grow(made, text) {
    made.pending += text;
    made.drawing ??= requestAnimationFrame(() => this.drawText(made));
    if (document.hidden) this.drawText(made); // nothing is drawn there, and nothing may pile up
  }

  drawText(made) {
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
    if (made.node === null) {
      made.node = document.createTextNode("");
      made.words.append(made.node);
    }
    made.node.appendData(made.pending);
    made.pending = "";
    made.drawing = null;
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  follow(made) {
    this.drawText(made);
    const isNear = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 120;
    if (isNear) this.log.scrollTop = this.log.scrollHeight;
  }
}
