// A client for the server's API. URLs are relative, so that the page also works behind a proxy that serves it under a
// path.

import { text } from "./texts.js";

const KEY = "dashinfer-vlm-key";
const DATA = "data: ";
const PROGRESS = /^: vision (\d+)\/(\d+)$/;
const LOADING = ": loading ";

/** An error response of the server, or a connection error. */
export class ApiError extends Error {
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

/** The API's absolute URL, for generated code. */
export const baseUrl = () => new URL("v1", document.baseURI).href;

/**
 * The served models: `id`, `root`, `parent`, the `state` of a managed one, and if they are known `max_model_len`,
 * `description`, `example_prompts` and `generation_config`.
 */
export async function models() {
  const { data } = await (await call("v1/models")).json();
  return data;
}

/** Load a model, as any request to it does: operators could disallow `v1/models/load`. */
export const load = (model) => call("tokenize", { body: { model, prompt: "Hello" } });

/** The status of the server: `status`, `max_model_len`; available even if the engine is not ready. */
export async function health() {
  return (await fetch("health")).json();
}

/** A preview of the media in a request as the model sees them; null if the server does not support previews. */
export async function preview(request) {
  try {
    return await (await call("v1/media/preview", { body: request })).json();
  } catch (error) {
    if (error instanceof ApiError && error.code === "not_supported") return null;
    throw error;
  }
}

/**
 * The chunks of a streamed response; before the first one, `{ loading: name }` while it waits for its model, and objects
 * with `progress`: what is encoded, and in total.
 */
export async function* stream(request, signal) {
  const body = { ...request, stream: true, stream_options: { include_usage: true } };
  const response = await call("v1/chat/completions", { body, signal });
  for await (const block of events(response.body)) {
    if (block.startsWith(LOADING)) yield { loading: block.slice(LOADING.length) };
    const [, done, total] = PROGRESS.exec(block) ?? [];
    if (total) yield { progress: { done: Number(done), total: Number(total) } };
    if (!block.startsWith(DATA)) continue;
    const data = block.slice(DATA.length);
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError(text("The connection was lost before the response was complete. Select Regenerate."));
}

async function call(path, { body, signal } = {}) {
  const headers = key() ? { Authorization: `Bearer ${key()}` } : {};
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(text("The server cannot be reached. Check that it is running, then select Regenerate."));
  }
  if (!response.ok) throw await errorFrom(response);
  return response;
}

async function errorFrom(response) {
  const details = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...error, ...details });
  } catch {
    return new ApiError(text("The server returned status {status}.", details), details);
  }
}

/** Server-sent events and comments; the server sends one line for each. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(endUnlessAborted);
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      yield* blocks;
    }
  } finally {
    reader.cancel().catch(() => {}); // if the stream has failed
  }
}

/** A lost connection ends a stream, as does a server that closes it too early. */
function endUnlessAborted(error) {
  if (error.name === "AbortError") throw error;
  return { done: true };
}
