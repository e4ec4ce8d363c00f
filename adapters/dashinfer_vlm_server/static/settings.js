// Converts the settings form to request fields.

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

/** The request fields that are set. */
export function options() {
  const fields = {};
  for (const name of NUMBERS) if (byId(name).value !== "") fields[name] = byId(name).valueAsNumber;
  if (byId("stop_string").value) fields.stop = byId("stop_string").value;
  const format = byId("format").value;
  if (format === "json_object") fields.response_format = { type: format };
  if (format === "json_schema") {
    const schema = JSON.parse(byId("schema").value);
    fields.response_format = { type: format, json_schema: { name: "response", schema } };
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
  checkSchema();
  return byId("options").querySelector(":invalid:not(fieldset)");
}

function checkSchema() {
  const field = byId("schema");
  let message = "";
  if (byId("format").value === "json_schema") {
    try {
      JSON.parse(field.value);
    } catch (error) {
      message = `Not valid JSON: ${error.message}`;
    }
  }
  field.setCustomValidity(message);
  field.setAttribute("aria-invalid", String(message !== ""));
  byId("schema-error").textContent = message;
}
