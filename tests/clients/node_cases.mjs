// openai for Node and the AI SDK: text, objects, tools, streams. node node_cases.mjs URL MODEL
import { createRequire } from "node:module";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const v1 = `${url}/v1`, apiKey = "none";
const city = z.object({ city: z.string(), unit: z.enum(["C", "F"]) });
const messages = [{ role: "user", content: "Name a city." }];
const client = new OpenAI({ baseURL: v1, apiKey, maxRetries: 0, timeout: 300_000 });
const check = (condition, what = "wrong") => { if (!condition) throw new Error(what); };

const cases = {
  async openai_whole() {
    check((await client.chat.completions.create({ model, messages, max_tokens: 9 })).choices[0].message.content);
  },
  async openai_stream() {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 9, stream: true }))
      text += chunk.choices[0]?.delta?.content ?? "";
    check(text);
  },
  async openai_parse() {
    const response_format = zodResponseFormat(city, "city");
    const answer = await client.chat.completions.parse({ model, messages, max_tokens: 120, response_format });
    check(["C", "F"].includes(answer.choices[0].message.parsed.unit));
  },
  async openai_tools() {
    const parameters = { type: "object", properties: { unit: { enum: ["C", "F"] } }, required: ["unit"] };
    const tools = [{ type: "function", function: { name: "weather", parameters } }];
    const answer = await client.chat.completions.create({
      model, messages, tools, tool_choice: "required", max_tokens: 120,
    });
    check(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).unit);
  },
  async openai_responses() {
    check((await client.responses.create({ model, input: "hi", max_output_tokens: 9 })).output_text);
  },
  async openai_responses_stream() {
    const kinds = [];
    for await (const event of await client.responses.create({ model, input: "hi", max_output_tokens: 9, stream: true }))
      kinds.push(event.type);
    check(kinds.at(-1) === "response.incomplete" || kinds.at(-1) === "response.completed", kinds.at(-1));
  },
};

const providers = {
  chat: createOpenAI({ baseURL: v1, apiKey }).chat(model),
  responses: createOpenAI({ baseURL: v1, apiKey })(model),
  compatible: createOpenAICompatible({ name: "chorus", baseURL: v1, apiKey, supportsStructuredOutputs: true })(model),
  anthropic: createAnthropic({ baseURL: v1, apiKey })(model),
};
for (const [name, asked] of Object.entries(providers)) {
  const shared = { model: asked, prompt: "Name a city.", maxOutputTokens: 120, maxRetries: 0 };
  const weather = tool({ inputSchema: z.object({ unit: z.enum(["C", "F"]) }), execute: async ({ unit }) => `21 ${unit}` });
  cases[`${name}_text`] = async () => check((await generateText({ ...shared, maxOutputTokens: 9 })).text);
  cases[`${name}_stream`] = async () => {
    let text = "";
    for await (const piece of streamText({ ...shared, maxOutputTokens: 9 }).textStream) text += piece;
    check(text);
  };
  cases[`${name}_object`] = async () => check((await generateObject({ ...shared, schema: city })).object.unit);
  cases[`${name}_object_stream`] = async () => {
    const answer = streamObject({ ...shared, schema: city });
    for await (const _ of answer.partialObjectStream);
    check((await answer.object).unit);
  };
  cases[`${name}_tools`] = async () => {
    const answer = await generateText({ ...shared, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1) });
    check(answer.toolResults[0].output.startsWith("21"));
  };
  cases[`${name}_steps`] = async () => {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const answer = await generateText({ ...shared, tools: { weather }, prepareStep, stopWhen: stepCountIs(2) });
    check(answer.steps.length === 2 && answer.steps[0].toolCalls.length > 0);
  };
}

const failed = [];
for (const [name, run] of Object.entries(cases)) {
  try {
    await run();
  } catch (error) {
    failed.push(name);
    console.log(`node_cases.${name}: ${error.name}: ${String(error.message).slice(0, 300)}`);
  }
}
const installed = createRequire(import.meta.url);
const versions = ["openai", "ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"].map((name) => {
  const at = new URL(`./node_modules/${name}/package.json`, import.meta.url);
  return `${name} ${installed(at.pathname).version}`;
});
const count = Object.keys(cases).length;
console.log(`${versions.join(" ")}: ${count - failed.length} of ${count}; failed: ${JSON.stringify(failed)}`);
process.exit(failed.length ? 1 : 0);
