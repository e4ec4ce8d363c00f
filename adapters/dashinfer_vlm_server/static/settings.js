// The form of settings, as fields of a request.

import { setKey } from "./api.js";
import { byId } from "./dom.js";

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

export function openSettings() {
  byId("schema").value = JSON.stringify(SCHEMA, null, 2);
  byId("schema").addEventListener("input", checkSchema);
  byId("format").addEventListener("change", () => {
    byId("schema-field").hidden = byId("format").value !== "json_schema";
    checkSchema();
  });
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("key").addEventListener("change", () => setKey(byId("key").value.trim()));
}

/** The fields of a request that were set. */
export function options() {
  const set = {};
  for (const name of NUMBERS) if (byId(name).value !== "") set[name] = byId(name).valueAsNumber;
  if (byId("stop_string").value) set.stop = byId("stop_string").value;
  const format = byId("format").value;
  if (format === "json_object") set.response_format = { type: format };
  if (format === "json_schema") {
    set.response_format = { type: format, json_schema: { name: "answer", schema: JSON.parse(byId("schema").value) } };
  }
  return set;
}

/** The system prompt as messages: one, or none. */
export function systemMessages() {
  const content = byId("system").value.trim();
  return content ? [{ role: "system", content }] : [];
}

/** The first field that holds no valid value; null if all do. */
export function invalidField() {
  checkSchema();
  return byId("options").querySelector(":invalid:not(fieldset)");
}

function checkSchema() {
  const field = byId("schema");
  let fault = "";
  if (byId("format").value === "json_schema") {
    try {
      JSON.parse(field.value);
    } catch (error) {
      fault = `This is not JSON yet: ${error.message}`;
    }
  }
  field.setCustomValidity(fault);
  field.setAttribute("aria-invalid", String(fault !== ""));
  byId("schema-error").textContent = fault;
}
