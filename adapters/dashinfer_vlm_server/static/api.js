// The server's API: OpenAI's chat completions, and what this server adds.
// Addresses are relative, so that the page also works behind a proxy that serves it under a path.

const KEY = "dashinfer-vlm-key";

/** What the server answered, or why it did not. */
export class Failure extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

/** The API's address, for code that runs elsewhere. */
export const baseUrl = () => new URL("v1", document.baseURI).href;

/** The name of the model that is served here. */
export async function model(signal) {
  const { data } = await (await call("v1/models", { signal })).json();
  return data[0].id;
}

/** How the server is: `status`, `decoder`, `max_model_len`; also while it cannot answer. */
export async function health(signal) {
  return (await fetch("health", { signal })).json();
}

/** What the model would see of `messages`; null where the server cannot tell. */
export async function preview(messages, signal) {
  try {
    return await (await call("v1/media/preview", { body: { messages }, signal })).json();
  } catch (error) {
    if (error instanceof Failure && error.code === "unknown_url") return null;
    throw error;
  }
}

/** The chunks of an answer, as they come. */
export async function* stream(request, signal) {
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", { body, signal });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Failure(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new Failure("The connection broke off before the answer was complete. Ask again.");
}

async function call(path, { body, signal }) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The server cannot be reached: see whether it runs, then ask again.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const about = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = await response.json();
    return new Failure(error.message, { ...error, ...about });
  } catch {
    return new Failure(`The server answered with the status ${response.status}.`, about);
  }
}

/** The data of server-sent events; each of ours is one line. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield block.slice("data: ".length);
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already, which its reader was told
  }
}
