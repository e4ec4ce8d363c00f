// Ollama's client.

import { Ollama } from "ollama";
import { z } from "zod";

import { City, Color, MODEL, WEATHER } from "./samples.js";

const TOOL = {
  type: "function",
  function: { name: "weather", description: WEATHER, parameters: z.toJSONSchema(City) },
};

export class OllamaClient {
  constructor(url) {
    this.ollama = new Ollama({ host: url.replace(/\/v1$/, "") });
  }

  body(parts) {
    const texts = parts.filter(([kind]) => kind === "text").map(([, value]) => value);
    const images = parts.filter(([kind]) => kind === "image").map(([, value]) => value.split(";base64,")[1]);
    return { model: MODEL, messages: [{ role: "user", content: texts.join(""), images }] };
  }

  async ask(parts) {
    const { message, prompt_eval_count, eval_count } = await this.ollama.chat(this.body(parts));
    return { text: message.content, prompt_tokens: prompt_eval_count, completion_tokens: eval_count };
  }

  async callTool(parts) {
    const { message } = await this.ollama.chat({ ...this.body(parts), tools: [TOOL] });
    return message.tool_calls.map((call) => [call.function.name, call.function.arguments]);
  }

  async parse(parts) {
    const { message } = await this.ollama.chat({ ...this.body(parts), format: z.toJSONSchema(Color) });
    return Color.parse(JSON.parse(message.content));
  }

  async *stream(parts, signal) {
    const chunks = await this.ollama.chat({ ...this.body(parts), stream: true });
    signal.addEventListener("abort", () => chunks.abort());
    for await (const chunk of chunks) yield chunk.message.content;
  }

  async continue(parts) {
    const { model, messages } = this.body(parts);
    const { message } = await this.ollama.chat({ model, messages });
    return (await this.ollama.chat({ model, messages: [...messages, message, ...messages] })).message.content;
  }
}
