// Images, videos and documents of a prompt, and their previews as the model sees them.

import { ApiError, preview as fetchPreview } from "./api.js";
import { button, byId, closable, element } from "./dom.js";
import { modelName } from "./models.js";
import { counted, text } from "./texts.js";

const VIDEO = /\.(mp4|m4v|mov|mkv|webm|avi|ts)$/i;
const DOCUMENT = /\.pdf$/i;
const KINDS = { image: () => text("image"), video: () => text("video"), document: () => "PDF" };
const names = new Set();

/** An image, a video or a document. Dispatches `change` when its preview or error changes. */
export class Attachment extends EventTarget {
  #requests = 0; // of previews: other pages or another model may be chosen before a response

  constructor({ kind, name, url, file = null, pages = "" }) {
    super();
    Object.assign(this, { kind, name: printable(name), url, file, pages });
    this.previews = null; // until they are known: one; of a document, one for each page; none if unsupported
    this.error = "";
    this.loadPreview();
  }

  /** Create an attachment from a file; null if it is not an image, a video or a document. */
  static async fromFile(file) {
    const kind = file.type === "application/pdf" ? "document" : file.type.split("/")[0];
    if (!["image", "video", "document"].includes(kind)) return null;
    return new Attachment({
      kind,
      name: unique(file.name || `pasted.${file.type.split("/")[1]}`),
      url: await dataUrl(file),
      file,
    });
  }

  static fromUrl(url, kind = kindOf(new URL(url).pathname)) {
    return new Attachment({ kind, name: new URL(url).pathname.split("/").pop() || new URL(url).host, url });
  }

  /** What is stored of an attachment: a file is stored with its content. */
  record() {
    return { kind: this.kind, name: this.name, url: this.url, type: this.file && this.file.type, pages: this.pages };
  }

  static fromRecord({ kind, name, url, type, pages }) {
    names.add(printable(name));
    return new Attachment({ kind, name, url, file: type && fileFromDataUrl(url, name, type), pages });
  }

  /** The content part of a message; `url` replaces its own URL. */
  part(url = this.url) {
    if (this.kind === "document") {
      const pages = this.pages ? { pages: this.pages } : {};
      return { type: "file", file: { [this.file ? "file_data" : "file_url"]: url, ...pages } };
    }
    const type = `${this.kind}_url`;
    return { type, [type]: { url } };
  }

  /** Request the preview from the server. */
  async loadPreview() {
    this.model = modelName(); // empty until it is known: the server uses its first one
    const number = (this.#requests += 1);
    this.#change(null, "");
    const model = this.model ? { model: this.model } : {};
    try {
      const result = await fetchPreview({ ...model, messages: [{ role: "user", content: [this.part()] }] });
      if (number === this.#requests) this.#change(result?.data ?? [], "");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (number === this.#requests) this.#change([], error.message);
    }
  }

  /** Choose pages of a document, such as "1-3,7"; all if empty. */
  choosePages(pages) {
    this.pages = pages.trim();
    this.loadPreview();
  }

  get preview() {
    return this.previews?.[0] ?? null;
  }

  get tokens() {
    return (this.previews ?? []).reduce((sum, { tokens }) => sum + tokens, 0);
  }

  /** URL of a thumbnail; null for a video without a preview. */
  get thumbnail() {
    return this.preview?.frames[0]?.url ?? (this.kind === "image" && this.file ? this.url : null);
  }

  #change(previews, error) {
    Object.assign(this, { previews, error });
    this.dispatchEvent(new Event("change"));
  }
}

/** A list item that shows an attachment and follows its changes; with `onremove`, it has a Remove button. */
export function tile(attachment, onremove = null) {
  const item = element("li", { class: "tile" });
  const draw = () => {
    item.classList.toggle("failed", attachment.error !== "");
    item.setAttribute("aria-busy", String(!attachment.previews));
    const focused = item.contains(document.activeElement) && document.activeElement.className;
    item.replaceChildren(
      element(
        "button",
        {
          type: "button",
          class: "preview",
          onclick: () => (attachment.error ? attachment.loadPreview() : showFrames(attachment)),
        },
        attachment.thumbnail
          ? element("img", { src: attachment.thumbnail, alt: "" })
          : element("span", { class: "no-image", "aria-hidden": "true" }, KINDS[attachment.kind]()),
        element(
          "span",
          { class: "hidden" },
          text(attachment.error ? "Retry the preview of {name}" : "Preview of {name}", attachment),
        ),
      ),
      element("span", { class: "tile-name", title: attachment.name }, attachment.name),
      element("span", { class: "tile-cost" }, cost(attachment)),
      ...(onremove && attachment.kind === "document" ? [pagesField(attachment)] : []),
      ...(onremove ? [removeButton(attachment, onremove)] : []),
    );
    if (focused) item.querySelector(`.${focused}`)?.focus();
  };
  attachment.addEventListener("change", draw);
  draw();
  return item;
}

function cost(attachment) {
  if (attachment.error) return attachment.error;
  if (!attachment.previews) return text("loading…");
  if (!attachment.preview) return "";
  if (attachment.kind === "document") {
    return `${counted(attachment.tokens, "token")} · ${counted(attachment.previews.length, "page")}`;
  }
  const { tokens, size, kind, frame_count: frames } = attachment.preview;
  const parts = [counted(tokens, "token"), size.join("×"), ...(kind === "video" ? [counted(frames, "frame")] : [])];
  return parts.join(" · ");
}

const removeButton = (attachment, onremove) =>
  button("×", onremove, { class: "remove", "aria-label": text("Remove {name}", attachment) });

function pagesField(attachment) {
  return element("input", {
    class: "pages",
    value: attachment.pages,
    placeholder: text("All pages"),
    "aria-label": text("Pages of {name}, such as 1-3,7", attachment),
    onchange: (event) => attachment.choosePages(event.target.value),
  });
}

/** The dialog with the frames that the model sees. */
export function openFrames() {
  closable(byId("frames-dialog"));
  byId("frames-grid").addEventListener("change", () =>
    byId("frames").classList.toggle("plain", !byId("frames-grid").checked),
  );
}

function showFrames({ name, preview, previews }) {
  if (!preview) return;
  byId("frames-title").textContent = text("{name} as the model sees it", { name });
  byId("frames-facts").textContent = describe(preview);
  byId("frames").replaceChildren(
    ...previews.flatMap((each) => each.frames.map((frame) => figure(frame, each))),
  );
  byId("frames-dialog").showModal();
}

function describe({ kind, source_size, size, cells: [time, rows, columns], tokens, frame_count: count, frames }) {
  const [original, pixels] = [source_size ?? size, size].map((sides) => sides.join("×"));
  const resized = original === pixels ? "{original} pixels" : "{original} pixels, resized to {pixels}";
  const cells = `${time > 1 ? `${time} × ` : ""}${columns} × ${rows}`;
  const parts = [
    `${text(resized, { original, pixels })}: ${text("{cells} cells", { cells })}, ${counted(tokens, "token")}`,
    ...(kind === "video" ? [text("{shared} frames share each token", { shared: count / time })] : []),
    ...(frames.length < count ? [text("{shown} of {count} frames are shown", { shown: frames.length, count })] : []),
  ];
  return `${parts.join("; ")}.`;
}

function figure({ index, url }, { kind, size: [width, height], cells: [, rows, columns] }) {
  const caption = text("Frame {number}", { number: index + 1 });
  const image = element(
    "span",
    { class: "cells" },
    element("img", { src: url, width, height, alt: kind === "video" ? caption : text("The image") }),
  );
  image.style.setProperty("--columns", columns);
  image.style.setProperty("--rows", rows);
  return element("figure", {}, image, kind === "video" ? element("figcaption", {}, caption) : null);
}

function kindOf(path) {
  if (DOCUMENT.test(path)) return "document";
  return VIDEO.test(path) ? "video" : "image";
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function fileFromDataUrl(url, name, type) {
  const bytes = Uint8Array.from(atob(url.slice(url.indexOf(",") + 1)), (character) => character.charCodeAt(0));
  return new File([bytes], name, { type });
}

/** A file name without control characters: in generated code, a line break would end the text that contains it. */
const printable = (name) => name.replace(/\p{Cc}/gu, "_");

/** Make a file name unique, because generated code refers to files by name. */
function unique(original) {
  const name = printable(original);
  const [, stem, ending] = /^(.*?)(\.[^.]*)?$/.exec(name);
  let candidate = name;
  for (let number = 2; names.has(candidate); number += 1) candidate = `${stem}-${number}${ending ?? ""}`;
  names.add(candidate);
  return candidate;
}
