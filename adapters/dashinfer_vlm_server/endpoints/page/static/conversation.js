// A conversation of exchanges: a prompt, and its response as it is streamed.

import { ApiError, stream } from "./api.js";
import { ToolCalls, resultList } from "./calls.js";
import { announce, button, counted, element } from "./dom.js";
import { render } from "./markdown.js";
import { Attachment, tile } from "./media.js";

const MAX_ANNOUNCED = 600; // characters of a response that screen readers announce
const MIN_ELAPSED = 50; // milliseconds from the first token to the last one for which a speed is meaningful

/** The next step for a status, where the server's message does not contain it. */
const NEXT_STEP = {
  401: "Enter the API key in the settings, then select Regenerate.",
  403: "Enter another API key in the settings, then select Regenerate.",
  413: "Remove an image, a video or a document, or use a smaller one.",
  429: "The server is busy.",
  503: "The server is unavailable. If this persists, contact its operator.",
};

export class Exchange extends EventTarget {
  #controller = null;
  #frame = 0;

  /** A prompt with images and videos, or the `results` of the tool calls of the previous response. */
  constructor({ text = "", attachments = [], results = null }) {
    super();
    Object.assign(this, { text, attachments, results, reasoning: "", response: "" });
    Object.assign(this, { state: "new", error: null, timings: {} });
    this.calls = new ToolCalls();
    this.reasoningText = element("p", { class: "reasoning-text" });
    const summary = element("summary", {}, "Reasoning");
    this.reasoningBox = element("details", { class: "reasoning" }, summary, this.reasoningText);
    this.body = element("div", { class: "response-text" });
    this.footer = element("div", { class: "response-footer" });
    this.element = element(
      "li",
      { class: "exchange" },
      element(
        "article",
        { class: "prompt", "aria-label": results ? "Tool results" : "Your prompt" },
        attachments.length ? element("ul", { class: "attachments" }, ...attachments.map((item) => tile(item))) : null,
        text && element("p", {}, text),
        results && resultList(results),
      ),
      (this.container = element(
        "article",
        { class: "response", "aria-label": "Response" },
        this.reasoningBox,
        this.body,
        (this.callsPlace = element("div", {}, this.calls.element)),
        this.footer,
      )),
    );
  }

  /** The prompt as messages; `urlOf` returns the URL to use for an attachment. */
  messages(urlOf = (attachment) => attachment.url) {
    if (this.results) return this.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
    if (!this.attachments.length) return [{ role: "user", content: this.text }];
    const parts = this.attachments.map((attachment) => attachment.part(urlOf(attachment)));
    return [{ role: "user", content: this.text ? [...parts, { type: "text", text: this.text }] : parts }];
  }

  /** The messages for later requests: prompt and response, or none without a usable response. */
  history(urlOf) {
    const calls = this.state === "done" && this.calls.length > 0; // of a stopped response, they are incomplete
    if (this.state === "failed" || !(this.response || calls)) return [];
    const message = { role: "assistant", content: this.response || null };
    return [...this.messages(urlOf), calls ? { ...message, tool_calls: this.calls.messageCalls } : message];
  }

  /** What is stored of the exchange. */
  record() {
    const { text, results, reasoning, response, state, error, timings } = this;
    const attachments = this.attachments.map((attachment) => attachment.record());
    const problem = error && { message: error.message, status: error.status, param: error.param, file: error.file };
    return { text, attachments, results, reasoning, response, calls: this.calls.calls, state, error: problem, timings };
  }

  /** Create an exchange from what was stored. One that was running is shown as stopped. */
  static fromRecord({ attachments, text, results, reasoning = "", response, calls, state, error, timings }) {
    const exchange = new Exchange({ text, attachments: attachments.map(Attachment.fromRecord), results });
    Object.assign(exchange, { reasoning, response, timings, error });
    exchange.#replaceCalls(calls);
    exchange.#setState(state === "running" ? "stopped" : state);
    if (error) exchange.footer.prepend(errorBox(error));
    return exchange;
  }

  /** Send the request, and show the response while it is streamed. */
  async send(request) {
    this.error = null;
    this.messageIndex = request.messages.length - 1;
    this.#controller = new AbortController();
    this.reasoning = this.response = "";
    this.#replaceCalls([]);
    this.timings = { start: performance.now(), first: null, last: null, usage: null, finishReason: null };
    this.#setState("running");
    announce("Sent. Waiting for the response.");
    try {
      for await (const { progress, ...chunk } of stream(request, this.#controller.signal)) {
        if (progress) this.#showProgress(progress);
        else this.#addChunk(chunk);
      }
      this.#setState("done");
      const more = this.response.length > MAX_ANNOUNCED ? "… The response continues." : "";
      const calls = this.calls.length ? ` Tool calls: ${this.calls.names}.` : "";
      announce(`Response: ${this.response.slice(0, MAX_ANNOUNCED)}${more}${calls}`);
    } catch (error) {
      if (error.name === "AbortError") {
        this.#setState("stopped");
        announce("Stopped.");
      } else this.#fail(error);
    }
  }

  stop() {
    this.#controller?.abort();
  }

  /** Show how much is encoded of what the model has to see before it responds. */
  #showProgress({ done, total }) {
    const text = done < total ? `${done} of ${total} images and pairs of frames encoded.` : "Reading the prompt.";
    this.footer.replaceChildren(element("progress", { value: done, max: total }), element("p", { class: "note" }, text));
  }

  #addChunk(chunk) {
    const [choice] = chunk.choices;
    this.timings.usage = chunk.usage ?? this.timings.usage;
    this.timings.finishReason = choice?.finish_reason ?? this.timings.finishReason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (!content && !reasoning && !calls?.length) return;
    if (!this.timings.first) this.footer.replaceChildren(); // the progress
    // Only at these points, so that the user can open and close it.
    if (reasoning && !this.reasoning) this.reasoningBox.open = true;
    if (!reasoning && !this.response && !this.calls.length) this.reasoningBox.open = false;
    this.timings.last = performance.now();
    this.timings.first ??= this.timings.last;
    this.reasoning += reasoning ?? "";
    this.response += content ?? "";
    this.calls.add(calls ?? []);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    this.reasoningBox.hidden = !this.reasoning;
    this.reasoningText.textContent = this.reasoning;
    render(this.body, this.response);
    this.calls.draw();
    this.dispatchEvent(new Event("update"));
  }

  #replaceCalls(calls) {
    this.calls = new ToolCalls(calls);
    this.callsPlace.replaceChildren(this.calls.element);
  }

  #setState(state) {
    this.state = state;
    this.container.dataset.state = state;
    this.container.setAttribute("aria-busy", String(state === "running"));
    const parts = () => [...this.#resultForm(), ...notes(this), ...statistics(this.timings), this.#actions()];
    this.footer.replaceChildren(...(state === "running" ? [] : parts()));
    this.#draw();
    this.dispatchEvent(new Event("state"));
  }

  #fail(error) {
    this.error = error instanceof ApiError ? error : new ApiError("This page could not read the response.");
    this.error.file = this.#fileAt(this.error.param);
    this.#setState("failed");
    this.footer.prepend(errorBox(this.error));
    this.dispatchEvent(new Event("update"));
  }

  /** The name of the file of the prompt that a field of the request contains, if any. */
  #fileAt(param) {
    const [, message, part] = /^messages\[(\d+)\]\.content\[(\d+)\]/.exec(param) ?? [];
    return Number(message) === this.messageIndex ? this.attachments[part]?.name : undefined;
  }

  /** The form for the results of the tool calls, if the response has complete ones. */
  #resultForm() {
    if (this.state !== "done" || !this.calls.length) return [];
    return [this.calls.form((results) => this.dispatchEvent(new CustomEvent("results", { detail: results })))];
  }

  #actions() {
    const dispatch = (name) => () => this.dispatchEvent(new Event(name));
    return element(
      "div",
      { class: "actions" },
      this.response ? button("Copy", dispatch("copy"), { class: "quiet" }) : null,
      button("Regenerate", dispatch("regenerate"), { class: "quiet last-only" }),
      this.results
        ? null
        : button("Edit", dispatch("edit"), { class: "quiet last-only", "aria-label": "Edit the prompt" }),
      button("Code", dispatch("code"), { class: "quiet", "aria-label": "Code for this request" }),
    );
  }
}

function errorBox({ message, status, param, file, retryAfter }) {
  const wait = retryAfter ? ` Try again in ${counted(Number(retryAfter), "second")}.` : "";
  const next = `${NEXT_STEP[status] ?? ""}${wait}`;
  const fieldNote = param ? [", field ", element("code", {}, param)] : [];
  return element(
    "div",
    { class: "problem", role: "alert" },
    element("p", { class: "problem-title" }, file ? `${file} could not be used` : "The request failed"),
    element("p", {}, message),
    next && element("p", {}, next),
    status ? element("p", { class: "note" }, `Status ${status}`, ...fieldNote) : null,
  );
}

function notes({ state, response, calls, timings }) {
  const note = (text) => [element("p", { class: "note" }, text)];
  if (state === "stopped") return note(response ? "You stopped the response here." : "You stopped the response.");
  if (state === "done" && timings.finishReason === "length") {
    return note("The response reached Max tokens. Increase it in the settings, then select Regenerate.");
  }
  return state === "done" && !response && !calls.length ? note("The response is empty.") : [];
}

function statistics({ start, first, last, usage }) {
  const rows = [];
  if (first) rows.push(["First token", duration(first - start)]);
  if (usage) rows.push(...usageRows(usage, last - first));
  const items = rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return rows.length ? [element("dl", { class: "stats" }, ...items)] : [];
}

function usageRows(usage, elapsed) {
  const { completion_tokens: generated, prompt_tokens: prompt, prompt_tokens_details: details } = usage;
  const reasoned = usage.completion_tokens_details?.reasoning_tokens;
  const visual = (details?.image_tokens ?? 0) + (details?.video_tokens ?? 0);
  const rows = [];
  const speed = ((generated - 1) / elapsed) * 1000;
  if (generated > 1 && elapsed >= MIN_ELAPSED) rows.push(["Speed", `${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`]);
  rows.push(
    ["Prompt", `${counted(prompt, "token")}${visual ? `, ${visual} of them visual` : ""}`],
    ["Response", `${counted(generated, "token")}${reasoned ? `, ${reasoned} of them reasoning` : ""}`],
  );
  if (details?.cached_tokens) rows.push(["From cache", counted(details.cached_tokens, "token")]);
  return rows;
}

const duration = (milliseconds) =>
  milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
