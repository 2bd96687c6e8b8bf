// Talks to two servers as a program with the official client would, and prints what it got as JSON.
//
//     node talk.mjs '{"url": ..., "scriptedUrl": ..., "model": ..., "messages": [...], "talk": {...}, "tool": {...}}'

import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { url, scriptedUrl, model, messages, talk, tool } = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const scripted = new OpenAI({ baseURL: scriptedUrl, apiKey: "none", maxRetries: 0 });

const Point = z.object({ x: z.number().int().min(0).max(99), y: z.enum(["up", "down"]) }).strict();

async function whole() {
  const { choices, usage } = await client.chat.completions.create({ model, messages, ...talk });
  return { text: choices[0].message.content, reason: choices[0].finish_reason, usage };
}

async function streamed() {
  const options = { stream: true, stream_options: { include_usage: true } };
  const stream = await client.chat.completions.create({ model, messages, ...talk, ...options });
  const found = { text: "", reason: null, usage: null };
  for await (const chunk of stream) {
    found.text += chunk.choices[0]?.delta.content ?? "";
    found.reason = chunk.choices[0]?.finish_reason ?? found.reason;
    found.usage = chunk.usage ?? found.usage;
  }
  return found;
}

async function completion() {
  const asked = { model, prompt: "one two", ...talk };
  const { choices } = await client.completions.create(asked);
  let text = "";
  for await (const chunk of await client.completions.create({ ...asked, stream: true })) {
    text += chunk.choices[0].text;
  }
  return { whole: choices[0].text, streamed: text };
}

async function parsed() {
  const asked = { model, messages, seed: 1, response_format: zodResponseFormat(Point, "point") };
  const answer = await client.chat.completions.parse(asked);
  const stream = await client.chat.completions.stream(asked).finalChatCompletion();
  return { whole: answer.choices[0].message.parsed, streamed: stream.choices[0].message.parsed };
}

async function requiredCall() {
  const asked = { model, messages, seed: 1, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
  const answer = await client.chat.completions.create(asked);
  const stream = await client.chat.completions.stream(asked).finalChatCompletion();
  return [answer, stream].map(({ choices }) => ({
    reason: choices[0].finish_reason,
    calls: choices[0].message.tool_calls,
  }));
}

// The client's own loop: it calls the function and says what came of it, until the model is content.
async function conversation(stream) {
  const asked = [];
  const weather = ({ city, days }) => {
    asked.push({ city, days });
    return `warm in ${city} for ${days} days`;
  };
  const tools = [{ ...tool, function: { ...tool.function, function: weather, parse: JSON.parse } }];
  const runner = scripted.chat.completions.runTools({ model, messages, tools, stream });
  return { text: await runner.finalContent(), asked };
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    const { status, param, code, type, message } = error;
    return { kind: error.constructor.name, status, param, code, type, message };
  }
  return null;
}

const create = (fields) => client.chat.completions.create({ model, messages, ...fields });

console.log(
  JSON.stringify({
    whole: await whole(),
    streamed: await streamed(),
    completion: await completion(),
    parsed: await parsed(),
    requiredCall: await requiredCall(),
    conversation: await conversation(false),
    streamedConversation: await conversation(true),
    wrongField: await failure(create({ temperature: 9 })),
    wrongFieldStreamed: await failure(create({ messages: [], stream: true })),
    wrongModel: await failure(create({ model: "gpt-9" })),
    models: (await client.models.list()).data.map(({ id }) => id),
  }),
);
