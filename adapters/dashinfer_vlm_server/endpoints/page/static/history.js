// The dialog with the stored conversations: search, open, delete, export and import.

import { announce, button, byId, closable, element } from "./dom.js";
import { exported, imported } from "./transfer.js";
import { clear, isKept, keep, list, load, remove, saveAll, showProblem } from "./store.js";
import { counted, dated, text } from "./texts.js";

let summaries = [];
let listeners = {};

/** Set up the dialog. `onopen` receives a stored conversation, `onremove` the id of a deleted one, or null for all. */
export function openHistory({ onopen, onremove }) {
  listeners = { onopen, onremove };
  const dialog = byId("history-dialog");
  closable(dialog);
  byId("show-history").addEventListener("click", async () => {
    byId("history-search").value = "";
    showStatus("");
    await update();
    dialog.showModal();
  });
  byId("history-search").addEventListener("input", draw);
  byId("history-kept").checked = isKept();
  byId("history-kept").addEventListener("change", () => keep(byId("history-kept").checked));
  byId("clear-history").addEventListener("click", deleteAll);
  byId("export-history").addEventListener("click", exportShown);
  byId("import-history").addEventListener("click", () => byId("history-file").click());
  byId("history-file").addEventListener("change", importFile);
}

async function deleteAll() {
  if (!byId("clear-history").dataset.confirmed) {
    byId("clear-history").dataset.confirmed = "true";
    byId("clear-history").textContent = text("Delete all conversations?");
    return;
  }
  await clear();
  listeners.onremove(null);
  await update();
  announce(text("All conversations were deleted."));
}

function resetDeletion() {
  delete byId("clear-history").dataset.confirmed;
  byId("clear-history").textContent = text("Delete all");
}

/** Read the list again, and show it. */
async function update() {
  resetDeletion();
  try {
    summaries = await list();
  } catch (error) {
    summaries = [];
    const reason = error?.message;
    showProblem(text("This browser does not give access to stored conversations: {reason}.", { reason }));
  }
  draw();
}

/** The conversations that contain all words of the search. */
function found() {
  const words = byId("history-search").value.toLowerCase().split(/\s+/);
  return summaries.filter((summary) => words.every((word) => summary.text.toLowerCase().includes(word)));
}

function draw() {
  const shown = found();
  const isEmpty = summaries.length === 0;
  byId("history-search").parentElement.hidden = isEmpty;
  byId("clear-history").hidden = isEmpty;
  byId("export-history").hidden = shown.length === 0;
  byId("history-list").replaceChildren(...shown.map(item));
  const count = shown.length < summaries.length ? counted(shown.length, "conversation") : "";
  byId("history-count").textContent = isEmpty ? text("No conversations.") : count;
}

function item({ id, title, updated, count }) {
  const open = async () => {
    const stored = await load(id);
    if (!stored) return update(); // deleted in another tab
    byId("history-dialog").close();
    listeners.onopen(stored);
  };
  const drop = async () => {
    await remove(id);
    listeners.onremove(id);
    await update();
    (byId("history-list").querySelector("button") ?? byId("history-kept")).focus();
  };
  return element(
    "li",
    {},
    element(
      "button",
      { type: "button", class: "history-open", onclick: open },
      element("span", { class: "history-title" }, title),
      element("span", { class: "note" }, `${dated(updated)} · ${counted(count, "prompt")}`),
    ),
    button("×", drop, { class: "remove", "aria-label": text("Delete {title}", { title }) }),
  );
}

/** Save the conversations that are shown as a file. */
async function exportShown() {
  const conversations = [];
  for (const { id } of found()) conversations.push(await load(id));
  const url = URL.createObjectURL(exported(conversations.filter(Boolean))); // without those deleted in another tab
  element("a", { href: url, download: "conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
  showStatus(text("Exported: {conversations}.", { conversations: counted(conversations.length, "conversation") }));
}

async function importFile() {
  const [file] = byId("history-file").files;
  byId("history-file").value = "";
  showProblem("");
  try {
    const conversations = imported(await file.text());
    await saveAll(conversations);
    showStatus(text("Imported: {conversations}.", { conversations: counted(conversations.length, "conversation") }));
  } catch (error) {
    showStatus("");
    showProblem(`${file.name}: ${error.message}`);
  }
  await update();
}

function showStatus(status) {
  byId("history-status").textContent = status;
}
