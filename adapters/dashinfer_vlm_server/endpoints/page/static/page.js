// The chat page: the composer sends prompts, which are added to the conversation.

import { health, key, model } from "./api.js";
import { copy, openCode, showCode, urlInCode } from "./code.js";
import { Exchange } from "./conversation.js";
import { announce, button, byId, closable, counted, element } from "./dom.js";
import { openHistory, save } from "./history.js";
import { Attachment, openFrames, tile } from "./media.js";
import { invalidField, openSettings, options, setDefaults, showServerError, systemMessages } from "./settings.js";

const promptInput = byId("prompt");
const conversation = byId("conversation");
const wide = matchMedia("(min-width: 64rem)"); // otherwise, the settings replace the chat
let exchanges = [];
let attachments = [];
let conversationId = newId();
let modelName = "";
let isFollowing = true; // whether the end of the conversation is shown

// Requests

function buildRequest(exchange, earlier, urlOf) {
  const history = earlier.flatMap((other) => other.history(urlOf));
  const messages = [...systemMessages(), ...history, ...exchange.messages(urlOf)];
  return { model: modelName || "model", messages, ...options() };
}

const previousExchanges = (exchange) => exchanges.slice(0, exchanges.indexOf(exchange));
const codeRequest = (exchange) => buildRequest(exchange, previousExchanges(exchange), urlInCode);

function submit(event) {
  event?.preventDefault();
  if (running()) return;
  const text = promptInput.value.trim();
  if (!text && !attachments.length) {
    promptInput.focus();
    return;
  }
  if (!checkSettings()) return;
  const exchange = new Exchange({ text, attachments });
  promptInput.value = "";
  byId("file-error").textContent = "";
  resizePrompt();
  setAttachments([]);
  append(exchange);
  start(exchange);
}

function append(exchange) {
  addListeners(exchange);
  exchanges.push(exchange);
  byId("exchanges").append(exchange.element);
}

/** Send the results of the tool calls of the last response. */
function sendResults({ detail: results }) {
  if (running() || !checkSettings()) return;
  const exchange = new Exchange({ results });
  append(exchange);
  start(exchange);
  promptInput.focus();
}

function start(exchange) {
  const request = buildRequest(exchange, previousExchanges(exchange));
  exchange.code = codeRequest(exchange);
  exchange.send(request);
  isFollowing = true;
  followResponse();
}

function addListeners(exchange) {
  const on = (name, action) => exchange.addEventListener(name, action);
  on("state", () => {
    updateState();
    if (exchange.state === "failed") showServerError(exchange.error);
    if (exchanges.includes(exchange)) keepConversation();
  });
  on("results", sendResults);
  on("update", followResponse);
  on("copy", async () => {
    await copy(exchange.response, byId("announcer"), exchange.body);
  });
  on("regenerate", () => checkSettings() && (start(exchange), promptInput.focus()));
  on("edit", () => edit(exchange));
  on("code", () => showCode((exchange.code ??= codeRequest(exchange))));
}

function edit(exchange) {
  exchanges = exchanges.filter((other) => other !== exchange);
  exchange.element.remove();
  setAttachments(exchange.attachments);
  updateState();
  setPrompt(exchange.text);
}

function checkSettings() {
  const field = invalidField();
  if (!field) return true;
  toggleSettings(true);
  field.focus();
  if (field.ariaInvalid !== "true") field.reportValidity(); // otherwise, the problem is shown next to the field
  return false;
}

const running = () => exchanges.find((exchange) => exchange.state === "running");

function stop() {
  running()?.stop();
}

function updateState() {
  const busy = Boolean(running());
  const focused = document.activeElement;
  byId("stop").hidden = !busy;
  byId("send").hidden = busy;
  if (busy && focused === byId("send")) byId("stop").focus();
  if (!busy && focused === byId("stop")) promptInput.focus();
  updateWelcome();
  exchanges.forEach((exchange, index) => exchange.element.classList.toggle("last", index === exchanges.length - 1));
  if (exchanges.at(-1)?.state === "failed") connect(); // the server may have restarted with another model or an API key
}

function updateWelcome() {
  byId("examples").hidden = exchanges.length > 0;
  byId("welcome").hidden = exchanges.length > 0 || attachments.length > 0;
}

/** Scroll to the end of a streamed response, unless the user has scrolled up. */
function followResponse() {
  if (isFollowing) conversation.scrollTop = conversation.scrollHeight;
}

function listenToScrolling() {
  conversation.addEventListener("scroll", () => {
    isFollowing = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight < 160;
  });
}

function newChat() {
  showConversation({ id: newId(), exchanges: [] });
  announce("New conversation.");
  promptInput.focus();
}

// Stored conversations

function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
}

/** Store the conversation as it is now. */
function keepConversation() {
  if (!exchanges.length) return;
  save({
    id: conversationId,
    title: titleOf(exchanges[0]),
    updated: Date.now(),
    exchanges: exchanges.map((exchange) => exchange.record()),
  });
}

function titleOf({ text, attachments: media }) {
  const title = text || media.map(({ name }) => name).join(", ");
  return title.length > 80 ? `${title.slice(0, 79)}…` : title;
}

function showConversation({ id, exchanges: shown }) {
  keepConversation();
  stop();
  exchanges = [];
  byId("exchanges").replaceChildren();
  conversationId = id;
  shown.forEach(append);
  updateState();
}

function openStored({ id, exchanges: records }) {
  showConversation({ id, exchanges: records.map(Exchange.fromRecord) });
  conversation.scrollTop = conversation.scrollHeight;
  announce("The stored conversation is shown.");
  promptInput.focus();
}

/** A deleted conversation that is shown is stored again only if it is continued, under another id. */
function forget(id) {
  if (id === null || id === conversationId) conversationId = newId();
}

// Images and videos

async function addFiles(files) {
  const rejected = [];
  for (const file of files) {
    const attachment = await Attachment.fromFile(file);
    if (attachment) add(attachment);
    else rejected.push(file.name);
  }
  const verb = rejected.length === 1 ? "is" : "are";
  byId("file-error").textContent = rejected.length
    ? `${rejected.join(", ")} ${verb} not an image, a video or a PDF. Add PNG, JPEG, WebP, GIF, BMP, TIFF, video or ` +
      "PDF files, and copy text into the prompt."
    : "";
}

function add(attachment) {
  setAttachments([...attachments, attachment]);
  promptInput.focus();
}

function remove(attachment) {
  const index = attachments.indexOf(attachment);
  setAttachments(attachments.filter((other) => other !== attachment));
  (byId("attachments").querySelectorAll(".remove")[index] ?? byId("choose")).focus();
}

/** Show these attachments in the composer. Existing ones keep their tiles. */
function setAttachments(updated) {
  const tiles = new Map(attachments.map((attachment, index) => [attachment, byId("attachments").children[index]]));
  attachments = updated;
  for (const attachment of attachments) attachment.addEventListener("change", drawMediaSummary);
  byId("attachments").replaceChildren(
    ...updated.map((attachment) => tiles.get(attachment) ?? tile(attachment, () => remove(attachment))),
  );
  drawMediaSummary();
  updateWelcome();
}

function drawMediaSummary() {
  const count = (kind) => attachments.filter((attachment) => attachment.kind === kind).length;
  const kinds = ["image", "video", "document"].filter(count).map((kind) => counted(count(kind), kind));
  const known = attachments.every((attachment) => attachment.preview);
  const tokens = attachments.reduce((sum, attachment) => sum + attachment.tokens, 0);
  const summary = [...kinds, ...(known ? [counted(tokens, "token")] : [])].join(" · ");
  byId("media-summary").textContent = kinds.length ? summary : "";
}

async function useSample() {
  const image = await (await fetch("page/sample.png")).blob();
  await addFiles([new File([image], "sample.png", { type: image.type })]);
  setPrompt(promptInput.value || "Describe the picture.");
}

function setPrompt(text) {
  promptInput.value = text;
  resizePrompt();
  promptInput.focus();
}

function listenForDrops() {
  let depth = 0; // dragenter and dragleave are dispatched for every element under the pointer
  const show = (change) => {
    depth = Math.max(0, depth + change);
    byId("drop").hidden = depth === 0;
  };
  addEventListener("dragenter", (event) => (event.preventDefault(), show(1)));
  addEventListener("dragleave", () => show(-1));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    show(-Infinity);
    const url = event.dataTransfer.getData("text/uri-list").split("\n")[0];
    if (event.dataTransfer.files.length) addFiles([...event.dataTransfer.files]);
    else if (/^https?:/.test(url)) add(Attachment.fromUrl(url.trim()));
  });
  addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    addFiles([...event.clipboardData.files]);
  });
}

// The rest of the page

function resizePrompt() {
  promptInput.rows = Math.min(8, promptInput.value.split("\n").length);
}

function toggleSettings(open = !document.body.classList.contains("with-settings")) {
  document.body.classList.toggle("with-settings", open);
  byId("toggle-settings").setAttribute("aria-expanded", String(open));
}

function closeSettings() {
  toggleSettings(false);
  byId("toggle-settings").focus();
}

const coversChat = () => !wide.matches && document.body.classList.contains("with-settings");

function promptForKey() {
  byId("key-field").hidden = false;
  toggleSettings(true);
  byId("key").focus();
}

async function connect() {
  try {
    const { status, max_model_len: length } = await health();
    showModel(await model());
    showStatus(
      status === "ready" ? "ready" : "down",
      status === "ready"
        ? `${modelName} · up to ${length.toLocaleString("en")} tokens`
        : `${modelName} is ${status}`,
    );
  } catch (error) {
    if (error.status === 401) {
      promptForKey();
      showStatus("down", key() ? "API key rejected" : "API key required");
    } else showStatus("down", "Server unreachable");
  }
}

/** Show what the model can do, and start with its sampling parameters. */
function showModel({ id, description = "", example_prompts: prompts = [], generation_config: parameters = {} }) {
  modelName = id;
  byId("description").hidden = !description;
  byId("description").textContent = `${id}: ${description}`;
  byId("examples").replaceChildren(
    ...prompts.map((prompt) => element("li", {}, button(prompt, () => setPrompt(prompt)))),
  );
  setDefaults(parameters);
}

function showStatus(state, text) {
  byId("server-status").dataset.state = state;
  byId("server-status-text").textContent = text;
}

function listenToComposer() {
  byId("composer").addEventListener("submit", submit);
  byId("stop").addEventListener("click", stop);
  promptInput.addEventListener("input", resizePrompt);
  promptInput.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (coversChat()) closeSettings();
    else stop();
  });
  byId("choose").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", () => {
    addFiles([...byId("files").files]);
    byId("files").value = "";
  });
  byId("use-sample").addEventListener("click", useSample);
}

function listenToUrlDialog() {
  const dialog = byId("url-dialog");
  closable(dialog);
  byId("add-url").addEventListener("click", () => dialog.showModal());
  byId("url-form").addEventListener("submit", () => {
    add(Attachment.fromUrl(byId("url").value, new FormData(byId("url-form")).get("kind")));
    byId("url-form").reset();
  });
}

function listenToToolbar() {
  byId("new-chat").addEventListener("click", newChat);
  byId("toggle-settings").addEventListener("click", () => toggleSettings());
  byId("close-settings").addEventListener("click", closeSettings);
  byId("show-code").addEventListener("click", () => {
    if (checkSettings()) showCode(draftRequest());
  });
  byId("key").value = key();
  byId("key-field").hidden = !key();
  byId("key").addEventListener("change", connect);
}

/** The request that would be sent now, or the last one if the composer is empty. */
function draftRequest() {
  const text = promptInput.value.trim();
  if (!text && !attachments.length && exchanges.length) return exchanges.at(-1).code;
  return buildRequest(new Exchange({ text: text || "Hello!", attachments }), exchanges, urlInCode);
}

openSettings();
openFrames();
openCode();
openHistory({ onopen: openStored, onremove: forget });
listenToUrlDialog();
listenToToolbar();
listenToComposer();
listenForDrops();
listenToScrolling();
toggleSettings(wide.matches);
connect();
promptInput.focus();
