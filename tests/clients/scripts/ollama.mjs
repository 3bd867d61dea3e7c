// Ollama's client for JavaScript: chat, generate, streams, tools, formats, errors.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.URL, headers: { Authorization: `Bearer ${process.env.KEY}` } });
const model = "demo";
const messages = [{ role: "user", content: "How warm is it?" }];
const parameters = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "warmth", description: "How warm a city is", parameters } }];

const plain = await client.chat({ model, messages, options: { stop: [","], seed: 5 } });
assert.equal(plain.message.content, "Hello there");
const first = await client.chat({ model, messages, tools, think: true });
assert.deepEqual(first.message.tool_calls[0].function.arguments, { city: "Oslo" });
assert.equal(first.message.thinking, "I see.");
const result = { role: "tool", tool_name: "warmth", content: process.env.RESULT };
const second = await client.chat({ model, messages: [...messages, first.message, result], tools });
assert.equal(second.message.content, "It is cold.");

let text = "";
for await (const part of await client.chat({ model, messages, stream: true })) text += part.message.content;
assert.equal(text, "Hello there, you.");
text = "";
for await (const part of await client.generate({ model, prompt: "Hi", stream: true })) text += part.response;
assert.equal(text, "Hello there, you.");
const format = { type: "object", properties: { age: { enum: [7, 8] } }, required: ["age"] };
const told = JSON.parse((await client.chat({ model, messages, format })).message.content);
assert.ok([7, 8].includes(told.age));
assert.equal((await client.list()).models[0].model, "demo");
assert.ok((await client.show({ model })).capabilities.includes("completion"));
await assert.rejects(client.chat({ model: "other", messages }), /does not exist here/);
console.log("all right");
