// Vercel's AI SDK, with its provider for compatible servers, and with its provider for OpenAI, which uses the Responses
// API.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";

import { City, Color, MODEL, WEATHER, weather } from "./samples.js";

export class AiSdkClient {
  static compatible(baseURL) {
    const options = { name: "server", baseURL, includeUsage: true, supportsStructuredOutputs: true };
    return new AiSdkClient(createOpenAICompatible(options)(MODEL));
  }

  static openai(baseURL) {
    return new AiSdkClient(createOpenAI({ baseURL, apiKey: "none" })(MODEL));
  }

  constructor(model) {
    this.model = model;
  }

  body(parts) {
    const content = parts.map(([kind, value]) =>
      kind === "text" ? { type: kind, text: value } : { type: "file", mediaType: kind, data: value },
    );
    return { model: this.model, maxRetries: 0, messages: [{ role: "user", content }] };
  }

  async ask(parts) {
    const { text, usage } = await generateText(this.body(parts));
    return { text, prompt_tokens: usage.inputTokens, completion_tokens: usage.outputTokens };
  }

  async callTool(parts) {
    const tools = { weather: tool({ description: WEATHER, inputSchema: City, execute: weather }) };
    const { steps } = await generateText({ ...this.body(parts), tools, stopWhen: isStepCount(2) });
    return steps.flatMap((step) => step.toolCalls.map((call) => [call.toolName, call.input]));
  }

  async parse(parts) {
    return (await generateText({ ...this.body(parts), output: Output.object({ schema: Color }) })).output;
  }

  async *stream(parts, abortSignal) {
    const { stream } = streamText({ ...this.body(parts), abortSignal, onError: () => {} });
    for await (const part of stream) {
      if (part.type === "error") throw part.error;
      if (part.type === "text-delta") yield part.text;
    }
  }

  async continue(parts) {
    const { messages, ...options } = this.body(parts);
    const { responseMessages } = await generateText({ ...options, messages });
    return (await generateText({ ...options, messages: [...messages, ...responseMessages, ...messages] })).text;
  }
}
