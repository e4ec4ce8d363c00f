// Conversations that are kept in this browser, in an IndexedDB database. The server does not receive or store them.

import { announce, button, byId, closable, counted, element } from "./dom.js";

const MAX_CONVERSATIONS = 100;
const OFF = "dashinfer-vlm-no-history";
const STORES = ["summaries", "conversations"]; // separate, so that the list can be shown without loading images

const databaseName = () => `dashinfer-vlm ${new URL(".", document.baseURI).pathname}`;

/** Whether conversations are kept. */
export const isKept = () => localStorage.getItem(OFF) === null;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

let connection = null; // a promise of the open database

async function openDatabase() {
  const request = indexedDB.open(databaseName(), 1);
  request.onupgradeneeded = () => {
    for (const name of STORES) request.result.createObjectStore(name, { keyPath: "id" });
  };
  try {
    const database = await settled(request);
    database.onclose = () => (connection = null);
    return database;
  } catch (error) {
    connection = null;
    throw error;
  }
}

/** Run `work` with the two stores in one transaction, and return its result once everything is stored. */
async function transact(mode, work) {
  connection ??= openDatabase();
  const database = await connection;
  const transaction = database.transaction(STORES, mode);
  const completed = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  completed.catch(() => {}); // if `work` fails too, its error is reported
  const result = await work(...STORES.map((name) => transaction.objectStore(name)));
  await completed;
  return result;
}

/** Store a conversation `{ id, title, updated, exchanges }`, and delete the oldest ones above the limit. */
export async function save(conversation) {
  if (!isKept()) return;
  const { id, title, updated, exchanges } = conversation;
  setBusy(1);
  try {
    await transact("readwrite", async (summaries, conversations) => {
      summaries.put({ id, title, updated, count: exchanges.length });
      conversations.put(conversation);
      const all = newestFirst(await settled(summaries.getAll()));
      for (const old of all.slice(MAX_CONVERSATIONS)) {
        summaries.delete(old.id);
        conversations.delete(old.id);
      }
    });
    showProblem("");
  } catch (error) {
    showProblem(`The conversation was not stored: ${error?.message ?? "the browser has no space left"}.`);
  } finally {
    setBusy(-1);
  }
}

let pendingSaves = 0;

function setBusy(change) {
  pendingSaves += change;
  byId("show-history").setAttribute("aria-busy", String(pendingSaves > 0));
}

const newestFirst = (summaries) => summaries.sort((one, other) => other.updated - one.updated);

const list = () => transact("readonly", async (summaries) => newestFirst(await settled(summaries.getAll())));

const load = (id) => transact("readonly", (_, conversations) => settled(conversations.get(id)));

const remove = (id) =>
  transact("readwrite", async (summaries, conversations) => {
    summaries.delete(id);
    conversations.delete(id);
  });

const clear = () =>
  transact("readwrite", async (summaries, conversations) => {
    summaries.clear();
    conversations.clear();
  });

/** Set up the dialog. `onopen` receives a stored conversation, `onremove` the id of a deleted one, or null for all. */
export function openHistory({ onopen, onremove }) {
  const dialog = byId("history-dialog");
  closable(dialog);
  byId("show-history").addEventListener("click", async () => {
    resetDeletion();
    await draw(onopen, onremove);
    dialog.showModal();
  });
  byId("history-kept").checked = isKept();
  byId("history-kept").addEventListener("change", () => {
    if (byId("history-kept").checked) localStorage.removeItem(OFF);
    else localStorage.setItem(OFF, "true");
  });
  byId("clear-history").addEventListener("click", async () => {
    if (!byId("clear-history").dataset.confirmed) {
      byId("clear-history").dataset.confirmed = "true";
      byId("clear-history").textContent = "Delete all conversations?";
      return;
    }
    await clear();
    onremove(null);
    resetDeletion();
    await draw(onopen, onremove);
    announce("All conversations were deleted.");
  });
}

function resetDeletion() {
  delete byId("clear-history").dataset.confirmed;
  byId("clear-history").textContent = "Delete all";
}

async function draw(onopen, onremove) {
  let summaries = [];
  try {
    summaries = await list();
  } catch (error) {
    showProblem(`This browser does not give access to stored conversations: ${error?.message}.`);
  }
  byId("history-empty").hidden = summaries.length > 0;
  byId("clear-history").hidden = summaries.length === 0;
  byId("history-list").replaceChildren(...summaries.map((summary) => item(summary, onopen, onremove)));
}

function item({ id, title, updated, count }, onopen, onremove) {
  const open = async () => {
    const stored = await load(id);
    if (!stored) return draw(onopen, onremove); // deleted in another tab
    byId("history-dialog").close();
    onopen(stored);
  };
  const drop = async () => {
    await remove(id);
    onremove(id);
    await draw(onopen, onremove);
    (byId("history-list").querySelector("button") ?? byId("history-kept")).focus();
  };
  const when = new Date(updated).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
  return element(
    "li",
    {},
    element(
      "button",
      { type: "button", class: "history-open", onclick: open },
      element("span", { class: "history-title" }, title),
      element("span", { class: "note" }, `${when} · ${counted(count, "prompt")}`),
    ),
    button("×", drop, { class: "remove", "aria-label": `Delete ${title}` }),
  );
}

function showProblem(text) {
  byId("history-problem").textContent = text;
}
