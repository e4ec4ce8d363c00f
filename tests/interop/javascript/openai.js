// OpenAI's client, with both of its APIs.

import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { City, Color, MODEL, WEATHER, weather } from "./samples.js";

const PARAMETERS = z.toJSONSchema(City);

function connect(baseURL) {
  return new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
}

export class OpenAIClient {
  constructor(url) {
    this.completions = connect(url).chat.completions;
  }

  body(parts) {
    const content = parts.map(([kind, value]) =>
      kind === "text" ? { type: kind, text: value } : { type: `${kind}_url`, [`${kind}_url`]: { url: value } },
    );
    return { model: MODEL, messages: [{ role: "user", content }] };
  }

  async ask(parts) {
    const { choices, usage } = await this.completions.create(this.body(parts));
    return {
      text: choices[0].message.content,
      prompt_tokens: usage.prompt_tokens,
      completion_tokens: usage.completion_tokens,
    };
  }

  async callTool(parts) {
    const calls = [];
    const call = (input) => {
      calls.push(["weather", input]);
      return weather(input);
    };
    const tool = { name: "weather", description: WEATHER, parameters: PARAMETERS, parse: JSON.parse, function: call };
    const runner = this.completions.runTools({ ...this.body(parts), tools: [{ type: "function", function: tool }] });
    await runner.done();
    return calls;
  }

  async parse(parts) {
    const format = zodResponseFormat(Color, "Color");
    const { choices } = await this.completions.parse({ ...this.body(parts), response_format: format });
    return choices[0].message.parsed;
  }

  async *stream(parts, signal) {
    const chunks = await this.completions.create({ ...this.body(parts), stream: true }, { signal });
    for await (const chunk of chunks) yield chunk.choices[0].delta.content ?? "";
  }

  async continue(parts) {
    const { model, messages } = this.body(parts);
    const { choices } = await this.completions.create({ model, messages });
    const done = await this.completions.create({ model, messages: [...messages, choices[0].message, ...messages] });
    return done.choices[0].message.content;
  }
}

export class OpenAIResponsesClient {
  constructor(url) {
    this.responses = connect(url).responses;
  }

  body(parts) {
    const fields = { text: "text", image: "image_url", video: "video_url" };
    const content = parts.map(([kind, value]) => ({ type: `input_${kind}`, [fields[kind]]: value }));
    return { model: MODEL, input: [{ role: "user", content }] };
  }

  async ask(parts) {
    const { output_text: text, usage } = await this.responses.create(this.body(parts));
    return { text, prompt_tokens: usage.input_tokens, completion_tokens: usage.output_tokens };
  }

  async callTool(parts) {
    const tool = { type: "function", name: "weather", description: WEATHER, parameters: PARAMETERS, strict: true };
    const { output } = await this.responses.create({ ...this.body(parts), tools: [tool] });
    return output.filter((item) => item.type === "function_call").map((item) => [item.name, JSON.parse(item.arguments)]);
  }

  async parse(parts) {
    const text = { format: zodTextFormat(Color, "Color") };
    return (await this.responses.parse({ ...this.body(parts), text })).output_parsed;
  }

  async *stream(parts, signal) {
    const events = await this.responses.create({ ...this.body(parts), stream: true }, { signal });
    for await (const event of events) if (event.type === "response.output_text.delta") yield event.delta;
  }

  async continue(parts) {
    const { model, input } = this.body(parts);
    const { output } = await this.responses.create({ model, input });
    return (await this.responses.create({ model, input: [...input, ...output, ...input] })).output_text;
  }
}
