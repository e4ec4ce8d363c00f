// Anthropic's client.

import Anthropic from "@anthropic-ai/sdk";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

import { City, Color, MODEL, WEATHER } from "./samples.js";

const TOOL = { name: "weather", description: WEATHER, input_schema: z.toJSONSchema(City) };

function source(url) {
  const [mediaType, data] = url.slice("data:".length).split(";base64,");
  return { type: "base64", media_type: mediaType, data };
}

export class AnthropicClient {
  constructor(url) {
    this.messages = new Anthropic({ baseURL: url.replace(/\/v1$/, ""), apiKey: "none", maxRetries: 0 }).messages;
  }

  body(parts) {
    const content = parts.map(([kind, value]) =>
      kind === "text" ? { type: kind, text: value } : { type: kind, source: source(value) },
    );
    return { model: MODEL, max_tokens: 500, messages: [{ role: "user", content }] };
  }

  async ask(parts) {
    const { content, usage } = await this.messages.create(this.body(parts));
    return {
      text: content[0].text,
      prompt_tokens: usage.input_tokens + usage.cache_read_input_tokens,
      completion_tokens: usage.output_tokens,
    };
  }

  async callTool(parts) {
    const { content } = await this.messages.create({ ...this.body(parts), tools: [TOOL] });
    return content.filter((block) => block.type === "tool_use").map((block) => [block.name, block.input]);
  }

  async parse(parts) {
    const format = zodOutputFormat(Color);
    return (await this.messages.parse({ ...this.body(parts), output_config: { format } })).parsed_output;
  }

  async *stream(parts, signal) {
    const events = this.messages.stream(this.body(parts), { signal });
    for await (const event of events) {
      if (event.type === "content_block_delta" && event.delta.type === "text_delta") yield event.delta.text;
    }
  }

  async continue(parts) {
    const { messages, ...body } = this.body(parts);
    const { role, content } = await this.messages.create({ ...body, messages });
    const done = await this.messages.create({ ...body, messages: [...messages, { role, content }, ...messages] });
    return done.content[0].text;
  }
}
