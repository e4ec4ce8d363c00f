// Converts the settings form to request fields.

import { setKey } from "./api.js";
import { byId } from "./dom.js";
import { isJson, parseJson, schemaProblem, toolsProblem } from "./schema.js";

const NUMBERS = ["temperature", "top_p", "top_k", "seed", "max_tokens", "repetition_penalty"];

const SCHEMA = {
  type: "object",
  properties: {
    shapes: {
      type: "array",
      items: { type: "string", enum: ["circle", "square", "triangle", "star", "cross"] },
      maxItems: 4,
    },
  },
  required: ["shapes"],
};

const TOOLS = [
  {
    type: "function",
    function: {
      name: "find_shapes",
      description: "Find the shapes of a color.",
      parameters: {
        type: "object",
        properties: { color: { type: "string", enum: ["red", "green", "blue", "yellow"] } }, // short for every model
        required: ["color"],
      },
    },
  },
];

/** A text field with JSON, which is checked while it is edited. */
class JsonField {
  #problemOf;
  #isUsed;

  constructor(id, { problemOf, isUsed, fields }) {
    this.input = byId(id);
    this.message = byId(`${id}-error`);
    this.fields = fields;
    this.#problemOf = problemOf;
    this.#isUsed = isUsed;
    this.input.addEventListener("input", () => this.check());
    byId(`${id}-format`).addEventListener("click", () => this.format());
  }

  get value() {
    return parseJson(this.input.value);
  }

  /** Check the text; an error prevents the request from being sent. */
  check() {
    const problem = this.#isUsed() ? this.#problem() : "";
    this.input.setCustomValidity(problem);
    this.#show(problem);
  }

  /** Indent the text, if it is valid JSON. */
  format() {
    this.check();
    if (this.#isUsed() && isJson(this.input.value)) this.input.value = JSON.stringify(this.value, null, 2);
    this.input.focus();
  }

  /** Show an error of the server, until the text is edited. */
  showServerError({ param, message }) {
    if (this.fields.some((field) => param?.startsWith(field))) this.#show(message);
  }

  #problem() {
    try {
      return this.#problemOf(this.value);
    } catch (error) {
      return error.message;
    }
  }

  #show(problem) {
    this.input.setAttribute("aria-invalid", String(problem !== ""));
    this.message.textContent = problem;
  }
}

let schema = null;
let tools = null;

export function openSettings() {
  byId("schema").value = JSON.stringify(SCHEMA, null, 2);
  schema = new JsonField("schema", {
    problemOf: (value) => schemaProblem(value),
    isUsed: () => byId("format").value === "json_schema",
    fields: ["response_format"],
  });
  tools = new JsonField("tools", {
    problemOf: toolsProblem,
    isUsed: () => byId("tools").value.trim() !== "",
    fields: ["tools", "tool_choice"],
  });
  byId("format").addEventListener("change", () => {
    byId("schema-field").hidden = byId("format").value !== "json_schema";
    schema.check();
  });
  byId("tools").addEventListener("input", showToolChoice);
  byId("tools-example").addEventListener("click", () => {
    byId("tools").value = JSON.stringify(TOOLS, null, 2);
    byId("tools").dispatchEvent(new Event("input"));
    byId("tools").focus();
    byId("tools").setSelectionRange(0, 0);
    byId("tools").scrollTop = 0;
  });
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("key").addEventListener("change", () => setKey(byId("key").value.trim()));
  showToolChoice();
}

function showToolChoice() {
  const hasTools = byId("tools").value.trim() !== "";
  byId("tool-choice-field").hidden = !hasTools;
  byId("tools-example").hidden = hasTools;
  byId("tools-format").hidden = !hasTools;
}

/** Start with a model's own sampling parameters. Fields that the user has edited keep their values. */
export function setDefaults(parameters) {
  for (const name of NUMBERS) byId(name).defaultValue = parameters[name] ?? "";
}

/** The request fields that are set. */
export function options() {
  const fields = {};
  for (const name of NUMBERS) if (byId(name).value !== "") fields[name] = byId(name).valueAsNumber;
  const stopStrings = byId("stop_strings").value.split("\n").filter(Boolean);
  if (stopStrings.length) fields.stop = stopStrings;
  const format = byId("format").value;
  if (format === "json_object") fields.response_format = { type: format };
  if (format === "json_schema")
    fields.response_format = { type: format, json_schema: { name: "response", schema: schema.value, strict: true } };
  if (byId("tools").value.trim()) {
    fields.tools = tools.value;
    fields.tool_choice = byId("tool_choice").value;
  }
  return fields;
}

/** The system prompt as a list of one message, or none. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** The first field with an invalid value, or null. */
export function invalidField() {
  schema.check();
  tools.check();
  return byId("options").querySelector(":invalid:not(fieldset)");
}

/** Show an error of the server next to the field that caused it. */
export function showServerError(error) {
  schema.showServerError(error);
  tools.showServerError(error);
}
