// A conversation of exchanges: a prompt, and its response as it is streamed.

import { ApiError, stream } from "./api.js";
import { ToolCalls, resultList } from "./calls.js";
import { announce, button, element } from "./dom.js";
import { render } from "./markdown.js";
import { Attachment, tile } from "./media.js";
import { notes, problemBox, statistics } from "./results.js";
import { text } from "./texts.js";

const MAX_ANNOUNCED = 600; // characters of a response that screen readers announce

export class Exchange extends EventTarget {
  #controller = null;
  #frame = 0;

  /** A prompt with images and videos, or the `results` of the tool calls of the previous response. */
  constructor({ text: prompt = "", attachments = [], results = null }) {
    super();
    Object.assign(this, { text: prompt, attachments, results, reasoning: "", response: "" });
    Object.assign(this, { state: "new", error: null, timings: {} });
    this.calls = new ToolCalls();
    this.element = element("li", { class: "exchange" });
    this.#build();
  }

  #build() {
    this.reasoningText = element("p", { class: "reasoning-text" });
    const summary = element("summary", {}, text("Reasoning"));
    this.reasoningBox = element("details", { class: "reasoning" }, summary, this.reasoningText);
    this.body = element("div", { class: "response-text" });
    this.callsPlace = element("div", {}, this.calls.element);
    this.footer = element("div", { class: "response-footer" });
    const parts = [this.reasoningBox, this.body, this.callsPlace, this.footer];
    this.container = element("article", { class: "response", "aria-label": text("Response") }, ...parts);
    this.element.replaceChildren(this.#promptBox(), this.container);
  }

  #promptBox() {
    const { results, attachments } = this;
    return element(
      "article",
      { class: "prompt", "aria-label": results ? text("Tool results") : text("Your prompt") },
      attachments.length ? element("ul", { class: "attachments" }, ...attachments.map((item) => tile(item))) : null,
      this.text && element("p", {}, this.text),
      results && resultList(results),
    );
  }

  /** Show the exchange in another language; a running one when it has ended. */
  translate() {
    if (this.state === "running") this.addEventListener("state", () => this.translate(), { once: true });
    else {
      this.#build();
      this.#replaceCalls(this.calls.calls);
      this.#drawState();
    }
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
    const { text: prompt, results, reasoning, response, state, error, timings } = this;
    const attachments = this.attachments.map((attachment) => attachment.record());
    const problem = error && { message: error.message, status: error.status, param: error.param, file: error.file };
    const answer = { reasoning, response, calls: this.calls.calls, state, error: problem, timings };
    return { text: prompt, attachments, results, ...answer };
  }

  /** Create an exchange from what was stored. One that was running is shown as stopped. */
  static fromRecord({ attachments, text: prompt, results, reasoning = "", response, calls, state, error, timings }) {
    const exchange = new Exchange({ text: prompt, attachments: attachments.map(Attachment.fromRecord), results });
    Object.assign(exchange, { reasoning, response, timings, error });
    exchange.#replaceCalls(calls);
    exchange.#setState(state === "running" ? "stopped" : state);
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
    announce(text("Sent. Waiting for the response."));
    try {
      for await (const { progress, ...chunk } of stream(request, this.#controller.signal)) {
        if (progress) this.#showProgress(progress);
        else this.#addChunk(chunk);
      }
      this.#setState("done");
      const more = this.response.length > MAX_ANNOUNCED ? `… ${text("The response continues.")}` : "";
      const calls = this.calls.length ? ` ${text("Tool calls: {names}.", this.calls)}` : "";
      announce(`${text("Response:")} ${this.response.slice(0, MAX_ANNOUNCED)}${more}${calls}`);
    } catch (error) {
      if (error.name === "AbortError") {
        this.#setState("stopped");
        announce(text("Stopped."));
      } else this.#fail(error);
    }
  }

  stop() {
    this.#controller?.abort();
  }

  /** Show how much is encoded of what the model has to see before it responds. */
  #showProgress({ done, total }) {
    const state = done < total ? text("{done} of {total} images and pairs of frames encoded.", { done, total }) : text("Reading the prompt.");
    this.footer.replaceChildren(element("progress", { value: done, max: total }), note(state));
  }

  #addChunk(chunk) {
    if (chunk.loading) {
      this.footer.replaceChildren(note(text("Loading {loading}…", chunk)));
      this.dispatchEvent(new Event("loading"));
      return;
    }
    const [choice] = chunk.choices;
    this.timings.usage = chunk.usage ?? this.timings.usage;
    this.timings.finishReason = choice?.finish_reason ?? this.timings.finishReason;
    const { content, reasoning_content: reasoning, tool_calls: calls } = choice?.delta ?? {};
    if (!content && !reasoning && !calls?.length) return;
    // Only at these points, so that the user can open and close it.
    if (reasoning && !this.reasoning) this.reasoningBox.open = true;
    if (!reasoning && !this.response && !this.calls.length) this.reasoningBox.open = false;
    this.timings.last = performance.now();
    if (!this.timings.first) this.footer.replaceChildren(); // the progress, or that the model is being loaded
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
    this.#drawState();
    this.dispatchEvent(new Event("state"));
  }

  #drawState() {
    this.container.dataset.state = this.state;
    this.container.setAttribute("aria-busy", String(this.state === "running"));
    this.footer.replaceChildren(...(this.state === "running" ? [] : this.#footerParts()));
    this.#draw();
  }

  #footerParts() {
    const problem = this.error ? [problemBox(this.error)] : [];
    return [...problem, ...this.#resultForm(), ...notes(this), ...statistics(this.timings), this.#actions()];
  }

  #fail(error) {
    this.error = error instanceof ApiError ? error : new ApiError(text("This page could not read the response."));
    this.error.file = this.#fileAt(this.error.param);
    this.#setState("failed");
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
      this.response ? button(text("Copy"), dispatch("copy"), { class: "quiet" }) : null,
      button(text("Regenerate"), dispatch("regenerate"), { class: "quiet last-only" }),
      this.results
        ? null
        : button(text("Edit"), dispatch("edit"), { class: "quiet last-only", "aria-label": text("Edit the prompt") }),
      button(text("Code"), dispatch("code"), { class: "quiet", "aria-label": text("Code for this request") }),
    );
  }
}

const note = (content) => element("p", { class: "note" }, content);
