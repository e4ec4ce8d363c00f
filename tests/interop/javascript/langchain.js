// LangChain.js with its `ChatOpenAI`.

import { HumanMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOpenAI } from "@langchain/openai";

import { City, Color, MODEL, WEATHER, weather } from "./samples.js";

export class LangChainClient {
  constructor(baseURL, options) {
    this.chat = new ChatOpenAI({ model: MODEL, apiKey: "none", maxRetries: 0, configuration: { baseURL }, ...options });
  }

  messages(parts) {
    const content = parts.map(([kind, value]) =>
      kind === "text" ? { type: kind, text: value } : { type: `${kind}_url`, [`${kind}_url`]: { url: value } },
    );
    return [new HumanMessage({ content })];
  }

  async ask(parts) {
    const { text, usage_metadata: usage } = await this.chat.invoke(this.messages(parts));
    return { text, prompt_tokens: usage.input_tokens, completion_tokens: usage.output_tokens };
  }

  async callTool(parts) {
    const chat = this.chat.bindTools([tool(weather, { name: "weather", description: WEATHER, schema: City })]);
    const { tool_calls: calls } = await chat.invoke(this.messages(parts));
    return calls.map((call) => [call.name, call.args]);
  }

  async parse(parts) {
    return this.chat.withStructuredOutput(Color, { name: "Color" }).invoke(this.messages(parts));
  }

  async *stream(parts, signal) {
    for await (const chunk of await this.chat.stream(this.messages(parts), { signal })) yield chunk.text;
  }

  async continue(parts) {
    const messages = this.messages(parts);
    const reply = await this.chat.invoke(messages);
    return (await this.chat.invoke([...messages, reply, ...messages])).text;
  }
}
