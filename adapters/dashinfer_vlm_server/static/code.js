// Generates runnable code for a request: curl, the openai client, and LangChain. Files are read by name, and the API
// key from the environment.

import { baseUrl, key } from "./api.js";
import { byId, closable, counted, element } from "./dom.js";

const KEY = "OPENAI_API_KEY";
const OPENAI_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "seed",
  "max_tokens",
  "stop",
  "response_format",
]);
const LANGCHAIN_FIELDS = new Set(["temperature", "top_p", "seed", "max_tokens", "stop"]);
const WIDTH = 100;
const MARK = "\uFDD0"; // a noncharacter of Unicode, which does not occur in text
const MARKED = new RegExp(`${MARK}(\\d+)${MARK}`, "g");

/** Placeholder for the data URL of a file. */
class FileUrl {
  constructor({ name, file, local }) {
    Object.assign(this, { name, type: file.type, local });
  }
}

/** The URL of an attachment in generated code. */
export const urlInCode = (attachment) => (attachment.file ? new FileUrl(attachment) : attachment.url);

const LANGUAGES = { curl, openai, langchain };
let request = null;

export function openCode() {
  closable(byId("code-dialog"));
  const tabs = [...byId("code-tabs").children];
  for (const tab of tabs) tab.addEventListener("click", () => select(tab, tabs));
  byId("code-tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length];
    select(next, tabs);
    next.focus();
  });
  byId("copy-code").addEventListener("click", () => copy(byId("code").textContent, byId("code-status"), byId("code")));
}

/** Show the code for a request whose files are `FileUrl`s. */
export function showCode(newRequest) {
  request = newRequest;
  const tabs = [...byId("code-tabs").children];
  select(
    tabs.find((tab) => tab.ariaSelected === "true"),
    tabs,
  );
  const files = filesOf(request);
  const links = files.map(({ name, local }) => element("a", { href: local, download: name }, name));
  byId("code-files").replaceChildren(
    ...(files.length
      ? [`The code reads ${counted(files.length, "file")} from the current folder: `, ...separated(links), "."]
      : []),
  );
  byId("code-dialog").showModal();
}

/** Copy text to the clipboard, or select it if the browser allows no access (pages neither local nor over https). */
export async function copy(text, status, source) {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(source);
    status.textContent = "Selected. Copy it with your keyboard.";
  }
}

function select(tab, tabs) {
  for (const other of tabs) {
    other.ariaSelected = String(other === tab);
    other.tabIndex = other === tab ? 0 : -1;
  }
  byId("code-panel").setAttribute("aria-labelledby", tab.id);
  byId("code").textContent = LANGUAGES[tab.dataset.language](request);
  byId("code-status").textContent = "";
}

const separated = (items) => items.flatMap((item, index) => (index ? [", ", item] : [item]));

function filesOf(value) {
  if (value instanceof FileUrl) return [value];
  const files = value && typeof value === "object" ? Object.values(value).flatMap(filesOf) : [];
  return [...new Map(files.map((file) => [file.name, file])).values()];
}

// curl: the shell inserts the files while it expands the here-document.

function curl(body) {
  const files = filesOf(body);
  const indexOf = (file) => files.findIndex(({ name }) => name === file.name);
  const marked = (_, value) => (value instanceof FileUrl ? `${MARK}${indexOf(value)}${MARK}` : value);
  const inShell = JSON.stringify(body, marked, 2)
    .replace(/[\\$`]/g, "\\$&")
    .replace(MARKED, (_, index) => substitution(files[index]));
  const lines = [`curl ${shellQuoted(`${baseUrl()}/chat/completions`)}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  return `${lines.join(" \\\n  ")} \\\n  -d @- <<JSON\n${inShell}\nJSON\n`;
}

const shellQuoted = (text) => (/^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const substitution = ({ name, type }) =>
  `data:${type};base64,$(base64 < ${shellQuoted(name.startsWith("-") ? `./${name}` : name)} | tr -d '\\n')`;

// Python

function openai(body) {
  const fields = Object.entries(body);
  const extra = Object.fromEntries(fields.filter(([name]) => !OPENAI_FIELDS.has(name)));
  const args = fields.filter(([name]) => OPENAI_FIELDS.has(name));
  if (Object.keys(extra).length) args.push(["extra_body", extra]);
  return [
    ...imports(body, ["from openai import OpenAI"]),
    `client = OpenAI(base_url=${python(baseUrl())}, api_key=${pythonKey()})`,
    "response = client.chat.completions.create(",
    ...args.map(([name, value]) => `    ${name}=${python(value, 4)},`),
    ")",
    "print(response.choices[0].message.content)",
    "",
  ].join("\n");
}

function langchain({ model, messages, ...options }) {
  const fields = Object.entries(options);
  const modelKwargs = Object.fromEntries(fields.filter(([name]) => !LANGCHAIN_FIELDS.has(name)));
  const args = [["model", model], ["base_url", baseUrl()], ...fields.filter(([name]) => LANGCHAIN_FIELDS.has(name))];
  if (Object.keys(modelKwargs).length) args.push(["model_kwargs", modelKwargs]);
  return [
    ...imports({ messages }, ["from dashinfer_vlm_langchain import ChatDashInferVLM"]),
    "chat = ChatDashInferVLM(",
    ...args.map(([name, value]) => `    ${name}=${python(value, 4)},`),
    ...(key() ? [`    api_key=${pythonKey()},`] : []),
    ")",
    `messages = ${python(messages)}`,
    "print(chat.invoke(messages).content)",
    "",
  ].join("\n");
}

function imports(value, libraries) {
  const files = filesOf(value).length > 0;
  const lines = [
    ...(files ? ["import base64"] : []),
    ...(key() ? ["import os"] : []),
    ...(files ? ["from pathlib import Path"] : []),
  ];
  const head = [...lines, ...(lines.length ? [""] : []), ...libraries, ""];
  const helper = [
    "",
    "def data_url(path, kind):",
    '    return f"data:{kind};base64," + base64.b64encode(Path(path).read_bytes()).decode()',
    "",
    "",
  ];
  return files ? [...head, ...helper] : head;
}

const pythonKey = () => (key() ? `os.environ["${KEY}"]` : '"none"');

/** A JSON value as a Python literal: on one line if it fits, otherwise one item per line. */
function python(value, indent = 0) {
  if (value instanceof FileUrl) return `data_url(${python(value.name)}, ${python(value.type)})`;
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = (deeper) =>
    Array.isArray(value)
      ? value.map((item) => python(item, deeper))
      : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${python(item, deeper)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = open + items(0).join(", ") + close;
  if (indent + line.length <= WIDTH && !line.includes("\n")) return line;
  const space = " ".repeat(indent);
  return `${open}\n${items(indent + 4)
    .map((item) => `${space}    ${item},\n`)
    .join("")}${space}${close}`;
}
