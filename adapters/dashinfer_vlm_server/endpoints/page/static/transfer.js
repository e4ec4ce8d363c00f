// Files with conversations: written by an export, and checked by an import.

import { parseJson } from "./schema.js";
import { text } from "./texts.js";

const FORMAT = "dashinfer-vlm conversations";
const VERSION = 1;
const STATES = ["running", "done", "stopped", "failed"];
const DATA_URL = /^data:[^,]*;base64,[\w+/]*=*$/;
const MIME_TYPE = /^[\w.+-]+\/[\w.+-]+$/; // generated code contains it
const KINDS = ["image", "video", "document"];

/** A file with stored conversations. */
export function exported(conversations) {
  const head = JSON.stringify({ format: FORMAT, version: VERSION }).slice(0, -1);
  const parts = conversations.flatMap((conversation, index) => [index ? ",\n" : "", JSON.stringify(conversation)]);
  return new Blob([`${head},"conversations":[\n`, ...parts, "\n]}\n"], { type: "application/json" });
}

/** The conversations of a file. Throws an Error with a message for the user if it does not have this format. */
export function imported(content) {
  const file = parseJson(content);
  if (file?.format !== FORMAT) throw new Error(text("This file was not exported by this page. Choose another one."));
  if (file.version !== VERSION) {
    const versions = { version: file.version, supported: VERSION };
    throw new Error(text("The file has version {version}. This page reads version {supported}.", versions));
  }
  check(Array.isArray(file.conversations), "conversations");
  file.conversations.forEach((conversation, index) => checkConversation(conversation, `conversations[${index}]`));
  return file.conversations;
}

function check(isValid, path) {
  if (!isValid) throw new Error(text("{path} is missing or invalid. Export the conversations again.", { path }));
}

const isText = (value) => typeof value === "string";
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isOptionalText = (value) => value === undefined || isText(value); // earlier versions of the page did not store it
const isUsage = (value) =>
  value === null || (Number.isFinite(value?.prompt_tokens) && Number.isFinite(value.completion_tokens));
const isNumber = (value) => value === null || Number.isFinite(value);

function checkFields(value, path, checks) {
  check(isObject(value), path);
  for (const [name, isValid] of Object.entries(checks)) check(isValid(value[name]), `${path}.${name}`);
}

function checkItems(values, path, checkItem) {
  check(Array.isArray(values), path);
  values.forEach((value, index) => checkItem(value, `${path}[${index}]`));
}

function checkConversation(conversation, path) {
  checkFields(conversation, path, { id: isText, title: isText, updated: Number.isFinite });
  checkItems(conversation.exchanges, `${path}.exchanges`, checkExchange);
}

function checkExchange(exchange, path) {
  checkFields(exchange, path, { text: isText, response: isText, reasoning: isOptionalText });
  check(STATES.includes(exchange.state), `${path}.state`);
  const timings = { start: isNumber, first: isNumber, last: isNumber, usage: isUsage };
  checkFields(exchange.timings, `${path}.timings`, timings);
  checkItems(exchange.attachments, `${path}.attachments`, checkAttachment);
  checkItems(exchange.calls, `${path}.calls`, checkFieldsOf({ id: isText, name: isText, arguments: isText }));
  if (exchange.results !== null) {
    checkItems(exchange.results, `${path}.results`, checkFieldsOf({ id: isText, name: isText, content: isText }));
  }
  if (exchange.error !== null) checkFields(exchange.error, `${path}.error`, { message: isText });
}

const checkFieldsOf = (checks) => (value, path) => checkFields(value, path, checks);

/** A file has its content in its URL, and a type; others are fetched by the server. */
function checkAttachment(attachment, path) {
  checkFields(attachment, path, { name: isText, url: isText, pages: isOptionalText });
  check(KINDS.includes(attachment.kind), `${path}.kind`);
  check(attachment.type === null || MIME_TYPE.test(attachment.type), `${path}.type`);
  check((attachment.type ? DATA_URL : /^https?:/).test(attachment.url), `${path}.url`);
}
