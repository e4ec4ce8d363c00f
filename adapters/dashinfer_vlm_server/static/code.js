// A request as code that can be run: curl, the openai client, and LangChain. Files are read by name, keys from the
// environment.

import { baseUrl, key } from "./api.js";
import { byId, closable, counted, element } from "./dom.js";

const KEY = "OPENAI_API_KEY";
const OPENAI_HAS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "seed",
  "max_tokens",
  "stop",
  "response_format",
]);
const LANGCHAIN_HAS = new Set(["temperature", "top_p", "seed", "max_tokens", "stop"]);
const WIDTH = 100;
const MARK = "\uFDD0"; // Unicode promises that no text holds it
const MARKED = new RegExp(`${MARK}(\\d+)${MARK}`, "g");

/** A file that stands for its data URL. */
class FileUrl {
  constructor({ name, file, local }) {
    Object.assign(this, { name, type: file.type, local });
  }
}

/** What stands in code for the URL of an attachment. */
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

/** Show the code of a request, whose files are `FileUrl`s. */
export function showCode(shown) {
  request = shown;
  const tabs = [...byId("code-tabs").children];
  select(
    tabs.find((tab) => tab.ariaSelected === "true"),
    tabs,
  );
  const files = filesOf(request);
  const links = files.map(({ name, local }) => element("a", { href: local, download: name }, name));
  byId("code-files").replaceChildren(
    ...(files.length
      ? [`It reads ${counted(files.length, "file")} in the folder where it runs: `, ...separated(links), "."]
      : []),
  );
  byId("code-dialog").showModal();
}

/** Copy to the clipboard; where the browser allows none (pages that are neither local nor https), select it instead. */
export async function copy(text, status, source) {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(source);
    status.textContent = "Selected: copy it with your keyboard.";
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
  const found = value && typeof value === "object" ? Object.values(value).flatMap(filesOf) : [];
  return [...new Map(found.map((file) => [file.name, file])).values()];
}

// curl: the shell fills the files in while it reads the document.

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
  const extra = Object.fromEntries(fields.filter(([name]) => !OPENAI_HAS.has(name)));
  const given = fields.filter(([name]) => OPENAI_HAS.has(name));
  if (Object.keys(extra).length) given.push(["extra_body", extra]);
  return [
    ...imports(body, ["from openai import OpenAI"]),
    `client = OpenAI(base_url=${python(baseUrl())}, api_key=${pythonKey()})`,
    "answer = client.chat.completions.create(",
    ...given.map(([name, value]) => `    ${name}=${python(value, 4)},`),
    ")",
    "print(answer.choices[0].message.content)",
    "",
  ].join("\n");
}

function langchain({ model, messages, ...options }) {
  const fields = Object.entries(options);
  const more = Object.fromEntries(fields.filter(([name]) => !LANGCHAIN_HAS.has(name)));
  const given = [["model", model], ["base_url", baseUrl()], ...fields.filter(([name]) => LANGCHAIN_HAS.has(name))];
  if (Object.keys(more).length) given.push(["model_kwargs", more]);
  return [
    ...imports({ messages }, ["from dashinfer_vlm_langchain import ChatDashInferVLM"]),
    "chat = ChatDashInferVLM(",
    ...given.map(([name, value]) => `    ${name}=${python(value, 4)},`),
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

/** A JSON value as Python writes it: on one line where that is short, else one item a line. */
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
