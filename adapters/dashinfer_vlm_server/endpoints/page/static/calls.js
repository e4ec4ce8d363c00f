// Tool calls of a response: shown while they are streamed, and answered by the user, since the page runs no tools.

import { element } from "./dom.js";
import { text } from "./texts.js";

/** The tool calls of one response. */
export class ToolCalls {
  constructor(calls = []) {
    this.calls = calls;
    this.element = element("ul", { class: "calls", "aria-label": text("Tool calls") });
    this.draw();
  }

  /** Add the `tool_calls` of a delta: the first one of a call has its name, all have a piece of its arguments. */
  add(deltas) {
    for (const { index, id, function: { name, arguments: piece } = {} } of deltas) {
      this.calls[index] ??= { id: "", name: "", arguments: "" };
      const call = this.calls[index];
      call.id ||= id ?? "";
      call.name ||= name ?? "";
      call.arguments += piece ?? "";
    }
  }

  get length() {
    return this.calls.length;
  }

  get names() {
    return this.calls.map(({ name }) => name).join(", ");
  }

  /** The calls in a message of the assistant. */
  get messageCalls() {
    return this.calls.map(({ id, name, arguments: json }) => ({
      id,
      type: "function",
      function: { name, arguments: json },
    }));
  }

  draw() {
    this.calls.forEach((call, index) => {
      const item = this.element.children[index] ?? this.element.appendChild(callItem());
      item.querySelector(".call-name").textContent = call.name;
      item.querySelector("pre code").textContent = indented(call.arguments);
    });
    this.element.hidden = this.length === 0;
  }

  /** A form for the results of the calls; `onresults` receives `[{ id, name, content }]`. */
  form(onresults) {
    const properties = { class: "code", rows: 2, required: true, spellcheck: "false" };
    const fields = this.calls.map(() => element("textarea", properties));
    const suffix = (call) => (this.calls.length > 1 ? ` ${shortened(call.arguments)}` : "");
    const labels = this.calls.map((call, index) =>
      element("label", { class: "field" }, `${text("Result of {name}", call)}${suffix(call)}`, fields[index]),
    );
    const onsubmit = (event) => {
      event.preventDefault();
      onresults(this.calls.map(({ id, name }, index) => ({ id, name, content: fields[index].value })));
    };
    const send = element("button", { type: "submit", class: "primary" }, text("Send results"));
    const form = { class: "results last-only", "aria-label": text("Results of the tool calls"), onsubmit };
    return element("form", form, ...labels, send);
  }
}

const head = (kind, name) =>
  element(
    "p",
    { class: "call-head" },
    element("span", { class: "note" }, kind),
    element("code", { class: "call-name" }, name),
  );

const callItem = () =>
  element(
    "li",
    { class: "call" },
    head(text("Tool call"), ""),
    element("pre", { tabindex: 0, role: "group", "aria-label": text("Arguments") }, element("code")),
  );

/** Show the results that a request sends. */
export const resultList = (results) =>
  element("ul", { class: "calls" }, ...results.map(resultItem));

function resultItem({ name, content }) {
  const properties = { tabindex: 0, role: "group", "aria-label": text("Result of {name}", { name }) };
  const shown = element("pre", properties, element("code", {}, content));
  return element("li", { class: "call" }, head(text("Result of"), name), shown);
}

/** The beginning of arguments, which distinguishes several calls of one tool. */
const shortened = (json) => (json.length > 60 ? `${json.slice(0, 59)}…` : json);

/** Arguments as indented JSON, or as they are until they are complete. */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
