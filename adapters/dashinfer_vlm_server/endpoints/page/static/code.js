// Generates runnable code for a request: curl, the openai client, and LangChain, for chat completions
// and responses. Files are read by name, and the API key from the environment.

import { baseUrl, key } from "./api.js";
import { byId, closable, element } from "./dom.js";
import { counted, text } from "./texts.js";

const KEY = "DASHINFER_VLM_API_KEY";
const CHAT_FIELDS = new Set([
  "model",
  "messages",
  "temperature",
  "top_p",
  "seed",
  "max_tokens",
  "stop",
  "response_format",
  "tools",
  "tool_choice",
]);
const RESPONSES_FIELDS = new Set([
  "model",
  "instructions",
  "input",
  "temperature",
  "top_p",
  "max_output_tokens",
  "text",
  "tools",
  "tool_choice",
]);
const LANGCHAIN_FIELDS = new Set(["temperature", "top_p", "seed", "max_tokens", "stop"]);
const WIDTH = 100;
const MARK = "\uFDD0"; // a noncharacter of Unicode, which does not occur in text
const MARKED = new RegExp(`${MARK}(\\d+)${MARK}`, "g");

/** Placeholder for the data URL of a file. */
class FileUrl {
  constructor({ name, file, url }) {
    Object.assign(this, { name, type: file.type, url });
  }
}

/** The URL of an attachment in generated code. */
export const urlInCode = (attachment) => (attachment.file ? new FileUrl(attachment) : attachment.url);

const LANGUAGES = {
  chat: {
    curl: (body) => curl("chat/completions", body),
    openai: openaiChat,
    langchain,
  },
  responses: {
    curl: (body) => curl("responses", toResponses(body)),
    openai: (body) => openaiResponses(toResponses(body)),
  },
};
let request = null;

export function openCode() {
  closable(byId("code-dialog"));
  const tabs = [...byId("code-tabs").children];
  for (const tab of tabs) tab.addEventListener("click", () => select(tab, tabs));
  byId("code-tabs").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const shown = tabs.filter((tab) => !tab.hidden);
    const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
    select(next, tabs);
    next.focus();
  });
  for (const radio of byId("code-api").querySelectorAll("input"))
    radio.addEventListener("change", () => {
      const langchainTab = tabs.find((tab) => !LANGUAGES.responses[tab.dataset.language]);
      langchainTab.hidden = api() === "responses";
      select(selectedTab(tabs).hidden ? tabs[0] : selectedTab(tabs), tabs);
    });
  byId("copy-code").addEventListener("click", () => copy(byId("code").textContent, byId("code-status"), byId("code")));
}

/** Show the code for a request whose files are `FileUrl`s. */
export function showCode(newRequest) {
  request = newRequest;
  const tabs = [...byId("code-tabs").children];
  select(selectedTab(tabs), tabs);
  const files = filesOf(request);
  const links = files.map(({ name, url }) => element("a", { href: url, download: name }, name));
  const reads = text("The code reads {files} from the current folder:", { files: counted(files.length, "file") });
  byId("code-files").replaceChildren(...(files.length ? [`${reads} `, ...separated(links)] : []));
  byId("code-dialog").showModal();
  selectedTab(tabs).focus();
}

/** Copy text to the clipboard, or select it if the browser allows no access (pages neither local nor over https). */
export async function copy(copied, status, source) {
  try {
    await navigator.clipboard.writeText(copied);
    status.textContent = text("Copied.");
  } catch {
    getSelection().selectAllChildren(source);
    status.textContent = text("Selected. Copy it with your keyboard.");
  }
}

const selectedTab = (tabs) => tabs.find((tab) => tab.ariaSelected === "true");

/** The API that the code uses: `chat` or `responses`. */
const api = () => byId("code-api").querySelector(":checked").value;

function select(tab, tabs) {
  for (const other of tabs) {
    other.ariaSelected = String(other === tab);
    other.tabIndex = other === tab ? 0 : -1;
  }
  byId("code-panel").setAttribute("aria-labelledby", tab.id);
  byId("code").textContent = LANGUAGES[api()][tab.dataset.language](request);
  byId("code-status").textContent = "";
}

const separated = (items) => items.flatMap((item, index) => (index ? [", ", item] : [item]));

function filesOf(value) {
  if (value instanceof FileUrl) return [value];
  const files = value && typeof value === "object" ? Object.values(value).flatMap(filesOf) : [];
  return [...new Map(files.map((file) => [file.name, file])).values()];
}

// The Responses API

/** Convert the body of a chat completion request to that of a responses request. */
function toResponses({ messages, max_tokens, response_format: format, tools, ...same }) {
  const instructions = messages.filter(({ role }) => role === "system").map(({ content }) => content);
  const fields = { ...same, input: messages.filter(({ role }) => role !== "system").flatMap(toItems) };
  if (instructions.length) fields.instructions = instructions.join("\n");
  if (max_tokens !== undefined) fields.max_output_tokens = max_tokens;
  if (format) fields.text = { format: { type: format.type, ...format.json_schema } };
  if (tools) fields.tools = tools.map((tool) => ({ type: "function", ...tool.function }));
  return fields;
}

function toItems({ role, content, tool_calls: calls = [], tool_call_id: id }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  const message = { role, content: Array.isArray(content) ? content.map(toPart) : content };
  const called = calls.map((call) => ({ type: "function_call", call_id: call.id, ...call.function }));
  return [...(content === null ? [] : [message]), ...called];
}

function toPart({ type, text, image_url: image, video_url: video, file }) {
  if (type === "file") return { type: "input_file", ...file };
  if (type === "image_url") return { type: "input_image", image_url: image.url };
  return type === "video_url" ? { type: "input_video", video_url: video.url } : { type: "input_text", text };
}

// curl: the shell inserts the files while it expands the here-document.

function curl(path, body) {
  const files = filesOf(body);
  const indexOf = (file) => files.findIndex(({ name }) => name === file.name);
  const marked = (_, value) => (value instanceof FileUrl ? `${MARK}${indexOf(value)}${MARK}` : value);
  const inShell = escaped(JSON.stringify(body, marked, 2)).replace(MARKED, (_, index) => substitution(files[index]));
  const lines = [`curl ${shellQuoted(`${baseUrl()}/${path}`)}`, "-H 'Content-Type: application/json'"];
  if (key()) lines.push(`-H "Authorization: Bearer $${KEY}"`);
  return `${lines.join(" \\\n  ")} \\\n  -d @- <<JSON\n${inShell}\nJSON\n`;
}

/** Text in a here-document, where the shell expands nothing in it. */
const escaped = (text) => text.replace(/[\\$`]/g, "\\$&");

const shellQuoted = (text) => (/^[\w:/.-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

const substitution = ({ name, type }) =>
  `data:${escaped(type)};base64,$(base64 < ${shellQuoted(name.startsWith("-") ? `./${name}` : name)} | tr -d '\\n')`;

// Python

function openaiChat(body) {
  const print = body.tools
    ? ["message = response.choices[0].message", "print(message.tool_calls or message.content)"]
    : ["print(response.choices[0].message.content)"];
  return openai(body, CHAT_FIELDS, "chat.completions", print);
}

function openaiResponses(body) {
  const print = body.tools ? "print(response.output)" : "print(response.output_text)";
  return openai(body, RESPONSES_FIELDS, "responses", [print]);
}

function openai(body, known, resource, print) {
  const fields = Object.entries(body);
  const extra = Object.fromEntries(fields.filter(([name]) => !known.has(name)));
  const args = fields.filter(([name]) => known.has(name));
  if (Object.keys(extra).length) args.push(["extra_body", extra]);
  return [
    ...imports(body, ["from openai import OpenAI"]),
    `client = OpenAI(base_url=${python(baseUrl())}, api_key=${pythonKey()})`,
    `response = client.${resource}.create(`,
    ...args.map(([name, value]) => `    ${name}=${python(value, 4)},`),
    ")",
    ...print,
    "",
  ].join("\n");
}

function langchain({ model, messages, tools, tool_choice: choice, ...options }) {
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
    ...(tools ? [`tools = ${python(tools)}`, `chat = chat.bind_tools(tools, tool_choice=${python(choice)})`] : []),
    `messages = ${python(messages)}`,
    ...(tools
      ? ["message = chat.invoke(messages)", "print(message.tool_calls or message.content)"]
      : ["print(chat.invoke(messages).content)"]),
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
