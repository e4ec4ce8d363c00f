// The page: a question is made below, asked, and joins the conversation above.

import { health, key, model } from "./api.js";
import { copy, openCode, showCode, urlInCode } from "./code.js";
import { Turn } from "./conversation.js";
import { announce, byId, closable, counted } from "./dom.js";
import { Attachment, openFrames, tile } from "./media.js";
import { invalidField, openSettings, options, systemMessages } from "./settings.js";

const question = byId("question");
const conversation = byId("conversation");
let turns = [];
let attachments = [];
let served = "";

// Asking

function requestOf(turn, earlier, urlOf) {
  const messages = [...systemMessages(), ...earlier.flatMap((other) => other.history(urlOf)), turn.message(urlOf)];
  return { model: served || "model", messages, ...options() };
}

const earlierThan = (turn) => turns.slice(0, turns.indexOf(turn));

function ask(event) {
  event?.preventDefault();
  if (running()) return;
  const text = question.value.trim();
  if (!text && !attachments.length) {
    question.focus();
    return;
  }
  if (!settingsAreValid()) return;
  const turn = new Turn({ text, attachments });
  listen(turn);
  turns.push(turn);
  byId("turns").append(turn.element);
  question.value = "";
  grow();
  hold([]);
  start(turn);
}

function start(turn) {
  const request = requestOf(turn, earlierThan(turn));
  turn.code = requestOf(turn, earlierThan(turn), urlInCode);
  turn.ask(request);
  conversation.scrollTop = conversation.scrollHeight;
}

function listen(turn) {
  const on = (name, action) => turn.addEventListener(name, action);
  on("state", drawState);
  on("grow", () => keepUp(turn));
  on("copy", async () => {
    await copy(turn.answer, byId("announcer"), turn.body);
  });
  on("again", () => settingsAreValid() && (start(turn), question.focus()));
  on("edit", () => edit(turn));
  on("code", () => showCode(turn.code));
}

function edit(turn) {
  turns = turns.filter((other) => other !== turn);
  turn.element.remove();
  question.value = turn.text;
  hold(turn.attachments);
  drawState();
  grow();
  question.focus();
}

function settingsAreValid() {
  const field = invalidField();
  if (!field) return true;
  toggleSettings(true);
  field.focus();
  field.reportValidity();
  return false;
}

const running = () => turns.find((turn) => turn.state === "running");

function stop() {
  running()?.stop();
}

function drawState() {
  const busy = Boolean(running());
  const focused = document.activeElement;
  byId("stop").hidden = !busy;
  byId("ask").hidden = busy;
  if (busy && focused === byId("ask")) byId("stop").focus();
  if (!busy && focused === byId("stop")) question.focus();
  byId("welcome").hidden = turns.length > 0;
  turns.forEach((turn, index) => turn.element.classList.toggle("last", index === turns.length - 1));
  if (turns.at(-1)?.state === "failed") connect(); // it may have been started anew, with another model or a key
}

/** Follow an answer as it grows, unless its reader has scrolled away from its end. */
function keepUp() {
  const left = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight;
  if (left < 160) conversation.scrollTop = conversation.scrollHeight;
}

function startAnew() {
  stop();
  turns = [];
  byId("turns").replaceChildren();
  drawState();
  announce("The conversation is empty.");
  question.focus();
}

// Pictures and videos

async function addFiles(files) {
  const refused = [];
  for (const file of files) {
    const attachment = await Attachment.fromFile(file);
    if (attachment) add(attachment);
    else refused.push(file.name);
  }
  byId("refused").textContent = refused.length ? `Neither a picture nor a video: ${refused.join(", ")}` : "";
}

function add(attachment) {
  attachment.addEventListener("change", drawTally);
  hold([...attachments, attachment]);
  question.focus();
}

function remove(attachment) {
  const index = attachments.indexOf(attachment);
  hold(attachments.filter((other) => other !== attachment));
  (byId("tray").querySelectorAll(".remove")[index] ?? byId("choose")).focus();
}

/** Have these in the tray; those that stay keep their tiles. */
function hold(wanted) {
  const tiles = new Map(attachments.map((attachment, index) => [attachment, byId("tray").children[index]]));
  attachments = wanted;
  byId("tray").replaceChildren(
    ...wanted.map((attachment) => tiles.get(attachment) ?? tile(attachment, () => remove(attachment))),
  );
  drawTally();
}

function drawTally() {
  const count = (kind) => attachments.filter((attachment) => attachment.kind === kind).length;
  const kinds = [
    ["image", "picture"],
    ["video", "video"],
  ]
    .filter(([kind]) => count(kind))
    .map(([kind, noun]) => counted(count(kind), noun));
  const known = attachments.every((attachment) => attachment.seen);
  const tokens = attachments.reduce((sum, attachment) => sum + attachment.tokens, 0);
  byId("tally").textContent = kinds.length ? [...kinds, ...(known ? [counted(tokens, "token")] : [])].join(" · ") : "";
}

async function useSample() {
  const picture = await (await fetch("page/sample.png")).blob();
  await addFiles([new File([picture], "sample.png", { type: picture.type })]);
  question.value ||= "Describe the picture.";
  grow();
}

function openDrop() {
  let depth = 0; // dragenter and dragleave come for each element that is crossed
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

function grow() {
  question.rows = Math.min(8, question.value.split("\n").length);
}

function toggleSettings(open = !document.body.classList.contains("with-settings")) {
  document.body.classList.toggle("with-settings", open);
  byId("toggle-settings").setAttribute("aria-expanded", String(open));
}

function askForKey() {
  byId("key-field").hidden = false;
  toggleSettings(true);
  byId("key").focus();
}

async function connect() {
  try {
    const { status, decoder, max_model_len: length } = await health();
    served = await model();
    tell(
      status === "ready" ? "ready" : "down",
      status === "ready" ? `${served} · ${decoder} · ${length.toLocaleString("en")} tokens` : `${served} is ${status}`,
    );
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      tell("down", "An API key is needed");
    } else tell("down", "Not reachable");
  }
}

function tell(state, text) {
  byId("served").dataset.state = state;
  byId("served-text").textContent = text;
}

function openQuestion() {
  byId("composer").addEventListener("submit", ask);
  byId("stop").addEventListener("click", stop);
  question.addEventListener("input", grow);
  question.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) ask(event);
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  });
  byId("choose").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", () => {
    addFiles([...byId("files").files]);
    byId("files").value = "";
  });
  byId("use-sample").addEventListener("click", useSample);
}

function openUrl() {
  const dialog = byId("url-dialog");
  closable(dialog);
  byId("add-url").addEventListener("click", () => dialog.showModal());
  byId("url-form").addEventListener("submit", () => {
    add(Attachment.fromUrl(byId("url").value, new FormData(byId("url-form")).get("kind")));
    byId("url-form").reset();
  });
}

function openBar() {
  byId("new-chat").addEventListener("click", startAnew);
  byId("toggle-settings").addEventListener("click", () => toggleSettings());
  byId("show-code").addEventListener("click", () => {
    if (settingsAreValid()) showCode(draft());
  });
  byId("key").value = key();
  byId("key-field").hidden = !key();
  byId("key").addEventListener("change", connect);
}

/** What would be asked now; before a question is written, what was asked last. */
function draft() {
  const text = question.value.trim();
  if (!text && !attachments.length && turns.length) return turns.at(-1).code;
  return requestOf(new Turn({ text: text || "Hello!", attachments }), turns, urlInCode);
}

openSettings();
openFrames();
openCode();
openUrl();
openBar();
openQuestion();
openDrop();
toggleSettings(matchMedia("(min-width: 64rem)").matches);
connect();
question.focus();
