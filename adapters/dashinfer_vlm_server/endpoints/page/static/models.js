// The model that requests are for: its state, and a menu if the server has several.

import { ApiError, health, key, load, models } from "./api.js";
import { announce, byId, element } from "./dom.js";
import { counted, text } from "./texts.js";

const CHANGING = ["loading", "restarting", "unloading"];
const SECOND = 1000;
const IDLE = 15 * SECOND; // between two requests for the states of several models

/** The states of models and servers. */
const STATES = {
  ready: () => text("ready"),
  unloaded: () => text("not loaded"),
  loading: () => text("loading"),
  restarting: () => text("restarting"),
  unloading: () => text("unloading"),
  failed: () => text("failed"),
  draining: () => text("shutting down"),
  closed: () => text("closed"),
};

let listed = [];
let chosen = null;
let server = {};
let changedAt = 0; // when the chosen model began to load, in milliseconds
let timer = 0;
let listeners = {};

/** The name of the model for requests; empty until it is known. */
export const modelName = () => chosen?.id ?? "";

const stateOf = (model) => model.state ?? server.status;
const isManaged = () => listed.some(({ state }) => state);
const isChanging = () => listed.some((model) => CHANGING.includes(stateOf(model)));

/** Set up the menu. `onmodel` receives a model when it is chosen or known; `onkey` is called if a key is needed. */
export function openModels({ onmodel, onkey }) {
  listeners = { onmodel, onkey };
  byId("model").addEventListener("change", () => {
    choose(listed.find(({ id }) => id === byId("model").value));
    draw();
  });
  byId("load-model").addEventListener("click", loadChosen);
  document.addEventListener("visibilitychange", watch);
  connect();
}

/** Get the models and their states from the server, and show them. */
export async function connect() {
  try {
    server = await health();
    listed = (await models()).filter(({ id, root, parent }) => id === root || parent !== null); // without aliases
    choose(listed.find(({ id }) => id === modelName()) ?? listed[0]);
    draw();
  } catch (error) {
    if (error.status === 401) {
      listeners.onkey();
      showStatus("down", text(key() ? "API key rejected" : "API key required"));
    } else showStatus("down", text("Server unreachable"));
  }
  watch();
}

/** Get the states of several models, of which a request may load one. */
export function refreshModels() {
  if (isManaged()) connect();
}

/** Show the state in another language. */
export function translateModels() {
  if (chosen) draw();
}

function watch() {
  clearTimeout(timer);
  const isShown = document.visibilityState === "visible";
  if (isShown && (isManaged() || isChanging())) timer = setTimeout(connect, isChanging() ? SECOND : IDLE);
}

function choose(model) {
  const isNew = JSON.stringify(cardOf(model)) !== JSON.stringify(cardOf(chosen));
  const isLoading = stateOf(model) === "loading";
  if (!isLoading) changedAt = 0;
  else if (isNew || !changedAt) changedAt = performance.now();
  chosen = model;
  if (isNew) listeners.onmodel(model);
}

/** What is shown of a model besides its state. */
const cardOf = (model) =>
  model && [model.id, model.description, model.example_prompts, model.generation_config];

async function loadChosen() {
  const name = modelName();
  showProblem("");
  setTimeout(connect, SECOND / 4); // shows that it is being loaded
  try {
    await load(name);
    announce(text("{name} is ready.", { name }));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    showProblem(error.message);
  }
  await connect();
}

function draw() {
  const state = stateOf(chosen);
  drawMenu();
  byId("load-model").hidden = !["unloaded", "failed"].includes(chosen.state);
  byId("load-progress").hidden = state !== "loading";
  if (state === "ready") showProblem("");
  const shown = STATES[state]();
  const length = chosen.max_model_len ?? server.max_model_len;
  const ready = length ? text("up to {tokens}", { tokens: counted(length, "token") }) : shown;
  const status = state === "ready" ? ready : shown;
  showStatus(state, listed.length > 1 ? status : `${chosen.id} · ${status}`);
}

function drawMenu() {
  const menu = byId("model");
  menu.parentElement.hidden = listed.length < 2;
  if (menu.length !== listed.length) menu.replaceChildren(...listed.map(({ id }) => element("option", { value: id })));
  listed.forEach((model, index) => {
    const option = menu.options[index];
    option.value = model.id;
    const label = `${model.id} · ${STATES[stateOf(model)]()}`;
    if (option.text !== label) option.text = label; // an open menu is not drawn again without a change
  });
  menu.value = chosen.id;
}

/** The time is not announced, because it changes every second. */
function showStatus(state, shown) {
  const seconds = changedAt && Math.round((performance.now() - changedAt) / SECOND);
  byId("server-status").dataset.state = state;
  if (byId("server-status-text").textContent !== shown) byId("server-status-text").textContent = shown;
  byId("load-time").textContent = state === "loading" && seconds ? `${seconds} s` : "";
}

function showProblem(problem) {
  byId("model-problem").textContent = problem;
}
