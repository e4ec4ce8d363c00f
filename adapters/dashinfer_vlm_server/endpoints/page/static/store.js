// Conversations that are kept in this browser, in an IndexedDB database. The server does not receive or store them.

import { byId } from "./dom.js";
import { text } from "./texts.js";

const MAX_CONVERSATIONS = 100;
const OFF = "dashinfer-vlm-no-history";
const STORES = ["summaries", "conversations"]; // separate, so that the list can be shown without loading images

const databaseName = () => `dashinfer-vlm ${new URL(".", document.baseURI).pathname}`;

/** Whether conversations are kept. */
export const isKept = () => localStorage.getItem(OFF) === null;

export function keep(isWanted) {
  if (isWanted) localStorage.removeItem(OFF);
  else localStorage.setItem(OFF, "true");
}

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

/** What the list shows, and the text in which it is searched. */
function summaryOf({ id, title, updated, exchanges }) {
  const parts = exchanges.flatMap((exchange) => [
    exchange.text,
    exchange.response,
    ...exchange.attachments.map(({ name }) => name),
  ]);
  return { id, title, updated, count: exchanges.length, text: [title, ...parts].join("\n") };
}

/** Store a conversation `{ id, title, updated, exchanges }`, and delete the oldest ones above the limit. */
export async function save(conversation) {
  if (!isKept()) return;
  setBusy(1);
  try {
    await transact("readwrite", async (summaries, conversations) => {
      summaries.put(summaryOf(conversation));
      conversations.put(conversation);
      const all = newestFirst(await settled(summaries.getAll()));
      for (const old of all.slice(MAX_CONVERSATIONS)) {
        summaries.delete(old.id);
        conversations.delete(old.id);
      }
    });
    showProblem("");
  } catch (error) {
    const reason = error?.message ?? text("the browser has no space left");
    showProblem(text("The conversation was not stored: {reason}.", { reason }));
  } finally {
    setBusy(-1);
  }
}

/** Store imported conversations, all or none. Those that are already stored are replaced. */
export async function saveAll(imported) {
  await transact("readwrite", async (summaries, conversations) => {
    const ids = new Set([...(await settled(summaries.getAllKeys())), ...imported.map(({ id }) => id)]);
    if (ids.size > MAX_CONVERSATIONS) throw new Error(tooMany(ids.size - MAX_CONVERSATIONS));
    for (const conversation of imported) {
      summaries.put(summaryOf(conversation));
      conversations.put(conversation);
    }
  });
}

const tooMany = (excess) =>
  text("The history holds {limit} conversations. Delete {excess} first.", { limit: MAX_CONVERSATIONS, excess });

let pendingSaves = 0;

function setBusy(change) {
  pendingSaves += change;
  byId("show-history").setAttribute("aria-busy", String(pendingSaves > 0));
}

const newestFirst = (summaries) => summaries.sort((one, other) => other.updated - one.updated);

/** The summaries of all conversations, newest first. */
export const list = () =>
  transact("readwrite", async (summaries, conversations) => {
    const all = newestFirst(await settled(summaries.getAll()));
    for (const [index, { id, text: searched }] of all.entries()) {
      if (searched !== undefined) continue; // of an earlier version of the page
      all[index] = summaryOf(await settled(conversations.get(id)));
      summaries.put(all[index]);
    }
    return all;
  });

/** A stored conversation; undefined if it was deleted. */
export const load = (id) => transact("readonly", (_, conversations) => settled(conversations.get(id)));

export const remove = (id) =>
  transact("readwrite", async (summaries, conversations) => {
    summaries.delete(id);
    conversations.delete(id);
  });

export const clear = () =>
  transact("readwrite", async (summaries, conversations) => {
    summaries.clear();
    conversations.clear();
  });

/** Show why conversations cannot be stored or read. */
export function showProblem(problem) {
  byId("history-problem").textContent = problem;
}
