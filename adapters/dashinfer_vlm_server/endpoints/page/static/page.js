// The chat page: the composer sends prompts, which are added to the conversation.

import { key } from "./api.js";
import { copy, openCode, showCode, urlInCode } from "./code.js";
import {
  draft,
  focusPrompt,
  isEmpty,
  openComposer,
  reloadPreviews,
  setDraft,
  translateComposer,
  usePrompt,
} from "./composer.js";
import { Exchange } from "./conversation.js";
import { announce, button, byId, element } from "./dom.js";
import { openHistory } from "./history.js";
import { openMeasurement } from "./measure.js";
import { openFrames } from "./media.js";
import { connect, modelName, openModels, refreshModels, translateModels } from "./models.js";
import { invalidField, openSettings, options, setDefaults, showServerError, systemMessages } from "./settings.js";
import { save } from "./store.js";
import { openLanguages, text } from "./texts.js";

const conversation = byId("conversation");
const wide = matchMedia("(min-width: 64rem)"); // otherwise, the settings replace the chat
let exchanges = [];
let conversationId = newId(); // null after the conversation that is shown was deleted
let isFollowing = true; // whether the end of the conversation is shown

// Requests

function buildRequest(exchange, earlier, urlOf) {
  const history = earlier.flatMap((other) => other.history(urlOf));
  const messages = [...systemMessages(), ...history, ...exchange.messages(urlOf)];
  return { model: modelName() || "model", messages, ...options() };
}

const previousExchanges = (exchange) => exchanges.slice(0, exchanges.indexOf(exchange));
const newCodeRequest = (exchange) => buildRequest(exchange, previousExchanges(exchange), urlInCode);

/** The request of an exchange for generated code: as it was sent, or for a stored exchange, as it would be sent now. */
const codeRequest = (exchange) => (exchange.codeRequest ??= newCodeRequest(exchange));

function submit() {
  if (running() || !checkSettings()) return;
  const exchange = new Exchange(draft());
  setDraft("", []);
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
  focusPrompt();
}

function start(exchange) {
  const request = buildRequest(exchange, previousExchanges(exchange));
  exchange.codeRequest = newCodeRequest(exchange);
  conversationId ??= newId();
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
  on("loading", refreshModels);
  on("results", sendResults);
  on("update", followResponse);
  on("copy", () => copy(exchange.response, byId("announcer"), exchange.body));
  on("regenerate", () => checkSettings() && (start(exchange), focusPrompt()));
  on("edit", () => edit(exchange));
  on("code", () => showCode(codeRequest(exchange)));
}

function edit(exchange) {
  exchanges = exchanges.filter((other) => other !== exchange);
  exchange.element.remove();
  setDraft(exchange.text, exchange.attachments);
  updateState();
  focusPrompt();
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
  if (!busy && focused === byId("stop")) focusPrompt();
  updateWelcome();
  exchanges.forEach((exchange, index) => exchange.element.classList.toggle("last", index === exchanges.length - 1));
  if (exchanges.at(-1)?.state === "failed") connect(); // the server may have restarted with another model or an API key
  else if (!busy) refreshModels();
}

function updateWelcome() {
  byId("examples").hidden = exchanges.length > 0;
  byId("welcome").hidden = exchanges.length > 0 || draft().attachments.length > 0;
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
  announce(text("New conversation."));
  focusPrompt();
}

// Stored conversations

function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
}

/** Store the conversation as it is now. */
function keepConversation() {
  if (!exchanges.length || conversationId === null) return;
  save({
    id: conversationId,
    title: titleOf(exchanges[0]),
    updated: Date.now(),
    exchanges: exchanges.map((exchange) => exchange.record()),
  });
}

function titleOf({ text: prompt, attachments }) {
  const title = prompt || attachments.map(({ name }) => name).join(", ");
  return title.length > 80 ? `${title.slice(0, 79)}…` : title;
}

function showConversation({ id, exchanges: shown }) {
  if (running()) keepConversation(); // its end is not stored
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
  announce(text("The stored conversation is shown."));
  focusPrompt();
}

/** A deleted conversation that is shown is stored again only if it is continued, under another id. */
function forget(id) {
  if (id === null || id === conversationId) conversationId = null;
}

// The rest of the page

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

/** Show what the model can do, and start with its sampling parameters. */
function showModel({ id, description = "", example_prompts: prompts = [], generation_config: parameters = {} }) {
  byId("description").hidden = !description;
  byId("description").textContent = `${id}: ${description}`;
  byId("examples").replaceChildren(
    ...prompts.map((prompt) => element("li", {}, button(prompt, () => usePrompt(prompt)))),
  );
  setDefaults(parameters);
  reloadPreviews();
}

function listenToToolbar() {
  addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (coversChat()) closeSettings();
    else stop();
  });
  byId("stop").addEventListener("click", stop);
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
  if (isEmpty() && exchanges.length) return codeRequest(exchanges.at(-1));
  const { text: prompt, attachments } = draft();
  return buildRequest(new Exchange({ text: prompt || "Hello!", attachments }), exchanges, urlInCode);
}

function translate() {
  translateModels();
  translateComposer();
  for (const exchange of exchanges) exchange.translate();
}

openLanguages(byId("language"), translate);
openSettings();
openFrames();
openCode();
openHistory({ onopen: openStored, onremove: forget });
openMeasurement();
openComposer({ onsubmit: submit, onattachments: updateWelcome });
listenToToolbar();
listenToScrolling();
toggleSettings(wide.matches);
openModels({ onmodel: showModel, onkey: promptForKey });
focusPrompt();
