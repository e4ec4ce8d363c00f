// Checks JSON schemas and tools while they are edited. The server checks them completely; its errors are shown too.

import { text } from "./texts.js";

const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];

/** Keywords that the server rejects, because it cannot guarantee them. */
const NOT_GUARANTEED = [
  "$dynamicRef",
  "$recursiveRef",
  "contains",
  "dependencies",
  "dependentRequired",
  "dependentSchemas",
  "else",
  "if",
  "maxContains",
  "minContains",
  "not",
  "patternProperties",
  "then",
  "unevaluatedItems",
  "uniqueItems",
];

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isCount = (value) => Number.isInteger(value) && value >= 0;
const isText = (value) => typeof value === "string";
const isFilled = (value) => Array.isArray(value) && value.length > 0;

const COUNT = [isCount, "must be an integer of at least 0"];
const NUMBER = [Number.isFinite, "must be a number"];
const TEXT = [isText, "must be a string"];
const LIST = [isFilled, "must be an array that is not empty"];
const SHAPES = {
  type: [
    (value) => [value].flat().length > 0 && [value].flat().every((type) => TYPES.includes(type)),
    "must be one of object, array, string, number, integer, boolean, null",
  ],
  properties: [isObject, "must be an object of schemas"],
  $defs: [isObject, "must be an object of schemas"],
  required: [(value) => Array.isArray(value) && value.every(isText), "must be an array of names"],
  enum: LIST,
  anyOf: LIST,
  oneOf: LIST,
  allOf: LIST,
  prefixItems: LIST,
  $ref: [
    (value) => isText(value) && value.startsWith("#"),
    'must refer to a part of the schema, such as "#/$defs/Name"',
  ],
  pattern: TEXT,
  format: TEXT,
  minimum: NUMBER,
  maximum: NUMBER,
  exclusiveMinimum: NUMBER,
  exclusiveMaximum: NUMBER,
  multipleOf: NUMBER,
  minLength: COUNT,
  maxLength: COUNT,
  minItems: COUNT,
  maxItems: COUNT,
  minProperties: COUNT,
  maxProperties: COUNT,
};

/** Parse JSON text. Throws an Error with a message for the user. */
export function parseJson(json) {
  try {
    return JSON.parse(json);
  } catch (error) {
    throw new Error(text("Not valid JSON: {problem}", { problem: error.message }));
  }
}

export function isJson(json) {
  try {
    JSON.parse(json);
    return true;
  } catch {
    return false;
  }
}

const problemAt = (path, requirement) => `${path} ${text(requirement)}.`;

/** The first problem of a schema, with its path; empty if there is none. */
export function schemaProblem(schema, path = "") {
  const at = (keyword) => [path, keyword].filter(Boolean).join(".");
  if (path && typeof schema === "boolean") return "";
  if (!isObject(schema)) return problemAt(path || text("The schema"), "must be an object");
  const unsupported = NOT_GUARANTEED.find((keyword) => keyword in schema && schema[keyword] !== false);
  if (unsupported) return text("{path} cannot be guaranteed. Remove it.", { path: at(unsupported) });
  for (const [keyword, [isValid, requirement]] of Object.entries(SHAPES))
    if (keyword in schema && !isValid(schema[keyword])) return problemAt(at(keyword), requirement);
  for (const [location, part] of subschemas(schema)) {
    const problem = schemaProblem(part, at(location));
    if (problem) return problem;
  }
  return "";
}

function subschemas(schema) {
  const named = ["properties", "$defs"].flatMap((keyword) =>
    Object.entries(schema[keyword] ?? {}).map(([name, part]) => [`${keyword}.${name}`, part]),
  );
  const listed = ["anyOf", "oneOf", "allOf", "prefixItems", "items"].flatMap((keyword) =>
    Array.isArray(schema[keyword]) ? schema[keyword].map((part, index) => [`${keyword}[${index}]`, part]) : [],
  );
  const single = ["items", "additionalItems", "additionalProperties", "propertyNames"].filter(
    (keyword) => keyword in schema && !Array.isArray(schema[keyword]),
  );
  return [...named, ...listed, ...single.map((keyword) => [keyword, schema[keyword]])];
}

/** The first problem of a list of tools in OpenAI's format; empty if there is none. */
export function toolsProblem(tools) {
  if (!Array.isArray(tools)) return text("The tools must be an array.");
  const names = new Set();
  for (const [index, tool] of tools.entries()) {
    const { name, parameters } = tool?.function ?? {};
    if (tool?.type !== "function" || !isObject(tool.function))
      return problemAt(`[${index}]`, 'must be {"type": "function", "function": {"name": "…", "parameters": {…}}}');
    if (!/^[\w.-]{1,128}$/.test(name ?? ""))
      return problemAt(`[${index}].function.name`, "must be 1 to 128 letters, digits, underscores, dots and dashes");
    if (names.has(name)) return text("{name} is used twice. Rename one of the tools.", { name });
    names.add(name);
    const path = `[${index}].function.parameters`;
    const problem = parameters === undefined ? "" : parametersProblem(parameters, path);
    if (problem) return problem;
  }
  return "";
}

/** The server ignores keywords of parameters that it cannot guarantee, so only their shape matters. */
function parametersProblem(parameters, path) {
  if (!isObject(parameters)) return problemAt(path, "must be an object");
  if ((parameters.type ?? "object") !== "object") return problemAt(`${path}.type`, 'must be "object"');
  return "";
}
