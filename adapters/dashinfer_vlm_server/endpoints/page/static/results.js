// What is shown below a response: why it failed or ended early, and its statistics.

import { element } from "./dom.js";
import { counted, decimal, text } from "./texts.js";

const MIN_ELAPSED = 50; // milliseconds from the first token to the last one for which a speed is meaningful

/** The next step for a status, where the server's message does not contain it. */
const NEXT_STEP = {
  401: "Enter the API key in the settings, then select Regenerate.",
  403: "Enter another API key in the settings, then select Regenerate.",
  413: "Remove an image, a video or a document, or use a smaller one.",
  429: "The server is busy.",
  503: "The server is unavailable. If this persists, contact its operator.",
};

/** An error, and the next step. */
export function problemBox({ message, status, param, file, retryAfter }) {
  const wait = retryAfter ? text("Try again in {time}.", { time: counted(Number(retryAfter), "second") }) : "";
  const next = [NEXT_STEP[status] ? text(NEXT_STEP[status]) : "", wait].filter(Boolean).join(" ");
  const fieldNote = param ? [`, ${text("field")} `, element("code", {}, param)] : [];
  return element(
    "div",
    { class: "problem", role: "alert" },
    element("p", { class: "problem-title" }, text(file ? "{file} could not be used" : "The request failed", { file })),
    element("p", {}, message),
    next && element("p", {}, next),
    status ? element("p", { class: "note" }, text("Status {status}", { status }), ...fieldNote) : null,
  );
}

/** Why a response is not complete. */
export function notes({ state, response, calls, timings }) {
  const note = (content) => [element("p", { class: "note" }, content)];
  if (state === "stopped") return note(text(response ? "You stopped the response here." : "You stopped the response."));
  if (state === "done" && timings.finishReason === "length") {
    return note(text("The response reached Max tokens. Increase it in the settings, then select Regenerate."));
  }
  return state === "done" && !response && !calls.length ? note(text("The response is empty.")) : [];
}

/** The time to the first token, and what the server counted. */
export function statistics({ start, first, last, usage }) {
  const rows = [];
  if (first) rows.push([text("First token"), duration(first - start)]);
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
  if (generated > 1 && elapsed >= MIN_ELAPSED) rows.push([text("Speed"), tokenRate(speed)]);
  rows.push(
    [text("Prompt"), partly(prompt, visual, "{count} of them visual")],
    [text("Response"), partly(generated, reasoned, "{count} of them reasoning")],
  );
  if (details?.cached_tokens) rows.push([text("From cache"), counted(details.cached_tokens, "token")]);
  return rows;
}

const partly = (all, count, phrase) => `${counted(all, "token")}${count ? `, ${text(phrase, { count })}` : ""}`;

export const tokenRate = (speed) => text("{speed} tokens/s", { speed: decimal(speed, speed < 100 ? 1 : 0) });

export const duration = (milliseconds) =>
  milliseconds < 1000 ? `${decimal(milliseconds)} ms` : `${decimal(milliseconds / 1000, 2)} s`;
