// Anthropic's client for JavaScript: messages, streams, tools, reasoning, counts, errors.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.env.URL, apiKey: process.env.KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "How warm is it?" }];
const input_schema = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"] };
const tools = [{ name: "warmth", description: "How warm a city is", input_schema }];
const asked = { model: "any", max_tokens: 300, messages };

const plain = await client.messages.create({ ...asked, stop_sequences: [","] });
assert.equal(plain.content[0].text, "Hello there");
assert.deepEqual([plain.stop_reason, plain.stop_sequence], ["stop_sequence", ","]);

const thinking = { type: "enabled", budget_tokens: 1024 };
const stream = client.messages.stream({ ...asked, max_tokens: 2000, tools, thinking });
let text = "";
stream.on("text", (delta) => (text += delta));
const first = await stream.finalMessage();
assert.equal(text, "Wait.");
assert.deepEqual(first.content.map((block) => block.type), ["thinking", "text", "tool_use"]);
assert.deepEqual(first.content[2].input, { city: "Oslo" });
const results = [{ type: "tool_result", tool_use_id: first.content[2].id, content: process.env.RESULT }];
const turns = [...messages, { role: "assistant", content: first.content }, { role: "user", content: results }];
const second = await client.messages.create({ ...asked, tools, messages: turns });
assert.equal(second.content[0].text, "It is cold.");
assert.ok(second.usage.input_tokens > 0 && second.usage.output_tokens > 5);

const runner = client.beta.messages.toolRunner({ ...asked, tools: [{ ...tools[0], run: () => process.env.RESULT }] });
assert.equal((await runner).content[0].text, "It is cold.");

assert.ok((await client.messages.countTokens({ model: "any", messages, tools })).input_tokens > 100);
await assert.rejects(client.messages.create({ ...asked, temperature: 9 }), Anthropic.BadRequestError);
console.log("all right");
