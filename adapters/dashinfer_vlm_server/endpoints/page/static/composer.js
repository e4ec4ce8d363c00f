// The composer: a prompt with images, videos and documents, which are dropped, pasted, chosen, or taken with a camera.

import { openCapture } from "./capture.js";
import { byId, closable } from "./dom.js";
import { Attachment, tile } from "./media.js";
import { modelName } from "./models.js";
import { counted, text } from "./texts.js";

const promptInput = byId("prompt");
let attachments = [];
let onchange = null;

/** Set up the composer. `onsubmit` is called for a prompt, `onattachments` when there are others. */
export function openComposer({ onsubmit, onattachments }) {
  onchange = onattachments;
  const submit = (event) => {
    event.preventDefault();
    if (promptInput.value.trim() || attachments.length) onsubmit();
    else promptInput.focus();
  };
  byId("composer").addEventListener("submit", submit);
  promptInput.addEventListener("input", resizePrompt);
  promptInput.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  byId("choose").addEventListener("click", () => byId("files").click());
  byId("files").addEventListener("change", () => {
    addFiles([...byId("files").files]);
    byId("files").value = "";
  });
  byId("use-sample").addEventListener("click", useSample);
  openCapture({ onfile: (file) => addFiles([file]), onproblem: showProblem });
  listenToUrlDialog();
  listenForDrops();
}

/** The prompt and its attachments. */
export const draft = () => ({ text: promptInput.value.trim(), attachments });

export const isEmpty = () => !promptInput.value.trim() && !attachments.length;

/** Replace the prompt and its attachments; attachments that stay keep their tiles. */
export function setDraft(prompt, files = attachments) {
  promptInput.value = prompt;
  resizePrompt();
  setAttachments(files);
  showProblem("");
}

export const focusPrompt = () => promptInput.focus();

/** Use a prompt, and keep the attachments. */
export function usePrompt(prompt) {
  promptInput.value = prompt;
  resizePrompt();
  promptInput.focus();
}

/** Request the previews of another model again. */
export function reloadPreviews() {
  for (const attachment of attachments)
    if (attachment.model && attachment.model !== modelName()) attachment.loadPreview();
}

/** Show the attachments in another language. */
export function translateComposer() {
  for (const attachment of attachments) attachment.dispatchEvent(new Event("change"));
  drawMediaSummary();
  showProblem("");
}

function resizePrompt() {
  promptInput.rows = Math.min(8, promptInput.value.split("\n").length);
}

function showProblem(problem) {
  byId("file-error").textContent = problem;
}

async function addFiles(files) {
  const rejected = [];
  for (const file of files) {
    const attachment = await Attachment.fromFile(file);
    if (attachment) add(attachment);
    else rejected.push(file.name);
  }
  const use = text("Add PNG, JPEG, WebP, GIF, BMP, TIFF, video or PDF files, and copy text into the prompt.");
  const reason =
    rejected.length === 1
      ? text("{names} is not an image, a video or a PDF.", { names: rejected[0] })
      : text("{names} are not images, videos or PDFs.", { names: rejected.join(", ") });
  showProblem(rejected.length ? `${reason} ${use}` : "");
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

function setAttachments(updated) {
  const tiles = new Map(attachments.map((attachment, index) => [attachment, byId("attachments").children[index]]));
  attachments = updated;
  for (const attachment of attachments) attachment.addEventListener("change", drawMediaSummary);
  byId("attachments").replaceChildren(
    ...updated.map((attachment) => tiles.get(attachment) ?? tile(attachment, () => remove(attachment))),
  );
  drawMediaSummary();
  onchange(attachments);
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
  usePrompt(promptInput.value || text("Describe the picture."));
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
