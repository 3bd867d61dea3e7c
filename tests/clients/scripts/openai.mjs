// OpenAI's client for JavaScript: chat, streams, tools, structured answers, responses, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: process.env.KEY, maxRetries: 0 });
const model = "demo";
const messages = [{ role: "user", content: "How warm is it?" }];
const parameters = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "warmth", description: "How warm a city is", parameters } }];
const person = z.object({ name: z.enum(["Tom", "Lily"]), age: z.literal(7) });

const plain = await client.chat.completions.create({ model, messages, stop: [","], seed: 5, logprobs: true });
assert.equal(plain.choices[0].message.content, "Hello there");
assert.ok(plain.usage.prompt_tokens > 10 && plain.choices[0].logprobs.content.length > 5);

const first = await client.chat.completions.create({ model, messages, tools });
const call = first.choices[0].message.tool_calls[0];
assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
const result = { role: "tool", tool_call_id: call.id, content: process.env.RESULT };
const second = await client.chat.completions.create({ model, messages: [...messages, first.choices[0].message, result] });
assert.equal(second.choices[0].message.content, "It is cold.");

const stream = client.chat.completions.stream({ model, messages, tools, stream_options: { include_usage: true } });
let text = "";
for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
assert.equal(text, "Wait.");
const whole = await stream.finalChatCompletion();
assert.equal(whole.choices[0].message.tool_calls[0].function.name, "warmth");

const run = client.chat.completions.runTools({
  model,
  messages,
  tools: [{ type: "function", function: { name: "warmth", parameters, function: () => process.env.RESULT, parse: JSON.parse } }],
});
assert.equal(await run.finalContent(), "It is cold.");

const format = zodResponseFormat(person, "person");
const parsed = await client.chat.completions.parse({ model, messages, response_format: format });
assert.ok(person.parse(parsed.choices[0].message.parsed));

const tool = { type: "function", ...tools[0].function };
const response = await client.responses.create({ model, input: messages, tools: [tool] });
const item = response.output.find((each) => each.type === "function_call");
const output = { type: "function_call_output", call_id: item.call_id, output: process.env.RESULT };
const next = await client.responses.create({ model, input: [...messages, ...response.output, output], tools: [tool] });
assert.equal(next.output_text, "It is cold.");
const kinds = [];
for await (const event of client.responses.stream({ model, input: messages })) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert.equal(kinds.at(-1), "response.completed");

await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ model: "other", messages }), OpenAI.NotFoundError);
console.log("all right");
