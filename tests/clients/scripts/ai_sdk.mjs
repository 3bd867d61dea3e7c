// Vercel's AI SDK, by its packages for servers like OpenAI's, for OpenAI and for Anthropic.
import assert from "node:assert/strict";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const apiKey = process.env.KEY;
const baseURL = `${process.env.URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "smoe", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const models = {
  compatible: compatible("demo"),
  chat: openai.chat("demo"),
  responses: openai.responses("demo"),
  anthropic: createAnthropic({ baseURL, apiKey })("demo"),
};
const prompt = "How warm is it?";
const warmth = tool({
  description: "How warm a city is",
  inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]) }),
  execute: async ({ city }) => (city === "Oslo" ? process.env.RESULT : "unknown"),
});
const tools = { warmth };
const schema = z.object({ name: z.enum(["Tom", "Lily"]), age: z.number().int().min(7).max(8) });

for (const [name, model] of Object.entries(models)) {
  const asked = { model, prompt, maxRetries: 0, maxOutputTokens: 300 };
  const plain = await generateText({ ...asked, seed: name === "responses" || name === "anthropic" ? undefined : 5 });
  assert.equal(plain.text, "Hello there, you.", name);
  assert.ok(plain.usage.inputTokens > 10 && plain.usage.outputTokens > 10, name);

  const agent = await generateText({ ...asked, tools, stopWhen: stepCountIs(3) });
  assert.equal(agent.text, "It is cold.", name);
  assert.equal(agent.steps.length, 2, name);

  const stream = streamText({ ...asked, tools, stopWhen: stepCountIs(3), onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const piece of stream.textStream) text += piece;
  assert.equal(text, "Wait.It is cold.", name);
  assert.ok((await stream.totalUsage).outputTokens > 10, name);

  const { object } = await generateObject({ ...asked, schema });
  assert.ok(schema.parse(object), name);
  await assert.rejects(generateText({ ...asked, prompt: "word ".repeat(5000) }), /context length|too long/, name);
}
console.log("all right");
