// Turns of a conversation: a question, and its answer as it comes.

import { Failure, stream } from "./api.js";
import { announce, button, counted, element } from "./dom.js";
import { render } from "./markdown.js";
import { tile } from "./media.js";

const SPOKEN = 600; // characters of an answer that are read out by themselves; the rest is there to be read

/** What a person can do where the server's own words do not say. */
const NEXT_STEP = {
  401: "Enter the API key in the settings, then ask again.",
  403: "Enter another API key in the settings, then ask again.",
  413: "Take out a picture or a video, or send a smaller one.",
  429: "The server is busy.",
  503: "The server cannot answer now; its operator has to look at it.",
};

export class Turn extends EventTarget {
  #controller = null;
  #frame = 0;

  constructor({ text, attachments }) {
    super();
    Object.assign(this, { text, attachments, answer: "", state: "new", failure: null });
    this.body = element("div", { class: "answer-text" });
    this.foot = element("div", { class: "answer-foot" });
    this.element = element(
      "li",
      { class: "turn" },
      element(
        "article",
        { class: "question", "aria-label": "Your question" },
        attachments.length ? element("ul", { class: "tray" }, ...attachments.map((item) => tile(item))) : null,
        text && element("p", {}, text),
      ),
      (this.place = element("article", { class: "answer", "aria-label": "Answer" }, this.body, this.foot)),
    );
  }

  /** The question as a message; `urlOf` says what stands for the URL of an attachment. */
  message(urlOf = (attachment) => attachment.url) {
    if (!this.attachments.length) return { role: "user", content: this.text };
    const parts = this.attachments.map((attachment) => attachment.part(urlOf(attachment)));
    return { role: "user", content: this.text ? [...parts, { type: "text", text: this.text }] : parts };
  }

  /** Question and answer, for the questions after it; nothing if there is no answer to go on from. */
  history(urlOf) {
    return this.answer && this.state !== "failed"
      ? [this.message(urlOf), { role: "assistant", content: this.answer }]
      : [];
  }

  /** Ask, and show the answer while it comes. */
  async ask(request) {
    this.failure = null;
    this.#controller = new AbortController();
    this.answer = "";
    this.measures = { asked: performance.now(), first: null, last: null, usage: null, finish: null };
    this.#enter("running");
    announce("Asked. The answer comes.");
    try {
      for await (const chunk of stream(request, this.#controller.signal)) this.#take(chunk);
      this.#enter("done");
      announce(`Answer: ${this.answer.slice(0, SPOKEN)}${this.answer.length > SPOKEN ? "… It goes on." : ""}`);
    } catch (error) {
      if (error.name === "AbortError") {
        this.#enter("stopped");
        announce("Stopped.");
      } else this.#fail(error);
    }
  }

  stop() {
    this.#controller?.abort();
  }

  #take(chunk) {
    const [choice] = chunk.choices;
    this.measures.usage = chunk.usage ?? this.measures.usage;
    this.measures.finish = choice?.finish_reason ?? this.measures.finish;
    const piece = choice?.delta.content;
    if (!piece) return;
    this.measures.last = performance.now();
    this.measures.first ??= this.measures.last;
    this.answer += piece;
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    render(this.body, this.answer);
    this.dispatchEvent(new Event("grow"));
  }

  #enter(state) {
    this.state = state;
    this.place.dataset.state = state;
    this.place.setAttribute("aria-busy", String(state === "running"));
    this.foot.replaceChildren(
      ...(state === "running" ? [] : [...notes(this), ...measured(this.measures), this.#actions()]),
    );
    this.#draw();
    this.dispatchEvent(new Event("state"));
  }

  #fail(error) {
    this.failure = error instanceof Failure ? error : new Failure("This page failed to read the answer.");
    this.#enter("failed");
    this.foot.prepend(problem(this.failure));
    this.dispatchEvent(new Event("grow"));
  }

  #actions() {
    const tell = (name) => () => this.dispatchEvent(new Event(name));
    return element(
      "div",
      { class: "actions" },
      this.answer ? button("Copy", tell("copy"), { class: "quiet" }) : null,
      button("Ask again", tell("again"), { class: "quiet last-only" }),
      button("Edit", tell("edit"), { class: "quiet last-only", "aria-label": "Edit the question" }),
      button("Code", tell("code"), { class: "quiet", "aria-label": "Code of this request" }),
    );
  }
}

function problem({ message, status, param, retryAfter }) {
  const wait = retryAfter ? ` Try again in ${counted(Number(retryAfter), "second")}.` : "";
  const next = `${NEXT_STEP[status] ?? ""}${wait}`;
  return element(
    "div",
    { class: "problem", role: "alert" },
    element("p", { class: "problem-title" }, status ? `No answer (${status})` : "No answer"),
    element("p", {}, message),
    next && element("p", {}, next),
    param && element("p", { class: "note" }, "About: ", element("code", {}, param)),
  );
}

function notes({ state, answer, measures }) {
  const note = (text) => [element("p", { class: "note" }, text)];
  if (state === "stopped") return note(answer ? "You stopped it here." : "You stopped it before it began.");
  if (state === "done" && measures.finish === "length") {
    return note("It was cut off at the most tokens: raise them in the settings, and ask again.");
  }
  return state === "done" && !answer ? note("The answer is empty.") : [];
}

function measured({ asked, first, last, usage }) {
  const rows = [];
  if (first) rows.push(["First token", time(first - asked)]);
  if (usage) rows.push(...used(usage, last - first));
  const shown = rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  return rows.length ? [element("dl", { class: "measures" }, ...shown)] : [];
}

function used({ completion_tokens: written, prompt_tokens: read, prompt_tokens_details: details }, elapsed) {
  const seen = (details?.image_tokens ?? 0) + (details?.video_tokens ?? 0);
  const rows = [];
  if (written > 1 && elapsed > 0) rows.push(["Speed", `${(((written - 1) / elapsed) * 1000).toFixed(1)} tokens/s`]);
  rows.push(
    ["Prompt", `${counted(read, "token")}${seen ? `, ${seen} of them seen` : ""}`],
    ["Answer", counted(written, "token")],
  );
  if (details?.cached_tokens) rows.push(["From cache", counted(details.cached_tokens, "token")]);
  return rows;
}

const time = (milliseconds) =>
  milliseconds < 1000 ? `${milliseconds.toFixed(0)} ms` : `${(milliseconds / 1000).toFixed(2)} s`;
