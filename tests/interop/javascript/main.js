// Runs one client library. Requests and responses are JSON, one per line:
//   {"operation": "ask", "parts": [["text", "Hello"]]}  ->  {"result": ...} or {"error": "..."}
//   {"operation": "stream", ...}  ->  {"text": "..."} for each chunk, and {"result": null} or {"error": "..."}
//   {"operation": "cancel"} aborts the stream.
// Arguments: the name of the client, and the base URL of the server.

import { createInterface } from "node:readline";

globalThis.AI_SDK_LOG_WARNINGS = false; // it writes them to the standard output

// Imported on use: they take seconds.
const CLIENTS = {
  "anthropic-js": async (url) => new (await import("./anthropic.js")).AnthropicClient(url),
  "ollama-js": async (url) => new (await import("./ollama.js")).OllamaClient(url),
  "openai-js": async (url) => new (await import("./openai.js")).OpenAIClient(url),
  "openai-js-responses": async (url) => new (await import("./openai.js")).OpenAIResponsesClient(url),
  "ai-sdk": async (url) => (await import("./ai_sdk.js")).AiSdkClient.compatible(url),
  "ai-sdk-responses": async (url) => (await import("./ai_sdk.js")).AiSdkClient.openai(url),
  "langchain-js": async (url) => new (await import("./langchain.js")).LangChainClient(url, { useResponsesApi: false }),
  "langchain-js-responses": async (url) =>
    new (await import("./langchain.js")).LangChainClient(url, { useResponsesApi: true }),
};

const [name, url] = process.argv.slice(2);
const client = await CLIENTS[name](url);
let controller = new AbortController();

function send(response) {
  process.stdout.write(`${JSON.stringify(response)}\n`);
}

async function stream(parts, signal) {
  for await (const text of client.stream(parts, signal)) send({ text });
  return null;
}

async function run({ operation, parts }) {
  controller = new AbortController();
  try {
    const done = operation === "stream" ? stream(parts, controller.signal) : client[operation](parts);
    send({ result: await done });
  } catch (error) {
    send({ error: String(error) });
  }
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.operation === "cancel") controller.abort();
  else run(request); // not awaited: the next line may cancel it
}
process.exit();
